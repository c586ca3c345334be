"""cute_attn.fwd against the oracle: one suite for the CPU path and the CUDA kernels."""

import itertools
import math
import random

import pytest
import torch
from helpers import (
    ALL_DEVICES,
    BF16,
    FP16,
    HEAD_DIMS,
    check,
    climb,
    close,
    errors,
    qkv,
    ramp,
    run,
    score_error,
    sdpa,
    some,
    surrounded,
    sweep_causal,
    views,
)

import cute_attn
from cute_attn import reference

pytestmark = pytest.mark.parametrize("device", ALL_DEVICES, indirect=True)
both_masks = pytest.mark.parametrize("causal", [False, True])
NAN, INF = math.nan, math.inf
EDGES = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257]


def fwd(q, k, v, **options):
    return cute_attn.fwd(q, k, v, return_lse=True, **options)


def same(a, b):
    """Bit for bit, (out, lse)."""
    return all(torch.equal(x, y) for x, y in zip(a, b))


# ---- shapes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_head_dim(device, dtype):
    for d in HEAD_DIMS:
        q, k, v = qkv(2, 70, 133, (2, 1), d, dtype=dtype, device=device)
        run(q, k, v, causal=sweep_causal(dtype, d))


@pytest.mark.parametrize("dims", [(192, 128), (128, 64), (40, 96), (256, 64), (8, 256)], ids=str)
def test_head_dim_v(device, dims):
    q, k, v = qkv(2, 140, 150, (2, 1), dims, device=device)
    run(q, k, v, causal=True)


@pytest.mark.parametrize("dims", [(192, 128), (64, 128), (64, 256)], ids=str)
def test_head_dim_v_full(device, dims):
    q, k, v = qkv(2, 140, 150, (2, 1), dims, device=device)
    run(q, k, v)


@both_masks
def test_grouped_heads(device, causal):
    for heads in ((4, 1), (8, 2), (6, 1), (12, 2), (71, 1), (3, 3)):
        q, k, v = qkv(2, 130, 130, heads, 64, device=device)
        run(q, k, v, causal=causal)


@both_masks
@pytest.mark.parametrize("dim", [64, 128])
def test_lengths(device, causal, dim):
    draw = random.Random(dim + causal)
    pairs = [(n, n) for n in EDGES] + [(n, 1) for n in EDGES] + [(1, n) for n in EDGES]
    pairs += [(draw.choice(EDGES), draw.choice(EDGES)) for _ in range(40)]
    pairs += [(draw.randint(1, 260), draw.randint(1, 260)) for _ in range(60)]
    for seqlen_q, seqlen_k in pairs:
        q, k, v = qkv(1, seqlen_q, seqlen_k, (2, 1), dim, device=device)
        run(q, k, v, causal=causal)


@both_masks
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_longer_lengths(device, causal, dim):
    for seqlen_q, seqlen_k in ((1000, 1000), (1500, 1000), (1000, 1500), (1, 1500), (1500, 1)):
        q, k, v = qkv(1, seqlen_q, seqlen_k, (2, 1), dim, device=device)
        run(q, k, v, causal=causal)


@both_masks
def test_many_small_sequences(device, causal):
    """More tiles than there are multiprocessors, of unequal work."""
    q, k, v = qkv(70, 33, 45, (4, 2), 64, device=device)
    run(q, k, v, causal=causal)


@both_masks
def test_empty_sizes(device, causal):
    for batch, seqlen_q, seqlen_k in ((0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)):
        q, k, v = qkv(batch, seqlen_q, seqlen_k, (4, 2), (64, 128), device=device)
        out, lse = run(q, k, v, causal=causal)
        assert (out == 0).all() and (lse == -INF).all()
        assert out.shape == (batch, seqlen_q, 4, 128) and out.device == q.device
    q, k, v = (t[:, :, :0] for t in qkv(2, 5, 5, 1, 64, device=device))
    with pytest.raises(ValueError, match="nheads"):
        fwd(q, k, v)


