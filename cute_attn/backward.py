"""torch tensors -> one backward: the checks of cute_attn.bwd, then what computes it.

Kept apart from launch.py, which every forward reads on its warm path.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cute_attn import compile as jit
from cute_attn import launch, tuning_bwd
from cute_attn.config import BwdConfig
from cute_attn.problem import Problem

TINY_SCALE = 2.0**-64  # stands for 0 in P = exp(scale * (Q K^T - LSE / scale))


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
    config: BwdConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One attention backward. Arguments, results and errors are those of cute_attn.bwd."""
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic is {deterministic!r}: a bool is wanted")
    scale = None if softmax_scale is None else launch.checked_scale(softmax_scale)
    plan = launch.make_plan(q, k, v, causal, scale is not None and scale < 0, arch=arch)
    _check("dout", dout, plan, plan.out_shape, plan.dtype)
    _check("out", out, plan, plan.out_shape, plan.dtype)
    _check("lse", lse, plan, plan.lse_shape, torch.float32)
    if dlse is not None:
        _check("dlse", dlse, plan, plan.lse_shape, torch.float32)
    if config is not None:
        choose_config(plan.problem, config, deterministic)
    _refuse_derivatives(dout=dout, q=q, k=k, v=v, out=out, lse=lse, dlse=dlse)
    if plan.empty:
        dq, dk, dv = (t.new_zeros(t.shape) for t in (q, k, v))
        return dq, dk, dv
    if plan.arch != "cpu":
        config = choose_config(plan.problem, config, deterministic)
        given = plan.scale if scale is None else scale
        given = 0.0 if abs(given) < launch.MIN_SCALE else given
        with torch.cuda.device(plan.device):
            return _launch(plan, dout, q, k, v, out, lse, dlse, given, config)
    from cute_attn import reference_backward

    if scale is not None and abs(scale) < launch.MIN_SCALE:
        scale = 0.0
    return reference_backward.attention_backward_blockwise(
        dout, q, k, v, out, lse, causal=causal, softmax_scale=scale, dlse=dlse
    )


def _launch(
    plan: launch.Plan,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    scale: float,
    config: BwdConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors' device is current here."""
    problem = kernel_problem(plan.problem)
    kernel = launch.compiled(problem, config, plan.arch)
    q, k, v, out, dout = (launch.loadable(t) for t in (q, k, v, out, dout))
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if dlse is None:
        dlse = torch.zeros((), dtype=torch.float32, device=q.device).expand(plan.lse_shape)
    stats, parts = (lse.new_empty(shape) for shape in scratch_shapes(problem, config))
    score_scale = scale if abs(scale) > TINY_SCALE else TINY_SCALE
    kernel(q, k, v, out, dout, lse, dlse, dq, dk, dv, stats, parts, scale, score_scale)
    return dq, dk, dv


# What a problem runs


def kernel_problem(problem: Problem) -> Problem:
    """The problem that a kernel is compiled for: P takes a scale of either sign."""
    return replace(problem, negative_scale=False)


def choose_config(
    problem: Problem, config: BwdConfig | None, deterministic: bool = False
) -> BwdConfig:
    """The table's, or the caller's if the kernel can run it."""
    if config is None:
        config = tuning_bwd.pick(problem)
    elif not isinstance(config, BwdConfig):
        raise TypeError(f"config is {config!r}: a BwdConfig is wanted")
    else:
        reason = config.infeasible(problem)
        if reason:
            raise ValueError(f"config cannot serve this problem: {reason}")
    return replace(config, deterministic=True) if deterministic else config


def scratch_shapes(problem: Problem, config: BwdConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of what is kept of every row (LSE and D), and of dQ's accumulator, both fp32; they grow with
    seqlen_q."""
    rows = config.tile_m(problem)
    blocks = -(-problem.seqlen_q // rows)
    statistics = problem.batch, problem.heads_q, blocks, config.block_words(problem)
    accumulator = problem.batch, problem.heads_q, blocks, rows * config.width(problem)
    return statistics, accumulator


@dataclass(frozen=True)
class BwdExplanation:
    """What bwd would run; print it."""

    problem: Problem
    config: BwdConfig
    arch: str
    kernel: str  # name of the main kernel, as profilers show it
    tile: tuple[int, int]  # queries and keys of a block
    smem_bytes: int  # shared memory per CTA
    grid: int  # CTAs: a block of keys and a KV head each; 0 for an empty problem
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
            order = "a fixed" if self.config.deterministic else "no fixed"
            lines += [
                f"config     {self.config}",
                f"kernel     {self.kernel}, with row statistics before and dQ in 16 bits after it",
                f"tile       {m} queries x {n} keys",
                f"dq         added up in {order} order",
                f"smem       {self.smem_bytes} bytes per CTA",
                f"grid       {self.grid} CTAs",
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
    config: BwdConfig | None,
    arch: str | None,
    deterministic: bool,
) -> BwdExplanation:
    """Arguments and errors are those of cute_attn.explain(..., backward=True)."""
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic is {deterministic!r}: a bool is wanted")
    plan = launch.make_plan(q, k, v, causal, arch=arch, foreign=arch == "sm90")
    problem = kernel_problem(plan.problem)
    chosen = choose_config(problem, config, deterministic)
    m, n = chosen.tile_m(problem), 64 if chosen.wide(problem) else 64 * chosen.warpgroups
    blocks = -(-problem.seqlen_k // n)
    on_device = plan.arch != "cpu" and not plan.empty
    return BwdExplanation(
        problem,
        chosen,
        plan.arch,
        _kernel_name(problem, chosen, plan.arch),
        (m, n),
        chosen.smem_bytes(problem),
        0 if plan.empty else blocks * problem.heads_kv * problem.batch,
        4 * sum(map(math.prod, scratch_shapes(problem, chosen))) if on_device else 0,
        tuple(name for name, t in (("q", q), ("k", k), ("v", v)) if launch.needs_copy(t)),
        jit.state(problem, chosen, plan.arch) if on_device else "not compiled",
    )


def _kernel_name(problem: Problem, config: BwdConfig, arch: str) -> str:
    p, mask = problem.static(), "causal" if problem.causal else "full"
    order = "_deterministic" if config.deterministic else ""
    return f"cute_attn_bwd_{arch}_{p.dtype}_d{p.head_dim}_dv{p.head_dim_v}_{mask}{order}"


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


def _refuse_derivatives(**inputs: Tensor | None) -> None:
    """Gradients of gradients would be silently 0."""
    forward_mode = launch._forward_ad._current_level >= 0
    for name, t in inputs.items():
        if t is None:
            continue
        if t.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name} requires grad and double backward is not built: call bwd under "
                "torch.no_grad() or on detached tensors"
            )
        if forward_mode and launch._forward_ad.unpack_dual(t).tangent is not None:
            raise NotImplementedError(
                f"{name} carries a tangent: forward-mode derivatives are not built"
            )
