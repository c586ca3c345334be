"""torch tensors -> one launch: a plan per kind of call, outputs, counters, the right device.

A warm call is one look-up on what tensors say for free. It asks the device nothing, and goes
through torch's current stream, which the compiled kernel reads itself.
"""

import math
import numbers
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_attn import compile as jit
from cute_attn import tuning, tuning_sm80
from cute_attn.config import AmpereConfig, FwdConfig
from cute_attn.problem import Problem

MAX_SCALE = 1e38  # the kernel multiplies by log2(e) in fp32
MIN_SCALE = 1e-37  # stands for 0: every score is then the same to the last bit of the sum
MAX_STRIDE = 1 << 39  # elements: TMA holds strides below 2**40 bytes
MAX_PLANS = 4096  # then start over: a decode loop makes a plan per length
CAPTURE_SLOTS = 16384  # counters for launches inside CUDA graphs, per device

# Looked up once. Names with an underscore in torch._C have stood since 2.0, but not in every build.
_grad_enabled = torch.is_grad_enabled
_forward_ad = torch.autograd.forward_ad
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)
_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


def _empty_on_current_device(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


_empty: Callable[..., Tensor] = getattr(  # half the time of torch.empty
    getattr(getattr(torch._C, "_dynamo", None), "guards", None),
    "_empty_strided_cuda",
    _empty_on_current_device,
)


@dataclass(slots=True)
class Plan:
    """What does not change between two calls with the same key."""

    problem: Problem
    config: FwdConfig | AmpereConfig
    arch: str
    device: torch.device
    dtype: torch.dtype
    scale: float  # the default softmax_scale
    out_shape: tuple[int, ...]
    out_stride: tuple[int, ...]
    lse_shape: tuple[int, ...]
    lse_stride: tuple[int, ...]
    bytes: tuple[int, int, int]  # extent of q, k and v in memory
    direct: bool  # q, k and v can be read as they are, if their bases are aligned
    empty: bool  # nothing to add up: no launch
    index: int = 0  # of the device
    sms: int = 0
    out_layout: tuple[tuple[int, ...], int, bool] = (
        (),
        0,
        False,
    )  # of the last out= that was checked
    counts: bool = False  # the schedule draws tickets from a counter
    scratch: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()  # shapes, strides; fp32
    no_lse: Tensor | None = None  # one float of lse_shape: where an LSE goes that nobody wants
    target: str = "sm90"  # what it is compiled for, as compile.py names it
    kernel: jit.Kernel | None = None  # None on the CPU and for an empty problem


_plans: dict[tuple[object, ...], Plan] = {}
_counters: dict[
    tuple[int, int], Tensor
] = {}  # (device, stream) -> one int32, zero between launches
_idle_counters: dict[int, Tensor] = {}  # device -> stands in where no schedule counts
_no_lse: dict[int, Tensor] = {}  # device -> one float
_slots: dict[int, Tensor] = {}  # device -> counters for captured launches
_slots_used: dict[int, int] = {}
_slots_lock = threading.Lock()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    config: FwdConfig | AmpereConfig | None = None,
    arch: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """One attention forward. Arguments, results and errors are those of cute_attn.fwd."""
    negative = False
    if softmax_scale is not None:
        if type(softmax_scale) is not float or not -MAX_SCALE <= softmax_scale <= MAX_SCALE:
            softmax_scale = checked_scale(softmax_scale)
        negative = softmax_scale < 0.0
    key: tuple[object, ...] = ()
    plan = None
    try:
        key = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
            q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            causal, negative, config, arch,
        )  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError, RuntimeError):  # no dense tensors, or not hashable
        key = ()
    if plan is None:
        plan = make_plan(q, k, v, causal, negative, config, arch)
        _remember(key, plan)
    if causal is not True and causal is not False:  # 1 hashes as True does
        raise TypeError(f"causal is {causal!r}: a bool is wanted")
    if _forward_ad._current_level >= 0:
        _refuse_tangents(q, k, v)
    if _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise NotImplementedError(
            "q, k or v requires grad and fwd records no gradients: call flash_attn_func, which is "
            "differentiable, or fwd under torch.no_grad() or on detached tensors"
        )
    direct = out is not None and _check_out(out, plan, q, k, v)
    if plan.kernel is None:
        if plan.empty or plan.arch == "cpu":
            o, lse = _without_kernel(plan, q, k, v, softmax_scale, out)
            return (o, lse) if return_lse else o
        _bind(plan)
    if softmax_scale is None:
        scale = plan.scale
    else:
        scale = max(abs(softmax_scale), MIN_SCALE)
    if _current_device() == plan.index:
        o, lse = _launch(plan, q, k, v, out, direct, scale, return_lse)
    else:
        with torch.cuda.device(plan.index):
            o, lse = _launch(plan, q, k, v, out, direct, scale, return_lse)
    return (o, lse) if return_lse else o