# ---- values -------------------------------------------------------------------------------------


@both_masks
def test_scale_of_any_sign(device, causal):
    q, k, v = qkv(2, 130, 200, (4, 2), 64, device=device)
    for scale in (0.0, -0.0, 0.125, 0.5, 3.0, -0.125, -3.0, 1e-30, -1e-30, 1):
        run(q, k, v, causal=causal, softmax_scale=scale)


@both_masks
@pytest.mark.parametrize("kind", ["x30", "outliers"])
def test_wide_inputs(device, causal, kind):
    for dtype in (BF16, FP16):
        run(*qkv(1, 200, 333, (4, 2), 128, dtype=dtype, device=device, kind=kind), causal=causal)


WIDE = [(BF16, 64), (BF16, 128), (BF16, 256), (FP16, 128)]


@both_masks
@pytest.mark.parametrize("dtype, dim", WIDE, ids=str)
def test_ramps(device, causal, dtype, dim):
    """Scores that rise or fall all the way: the reference of an online softmax moves in every
    block, now and then, or never; for some rows of a warp only; by less or more than fp32 can
    make up for afterwards."""
    for binades, lengths in itertools.product(
        (2, 10, 40, 200, -2, -10, -40, -200), ((500, 500), (70, 600))
    ):
        run(*ramp(dim, binades, *lengths, dtype=dtype, device=device), causal=causal)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_ramps_of_every_head_dim(device, dtype):
    for d, binades in itertools.product(HEAD_DIMS[::2], (-15, -40, -200)):
        causal = sweep_causal(dtype, d)
        run(*ramp(d, binades, 100, 400, dtype=dtype, device=device), causal=causal)
    if dtype == BF16:
        for dims in ((192, 128), (128, 64), (40, 96), (256, 64), (8, 256)):
            run(*ramp(dims, -200, 100, 400, device=device), causal=True)


@both_masks
def test_ramps_with_other_scales_and_layouts(device, causal):
    for binades in (-200, -40, 40, 200):
        q, k, v = ramp(64, binades, 100, 500, device=device)
        run(q, k, v, causal=causal, softmax_scale=-(64**-0.5))
        run(q, k, v * 2.0**80, causal=causal)
        run(q, k, v * 2.0**-80, causal=causal)
        views = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
        run(*views, causal=causal)
        run(*map(surrounded, views), causal=causal)
        shared = [t[:, :, :1].expand_as(t) for t in (k, v)]
        run(q, *shared, causal=causal)


@both_masks
@pytest.mark.parametrize("dtype, dim", WIDE, ids=str)
def test_spikes(device, causal, dtype, dim):
    """One key far above or below all the others, at both sides of tiles' edges, and one step half
    way. The heights lie around the binades a late reference may lag behind, and beyond fp32."""
    heights = (-500.0, 3.0, 11.5, 13.0, 23.0, 25.0, 60.0, 99.0, 102.0, 130.0, 500.0)
    for at in some(device, (0, 1, 63, 64, 127, 128, 191, 192, 384, 498, 499), 2):
        for height in some(device, heights, 5):
            keys = torch.zeros(500)
            keys[at] = height
            run(*climb(dim, keys, 70, dtype=dtype, device=device), causal=causal)
    for height in some(
        device, (4.0, 8.0, 12.0, 16.0, 24.0, 60.0, 97.0, 104.0, 109.0, 128.0, 300.0)
    ):
        for sign in (1, -1):
            keys = (torch.arange(500) >= 250) * (sign * height)
            run(*climb(dim, keys, 200, dtype=dtype, device=device), causal=causal)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("first, keys, binades", [(1792, 1, 17.1), (1024, 128, 12.4)])
def test_many_small_weights_beside_a_spike_are_not_lost(device, dtype, first, keys, binades):
    """A reference far above the largest weight pushed fp16 weights below 2^-25, where they are 0.
    Here the spike's own values are 0 and all the others 1, so that O is made of small weights."""
    scores = torch.zeros(2048)
    scores[first : first + keys] = binades
    q, k, v = climb(64, scores, 70, dtype=dtype, device=device)
    q[..., 1:] = 0
    q[..., 0] = 4
    v[:] = 1
    v[:, first : first + keys] = 0
    run(q, k, v)


