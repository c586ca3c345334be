"""The reference itself: against the definition, against torch, and its memory."""

import math

import pytest
import torch
from helpers import BF16, FP16, SCALES, SHAPES, UNIT, Watch, close, naive, qkv

from cute_attn import reference


def exact(got, want, relative=1e-9):
    close(got[0], want[0], relative * (1 + want[0].abs()), "out")
    close(got[1], want[1], relative * (1 + want[1].abs()), "lse")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_the_definition(shape, scale, causal):
    q, k, v = qkv(2, *shape)
    want = naive(q, k, v, causal, scale)
    exact(reference.attention(q, k, v, causal=causal, softmax_scale=scale), want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blockwise_is_the_definition(shape, scale, causal):
    """fp32 inputs, so that nothing but fp32 arithmetic separates the two; tiles that divide the
    lengths and tiles that do not."""
    q, k, v = (t.float() for t in qkv(2, *shape))
    want = naive(q, k, v, causal, scale)
    for block_q, block_k in ((128, 128), (16, 16), (32, 10), (7, 48)):
        got = reference.attention_blockwise(
            q, k, v, causal=causal, softmax_scale=scale, block_q=block_q, block_k=block_k
        )
        exact(got, want, 4e-6)


def test_torch_agrees():
    """A second opinion on values, bottom-right mask, grouping of heads and default scale."""
    q, k, v = (t.double() for t in qkv(2, 37, 50, (6, 2), (32, 16)))
    mask = torch.ones(37, 50, dtype=torch.bool).tril(50 - 37)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    got, _ = reference.attention(q, k, v, causal=True)
    close(got, want, 1e-12)


def test_dtype_of_the_oracle():
    q, k, v = qkv(1, 9, 9, 2, 16)
    for dtype in (torch.float32, torch.float64):
        out, lse = reference.attention(q, k, v, dtype=dtype)
        assert out.dtype == lse.dtype == dtype


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_blockwise_dtypes_and_layout(dtype):
    q, k, v = qkv(2, 20, 30, (4, 2), (16, 24), dtype=dtype)
    out, lse = reference.attention_blockwise(q, k, v)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert out.shape == (2, 20, 4, 24) and out.is_contiguous()
    assert lse.shape == (2, 4, 20) and lse.is_contiguous()
    want, _ = reference.attention(q, k, v)
    close(out, want, 1.01 * UNIT[dtype] * want.abs() + 1e-6)


def poison(name, q, k, v):
    {
        "K row": lambda: k[1, 20, 1].fill_(math.nan),
        "K element": lambda: k[1, 0, 0, 3:4].fill_(math.nan),
        "V row": lambda: v[0, 31, 0].fill_(math.nan),
        "V element": lambda: v[0, 16, 1, 5:6].fill_(math.nan),
        "V last": lambda: v[0, -1, 1, :3].fill_(math.nan),
        "Q row": lambda: q[1, 7, 2].fill_(math.nan),
        "V infinite": lambda: v[0, 33, 1, 2:4].copy_(torch.tensor([math.inf, -math.inf])),
        "V both infinities": lambda: v[0, 3:5, 1, 2].copy_(torch.tensor([math.inf, -math.inf])),
        "K -inf": lambda: k[1, 12:20, 1, 0].fill_(-math.inf),
        "K all -inf": lambda: k[1, :, 1, 0].fill_(-math.inf),
        "K and V": lambda: (k[1, 38, 1].fill_(math.nan), v[1, 2, 0].fill_(math.nan)),
    }[name]()


NAMES = "K row/K element/V row/V element/V last/Q row/V infinite/V both infinities/K -inf"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [*NAMES.split("/"), "K all -inf", "K and V"])
@pytest.mark.parametrize("scale", [None, 0.0])
def test_special_values_reach_the_queries_that_see_them(name, causal, scale):
    q, k, v = (t.float() for t in qkv(2, 30, 40, (4, 2), 16))
    q[..., 0] = q[..., 0].abs() + 0.1  # products with -inf are -inf
    poison(name, q, k, v)
    want = naive(q, k, v, causal, scale)
    exact(reference.attention(q, k, v, causal=causal, softmax_scale=scale), want)
    if name == "V both infinities" or (scale == 0 and "inf" in name):
        return  # fp32 underflow of the weight of an infinity is not specified
    for block in (16, 128):
        got = reference.attention_blockwise(
            q, k, v, causal=causal, softmax_scale=scale, block_q=block, block_k=block
        )
        exact(got, want, 4e-6)


