"""cute_attn.merge: partial softmaxes form a commutative monoid, and fwd maps keys into it."""

import math

import pytest
import torch
from helpers import BF16, DEVICES, FP16, UNIT, close, qkv, rand

import cute_attn
from cute_attn import reference

INF, NAN = math.inf, math.nan


def parts(device, dtype=torch.float32, shape=(2, 5, 3, 16), seed=0, spread=1.0):
    out = rand(shape, dtype, device, seed)
    lse = rand((*shape[:-3], shape[-2], shape[-3]), torch.float32, device, seed + 1) * spread
    return out, lse


def definition(out_a, lse_a, out_b, lse_b):
    """In fp64, row by row, over the parts that have keys."""
    out, lse = torch.zeros_like(out_a, dtype=torch.float64), torch.zeros_like(lse_a).double()
    a, b = lse_a.double().transpose(-1, -2), lse_b.double().transpose(-1, -2)
    for row in torch.cartesian_prod(*map(torch.arange, a.shape)).tolist():
        row = tuple(row)
        present = [(x[row].double(), y[row]) for x, y in ((out_a, a), (out_b, b)) if y[row] > -INF]
        weights = torch.tensor([y for _, y in present], dtype=torch.float64)
        lse.transpose(-1, -2)[row] = torch.logsumexp(weights, 0) if present else -INF
        for (x, _), w in zip(present, torch.softmax(weights, 0)):
            out[row] += w * x
    return out, lse


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(2, 5, 3, 16), (7, 3, 8)], ids=["dense", "varlen"])
@pytest.mark.parametrize("spread", [1.0, 60.0, 3e4])
def test_definition(device, dtype, shape, spread):
    a, b = parts(device, dtype, shape, 0, spread), parts(device, dtype, shape, 2, spread)
    a[1][..., :2], b[1][..., 1:3] = -INF, -INF  # none, either and both parts without keys
    out, lse = cute_attn.merge(*a, *b)
    want, want_lse = definition(*(t.cpu() for t in (*a, *b)))
    assert out.dtype == dtype and lse.dtype == torch.float32 and out.device == a[0].device
    close(out.cpu(), want, 1.01 * UNIT.get(dtype, 0) * want.abs() + 4e-6, "out")
    close(lse.cpu(), want_lse, 1e-6 * (1 + want_lse.abs()), "lse")
    assert (lse[..., 1] == -INF).all() and (out[..., 1, :, :] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_part_without_keys_is_neutral(device):
    """Bit for bit, whatever its out holds: other libraries leave NaN there."""
    out_a, lse_a = parts(device, BF16)
    lse_a[0, 0, 0] = -INF
    out_a[0, 0, 0] = 0
    for garbage in (0.0, NAN, INF):
        empty = torch.full_like(out_a, garbage), torch.full_like(lse_a, -INF)
        for out, lse in (
            cute_attn.merge(out_a, lse_a, *empty),
            cute_attn.merge(*empty, out_a, lse_a),
        ):
            assert torch.equal(out, out_a) and torch.equal(lse, lse_a)


@pytest.mark.parametrize("device", DEVICES)
def test_associative_and_commutative(device):
    a, b, c = (parts(device, seed=s, spread=20.0) for s in (0, 2, 4))
    b[1][:, :, 0] = c[1][:, :, 0] = c[1][:, 0] = -INF
    left = cute_attn.merge(*cute_attn.merge(*a, *b), *c)
    right = cute_attn.merge(*a, *cute_attn.merge(*b, *c))
    close(left[0], right[0].double(), 4e-6)
    close(left[1], right[1].double(), 1e-5)
    for x, y in zip(cute_attn.merge(*a, *b), cute_attn.merge(*b, *a)):
        assert torch.equal(x, y)


@pytest.mark.parametrize("device", DEVICES)
def test_no_overflow_and_no_loss_far_from_zero(device):
    """TE#1557: merging exponentiated LSEs overflows. At 1e5 an fp32 LSE is good to 0.008: the two
    weights must still add up to 1."""
    out = torch.ones(1, 4, 1, 8, device=device)
    lse = torch.tensor([1e5, -1e5, 88.9, 3e38], device=device).view(1, 1, 4)
    for shift in (0.0, 1.0, 3.0):
        merged, merged_lse = cute_attn.merge(out, lse, out, lse - shift)
        close(merged, torch.ones_like(merged), 2e-7)
        want = lse.double() + math.log1p(math.exp(-shift))
        close(merged_lse[..., :3], want[..., :3], 2e-7 * want[..., :3].abs())
        assert merged_lse.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_bad_rows_stay_bad_and_alone(device, bad):
    a, b = parts(device), parts(device, seed=2)
    clean = cute_attn.merge(*a, *b)
    a[1][1, 2, 3] = bad  # batch 1, head 2, query 3
    b[0][0, 4, 0, 5] = NAN  # one value of one row
    out, lse = cute_attn.merge(*a, *b)
    want, want_lse = clean[0].clone(), clean[1].clone()
    want[1, 3, 2], want_lse[1, 2, 3] = NAN, NAN
    want[0, 4, 0, 5] = NAN
    assert torch.equal(out.nan_to_num(7.0), want.nan_to_num(7.0)) and not out.isinf().any()
    assert torch.equal(lse.nan_to_num(7.0), want_lse.nan_to_num(7.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cut", [1, 128, 200, 299])
def test_halves_of_the_keys_give_the_whole(device, causal, cut):
    """B77 (TE#1557, TE#716): split K, merge by LSE; with the mask, queries before the cut see
    nothing of the second part."""
    sq = sk = 300
    q, k, v = qkv(2, sq, sk, (4, 2), 64, device=device)
    whole, whole_lse = cute_attn.fwd(q, k, v, causal=causal, return_lse=True)
    k1, k2, v1, v2 = k[:, :cut], k[:, cut:], v[:, :cut], v[:, cut:]
    second = cute_attn.fwd(q, k2, v2, causal=causal, return_lse=True)
    if causal:  # rows below the cut see all of the first part
        top = cute_attn.fwd(q[:, :cut], k1, v1, causal=True, return_lse=True)
        rest = cute_attn.fwd(q[:, cut:], k1, v1, return_lse=True)
        first = torch.cat([top[0], rest[0]], 1), torch.cat([top[1], rest[1]], 2)
        assert (second[1][..., :cut] == -INF).all()
    else:
        first = cute_attn.fwd(q, k1, v1, return_lse=True)
    out, lse = cute_attn.merge(*first, *second)
    want, want_lse = reference.attention(q, k, v, causal=causal)
    size, _ = reference.attention(q, k, v.abs(), causal=causal)
    close(out, want, 4 * UNIT[BF16] * size)  # out is rounded twice, P once
    close(lse, want_lse, 1e-4)
    close(lse, whole_lse.double(), 2e-4)
    close(out, whole.double(), 4 * UNIT[BF16] * size)


def test_empty_sizes():
    for shape in ((0, 5, 3, 8), (2, 0, 3, 8), (2, 5, 0, 8), (0, 3, 8)):
        out, lse = cute_attn.merge(*parts("cpu", BF16, shape), *parts("cpu", BF16, shape))
        assert out.shape == shape and lse.shape == (*shape[:-3], shape[-2], shape[-3])


def test_inputs_are_not_written():
    args = (*parts("cpu"), *parts("cpu", seed=2))
    args[1][0] = -INF
    copies = [t.clone() for t in args]
    cute_attn.merge(*args)
    assert all(torch.equal(x, y) for x, y in zip(args, copies))


def test_differentiable_where_a_part_has_no_keys():
    a, b = parts("cpu", torch.float32), parts("cpu", torch.float32, seed=2)
    a[1][0, 0, 0] = b[1][0, 0, 0] = a[1][1] = -INF
    args = [t.requires_grad_() for t in (*a, *b)]
    out, lse = cute_attn.merge(*args)
    (out.sum() + lse[lse > -INF].sum()).backward()
    assert all(t.grad.isfinite().all() for t in args)
    # d out / d out_a is part a's share of the weights
    share = torch.exp(a[1] - lse)[0, 1, 1].item()
    assert math.isclose(args[0].grad[0, 1, 1, 0].item(), share, rel_tol=1e-5)


def test_errors_name_the_argument():
    out, lse = parts("cpu", BF16)
    merge = cute_attn.merge
    for args, error, words in (
        ((out, lse, out, lse.mT), ValueError, r"lse_b.shape .*\(2, 3, 5\)"),
        ((out, lse[0], out, lse), ValueError, "lse_a.shape"),
        ((out, lse, out[:1], lse), ValueError, "out_b.shape"),
        ((out[0, 0], lse, out[0, 0], lse), ValueError, "out_a.shape"),
        ((out, lse, out.half(), lse), TypeError, "out_b.dtype"),
        ((out.int(), lse, out.int(), lse), TypeError, "out_a.dtype"),
        ((out, lse.bfloat16(), out, lse), TypeError, "lse_a.dtype"),
        ((out, lse, out, None), TypeError, "lse_b is a NoneType"),
        ((out, lse, out.to("meta"), lse), ValueError, "out_b.device"),
    ):
        with pytest.raises(error, match=words):
            merge(*args)