@both_masks
def test_nan_below_rows_that_do_not_exist(device, causal):
    """64 queries leave half a tile without rows: it must not repair what nobody stores."""
    q, k, v = qkv(1, 64, 4096, (1, 1), 64 if causal else 128, device=device)
    v[:, 0] = NAN
    run(q, k, v, causal=causal)


@both_masks
def test_bounds_on_scores_are_not_scores(device, causal):
    """Long q and long k at right angles: an estimate of the maximum from norms is far too high.
    And all scores very low or very high alike."""
    q, k, v = qkv(1, 200, 300, 2, 128, device=device)
    long_q, long_k = q.clone(), k.clone()
    long_q[..., 0], long_k[..., 0] = 3000, 0
    long_q[..., 1], long_k[..., 1] = 0, 3000
    run(long_q, long_k, v, causal=causal)
    for offset in (-1000, 1000):
        shifted_q, shifted_k = q.clone(), k.clone()
        shifted_q[..., 0], shifted_k[..., 0] = 32, offset
        run(shifted_q, shifted_k, v, causal=causal)


@both_masks
def test_products_of_minus_infinity_are_masked_keys(device, causal):
    hidden = {
        "first block": slice(0, 200),
        "middle": slice(130, 300),
        "last block": slice(250, 500),
        "every other": slice(0, None, 2),
        "one": slice(127, 128),
        "all but one": slice(1, None),
        "all": slice(None),
    }
    for dtype, keys in itertools.product((BF16, FP16), hidden.values()):
        q, k, v = qkv(2, 400, 500, (2, 1), 64 if dtype == BF16 else 128, dtype=dtype, device=device)
        q[..., 0] = q[..., 0].abs() + 0.1
        k[0, keys, 0, 0] = -INF  # batch 1 keeps its keys
        out, lse = run(q, k, v, causal=causal)
        if keys == slice(None):
            assert (out[0] == 0).all() and (lse[0] == -INF).all() and lse[1].isfinite().all()


@pytest.mark.parametrize("size", [3.0, 30.0, 90.0, 300.0, 600.0])
def test_a_single_key_gives_its_own_value(device, size):
    """The reference of a score of 10^6 is rounded by percents of a weight, and P keeps them or not:
    with one key the quotient must be its value all the same."""
    for i in range(20):
        q, k, v = qkv(1, 5, 1, 2, 64, dtype=FP16, device=device, seed=i)
        q[:], k[:] = size * (1 + i / 50), size * (1 + i / 50)
        out = cute_attn.fwd(q, k, v)
        assert torch.equal(out, v.expand_as(out))


@both_masks
def test_huge_and_tiny_values(device, causal):
    q, k, v = qkv(1, 200, 300, (2, 1), 128, device=device)
    for size in (1e30, 1e-30):
        run(q, k, v * size, causal=causal)
    mixed = v.clone()
    mixed[:, ::2] *= 1e30
    mixed[:, 1::2] *= 1e-30
    run(q, k, mixed, causal=causal)
    run(q * 1e15, k * 1e-15, v, causal=causal)


# ---- NaN ----------------------------------------------------------------------------------------


@both_masks
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_nan_in_k_or_v_reaches_the_queries_that_see_the_key(device, causal, dim):
    n = 300
    clean = qkv(2, n, n, (4, 2), dim, device=device)
    places = some(device, (0, 1, 63, 64, 127, 128, 150, 255, 256, 298, 299), 5)
    for j, where in itertools.product(places, ("k row", "v row", "v element")):
        q, k, v = (t.clone() for t in clean)
        column = slice(5, 6) if where == "v element" else slice(None)
        (k if where == "k row" else v)[1, j, 1, column] = NAN
        out, lse = run(q, k, v, causal=causal)  # values included
        first = j if causal else 0
        want = torch.zeros_like(out, dtype=torch.bool)
        want[1, first:, 2:, column] = True
        assert torch.equal(out.isnan(), want), (j, where)
        want_lse = torch.zeros_like(lse, dtype=torch.bool)
        want_lse[1, 2:, first:] = where == "k row"
        assert torch.equal(lse.isnan(), want_lse), (j, where)


