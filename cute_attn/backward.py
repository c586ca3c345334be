"""torch tensors -> one backward: the checks of cute_attn.bwd, then what computes it.

Kept apart from launch.py, which every forward reads on its warm path.
"""

from dataclasses import replace

import torch
from torch import Tensor

from cute_attn import launch
from cute_attn.config import BwdConfig

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
    _refuse_derivatives(dout=dout, q=q, k=k, v=v, out=out, lse=lse, dlse=dlse)
    if plan.empty:
        dq, dk, dv = (t.new_zeros(t.shape) for t in (q, k, v))
        return dq, dk, dv
    if plan.arch != "cpu":
        refuse(deterministic)
        given = plan.scale if scale is None else scale
        given = 0.0 if abs(given) < launch.MIN_SCALE else given
        with torch.cuda.device(plan.device):
            return _launch(plan, dout, q, k, v, out, lse, dlse, given)
    from cute_attn import reference_backward

    if scale is not None and abs(scale) < launch.MIN_SCALE:
        scale = 0.0
    return reference_backward.attention_backward_blockwise(
        dout, q, k, v, out, lse, causal=causal, softmax_scale=scale, dlse=dlse
    )


def refuse(deterministic: bool) -> None:
    """What the kernel does not do yet, before a launch, and before a forward that would need it."""
    if deterministic:
        raise NotImplementedError(
            "deterministic is True: it is not built yet on CUDA tensors, where dq is added up in "
            "no fixed order; leave it at its default"
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
) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors' device is current here."""
    problem = replace(plan.problem, negative_scale=False)  # P takes a scale of either sign
    config = BwdConfig()
    kernel = launch.compiled(problem, config, plan.arch)
    q, k, v, out, dout = (launch.loadable(t) for t in (q, k, v, out, dout))
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if dlse is None:
        dlse = torch.zeros((), dtype=torch.float32, device=q.device).expand(plan.lse_shape)
    batch, heads, seqlen_q = plan.lse_shape
    rows = config.tile_m(problem)
    blocks = -(-seqlen_q // rows)
    stats = lse.new_empty(2, batch, heads, blocks * rows * config.copies(problem))
    parts = lse.new_empty(batch, heads, blocks, rows * config.width(problem))
    score_scale = scale if abs(scale) > TINY_SCALE else TINY_SCALE
    kernel(q, k, v, out, dout, lse, dlse, dq, dk, dv, stats, parts, scale, score_scale)
    return dq, dk, dv


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
