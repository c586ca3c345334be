"""Shared by the tests of the backward: how far from the oracle a gradient may be, and inputs."""

import math

import torch
from helpers import BF16, FP16, close, rand, score_error

import cute_attn
from cute_attn.reference_backward import attention_backward

SUMS = 2.0**-20  # what fp32 loses in a sum, of the sum of its terms' sizes: a few roundings
EXP = 2.0**-17  # relative error of exp and of the sum in LSE
TINY = 2.0**-25  # half the smallest fp16: the absolute error of rounding to it
FLUSH = 2.0**-126  # the smallest normal fp32 and bf16: what may be flushed to 0


def run(q, k, v, dout=None, *, with_dlse=False, **options):
    """fwd, then bwd, checked against the oracle: (dq, dk, dv)."""
    out, lse = cute_attn.fwd(q, k, v, return_lse=True, **options)
    if dout is None:
        dout = rand(tuple(out.shape), q.dtype, q.device, seed=9)
    dlse = rand(tuple(lse.shape), torch.float32, q.device, seed=8) if with_dlse else None
    got = cute_attn.bwd(dout, q, k, v, out, lse, dlse=dlse, **options)
    check(got, dout, q, k, v, dlse=dlse, **options)
    return got


def check(got, dout, q, k, v, *, causal=False, softmax_scale=None, dlse=None):
    """Each gradient contiguous, in its input's dtype, and within the error of its arithmetic."""
    options = {"causal": causal, "softmax_scale": softmax_scale, "dlse": dlse}
    want = attention_backward(dout, q, k, v, **options)
    tolerance = tolerances(dout, q, k, v, want, **options)
    for name, t, g, w, allowed in zip(("dq", "dk", "dv"), (q, k, v), got, want, tolerance):
        assert g.dtype == t.dtype and g.device == t.device and g.is_contiguous(), name
        close(g, w, allowed, name)


def tolerances(dout, q, k, v, want, *, causal, softmax_scale, dlse):
    """What the arithmetic explains, per element of dq, dk and dv: every step's error bound, put
    through the formulas of reference_backward.py with all terms taken positive.

    out is saved rounded, D and dP = dO V^T are sums in fp32, P comes from scores and an LSE in
    fp32, the results are rounded once; a kernel also rounds P and dS to the inputs' dtype.
    """
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    group, unit = q.shape[2] // k.shape[2], torch.finfo(q.dtype).eps / 2
    tile = unit if q.is_cuda else 0.0  # P and dS as operands
    tiny = TINY if q.dtype == FP16 else FLUSH
    drift = score_error(q, k, softmax_scale).transpose(1, 2).unsqueeze(-1)
    Q, dO = (t.double().transpose(1, 2) for t in (q, dout))  # (b, h, s, d)
    K, V = (t.double().transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
    P, lse = _weights(Q, K, scale, causal)
    w = torch.expm1((EXP + 2 * drift + 2.0**-21 * lse.abs()).clamp(max=1.0))  # relative, of P
    out, size = P @ V, P @ V.abs()
    D = (dO * out).sum(-1, keepdim=True)
    if dlse is not None:
        D = D - dlse.double().unsqueeze(-1)
    error_out = unit * out.abs() + (w + tile) * size + tiny
    error_D = (dO.abs() * error_out).sum(-1, keepdim=True)
    error_D += SUMS * ((dO * out).abs().sum(-1, keepdim=True) + D.abs())
    error_dP = SUMS * (dO.norm(dim=-1, keepdim=True) * V.norm(dim=-1).unsqueeze(-2))
    gap = (dO @ V.mT - D).abs()
    error_P = P * w + FLUSH
    error_dS = error_P * gap + (P + error_P) * (error_D + error_dP)
    error_dS += P * gap * (tile + SUMS) + (tiny if tile else FLUSH)  # as an operand of dQ and dK
    error_P += P * (tile + SUMS) + (tiny if tile else FLUSH)  # as an operand of dV
    errors = (
        abs(scale) * (error_dS @ K.abs()),
        abs(scale) * (error_dS.mT @ Q.abs()).unflatten(1, (-1, group)).sum(2),
        (error_P.mT @ dO.abs()).unflatten(1, (-1, group)).sum(2),
    )
    return [e.transpose(1, 2) + 1.01 * unit * x.abs() + tiny for e, x in zip(errors, want)]


def _weights(Q, K, scale, causal):
    """P (b, h, sq, sk) and LSE (b, h, sq, 1), 0 where a row sees no key."""
    S = scale * (Q @ K.mT)
    if causal:
        visible = torch.ones(S.shape[2:], dtype=torch.bool, device=S.device)
        S = S.masked_fill(~visible.tril(S.shape[3] - S.shape[2]), -math.inf)
    lse = torch.logsumexp(S, -1, keepdim=True) if S.shape[3] else S.new_zeros(*S.shape[:3], 1)
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    return torch.exp(S - lse), lse


def dout_views(device, b=2, s=130, h=4, d=64):
    """name -> dout as autograd and models pass it; sum().backward() gives stride 0 everywhere."""
    options = {"dtype": BF16, "device": device}
    one = rand((1,), **options)
    return {
        "all strides 0": one.expand(b, s, h, d),
        "expanded batch": rand((1, s, h, d), **options).expand(b, s, h, d),
        "expanded sequence": rand((b, 1, h, d), **options).expand(b, s, h, d),
        "expanded heads": rand((b, s, 1, d), **options).expand(b, s, h, d),
        "expanded head_dim": rand((b, s, h, 1), **options).expand(b, s, h, d),
        "transposed": rand((b, h, s, d), **options).transpose(1, 2),
        "columns of a wider row": rand((b, s, h, d + 64), **options)[..., 32:-32],
        "every other row": rand((b, 2 * s, h, d), **options)[:, ::2],
        "every other head": rand((b, s, 2 * h, d), **options)[:, :, 1::2],
        "base not aligned": rand((b * s * h * d + 1,), **options)[1:].view(b, s, h, d),
        "stride not a multiple of 8": rand((b, s, h, d + 4), **options)[..., :d],
        "last stride 2": rand((b, s, h, 2 * d), **options)[..., ::2],
        "last stride nheads": rand((b, s, d, h), **options).transpose(-1, -2),
    }
