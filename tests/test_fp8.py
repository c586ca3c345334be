"""fwd in FP8: what each descale does, casts, LSE, layouts, special values, errors, and the rows of
public bug reports that apply (test names start with the row's number)."""

import math
from dataclasses import replace

import pytest
import torch
from fp8_oracle import E4M3, data, relative, rmse
from helpers import BF16, FP16, Watch, close, naive, qkv, rand
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_attn
from cute_attn import reference
from cute_attn.config import FwdConfig
from cute_attn.reference_fp8 import P_SCALE, attention_fp8

P_ERROR = 2.0**-4  # of rounding to e4m3, relative
INF = math.inf


def eighths(*sizes, **options):
    """q, k, v in e4m3."""
    return tuple(t.to(E4M3) for t in qkv(*sizes, **options))


def factors(shape, seed=0):
    """fp32 in [0.25, 4]"""
    g = torch.Generator().manual_seed(seed)
    return torch.exp2(torch.rand(shape, generator=g) * 4 - 2)


def check(q, k, v, *, causal=False, softmax_scale=None, k_block=128, **descales):
    """fwd against the definition on operands dequantised by hand; the only error beyond bf16's is
    P's cast: 2^-4 of a weight, or 2^-18 where the cast falls below e4m3's normal numbers."""
    options = {"causal": causal, "softmax_scale": softmax_scale}
    blocked = {"k_block": k_block} if k_block != 128 else {}
    out, lse = cute_attn.fwd(q, k, v, **options, **descales, **blocked, return_lse=True)
    Q, K, V = (t.double() for t in (q, k, v))
    group = q.shape[2] // k.shape[2]
    of_q, of_k, of_v = (descales.get(f"{n}_descale", torch.ones(1)).double() for n in "qkv")
    if of_q.dim() == 2:
        of_q = of_q.repeat_interleave(group, 1).unsqueeze(-1)
    Q = Q * (of_q if of_q.dim() == 1 else of_q.transpose(1, 2).unsqueeze(-1))
    if of_k.dim() == 3:
        of_k = of_k.repeat_interleave(k_block, 2)[:, :, : k.shape[1]].transpose(1, 2)
        K = K * of_k.unsqueeze(-1)
    else:
        K = K * (of_k if of_k.dim() == 1 else of_k[:, None, :, None])
    if of_v.dim() > 1:
        of_v = (of_v if of_v.dim() == 3 else of_v.unsqueeze(-1)).unsqueeze(1)
    V = V * of_v
    both, want_lse = reference.attention(Q, K, torch.cat((V, V.abs()), -1), **options)
    want, size = both.split(v.shape[3], -1)
    assert out.dtype == BF16 and out.is_contiguous() and lse.dtype == torch.float32
    close(out, want, 1.01 * 2.0**-8 * want.abs() + P_ERROR * size + 1e-3, "out")
    rough = (out.double() - want).norm() / size.norm()
    assert rough < 0.03
    close(lse, want_lse, 1e-4 + 1e-6 * want_lse.abs(), "lse")
    return out, lse


# Shapes and masks