def test_blockwise_memory_is_linear_and_heads_are_not_copied():
    n = 2048
    q, k, v = qkv(1, n, n, (32, 1), 8)
    with Watch() as watch:
        reference.attention_blockwise(q, k, v)
    # out, or one tile of scores of all heads; repeated keys would be as large as out
    assert watch.largest <= max(n * 32 * 8, 32 * 128 * 128)
    q, k, v = qkv(1, 16, 8 * n, (32, 1), 8)
    with Watch() as watch:
        reference.attention_blockwise(q, k, v)
    assert watch.largest <= 8 * n * 8  # v.isfinite(); never 32 times the keys


def test_blockwise_many_heads_do_not_share_one_tile():
    q, k, v = qkv(4096, 16, 16, 8, 8)
    with Watch() as watch:
        out, lse = reference.attention_blockwise(q, k, v)
    assert watch.largest <= max(out.numel(), reference._TILE_ELEMENTS)
    assert watch.count["bmm"] == 2
    want, want_lse = reference.attention(q, k, v)
    close(out, want, UNIT[BF16] * want.abs() + 1e-5)
    close(lse, want_lse, 1e-5)


def test_blockwise_skips_hidden_blocks():
    q, k, v = qkv(1, 1024, 1024, 1, 8)
    with Watch() as watch:
        reference.attention_blockwise(q, k, v, causal=True)
    assert watch.count["bmm"] == 8 * 9 // 2


def test_blockwise_rows_have_the_same_bits_in_any_batch():
    """BLAS takes other paths for a few rows, and for one matrix rather than many."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for seqlen_q, seqlen_k in ((1, 1), (1, 100), (5, 100), (5, 17), (64, 1), (150, 140)):
            q, k, v = qkv(6, seqlen_q, seqlen_k, 1, 64)
            out, lse = reference.attention_blockwise(q, k, v)
            for i, n in ((0, 1), (3, 1), (2, 3)):
                part = slice(i, i + n)
                got = reference.attention_blockwise(q[part], k[part], v[part])
                assert torch.equal(got[0], out[part]) and torch.equal(got[1], lse[part])
    finally:
        torch.set_num_threads(threads)


def test_oracle_gradients_follow_differences():
    q, k, v = (t.double() for t in qkv(1, 6, 5, (2, 1), 8))

    def both(q, k, v):
        out, lse = reference.attention(q, k, v, causal=True)
        return out, lse[..., 1:]  # row 0 sees no key: its lse is -inf

    assert torch.autograd.gradcheck(both, [t.requires_grad_() for t in (q, k, v)])


def test_head_counts():
    q, k, v = qkv(1, 4, 4, (6, 4), 8)
    for f in (reference.attention, reference.attention_blockwise):
        with pytest.raises(ValueError, match=r"6.*4"):
            f(q, k, v)


def test_nan_in_one_sequence_changes_no_bit_of_another():
    """The tile with the NaN must go through the same products as the others."""
    for seed in range(6):
        torch.manual_seed(seed)
        q = torch.randn(2, 130, 3, 8).half()
        k, v = (torch.randn(2, 257, 1, 8).half() for _ in range(2))
        want, want_lse = reference.attention_blockwise(q, k, v)
        v[0, 0, 0, 0] = math.nan
        got, lse = reference.attention_blockwise(q, k, v)
        assert torch.equal(got[1], want[1]) and torch.equal(lse, want_lse)
        assert got[0, ..., 0].isnan().all() and torch.equal(got[0, ..., 1:], want[0, ..., 1:])
