"""Shared by the tests: what the answer is, how far from it a result may be, and inputs.

GPU tests share few kernels, each of which takes seconds to compile: tests/ahead.py has them.
"""

import importlib.util
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import cute_attn
from cute_attn import backward, launch, reference

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers whose threads wait for each other spin: 10 times slower

ROOT = Path(__file__).resolve().parents[1]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# and CUDA tensors that kernels/ampere serve, as on a GPU of that generation: see as_on_ampere
ALL_DEVICES = [*DEVICES, pytest.param("cuda:sm80", marks=[pytest.mark.gpu, pytest.mark.sm80])]
GPU_DEVICES = ALL_DEVICES[1:]
BF16, FP16 = torch.bfloat16, torch.float16
UNIT = {BF16: 2.0**-8, FP16: 2.0**-11}  # relative error of rounding to nearest
HEAD_DIMS = range(8, 257, 8)
SHAPES = [  # small ones for references: (seqlen_q, seqlen_k, heads, dims)
    (1, 1, 1, 8),
    (5, 5, 2, 16),
    (17, 40, (4, 2), (24, 40)),
    (40, 17, (3, 1), (40, 8)),
    (33, 1, 2, 8),
    (1, 50, (2, 1), 64),
    (0, 5, 2, 8),
    (5, 0, 2, 8),
]
SCALES = [None, 0.0, -0.3, 2.0]


def as_on_ampere(monkeypatch):
    """Calls with CUDA tensors that name no arch run the Ampere kernels."""
    native = launch._native_arch
    monkeypatch.setattr(launch, "_native_arch", lambda d: "sm80" if d.type == "cuda" else native(d))
    for module in (launch, backward):
        monkeypatch.setattr(module, "_plans", {})


