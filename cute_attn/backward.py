"""torch tensors -> one backward: the checks of cute_attn.bwd, then what computes it.

Kept apart from launch.py, which every forward reads on its warm path.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cute_attn import compile as jit
from cute_attn import launch, tuning_bwd, tuning_bwd_sm80
from cute_attn.config import FILL, SHARE_WORDS, AmpereBwdConfig, BwdConfig
from cute_attn.problem import Problem

Config = BwdConfig | AmpereBwdConfig
Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape, strides
TINY_SCALE = 2.0**-64  # stands for 0 in P = exp(scale * (Q K^T - LSE / scale))


@dataclass(slots=True)
class Plan:
    """What does not change between two calls with the same key."""

    call: launch.Plan  # of the forward
    config: Config
    gradients: tuple[Layout, Layout, Layout]
    scratch: tuple[Layout, ...]  # of rows, of dQ's accumulator, on 'sm90' of tiles that CTAs share
    direct: bool  # tensors can be read as they are, if their bases are aligned
    kernel: jit.Kernel | None = None
    shared: tuple[int, ...] = ()  # there: tiles before those, and CTAs that share one
    no_dlse: Tensor | None = None  # a zero of lse's shape


_plans: dict[tuple[object, ...], Plan] = {}
_zeros: dict[int, Tensor] = {}  # device -> one float


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    dlse: Tensor | None = None,
    deterministic: bool = False,
    arch: str | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One attention backward. Arguments, results and errors are those of cute_attn.bwd."""
    scale = None if softmax_scale is None else launch.checked_scale(softmax_scale)
    negative = scale is not None and scale < 0
    tensors = (dout, q, k, v, out, lse) if dlse is None else (dout, q, k, v, out, lse, dlse)
    options = causal, negative, deterministic, arch, config
    key: tuple[object, ...] = ()
    plan = None
    try:
        key = (*((t.shape, t.stride(), t.dtype, t.device) for t in tensors), *options)
        plan = _plans.get(key)
    except (AttributeError, TypeError, RuntimeError):  # no dense tensors, or not hashable
        key = ()
    if plan is None:
        plan = make_plan(dout, q, k, v, out, lse, dlse, *options)
        if len(_plans) >= launch.MAX_PLANS:
            _plans.clear()
        if key:
            _plans[key] = plan
    for name, flag in (("causal", causal), ("deterministic", deterministic)):
        if flag is not True and flag is not False:  # 1 hashes as True does
            raise TypeError(f"{name} is {flag!r}: a bool is wanted")
    _refuse_derivatives(tensors)
    call = plan.call
    if scale is not None and abs(scale) < launch.MIN_SCALE:
        scale = 0.0
    if call.empty:
        dq, dk, dv = (t.new_zeros(t.shape) for t in (q, k, v))
        return dq, dk, dv
    if call.arch == "cpu":
        from cute_attn import reference_backward

        return reference_backward.attention_backward_blockwise(
            dout, q, k, v, out, lse, causal=causal, softmax_scale=scale, dlse=dlse
        )
    scale = call.scale if scale is None else scale
    if plan.kernel is None:
        _bind(plan)
    if launch._current_device() == call.index:
        return _launch(plan, tensors, dlse, scale)
    with torch.cuda.device(call.index):
        return _launch(plan, tensors, dlse, scale)


