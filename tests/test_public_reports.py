"""Bugs that users of other attention libraries reported, with their inputs: none may come back.

The names are the repositories' issue numbers: FA Dao-AILab/flash-attention, FI flashinfer, PT
pytorch, CL cutlass. Only the forward; rows about the JIT cache are in test_cache.py, about streams,
graphs, devices and threads in test_launch_gpu.py.
"""

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from helpers import ALL_DEVICES, BF16, FP16, check, close, qkv, rand, run

import cute_attn
from cute_attn import reference

each_device = pytest.mark.parametrize("device", ALL_DEVICES, indirect=True)
both_masks = pytest.mark.parametrize("causal", [False, True])
INF = math.inf


def constant(shape, value, device, dtype=BF16):
    return torch.full(shape, value, dtype=dtype, device=device)


# ---- numerics -----------------------------------------------------------------------------------


@each_device
def test_fi_4267_scores_below_a_finite_mask_constant_are_not_masked(device):
    shape = (1, 1, 32, 128)
    q, k, v = (constant(shape, x, device) for x in (-64, 64, 1))
    out, lse = cute_attn.fwd(q, k, v, return_lse=True)
    assert (out == 1).all()
    close(lse, torch.full_like(lse, -524288 * 128**-0.5), 1e-6 * 46341)


@each_device
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(65, 32), (300, 128), (129, 1)])
def test_fi_4452_rows_without_keys_have_lse_minus_infinity(device, seqlen_q, seqlen_k):
    q, k, v = (
        constant((1, n, 2, 64), x, device) for n, x in ((seqlen_q, 0), (seqlen_k, 0), (seqlen_k, 1))
    )
    out, lse = cute_attn.fwd(q, k, v, causal=True, return_lse=True)
    empty = seqlen_q - seqlen_k
    assert (out[:, :empty] == 0).all() and (lse[..., :empty] == -INF).all()
    assert (out[:, empty:] == 1).all()
    seen = torch.arange(1, seqlen_k + 1, device=device).double().log()
    close(lse[..., empty:], seen.expand(1, 2, -1), 1e-5)


@each_device
def test_fa_1461_zero_and_negative_scale_with_a_mask(device):
    q, k, v = qkv(1, 130, 130, 2, 64, device=device)
    _, lse = run(q, k, v, causal=True, softmax_scale=0.0)
    close(lse[0, 0], torch.arange(1, 131, device=device).double().log(), 1e-5)
    out, _ = run(q, k, v, causal=True, softmax_scale=-1.0)
    mirrored, _ = run(-q, k, v, causal=True, softmax_scale=1.0)
    close(out, mirrored.double(), 0.02)


# ---- empty sizes --------------------------------------------------------------------------------


@each_device
@both_masks
@pytest.mark.parametrize("dims", [128, (192, 128)], ids=str)
def test_fa_2470_no_keys(device, causal, dims):
    for seqlen_q in (1, 64, 128, 256):
        out, lse = run(*qkv(4, seqlen_q, 0, 16, dims, device=device), causal=causal)
        assert out.shape == (4, seqlen_q, 16, 128) and (out == 0).all() and (lse == -INF).all()


@each_device
@both_masks
def test_fa_2503_no_queries_or_no_batch(device, causal):
    for batch, seqlen_q in ((2, 0), (0, 64)):
        out, lse = run(*qkv(batch, seqlen_q, 4096, 16, 128, device=device), causal=causal)
        assert out.shape == (batch, seqlen_q, 16, 128) and lse.shape == (batch, 16, seqlen_q)


@each_device
def test_pt_133780_batch_of_zero(device):
    out, lse = run(*qkv(0, 3952, 16, 10, 64, dtype=FP16, device=device))
    assert out.shape == (0, 3952, 10, 64) and lse.shape == (0, 10, 3952)


# ---- the causal mask ----------------------------------------------------------------------------


@each_device
def test_fa_1778_causal_with_more_queries_than_keys(device):
    q, k, v = qkv(1, 2048, 1024, 2, 64, device=device)
    out, lse = run(q, k, v, causal=True)
    assert (out[:, :1024] == 0).all() and (lse[..., :1024] == -INF).all()
    square = cute_attn.fwd(q[:, 1024:], k, v, causal=True)
    assert torch.equal(out[:, 1024:], square)


