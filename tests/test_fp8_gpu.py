"""The FP8 kernels against the CPU path and against fp64 on the same operands; about a minute."""

import math
from dataclasses import fields, replace

import pytest
import torch
from fp8_oracle import E4M3
from helpers import BF16, FP16

import cute_attn
from cute_attn.config import Fp8Config
from cute_attn.quantize import QuantizedQKV, saturate
from cute_attn.reference_fp8 import (
    _of_blocks,
    _of_channels,
    _of_rows,
    attention_fp8,
    rounded_output,
)

pytestmark = pytest.mark.gpu
INF = math.inf
# The tensor core adds up products of 8 bits in about 14 bits: a score may lose several 2^-13 of the
# largest of its sums. On an H200 LSE was off by 8.9e-3 with a sink 8 nats above other scores, by
# 7.5e-2 with scores in the hundreds or thousands.
LSE, LSE_OF_SCORES = 2e-3, 8e-4
LARGE = 30.0  # such scores may show it in out: 3.99e-3 where the CPU path had 2.58e-3
# (b, sq, sk, hq, hk, d, dv, causal, what quantize_qkv is told)
CASES = [
    (2, 200, 300, 4, 2, 64, 64, False, {}),
    (2, 200, 300, 4, 2, 64, 64, True, {}),
    (1, 333, 1025, 4, 1, 128, 128, False, {}),
    (1, 333, 1025, 4, 1, 128, 128, True, {}),
    (1, 130, 500, 2, 2, 256, 256, False, {}),
    (1, 130, 500, 2, 2, 256, 256, True, {}),
    (1, 1, 1, 1, 1, 128, 128, False, {}),
    (1, 300, 100, 2, 1, 64, 64, True, {}),  # rows without a key
    (1, 100, 2000, 2, 2, 128, 128, True, {"k_block": 512}),
    (1, 100, 2000, 2, 2, 128, 128, True, {"k_block": 384}),
    (1, 100, 700, 2, 2, 128, 128, True, {"k_block": "head"}),
    (1, 100, 700, 2, 2, 128, 128, False, {"k_block": 48}),
    (1, 100, 700, 2, 2, 128, 128, True, {"v_scales": "channel"}),
    (1, 100, 200, 2, 2, 48, 80, False, {}),
    (1, 100, 200, 2, 1, 16, 16, True, {"v_shift": False, "k_shift": False}),
    (1, 100, 300, 2, 2, 192, 128, True, {}),
    (2, 200, 300, 4, 2, 64, 64, True, {"preset": "fp8_hp"}),
    (1, 333, 1025, 4, 1, 128, 128, False, {"preset": "fp8_hp"}),
    (1, 333, 1025, 4, 1, 128, 128, True, {"preset": "fp8_hp", "k_block": 64}),
    (1, 130, 500, 2, 2, 256, 256, True, {"preset": "fp8_hp"}),
    (2, 200, 700, 4, 2, 64, 64, True, {"v_shift": False}),  # sums in fp32
    (1, 333, 1025, 4, 1, 128, 128, False, {"v_shift": False}),
    (1, 130, 600, 2, 2, 256, 240, True, {"v_shift": False, "v_scales": "channel"}),
]


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def made(case, dtype=BF16):
    b, sq, sk, hq, hk, d, dv, _, options = case
    q, k = random(b, sq, hq, d, seed=1), random(b, sk, hk, d, seed=2)
    v = random(b, sk, hk, dv, seed=3) + 0.3
    return cute_attn.quantize_qkv(q.to(dtype), k.to(dtype), v.to(dtype), **options)


def moved(pack, device="cuda"):
    tensors = {f.name: getattr(pack, f.name) for f in fields(pack)}
    return replace(pack, **{n: t.to(device) for n, t in tensors.items() if torch.is_tensor(t)})


