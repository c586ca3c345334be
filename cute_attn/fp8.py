"""FP8 calls of fwd and flash_attn_func: the checks, then what computes them.

Kept apart from launch.py, which every bf16 and fp16 forward reads on its warm path.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cute_attn import fp8_launch, launch, quantize, quantize_launch
from cute_attn.config import Fp8Config, QuantizeConfig
from cute_attn.fp8_launch import Descales, Found
from cute_attn.fp8_launch import Options as Options
from cute_attn.problem import DTYPES, Fp8Problem, Problem
from cute_attn.quantize import E4M3, INPUTS, QuantizedQKV

NO_DESCALES = (None, None, None)
OUTPUTS = (*INPUTS, E4M3)


def forward(
    q: Tensor | QuantizedQKV,
    k: Tensor | None,
    v: Tensor | None,
    descales: Descales,
    preset: str | None,
    options: Options,
    return_lse: bool = True,
) -> Found:
    """(out, lse, amax) of an FP8 forward. Arguments and errors are those of cute_attn.fwd. lse may
    hold nothing unless return_lse; amax is of out in e4m3 alone."""
    if isinstance(q, QuantizedQKV):
        _check_alone(k, v, descales, preset, options)
        served = fp8_launch.serves(q.q)
    else:
        served = fp8_launch.serves(q)
    key, plan = fp8_launch.find(q, k, v, descales, preset, options) if served else ((), None)
    if plan is None or not _as_checked(q, k, v, descales, options):
        pack, scale, dtype = _checked_call(q, k, v, descales, preset, options)
        options = options._replace(softmax_scale=scale)
        if not served:
            return _on_cpu(pack or _quantised(q, k, v, preset, options), options, dtype)
        if plan is None:  # softmax_scale may have been an int
            key, plan = fp8_launch.find(q, k, v, descales, preset, options)
        if plan is None:
            negative = scale is not None and scale < 0.0
            if pack is None:
                plan = fp8_launch.plan_preset((q, k, v), preset, negative, dtype, options)  # type: ignore[arg-type]
                if plan is None:
                    pack = _quantised(q, k, v, preset, options)
                    options = options._replace(k_block=None)
                    return forward(pack, None, None, NO_DESCALES, None, options, return_lse)
            else:
                plan = fp8_launch.make_plan(
                    pack, pack.q.device, options.causal, negative, dtype, options.config,
                    options.o_scale,
                )  # fmt: skip
            fp8_launch.remember(key, plan)
    return fp8_launch.run(plan, q, k, v, descales, options, return_lse)


def fwd(
    q: Tensor | QuantizedQKV,
    k: Tensor | None,
    v: Tensor | None,
    descales: Descales,
    preset: str | None,
    call: tuple[Any, ...],
    return_lse: bool,
) -> Tensor | tuple[Tensor, ...]:
    """What cute_attn.fwd returns. call: Options."""
    options = Options(*call)
    o, lse, amax = forward(q, k, v, descales, preset, options, return_lse)
    if options.return_amax and amax is not None:
        return (o, lse, amax) if return_lse else (o, amax)
    return (o, lse) if return_lse else o


def knows(q: Tensor, k: Tensor, v: Tensor, preset: str, options: Options) -> bool:
    """Whether such a call was checked before, and may be made without gradients."""
    if not fp8_launch.serves(q):
        return False
    plan = fp8_launch.find(q, k, v, NO_DESCALES, preset, options)[1]
    return plan is not None


class Chosen(NamedTuple):
    """What would run a call."""

    problem: Fp8Problem
    config: Fp8Config
    arch: str
    quantise: QuantizeConfig | None  # of a call with a preset
    copies: tuple[str, ...]


def choose(
    q: Tensor | QuantizedQKV,
    k: Tensor | None,
    v: Tensor | None,
    descales: Descales,
    preset: str | None,
    options: Options,
) -> Chosen:
    """For explain and warmup: nothing runs. With arch 'sm90' tensors may be on any device, the meta
    device included."""
    if isinstance(q, QuantizedQKV):
        _check_alone(k, v, descales, preset, options)
    foreign = options._replace(foreign=options.arch == "sm90")
    pack, scale, dtype = _checked_call(q, k, v, descales, preset, foreign)
    given, quantise = pack, None
    if pack is None:
        wanted = preset, 0, options.k_block, "head"
        plan = quantize_launch.make_plan((q, k, v), fp8_launch.UNSHIFTED, wanted, True)  # type: ignore[arg-type]
        pack, quantise = quantize_launch.shapes(plan), plan.config
    negative = scale is not None and scale < 0.0
    problem = fp8_launch.make_problem(pack, options.causal, negative, dtype)
    empty = 0 in (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    config = fp8_launch.choose_config(problem, None if empty else options.config)
    problem = problem.with_fine_k(fp8_launch._of_blocks(pack, config.tile_n)[2])
    tensors = (q, k, v) if given is None else (pack.q, pack.k, pack.v)
    copies = [name for name, t in zip("qkv", tensors) if t is not None and launch.needs_copy(t)]
    if given is not None and pack.v is not None and pack.v.dtype == E4M3:
        copies = [*(name for name in copies if name != "v"), "v"]  # to vt
    device = pack.q.device if given is not None else q.device  # type: ignore[union-attr]
    arch = options.arch if foreign.foreign else launch.choose_hopper(device, options.arch, "FP8")
    return Chosen(problem, config, str(arch), quantise, tuple(copies))


def kernels_of_preset(
    problem: Problem, preset: str, config: Any
) -> "list[tuple[Problem, Fp8Config | QuantizeConfig]]":
    """Of the smallest call with problem's head dims, dtype, mask and sign of the scale, as it
    launches them."""
    dtype = next(t for t in INPUTS if DTYPES[str(t)] == problem.dtype)
    q, v = (
        torch.empty(1, 1, 1, d, dtype=dtype, device="meta")
        for d in (problem.head_dim, problem.head_dim_v)
    )
    scale = -1.0 if problem.negative_scale else None
    call = Options(problem.causal, scale, config=config, arch="sm90")
    found = choose(q, q, v, NO_DESCALES, preset, call)
    assert found.quantise is not None
    plain = Problem(problem.dtype, problem.head_dim, problem.head_dim_v)
    parts = found.config.launches(found.problem)
    return [(plain, found.quantise), *((part, found.config) for part in parts)]


def _as_checked(
    q: Tensor | QuantizedQKV,
    k: Tensor | None,
    v: Tensor | None,
    descales: Descales,
    options: Options,
) -> bool:
    """Whether a call is as the one whose plan it found, in what no key tells: 1 hashes as True
    does, and gradients are refused."""
    causal, out = options.causal, options.out
    if (causal is not True and causal is not False) or launch._forward_ad._current_level >= 0:
        return False
    if not launch._grad_enabled():
        return True
    if out is not None and out.requires_grad:
        return False
    if options.o_scale is not None and options.o_scale.requires_grad:
        return False
    if isinstance(q, QuantizedQKV):
        descales = q.q_descale, q.k_descale, q.v_descale
        q, k, v = q.q, q.k, q.vt if q.v is None else q.v
    if q.requires_grad or k.requires_grad or v.requires_grad:  # type: ignore[union-attr]
        return False
    return not any([t.requires_grad for t in descales if t is not None])


def _checked_call(
    q: Tensor | QuantizedQKV,
    k: Tensor | None,
    v: Tensor | None,
    descales: Descales,
    preset: str | None,
    options: Options,
) -> tuple[QuantizedQKV | None, float | None, torch.dtype]:
    """All checks: (pack, softmax_scale, dtype of out), no pack where a preset is to make one."""
    if isinstance(q, QuantizedQKV):
        pack = q
    elif k is None or v is None:
        missing = "k" if k is None else "v"
        raise TypeError(f"{missing} is missing: only a pack of quantize_qkv goes without k and v")
    elif preset is None:
        pack = _packed(q, k, v, descales, options)
    else:
        for name, descale in zip("qkv", descales):
            if descale is not None:
                raise ValueError(
                    f"{name}_descale is given with preset {preset!r}, which measures it"
                )
        scale, dtype = checked_preset(q, k, v, preset, options)
        _refuse_gradients({"q": q, "k": k, "v": v})
        return None, scale, dtype
    of_v = quantize.shaped_as_v(pack)
    _check_tensors(pack, of_v)
    return pack, *_checked(pack.q, pack.k, of_v, pack.dtype, options)


def _quantised(q: Any, k: Any, v: Any, preset: Any, options: Options) -> QuantizedQKV:
    return quantize.quantize_qkv(q, k, v, preset=preset, k_block=options.k_block)


def _packed(q: Tensor, k: Tensor, v: Tensor, descales: Descales, options: Options) -> QuantizedQKV:
    """FP8 tensors with their descales as a pack. Whether these agree is asked later."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type(t).__name__}: a torch.Tensor is wanted")
    if q.dtype in INPUTS:
        given = {f"{name}_descale": d for name, d in zip("qkv", descales)}
        given |= {"out_dtype": options.out_dtype, "k_block": options.k_block}
        given |= {"o_scale": options.o_scale, "return_amax": options.return_amax or None}
        name = next(name for name, value in given.items() if value is not None)
        raise ValueError(
            f"{name} is given and q.dtype is {q.dtype}: it belongs to {E4M3} tensors, and but for "
            "descales to preset='fp8' too"
        )
    block = quantize.checked_block(options.k_block)
    preset = "fp8" if v.dtype == E4M3 else "fp8_hp"
    return QuantizedQKV(
        q, k, v, *descales, block, preset, torch.bfloat16, None, None, None, None, None
    )  # fmt: skip


