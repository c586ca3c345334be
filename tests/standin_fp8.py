"""As standin.py, for quantize_qkv, transpose_v and fwd in FP8: CPU tensors take the device path,
and stand-ins for the kernels insist on what the real ones require and compute with torch."""

import math

import torch
from standin import check_operand

from cute_attn import fp8_launch, fp8_prepare, launch, quantize, quantize_launch
from cute_attn.config import ONE_TILE, Fp8Config, TransposeConfig
from cute_attn.quantize import E4M3
from cute_attn.reference_fp8 import rounded_output

FP32 = torch.float32


def install(monkeypatch, stand_in):
    """On top of the fixture stand_in."""
    stand_in.quantised = []
    plain = stand_in.build

    def build(problem, config, arch):
        if isinstance(config, TransposeConfig):
            return transpose
        if isinstance(config, quantize_launch.QuantizeConfig):
            stand_in.built.append((problem, config, arch))
            return Quantise(stand_in, problem, config)
        return plain(problem, config, arch)

    monkeypatch.setattr(stand_in, "build", build)
    monkeypatch.setattr(quantize, "_has_kernels", lambda q: isinstance(q, torch.Tensor))
    monkeypatch.setattr(launch, "_empty", poisoned)
    for module in (quantize_launch, fp8_prepare, fp8_launch):
        monkeypatch.setattr(module, "_plans", {})
    monkeypatch.setattr(fp8_launch, "_constants", {})
    return stand_in


def poisoned(shape, stride, dtype):
    if dtype == E4M3:
        t = torch.empty_strided(shape, stride, dtype=torch.uint8).fill_(0x55).view(E4M3)
    else:
        t = torch.empty_strided(shape, stride, dtype=dtype).fill_(math.nan)
    return t


def transpose(v, vt):
    assert v.stride(3) == 1 and all(s % 16 == 0 for s in v.stride()[:3]) and v.data_ptr() % 16 == 0
    assert vt.is_contiguous() and v.dtype == vt.dtype == E4M3
    vt.copy_(fp8_prepare.transposed(v))


def check_output(t, shape, dtype=FP32):
    assert t.shape == shape and t.dtype == dtype and t.is_contiguous(), t.shape