def _launch(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    direct: bool,
    scale: float,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """The tensors' device is current here. direct: the kernel can write out as it is."""
    if not plan.direct or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        q, k, v = loadable(q), loadable(k), loadable(v)
    o = out if direct else None if out is None else storable(out)
    if o is None:
        o = _empty(plan.out_shape, plan.out_stride, plan.dtype)
    lse = plan.no_lse
    if return_lse or lse is None:
        lse = _empty(plan.lse_shape, plan.lse_stride, torch.float32)
    if not plan.counts:
        counter = _idle_counters[plan.index]
    elif _capturing():
        counter = _capture_slot(plan.index)
    else:
        counter = _stream_counter(plan.index)
    try:
        if plan.scratch:
            parts = [_empty(*layout, torch.float32) for layout in plan.scratch]
            plan.kernel(q, k, v, o, lse, counter, plan.sms, scale, *parts)  # type: ignore[misc]
        else:
            plan.kernel(q, k, v, o, lse, counter, plan.sms, scale)  # type: ignore[misc]
    except BaseException:
        _counters.pop((plan.index, _raw_stream(plan.index)), None)  # who knows what it holds
        raise
    if out is None:
        return o, lse
    if o.data_ptr() != out.data_ptr():
        out.copy_(o)
    return out, lse


# Plans


def make_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    negative: bool = False,
    config: FwdConfig | AmpereConfig | None = None,
    arch: str | None = None,
    foreign: bool = False,
) -> Plan:
    """Check the call. Nothing is compiled or allocated here; a first launch does both.

    foreign: do not ask whether the tensors' device runs arch, for explain.
    """
    if not isinstance(causal, bool):
        raise TypeError(f"causal is {causal!r}: a bool is wanted")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if isinstance(t, Tensor) and (t.is_nested or t.layout != torch.strided):
            raise TypeError(f"{name} is nested or of layout {t.layout}: a dense tensor is wanted")
    problem = Problem.from_tensors(q, k, v, causal=causal, negative_scale=negative)
    arch = arch if foreign and arch else choose_arch(q.device, arch)
    target = compile_target(q.device, arch)
    chosen = choose_config(problem, config, target)
    out_shape = (problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim_v)
    lse_shape = (problem.batch, problem.heads_q, problem.seqlen_q)
    return Plan(
        problem,
        chosen,
        arch,
        q.device,
        q.dtype,
        problem.head_dim**-0.5,
        out_shape,
        _contiguous_stride(out_shape),
        lse_shape,
        _contiguous_stride(lse_shape),
        (_extent(q), _extent(k), _extent(v)),
        direct=all(map(_loadable_strides, (q, k, v))),
        empty=0 in lse_shape or problem.seqlen_k == 0,
        target=target,
    )


