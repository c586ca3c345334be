"""bf16 or fp16 q, k, v -> an FP8 pack for fwd: RoPE, shifts, rebalance, Hadamard, scales, casts.

Everything before the cast leaves softmax(q k^T) v as it is, in exact arithmetic:
- K minus any vector: a row's scores all lose q . k_shift; LSE gets it back.
- V minus any vector: softmax's weights sum up to 1; the epilogue adds it again.
- q * s and k / s, channel by channel: their products stay. s is a power of two: no rounding.
- q and k times one orthonormal matrix H: q H (k H)^T = q k^T.
Source: FlashAttention-3 (arXiv 2407.08608), section 3.3, for H and block scales; SageAttention
(arXiv 2410.02367) for the mean of K. H alone can hurt where K has wide channels that Q damps, since
it spreads them over all channels: s, which evens out the two, goes with it.
"""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from cute_attn import problem

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
K_BLOCK = 128
PRESETS = ("fp8", "fp8_hp")
INPUTS = (torch.bfloat16, torch.float16)
_MIN_SCALE = 2.0**-100  # its inverse is finite too
_MAX_BALANCE = 32  # binades
_TINY = 1e-30  # of a mean square: a channel of zeros

Shift: TypeAlias = Tensor | Literal[False] | None


@dataclass(frozen=True, eq=False)
class QuantizedQKV:
    """What fwd takes in place of q, k and v, with all that it has to undo. See quantize_qkv."""

    q: Tensor  # (batch, seqlen_q, nheads_q, head_dim) float8_e4m3fn
    k: Tensor  # (batch, seqlen_k, nheads_kv, head_dim) float8_e4m3fn
    # (batch, seqlen_k, nheads_kv, head_dim_v) float8_e4m3fn; with fp8_hp in dtype. None where vt
    # holds it: values(pack) gives it back
    v: Tensor | None
    # fp32 factors that give back what was cast, in the shapes that fwd allows; None: 1
    q_descale: Tensor | None  # (batch, nheads_q, seqlen_q)
    k_descale: Tensor | None  # (batch, nheads_kv, ceil(seqlen_k / k_block)) or (batch, nheads_kv)
    v_descale: Tensor | None  # (batch, nheads_kv[, head_dim_v]); None with fp8_hp
    k_block: int  # keys that share a scale, where k_descale has a third dimension
    preset: str
    dtype: torch.dtype  # of q, k and v before: fwd's default for out
    q_dot_k_shift: (
        Tensor | None
    )  # fp32 (batch, nheads_q, seqlen_q): LSE lacks softmax_scale times it
    k_shift: Tensor | None  # fp32 ([batch,] nheads_kv, head_dim), after RoPE
    v_shift: Tensor | None  # fp32 ([batch,] nheads_kv, head_dim_v): to be added to out
    qk_balance: Tensor | None  # fp32 ([batch,] nheads_kv, head_dim), powers of two
    hadamard_seed: int | None
    # with fp8 on CUDA tensors: (batch, nheads_kv, head_dim_v, seqlen_k rounded up to 128)
    # float8_e4m3fn, what the kernel reads; its order of keys is that of fp8_prepare.transpose_v
    vt: Tensor | None = None
    # packs of one kind have tensors of one layout: set by quantize_launch alone, and no part of
    # copies, whose tensors may be others
    kind: ClassVar[object] = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "kind"}


class ChannelStatistics(NamedTuple):
    """fp32, of every KV head: what quantize_qkv takes under the same names."""

    k_shift: Tensor  # (nheads_kv, head_dim)
    v_shift: Tensor  # (nheads_kv, head_dim_v)
    qk_balance: Tensor  # (nheads_kv, head_dim)


