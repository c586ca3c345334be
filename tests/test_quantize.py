"""quantize_qkv: transforms that change nothing but roundings, scales, casts, and its errors."""

import math

import pytest
import torch
from fp8_oracle import E4M3, data, hadamard, relative
from helpers import BF16, FP16, close, qkv, rand

import cute_attn
from cute_attn import quantize, reference

WHOLE = (64, 128, 256)
BLOCKS = {
    16: [16],
    48: [32, 16],
    80: [64, 16],
    96: [64, 32],
    192: [128, 64],
    240: [128, 64, 32, 16],
}


def restored(pack):
    """q, k and v in fp64 as the casts left them, with their scales."""
    q, k, v = (t.double() for t in (pack.q, pack.k, pack.v))
    q = q * pack.q_descale.transpose(1, 2).unsqueeze(-1)
    if pack.k_descale.dim() == 3:
        of_key = pack.k_descale.repeat_interleave(pack.k_block, 2)[:, :, : k.shape[1]]
        k = k * of_key.transpose(1, 2).unsqueeze(-1)
    else:
        k = k * pack.k_descale[:, None, :, None]
    if pack.v_descale is not None:
        of_v = pack.v_descale if pack.v_descale.dim() == 3 else pack.v_descale.unsqueeze(-1)
        v = v * of_v.unsqueeze(1)
    return q, k, v


def transformed(q, k, v, given=(None, None, None), angles=(None, None), seed=0):
    return quantize.transform(q, k, v, given, angles, seed)


def undone(t, causal=False, scale=None):
    """Attention on what transform returned, in fp64, and its undoing: (out, lse)."""
    out, lse = reference.attention(t.q, t.k, t.v, causal=causal, softmax_scale=scale)
    group = t.q.shape[2] // t.k.shape[2]
    if t.v_shift is not None:
        out = out + t.v_shift.repeat_interleave(group, -2).unsqueeze(-3)
    if t.q_dot_k_shift is not None:
        lse = lse + (t.q.shape[3] ** -0.5 if scale is None else scale) * t.q_dot_k_shift
    return out, lse


# Hadamard


@pytest.mark.parametrize("dim", range(16, 257, 16))
def test_b96_rotation_is_orthonormal_for_every_head_dim(dim):
    M = quantize.rotate(torch.eye(dim, dtype=torch.float64), 3)
    assert (M @ M.T - torch.eye(dim)).abs().max() < 1e-14
    x = rand((5, dim), torch.float64)
    assert (quantize.rotate(quantize.rotate(x, 3), 3, inverse=True) - x).abs().max() < 1e-14
    blocks = quantize.hadamard_blocks(dim)
    assert sum(blocks) == dim and all(b & (b - 1) == 0 for b in blocks)
    outside = torch.block_diag(*(torch.ones(b, b) for b in blocks)) == 0
    assert M[outside].count_nonzero() == 0 and M[~outside].abs().min() > 0


def test_blocks():
    assert all(quantize.hadamard_blocks(d) == [d] for d in WHOLE)
    assert all(quantize.hadamard_blocks(d) == blocks for d, blocks in BLOCKS.items())


@pytest.mark.parametrize("dim", [*WHOLE, 96])
def test_rotation_is_the_matrix(dim):
    x = rand((7, dim), torch.float32)
    M = quantize._signs(dim, 5)[:, None].double() * hadamard(dim)
    assert (quantize.rotate(x, 5) - x.double() @ M).abs().max() < 1e-5