def choose_config(
    problem: Problem, config: FwdConfig | AmpereConfig | None, target: str = "sm90"
) -> FwdConfig | AmpereConfig:
    """The tuning table's, or the caller's if the kernel can run it."""
    chip = jit.target(target)
    if target.startswith("sm80"):
        if config is None:
            return tuning_sm80.pick(problem, chip)
        if not isinstance(config, AmpereConfig):
            raise TypeError(f"config is {config!r}: with arch 'sm80' an AmpereConfig is wanted")
        reason = config.infeasible(problem, chip)
    else:
        if config is None:
            return tuning.pick(problem)
        if not isinstance(config, FwdConfig):
            raise TypeError(f"config is {config!r}: a FwdConfig is wanted")
        reason = config.infeasible(problem)
    if reason:
        raise ValueError(f"config cannot serve this problem: {reason}")
    return config


def check_arch_name(arch: str) -> None:
    if arch not in ("cpu", "sm80", "sm90"):
        raise ValueError(f"arch is {arch!r}: allowed are 'cpu', 'sm80' and 'sm90'")


def choose_arch(device: torch.device, arch: str | None) -> str:
    """What runs tensors of this device; one clear error where nothing does. Whatever is as new as
    8.0 runs 'sm80' on request."""
    if arch is not None:
        check_arch_name(arch)
    native = "sm80" if arch == "sm80" and _runs_sm80(device) else _native_arch(device)
    if arch is not None and arch != native:
        raise ValueError(f"arch is {arch!r}, but q.device is {device}, which runs {native!r}")
    return native


def choose_hopper(device: torch.device, arch: str | None, what: str) -> str:
    """The same for what has no Ampere kernels."""
    refuse_ampere(arch, what)
    chosen = choose_arch(device, arch)
    refuse_ampere(chosen, what)
    return chosen


def refuse_ampere(arch: str | None, what: str) -> None:
    if arch == "sm80":
        raise NotImplementedError(
            f"arch='sm80': {what} is not built for it, but for compute capability 9.0 and the CPU"
        )


def compile_target(device: torch.device, arch: str) -> str:
    """arch with the chip that kernels for this device are compiled for, as compile.py names it."""
    if arch != "sm80":
        return arch
    major, minor = _capability(device) if device.type == "cuda" else (8, 0)
    chip = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    return arch if chip == jit.DSL_ARCH[arch] else f"{arch}:{chip}"


def runs_here(arch: str) -> bool:
    """Whether the current device runs this arch."""
    device = torch.device("cuda", torch.cuda.current_device())
    return (
        _capability(device) == (9, 0) if arch == "sm90" else arch == "sm80" and _runs_sm80(device)
    )


def _capability(device: torch.device) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def _runs_sm80(device: torch.device) -> bool:
    nvidia = device.type == "cuda" and not torch.version.hip
    return nvidia and _capability(device) >= (8, 0)