class Transformed(NamedTuple):
    """q, k and v in fp32 after all steps but the cast, and what undoes the steps."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_dot_k_shift: Tensor | None
    k_shift: Tensor | None
    v_shift: Tensor | None
    qk_balance: Tensor | None


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    preset: str = "fp8",
    hadamard_seed: int | None = 0,
    k_shift: Shift = None,
    v_shift: Shift = None,
    qk_balance: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    k_block: int | Literal["head"] | None = None,
    v_scales: str = "head",
) -> QuantizedQKV:
    """Quantise q, k and v to float8_e4m3fn, with scales measured in this call: fwd(pack).

    q           (batch, seqlen_q, nheads_q, head_dim) in bf16 or fp16, any strides
    k           (batch, seqlen_k, nheads_kv, head_dim), nheads_q a multiple of nheads_kv
    v           (batch, seqlen_k, nheads_kv, head_dim_v); head dims are multiples of 16 up to 256
    preset      'fp8': all in e4m3. 'fp8_hp': q and k in e4m3, v stays in its dtype, and so does P
    hadamard_seed  of the random signs in front of the Hadamard transform of q and k; None: no
                transform. Head dims 64, 128 and 256 are transformed whole, others in blocks, the
                powers of two that add up to them. The same seed gives the same signs
    k_shift, v_shift  ([batch,] nheads_kv, head_dim) vectors to be taken off K (after RoPE) and V.
                Any vector is right, a mean is best. None: the mean of this call's keys and values,
                per sequence and head; False: no shift. A given one depends on no later token
    qk_balance  ([batch,] nheads_kv, head_dim), positive: q is multiplied and k divided by it, after
                it was rounded to a power of two. None: measured per sequence and head if
                hadamard_seed is not None, else none
    cos, sin    (at least seqlen, rotary_dim / 2): rotate the first rotary_dim channels of q and k,
                channel i with i + rotary_dim / 2; for seqlen_q equal to seqlen_k
    k_block     keys that share a scale, a multiple of 16; None: 128; 'head': all of a head
    v_scales    'head' or 'channel': what shares a scale of V
    A scale is the largest finite |x| over 448; each query has its own. Casts saturate. A NaN stays
    where it was, or in its row of q or k, and is not counted in means and scales; an infinity does
    so or saturates. For an average over training steps see channel_statistics.

    CUDA tensors take kernels for Hopper, which may round sums of q and k in another order: scales
    then differ in their last digits. They make two passes over V, the first for its largest values;
    one over q and k, and one more where a mean or the balance is measured, or where k_block is none
    of 16, 32, 64 and 128. q, k and v are copied first if their last stride is not 1, another one is
    no multiple of 8 or they do not start at a multiple of 16 bytes; given vectors that are not
    contiguous fp32 are converted. RoPE is fast for rotary_dim a multiple of 64, slow for one that
    is no multiple of 16. The pack has vt instead of v, given vectors as they are, and with fp8_hp
    and v_shift=False v itself.

    Not differentiable; flash_attn_func(..., preset='fp8') is. Raises ValueError or TypeError for a
    wrong call. The module's docstring has the sources.
    """
    given, options = (k_shift, v_shift, qk_balance), (preset, hadamard_seed, k_block, v_scales)
    if _has_kernels(q):
        pack: QuantizedQKV | None = _launches().quantize_qkv(
            q, k, v, preset, hadamard_seed, *given, cos, sin, k_block, v_scales
        )
        if pack is not None:
            return pack
    _check_inputs(q, k, v)
    block = _check_options(k, v, given, options)
    _check_rope(cos, sin, q, k)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        t = transform(q, k, v, given, (cos, sin), hadamard_seed)
        q8, q_descale = _cast(t.q, _row_amax(t.q))
        k8, k_descale = _cast_k(t.k, block)
        v8, v_descale = (t.v.to(v.dtype), None) if preset == "fp8_hp" else _cast_v(t.v, v_scales)
    return QuantizedQKV(
        q8,
        k8,
        v8,
        q_descale.squeeze(-1).transpose(1, 2).contiguous(),
        k_descale,
        v_descale,
        block or K_BLOCK,
        preset,
        q.dtype,
        *t[3:],
        hadamard_seed,
    )


@functools.cache
def _launches() -> Any:
    from cute_attn import quantize_launch

    return quantize_launch


def _has_kernels(q: object) -> bool:
    return isinstance(q, Tensor) and q.is_cuda


def values(pack: QuantizedQKV) -> Tensor:
    """The pack's v, (batch, seqlen_k, nheads_kv, head_dim_v), whatever it is held as."""
    if pack.v is not None:
        return pack.v
    from cute_attn import fp8_prepare

    return fp8_prepare.restored(pack.vt, pack.k.shape[1])