def _on_cpu(pack: QuantizedQKV, options: Options, dtype: torch.dtype) -> Found:
    from cute_attn import reference_fp8

    wide, amax = torch.float32 if dtype is E4M3 else dtype, None
    o, lse = reference_fp8.attention_fp8(
        pack, causal=options.causal, softmax_scale=options.softmax_scale, out_dtype=wide
    )
    if dtype is E4M3:
        o, amax = reference_fp8.rounded_output(o, options.o_scale)
    return (o if options.out is None else options.out.copy_(o)), lse, amax


# Checks


def checked_preset(
    q: Tensor, k: Tensor, v: Tensor, preset: str, options: Options
) -> tuple[float | None, torch.dtype]:
    """All checks of a call with a preset but that of gradients: (softmax_scale, dtype of out)."""
    quantize._check_preset(preset)
    if getattr(q, "dtype", None) == E4M3:
        raise ValueError(f"preset is {preset!r} and q.dtype is {E4M3}: q is quantised already")
    quantize._check_inputs(q, k, v)
    quantize.checked_block(options.k_block)
    return _checked(q, k, v, q.dtype, options)


def _checked(
    q: Tensor, k: Tensor, v: Tensor, default: torch.dtype, options: Options
) -> tuple[float | None, torch.dtype]:
    """The options of a call whose tensors are right: (softmax_scale, dtype of out). Last of all, a
    device without a kernel is refused."""
    if not isinstance(options.causal, bool):
        raise TypeError(f"causal is {options.causal!r}: a bool is wanted")
    scale = None if options.softmax_scale is None else launch.checked_scale(options.softmax_scale)
    if scale is not None and abs(scale) < launch.MIN_SCALE:
        scale = 0.0
    dtype = _checked_out(q, k, v, default, options)
    _check_rounding(options, dtype, q)
    if options.config is not None and not isinstance(options.config, Fp8Config):
        raise TypeError(f"config is {options.config!r}: FP8 wants an Fp8Config")
    if not options.foreign:
        launch.choose_hopper(q.device, options.arch, "FP8")
    return scale, dtype


