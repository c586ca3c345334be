"""Shared by the tests of FP8: a second implementation of the scheme, dense and slow, and its data.

One (batch, head) at a time, matrices (tokens, channels), all scores in memory, fp64 but for the
casts; nothing of cute_attn is used. Roundings fall where fwd's do, except that P refers to its
row's largest score and not to the largest so far.
"""

import math

import torch

E4M3 = torch.float8_e4m3fn


def round8(x):
    return x.clamp(-448, 448).to(E4M3).double()


def cast(x, amax):
    scale = amax.float().double() / 448
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return round8((x / scale).float()) * scale


def hadamard(dim):
    """Orthonormal; block-diagonal where dim is no power of two."""
    if dim & (dim - 1):
        first = 1 << (dim.bit_length() - 1)
        return torch.block_diag(hadamard(first), hadamard(dim - first))
    rows = torch.arange(dim)
    both = rows[:, None] & rows
    parity = sum((both >> bit) & 1 for bit in range(9)) % 2
    return (1 - 2 * parity).double() / math.sqrt(dim)


def block_amax(k, block):
    """(tokens, 1)"""
    return torch.cat([part.abs().max().expand(len(part), 1) for part in k.split(block)])


def head(q, k, v, *, hp=False, rotation=True, smooth=True, block=128, causal=False, scale=None):
    """Q per token, K per block, V per head; smooth: means and rebalance. out of one head."""
    dtype = v.dtype
    q, k, v = q.double(), k.double(), v.double()
    scale = q.shape[1] ** -0.5 if scale is None else scale
    mean_v = v.mean(0) if smooth else torch.zeros(v.shape[1], dtype=torch.float64)
    v = v - mean_v
    if smooth:
        k = k - k.mean(0)
        s = (k.square().mean(0) / q.square().mean(0)).pow(0.25).log2().round().exp2()
        q, k = q * s, k / s
    if rotation:
        g = torch.Generator().manual_seed(99)
        H = torch.randn(q.shape[1], generator=g, dtype=torch.float64).sign()[:, None]
        H = H * hadamard(q.shape[1])
        q, k = q @ H, k @ H
    q = cast(q, q.abs().amax(1, keepdim=True))
    k = cast(k, block_amax(k, block))
    v = v.to(dtype).double() if hp else cast(v, v.abs().max())
    S = (q @ k.T) * scale
    if causal:
        visible = torch.ones(S.shape, dtype=torch.bool).tril(S.shape[1] - S.shape[0])
        S = S.masked_fill(~visible, -math.inf)
    P = torch.exp(S - S.amax(1, keepdim=True))
    rounded = P.to(dtype).double() if hp else round8((P * 256).float()) / 256
    return rounded @ v / P.sum(1, keepdim=True) + mean_v


def attention(q, k, v, **options):
    """(batch, seqlen, nheads, dim) tensors with as many heads of k and v as of q."""
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            out[b, :, h] = head(q[b, :, h], k[b, :, h], v[b, :, h], **options)
    return out


# Data


def fa3(shape, g):
    """FlashAttention-3's experiment: N(0,1) + N(0,100) * Bernoulli(0.001)."""
    hit = torch.rand(shape, generator=g) < 0.001
    return torch.randn(shape, generator=g) + 10 * torch.randn(shape, generator=g) * hit


def data(kind, seqlen, dim=128, heads=2, seed=0, rows=None):
    """bf16 q, k, v of one sequence; rows: of q. kbias: 4 channels of K around +-10 to 50, of each
    head. qkbias: also Q's, around 0.2 times that. kzero: those of K 10 to 50 times as wide, of Q a
    tenth. vbias: as kbias, of V. sink: 4 keys that score 9 more."""
    g = torch.Generator().manual_seed(1000 * seed + dim)
    shape = (1, seqlen, heads, dim)
    draw = fa3 if kind == "fa3" else lambda s, g: torch.randn(s, generator=g)
    q, k, v = (draw(shape, g) for _ in range(3))
    for h in range(heads):
        channels = torch.randperm(dim, generator=g)[:4]
        sizes = torch.tensor([10.0, 20.0, 30.0, 50.0])
        signs = torch.randint(0, 2, (4,), generator=g) * 2 - 1
        if kind in ("kbias", "qkbias"):
            k[:, :, h, channels] += sizes * signs
        if kind == "qkbias":
            q[:, :, h, channels] += 0.2 * sizes * signs
        if kind == "kzero":
            k[:, :, h, channels] *= sizes
            q[:, :, h, channels] *= 0.1
        if kind == "vbias":
            v[:, :, h, channels] += sizes * signs
    if kind == "sink":
        q[..., 0], k[..., 0] = 4.0, 0.0
        k[:, :4] *= 0.1
        k[:, :4, :, 0] = 9 * math.sqrt(dim) / 4
        v[:, :4] *= 0.05
    q = q[:, : rows or seqlen]
    return tuple(t.bfloat16() for t in (q, k, v))


def rmse(out, want):
    return (out.double() - want).square().mean().sqrt().item()


def relative(out, want):
    return ((out.double() - want).norm() / want.norm()).item()
