"""FP8 tensors and their factors -> one launch on a GPU: a plan per kind of call, as launch.py has.

A warm call is one look-up on what tensors say for free. Checks are those of fp8.py, made once for a
plan; a call with a preset finds there what quantises its tensors, too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_attn import fp8_prepare, launch, quantize, quantize_launch, tuning_fp8
from cute_attn.config import Fp8Config
from cute_attn.problem import DTYPES, Fp8Problem
from cute_attn.quantize import E4M3, QuantizedQKV, shaped_as_v

FINE = 16  # keys that have a factor of their own where blocks of keys do not share one
UNSHIFTED = (None,) * 5  # what fwd's presets tell quantize_qkv: shifts, balance, cos, sin

Descales = tuple[Tensor | None, Tensor | None, Tensor | None]
Key = tuple[object, ...]
Step = Callable[[Tensor], Tensor]  # what the caller gave -> what the kernel reads
Factor = tuple[Step | None, float, tuple[int, ...]]  # step; if none was given, value and shape

# As Tensor.as_strided from where the tensor starts, in half the time.
_view: Callable[..., Tensor] = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "guards", None),
    "_reinterpret_tensor",
    torch.as_strided,
)


class Options(NamedTuple):
    """The arguments of cute_attn.fwd that are neither tensors nor scales."""

    causal: bool = False
    softmax_scale: float | None = None
    out: Tensor | None = None
    out_dtype: torch.dtype | None = None
    k_block: int | None = None
    config: Any = None
    arch: str | None = None
    o_scale: Tensor | None = None
    return_amax: bool = False
    foreign: bool = False  # do not ask whether the tensors' device runs arch


class Tensors(NamedTuple):
    """Of a pack, or of e4m3 tensors with their descales."""

    q: Tensor
    k: Tensor
    v: Tensor  # or vt
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    v_shift: Tensor | None
    q_dot_k_shift: Tensor | None


@dataclass(slots=True)
class Plan:
    """What does not change between two calls with the same key."""

    call: launch.Plan  # its dtype is out's
    steps: tuple[tuple[int, Step], ...]  # which of a Tensors' factors, counted from 0, takes one
    missing: tuple[tuple[int, float, tuple[int, ...]], ...]  # factors to be made: value, shape
    q_heads: int  # that share a factor
    k_shift: int  # log2 of the KV blocks that do
    transpose: fp8_prepare.Plan | None  # V's way to vt
    rest: launch.Plan | None  # columns of V that Fp8Config.launches leaves to another launch
    quantise: quantize_launch.Plan | None = None  # of a call with a preset


Found = tuple[Tensor, Tensor, Tensor | None]  # out, lse, amax

_plans: dict[Key, Plan] = {}
_constants: dict[torch.device, Tensor] = {}  # 0.0 and 1.0


def serves(t: object) -> bool:
    """Whether t's calls come here: on the CPU they are computed in torch."""
    return getattr(t, "is_cuda", False)


def find(
    q: Tensor | QuantizedQKV,
    k: Tensor | None,
    v: Tensor | None,
    descales: Descales,
    preset: str | None,
    options: Options,
) -> tuple[Key, Plan | None]:
    """The plan of such a call, if there is one, and where to remember it; () is nowhere."""
    causal, scale, out, out_dtype, k_block, config, arch, o_scale, amax, _ = options
    negative = False
    if scale is not None:
        if type(scale) is not float or not -launch.MAX_SCALE <= scale <= launch.MAX_SCALE:
            return (), None
        negative = scale <= -launch.MIN_SCALE  # what is smaller counts as 0
    try:
        key: Key = (
            causal, negative, config, arch, out_dtype, None if out is None else out.dtype,
            bool(amax),
        )  # fmt: skip
        if o_scale is not None:
            key += o_scale.shape, o_scale.dtype, o_scale.device
        if isinstance(q, QuantizedQKV):
            key += _layout_of_pack(q)
        else:
            key += (
                q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),  # type: ignore[union-attr]
                q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,  # type: ignore[union-attr]
                preset, k_block, type(k_block),
                *[None if t is None else (t.shape, t.stride(), t.dtype, t.device)
                  for t in descales],
            )  # fmt: skip
        return key, _plans.get(key)
    except (AttributeError, TypeError, RuntimeError):  # no dense tensors, or not hashable
        return (), None