def _checked_out(
    q: Tensor, k: Tensor, v: Tensor, default: torch.dtype, options: Options
) -> torch.dtype:
    out, dtype = options.out, options.out_dtype
    if dtype is not None and dtype not in OUTPUTS:
        raise TypeError(f"out_dtype is {dtype}: allowed are {', '.join(map(str, OUTPUTS))}")
    if out is None:
        return dtype or default
    if not isinstance(out, Tensor):
        raise TypeError(f"out is a {type(out).__name__}: a torch.Tensor is wanted")
    wanted = (dtype,) if dtype else OUTPUTS
    if out.dtype not in wanted:
        raise TypeError(f"out.dtype is {out.dtype}: wanted is {' or '.join(map(str, wanted))}")
    shape = (*q.shape[:3], v.shape[3])
    if tuple(out.shape) != shape:
        raise ValueError(f"out.shape is {tuple(out.shape)}: {shape} is wanted")
    if out.device != q.device:
        raise ValueError(f"out.device is {out.device}: it must be q.device, {q.device}")
    _refuse_gradients({"out": out})
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride())):
        raise ValueError(f"out.stride() is {out.stride()}: an expanded tensor is not writable")
    start, size = out.data_ptr(), launch._extent(out)
    for name, t in (("q", q), ("k", k), ("v", v)):
        if start < t.data_ptr() + launch._extent(t) and t.data_ptr() < start + size:
            raise ValueError(f"out overlaps {name} in memory: the inputs must stay as they are")
    return out.dtype


