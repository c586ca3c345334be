"""cute_attn.bwd against the oracle: one suite for the CPU path and the CUDA kernels."""

import itertools
import math

import pytest
import torch
from gradients import check, dout_views, run
from helpers import (
    ALL_DEVICES,
    BF16,
    FP16,
    GPU_DEVICES,
    HEAD_DIMS,
    SCALES,
    SHAPES,
    Watch,
    close,
    qkv,
    ramp,
    rand,
    sdpa,
    some,
    surrounded,
    sweep_causal,
    views,
)

import cute_attn
from cute_attn import reference
from cute_attn.reference_backward import attention_backward, attention_backward_blockwise

each_device = pytest.mark.parametrize("device", ALL_DEVICES, indirect=True)
each_gpu = pytest.mark.parametrize("device", GPU_DEVICES, indirect=True)
both_masks = pytest.mark.parametrize("causal", [False, True])
NAN, INF = math.nan, math.inf
EDGES = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257]


def doubles(*shape, seed=0):
    """(dout, dlse, q, k, v) in fp64."""
    q, k, v = (t.double() for t in qkv(2, *shape, seed=seed))
    dout = rand((*q.shape[:3], v.shape[3]), torch.float64, seed=9)
    return dout, rand((2, q.shape[2], q.shape[1]), torch.float64, seed=8), q, k, v


# ---- the oracle and the CPU path ----------------------------------------------------------------


@both_masks
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_oracle_is_the_derivative_of_the_forward(shape, scale, causal):
    """Against torch's autograd through reference.attention, whose rows without keys have no
    derivative of their LSE to pass on."""
    dout, dlse, q, k, v = doubles(*shape)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out, lse = reference.attention(*inputs, causal=causal, softmax_scale=scale)
    outputs = [out, lse.masked_fill(lse == -INF, 0.0)]
    want = torch.autograd.grad(outputs, inputs, [dout, dlse])
    got = attention_backward(
        dout, *(t.detach() for t in inputs), causal=causal, softmax_scale=scale, dlse=dlse
    )
    for name, g, w in zip(("dq", "dk", "dv"), got, want):
        close(g, w, 1e-12 * (1 + w.abs()), name)


class Oracle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        out, lse = reference.attention(q, k, v, causal=True, softmax_scale=-0.7)
        return out, lse[..., 1:]  # row 0 sees no key: its lse is -inf

    @staticmethod
    def backward(ctx, dout, dlse):
        dlse = torch.nn.functional.pad(dlse, (1, 0), value=NAN)  # not looked at
        return attention_backward(
            dout, *ctx.saved_tensors, causal=True, softmax_scale=-0.7, dlse=dlse
        )


def test_oracle_follows_differences():
    *_, q, k, v = doubles(6, 5, (4, 2), (8, 16))
    assert torch.autograd.gradcheck(Oracle.apply, [t.requires_grad_() for t in (q, k, v)])


def test_dtype_of_the_oracle():
    dout, _, *inputs = doubles(9, 9, 2, 16)
    for dtype in (torch.float32, torch.float64):
        assert {t.dtype for t in attention_backward(dout, *inputs, dtype=dtype)} == {dtype}


@both_masks
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blockwise_is_the_oracle(shape, scale, causal):
    """fp32 inputs, so that nothing but fp32 arithmetic separates the two; tiles that divide the
    lengths and tiles that do not."""
    dout, dlse, q, k, v = (t.float() for t in doubles(*shape))
    options = {"causal": causal, "softmax_scale": scale}
    out, lse = (t.float() for t in reference.attention(q, k, v, **options))
    for block_q, block_k in ((128, 128), (16, 16), (32, 10), (7, 48)):
        got = attention_backward_blockwise(
            *(dout, q, k, v, out, lse), dlse=dlse, block_q=block_q, block_k=block_k, **options
        )
        check(got, dout, q, k, v, dlse=dlse, **options)


def test_blockwise_memory_is_linear_and_heads_are_not_copied():
    n = 2048
    q, k, v = qkv(1, n, n, (32, 1), 8)
    out, lse = reference.attention_blockwise(q, k, v)
    with Watch() as watch:
        attention_backward_blockwise(out, q, k, v, out, lse)
    assert watch.largest <= max(n * 32 * 8, 32 * 128 * 128)  # dQ, or one tile of all heads
    q, k, v = qkv(1, 16, 8 * n, (32, 1), 8)
    out, lse = reference.attention_blockwise(q, k, v)
    with Watch() as watch:
        attention_backward_blockwise(out, q, k, v, out, lse)
    assert watch.largest <= 8 * n * 8  # dk; never 32 times the keys