def shaped_as_v(pack: QuantizedQKV) -> Tensor:
    """Of v's shape (batch, seqlen_k, nheads_kv, head_dim_v), dtype and device, without a copy: v,
    or where the pack has vt instead, that, whose keys are in another order."""
    if pack.v is not None:
        return pack.v
    assert pack.vt is not None
    return pack.vt[..., : pack.k.shape[1]].permute(0, 3, 1, 2)


def channel_statistics(
    q: Tensor, k: Tensor, v: Tensor, *, cos: Tensor | None = None, sin: Tensor | None = None
) -> ChannelStatistics:
    """Means of K and V and the rebalance of q and k, over all sequences of the batch: for a running
    average that the caller keeps from step to step, so that quantize_qkv need not measure them.

    Arguments and errors as in quantize_qkv. An average of qk_balance is best taken of its
    logarithm.
    """
    if _has_kernels(q):
        found: ChannelStatistics | None = _launches().channel_statistics(q, k, v, cos, sin)
        if found is not None:
            return found
    _check_inputs(q, k, v)
    _check_rope(cos, sin, q, k)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        Q, K = (_roped(t, cos, sin) for t in (q, k))
        mean = _mean(K, (0, 1))
        return ChannelStatistics(mean, _mean(v.float(), (0, 1)), _balance(Q, K - mean, (0, 1)))


# Steps


def transform(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: tuple[Shift, Shift, Tensor | None],
    angles: tuple[Tensor | None, Tensor | None],
    hadamard_seed: int | None,
) -> Transformed:
    """All steps before the cast, in fp32. given: k_shift, v_shift and qk_balance."""
    Q, K, V = _roped(q, *angles), _roped(k, *angles), v.float()
    k_shift, v_shift = _shift(given[0], K), _shift(given[1], V)
    dot = None
    if k_shift is not None:
        dot = (Q * _per_query_head(k_shift, q.shape[2])).sum(-1).transpose(1, 2).contiguous()
        K = K - _per_token(k_shift)
    if v_shift is not None:
        V = V - _per_token(v_shift)
    balance = given[2]
    if balance is not None:
        balance = _power_of_two(balance.float())
    elif hadamard_seed is not None:
        balance = _balance(Q, K, (1,))
    if balance is not None:
        Q, K = Q * _per_query_head(balance, q.shape[2]), K / _per_token(balance)
    if hadamard_seed is not None:
        Q, K = rotate(Q, hadamard_seed), rotate(K, hadamard_seed)
    return Transformed(Q, K, V, dot, k_shift, v_shift, balance)


def rotate(x: Tensor, seed: int, inverse: bool = False) -> Tensor:
    """x times an orthonormal random-sign Hadamard matrix along its last dimension, in blocks of the
    powers of two that add up to it."""
    signs = _signs(x.shape[-1], seed).to(x)
    if not inverse:
        x = x * signs
    parts = x.split(hadamard_blocks(x.shape[-1]), -1)
    x = torch.cat([walsh_hadamard(part) * part.shape[-1] ** -0.5 for part in parts], -1)
    return x * signs if inverse else x


def hadamard_blocks(dim: int) -> list[int]:
    """Powers of two, the largest first, that add up to dim."""
    return [1 << bit for bit in reversed(range(dim.bit_length())) if dim >> bit & 1]


