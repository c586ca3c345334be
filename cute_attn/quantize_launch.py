"""quantize_qkv and channel_statistics on CUDA tensors: a plan per kind of call, outputs, launches.

As launch.py: what a warm call asks is a look-up on what tensors say for free, and it goes through
torch's current stream. Checks are those of quantize.py, made once for a plan.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from cute_attn import compile as jit
from cute_attn import fp8_prepare, launch, quantize
from cute_attn.config import ONE_TILE, QuantizeConfig, QuantizeSizes
from cute_attn.problem import DTYPES, Problem, round_up
from cute_attn.quantize import E4M3, ChannelStatistics, QuantizedQKV, Shift

Vectors = tuple[Shift, Shift, Tensor | None, Tensor | None, Tensor | None]
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype

MAX_CHUNKS = 64  # of a sequence, for statistics: enough to fill a GPU, few enough to add up at once
CHUNK = 128  # rows of one are a multiple of it
ANGLES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(slots=True)
class Plan:
    """What does not change between two calls with the same key."""

    problem: Problem
    config: QuantizeConfig
    device: torch.device
    index: int  # of the device; -1: nothing to launch
    seed: int | None
    by_head: bool  # one scale of K a head
    out_v: str  # what the pack calls V
    direct: bool  # q, k and v can be read as they are, if their bases are aligned
    plain: bool  # and so can shifts, balance, cos and sin
    vectors: tuple[int, ...]  # which of those are given
    rows: tuple[int, int, int]  # of a chunk of q and of k, keys that share a scale
    layouts: dict[str, Layout]
    constants: dict[str, object]  # of packs, among them kind, where the key determines layouts
    signs: Tensor | None = None
    kernel: jit.Kernel | None = None


_plans: dict[tuple[object, ...], Plan] = {}


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    preset: str,
    hadamard_seed: int | None,
    k_shift: Shift,
    v_shift: Shift,
    qk_balance: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    k_block: object,
    v_scales: str,
) -> QuantizedQKV | None:
    """As quantize.quantize_qkv; None where there is nothing to launch a kernel for."""
    given = k_shift, v_shift, qk_balance, cos, sin
    plan = find(q, k, v, given, (preset, hadamard_seed, k_block, v_scales))
    if plan.index < 0:
        return None
    if launch._current_device() == plan.index:
        return quantise(plan, q, k, v, given)
    with torch.cuda.device(plan.index):
        return quantise(plan, q, k, v, given)


def find(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Vectors,
    options: tuple[str, int | None, object, str],
) -> Plan:
    """The plan of quantize_qkv with these vectors and options, after its checks if it is new."""
    key: tuple[object, ...] = ()
    plan = None
    k_shift, v_shift, balance, cos, sin = given
    try:
        key = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
            q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            *options, type(options[1]), type(options[2]),
            k_shift if k_shift is None or k_shift is False else _kind(k_shift),
            v_shift if v_shift is None or v_shift is False else _kind(v_shift),
            balance if balance is None or balance is False else _kind(balance),
            cos if cos is None else _kind(cos),
            sin if sin is None else _kind(sin),
        )  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError, RuntimeError):  # no dense tensors, or not hashable
        key = ()
    if plan is None:
        plan = make_plan((q, k, v), given, options)
        _remember(key, plan)
    return plan


def _kind(t: Tensor) -> tuple[object, ...]:
    return t.shape, t.stride(), t.dtype, t.device


def quantise(plan: Plan, q: Tensor, k: Tensor, v: Tensor, given: Vectors) -> QuantizedQKV:
    """The tensors' device is current here."""
    if plan.kernel is None:
        _bind(plan)
    if not plan.direct or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        q, k, v = map(launch.loadable, (q, k, v))
    k_shift, v_shift, balance, cos, sin = _vectors(plan, given)
    empty = launch._empty
    of = {name: empty(*layout) for name, layout in plan.layouts.items()}
    get = of.get
    k_shift, v_shift = get("k_shift", k_shift), get("v_shift", v_shift)
    plan.kernel(  # type: ignore[misc]
        q, k, v, cos, sin, k_shift, v_shift, balance, get("qk_balance"), plan.signs,
        of["q"], of["k"], get(plan.out_v), of["q_descale"], of["k_descale"], get("v_descale"),
        get("q_dot_k_shift"), of.pop("scratch"), *plan.rows,
    )  # fmt: skip
    return _pack(plan, of, v, k_shift, v_shift)


def shapes(plan: Plan) -> QuantizedQKV:
    """On the meta device, the pack of a plan without given vectors that casts V or shifts it."""
    of = {
        name: torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        for name, (shape, stride, dtype) in plan.layouts.items()
        if name != "scratch"
    }
    return _pack(plan, of, None, of.get("k_shift"), of.get("v_shift"))