@both_masks
def test_nan_in_q_stays_in_its_row(device, causal):
    for seqlen_k in (300, 100):  # with 100, rows below 200 of the causal mask see no key at all
        q, k, v = qkv(2, 300, seqlen_k, (4, 2), 64, device=device)
        q[1, 150, 2] = q[0, 299, 0, 3] = NAN
        out, lse = run(q, k, v, causal=causal)
        rows = 1 if causal and seqlen_k == 100 else 2
        assert int(lse.isnan().sum()) == rows and int(out.isnan().sum()) == rows * 64


@both_masks
def test_nan_in_several_places(device, causal):
    for dims in (128, (192, 128)):
        q, k, v = qkv(2, 200, 333, (2, 1), dims, device=device)
        k[0, 300] = v[0, 280] = v[0, 332, 0, :7] = NAN
        k[1, 40, 0, 0] = v[1, 330, 0, 9] = NAN
        run(q, k, v, causal=causal)


@both_masks
@pytest.mark.parametrize("dtype, dim", WIDE, ids=str)
def test_nan_beside_a_moving_reference(device, causal, dtype, dim):
    """Confining a NaN must agree with whatever the softmax has done to its reference by then."""
    for binades, j in itertools.product(
        some(device, (-200, -40, -10, 0, 10, 200), 5), (250, 299, 333, 390, 399)
    ):
        q, k, v = ramp(dim, binades, 150, 400, dtype=dtype, device=device)
        v[1, j, 1, 3:6] = k[0, j, 0, 5] = NAN
        run(q, k, v, causal=causal)


@both_masks
def test_memory_around_the_inputs_may_hold_nan(device, causal):
    for dim, (sq, sk) in itertools.product((64, 128), ((100, 130), (129, 65), (1, 1))):
        clean = qkv(2, sq, sk, (4, 2), dim, device=device)
        run(*map(surrounded, clean), causal=causal)