def _launch(
    plan: Plan, tensors: tuple[Tensor, ...], dlse: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors' device is current here."""
    dout, q, k, v, out, lse = tensors[:6]
    if (
        not plan.direct
        or (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr() | dout.data_ptr()) & 15
    ):
        q, k, v, out, dout = (launch.loadable(t) for t in (q, k, v, out, dout))
    call = plan.call
    dq, dk, dv = (launch._empty(*layout, call.dtype) for layout in plan.gradients)
    scratch = [launch._empty(*layout, torch.float32) for layout in plan.scratch]
    if dlse is None:
        dlse = plan.no_dlse
    if dlse is None:  # not inside a graph, whose memory would not outlive it
        dlse = torch.zeros((), dtype=torch.float32, device=q.device).expand(call.lse_shape)
    score_scale = scale if abs(scale) > TINY_SCALE else TINY_SCALE
    inputs, gradients = (q, k, v, out, dout, lse, dlse), (dq, dk, dv)
    numbers = call.sms, *plan.shared, scale, score_scale
    plan.kernel(*inputs, *gradients, *scratch, *numbers)  # type: ignore[misc]
    return gradients


# Plans


def make_plan(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    causal: bool,
    negative: bool,
    deterministic: bool,
    arch: str | None,
    config: Config | None,
) -> Plan:
    """Check the call. Nothing is compiled or allocated here; a first launch does both."""
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic is {deterministic!r}: a bool is wanted")
    call = launch.make_plan(q, k, v, causal, negative, arch=arch)
    _check("dout", dout, call, call.out_shape, call.dtype)
    _check("out", out, call, call.out_shape, call.dtype)
    _check("lse", lse, call, call.lse_shape, torch.float32)
    if dlse is not None:
        _check("dlse", dlse, call, call.lse_shape, torch.float32)
    chosen = choose_config(call.problem, config, deterministic, call.target)
    dq, dk, dv = (_contiguous(tuple(t.shape)) for t in (q, k, v))
    statistics, accumulator = map(_contiguous, scratch_shapes(call.problem, chosen))
    direct = all(launch._loadable_strides(t) for t in (q, k, v, out, dout))
    return Plan(call, chosen, (dq, dk, dv), (statistics, accumulator), direct)


def _contiguous(shape: tuple[int, ...]) -> Layout:
    return shape, launch._contiguous_stride(shape)


def _bind(plan: Plan) -> None:
    """Give the plan its kernel, and a zero for the gradient of LSE that nobody gives."""
    call = plan.call
    index = call.index = call.device.index or 0
    with torch.cuda.device(call.device):
        kernel = launch.compiled(kernel_problem(call.problem), plan.config, call.target)
        call.sms = launch.multiprocessors(call.device)
        if isinstance(plan.config, BwdConfig):
            tiles = tuning_bwd.tiles_of(call.problem, plan.config, call.sms)
            plan.shared = tiles.whole, tiles.parts
            shares = _contiguous(shares_shape(call.problem, plan.config, tiles))
            plan.scratch = (*plan.scratch[:2], shares)
        if index not in _zeros and not launch._capturing():
            zero = torch.zeros((), dtype=torch.float32, device=call.device)
            if call.device.type == "cuda":
                torch.cuda.current_stream(call.device).synchronize()  # others read it too
            _zeros[index] = zero
    if index in _zeros:
        plan.no_dlse = _zeros[index].expand(call.lse_shape)
    plan.kernel = kernel


# What a problem runs


def kernel_problem(problem: Problem) -> Problem:
    """The problem that a kernel is compiled for: P takes a scale of either sign."""
    return replace(problem, negative_scale=False)


def choose_config(
    problem: Problem,
    config: Config | None,
    deterministic: bool = False,
    target: str = "sm90",
) -> Config:
    """The table's, or the caller's if the kernel can run it."""
    chip, reason = jit.target(target), ""
    if target.startswith("sm80"):
        if config is None:
            config = tuning_bwd_sm80.pick(problem, chip)
        elif not isinstance(config, AmpereBwdConfig):
            raise TypeError(f"config is {config!r}: with arch 'sm80' an AmpereBwdConfig is wanted")
        else:
            reason = config.infeasible(problem, chip)
    elif config is None:
        config = tuning_bwd.pick(problem)
    elif not isinstance(config, BwdConfig):
        raise TypeError(f"config is {config!r}: a BwdConfig is wanted")
    else:
        reason = config.infeasible(problem)
    if reason:
        raise ValueError(f"config cannot serve this problem: {reason}")
    return replace(config, deterministic=True) if deterministic else config


def scratch_shapes(problem: Problem, config: Config) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of what is kept of every row (LSE and D), and of dQ's accumulator, both fp32; they grow with
    seqlen_q."""
    rows, _ = config.tile(problem)
    blocks = -(-problem.seqlen_q // rows)
    statistics = problem.batch, problem.heads_q, blocks, config.block_words(problem)
    accumulator = problem.batch, problem.heads_q, blocks, rows * config.width(problem)
    return statistics, accumulator


def shares_shape(problem: Problem, config: BwdConfig, tiles: tuning_bwd.Tiles) -> tuple[int]:
    """Of what CTAs that share a tile pass on, fp32: counters, dK and dV of all parts but one."""
    columns = config.width(problem) + config.width_v(problem)
    passed_on = (tiles.parts - 1) * config.tile(problem)[1] * columns
    return (max(tiles.shared, 1) * (SHARE_WORDS + passed_on),)


@dataclass(frozen=True)
class BwdExplanation:
    """What bwd would run; print it."""

    problem: Problem
    config: Config
    arch: str
    kernel: str  # name of the main kernel, as profilers show it
    tile: tuple[int, int]  # queries and keys of a block
    smem_bytes: int  # shared memory per CTA
    tiles: int  # a block of keys and a KV head each; 0 for an empty problem
    parts: int  # into which those tiles are cut that would have a last round for themselves
    grid: int  # CTAs: one a tile, or on 'sm90' up to head dim 128 of as many as it takes
    scratch_bytes: int  # allocated for the call beside the gradients
    copies: tuple[str, ...]  # of q, k and v, what is copied because the hardware cannot load it
    compiled: str  # 'in memory', 'on disk' or 'not compiled'

    def __str__(self) -> str:
        p = self.problem
        lines = [
            f"problem    backward of {p.dtype}{' causal' if p.causal else ''}, batch {p.batch}, "
            f"seqlen {p.seqlen_q} x {p.seqlen_k}, heads {p.heads_q} over {p.heads_kv}, "
            f"head_dim {p.head_dim}, head_dim_v {p.head_dim_v}",
            f"arch       {self.arch}",
        ]
        if not self.grid:
            lines.append("runs       nothing: dq, dk and dv are 0")
        elif self.arch == "cpu":
            lines.append("runs       block-wise gradients in torch")
        else:
            m, n = self.tile
            cut = f", the last of them in {self.parts} parts" if self.parts > 1 else ""
            order = "a fixed" if self.config.deterministic else "no fixed"
            lines += [
                f"config     {self.config}",
                f"kernel     {self.kernel}, with row statistics before and dQ in 16 bits after it",
                f"tile       {m} queries x {n} keys",
                f"dq         added up in {order} order",
                f"smem       {self.smem_bytes} bytes per CTA",
                f"grid       {self.grid} CTAs for {self.tiles} tiles{cut}",
                f"scratch    {self.scratch_bytes} bytes",
                f"copies     {', '.join(self.copies) or 'none'}",
                f"compiled   {self.compiled}",
            ]
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    config: Config | None,
    arch: str | None,
    deterministic: bool,
) -> BwdExplanation:
    """Arguments and errors are those of cute_attn.explain(..., backward=True)."""
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic is {deterministic!r}: a bool is wanted")
    plan = launch.make_plan(q, k, v, causal, arch=arch, foreign=arch in ("sm80", "sm90"))
    problem = kernel_problem(plan.problem)
    chosen = choose_config(problem, config, deterministic, plan.target)
    sms = launch.multiprocessors(plan.device) or FILL
    on_device = plan.arch != "cpu" and not plan.empty
    scratch: list[tuple[int, ...]] = list(scratch_shapes(problem, chosen))
    if isinstance(chosen, BwdConfig):
        found = tuning_bwd.tiles_of(problem, chosen, sms)
        scratch.append(shares_shape(problem, chosen, found))
    else:
        n_blocks = -(-problem.seqlen_k // chosen.tile_n)
        found = tuning_bwd.Tiles(n_blocks * problem.heads_kv * problem.batch, 0, 1)
    tiles, ctas = found.whole + found.shared, found.whole + found.shared * found.parts
    if plan.empty:
        tiles = ctas = 0
    return BwdExplanation(
        problem,
        chosen,
        plan.arch,
        chosen.kernel_name(problem, plan.arch),
        chosen.tile(problem),
        chosen.smem_bytes(problem),
        tiles,
        found.parts,
        chosen.grid(problem, ctas, sms),
        4 * sum(map(math.prod, scratch)) if on_device else 0,
        tuple(name for name, t in (("q", q), ("k", k), ("v", v)) if launch.needs_copy(t)),
        jit.state(problem, chosen, plan.target) if on_device else "not compiled",
    )


# Wrong calls


def _check(
    name: str, t: Tensor, plan: launch.Plan, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} is a {type(t).__name__}: a torch.Tensor is wanted")
    if t.is_nested or t.layout != torch.strided:
        raise TypeError(f"{name} is nested or of layout {t.layout}: a dense tensor is wanted")
    if t.dtype != dtype:
        want = str(dtype) if dtype == torch.float32 else f"q.dtype, {dtype}"
        raise TypeError(f"{name}.dtype is {t.dtype}: it must be {want}")
    if t.shape != shape:
        raise ValueError(f"{name}.shape is {tuple(t.shape)}: {shape} is wanted")
    if t.device != plan.device:
        raise ValueError(f"{name}.device is {t.device}: it must be q.device, {plan.device}")


def _refuse_derivatives(tensors: tuple[Tensor, ...]) -> None:
    """Gradients of gradients would be silently 0."""
    forward_mode = launch._forward_ad._current_level >= 0
    grad = launch._grad_enabled()
    if not forward_mode and not grad:
        return
    for name, t in zip(("dout", "q", "k", "v", "out", "lse", "dlse"), tensors):
        if grad and t.requires_grad:
            raise NotImplementedError(
                f"{name} requires grad and double backward is not built: call bwd under "
                "torch.no_grad() or on detached tensors"
            )
        if forward_mode and launch._forward_ad.unpack_dual(t).tangent is not None:
            raise NotImplementedError(
                f"{name} carries a tangent: forward-mode derivatives are not built"
            )