def _check_rounding(options: Options, dtype: torch.dtype, q: Tensor) -> None:
    """What belongs to out in e4m3."""
    scale, amax = options.o_scale, options.return_amax
    if dtype is not E4M3:
        for name, given in (("o_scale", scale is not None), ("return_amax", amax)):
            if given:
                raise ValueError(f"{name} is given and out is in {dtype}: it belongs to {E4M3}")
    if scale is None:
        return
    if not isinstance(scale, Tensor):
        raise TypeError(f"o_scale is a {type(scale).__name__}: a torch.Tensor is wanted")
    if scale.dtype != torch.float32:
        raise TypeError(f"o_scale.dtype is {scale.dtype}: torch.float32 is wanted")
    if tuple(scale.shape) not in ((), (1,)):
        raise ValueError(f"o_scale.shape is {tuple(scale.shape)}: allowed are () and (1,)")
    if scale.device != q.device:
        raise ValueError(f"o_scale.device is {scale.device}: it must be q.device, {q.device}")
    _refuse_gradients({"o_scale": scale})


def _check_alone(
    k: object, v: object, descales: Descales, preset: object, options: Options
) -> None:
    """A pack brings all that belongs to it."""
    if k is v is preset is options.k_block is None and not any(d is not None for d in descales):
        return
    given = {"k": k, "v": v, **{f"{name}_descale": d for name, d in zip("qkv", descales)}}
    given |= {"preset": preset, "k_block": options.k_block}
    for name, value in given.items():
        if value is not None:
            raise TypeError(f"{name} is given beside a pack of quantize_qkv, which has its own")


def _check_tensors(pack: QuantizedQKV, v: Tensor) -> None:
    q, k = pack.q, pack.k
    for name, t, allowed in (("q", q, (E4M3,)), ("k", k, (E4M3,)), ("v", v, (E4M3, *INPUTS))):
        if t.dtype not in allowed:
            names = " or ".join(map(str, allowed))
            raise TypeError(f"{name}.dtype is {t.dtype}: {names} is wanted")
    quantize.check_shapes(q, k, v)
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k, heads_kv, head_dim_v = v.shape[1:]
    head = batch, heads_kv
    blocks = -(-seqlen_k // pack.k_block)
    _check_descale("q", pack.q_descale, q, head, (batch, heads_q, seqlen_q))
    _check_descale("k", pack.k_descale, q, head, (*head, blocks), f", {pack.k_block} keys a block")
    _check_descale("v", pack.v_descale, q, head, (*head, head_dim_v))
    if pack.v_descale is not None and v.dtype != E4M3:
        raise ValueError(f"v_descale is given and v.dtype is {v.dtype}: only {E4M3} has one")
    if pack.v_shift is not None:
        quantize.check_channels("v_shift", pack.v_shift, v)
    descales = {"q": pack.q_descale, "k": pack.k_descale, "v": pack.v_descale}
    scales = {f"{name}_descale": d for name, d in descales.items() if d is not None}
    _refuse_gradients({"q": q, "k": k, "v": v, **scales})


def _check_descale(
    letter: Literal["q", "k", "v"],
    descale: Tensor | None,
    q: Tensor,
    head: tuple[int, int],
    fine: tuple[int, int, int],
    note: str = "",
) -> None:
    """head: (batch, nheads_kv), for q too; fine: the shape of the finest scales that fold."""
    if descale is None:
        return
    name = f"{letter}_descale"
    if not isinstance(descale, Tensor):
        raise TypeError(f"{name} is a {type(descale).__name__}: a torch.Tensor is wanted")
    if descale.dtype != torch.float32:
        raise TypeError(f"{name}.dtype is {descale.dtype}: torch.float32 is wanted")
    if descale.device != q.device:
        raise ValueError(f"{name}.device is {descale.device}: it must be q.device, {q.device}")
    if tuple(descale.shape) not in ((1,), head, fine):
        what = {
            "q": "(batch, nheads_q, seqlen_q)",
            "k": "(batch, nheads_kv, ceil(seqlen_k / k_block))",
            "v": "(batch, nheads_kv, head_dim_v)",
        }[letter]
        raise ValueError(
            f"{name}.shape is {tuple(descale.shape)}: allowed are (1,), (batch, nheads_kv), here "
            f"{head}, and {what}, here {fine}{note}"
        )


def _refuse_gradients(tensors: dict[str, Tensor]) -> None:
    if launch._forward_ad._current_level >= 0:
        for name, t in tensors.items():
            if launch._forward_ad.unpack_dual(t).tangent is not None:
                raise NotImplementedError(f"{name} carries a tangent, which FP8 has no use for")
    if not torch.is_grad_enabled():
        return
    for name, t in tensors.items():
        if t.requires_grad:
            raise NotImplementedError(
                f"{name} requires grad and fwd in FP8 has no backward: "
                "flash_attn_func(..., preset='fp8') on bf16 or fp16 tensors is differentiable"
            )