@both_masks
def test_freed_memory_and_outputs_may_hold_nan(device, causal):
    for sq, sk in ((200, 300), (300, 200), (65, 1)):
        q, k, v = qkv(2, sq, sk, (4, 2), 64, device=device)
        freed = [torch.full((n,), NAN, device=device) for n in (1 << 20, q.numel() // 2, 8 * sq)]
        del freed
        run(q, k, v, causal=causal)
        out = torch.full_like(q, NAN)
        assert run(q, k, v, causal=causal, out=out)[0] is out


# ---- bits ---------------------------------------------------------------------------------------


@both_masks
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_repeats_are_equal_bit_for_bit(device, causal, dim):
    gpu = device == "cuda"
    q, k, v = qkv(2, 1000 if gpu else 200, 1000 if gpu else 200, (8, 2), dim, device=device)
    first = fwd(q, k, v, causal=causal)
    check(*first, q, k, v, causal=causal)
    for _ in range(50 if gpu else 3):
        assert same(fwd(q, k, v, causal=causal), first)
    assert torch.equal(cute_attn.fwd(q, k, v, causal=causal), first[0])


@both_masks
@pytest.mark.parametrize("lengths", [(1, 300), (5, 100), (200, 333), (333, 200)], ids=str)
def test_a_row_depends_on_its_own_sequence_and_head_only(device, causal, lengths):
    for dim in (64, 128):
        q, k, v = qkv(5, *lengths, (8, 2), dim, device=device)
        k[1] *= 50  # neighbours of another kind
        out, lse = fwd(q, k, v, causal=causal)
        check(out, lse, q, k, v, causal=causal)
        for b in range(5):
            alone = fwd(q[b : b + 1], k[b : b + 1], v[b : b + 1], causal=causal)
            assert same(alone, (out[b : b + 1], lse[b : b + 1])), b
        for h in range(8):
            g = h // 4
            alone = fwd(q[:, :, h : h + 1], k[:, :, g : g + 1], v[:, :, g : g + 1], causal=causal)
            assert same(alone, (out[:, :, h : h + 1], lse[:, h : h + 1])), h
            one = [t[2:3] for t in (q[:, :, h : h + 1], k[:, :, g : g + 1], v[:, :, g : g + 1])]
            assert same(fwd(*one, causal=causal), (out[2:3, :, h : h + 1], lse[2:3, h : h + 1]))
        spread = [t.repeat_interleave(4, 2) for t in (k, v)]
        assert same(fwd(q, *spread, causal=causal), (out, lse))
        order = torch.tensor([4, 2, 0, 1, 3, 3], device=device)
        got = fwd(q[order], k[order], v[order], causal=causal)
        assert same(got, (out[order], lse[order]))


# ---- views --------------------------------------------------------------------------------------


@both_masks
def test_views(device, causal):
    for name, (q, k, v) in views(device).items():
        kept = [t.clone() for t in (q, k, v)]
        got = fwd(q, k, v, causal=causal)
        check(*got, q, k, v, causal=causal)
        assert got[0].is_contiguous() and got[1].is_contiguous(), name
        assert same(got, fwd(*(t.contiguous() for t in kept), causal=causal)), name
        assert all(torch.equal(x, y) for x, y in zip(kept, (q, k, v))), name


def out_views(device, b=2, s=130, h=4, d=64):
    options = {"dtype": BF16, "device": device}
    return {
        "transposed": torch.full((b, h, s, d), NAN, **options).transpose(1, 2),
        "inside": torch.full((b + 2, s + 2, h + 2, d + 16), NAN, **options)[1:-1, 1:-1, 1:-1, 8:-8],
        "every other row": torch.full((b, 2 * s, h, d), NAN, **options)[:, ::2],
        "base not aligned": torch.full((b * s * h * d + 1,), NAN, **options)[1:].view(b, s, h, d),
        "stride not a multiple of 8": torch.full((b, s, h, d + 4), NAN, **options)[..., :d],
        "last stride 2": torch.full((b, s, h, 2 * d), NAN, **options)[..., ::2],
    }


@both_masks
def test_out_of_any_strides_and_nothing_beside_it(device, causal):
    q, k, v = qkv(2, 130, 100, (4, 2), 64, device=device)
    want = fwd(q, k, v, causal=causal)
    for name, out in out_views(device).items():
        got = run(q, k, v, causal=causal, out=out)
        assert got[0] is out and same(got, want), name
        assert cute_attn.fwd(q, k, v, causal=causal, out=out) is out
        whole = out._base if out._base is not None else out
        assert int(whole.isnan().sum()) == whole.numel() - out.numel(), name


# ---- few queries: the keys are split ---------------------------------------------------------


def split(q, k, v, **options):
    """run(), where Hopper's kernel splits the keys into several parts."""
    explained = cute_attn.explain(q, k, v, **options)
    assert explained.arch != "sm90" or explained.parts > 3
    return run(q, k, v, **options)


@both_masks
@pytest.mark.parametrize("dtype, dim", WIDE, ids=str)
def test_few_queries(device, causal, dtype, dim):
    for seqlen_q, seqlen_k in some(
        device, ((1, 2048), (7, 4097), (64, 2049), (100, 5000), (128, 16000))
    ):
        heads = (8, 2) if seqlen_q < 100 else (3, 3)
        for kind in some(device, ("normal", "x30", "outliers")):
            split(
                *qkv(2, seqlen_q, seqlen_k, heads, dim, dtype=dtype, device=device, kind=kind),
                causal=causal,
            )
    for binades in some(device, (10, -10, 40, -40, -200)):
        split(*ramp(dim, binades, 70, 3000, dtype=dtype, device=device), causal=causal)


@both_masks
def test_few_queries_with_special_values(device, causal):
    q, k, v = qkv(2, 100, 3000, (4, 2), 64, device=device)
    q[..., 0] = q[..., 0].abs() + 0.1
    hidden, broken = k.clone(), v.clone()
    hidden[0, :1500, 0, 0] = -INF  # whole parts that one batch does not see
    split(q, hidden, v, causal=causal)
    for key in (0, 700, 2899, 2950, 2999):
        broken[1, key, 1, 3] = NAN
        split(q, k, broken, causal=causal)
    for name, t in {"q": q, "k": k}.items():
        poisoned = t.clone()
        poisoned[1, 5, 1] = NAN
        split(*(poisoned if n == name else x for n, x in zip("qkv", (q, k, v))), causal=causal)
    split(q, k, v, causal=causal, softmax_scale=0.0)
    out = torch.full((2, 4, 100, 64), NAN, dtype=BF16, device=device).transpose(1, 2)
    split(q, k, v, causal=causal, out=out)


@pytest.mark.parametrize("size", [3.0, 30.0, 100.0, 200.0])
def test_few_queries_where_all_scores_are_large_alike(device, size):
    """A part's log-sum-exp in fp32 would not tell its share: scores reach 10^6 here."""
    for i in range(5):
        q, k, v = qkv(1, 5, 2176, 2, 128, device=device)
        q[:], k[:], v[:] = size * (1 + i / 10), size * (1 + i / 10), 0
        v[:, -256:] = 1
        share = cute_attn.fwd(q, k, v).double()
        assert ((share - 256 / 2176).abs() <= 0.01 * 256 / 2176).all()


@both_masks
def test_few_queries_do_not_depend_on_the_batch(device, causal):
    q, k, v = qkv(5, 33, 4000, (4, 2), 128, device=device)
    out, lse = split(q, k, v, causal=causal)
    for b in range(5):
        alone = fwd(q[b : b + 1], k[b : b + 1], v[b : b + 1], causal=causal)
        assert same(alone, (out[b : b + 1], lse[b : b + 1]))


# ---- accuracy -----------------------------------------------------------------------------------


@both_masks
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("kind", ["normal", "x30", "outliers"])
def test_error_is_at_most_that_of_torch(device, causal, dtype, dim, kind):
    """Against fp64: the error in the 2-norm and the largest one, times 1.1. The LSE is good to
    1e-4; x30 inputs make scores of thousands, of which fp32 keeps 7 digits.

    Two of these bars are missed, and show as xfailed where they are. The largest error on N(0,1)
    without a mask: the largest weight of a row, which torch always takes as 1, is rounded in P like
    all others if it is small. And LSE on x30. What holds instead is asserted all the same."""
    batch, seqlen, heads = (4, 1024, 8) if device == "cuda" else (1, 256, 4)
    q, k, v = qkv(batch, seqlen, seqlen, heads, dim, dtype=dtype, device=device, kind=kind)
    want, want_lse = reference.attention(q, k, v, causal=causal)
    out, lse = fwd(q, k, v, causal=causal)
    ours, torchs = errors(out, want), errors(sdpa(q, k, v, causal), want)
    largest, norm = (ours[i] / torchs[i] for i in range(2))
    print(f"error over torch's: largest {largest:.3f}, norm {norm:.3f}")
    assert norm <= 1.1, (ours, torchs)
    assert largest <= (1.6 if kind == "normal" and not causal else 1.1), (ours, torchs)
    allowed = torch.full_like(want_lse, 1e-4)
    if kind == "x30":
        allowed += 1e-6 * want_lse.abs() + score_error(q, k).transpose(1, 2)
    close(lse, want_lse, allowed, "lse")
    off = (lse.double() - want_lse).abs().max()
    if largest > 1.1 or off > 1e-4:
        pytest.xfail(f"missed: largest error {largest:.2f} of torch's, LSE off by {off:.1e}")