@each_device
def test_pt_108108_causal_is_aligned_bottom_right(device):
    """V is one-hot, q is 0: out spells the mask, a row over the number of its keys."""
    for rows in (["11110", "11111"], ["00", "00", "00", "10", "11"]):
        mask = torch.tensor([[int(c) for c in r] for r in rows], device=device)
        seqlen_q, seqlen_k = mask.shape
        q, k = (constant((1, n, 1, 64), 0, device) for n in (seqlen_q, seqlen_k))
        v = torch.eye(seqlen_k, 64, dtype=BF16, device=device).view(1, seqlen_k, 1, 64)
        out = cute_attn.fwd(q, k, v, causal=True)[0, :, 0, :seqlen_k]
        want = mask / mask.sum(1, keepdim=True).clamp(min=1)
        close(out, want.double(), 2.0**-8)


# ---- head dims and head counts ------------------------------------------------------------------


@each_device
def test_fa_1290_odd_head_dims_use_every_column(device):
    """The score comes from the last column alone, and every column of v is read."""
    for d in (8, 40, 72, 80, 96, 104, 160, 192, 256):
        causal = -(-d // 16) % 2 == 0  # the classes of test_every_head_dim
        q, k, v = qkv(1, 129, 129, 1, d, device=device)
        q[..., :-1], k[..., :-1] = 0, 0
        run(q, k, v, causal=causal)


@each_device
def test_fa_28_head_dim_60_is_a_clear_error(device):
    for dims, words in ((60, "head_dim is 60"), ((64, 60), "head_dim_v is 60"), (264, "256")):
        with pytest.raises(ValueError, match=words):
            cute_attn.fwd(*qkv(1, 16, 16, 1, dims, device=device))


@each_device
def test_fa_2745_v_wider_than_k(device):
    run(*qkv(1, 129, 769, 8, (64, 128), device=device))


@each_device
@pytest.mark.parametrize("heads", [(6, 4), (2, 4)])
def test_pt_139586_head_counts_must_divide(device, heads):
    with pytest.raises(ValueError, match=rf"nheads_q is {heads[0]}\b.*nheads_kv is {heads[1]}\b"):
        cute_attn.fwd(*qkv(1, 16, 16, heads, 64, device=device))


# ---- strides ------------------------------------------------------------------------------------


@each_device
def test_fa_2189_keys_and_values_expanded_over_the_heads(device):
    n = 2048 if device == "cuda" else 512
    q = rand((1, n, 4, 128), device=device)
    k, v = (rand((1, n, 1, 128), device=device, seed=i) for i in (1, 2))
    wide = [t.expand(1, n, 4, 128) for t in (k, v)]
    got = run(q, *wide, causal=True)
    grouped = cute_attn.fwd(q, k, v, causal=True, return_lse=True)
    assert all(torch.equal(x, y) for x, y in zip(got, grouped))


@each_device
def test_fa_2886_views_are_right_on_the_second_call_too(device):
    q = rand((1, 24, 256, 256), device=device).transpose(1, 2)
    k = rand((1, 4, 256, 256), device=device, seed=1).transpose(1, 2)
    v = rand((1, 256, 4, 256), device=device, seed=2)
    first = run(q, k, v, causal=True)
    second = cute_attn.fwd(q, k, v, causal=True, return_lse=True)
    assert all(torch.equal(x, y) for x, y in zip(first, second))


@pytest.mark.gpu
@both_masks
def test_fa_1562_slices_of_rows_so_wide_that_offsets_pass_2_31(causal):
    """(119056, 3*24*128 + 12288) with q, k, v its first columns: the last row begins at element
    2.56e9. Two heads instead of 24 and the queries from both ends keep it short."""
    x = torch.empty(119056, 3 * 24 * 128 + 12288, dtype=BF16, device="cuda")
    x[:, : 3 * 24 * 128].normal_()
    q, k, v = x[:, : 3 * 24 * 128].view(1, 119056, 3, 24, 128)[:, :, :, 22:].unbind(2)
    assert (k.shape[1] - 1) * k.stride(1) > 2**31
    whole = cute_attn.fwd(q, k, v, causal=causal)
    assert torch.equal(whole, cute_attn.fwd(*(t.contiguous() for t in (q, k, v)), causal=causal))
    out, lse = cute_attn.fwd(q[:, -40:], k, v, causal=causal, return_lse=True)
    check(out, lse, q[:, -40:], k, v, causal=causal)
    close(whole[:, -40:], out.double(), 2.0**-7 * out.abs().max().double())


@pytest.mark.gpu
def test_cl_2715_strides_above_int32():
    """(2, 65536, 65536): the first stride is 2^32, as the batch's, the heads', the sequence's."""
    t = torch.empty(2, 65536, 65536, dtype=BF16, device="cuda")
    t[:, :300, :512].normal_()
    for name, view in {
        "batch": t[:, :300, :512].unflatten(2, (2, 256)),
        "heads": t[:, :300, :256].permute(1, 0, 2)[None],
        "sequence": t[:, :4, :512].unflatten(2, (2, 256)).transpose(0, 1),
    }.items():
        assert 2**32 in view.stride(), name
        q, k, v = (view[..., i : i + 64] for i in (0, 64, 128))
        got = run(q, k, v)
        want = cute_attn.fwd(*(s.contiguous() for s in (q, k, v)), return_lse=True)
        assert all(torch.equal(x, y) for x, y in zip(got, want)), name


@each_device
@both_masks
def test_cl_3031_sizes_of_one_with_any_stride(device, causal):
    for shape in ((1, 1, 1, 64), (4, 1, 1, 64), (1, 40, 1, 64), (1, 1, 3, 64)):
        clean = [rand(shape, device=device, seed=i) for i in range(3)]
        want = run(*clean, causal=causal)
        assert torch.equal(want[0], clean[2]) or shape[1] > 1  # one key: its value
        for stride in (0, 1, 7, 2**33):
            odd = [
                t.as_strided(shape, [stride if n == 1 else s for n, s in zip(shape, t.stride())])
                for t in clean
            ]
            got = cute_attn.fwd(*odd, causal=causal, return_lse=True)
            assert all(torch.equal(x, y) for x, y in zip(got, want)), (shape, stride)
        moved = [t.transpose(0, 2).contiguous().transpose(0, 2) for t in clean]
        got = cute_attn.fwd(*moved, causal=causal, return_lse=True)
        assert all(torch.equal(x, y) for x, y in zip(got, want)), shape


# ---- one process, many calls --------------------------------------------------------------------


@each_device
def test_fi_4014_the_plan_follows_scale_strides_and_dtype(device):
    q, k, v = qkv(1, 200, 200, 4, 64, device=device)
    for scale in (0.1, 0.5, None, 0.1):
        run(q, k, v, softmax_scale=scale)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    for order in ((q, k, v), heads_first, (q, heads_first[1], v), (heads_first[0], k, v)):
        run(*order)
    for dtype in (BF16, FP16, BF16):
        run(*(t.to(dtype) for t in (q, k, v)))
    run(*(torch.cat([t, t]) for t in (q, k, v)))
    run(q, k, v)


@each_device
def test_fa_2143_every_order_of_the_flags_is_right(device):
    q, k, v = qkv(1, 100, 150, (2, 1), 64, device=device)
    flags = ({}, {"causal": True}, {"softmax_scale": -0.2}, {"causal": True, "softmax_scale": -0.2})
    want = [reference.attention(q, k, v, **f)[0] for f in flags]
    for order in itertools.permutations(range(4)):
        for i in order:
            close(cute_attn.fwd(q, k, v, **flags[i]), want[i], 0.02)
        assert isinstance(cute_attn.fwd(q, k, v), torch.Tensor)
        assert len(cute_attn.fwd(q, k, v, return_lse=True)) == 2


def threads():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"Threads:\s+(\d+)", status).group(1))


@pytest.mark.compile
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts threads in /proc")
@pytest.mark.parametrize(
    "variants", [4, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.long])]
)
def test_cl_2551_compiling_many_kernels_leaks_no_threads(variants):
    from cute_attn import Problem, tuning
    from cute_attn.kernels.hopper.fwd import compile_fwd

    kinds = itertools.product(("bf16", "fp16"), (False, True), range(16, 257, 16))
    for i, (dtype, causal, dim) in enumerate(itertools.islice(kinds, variants)):
        problem = Problem(dtype, dim, dim, causal).static()
        compile_fwd(problem, tuning.pick(problem))
        if i == 0:
            before = threads()
    assert threads() <= before + 2