def test_blockwise_many_heads_do_not_share_one_tile(monkeypatch):
    """Eight sequences in parts of three: as right, and three times the three products bmm."""
    monkeypatch.setattr(reference, "_TILE_ELEMENTS", 3 * 8 * 16 * 16)
    q, k, v = qkv(8, 16, 16, 8, 8)
    run(q, k, v, with_dlse=True)
    out, lse = reference.attention_blockwise(q, k, v)
    with Watch() as watch:
        attention_backward_blockwise(out, q, k, v, out, lse)
    assert watch.count["bmm"] == 3 * 3


def test_blockwise_skips_hidden_blocks():
    q, k, v = qkv(1, 1024, 1024, 1, 8)
    out, lse = reference.attention_blockwise(q, k, v, causal=True)
    with Watch() as watch:
        attention_backward_blockwise(out, q, k, v, out, lse, causal=True)
    assert watch.count["baddbmm_"] == 2 * 8 * 9 // 2  # dV and dK
    assert watch.count["bmm"] == 3 * 8 * 9 // 2  # S, dP and dQ


# ---- shapes -------------------------------------------------------------------------------------


@each_device
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_head_dims(device, dtype):
    for d in HEAD_DIMS if device == "cuda" else (8, 16, 24, 40, 64, 72, 80, 96, 128, 160, 192, 256):
        inputs = qkv(2, 70, 133, (2, 1), d, dtype=dtype, device=device)
        run(*inputs, causal=sweep_causal(dtype, d))


@each_device
@both_masks
@pytest.mark.parametrize("dims", [(192, 128), (128, 64), (40, 96), (256, 64), (8, 256)], ids=str)
def test_head_dim_v(device, causal, dims):
    run(*qkv(2, 140, 150, (2, 1), dims, device=device), causal=causal, with_dlse=True)


@each_device
@both_masks
def test_grouped_heads(device, causal):
    for heads in ((4, 1), (8, 2), (6, 1), (12, 2), (71, 1), (3, 3)):
        run(*qkv(2, 130, 130, heads, 64, device=device), causal=causal)


@each_device
@both_masks
@pytest.mark.parametrize("dim", [64, 128])
def test_lengths(device, causal, dim):
    pairs = [(n, n) for n in EDGES] + [(n, 1) for n in EDGES] + [(1, n) for n in EDGES]
    pairs += some(device, itertools.product(EDGES, EDGES), 11)
    for seqlen_q, seqlen_k in pairs:
        run(*qkv(1, seqlen_q, seqlen_k, (2, 1), dim, device=device), causal=causal)


@each_device
@both_masks
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_longer_lengths(device, causal, dim):
    pairs = (1000, 1000), (1500, 1000), (1000, 1500), (1, 1500), (1500, 1)
    for seqlen_q, seqlen_k in some(device, pairs, 2):
        run(*qkv(1, seqlen_q, seqlen_k, (2, 1), dim, device=device), causal=causal)


@each_device
@both_masks
def test_many_small_sequences(device, causal):
    run(*qkv(70, 33, 45, (4, 2), 64, device=device), causal=causal)


@each_gpu
@pytest.mark.parametrize("batch, heads", [(70000, 1), (1, 70000)])
def test_more_sequences_or_heads_than_a_grid_has_rows(device, batch, heads):
    """The second and third extent of a grid end at 65,535."""
    run(*qkv(batch, 8, 8, heads, 64, device=device))