def _layout_of_pack(pack: QuantizedQKV) -> Key:
    """Packs of one kind differ in strides of v_shift at most, which a caller may have given."""
    shift = pack.v_shift
    if pack.kind is not None:
        return pack.kind, None if shift is None else shift.stride()
    tensors = (*_tensors(pack), pack.v)
    return (
        pack.k_block, type(pack.k_block), pack.dtype,
        *[None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors],
    )  # fmt: skip


def remember(key: Key, plan: Plan) -> None:
    if len(_plans) >= launch.MAX_PLANS:
        _plans.clear()
    if key:
        _plans[key] = plan


def run(
    plan: Plan,
    q: Tensor | QuantizedQKV,
    k: Tensor | None,
    v: Tensor | None,
    descales: Descales,
    options: Options,
    return_lse: bool,
) -> Found:
    """(out, lse, amax) of a call that the plan was found or made for. lse holds nothing unless
    return_lse; amax is of out in e4m3 alone."""
    if isinstance(q, QuantizedQKV):
        tensors = _tensors(q)
    else:
        tensors = Tensors(q, k, v, *descales, None, None)
    call, out = plan.call, options.out
    direct = out is not None and launch._check_out(out, call, *tensors[:3])
    if call.empty:
        return _nothing(call, out)
    if call.kernel is None:
        if plan.rest is not None:
            launch._bind(plan.rest)
        launch._bind(call)
    if launch._current_device() == call.index:
        return _launch(plan, tensors, options, direct, return_lse)
    with torch.cuda.device(call.index):
        return _launch(plan, tensors, options, direct, return_lse)


def _launch(
    plan: Plan, tensors: Tensors, options: Options, direct: bool, return_lse: bool
) -> Found:
    """The tensors' device is current here. direct: the kernel can write out as it is."""
    call, index, out = plan.call, plan.call.index, options.out
    if plan.quantise is not None:
        tensors = _tensors(quantize_launch.quantise(plan.quantise, *tensors[:3], UNSHIFTED))
    q, k, v, *factors = tensors
    amax = None
    if call.dtype is E4M3:
        factors.append(options.o_scale)
        amax = launch._empty((1,), (1,), torch.float32).zero_()
    if plan.missing:
        _make_constants(plan, factors)
    for i, step in plan.steps:
        factors[i] = step(factors[i])
    if plan.transpose is not None:
        v = fp8_prepare.launch_transpose(plan.transpose, v)
    if not call.direct or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        q, k, v = launch.loadable(q), launch.loadable(k), launch.loadable(v)
    o = out if direct else None if out is None else launch.storable(out)
    if o is None:
        o = launch._empty(call.out_shape, call.out_stride, call.dtype)
    lse = call.no_lse
    if return_lse or lse is None:
        lse = launch._empty(call.lse_shape, call.lse_stride, torch.float32)
    if not call.counts:
        counter = launch._idle_counters[index]
    elif launch._capturing():
        counter = launch._capture_slot(index)
    else:
        counter = launch._stream_counter(index)
    scale = options.softmax_scale
    scale = call.scale if scale is None else max(abs(scale), launch.MIN_SCALE)
    given = counter, call.sms, scale, plan.q_heads, plan.k_shift
    if amax is not None:
        factors.append(amax)
    try:
        if plan.rest is None:
            call.kernel(q, k, v, o, lse, *given, *factors)  # type: ignore[misc]
        else:
            for kernel, columns in _by_columns(plan, v, o, factors):
                kernel(q, k, *columns[:2], lse, *given, *columns[2:])
    except BaseException:
        launch._counters.pop((index, launch._raw_stream(index)), None)  # who knows what it holds
        raise
    if out is None:
        return o, lse, amax
    if o.data_ptr() != out.data_ptr():
        out.copy_(o)
    return out, lse, amax


def _by_columns(
    plan: Plan, v: Tensor, o: Tensor, factors: list[Any]
) -> list[tuple[Any, list[Tensor]]]:
    """Two launches: the kernel, then v, o and the factors for its columns."""
    width = plan.call.problem.head_dim_v
    found = []
    for call, columns in (plan.call, slice(0, width)), (plan.rest, slice(width, None)):
        part = v[:, :, columns] if v.dtype == E4M3 else v[..., columns]  # vt
        of_v = [t[..., columns] for t in factors[2:4]]
        given = [part, o[..., columns], *factors[:2], *of_v, *factors[4:]]
        found.append((call.kernel, given))  # type: ignore[union-attr]
    return found


def _nothing(call: launch.Plan, out: Tensor | None) -> Found:
    """No queries or no keys."""
    with torch.no_grad():
        if out is None:
            out = torch.empty(call.out_shape, dtype=call.dtype, device=call.device)
        lse = torch.full(call.lse_shape, -math.inf, dtype=torch.float32, device=call.device)
        amax = torch.zeros(1, device=call.device) if call.dtype is E4M3 else None
        return out.zero_(), lse, amax