def exact(pack, causal, scale):
    """(out, lse, the largest |score| of every row, hidden or not) of quantised operands in fp64."""
    q, k, v = (t.double() for t in (pack.q.float(), pack.k.float(), pack.v.float()))
    sq, sk, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    three = pack.k_descale is not None and pack.k_descale.dim() == 3
    block = pack.k_block if three else sk
    of_k = _of_blocks(pack.k_descale, q, k, -(-sk // block)).repeat_interleave(block, 2)[..., :sk]
    factor = _of_rows(pack.q_descale, q, k).double().unsqueeze(3) * of_k.double().unsqueeze(2)
    S = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(group, 2)) * factor * scale
    top = S.abs().amax(3) if sk else S.new_zeros(S.shape[:3])
    if causal:
        S.masked_fill_(~torch.ones(sq, sk, dtype=torch.bool).tril(sk - sq), -INF)
    lse = S.logsumexp(-1)
    P = torch.softmax(S, -1).nan_to_num(0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", P, v.repeat_interleave(group, 2))
    out = out * _of_channels(pack.v_descale, q, v).transpose(1, 2)
    if pack.v_shift is not None:
        out = out + _of_channels(pack.v_shift, q, v, shift=True).transpose(1, 2)
    empty = (lse == -INF).transpose(1, 2).unsqueeze(3)
    if pack.q_dot_k_shift is not None:
        lse = lse + scale * pack.q_dot_k_shift
    return out.masked_fill(empty, 0.0), lse, top


def compare(pack, causal, scale=None, dtype=BF16, config=None):
    number = pack.q.shape[3] ** -0.5 if scale is None else scale
    out, lse = cute_attn.fwd(
        moved(pack),
        causal=causal,
        softmax_scale=scale,
        out_dtype=dtype,
        return_lse=True,
        config=config,
    )
    again = cute_attn.fwd(
        moved(pack), causal=causal, softmax_scale=scale, out_dtype=dtype, config=config
    )
    assert torch.equal(out, again), "not the same bits twice"
    out, lse = out.cpu(), lse.cpu()
    want, want_lse, top = exact(pack, causal, number)
    cpu, _ = attention_fp8(pack, causal=causal, softmax_scale=number, out_dtype=dtype)
    size = want.norm().clamp(min=1e-30)
    error, others = ((x.double() - want).norm() / size for x in (out, cpu))
    # 1.15: weights taken before the maximum are e4m3 at another offset. Emulated, that costs up to
    # 11 % at about 500 keys of N(0,1) scores.
    assert error <= 1.15 * others + (1e-3 if top.max() < LARGE else 2e-3), (error, others)
    assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse))
    seen = ~torch.isneginf(lse)
    assert ((lse - want_lse)[seen].abs() <= (LSE + LSE_OF_SCORES * top)[seen]).all()
    assert not out.transpose(1, 2)[~seen].any()
    return out, lse


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"d{c[5]}v{c[6]}-{'c' if c[7] else 'f'}")
def test_head_dims_masks_and_factors(case):
    compare(made(case), case[7])


def test_out_in_fp16():
    case = CASES[3]
    compare(made(case, FP16), True, dtype=FP16)


@pytest.mark.parametrize("scale", [-0.1, 0.0, 1.0])
def test_scales(scale):
    compare(made(CASES[3]), True, scale)


@pytest.mark.parametrize(
    "config",
    [
        Fp8Config(128, 128, kv_stages=3),
        Fp8Config(128, 224),
        Fp8Config(128, 160, pingpong=False),
        Fp8Config(128, 160, exact_max=False),
        Fp8Config(64, 128, schedule="grid"),
        Fp8Config(192, 64, q_slots=4, pingpong=False, exact_max=False),
        Fp8Config(128, 128, promote=1),
        Fp8Config(128, 96, exact_max=False, promote=2),
    ],
)
def test_configs(config):
    """The maximum in every block or not; blocks that factors of 128 keys do not go into, and a last
    block past V's padding."""
    compare(made(CASES[3]), True, config=config)


def flash_attention_3(q_heads=4, kv_heads=2):
    """Its convention, and everything strided."""
    q, k, v = (
        random(2, s, h, 192, seed=s)[..., 32:160].to(E4M3)
        for s, h in ((100, q_heads), (300, kv_heads), (301, kv_heads))
    )
    v = v[:, 1:]
    scales = torch.rand(3, 2, kv_heads, generator=torch.Generator().manual_seed(5)) + 0.5
    return q, k, v, scales


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_3_convention(causal):
    q, k, v, scales = flash_attention_3()
    pack = QuantizedQKV(q, k, v, *scales, 128, "fp8", BF16, *[None] * 5)
    want, _ = compare(pack, causal)
    descales = {f"{n}_descale": s.cuda() for n, s in zip("qkv", scales)}
    args = (q.cuda(), k.cuda(), v.cuda())
    out = torch.empty(2, 4, 100, 128, dtype=BF16, device="cuda").transpose(1, 2)
    assert cute_attn.fwd(*args, causal=causal, **descales, out=out) is out
    assert torch.equal(out.cpu(), want)
    expanded = {n: s[:, :, None].expand(2, 2, 2)[..., 1] for n, s in descales.items()}
    assert torch.equal(cute_attn.fwd(*args, causal=causal, **expanded).cpu(), want)