def _pack(
    plan: Plan,
    of: dict[str, Tensor],
    v: Tensor | None,
    k_shift: Tensor | None,
    v_shift: Tensor | None,
) -> QuantizedQKV:
    """of: what was allocated, by the pack's names."""
    pack = object.__new__(QuantizedQKV)
    held: dict[str, Any] = pack.__dict__  # a frozen dataclass's own __init__ takes far longer
    held.update(plan.constants)
    held.update(of)
    held["k_shift"], held["v_shift"] = k_shift, v_shift
    if plan.by_head:
        held["k_descale"] = held["k_descale"][:, :, 0]
    if plan.out_v not in of:  # v is the caller's, or a copy with other strides
        held["v"] = v
        del held["kind"]
    return pack


def channel_statistics(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None
) -> ChannelStatistics | None:
    """As quantize.channel_statistics; None where there is nothing to launch a kernel for."""
    given = None, None, None, cos, sin
    key: tuple[object, ...] = ("statistics",)
    for t in (q, k, v, *(t for t in (cos, sin) if t is not None)):
        key += t.shape, t.stride(), t.dtype, t.device
    plan = _plans.get(key)
    if plan is None:
        plan = make_plan((q, k, v), given, None)
        _remember(key, plan)
    if plan.index < 0:
        return None
    with torch.cuda.device(plan.index):
        if plan.kernel is None:
            _bind(plan)
        q, k, v = _readable(plan, q, k, v)
        cos, sin = _vectors(plan, given)[3:]
        of = {name: launch._empty(*layout) for name, layout in plan.layouts.items()}
        found = of["k_shift"], of["v_shift"], of["qk_balance"]
        plan.kernel(  # type: ignore[misc]
            q, k, v, cos, sin, of["k_shift"], of["v_shift"], None, of["qk_balance"],
            *(None,) * 8, of["scratch"], *plan.rows,
        )  # fmt: skip
    return ChannelStatistics(*found)


# What a launch gets