def walsh_hadamard(x: Tensor) -> Tensor:
    """x times the Hadamard matrix of +1 and -1 (Sylvester's) along its last dimension, a power of
    two. By sums and differences: exact on small integers, and the same bits for a row anywhere."""
    dim, half = x.shape[-1], 1
    while half < dim:
        a, b = x.unflatten(-1, (dim // (2 * half), 2, half)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        half *= 2
    return x


def _signs(dim: int, seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(0, 2, (dim,), generator=generator, device="cpu").float() * 2 - 1


def _roped(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """x in fp32, its first channels rotated."""
    x = x.float()
    if cos is None or sin is None:
        return x
    half = cos.shape[1]
    c, s = (t[: x.shape[1]].float().unsqueeze(1) for t in (cos, sin))  # (s, 1, half)
    a, b, rest = x.split((half, half, x.shape[3] - 2 * half), -1)
    return torch.cat((a * c - b * s, b * c + a * s, rest), -1)


def _shift(given: Shift, x: Tensor) -> Tensor | None:
    if given is False:
        return None
    return _mean(x, (1,)) if given is None else given.float()


def _mean(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Of the finite values: one NaN would reach every key through a shift."""
    finite = x.isfinite()
    total = x.masked_fill(~finite, 0.0).sum(dims)
    return total / finite.sum(dims).clamp(min=1)


def _balance(Q: Tensor, K: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Powers of two next to sqrt(rms k / rms q), per KV head and channel: they become as wide."""
    of_k = _mean(K * K, dims)
    grouped = Q.unflatten(2, (K.shape[2], Q.shape[2] // K.shape[2]))  # (b, s, hk, g, d)
    of_q = _mean(grouped * grouped, (*dims, 3))
    ratio = of_k.clamp(min=_TINY) / of_q.clamp(min=_TINY)
    return _power_of_two(ratio.sqrt().sqrt())


def _power_of_two(x: Tensor) -> Tensor:
    return x.log2().round().clamp(-_MAX_BALANCE, _MAX_BALANCE).exp2()


def _per_token(x: Tensor) -> Tensor:
    """([b,] hk, d) -> ([b,] 1, hk, d), to go with (b, s, hk, d)."""
    return x.unsqueeze(-3)


def _per_query_head(x: Tensor, heads_q: int) -> Tensor:
    """([b,] hk, d) -> ([b,] 1, hq, d): the heads of a group share a KV head's vector."""
    return _per_token(x.repeat_interleave(heads_q // x.shape[-2], -2))


# Casts


def saturate(x: Tensor) -> Tensor:
    """To the nearest e4m3, beyond +-448 to that; NaN stays."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def _cast(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """(x / scale in e4m3, scale) for an amax that broadcasts to x."""
    scale = (amax / E4M3_MAX).clamp(min=_MIN_SCALE)
    scale = scale.masked_fill(amax == 0, 1.0)
    return saturate(x / scale), scale


def _row_amax(x: Tensor) -> Tensor:
    """(b, s, h, 1), of the finite values."""
    return x.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)


def _cast_k(K: Tensor, block: int | None) -> tuple[Tensor, Tensor]:
    """Scales (b, hk, blocks), or (b, hk) where block is None."""
    rows = _row_amax(K)
    if block is None:
        k8, scale = _cast(K, _largest(rows))
        return k8, scale[:, 0, :, 0].contiguous()
    batch, seqlen, heads, _ = K.shape
    blocks = -(-seqlen // block)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, blocks * block - seqlen))
    amax = rows.view(batch, blocks, block, heads).amax(2)  # (b, blocks, hk)
    k8, _ = _cast(K, amax.repeat_interleave(block, 1)[:, :seqlen].unsqueeze(-1))
    return k8, _cast(amax, amax)[1].transpose(1, 2).contiguous()


def _cast_v(V: Tensor, scales: str) -> tuple[Tensor, Tensor]:
    """Scales (b, hk), or (b, hk, dv) by channel."""
    size = V.abs().nan_to_num(0.0, 0.0, 0.0) if scales == "channel" else _row_amax(V)
    v8, scale = _cast(V, _largest(size))
    return v8, (scale[:, 0] if scales == "channel" else scale[:, 0, :, 0]).contiguous()


def _largest(size: Tensor) -> Tensor:
    """The maximum over the keys, 0 without any."""
    if size.shape[1]:
        return size.amax(1, keepdim=True)
    return size.sum(1, keepdim=True)


# Checks


def _check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type(t).__name__}: a torch.Tensor is wanted")
    if q.dtype not in INPUTS:
        names = ", ".join(map(str, INPUTS))
        raise TypeError(f"q.dtype is {q.dtype}: to be quantised it must be one of {names}")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise TypeError(f"{name}.dtype is {t.dtype}: it must be q.dtype, {q.dtype}")
    check_shapes(q, k, v)


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """As Problem.from_tensors does, with the head dims of FP8."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.is_nested or t.layout != torch.strided:
            raise TypeError(f"{name} is nested or of layout {t.layout}: a dense tensor is wanted")
    problem._check_devices(q, k, v)
    problem._check_ranks(q, k, v)
    problem._check_agreement(q, k, v)
    heads_q, heads_kv = q.shape[2], v.shape[2]
    if heads_kv == 0 or heads_q % heads_kv:
        raise ValueError(
            f"nheads_q is {heads_q} and nheads_kv is {heads_kv}: "
            "nheads_q must be a multiple of nheads_kv"
        )
    for name, dim in (("head_dim", q.shape[3]), ("head_dim_v", v.shape[3])):
        if dim % 16 or not 16 <= dim <= problem.MAX_HEAD_DIM:
            raise ValueError(
                f"{name} is {dim}: FP8 allows the multiples of 16 from 16 to {problem.MAX_HEAD_DIM}"
            )


def _check_preset(preset: object) -> None:
    if preset not in PRESETS:
        raise ValueError(f"preset is {preset!r}: allowed are {', '.join(map(repr, PRESETS))}")


def _check_seed(seed: object) -> None:
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"hadamard_seed is {seed!r}: an int or None is wanted")
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"hadamard_seed is {seed}: allowed are 0 to 2**63 - 1")


def _check_options(
    k: Tensor,
    v: Tensor,
    given: tuple[Shift, Shift, Tensor | None],
    options: tuple[str, int | None, object, str],
) -> int | None:
    """Keys that share a scale, None for all of a head. given: k_shift, v_shift and qk_balance;
    options: preset, hadamard_seed, k_block, v_scales."""
    preset, seed, k_block, v_scales = options
    _check_preset(preset)
    _check_seed(seed)
    if v_scales not in ("head", "channel"):
        raise ValueError(f"v_scales is {v_scales!r}: allowed are 'head' and 'channel'")
    block = None if k_block == "head" else checked_block(k_block)
    for name, t, like in (("k_shift", given[0], k), ("v_shift", given[1], v)):
        if t is not None and t is not False:
            check_channels(name, t, like)
    if given[2] is not None:
        check_channels("qk_balance", given[2], k)
    return block


def checked_block(k_block: object) -> int:
    if k_block is None:
        return K_BLOCK
    if isinstance(k_block, bool) or not isinstance(k_block, int):
        raise TypeError(f"k_block is {k_block!r}: an int is wanted, in quantize_qkv also 'head'")
    if k_block <= 0 or k_block % 16:
        raise ValueError(f"k_block is {k_block}: positive multiples of 16 are allowed")
    return k_block


def check_channels(name: str, t: object, like: Tensor) -> None:
    """t: a vector for every head of like, (b, s, h, d), or for every sequence and head."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} is {t!r}: a torch.Tensor or None is wanted")
    if not t.dtype.is_floating_point:
        raise TypeError(f"{name}.dtype is {t.dtype}: a floating dtype is wanted")
    if t.device != like.device:
        raise ValueError(f"{name}.device is {t.device}: it must be q.device, {like.device}")
    batch, _, heads, dim = like.shape
    allowed = (heads, dim), (batch, heads, dim)
    if tuple(t.shape) not in allowed:
        raise ValueError(
            f"{name}.shape is {tuple(t.shape)}: allowed are {allowed[0]}, {allowed[1]}"
        )


def _check_rope(cos: object, sin: object, q: Tensor, k: Tensor) -> None:
    if cos is None and sin is None:
        return
    for name, t in (("cos", cos), ("sin", sin)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type(t).__name__}: cos and sin are given together")
        if t.device != q.device:
            raise ValueError(f"{name}.device is {t.device}: it must be q.device, {q.device}")
        if t.dim() != 2 or t.shape[0] < k.shape[1] or not 0 < 2 * t.shape[1] <= q.shape[3]:
            raise ValueError(
                f"{name}.shape is {tuple(t.shape)}: (at least seqlen {k.shape[1]}, rotary_dim / 2) "
                f"with rotary_dim up to {q.shape[3]} is wanted"
            )
        if t.shape[1] != cos.shape[1]:  # type: ignore[attr-defined]
            raise ValueError(f"sin.shape is {tuple(t.shape)}: its width must be that of cos")
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"cos and sin are given, seqlen_q is {q.shape[1]} and seqlen_k is {k.shape[1]}: they "
            "must be equal; rotate q and k before the call otherwise"
        )