@each_device
@both_masks
@pytest.mark.parametrize("batch, seqlen_q, seqlen_k", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_empty_sizes(device, causal, batch, seqlen_q, seqlen_k):
    inputs = qkv(batch, seqlen_q, seqlen_k, (4, 2), (64, 128), device=device)
    for got, t in zip(run(*inputs, causal=causal, with_dlse=True), inputs):
        assert got.shape == t.shape and (got == 0).all()


@each_device
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(65, 32), (300, 128), (129, 1), (5, 2)])
def test_rows_without_keys_have_no_gradients(device, seqlen_q, seqlen_k):
    """Whatever is asked of them: the gradient of their LSE is NaN after a merge by logaddexp."""
    q, k, v = qkv(2, seqlen_q, seqlen_k, (4, 2), 64, device=device)
    empty = seqlen_q - seqlen_k
    dq, dk, dv = run(q, k, v, causal=True, with_dlse=True)
    assert (dq[:, :empty] == 0).all()
    out, lse = cute_attn.fwd(q, k, v, causal=True, return_lse=True)
    dout = rand(tuple(out.shape), device=device, seed=9)
    dlse = rand(tuple(lse.shape), torch.float32, device, seed=8)
    dlse[..., :empty] = NAN
    dout[:, :empty] *= 100
    options = {"causal": True, "dlse": dlse, "deterministic": True}
    got = cute_attn.bwd(dout, q, k, v, out, lse, **options)
    check(got, dout, q, k, v, causal=True, dlse=dlse)
    for g, w in zip(got, (dq, dk, dv)):
        close(g, w, 0.0 if device == "cpu" else 1e-2 * (1 + w.double().abs()))


# ---- values -------------------------------------------------------------------------------------


@each_device
@both_masks
def test_scale_of_any_sign(device, causal):
    inputs = qkv(2, 130, 200, (4, 2), 64, device=device)
    for scale in (0.0, -0.0, 0.125, 0.5, 3.0, -0.125, -3.0, 1e-30, -1e-30, 1):
        dq, dk, _ = run(*inputs, causal=causal, softmax_scale=scale)
        assert scale != 0 or ((dq == 0).all() and (dk == 0).all())


@each_device
@both_masks
def test_gradient_of_lse(device, causal):
    """Alone, where it is the only one, and beside dout."""
    for dims, heads in ((64, (4, 2)), ((192, 128), 2), (8, (3, 1))):
        q, k, v = qkv(2, 130, 150, heads, dims, device=device)
        run(q, k, v, causal=causal, with_dlse=True)
        dout = torch.zeros((*q.shape[:3], v.shape[3]), dtype=BF16, device=device)
        *_, dv = run(q, k, v, dout, causal=causal, with_dlse=True)
        assert (dv == 0).all()


@each_device
@both_masks
@pytest.mark.parametrize("kind", ["x30", "outliers"])
def test_wide_inputs(device, causal, kind):
    for dtype in (BF16, FP16):
        inputs = qkv(1, 200, 333, (4, 2), 128, dtype=dtype, device=device, kind=kind)
        run(*inputs, causal=causal)


@each_device
@both_masks
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_ramps(device, causal, dtype):
    """Scores that rise or fall all the way: most weights underflow."""
    for binades in some(device, (2, 10, 40, 200, -2, -10, -40, -200)):
        run(*ramp(64, binades, 200, 300, dtype=dtype, device=device), causal=causal)


@each_device
@both_masks
def test_scores_and_lse_far_from_zero(device, causal):
    """LSE below -88 and above 88: e^LSE is not a number of fp32, P is none the less."""
    q, k, v = qkv(1, 200, 300, 2, 128, device=device)
    for offset in (-30, 30, -1000, 1000):
        q[..., 0], k[..., 0] = 32, offset
        _, lse = cute_attn.fwd(q, k, v, causal=causal, return_lse=True)
        assert (lse.abs() > 75).all()
        run(q, k, v, causal=causal)


@each_device
@both_masks
def test_huge_and_tiny_values(device, causal):
    q, k, v = qkv(1, 200, 300, (2, 1), 128, device=device)
    for size in (1e15, 1e-15):
        run(q, k, v * size, causal=causal)
        run(q * size, k / size, v, causal=causal)
        run(q, k, v, rand(tuple(q.shape), device=device) * size, causal=causal)


@each_device
@both_masks
def test_memory_around_the_inputs_may_hold_nan(device, causal):
    for sq, sk in ((100, 130), (129, 65), (1, 1)):
        clean = qkv(2, sq, sk, (4, 2), 64, device=device)
        dout = surrounded(rand((2, sq, 4, 64), device=device))
        run(*map(surrounded, clean), dout, causal=causal)