SHAPES = [  # seqlen_q, seqlen_k, heads, dims
    (1, 1, 1, 16),
    (5, 5, 2, 32),
    (40, 17, (3, 1), (48, 16)),
    (130, 300, (4, 2), (80, 96)),
    (260, 140, (2, 1), (128, 64)),
    (1, 200, (8, 2), 64),
    (33, 129, 1, (192, 256)),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_shapes(shape, causal):
    sq, sk, heads, dims = shape
    q, k, v = eighths(2, sq, sk, heads, dims)
    hk = k.shape[2]
    finest = {
        "q_descale": factors((2, q.shape[2], sq), 1),
        "k_descale": factors((2, hk, -(-sk // 128)), 2),
        "v_descale": factors((2, hk, v.shape[3]), 3),
    }
    check(q, k, v, causal=causal)
    check(q, k, v, causal=causal, **finest)


@pytest.mark.parametrize("dim", range(16, 257, 16))
def test_every_head_dim(dim):
    q, k, v = qkv(1, 20, 40, (2, 1), (dim, 272 - dim))
    for preset in ("fp8", "fp8_hp"):
        out, lse = cute_attn.fwd(q, k, v, causal=True, preset=preset, return_lse=True)
        want, want_lse = naive(q, k, v, causal=True)
        assert relative(out, want) < 0.1
        assert (lse - want_lse).abs().max() < 0.3


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-38, 2.0])
def test_softmax_scales(scale):
    q, k, v = eighths(1, 20, 150, (2, 1), 32)
    check(q, k, v, softmax_scale=scale, q_descale=factors((1, 1)), k_descale=factors((1, 1, 2)))


@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
@pytest.mark.parametrize("preset", [None, "fp8", "fp8_hp"])
def test_empty_problems(sizes, preset):
    q, k, v = qkv(*sizes, (4, 2), 32)
    if preset is None:
        q, k, v = (t.to(E4M3) for t in (q, k, v))
    out, lse = cute_attn.fwd(q, k, v, preset=preset, causal=True, return_lse=True)
    assert out.shape == (sizes[0], sizes[1], 4, 32) and out.count_nonzero() == 0
    assert lse.shape == (sizes[0], 4, sizes[1]) and (lse == -INF).all()


def test_b91_no_keys_at_all():
    q, k, v = eighths(1, 350, 0, 8, 128)
    assert cute_attn.fwd(q, k, v).count_nonzero() == 0


def test_rows_without_keys_are_0_whatever_the_shifts():
    q, k, v = data("vbias", 40, 32)
    q = torch.cat((q, q), 1)  # 80 rows on 40 keys: 40 see none
    out, lse = cute_attn.fwd(q, k, v, causal=True, preset="fp8", return_lse=True)
    assert (out[:, :40] == 0).all() and (lse[:, :, :40] == -INF).all()
    assert lse[:, :, 40:].isfinite().all()
    q[:, 0] = math.nan  # in a row without keys
    out, lse = cute_attn.fwd(q, k, v, causal=True, preset="fp8", return_lse=True)
    assert (out[:, 0] == 0).all() and (lse[:, :, 0] == -INF).all()


@pytest.mark.parametrize("seqlen", [96, 97, 129, 200])
def test_b90_key_lengths_that_are_no_tile(seqlen):
    check(*eighths(1, seqlen, seqlen, 2, 128))


def test_b82_head_dim_256_with_gqa():
    check(*eighths(1, 256, 256, (16, 1), 256))


# Descales


def test_b85_b86_each_descale_has_its_effect():
    q, k, v = eighths(2, 30, 300, (4, 2), 64)
    whole = {f"{name}_descale": factors((2, 2), i) for i, name in enumerate("qkv")}
    fine = {
        "q_descale": factors((2, 4, 30), 4),
        "k_descale": factors((2, 2, 3), 5),
        "v_descale": factors((2, 2, 64), 6),
    }
    one = {f"{name}_descale": factors((1,), 7 + i) for i, name in enumerate("qkv")}
    plain, _ = check(q, k, v)
    for forms in (whole, fine, one):
        out, lse = check(q, k, v, **forms)
        for name, descale in forms.items():
            got, got_lse = check(q, k, v, **{name: descale})
            assert not torch.equal(got, plain)
            got, got_lse = check(q, k, v, **{**forms, name: 2 * descale})
            if name == "v_descale":
                assert torch.equal(got, 2 * out) and torch.equal(got_lse, lse)
            else:
                assert not torch.equal(got, out) and not torch.equal(got_lse, lse)


def test_each_descale_acts_where_it_should():
    """One entry doubled changes its own rows, keys or channels alone."""
    q, k, v = eighths(2, 30, 300, (4, 2), 64)
    plain = cute_attn.fwd(q, k, v)
    for name, shape, at, where in (
        ("q", (2, 2), (1, 1), (1, slice(None), slice(2, 4))),
        ("q", (2, 4, 30), (0, 3, 7), (0, 7, 3)),
        ("k", (2, 2), (0, 1), (0, slice(None), slice(2, 4))),
        ("k", (2, 2, 3), (1, 0, 2), (1, slice(None), slice(0, 2))),
        ("v", (2, 2), (0, 0), (0, slice(None), slice(0, 2))),
        ("v", (2, 2, 64), (1, 1, 5), (1, slice(None), slice(2, 4), 5)),
    ):
        descale = torch.ones(shape)
        descale[at] = 2.0
        changed = cute_attn.fwd(q, k, v, **{f"{name}_descale": descale}) != plain
        assert changed[where].float().mean() > 0.5, (name, shape)
        changed[where] = False
        assert not changed.any(), (name, shape)


@pytest.mark.parametrize("k_block", [16, 48, 128, 256])
def test_key_blocks(k_block):
    q, k, v = eighths(1, 20, 300, (2, 1), 32)
    blocks = -(-300 // k_block)
    check(q, k, v, causal=True, k_block=k_block, k_descale=factors((1, 1, blocks)))


def test_b88_strides_of_descales_are_honoured():
    q, k, v = eighths(2, 20, 200, (4, 2), 32)
    shapes = {"q": [(2, 2), (2, 4, 20)], "k": [(2, 2), (2, 2, 2)], "v": [(2, 2), (2, 2, 32)]}
    for name, each in shapes.items():
        for shape in each:
            values = factors(shape, 3)
            apart = values.new_full([2 * n for n in shape], math.nan)[
                tuple([slice(1, None, 2)] * len(shape))
            ]
            apart.copy_(values)
            turned = values.mT.contiguous().mT
            results = [
                cute_attn.fwd(q, k, v, **{f"{name}_descale": d}) for d in (values, apart, turned)
            ]
            assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
            once = torch.tensor(0.7)
            wide, full, single = once.expand(shape), torch.full(shape, 0.7), once.reshape(1)
            results = [
                cute_attn.fwd(q, k, v, **{f"{name}_descale": d}) for d in (wide, full, single, wide)
            ]
            assert all(torch.equal(results[0], r) for r in results[1:])


def test_b87_wrong_shapes_name_the_allowed_ones():
    q, k, v = eighths(2, 20, 200, (4, 2), 32)
    finest = {"q": "(2, 4, 20)", "k": "(2, 2, 2)", "v": "(2, 2, 32)"}
    for name, last in finest.items():
        for shape in ((), (2,), (3, 4), (2, 4), (4, 2), (2, 2, 7), (1, 2, 2, 1)):
            with pytest.raises(ValueError) as caught:
                cute_attn.fwd(q, k, v, **{f"{name}_descale": torch.ones(shape)})
            text = str(caught.value)
            assert f"{name}_descale.shape is {shape}" in text
            assert "(1,), (batch, nheads_kv), here (2, 2)" in text and last in text
    with pytest.raises(ValueError, match="here \\(2, 2, 4\\), 64 keys a block"):
        cute_attn.fwd(q, k, v, k_descale=torch.ones(2, 2, 2), k_block=64)


# Precision


@pytest.mark.parametrize("delta, limit, gain", [(6, 0.030, 3), (8, 0.030, 15), (10, 0.033, 25)])
def test_p_is_cast_with_an_offset_of_2_to_the_8(delta, limit, gain):
    """One key scores delta more than the rest, whose weights are then near or below e4m3's smallest
    numbers without the offset. Its value is 0, so that the rest is all there is to see, and q, k
    and v are in e4m3: P's cast is the only error. limit: e4m3's own is 0.0265."""
    with_offset, without = sink_errors(delta, 0.0)
    assert with_offset <= limit and without > gain * with_offset


def test_p_under_a_sink_whose_value_counts():
    assert sink_errors(12, 2.0**-4)[0] <= 0.027


def sink_errors(delta, value):
    """Relative errors with P times 2^8 and times 1."""
    q, k, v = (t.float() for t in eighths(1, 256, 4096, 1, 64))
    q[..., 0], k[..., 0] = 4.0, 0.0
    k[:, 0] *= torch.eye(64)[0]
    k[:, 0, :, 0] = 2 * delta
    v[:, 0] *= value
    want, _ = reference.attention(q, k, v)
    return [
        relative(attention_fp8(exact_pack(q, k, v), out_dtype=torch.float32, p_scale=s)[0], want)
        for s in (P_SCALE, 1.0)
    ]


def exact_pack(q, k, v):
    pack = cute_attn.quantize_qkv(*(t.bfloat16() for t in (q, k, v)))
    nothing = {"q_dot_k_shift": None, "k_shift": None, "v_shift": None, "qk_balance": None}
    cast = {name: t.to(E4M3) for name, t in zip("qkv", (q, k, v))}
    return replace(pack, **cast, q_descale=None, k_descale=None, v_descale=None, **nothing)


def test_the_mass_of_a_long_tail_is_kept():
    """One key at the top and 4095 that are e^-9 below: a third of the sum, all flushed to 0 if P
    were cast as it is."""
    seqlen = 4096
    q, k = torch.zeros(1, 16, 1, 16), torch.zeros(1, seqlen, 1, 16)
    q[..., 0], k[:, 0, :, 0] = 1.0, 9.0
    v = torch.ones(1, seqlen, 1, 16)
    v[:, 0] = 0.0
    pack = exact_pack(q, k, v)
    tail = (seqlen - 1) * math.exp(-9)
    want = tail / (1 + tail)
    for p_scale, low, high in ((1.0, -1, 1e-6), (P_SCALE, 0.94 * want, 1.06 * want)):
        out, lse = attention_fp8(pack, softmax_scale=1.0, p_scale=p_scale)
        assert low <= out.float().min() and out.float().max() <= high
        assert (lse - math.log(math.exp(9) * (1 + tail))).abs().max() < 1e-5


@pytest.mark.parametrize("seqlen", [4096, 32768])
def test_b81_uniform_weights_over_many_keys(seqlen):
    v = (1 + 0.05 * rand((1, seqlen, 1, 128), torch.float32)).to(E4M3)
    q, k = torch.zeros(1, 16, 1, 16).to(E4M3), torch.zeros(1, seqlen, 1, 16).to(E4M3)
    out = cute_attn.fwd(q, k, v)
    assert (out.double() - v.double().mean(1, keepdim=True)).abs().max() < 0.004  # bf16 at 1


def test_v_shift_takes_the_bias_of_sums():
    """V around 1, flat weights: with the mean taken off, the mean of out is right."""
    q, k, v = qkv(1, 64, 4096, 1, 64)
    q, v = q * 0.1, v + 1
    want, _ = reference.attention(q, k, v)
    pack = cute_attn.quantize_qkv(q, k, v)
    out, _ = attention_fp8(pack, out_dtype=torch.float32)
    assert abs((out.double() - want).mean().item()) <= 2e-4 * want.square().mean().sqrt().item()


def test_b95_rotation_makes_wide_channels_harmless():
    """Large values in Q and K both: the error must drop. In fp32 nothing changes: test_quantize."""
    q, k, v = qkv(1, 512, 512, 2, 128)
    q, k = q.clone(), k.clone()
    q[..., ::16] *= 0.1
    hit = torch.rand(q.shape, generator=torch.Generator().manual_seed(1)) < 0.002
    q[hit], k[hit] = q[hit] * 30, k[hit] * 30
    want, _ = reference.attention(q, k, v)
    with_rotation, without = (
        rmse(cute_attn.fwd(cute_attn.quantize_qkv(q, k, v, hadamard_seed=seed)), want)
        for seed in (0, None)
    )
    assert with_rotation < 0.7 * without


def test_the_ends_of_e4m3_are_data_like_any_other():
    q, k, v = eighths(1, 4, 1, 1, 16)
    v = v.float()
    v[0, 0, 0, :3] = torch.tensor([448.0, 2.0**-9, -448.0])
    out = cute_attn.fwd(q, k, v.to(E4M3), out_dtype=FP16)
    assert torch.equal(out, v.half().expand(1, 4, 1, 16))  # one key: its weight is 1


# LSE and shifts


@pytest.mark.parametrize("kind", ["kbias", "qkbias"])
def test_lse_is_corrected_for_the_shift(kind):
    q, k, v = data(kind, 256, 64)
    _, want = reference.attention(q, k, v)
    for preset in ("fp8", "fp8_hp"):
        _, lse = cute_attn.fwd(q, k, v, preset=preset, return_lse=True)
        assert (lse - want).abs().max() < 0.4
        assert (lse - want).abs().mean() < 0.03
    shift = 10 * rand((2, 64), torch.float32)
    pack = cute_attn.quantize_qkv(q, k, v, k_shift=shift)
    uncorrected = cute_attn.fwd(replace(pack, q_dot_k_shift=None), return_lse=True)[1]
    dot = torch.einsum("bshd,hd->bhs", q.double(), shift.double())
    corrected = cute_attn.fwd(pack, return_lse=True)[1]
    close(corrected - uncorrected, dot / 8, 1e-4 + 1e-6 * (dot.abs() + want.abs()))


def test_merge_of_parts_with_different_shifts():
    """LSE of two halves, each with the shifts of its own keys, joins them."""
    q, k, v = data("qkbias", 256, 64)
    halves = [
        cute_attn.fwd(q, k[:, part], v[:, part], preset="fp8", return_lse=True)
        for part in (slice(0, 128), slice(128, 256))
    ]
    out, lse = cute_attn.merge(*halves[0], *halves[1])
    want, want_lse = reference.attention(q, k, v)
    assert relative(out, want) < 0.1 and (lse - want_lse).abs().mean() < 0.03


# Calls


def test_presets_quantise_inside():
    q, k, v = qkv(2, 50, 200, (4, 2), 64)
    for preset in ("fp8", "fp8_hp"):
        for dtype in (BF16, FP16):
            Q, K, V = (t.to(dtype) for t in (q, k, v))
            inside = cute_attn.fwd(Q, K, V, preset=preset, causal=True)
            pack = cute_attn.quantize_qkv(Q, K, V, preset=preset)
            assert inside.dtype == dtype and torch.equal(inside, cute_attn.fwd(pack, causal=True))
    blocks = cute_attn.fwd(q, k, v, preset="fp8", k_block=16)
    assert torch.equal(blocks, cute_attn.fwd(cute_attn.quantize_qkv(q, k, v, k_block=16)))


def test_b83_out_dtypes():
    q, k, v = eighths(1, 20, 30, 2, 64)
    assert cute_attn.fwd(q, k, v).dtype == BF16
    half = cute_attn.fwd(q, k, v, out_dtype=FP16)
    assert half.dtype == FP16
    want, _ = reference.attention(*(t.float() for t in (q, k, v)))
    assert relative(half, want) < 0.03
    given = torch.empty(1, 2, 20, 64, dtype=FP16).transpose(1, 2)
    assert cute_attn.fwd(q, k, v, out=given) is given and torch.equal(given, half)
    bf16 = qkv(1, 20, 30, 2, 64)
    assert cute_attn.fwd(*bf16, preset="fp8", out_dtype=FP16).dtype == FP16


def test_a_pack_keeps_scales_of_heads_and_channels():
    q, k, v = data("vbias", 300, 64)
    want, _ = reference.attention(q, k, v)
    for options in ({"k_block": "head"}, {"v_scales": "channel"}, {"k_block": 64}):
        assert relative(cute_attn.fwd(cute_attn.quantize_qkv(q, k, v, **options)), want) < 0.07


def test_v_in_bf16_with_q_and_k_in_e4m3():
    q, k, v = qkv(1, 40, 60, (2, 1), 64)
    out = cute_attn.fwd(q.to(E4M3), k.to(E4M3), v)
    want, _ = reference.attention(q.to(E4M3).float(), k.to(E4M3).float(), v)
    assert relative(out, want) < 0.006


def test_p_is_cast_to_the_dtype_of_v():
    """Two keys, weights 1 and e^-1: the second is off by bf16's rounding, and l is not."""
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 2, 1, 16)
    q[..., 0], k[:, 0, :, 0] = 1.0, 1.0
    v = torch.zeros(1, 2, 1, 16)
    v[:, 1] = 1.0
    pack = exact_pack(q, k, v)
    e = torch.tensor(-1.0).exp()
    for dtype, rounded in ((BF16, e.bfloat16()), (FP16, e.half()), (E4M3, (256 * e).to(E4M3))):
        given = replace(pack, v=v.to(dtype))
        out, _ = attention_fp8(given, softmax_scale=1.0, out_dtype=torch.float32)
        want = rounded.double() / (256 if dtype == E4M3 else 1) / (1 + math.exp(-1))
        assert (out.double() - want).abs().max() < 1e-7


def test_b93_layouts_of_v():
    q, k, v = eighths(2, 40, 70, (4, 2), 64)
    want = cute_attn.fwd(q, k, v)
    turned = v.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert turned.stride(1) == 1 and torch.equal(cute_attn.fwd(q, k, turned), want)
    wide = torch.stack((q.float(), q.float()), -1).flatten(-2).to(E4M3)[..., ::2]
    assert torch.equal(cute_attn.fwd(wide, k, v), want)


def test_a_row_has_its_bits_in_any_batch():
    q, k, v = qkv(5, 37, 90, (4, 2), 64)
    for preset in ("fp8", "fp8_hp"):
        whole = cute_attn.fwd(q, k, v, preset=preset)
        assert torch.equal(whole[3:4], cute_attn.fwd(q[3:4], k[3:4], v[3:4], preset=preset))
        one_group = cute_attn.fwd(q[:, :, 2:], k[:, :, 1:], v[:, :, 1:], preset=preset)
        assert torch.equal(whole[:, :, 2:], one_group)


@pytest.mark.parametrize("preset", ["fp8", "fp8_hp"])
def test_nan_reaches_the_rows_that_see_it(preset):
    q, k, v = qkv(1, 200, 200, 2, 64)
    clean = cute_attn.fwd(q, k, v, causal=True, preset=preset)
    q[0, 5, 0, 3] = k[0, 150, 0, 0] = v[0, 170, 1, 9] = math.nan
    out = cute_attn.fwd(q, k, v, causal=True, preset=preset)
    want = torch.zeros(clean.shape, dtype=torch.bool)
    want[0, 5, 0], want[0, 150:, 0], want[0, 170:, 1, 9] = True, True, True
    assert torch.equal(out.isnan(), want)


def test_autocast_does_not_apply():
    q, k, v = qkv(1, 40, 40, 2, 64)
    want = cute_attn.fwd(q, k, v, preset="fp8")
    with torch.autocast("cpu", BF16):
        assert torch.equal(cute_attn.fwd(q, k, v, preset="fp8"), want)


def test_memory_grows_with_the_sequence():
    largest = []
    for seqlen in (2048, 4096):
        q, k, v = eighths(1, seqlen, seqlen, 1, 16)
        with Watch() as watch:
            cute_attn.fwd(q, k, v)
        largest.append(watch.largest)
    assert largest[1] <= 2 * largest[0] and largest[1] < 2048 * 2048 // 4


# Errors

Q, K, V = qkv(1, 8, 8, (4, 2), 32)
E = {"q": Q.to(E4M3), "k": K.to(E4M3), "v": V.to(E4M3)}
B = {"q": Q, "k": K, "v": V}
P = {**B, "preset": "fp8"}
PACK = cute_attn.quantize_qkv(Q, K, V)
ONE = torch.ones(1)
E5M2 = torch.float8_e5m2
WIDTH_40 = {n: torch.ones(*t.shape[:3], 40).to(BF16) for n, t in B.items()}
WRONG = [
    (TypeError, "k is missing", {"q": E["q"]}),
    (TypeError, "v is missing", {"q": Q, "k": K}),
    (TypeError, "q is a list", {**E, "q": [1], "q_descale": ONE}),
    (TypeError, "v is a list", {**E, "v": [1]}),
    (TypeError, "q.dtype is torch.float8_e5m2.*torch.float8_e4m3fn", {**E, "q": Q.to(E5M2)}),
    (TypeError, "q.dtype is torch.float8_e5m2", {**E, "q": Q.to(E5M2), "q_descale": ONE}),
    (TypeError, "q.dtype is torch.float8_e5m2", {**P, "q": Q.to(E5M2)}),
    (TypeError, "k.dtype is torch.float8_e5m2", {**E, "k": K.to(E5M2)}),
    (TypeError, "v.dtype is torch.float8_e5m2", {**E, "v": V.to(E5M2)}),
    (TypeError, "k.dtype is torch.bfloat16: torch.float8_e4m3fn is wanted", {**E, "k": K}),
    (TypeError, "k.dtype is torch.float8_e4m3fn", {**B, "k": E["k"]}),
    (ValueError, "head_dim is 40: FP8 allows the multiples of 16", {**WIDTH_40, "preset": "fp8"}),
    (ValueError, "head_dim is 40: FP8", {n: t.to(E4M3) for n, t in WIDTH_40.items()}),
    (ValueError, "head_dim_v is 8: FP8", {**E, "v": E["v"][..., :8]}),
    (ValueError, "nheads_q is 3 and nheads_kv is 2", {**E, "q": E["q"][:, :, :3]}),
    (ValueError, "v.shape is.*k's seqlen", {**E, "v": E["v"][:, :5]}),
    (ValueError, "q.shape is", {**E, "q": E["q"][0]}),
    (ValueError, "k.device is meta", {**E, "k": E["k"].to("meta")}),
    (ValueError, "q.device is meta", {n: t.to("meta") for n, t in E.items()}),
    (ValueError, "q_descale is given and q.dtype is torch.bfloat16", {**B, "q_descale": ONE}),
    (ValueError, "v_descale is given and q.dtype is torch.bfloat16", {**B, "v_descale": ONE}),
    (ValueError, "k_block is given and q.dtype is torch.bfloat16", {**B, "k_block": 128}),
    (ValueError, "out_dtype is given and q.dtype is torch.bfloat16", {**B, "out_dtype": BF16}),
    (ValueError, "v_descale is given and v.dtype is", {**E, "v": V, "v_descale": ONE}),
    (TypeError, "k_descale is a float", {**E, "k_descale": 1.0}),
    (TypeError, "k_descale.dtype is torch.float64", {**E, "k_descale": ONE.double()}),
    (ValueError, "k_descale.device is meta", {**E, "k_descale": ONE.to("meta")}),
    (ValueError, "k_block is 100", {**E, "k_block": 100}),
    (TypeError, "k_block is 128.0", {**E, "k_block": 128.0}),
    (ValueError, "preset is 'int4': allowed are 'fp8', 'fp8_hp'", {**B, "preset": "int4"}),
    (ValueError, "preset is 'fp8' and q.dtype is torch.float8_e4m3fn", {**E, "preset": "fp8"}),
    (ValueError, "k_descale is given with preset 'fp8'", {**P, "k_descale": ONE}),
    (TypeError, "q.dtype is torch.float32", {**P, "q": Q.float()}),
    (TypeError, "k is given beside a pack", {"q": PACK, "k": K}),
    (TypeError, "v_descale is given beside a pack", {"q": PACK, "v_descale": ONE}),
    (TypeError, "preset is given beside a pack", {"q": PACK, "preset": "fp8"}),
    (TypeError, "q is a QuantizedQKV", {**B, "q": PACK}),
    (ValueError, "v_shift.shape is", {"q": replace(PACK, v_shift=ONE)}),
    (TypeError, "out_dtype is torch.float32: allowed are", {**E, "out_dtype": torch.float32}),
    (TypeError, "out.dtype is torch.float32", {**E, "out": torch.ones(1, 8, 4, 32)}),
    (TypeError, "out.dtype.*wanted is torch.bfloat16", {**P, "out": Q.half(), "out_dtype": BF16}),
    (ValueError, "out.shape is", {**E, "out": Q[:, :5]}),
    (ValueError, "out.device is meta", {**E, "out": Q.to("meta")}),
    (ValueError, "expanded", {**E, "out": Q[:, :, :1].expand(1, 8, 4, 32)}),
    (ValueError, "out overlaps q", {**P, "out": Q}),
    (TypeError, "out is a list", {**E, "out": []}),
    (TypeError, "causal is 1", {**E, "causal": 1}),
    (ValueError, "softmax_scale is nan", {**E, "softmax_scale": math.nan}),
    (ValueError, "arch is 'sm90', but q.device is cpu", {**E, "arch": "sm90"}),
    (TypeError, "an Fp8Config", {**E, "config": FwdConfig()}),
    (NotImplementedError, "window_size", {**E, "window_size": (3, 3)}),
    (NotImplementedError, "cu_seqlens_q", {**E, "cu_seqlens_q": torch.zeros(2)}),
    (NotImplementedError, "softcap", {**P, "softcap": 3.0}),
    (TypeError, "descale_q", {**E, "descale_q": ONE}),
]  # fmt: skip


@pytest.mark.parametrize("error, message, arguments", WRONG)
def test_wrong_calls(error, message, arguments):
    with pytest.raises(error, match=message):
        cute_attn.fwd(**arguments)


def test_b94_old_names_of_descales():
    for name in ("descale_q", "descale_k", "descale_v"):
        with pytest.raises(TypeError, match=name):
            cute_attn.fwd(**E, **{name: torch.ones(1)})


def test_b84_gradients_are_refused():
    for name in "qkv":
        arguments = {**E, name: E[name].clone().requires_grad_()}
        with pytest.raises(NotImplementedError, match=f"{name} requires grad.*no backward"):
            cute_attn.fwd(**arguments)
        with torch.no_grad():
            cute_attn.fwd(**arguments)
    with pytest.raises(NotImplementedError, match="k_descale requires grad"):
        cute_attn.fwd(**E, k_descale=torch.ones(1, requires_grad=True))
    with pytest.raises(NotImplementedError, match="out requires grad"):
        cute_attn.fwd(**E, out=torch.empty(1, 8, 4, 32, dtype=BF16, requires_grad=True))
    with pytest.raises(NotImplementedError, match="v requires grad"):
        cute_attn.fwd(Q, K, V.clone().requires_grad_(), preset="fp8")
    with pytest.raises(NotImplementedError, match="q.dtype is torch.float8_e4m3fn"):
        cute_attn.flash_attn_func(*E.values())
    out, lse = cute_attn.fwd(**E, return_lse=True)
    with pytest.raises(NotImplementedError, match="q.dtype is torch.float8_e4m3fn"):
        cute_attn.bwd(out, *E.values(), out, lse)


@pytest.mark.parametrize("preset", [None, "fp8"])
def test_cuda_calls_are_checked_before_the_device(preset):
    with FakeTensorMode():
        dtype = E4M3 if preset is None else BF16
        q, k, v, odd = (
            torch.empty((1, 8, heads, 32), dtype=dtype, device="cuda:0") for heads in (4, 2, 2, 3)
        )
        with pytest.raises(ValueError, match="nheads_q is 3"):
            cute_attn.fwd(odd, k, v, preset=preset)
        with pytest.raises(TypeError, match="causal is 1"):
            cute_attn.fwd(q, k, v, preset=preset, causal=1)


def test_v_is_stored_as_the_kernel_reads_it():
    """By the module's own words; and V's keys come back where they belong."""
    from cute_attn import fp8_prepare
    from cute_attn.kernels.common import v_layout

    assert v_layout.PADDING == fp8_prepare.PADDING
    assert sorted(v_layout.ORDER) == list(range(v_layout.GROUP))
    v = rand((2, 37, 3, 16)).to(E4M3)
    vt = fp8_prepare.transpose_v(v)
    assert vt.shape == (2, 3, 16, 128) and vt.is_contiguous()
    for position in (0, 1, 2, 5, 21, 31, 34):
        key = position // 32 * 32 + v_layout.key_at(position % 32)
        column = v[:, key].float() if key < 37 else torch.zeros(2, 3, 16)
        assert torch.equal(vt[..., position].float(), column)
    assert not vt[..., 64:].float().any()


def test_bf16_calls_do_not_pass_through_fp8(monkeypatch):
    monkeypatch.setattr("cute_attn.fp8.forward", None)
    assert cute_attn.fwd(Q, K, V).dtype == BF16