def _readable(plan: Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
    if plan.direct and not any(t.data_ptr() & 15 for t in tensors):
        return tensors
    return tuple(launch.loadable(t) for t in tensors)


def _vectors(plan: Plan, given: Vectors) -> list[Tensor | None]:
    """Of what the caller gave, False taken as None: vectors as contiguous fp32, angles with rows
    that can be read 16 bytes at a time."""
    if plan.plain:
        bits = 0
        for i in plan.vectors:
            bits |= given[i].data_ptr()  # type: ignore[union-attr]
        if not bits & 15:
            return [None if t is False else t for t in given]
    return [*map(_fp32, given[:3]), *(_angles(plan, t) for t in given[3:])]


def _fp32(t: Shift) -> Tensor | None:
    return None if t is None or t is False else _aligned(t.float().contiguous())


def _aligned(t: Tensor) -> Tensor:
    return t.clone() if t.data_ptr() & 15 else t


def _angles(plan: Plan, t: Tensor | None) -> Tensor | None:
    if t is None:
        return None
    dtype = next(d for d, name in ANGLES.items() if name == plan.config.rope)
    t = t.to(dtype)
    return _aligned(t if _plain_angles(t) else t.contiguous())


def _plain_angles(t: Tensor) -> bool:
    wide = t.shape[1] % 8 == 0  # else they are read one by one
    return t.stride(1) == 1 and not (wide and t.stride(0) * t.element_size() % 16)


# Plans


def make_plan(
    tensors: tuple[Tensor, ...],
    given: Vectors,
    options: tuple[str, int | None, object, str] | None,
    foreign: bool = False,
) -> Plan:
    """Check the call, and say what it makes. options: None for statistics alone. Nothing is
    compiled or allocated here. foreign: do not ask whether the tensors' device runs kernels."""
    q, k, v = tensors
    quantize._check_inputs(q, k, v)
    quantize._check_rope(given[3], given[4], q, k)
    block: int | None = quantize.K_BLOCK
    preset, seed, v_scales = "fp8", 0, "head"
    if options is not None:
        preset, seed, k_block, v_scales = options  # type: ignore[assignment]
        block = quantize._check_options(k, v, given[:3], options)
    config = choose_config(given, preset, seed, block, v_scales, options is None)
    problem = Problem(DTYPES[str(q.dtype)], q.shape[3], v.shape[3])
    if not foreign:
        launch.choose_hopper(q.device, None, "FP8")
    empty = 0 in q.shape[:3] or k.shape[1] == 0
    rows = _chunk(q.shape[1]), _chunk(k.shape[1]), block or max(16, round_up(k.shape[1], 16))
    return Plan(
        problem,
        config,
        q.device,
        -1 if empty else q.device.index or 0,
        seed,
        block is None,
        _name_of_v(config),
        all(map(launch._loadable_strides, tensors)),
        _all_plain(given, config),
        tuple(i for i, t in enumerate(given) if isinstance(t, Tensor)),
        rows,
        _layouts(q, k, v, config, rows),
        dict.fromkeys((f.name for f in fields(QuantizedQKV)), None)
        | {
            "k_block": block or quantize.K_BLOCK,
            "preset": preset,
            "dtype": q.dtype,
            "hadamard_seed": seed,
            "kind": object(),
        },
    )


def choose_config(
    given: Vectors,
    preset: str,
    seed: int | None,
    block: int | None,
    v_scales: str,
    statistics: bool = False,
) -> QuantizeConfig:
    """block: keys that share a scale, None for all of a head's."""
    k_shift, v_shift, balance, cos, sin = given
    rope = ""
    if isinstance(cos, Tensor) and isinstance(sin, Tensor):
        rope = ANGLES[cos.dtype] if cos.dtype in ANGLES and sin.dtype == cos.dtype else "fp32"
    return QuantizeConfig(
        hadamard=seed is not None,
        k_shift=_source(k_shift),
        v_shift=_source(v_shift),
        balance="none" if balance is None and seed is None else _source(balance),
        rope=rope,
        half=cos.shape[1] if isinstance(cos, Tensor) else 0,
        k_block=block if block in ONE_TILE else 0,
        v_by_channel=v_scales == "channel" and preset == "fp8",
        keep_v=preset == "fp8_hp",
        statistics=statistics,
    )


def _source(t: Shift) -> str:
    if t is None or t is False:
        return "none" if t is False else "measured"
    return "head" if t.dim() == 2 else "sequence"


def _all_plain(given: Vectors, config: QuantizeConfig) -> bool:
    vectors = [t for t in given[:3] if isinstance(t, Tensor)]
    angles = [t for t in given[3:] if isinstance(t, Tensor)]
    return all(t.dtype == torch.float32 and t.is_contiguous() for t in vectors) and all(
        ANGLES.get(t.dtype) == config.rope and _plain_angles(t) for t in angles
    )


def _chunk(seqlen: int) -> int:
    return max(CHUNK, round_up(-(-seqlen // MAX_CHUNKS), CHUNK))


def _name_of_v(config: QuantizeConfig) -> str:
    return "vt" if config.transposed else "v"


def _layouts(
    q: Tensor, k: Tensor, v: Tensor, config: QuantizeConfig, rows: tuple[int, int, int]
) -> dict[str, Layout]:
    """Of all that a call allocates, by the pack's names."""
    batch, seqlen_q, heads_q, dim = q.shape
    seqlen_k, heads_kv, dim_v = v.shape[1:]
    sequences = () if config.statistics else (batch,)
    shapes: dict[str, tuple[int, ...]] = {}
    if not config.statistics:
        shapes["q"], shapes["k"] = tuple(q.shape), tuple(k.shape)
        shapes["q_descale"] = batch, heads_q, seqlen_q
        shapes["k_descale"] = batch, heads_kv, -(-seqlen_k // rows[2])
        if config.k_shift != "none":
            shapes["q_dot_k_shift"] = batch, heads_q, seqlen_q
        if config.transposed:
            shapes[_name_of_v(config)] = fp8_prepare.vt_shape(v)
            shapes["v_descale"] = batch, heads_kv, *((dim_v,) if config.v_by_channel else ())
        elif config.v_shift != "none":
            shapes[_name_of_v(config)] = tuple(v.shape)
    if config.k_shift == "measured":
        shapes["k_shift"] = *sequences, heads_kv, dim
    if config.v_shift == "measured":
        shapes["v_shift"] = *sequences, heads_kv, dim_v
    if config.balance != "none":
        shapes["qk_balance"] = *(() if config.balance == "head" else sequences), heads_kv, dim
    shapes["scratch"] = (scratch_words(q, k, v, config, rows),)
    dtypes = {"q": E4M3, "k": E4M3, "vt": E4M3, "v": v.dtype}
    return {
        name: (shape, launch._contiguous_stride(shape), dtypes.get(name, torch.float32))
        for name, shape in shapes.items()
    }


def scratch_words(
    q: Tensor, k: Tensor, v: Tensor, config: QuantizeConfig, rows: tuple[int, int, int]
) -> int:
    batch, _, heads_q, dim = q.shape
    seqlen_k, heads_kv, dim_v = v.shape[1:]
    chunks = -(-q.shape[1] // rows[0]), -(-seqlen_k // rows[1])
    sizes = QuantizeSizes(batch, heads_q, heads_kv, dim, dim_v, *chunks, -(-seqlen_k // 8))
    shapes = config.scratch_shapes(sizes)
    return max(4, sum(int(math.prod(shape)) for shape in shapes if shape is not None))


def _bind(plan: Plan) -> None:
    """Give the plan its kernel, and the signs of its seed."""
    if plan.config.hadamard and not plan.config.statistics:
        if launch._capturing():
            raise RuntimeError(
                "this call would copy the Hadamard transform's signs to the GPU inside CUDA-graph "
                "capture: warm up first, by one call with such tensors outside the capture"
            )
        signs = quantize._signs(plan.problem.head_dim, plan.seed or 0)
        plan.signs = signs.to(plan.device)
    plan.kernel = launch.compiled(plan.problem, plan.config, "sm90")


def _remember(key: tuple[object, ...], plan: Plan) -> None:
    if len(_plans) >= launch.MAX_PLANS:
        _plans.clear()
    if key:
        _plans[key] = plan