@each_device
@both_masks
def test_freed_memory_may_hold_nan(device, causal):
    for sq, sk in ((200, 300), (300, 200), (65, 1)):
        q, k, v = qkv(2, sq, sk, (4, 2), 64, device=device)
        freed = [torch.full((n,), NAN, device=device) for n in (1 << 20, q.numel(), 8 * sq)]
        del freed
        run(q, k, v, causal=causal)


@each_device
@both_masks
def test_non_finite_inputs_do_not_hang(device, causal):
    q, k, v = qkv(1, 130, 150, (2, 1), 64, device=device)
    for t, value in itertools.product(range(4), (NAN, INF, -INF)):
        inputs = [x.clone() for x in (q, k, v, q)]
        inputs[t][0, 7, 0, 3] = value
        out, lse = cute_attn.fwd(*inputs[:3], causal=causal, return_lse=True)
        got = cute_attn.bwd(inputs[3], *inputs[:3], out, lse, causal=causal)
        assert [x.shape for x in got] == [q.shape, k.shape, v.shape]


@each_device
@both_masks
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("kind", ["normal", "x30", "outliers"])
def test_error_is_at_most_that_of_torch(device, causal, dtype, dim, kind):
    """Against fp64, in the 2-norm, times 1.1; torch's kernel is FlashAttention-2 on CUDA and its
    like on the CPU, and rounds P and dS as kernels do. With x30 scores are in the thousands, of
    which fp32 keeps 7 digits: S must be summed up as in the forward, and LSE subtracted once.
    """
    batch, seqlen, heads = (4, 1024, 8) if device == "cuda" else (1, 256, 4)
    q, k, v = qkv(batch, seqlen, seqlen, heads, dim, dtype=dtype, device=device, kind=kind)
    dout = rand(tuple(q.shape), dtype, device, seed=9)
    want = attention_backward(dout, q, k, v, causal=causal)
    out, lse = cute_attn.fwd(q, k, v, causal=causal, return_lse=True)
    got = cute_attn.bwd(dout, q, k, v, out, lse, causal=causal)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    torchs = torch.autograd.grad(sdpa(*leaves, causal), leaves, dout)
    for name, g, t, w in zip(("dq", "dk", "dv"), got, torchs, want):
        ratio = ((g.double() - w).norm() / (t.double() - w).norm()).item()
        print(f"{name}: {ratio:.3f} of torch's error")
        assert ratio <= 1.1, (name, ratio)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(96, 128), 128], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "causal, shape",
    [
        (False, (1, 1030, 8190, (6, 3))),  # after a full round
        (False, (3, 4100, 500, 5)),  # nothing else
        (True, (16, 1030, 1030, (8, 2))),  # after more than a round
        (True, (4, 2050, 2100, (16, 2))),  # after less
        (True, (1, 500, 300, (8, 1))),  # rows without a key
    ],
    ids=str,
)
def test_tiles_that_ctas_share(causal, shape, dims, dtype):
    """dk and dv have the same bits every time."""
    q, k, v = qkv(*shape, dims, dtype=dtype, device="cuda")
    assert cute_attn.explain(q, k, v, causal=causal, backward=True).parts > 1
    dout = rand((*q.shape[:3], v.shape[3]), device="cuda", seed=9, dtype=dtype)
    out, lse = cute_attn.fwd(q, k, v, causal=causal, return_lse=True)
    first = cute_attn.bwd(dout, q, k, v, out, lse, causal=causal)
    check(first, dout, q, k, v, causal=causal)
    for _ in range(20):
        _, *again = cute_attn.bwd(dout, q, k, v, out, lse, causal=causal)
        assert all(torch.equal(a, b) for a, b in zip(again, first[1:]))


@each_gpu
@both_masks
def test_memory_at_64k_tokens(device, causal):
    """Beside the gradients: 4 bytes for each element of dq, and 18 for each row of queries: its
    statistics, and a cache line for each block. Tiles that CTAs share need memory that does not
    grow with lengths. The allocator rounds up to 2 MiB."""
    seqlen, heads, dim = 65536, 8, 128
    q, k, v = qkv(1, seqlen, seqlen, heads, dim, device=device)
    out, lse = cute_attn.fwd(q, k, v, causal=causal, return_lse=True)
    cute_attn.bwd(out[:, :128], q[:, :128], k[:, :128], v[:, :128], out[:, :128], lse[:, :, :128])
    gradients = 3 * q.numel() * q.element_size()
    for deterministic in (False, True):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        cute_attn.bwd(out, q, k, v, out, lse, causal=causal, deterministic=deterministic)
        extra = torch.cuda.max_memory_allocated() - before - gradients
        rows = seqlen * heads
        print(f"{extra / 2**20:.1f} MiB, {extra / rows:.1f} bytes a row")
        parts = (
            1 if deterministic else cute_attn.explain(q, k, v, causal=causal, backward=True).parts
        )
        shared = 4 * (parts - 1) * 4 * 128 * 2 * dim  # 4 tiles after 31 rounds of 132
        assert extra <= 4 * rows * dim + (18 + 8 * deterministic) * rows + shared + 2**21