class Quantise:
    def __init__(self, device, problem, config):
        self.device, self.problem, self.config = device, problem, config

    def __call__(self, q, k, v, cos, sin, k_shift, v_shift, given, balance, signs, *rest):
        q8, k8, out_v, q_scale, k_scale, v_scale, dots, scratch, q_rows, k_rows, k_block = rest
        cfg = self.config
        self.check_inputs(q, k, v, (cos, sin), (k_shift, v_shift, given, balance), signs)
        words = quantize_launch.scratch_words(q, k, v, cfg, (q_rows, k_rows, k_block))
        check_output(scratch, (words,))
        assert q_rows % 128 == k_rows % 128 == 0 and -(-q.shape[1] // q_rows) <= 64
        source = cfg.k_shift, cfg.v_shift, cfg.balance
        if cfg.statistics:
            assert all(t is None for t in rest[:7])
            for t, value in zip(
                (k_shift, v_shift, balance), reference_statistics(q, k, v, cos, sin)
            ):
                t.copy_(value)
            return
        vectors = [
            None if s == "measured" else False if s == "none" else t
            for s, t in zip(source, (k_shift, v_shift, given))
        ]
        vectors[2] = None if vectors[2] is False else vectors[2]
        t = transformed(q, k, v, vectors, (cos, sin), signs)
        for to, value, s in zip((k_shift, v_shift, balance), t[4:], source):
            if s == "measured" or to is balance and to is not None:
                to.copy_(value)
        self.cast(t, rest, k_block)
        if dots is not None:
            check_output(dots, t.q_dot_k_shift.shape)
            dots.copy_(t.q_dot_k_shift)
        self.device.quantised.append((q, k, v, k_shift, v_shift, given))

    def check_inputs(self, q, k, v, angles, vectors, signs):
        cfg, (batch, _, _, dim), (heads, dim_v) = self.config, q.shape, v.shape[2:]
        for t in (q, k, v):
            check_operand(t)
        for t in angles:
            assert (t is None) == (not cfg.rope)
            if t is not None:
                assert t.shape[1] == cfg.half and t.stride(1) == 1
                assert quantize_launch.ANGLES[t.dtype] == cfg.rope
                if cfg.half % 8 == 0:
                    assert t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0
        sources = cfg.k_shift, cfg.v_shift, cfg.balance, cfg.balance
        for i, (t, source) in enumerate(zip(vectors, sources)):
            if source == "none" or i == 2 and source == "measured":
                assert t is None
                continue
            one = source == "head" or cfg.statistics
            width = dim_v if i == 1 else dim
            check_output(t, (heads, width) if one else (batch, heads, width))
            assert t.data_ptr() % 16 == 0
        wanted = cfg.hadamard and not cfg.statistics
        assert (signs is not None) == wanted and (signs is None or signs.shape == (dim,))

    def cast(self, t, rest, k_block):
        q8, k8, out_v, q_scale, k_scale, v_scale = rest[:6]
        cfg = self.config
        assert (cfg.k_block == k_block) if k_block in ONE_TILE else cfg.k_block == 0
        codes, scale = quantize._cast(t.q, quantize._row_amax(t.q))
        check_output(q8, codes.shape, E4M3)
        q8.copy_(codes)
        q_scale.copy_(scale.squeeze(-1).transpose(1, 2))
        codes, scale = quantize._cast_k(t.k, k_block)
        check_output(k8, codes.shape, E4M3)
        check_output(k_scale, scale.shape)
        k8.copy_(codes)
        k_scale.copy_(scale)
        if cfg.transposed:
            codes, scale = quantize._cast_v(t.v, "channel" if cfg.v_by_channel else "head")
            check_output(v_scale, scale.shape)
            check_output(out_v, fp8_prepare.vt_shape(codes), E4M3)
            out_v.copy_(fp8_prepare.transposed(codes))
            v_scale.copy_(scale)
        elif cfg.v_shift == "none":
            assert out_v is None
        else:
            out_v.copy_(t.v.to(out_v.dtype))


def transformed(q, k, v, vectors, angles, signs):
    original = quantize._signs
    quantize._signs = lambda dim, seed: signs
    try:
        return quantize.transform(q, k, v, tuple(vectors), angles, None if signs is None else 0)
    finally:
        quantize._signs = original


def reference_statistics(q, k, v, cos, sin):
    Q, K = (quantize._roped(t, cos, sin) for t in (q, k))
    mean = quantize._mean(K, (0, 1))
    balance = quantize._balance(Q, K - mean, (0, 1))
    return mean, quantize._mean(v.float(), (0, 1)), balance


# The forward


def install_forward(monkeypatch, stand_in):
    """fwd's FP8 calls of CPU tensors take the device path; quantize_qkv stays in torch. Returns
    what the kernel was given: problem, config, lse."""
    seen = []
    install(monkeypatch, stand_in)
    build = stand_in.build

    def build_forward(problem, config, arch):
        if isinstance(config, Fp8Config):
            stand_in.built.append((problem, config, arch))
            return forward_kernel(problem, config, seen)
        return build(problem, config, arch)

    monkeypatch.setattr(stand_in, "build", build_forward)
    monkeypatch.setattr(quantize, "_has_kernels", lambda q: False)
    monkeypatch.setattr(fp8_launch, "serves", lambda q: True)
    return seen


def check_tensor(t, width):
    assert t.data_ptr() % 16 == 0 and t.stride(3) == 1
    assert all(stride * width % 16 == 0 for stride in t.stride()[:3])


def keys_in_order(vt, seqlen):
    """vt (b, hk, dv, padded) -> (b, seqlen, hk, dv)"""
    place = {key: position for position, key in enumerate(order_of_keys())}
    columns = [key // 32 * 32 + place[key % 32] for key in range(seqlen)]
    return vt.float()[..., columns].permute(0, 3, 1, 2)


def order_of_keys():
    from cute_attn.kernels.common.v_layout import ORDER

    return ORDER


def forward_kernel(problem, config, seen):
    def kernel(q, k, v, o, lse, counter, sms, size, q_heads, shift, *factors):
        qf, kf, vf, vs, dot, *rounding = factors
        assert counter.item() == 0 and sms == 132
        seen.append((problem, config, lse))
        group, seqlen_k = q.shape[2] // k.shape[2], k.shape[1]
        for t, width in ((q, 1), (k, 1), (v, v.element_size()), (o, o.element_size())):
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
        if lse.stride(2):  # else nobody wants it, and it is one float
            assert lse.is_contiguous()
            lse.copy_(S.logsumexp(-1) + scale * dot)
        P = torch.softmax(S, -1)
        out = torch.einsum("bhqk,bkhd->bqhd", P, v.float().repeat_interleave(group, 2))
        vf, vs = (t.repeat_interleave(group, 1).unsqueeze(1) for t in (vf, vs))
        out = out * vf + vs
        if problem.dtype == "e4m3":
            scale, amax = rounding
            assert scale.shape == amax.shape == (1,) and scale.dtype == amax.dtype == FP32
            out, largest = rounded_output(out, scale)
            amax.copy_(torch.maximum(amax, largest))
        else:
            assert not rounding
        o.copy_(out)

    return kernel