def test_no_factors_and_factors_of_one():
    q, k, v, _ = (t.cuda() for t in flash_attention_3())
    one = torch.ones(1, device="cuda")
    plain = cute_attn.fwd(q, k, v)
    assert torch.equal(plain, cute_attn.fwd(q, k, v, q_descale=one, k_descale=one, v_descale=one))
    for name in ("q_descale", "k_descale", "v_descale"):
        assert not torch.equal(plain, cute_attn.fwd(q, k, v, **{name: 1.5 * one})), name


@pytest.mark.parametrize("preset", ["fp8", "fp8_hp"])
def test_16_bit_tensors_are_quantised(preset):
    q, k, v = (random(2, 300, 2, 128, seed=s).cuda() for s in range(3))
    out, lse = cute_attn.fwd(q, k, v, causal=True, preset=preset, return_lse=True)
    full, full_lse = cute_attn.fwd(q, k, v, causal=True, return_lse=True)
    assert (out - full).float().norm() / full.float().norm() < 0.06
    assert (lse - full_lse).abs().max() < 0.1


@pytest.mark.parametrize("case", CASES)
def test_out_in_e4m3(case):
    """Codes next to those of out in 16 bits, the CPU's amax, and the same bits twice."""
    causal, pack = case[7], made(case)
    on_gpu = moved(pack)
    wide, wide_lse = attention_fp8(pack, causal=causal, out_dtype=torch.float32)
    config = cute_attn.explain(on_gpu, causal=causal, out_dtype=E4M3).config  # of 16 bits, another
    out16 = cute_attn.fwd(on_gpu, causal=causal, out_dtype=FP16, config=config).float().cpu()
    top = wide.abs().max()
    for scale in (None, 448 / top, 1e6 * torch.ones(1)):
        given = None if scale is None else scale.cuda()
        options = {"causal": causal, "out_dtype": E4M3, "o_scale": given, "return_amax": True}
        out, lse, amax = cute_attn.fwd(on_gpu, **options, return_lse=True)
        again, amax_again = cute_attn.fwd(on_gpu, **options)
        assert torch.equal(again.view(torch.uint8), out.view(torch.uint8))
        assert torch.equal(amax, amax_again) and amax.shape == (1,)
        assert amax.item() == pytest.approx(top.item(), rel=3e-2)
        assert amax.item() == pytest.approx(out16.abs().max().item(), rel=2**-10)
        assert torch.equal(torch.isneginf(lse.cpu()), torch.isneginf(wide_lse))
        factor = 1.0 if scale is None else scale
        want = saturate(out16 * factor).float()  # fp16 may cross a boundary of e4m3
        steps = out.view(torch.uint8).cpu().int() - saturate(out16 * factor).view(torch.uint8).int()
        assert (steps.abs() % 128 <= 1).all() and (steps != 0).float().mean() < 0.02
        by_cpu = rounded_output(wide, None if scale is None else scale.view(-1))[0].float()
        assert (out.float().cpu() - by_cpu).norm() <= 0.04 * by_cpu.norm()
        assert (out.float().cpu() - want).norm() <= 0.01 * want.norm()


def test_out_in_e4m3_elsewhere():
    """Strided, in a graph, and with a NaN, which no amax counts."""
    q, k, v, _ = (t.cuda() for t in flash_attention_3())
    want, largest = cute_attn.fwd(q, k, v, out_dtype=E4M3, return_amax=True)
    given = torch.empty(*want.shape[:3], want.shape[3] + 8, device="cuda", dtype=E4M3)[..., 8:]
    got = cute_attn.fwd(q, k, v, out=given)
    assert got is given and torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got, amax = cute_attn.fwd(q, k, v, out_dtype=E4M3, return_amax=True)
    for _ in range(2):
        amax.fill_(9.0)
        graph.replay()
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(amax, largest)
    q.view(torch.uint8)[0, 5, 1, 3] = 0x7F
    got, amax = cute_attn.fwd(q, k, v, out_dtype=E4M3, return_amax=True)
    assert got[0, 5, 1].float().isnan().all() and 0 < amax.item() <= largest.item()