def _native_arch(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda" or torch.version.hip:  # a ROCm build calls its devices cuda
        raise ValueError(f"q.device is {device}: NVIDIA GPUs and the CPU are supported")
    major, minor = _capability(device)
    if (major, minor) == (9, 0):
        return "sm90"
    if major == 8:
        return "sm80"
    runs = "arch='sm80' runs here too" if major > 8 else "CPU tensors run anywhere"
    raise NotImplementedError(
        f"q.device is {device}, {torch.cuda.get_device_name(device)} of compute capability "
        f"{major}.{minor}: kernels are built for 8.0 to 9.0; {runs}"
    )


def compiled(problem: Problem, config: jit.AnyConfig, arch: str) -> jit.Kernel:
    """The kernel, which a graph under capture may not wait for; the problem's device is current."""
    kernel = jit.in_memory(problem, config, arch)
    if kernel is None and _capturing():
        raise RuntimeError(
            "this call would compile a kernel inside CUDA-graph capture: warm up first, "
            "by one call with such tensors outside the capture"
        )
    return kernel or jit.get(problem, config, arch)


def _bind(plan: Plan) -> None:
    """Give the plan its kernel, and what a launch must know of the device."""
    index = plan.index = plan.device.index or 0
    with torch.cuda.device(plan.device):
        capturing = _capturing()
        kernel = compiled(plan.problem, plan.config, plan.target)
        plan.sms = multiprocessors(plan.device)
        plan.counts = plan.config.schedule == "dynamic"
        plan.scratch = _scratch(plan)
        if not capturing:
            _prepare_counters(index)
        elif index not in _idle_counters:
            plan.counts = True  # a slot zeroed in the graph serves every schedule
        if index in _no_lse:
            plan.no_lse = _no_lse[index].expand(plan.lse_shape)
    plan.kernel = kernel


def _scratch(plan: Plan) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """O and row statistics of every part of the keys, where they are split."""
    if not plan.config.split_kv:
        return ()
    parts = plan.config.parts(plan.problem)
    shapes = (parts, *plan.out_shape), (2, parts, *plan.lse_shape)
    return tuple((shape, _contiguous_stride(shape)) for shape in shapes)


def _refuse_tangents(*inputs: Tensor) -> None:
    for name, t in zip("qkv", inputs):
        if _forward_ad.unpack_dual(t).tangent is not None:
            raise NotImplementedError(
                f"{name} carries a tangent: forward-mode derivatives are not built"
            )


def multiprocessors(device: torch.device) -> int:
    """0 for what is no GPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _remember(key: tuple[object, ...], plan: Plan) -> None:
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    if key:
        _plans[key] = plan


def checked_scale(scale: object) -> float:
    """softmax_scale as a float. A tensor is refused: reading it would wait for the GPU."""
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"softmax_scale is {scale!r}: a Python number is wanted")
    try:
        value = float(scale)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value) or abs(value) > MAX_SCALE:
        raise ValueError(f"softmax_scale is {value}: finite values up to {MAX_SCALE} are allowed")
    return value


# Layouts that TMA can and cannot address


def _loadable_strides(t: Tensor) -> bool:
    """Last stride 1, the others multiples of 16 bytes, 0 included; a dimension of size 1 too,
    because its stride reaches the TMA descriptor all the same."""
    return t.stride(3) == 1 and all(
        stride % (16 // t.element_size()) == 0 and 0 <= stride < MAX_STRIDE
        for stride in t.stride()[:3]
    )


def needs_copy(t: Tensor) -> bool:
    """Whether loadable copies t."""
    if t.device.type == "meta":  # no address, no copy
        return not _loadable_strides(_plain_unit_dims(t))
    return t.data_ptr() % 16 != 0 or not _loadable_strides(_plain_unit_dims(t))


def loadable(t: Tensor) -> Tensor:
    """t itself if TMA can read it, else the same values where it can: copied at most once."""
    if t.data_ptr() % 16 == 0:
        t = _plain_unit_dims(t)
        if _loadable_strides(t):
            return t
    return _copy(t)


def storable(out: Tensor) -> Tensor | None:
    """A view of out that TMA can write, or None."""
    if out.data_ptr() % 16 == 0:
        out = _plain_unit_dims(out)
        if _loadable_strides(out) and _separate(out):
            return out
    return None


def _plain_unit_dims(t: Tensor) -> Tensor:
    """Nothing is read through the stride of a dimension of size 1: give it one that TMA takes."""
    shape, stride = t.shape, t.stride()
    contiguous = _contiguous_stride(shape)
    plain = tuple(c if size == 1 else s for size, s, c in zip(shape, stride, contiguous))
    return t if plain == stride else t.as_strided(shape, plain)


def _copy(t: Tensor) -> Tensor:
    """Contiguous, but what is expanded stays expanded."""
    expanded = [size > 1 and stride == 0 for size, stride in zip(t.shape[:3], t.stride()[:3])]
    shape = t.shape
    for i, once in enumerate(expanded):
        if once:
            t = t.narrow(i, 0, 1)
    return t.clone(memory_format=torch.contiguous_format).expand(shape)


def _separate(t: Tensor) -> bool:
    """Whether the strides alone show that no two elements share memory."""
    reach = 0
    for stride, size in sorted(zip(t.stride(), t.shape)):
        if size > 1:
            if stride <= reach:
                return False
            reach += stride * (size - 1)
    return True


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


def _extent(t: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if 0 in t.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
    return int((last + 1) * t.element_size())


def _check_out(out: Tensor, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Raise if out cannot hold the result; returns whether the kernel can write it as it is."""
    if not isinstance(out, Tensor):
        raise TypeError(f"out is a {type(out).__name__}: a torch.Tensor is wanted")
    if out.dtype != plan.dtype:
        raise TypeError(f"out.dtype is {out.dtype}: it must be q.dtype, {plan.dtype}")
    if out.shape != plan.out_shape:
        raise ValueError(f"out.shape is {tuple(out.shape)}: {plan.out_shape} is wanted")
    if out.device != plan.device:
        raise ValueError(f"out.device is {out.device}: it must be q.device, {plan.device}")
    if out.requires_grad and _grad_enabled():
        raise NotImplementedError("out requires grad and fwd records no gradients: detach it")
    stride, extent, storable_stride = plan.out_layout
    if out.stride() != stride:
        if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride())):
            raise ValueError(f"out.stride() is {out.stride()}: an expanded tensor is not writable")
        extent, storable_stride = _extent(out), _loadable_strides(out) and _separate(out)
        plan.out_layout = out.stride(), extent, storable_stride
    start = out.data_ptr()
    if extent:
        for name, t, size in zip("qkv", (q, k, v), plan.bytes):
            if start < t.data_ptr() + size and t.data_ptr() < start + extent:
                raise ValueError(f"out overlaps {name} in memory: the inputs must stay as they are")
    return storable_stride and not start & 15