@pytest.mark.parametrize("dim", WHOLE)
def test_integers_come_back_exactly(dim):
    x = torch.randint(-1000, 1000, (9, dim), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(quantize.walsh_hadamard(quantize.walsh_hadamard(x)), dim * x)
    if math.isqrt(dim) ** 2 == dim:  # then the factor of either way is a power of two
        assert torch.equal(quantize.rotate(quantize.rotate(x, 1), 1, inverse=True), x)


def test_seeds_reproduce_and_differ():
    q, k, v = qkv(1, 40, 40, 2, 64)
    a, b, c, none = (cute_attn.quantize_qkv(q, k, v, hadamard_seed=s) for s in (7, 7, 8, None))
    assert torch.equal(a.q.float(), b.q.float()) and torch.equal(a.k.float(), b.k.float())
    assert not torch.equal(a.q.float(), c.q.float())
    assert none.qk_balance is None and a.qk_balance is not None
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    cute_attn.quantize_qkv(q, k, v)
    assert torch.equal(torch.random.get_rng_state(), before)  # the caller's generator is his


# What the transforms leave as it is


@pytest.mark.parametrize("kind", ["gauss", "fa3", "kbias", "qkbias", "kzero", "vbias"])
@pytest.mark.parametrize("causal", [False, True])
def test_without_the_cast_nothing_changes(kind, causal):
    q, k, v = data(kind, 192, 64)
    out, lse = undone(transformed(q, k, v), causal)
    want, want_lse = reference.attention(q, k, v, causal=causal)
    assert relative(out, want) <= 1e-6
    close(lse, want_lse, 1e-5 + 2.0**-23 * want_lse.abs())  # qkbias: an LSE of 100


@pytest.mark.parametrize("dims", [(64, 64), (80, 48), (256, 16)])
@pytest.mark.parametrize("scale", [None, -0.2])
def test_without_the_cast_gqa_cross_lengths_and_head_dims(dims, scale):
    q, k, v = qkv(2, 33, 70, (6, 2), dims, seed=1)
    shift = rand((2, dims[0]), torch.float32, seed=5), rand((2, 2, dims[1]), torch.float32, seed=6)
    balance = rand((2, dims[0]), torch.float32, seed=7).abs() + 0.1
    for given in ((None, None, None), (*shift, balance), (False, False, None)):
        out, lse = undone(transformed(q, k, v, given), True, scale)
        want, want_lse = reference.attention(q, k, v, causal=True, softmax_scale=scale)
        assert relative(out, want) <= 1e-6 and (lse - want_lse).abs().max() <= 1e-5


def test_balance_is_a_power_of_two_and_evens_out():
    q, k, v = data("kzero", 512, 64)
    pack = cute_attn.quantize_qkv(q, k, v)
    assert pack.qk_balance.shape == (1, 2, 64)
    assert torch.equal(pack.qk_balance.log2(), pack.qk_balance.log2().round())
    wide = pack.qk_balance.log2() >= 3  # sqrt(100) to sqrt(500)
    assert wide.sum(-1).tolist() == [[4, 4]]
    given = cute_attn.quantize_qkv(q, k, v, qk_balance=torch.full((2, 64), 3.0))
    assert (given.qk_balance == 4).all()
    zero = k.clone()
    zero[..., :3] = 0
    for a, b in ((q, zero), (zero, k), (zero, zero), (q * 0, k), (q * 0, k * 0)):
        pack = cute_attn.quantize_qkv(a, b, v)
        assert all(t.isfinite().all() for t in (pack.q.float(), pack.k.float(), pack.qk_balance))


def test_rope_turns_pairs_by_their_angles():
    q, k, v = qkv(1, 6, 6, (4, 2), 32, seed=2)
    angles = torch.arange(9.0)[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.1])  # 9 rows for 6
    t = transformed(q, k, v, (False, False, None), (angles.cos(), angles.sin()), None)
    for got, x in ((t.q, q), (t.k, k)):
        x = x.double()
        pair = torch.complex(x[..., :4], x[..., 4:8])
        pair = pair * torch.polar(torch.ones(6, 1, 4).double(), angles[:6, None].double())
        want = torch.cat((pair.real, pair.imag, x[..., 8:]), -1)
        assert (got - want).abs().max() < 1e-6
    full = transformed(q, k, v, angles=(angles.cos(), angles.sin()))
    out, lse = undone(full)
    want, want_lse = reference.attention(t.q, t.k, v)
    assert relative(out, want) <= 1e-6 and (lse - want_lse).abs().max() <= 1e-5


def test_channel_statistics_are_what_a_call_measures():
    q, k, v = data("qkbias", 256, 64)
    stats = cute_attn.channel_statistics(q, k, v)
    pack = cute_attn.quantize_qkv(q, k, v)
    assert (stats.k_shift - k[0].double().mean(0)).abs().max() < 1e-4
    assert (stats.v_shift - v[0].double().mean(0)).abs().max() < 1e-5
    assert torch.equal(stats.qk_balance, pack.qk_balance[0])
    again = cute_attn.quantize_qkv(q, k, v, **stats._asdict())
    assert torch.equal(again.k.float(), pack.k.float())
    both = cute_attn.channel_statistics(*(torch.cat((t, 2 * t)) for t in (q, k, v)))
    torch.testing.assert_close(both.k_shift, 1.5 * stats.k_shift)
    assert both.qk_balance.shape == (2, 64)