# ---- bits and views -----------------------------------------------------------------------------


@each_device
@both_masks
def test_views(device, causal):
    """Of q, k and v, and of dout: right, with the bits that contiguous copies give, and the inputs
    stay as they are."""
    plain = views(device)["transposed"]
    plain_dout = rand((2, 130, 4, 64), device=device, seed=9)
    cases = {name: (plain_dout, *inputs) for name, inputs in views(device).items()}
    cases |= {f"dout {name}": (dout, *plain) for name, dout in dout_views(device).items()}
    options = {"causal": causal, "deterministic": True}
    for name, (dout, q, k, v) in cases.items():
        out, lse = cute_attn.fwd(q, k, v, causal=causal, return_lse=True)
        dlse = rand((130, 2, 4), torch.float32, device).permute(1, 2, 0)
        kept = [t.clone() for t in (dout, q, k, v, out, lse, dlse)]
        got = cute_attn.bwd(dout, q, k, v, out, lse, dlse=dlse, **options)
        check(got, dout, q, k, v, causal=causal, dlse=dlse)
        *copies, dlse_copy = (t.contiguous() for t in kept)
        want = cute_attn.bwd(*copies, dlse=dlse_copy, **options)
        assert all(torch.equal(a, b) for a, b in zip(got, want)), name
        assert all(torch.equal(a, b) for a, b in zip(kept, (dout, q, k, v, out, lse, dlse))), name


@each_device
def test_out_and_lse_of_any_strides(device):
    q, k, v = qkv(2, 130, 150, (4, 2), 64, device=device)
    out, lse = cute_attn.fwd(q, k, v, return_lse=True)
    dout = rand(tuple(q.shape), device=device, seed=9)
    want = cute_attn.bwd(dout, q, k, v, out, lse, deterministic=True)
    wide = torch.full((2, 130, 4, 128), NAN, dtype=BF16, device=device)
    wide[..., 32:96] = out
    outs = out.transpose(1, 2).contiguous().transpose(1, 2), wide[..., 32:96]
    for o, l in itertools.product(outs, (lse.permute(2, 0, 1).contiguous().permute(1, 2, 0), lse)):
        got = cute_attn.bwd(dout, q, k, v, o, l, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want))


# ---- errors -------------------------------------------------------------------------------------


def call(**change):
    q, k, v = qkv(2, 5, 7, (4, 2), 16)
    out, lse = cute_attn.fwd(q, k, v, return_lse=True)
    names = "dout", "q", "k", "v", "out", "lse"
    arguments = dict(zip(names, (torch.ones_like(out), q, k, v, out, lse)))
    for name, value in change.items():
        arguments[name] = value(arguments[name]) if name in arguments and callable(value) else value
    return cute_attn.bwd(**arguments)


def meta(t):
    return t.to("meta")