# Calls without a kernel


def _without_kernel(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Empty problems anywhere, and everything on the CPU."""
    if plan.empty:
        o = torch.zeros(plan.out_shape, dtype=plan.dtype, device=plan.device)
        lse = torch.full(plan.lse_shape, -math.inf, dtype=torch.float32, device=plan.device)
    else:
        from cute_attn import reference

        if softmax_scale is not None and abs(softmax_scale) < MIN_SCALE:
            softmax_scale = 0.0
        o, lse = reference.attention_blockwise(
            q,
            k,
            v,
            causal=plan.problem.causal,
            softmax_scale=softmax_scale,
            block_q=plan.config.tile_m,
            block_k=plan.config.tile_n,
        )
    return (o if out is None else out.copy_(o)), lse


# Ticket counters: zero before a launch and after it, never shared by two that may overlap


def _stream_counter(index: int) -> Tensor:
    """Launches on one stream follow each other, so they share one."""
    stream = _raw_stream(index)
    counter = _counters.get((index, stream))
    if counter is None:
        counter = torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", index))
        _counters[index, stream] = counter
    return counter


def _prepare_counters(index: int) -> None:
    with _slots_lock:  # a graph may hold what the first of two threads has made
        if index in _slots:
            return
        device = torch.device("cuda", index)
        slots = torch.zeros(CAPTURE_SLOTS, 4, dtype=torch.int32, device=device)
        idle = torch.zeros(1, dtype=torch.int32, device=device)
        no_lse = torch.zeros((), dtype=torch.float32, device=device)
        torch.cuda.current_stream(device).synchronize()  # a graph may replay on any stream
        _idle_counters[index], _no_lse[index] = idle, no_lse
        _slots[index] = slots


def _capture_slot(index: int) -> Tensor:
    """A counter of its own for every launch in a graph: two graphs may replay at once.

    Without a free one, a counter that the graph itself clears before each launch: a node more.
    """
    slots = _slots.get(index)
    with _slots_lock:
        used = _slots_used.get(index, 0)
        _slots_used[index] = used + 1
    if slots is None or used >= CAPTURE_SLOTS:
        return torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", index))
    return slots[used, :1]