def test_empty():
    q, k, v, _ = (t.cuda() for t in flash_attention_3())
    out, lse = cute_attn.fwd(q, k[:, :0], v[:, :0], return_lse=True)
    assert not out.any() and torch.isneginf(lse).all()
    assert cute_attn.fwd(q[:, :0], k, v).shape == (2, 0, 4, 128)


def test_wide_v_whose_sums_leave_the_tensor_core():
    """In two launches."""
    compare(made(CASES[5]), True, config=Fp8Config(128, 128, promote=2))


def error_of_mean(dtype, seqlen, head_dim=128, **options):
    """q = 0: out is V's mean, however many keys."""
    v = (1 + 0.05 * random(1, seqlen, 1, head_dim, seed=7).float()).cuda().to(dtype)
    q = torch.zeros(1, 64, 1, head_dim, device="cuda").to(dtype)
    out = cute_attn.fwd(q, v, v, **options).double().mean()
    return abs(out / v.double().mean() - 1).item()


@pytest.mark.parametrize("seqlen", [4096, 65536])
def test_mean_of_v_survives_long_sequences(seqlen):
    """Where the shift has taken it out of V."""
    assert error_of_mean(BF16, seqlen, preset="fp8") < 0.01


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("seqlen", [512, 1024, 4096, 131072])
def test_mean_of_raw_v(seqlen, head_dim):
    """The tensor core drops what of a product lies about 2^14 below its sum, so that equal weights
    would lose all keys after 16k or so."""
    assert error_of_mean(E4M3, seqlen, head_dim) < 0.01


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_mean_of_raw_v_with_sums_in_fp32(head_dim):
    for config in (Fp8Config(128, 128, promote=4), Fp8Config(128, 96, exact_max=False, promote=4)):
        assert error_of_mean(E4M3, 131072, head_dim, config=config) < 0.01


def test_nan_stays_in_its_row():
    case = CASES[2]
    pack = made(case)
    codes = pack.q.view(torch.uint8).clone()
    codes[0, 5, 1, 3] = 0x7F
    out = cute_attn.fwd(moved(replace(pack, q=codes.view(E4M3)))).cpu()
    nan = torch.isnan(out).any(-1)
    assert nan[0, 5, 1] and nan.sum() == 1


def test_in_a_graph():
    q, k, v, _ = (t.cuda() for t in flash_attention_3())
    want = cute_attn.fwd(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = cute_attn.fwd(q, k, v)
    for _ in range(2):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


def climbing(binades, seqlen, dim):
    """q and k whose scores rise by so many binades over 128 keys from the key 200 before the last
    on, down to the 150th; blocks are visited from the last one on. binades: of rows in turn."""
    g = torch.Generator().manual_seed(5)
    q, k = (torch.randn(1, seqlen, 2, dim, generator=g) for _ in range(2))
    steps = (torch.arange(seqlen, 0, -1) - 200).clamp(0, seqlen - 350) / 128.0
    k[..., 0] = steps[None, :, None]
    of_rows = torch.tensor(binades).repeat(-(-seqlen // len(binades)))[:seqlen]
    q[..., 0] = (of_rows * math.log(2.0) * dim**0.5)[None, :, None]
    return q.to(BF16), k.to(BF16)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("binades", [(10.0,), (4.0,), (5.0, 9.0, 30.0, -10.0)])
def test_rows_that_climb(binades, causal):
    """Weights before the maximum, in rows that need it in every block, or in none any more."""
    q, k = climbing(binades, 2100, 128)
    v = random(1, 2100, 2, 128, seed=3) + 0.3
    options = {"k_shift": False, "qk_balance": torch.ones(2, 128)}  # channel 0 stays as it is
    compare(cute_attn.quantize_qkv(q, k, v, **options), causal)


def test_rows_that_jump():
    q, k, v = (random(1, 1300, 2, 128, seed=i) for i in range(3))
    compare(cute_attn.quantize_qkv(q * 6, k * 6, v), True)
