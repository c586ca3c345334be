"""What reaches the FP8 kernel: a stand-in computes from the kernel's own arguments, as
kernels/hopper/fp8_fwd.py describes them, and fwd's CPU path from the pack."""

from dataclasses import replace

import pytest
import torch
from fp8_oracle import E4M3
from helpers import BF16, rand

import cute_attn
from cute_attn import compile as jit
from cute_attn import fp8_launch
from cute_attn.config import Fp8Config
from cute_attn.quantize import QuantizedQKV
from cute_attn.reference_fp8 import attention_fp8


def check_tensor(t, width):
    assert t.data_ptr() % 16 == 0 and t.stride(3) == 1
    assert all(stride * width % 16 == 0 for stride in t.stride()[:3])


def keys_in_order(vt, seqlen):
    """vt (b, hk, dv, padded) -> (b, seqlen, hk, dv)"""
    place = {key: position for position, key in enumerate(fp8_launch_order())}
    columns = [key // 32 * 32 + place[key % 32] for key in range(seqlen)]
    return vt.float()[..., columns].permute(0, 3, 1, 2)


def fp8_launch_order():
    from cute_attn.kernels.common.v_layout import ORDER

    return ORDER


def stand_in_kernel(problem, config, arch, seen):
    def kernel(q, k, v, o, lse, counter, sms, size, q_heads, shift, *factors):
        qf, kf, vf, vs, dot = factors
        assert counter.item() == 0 and sms == 132
        seen.append((problem, config))
        group, seqlen_k = q.shape[2] // k.shape[2], k.shape[1]
        for t, width in ((q, 1), (k, 1), (v, v.element_size()), (o, 2)):
            check_tensor(t, width)
        for t in (qf, kf, vf, vs, dot):
            assert t.dtype == torch.float32 and t.dim() == 3
        if v.dtype == E4M3:
            assert v.shape[3] % 128 == 0
            v = keys_in_order(v, seqlen_k)
        span = 16 if problem.fine_k else config.tile_n << shift
        assert kf.shape[2] >= -(-seqlen_k // span)
        for t, pairs in ((vf, problem.channels), (vs, problem.v_shift)):
            plain = t.stride(2) == 1 and all(s % 2 == 0 for s in t.stride()[:2])
            assert plain and t.data_ptr() % 8 == 0 if pairs else t.stride(2) == 0
        of_k = kf[:, :, torch.arange(seqlen_k) // span].repeat_interleave(group, 1)
        of_q = qf.repeat_interleave(q_heads, 1)
        assert of_q.shape == lse.shape
        scale = -size if problem.negative_scale else size
        S = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float().repeat_interleave(group, 2))
        S = S * of_q.unsqueeze(3) * of_k.unsqueeze(2) * scale
        if problem.causal:
            mask = torch.ones(S.shape[2:], dtype=torch.bool).tril(seqlen_k - q.shape[1])
            S.masked_fill_(~mask, -torch.inf)
        lse.copy_(S.logsumexp(-1) + scale * dot)
        P = torch.softmax(S, -1)
        out = torch.einsum("bhqk,bkhd->bqhd", P, v.float().repeat_interleave(group, 2))
        vf, vs = (t.repeat_interleave(group, 1).unsqueeze(1) for t in (vf, vs))
        o.copy_(out * vf + vs)

    return kernel


@pytest.fixture
def seen(stand_in, monkeypatch):
    seen = []
    monkeypatch.setattr(jit, "get", lambda *key: stand_in_kernel(*key, seen))
    monkeypatch.setattr(jit, "in_memory", lambda *key: None)
    monkeypatch.setattr(fp8_launch, "_constants", {})
    return seen


def made(sq=40, sk=400, **options):
    q, k, v = rand((2, sq, 4, 64)), rand((2, sk, 2, 64), seed=1), rand((2, sk, 2, 48), seed=2)
    return cute_attn.quantize_qkv(*(t.to(BF16) for t in (q, k, v)), **options)


def check(pack, causal=True, scale=0.2, dtype=BF16, config=None, out=None):
    got, lse = fp8_launch.attend(pack, causal, scale, out, dtype, config)
    want, want_lse = attention_fp8(pack, causal=causal, softmax_scale=scale, out_dtype=dtype)
    assert got.dtype == dtype and got.shape == want.shape
    assert (got.float() - want.float()).norm() < 0.04 * want.float().norm()
    torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=1e-5)
    return got


@pytest.mark.parametrize("k_block", [None, 16, 48, 256, 384, "head", 512])
def test_factors_of_keys(k_block, seen):
    check(made(k_block=k_block))
    assert seen[0][0].fine_k == (k_block in (16, 48))


def test_factors_and_shifts_of_channels(seen):
    check(made(v_scales="channel"), causal=False)
    check(made(v_scales="channel", v_shift=False, k_shift=False))
    pack = made(v_scales="channel")
    odd = torch.zeros(2, 2, 49)[..., 1:].copy_(pack.v_descale)
    check(replace(pack, v_descale=odd, v_shift=pack.v_shift[0].double()))


def test_16_bit_v(seen):
    check(made(preset="fp8_hp"), dtype=torch.float16)
    assert seen[0][0].v_dtype == "bf16" and seen[0][0].dtype == "fp16"


def test_negative_scale(seen):
    check(made(), scale=-0.3)
    assert seen[0][0].negative_scale


@pytest.mark.parametrize("form", ["none", "one", "head", "strided"])
def test_flash_attention_3_convention(form, seen):
    pack = made(k_shift=False, v_shift=False)
    scales = torch.rand(3, 2, 2) + 0.5
    if form == "strided":
        scales = scales.transpose(1, 2).contiguous().transpose(1, 2)
    given = {"none": (None,) * 3, "one": scales.flatten()[:3].split(1)}.get(form, tuple(scales))
    wide = torch.zeros(2, 40, 4, 72, dtype=torch.uint8)
    q = wide.view(E4M3)[..., 8:]
    q.view(torch.uint8).copy_(pack.q.view(torch.uint8))
    check(QuantizedQKV(q, pack.k, pack.v, *given, 128, "fp8", BF16, *[None] * 5))


def test_out_and_config(seen):
    out = torch.empty(2, 40, 4, 49, dtype=BF16)[..., 1:]
    assert check(made(), out=out, config=Fp8Config(128, 224)) is out
    assert seen[0][1].tile_n == 224 and seen[0][0].fine_k
    with pytest.raises(ValueError, match="shared memory"):
        check(made(), config=Fp8Config(128, 224, kv_stages=8))