@pytest.mark.parametrize(
    "error, message, change",
    [
        *((TypeError, f"{n} is a list", {n: [1.0]}) for n in ("dout", "q", "k", "v", "out", "lse")),
        *((TypeError, f"{n}.dtype is torch.float32: it must be q.dtype, torch.bfloat16",
           {n: torch.Tensor.float}) for n in ("dout", "k", "v", "out")),
        *((TypeError, f"{n} is nested or of layout torch.sparse_coo",
           {n: torch.Tensor.to_sparse}) for n in ("dout", "q", "k", "v", "out", "lse")),
        *((ValueError, f"{n}.device is meta", {n: meta}) for n in ("dout", "k", "v", "out", "lse")),
        *((ValueError, rf"{n}.shape is \(2, 4, 4, 16\): \(2, 5, 4, 16\) is wanted",
           {n: lambda t: t[:, 1:]}) for n in ("dout", "out")),
        (TypeError, "q.dtype is torch.float32", {"q": torch.Tensor.float}),
        (ValueError, "dout.shape is .* is wanted", {"dout": lambda t: t[0]}),
        (ValueError, "q.shape is", {"q": lambda t: t[0]}),
        (ValueError, "k.shape is.*q's batch, 2", {"k": lambda t: t[:1]}),
        (ValueError, "v.shape is.*seqlen, 7", {"v": lambda t: t[:, 1:]}),
        (ValueError, "nheads_q is 3 .* is 2", {"q": lambda t: t[:, :, 1:]}),
        (ValueError, r"lse.shape is \(2, 5, 4\): \(2, 4, 5\)", {"lse": lambda t: t.mT}),
        (TypeError, "lse.dtype is torch.float64: it must be torch.float32",
         {"lse": torch.Tensor.double}),
        (TypeError, "dlse is a float", {"dlse": 1.0}),
        (TypeError, "dlse.dtype is torch.bfloat16", {"dlse": torch.ones(2, 4, 5, dtype=BF16)}),
        (ValueError, "dlse.shape is", {"dlse": torch.ones(2, 5, 4)}),
        (ValueError, "dlse.device is meta", {"dlse": torch.ones(2, 4, 5, device="meta")}),
        (TypeError, "causal is 1", {"causal": 1}),
        (TypeError, "deterministic is 1", {"deterministic": 1}),
        (TypeError, "softmax_scale is 'x'", {"softmax_scale": "x"}),
        (ValueError, "softmax_scale is nan", {"softmax_scale": NAN}),
        (ValueError, "arch is 'sm100'", {"arch": "sm100"}),
        (ValueError, "arch is 'sm90', but q.device is cpu", {"arch": "sm90"}),
        (ValueError, "arch is 'sm80', but q.device is cpu", {"arch": "sm80"}),
        (ValueError, "a pair", {"window_size": 3}),
        (TypeError, "unexpected keyword", {"window": 3}),
        (TypeError, "dout is a NoneType", {"dout": None}),
        (TypeError, "config is FwdConfig.* a BwdConfig", {"config": cute_attn.FwdConfig()}),
    ],
)  # fmt: skip
def test_wrong_calls(error, message, change):
    with pytest.raises(error, match=message):
        call(**change)


@pytest.mark.parametrize(
    "name, value",
    [
        *(("window_size", window) for window in ((3, 0), (-1, 0), (None, 5), (-2, -1))),
        *(("softcap", 10.0), ("max_seqlen_q", 5), ("max_seqlen_k", 7), ("score_mod", max)),
        *((f"{name}_descale", torch.zeros(4)) for name in "qkv"),
        *((name, torch.zeros(4)) for name in ("alibi_slopes", "sink", "cu_seqlens_q")),
        *((name, torch.zeros(4)) for name in ("cu_seqlens_k", "seqused_q", "seqused_k")),
    ],
)
def test_unbuilt_arguments_are_named(name, value):
    with pytest.raises(NotImplementedError, match=name):
        call(**{name: value})


def test_arguments_that_change_nothing():
    want = call()
    for options in (
        {"deterministic": True},
        {"arch": "cpu"},
        {"window_size": (-1, None), "softcap": 0.0},
        {"dlse": torch.zeros(2, 4, 5)},
        {"config": cute_attn.BwdConfig()},
    ):
        assert all(torch.equal(a, b) for a, b in zip(call(**options), want))


@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "out", "lse"])
def test_second_derivatives_are_refused(name):
    def leaf(t):
        return t.detach().clone().requires_grad_()

    with pytest.raises(NotImplementedError, match=f"{name} requires grad and double backward"):
        call(**{name: leaf})
    with torch.no_grad():
        call(**{name: leaf})
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match=f"{name} carries a tangent"):
            call(**{name: lambda t: torch.autograd.forward_ad.make_dual(t, torch.ones_like(t))})


def test_scale_below_float32_is_zero():
    got = call(softmax_scale=1e-300)
    assert all((t == 0).all() for t in got[:2]) and (got[2] != 0).any()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_autocast_changes_nothing(dtype):
    q, k, v = qkv(2, 70, 70, 2, 16, dtype=dtype)
    want = run(q, k, v)
    with torch.autocast("cpu", dtype=BF16):
        got = run(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