def _tensors(pack: QuantizedQKV) -> Tensors:
    v = pack.v if pack.v is not None else pack.vt
    return Tensors(
        pack.q, pack.k, v, pack.q_descale, pack.k_descale, pack.v_descale, pack.v_shift,
        pack.q_dot_k_shift,
    )  # fmt: skip


# Plans


def make_plan(
    pack: QuantizedQKV,
    device: torch.device,
    causal: bool,
    negative: bool,
    dtype: torch.dtype,
    given: Fp8Config | None,
    o_scale: Tensor | None = None,
) -> Plan:
    """Of a pack whose tensors and options are right; they may be on the meta device. Nothing is
    compiled or allocated here; a first launch does both."""
    problem = make_problem(pack, causal, negative, dtype)
    out_shape = (problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim_v)
    lse_shape = (problem.batch, problem.heads_q, problem.seqlen_q)
    empty = 0 in lse_shape or problem.seqlen_k == 0
    config = choose_config(problem, None if empty else given)
    parts = config.launches(problem)
    of_q, q_heads = _of_rows(pack)
    of_k, shift, fine = _of_blocks(pack, config.tile_n)
    factors = [of_q, of_k, *_of_channels(pack), (None, 0.0, lse_shape)]
    tensors, of_v = _tensors(pack), shaped_as_v(pack)
    held = list(tensors[3:])
    if dtype is E4M3:
        held.append(o_scale)
        factors.append((_of_out if o_scale is not None and o_scale.dim() == 0 else None, 1.0, (1,)))
    transpose = None
    if pack.v is not None and pack.v.dtype == E4M3 and not empty:
        transpose = fp8_prepare.make_plan(pack.v)
    read = tensors[:3] if transpose is None else tensors[:2]
    call = launch.Plan(
        parts[0].with_fine_k(fine),
        config,
        "sm90",
        device,
        dtype,
        problem.head_dim**-0.5,
        out_shape,
        launch._contiguous_stride(out_shape),
        lse_shape,
        launch._contiguous_stride(lse_shape),
        (launch._extent(pack.q), launch._extent(pack.k), launch._extent(of_v)),
        direct=all(map(launch._loadable_strides, read)),
        empty=empty,
    )
    all_of_them = list(enumerate(zip(factors, held)))
    return Plan(
        call,
        tuple((i, step) for i, ((step, *_), t) in all_of_them if t is not None and step),
        tuple((i, value, shape) for i, ((_, value, shape), t) in all_of_them if t is None),
        q_heads,
        shift,
        transpose,
        replace(call, problem=parts[1].with_fine_k(fine)) if parts[1:] else None,
    )


def plan_preset(
    tensors: tuple[Tensor, Tensor, Tensor],
    preset: str,
    negative: bool,
    dtype: torch.dtype,
    options: Options,
) -> Plan | None:
    """Of a call with a preset whose arguments are right; None where no kernel quantises."""
    if not quantize._has_kernels(tensors[0]):
        return None
    given = preset, 0, options.k_block, "head"
    quantise = quantize_launch.find(*tensors, UNSHIFTED, given)
    if quantise.index < 0:
        return None
    pack = quantize_launch.shapes(quantise)
    device = tensors[0].device
    plan = make_plan(
        pack, device, options.causal, negative, dtype, options.config, options.o_scale
    )  # fmt: skip
    plan.quantise = quantise
    plan.call.bytes = tuple(map(launch._extent, tensors))  # type: ignore[assignment]
    return plan


def _make_constants(plan: Plan, factors: list[Tensor | None]) -> None:
    """Factors that nobody gave: kept, but those of a graph under capture, which fills them itself
    where no call before it has made them."""
    device = plan.call.device
    capturing = launch._capturing()
    pair = _constants.get(device)
    if pair is None:
        if capturing:
            for i, value, shape in plan.missing:
                one = torch.full((1,), value, dtype=torch.float32, device=device)
                factors[i] = one.expand(shape)
            return
        # no kernel makes them: this waits for the copy, so any stream may read them
        pair = torch.tensor([0.0, 1.0], dtype=torch.float32, device=device)
        _constants[device] = pair
    found = [(i, pair[int(value)].expand(shape)) for i, value, shape in plan.missing]
    plan.steps += tuple((i, _always(t)) for i, t in found)
    plan.missing = ()