def sweep_causal(dtype, head_dim):
    """Which mask the sweep over head dims takes, so that two dtypes cover every class once."""
    return (-(-head_dim // 16) % 2 == 0) == (dtype == BF16)


def naive(q, k, v, causal=False, softmax_scale=None):
    """Attention row by row over the visible keys alone, in fp64: slow, and too short to be wrong.
    (out, lse) as fwd gives them."""
    (batch, seqlen_q, heads, dim), (_, seqlen_k, heads_kv, dim_v) = q.shape, v.shape
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(batch, seqlen_q, heads, dim_v, dtype=torch.float64)
    lse = torch.full((batch, heads, seqlen_q), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            keys, values = (t[b, :, h * heads_kv // heads].double() for t in (k, v))
            for i in range(seqlen_q):
                n = max(0, i + seqlen_k - seqlen_q + 1) if causal else seqlen_k
                s = keys[:n] @ q[b, i, h].double()
                n = s > -math.inf if scale == 0 else s * scale > -math.inf
                n |= s.isnan()
                s = s[n] * scale
                if len(s):
                    out[b, i, h] = torch.softmax(s, 0) @ values[: len(n)][n]
                    lse[b, h, i] = torch.logsumexp(s, 0)
    return out, lse


def rand(shape, dtype=BF16, device="cpu", seed=0, kind="normal"):
    """kind: normal N(0,1), x30 N(0,900), outliers N(0,1) + N(0,100) * Bernoulli(0.001)."""
    g = torch.Generator(device).manual_seed(seed * 1000003 + sum(shape))
    x = torch.randn(shape, device=device, generator=g)
    if kind == "x30":
        x *= 30
    elif kind == "outliers":
        hit = torch.rand(shape, device=device, generator=g) < 0.001
        x += torch.randn(shape, device=device, generator=g) * 10 * hit
    return x.to(dtype)


def qkv(batch, seqlen_q, seqlen_k, heads, dims, *, dtype=BF16, device="cpu", seed=0, kind="normal"):
    """heads: nheads or (nheads_q, nheads_kv); dims: head_dim or (head_dim, head_dim_v)."""
    hq, hk = heads if isinstance(heads, tuple) else (heads, heads)
    d, dv = dims if isinstance(dims, tuple) else (dims, dims)
    shapes = (batch, seqlen_q, hq, d), (batch, seqlen_k, hk, d), (batch, seqlen_k, hk, dv)
    return tuple(
        rand(s, dtype, device, 10 * seed + i, kind).contiguous() for i, s in enumerate(shapes)
    )


def run(q, k, v, **options):
    """fwd, checked against the oracle: (out, lse)."""
    out, lse = cute_attn.fwd(q, k, v, return_lse=True, **options)
    options.pop("out", None)
    check(out, lse, q, k, v, **options)
    return out, lse


def check(out, lse, q, k, v, *, causal=False, softmax_scale=None):
    """Every element of out and lse within the error that its own arithmetic can explain: out is
    rounded once, the kernel rounds P to the input dtype, scores and statistics are fp32."""
    dim_v = v.shape[3]
    both, want_lse = reference.attention(
        q, k, torch.cat([v, v.abs()], -1), causal=causal, softmax_scale=softmax_scale
    )
    want, size = both[..., :dim_v], both[..., dim_v:]  # size: what the weights sum up
    drift = score_error(q, k, softmax_scale)
    unit = UNIT[out.dtype]
    weights = 2.0**-18 + 2 * drift + (unit if out.is_cuda else 0.0)
    tolerance = 1.01 * unit * want.abs() + weights[..., None] * size
    if out.dtype == FP16:  # P and out have subnormals: an absolute error of 2^-25 each
        tolerance += 2.0**-25 * (1 + k.shape[1] * v.nan_to_num().abs().double().mean())
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    close(out, want, tolerance, "out")
    close(lse, want_lse, 1e-4 + 1e-6 * want_lse.abs() + drift.transpose(1, 2), "lse")


def close(got, want, tolerance, name="result"):
    """NaN and infinities in the same places first, then |got - want| <= tolerance elementwise."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    got, want = got.double(), want.double()
    for what in (torch.isnan, torch.isposinf, torch.isneginf):
        wrong = (what(got) != what(want)).nonzero().tolist()
        assert not wrong, f"{name}: {what.__name__} differs at {len(wrong)} places: {wrong[:5]}"
    over = torch.where(want.isfinite(), (got - want).abs() - tolerance, -1.0)
    if over.numel() and over.max() > 0:
        at = tuple(int(i) for i in torch.unravel_index(over.argmax(), over.shape))
        raise AssertionError(
            f"{name}: {int((over > 0).sum())} of {over.numel()} wrong, worst at {at}: "
            f"{got[at].item()} for {want[at].item()}"
        )


def score_error(q, k, softmax_scale=None):
    """(batch, seqlen_q, nheads_q): what fp32 allows a score to be off. Its terms may cancel, so
    this is 2^-21, a few roundings, of |q| |k| * scale, not of the score."""
    scale = q.shape[3] ** -0.5 if softmax_scale is None else abs(softmax_scale)
    of_q, of_k = (t.double().nan_to_num(0.0, 0.0, 0.0).norm(dim=-1) for t in (q, k))
    return of_q * (2.0**-21 * scale * (of_k.max() if of_k.numel() else 0.0))


def sdpa(q, k, v, causal=False):
    """torch's own fused kernel in the inputs' dtype, on CUDA FlashAttention-2: the yardstick."""
    backends = [SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(backends):
        out = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal
        )
    return out.transpose(1, 2)


def errors(out, want):
    """(largest absolute error, relative error in the 2-norm); special values must agree."""
    close(out, want, math.inf, "out")
    difference = out.double() - want
    return difference.abs().max().item(), (difference.norm() / want.norm()).item()


# Queries of one warp raise their references at different times: they differ in sign and steepness,
# with a period of 7, so that the two rows of a thread, 8 apart, differ too.
STEEPNESS = (1.0, 1.0, -1.0, 0.5, -0.25, 0.0, 2.0)


def some(device, items, every=3):
    """All of them for a kernel; on the CPU, where a block is a block, one in `every`."""
    return list(items)[:: 1 if device == "cuda" else every]


def climb(dims, key_binades, seqlen_q, *, heads=(4, 2), dtype=BF16, device="cpu"):
    """q, k, v of two batches where key j scores key_binades[j] powers of two, times the query's
    steepness, at the default scale; N(0,1) noise in the other dimensions, and v is N(0,1)."""
    binades = torch.as_tensor(key_binades, dtype=torch.float32, device=device)
    q, k, v = qkv(2, seqlen_q, len(binades), heads, dims, dtype=dtype, device=device, seed=7)
    steepness = torch.tensor(STEEPNESS, device=device).repeat(seqlen_q)[:seqlen_q]
    q[..., 0] = 4 * steepness[:, None].to(dtype)
    k[..., 0] = (binades * (math.log(2) * q.shape[3] ** 0.5 / 4))[:, None].to(dtype)
    return q, k, v


def ramp(dims, binades, seqlen_q, seqlen_k, **options):
    """climb() by `binades` powers of two per 128 keys."""
    keys = torch.arange(seqlen_k, dtype=torch.float32)
    return climb(dims, keys * (binades / 128), seqlen_q, **options)


def surrounded(t):
    """The same values inside a larger buffer of NaN: before, behind and between the rows."""
    b, s, h, d = t.shape
    buffer = t.new_full((b + 2, s + 200, h + 2, d + 64), math.nan)
    buffer[1:-1, 100:-100, 1:-1, 32:-32] = t
    return buffer[1:-1, 100:-100, 1:-1, 32:-32]


def views(device, seqlen=130, heads=4, dim=64):
    """name -> (q, k, v) as models pass them."""
    b, s, h, d = 2, seqlen, heads, dim
    normal = {"dtype": BF16, "device": device}
    transposed = [rand((b, h, s, d), seed=i, **normal).transpose(1, 2) for i in range(3)]
    packed = rand((b, s, 3, h, d), **normal)
    batch_inner = [rand((s, b, h, d), seed=i, **normal).transpose(0, 1) for i in range(3)]
    wide = rand((b, s, h, 3 * d), **normal)
    flat = rand((3 * b * s * h * d + 1,), **normal)[1:].view(3, b, s, h, d)
    odd = rand((3, b, s, h, d + 4), **normal)[..., :d]
    strided = rand((3, b, s, h, 2 * d), **normal)[..., ::2]
    columns = rand((3, b, s, d, h), **normal).transpose(-1, -2)
    one = [rand(x, seed=i, **normal) for i, x in enumerate([(b, s, h, d), (b, s, 1, d)])]
    shared = rand((1, s, h, d), **normal).expand(b, s, h, d)
    token = rand((b, 1, h, d), **normal).expand(b, s, h, d)
    return {
        "transposed": transposed,
        "packed qkv": packed.unbind(2),
        "batch inside": batch_inner,
        "columns of a wider row": wide.split(d, -1),
        "every other row": [rand((b, 2 * s, h, d), seed=i, **normal)[:, ::2] for i in range(3)],
        "every other head": [
            rand((b, s, 2 * h, d), seed=i, **normal)[:, :, 1::2] for i in range(3)
        ],
        "base not aligned": flat.unbind(0),
        "stride not a multiple of 8": odd.unbind(0),
        "last stride 2": strided.unbind(0),
        "last stride nheads": columns.unbind(0),
        "expanded kv head": (one[0], one[1].expand(b, s, h, d), one[1].expand(b, s, h, d)),
        "expanded batch": (one[0], shared, shared),
        "expanded sequence": (token, one[0], token),
        "one tensor thrice": (one[0], one[0], one[0]),
    }


class Watch(TorchDispatchMode):
    """The largest tensor made, and how often each operation ran."""

    def __init__(self):
        super().__init__()
        self.largest, self.count = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.largest = max(self.largest, result.numel())
        name = func.overloadpacket.__name__
        self.count[name] = self.count.get(name, 0) + 1
        return result


def script(name):
    """The module scripts/name.py."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module