def test_statistics_do_not_count_nan():
    q, k, v = qkv(1, 50, 50, 2, 64)
    whole = cute_attn.channel_statistics(q, k[:, 1:], v[:, 1:])
    k[:, 0], v[:, 0] = math.nan, math.inf
    with_nan = cute_attn.channel_statistics(q, k, v)
    for a, b in zip(whole, with_nan):
        torch.testing.assert_close(a, b)


# Scales and casts


@pytest.mark.parametrize("k_block", [None, 64, 16, "head"])
@pytest.mark.parametrize("v_scales", ["head", "channel"])
def test_scales_are_those_of_the_largest_values(k_block, v_scales):
    q, k, v = qkv(2, 50, 200, (4, 2), (64, 48), seed=3)
    pack = cute_attn.quantize_qkv(q, k, v, k_block=k_block, v_scales=v_scales)
    block = 128 if k_block is None else k_block
    assert pack.q_descale.shape == (2, 4, 50)
    blocks = () if block == "head" else (-(-200 // block),)
    assert pack.k_descale.shape == (2, 2, *blocks)
    assert pack.v_descale.shape == ((2, 2, 48) if v_scales == "channel" else (2, 2))
    assert (pack.q.float().abs().amax(-1) == 448).all()
    parts = pack.k.float().split(200 if block == "head" else block, 1)
    assert all((p.abs().amax((1, 3)) == 448).all() for p in parts)
    assert (pack.v.float().abs().amax((1,) if v_scales == "channel" else (1, 3)) == 448).all()
    t = transformed(q, k, v)
    for got, want in zip(restored(pack), t[:3]):
        assert 0.02 < relative(got, want.double()) < 0.032  # e4m3's is 0.0265
    for name in ("q", "k", "v"):
        assert getattr(pack, name).dtype == E4M3 and getattr(pack, name).is_contiguous()


def test_high_precision_preset_leaves_v():
    q, k, v = qkv(1, 30, 30, 2, 64, dtype=FP16)
    pack = cute_attn.quantize_qkv(q, k, v, preset="fp8_hp", v_shift=False)
    assert torch.equal(pack.v, v) and pack.v_descale is None and pack.dtype == FP16
    assert pack.v_shift is None and pack.q.dtype == E4M3


def test_casts_saturate():
    x = torch.tensor([447.0, 449.0, 1e9, -1e9, math.inf, math.nan, 2.0**-9, 2.0**-11])
    got = quantize.saturate(x).float()
    assert got[:5].tolist() == [448, 448, 448, -448, 448] and got[5].isnan()
    assert got[6:].tolist() == [2.0**-9, 0]


def test_nan_stays_in_its_row_and_zeros_have_scale_1():
    q, k, v = qkv(1, 40, 40, 2, 64)
    k[0, 3, 0, 5], v[0, 4, 1, 6], q[0, 7, 1, 0] = math.nan, math.nan, math.nan
    pack = cute_attn.quantize_qkv(q, k, v)
    for name, want in (("q", (7, 1)), ("k", (3, 0))):
        rows = getattr(pack, name).float().isnan().any(-1).nonzero().tolist()
        assert rows == [[0, *want]]
    assert pack.v.float().isnan().nonzero().tolist() == [[0, 4, 1, 6]]
    assert all(getattr(pack, f"{name}_descale").isfinite().all() for name in "qkv")
    zero = cute_attn.quantize_qkv(q * 0, torch.zeros_like(k), torch.zeros_like(v))
    assert (zero.k_descale == 1).all() and (zero.v_descale == 1).all()


def test_tiny_and_huge_values_keep_their_relative_error():
    for size in (1e-37, 1e-30, 1e30):
        q, k, v = (t * size for t in qkv(1, 20, 20, 1, 64))
        pack = cute_attn.quantize_qkv(q, k, v)
        for name in "qkv":
            assert getattr(pack, name).float().isfinite().all()
        if size > 1e-35:
            assert relative(restored(pack)[2], transformed(q, k, v).v.double()) < 0.032


@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_empty_inputs(sizes):
    pack = cute_attn.quantize_qkv(*qkv(*sizes, (4, 2), 32), v_scales="channel")
    batch, seqlen_q, seqlen_k = sizes
    assert pack.q_descale.shape == (batch, 4, seqlen_q)
    assert pack.k_descale.shape == (batch, 2, -(-seqlen_k // 128))
    assert pack.v_descale.shape == (batch, 2, 32) and pack.v_descale.isfinite().all()
    cute_attn.quantize_qkv(*qkv(*sizes, (4, 2), 32), k_block="head")


def test_strides_autocast_and_batch_do_not_matter():
    q, k, v = qkv(3, 40, 40, (4, 2), 64, seed=4)
    want = cute_attn.quantize_qkv(q, k, v)
    wide = [torch.stack((t, t * 0), -1).flatten(-2)[..., ::2] for t in (q, k, v)]
    assert wide[0].stride(-1) == 2
    with torch.autocast("cpu", BF16):
        strided = cute_attn.quantize_qkv(*wide)
    one = cute_attn.quantize_qkv(q[1:2], k[1:2], v[1:2])
    for name in ("q", "k", "v", "q_descale", "k_descale", "v_descale", "q_dot_k_shift"):
        a, b, c = (getattr(pack, name).float() for pack in (want, strided, one))
        assert torch.equal(a, b) and torch.equal(a[1:2], c), name


# Errors

Q, K, V = qkv(1, 8, 8, (4, 2), 32)
WRONG = [
    (TypeError, "q is a list", {"q": [1]}),
    (TypeError, "q.dtype is torch.float32", {"q": Q.float()}),
    (TypeError, "q.dtype is torch.float8_e4m3fn", {"q": Q.to(E4M3)}),
    (TypeError, "k.dtype is torch.float16", {"k": K.half()}),
    (ValueError, "k.device is meta", {"k": K.to("meta")}),
    (ValueError, "v.shape is.*k's seqlen, 8", {"v": V[:, :5]}),
    (ValueError, "head_dim is 24: FP8 allows", {"q": Q[..., :24], "k": K[..., :24]}),
    (ValueError, "head_dim_v is 8: FP8 allows", {"v": V[..., :8]}),
    (ValueError, "nheads_q is 3 and nheads_kv is 2", {"q": Q[:, :, :3]}),
    (ValueError, "preset is 'int8': allowed are 'fp8', 'fp8_hp'", {"preset": "int8"}),
    (ValueError, "preset is None", {"preset": None}),
    (TypeError, "hadamard_seed is 1.5", {"hadamard_seed": 1.5}),
    (TypeError, "hadamard_seed is True", {"hadamard_seed": True}),
    (ValueError, "hadamard_seed is -1", {"hadamard_seed": -1}),
    (ValueError, "k_shift.shape is \\(32,\\): allowed are \\(2", {"k_shift": torch.ones(32)}),
    (ValueError, "v_shift.shape is", {"v_shift": torch.ones(4, 32)}),
    (ValueError, "qk_balance.shape is", {"qk_balance": torch.ones(4, 32)}),
    (ValueError, "qk_balance.device is meta", {"qk_balance": torch.ones(2, 32, device="meta")}),
    (TypeError, "k_shift.dtype is torch.int64", {"k_shift": torch.ones(2, 32).long()}),
    (TypeError, "v_shift is True", {"v_shift": True}),
    (TypeError, "qk_balance is False", {"qk_balance": False}),
    (TypeError, "sin is a NoneType", {"cos": torch.ones(8, 16)}),
    (ValueError, "cos.shape is \\(7, 16\\).*seqlen 8", {"cos": torch.ones(7, 16), "sin": Q}),
    (ValueError, "cos.shape is \\(8, 17\\)", {"cos": torch.ones(8, 17), "sin": Q}),
    (ValueError, "sin.shape is \\(8, 4\\)", {"cos": torch.ones(8, 8), "sin": torch.ones(8, 4)}),
    (TypeError, "k_block is 'row'", {"k_block": "row"}),
    (ValueError, "k_block is 40", {"k_block": 40}),
    (ValueError, "v_scales is 'token': allowed are 'head' and 'channel'", {"v_scales": "token"}),
    (TypeError, "unexpected keyword", {"descale_q": 1}),
]  # fmt: skip


@pytest.mark.parametrize("error, message, change", WRONG)
def test_wrong_calls(error, message, change):
    with pytest.raises(error, match=message):
        cute_attn.quantize_qkv(**{"q": Q, "k": K, "v": V, **change})


def test_rope_wants_equal_lengths():
    angles = torch.ones(8, 16)
    with pytest.raises(ValueError, match="seqlen_q is 5 and seqlen_k is 8"):
        cute_attn.quantize_qkv(Q[:, :5], K, V, cos=angles, sin=angles)