def _always(t: Tensor) -> Step:
    return lambda _: t


def make_problem(
    pack: QuantizedQKV, causal: bool, negative: bool, dtype: torch.dtype
) -> Fp8Problem:
    batch, seqlen_q, heads_q, head_dim = pack.q.shape
    v = shaped_as_v(pack)
    _, seqlen_k, heads_kv, head_dim_v = v.shape
    return Fp8Problem(
        DTYPES.get(str(dtype), "e4m3"),
        head_dim,
        head_dim_v,
        causal,
        negative,
        batch,
        seqlen_q,
        seqlen_k,
        heads_q,
        heads_kv,
        v_dtype=DTYPES.get(str(v.dtype), "e4m3"),
        channels=pack.v_descale is not None and pack.v_descale.dim() == 3,
        v_shift=pack.v_shift is not None,
    )


def choose_config(problem: Fp8Problem, config: Fp8Config | None) -> Fp8Config:
    if config is None:
        return tuning_fp8.pick(problem)
    reason = config.infeasible(config.launches(problem)[0])
    if reason:
        raise ValueError(f"config cannot serve this problem: {reason}")
    return config


# Factors of every shape that fwd allows, as the kernel reads them


def _of_rows(pack: QuantizedQKV) -> tuple[Factor, int]:
    """(batch, groups of heads, seqlen_q), and the heads of a group."""
    descale, (batch, seqlen_q, heads_q, _) = pack.q_descale, pack.q.shape
    if descale is not None and descale.dim() == 3:
        return (None, 1.0, ()), 1
    heads = pack.k.shape[2]
    return _of_heads(descale, (batch, heads, seqlen_q)), heads_q // heads


def _of_blocks(pack: QuantizedQKV, tile_n: int) -> tuple[Factor, int, bool]:
    """(batch, heads_kv, groups of keys), log2 of the KV blocks in a group, and whether a group is
    16 keys instead: where k_block and the kernel's blocks do not go into each other."""
    descale, (batch, seqlen_k, heads, _) = pack.k_descale, pack.k.shape
    blocks = -(-seqlen_k // tile_n)
    if descale is None or descale.dim() < 3 or descale.shape[2] == 1:
        return _of_heads(descale, (batch, heads, blocks)), 0, False
    if pack.k_block % tile_n:
        return (_repeated(pack.k_block // FINE, -(-seqlen_k // FINE)), 1.0, ()), 0, True
    shared = pack.k_block // tile_n
    if shared & (shared - 1):
        return (_repeated(shared, blocks), 1.0, ()), 0, False
    return (None, 1.0, ()), shared.bit_length() - 1, False


def _of_out(t: Tensor) -> Tensor:
    return t.view(1)


def _of_heads(t: Tensor | None, shape: tuple[int, ...]) -> Factor:
    """One factor for all, or one for each head."""
    if t is None:
        return None, 1.0, shape
    stride = (0, 0, 0) if t.dim() == 1 else (*t.stride()[:2], 0)
    return (lambda t: _view(t, shape, stride)), 1.0, shape


def _repeated(times: int, size: int) -> Step:
    def step(t: Tensor) -> Tensor:
        with torch.no_grad():
            return t.repeat_interleave(times, 2)[:, :, :size]

    return step


def _of_channels(pack: QuantizedQKV) -> tuple[Factor, Factor]:
    """V's factors and its shift, (batch, heads_kv, head_dim_v)."""
    scale, shift = pack.v_descale, pack.v_shift
    batch, _, heads, width = shaped_as_v(pack).shape
    shape = batch, heads, width
    if scale is None or scale.dim() < 3:
        of_scale = _of_heads(scale, shape)
    else:
        of_scale = _in_pairs(scale, shape), 1.0, shape
    return of_scale, (None if shift is None else _in_pairs(shift, shape), 0.0, shape)


def _in_pairs(t: Tensor, shape: tuple[int, ...]) -> Step:
    """fp32 with neighbours that can be loaded two at a time."""
    plain = t.stride(-1) == 1 and all(stride % 2 == 0 for stride in t.stride()[:-1])
    plain = plain and t.dtype == torch.float32
    stride = t.stride() if t.dim() == 3 else (0, *t.stride())

    def step(t: Tensor) -> Tensor:
        if not plain or t.data_ptr() & 7:
            with torch.no_grad():
                copy = torch.empty(t.shape, dtype=torch.float32, device=t.device)
                return copy.copy_(t).expand(shape)
        return t if t.dim() == 3 else _view(t, shape, stride)

    return step
