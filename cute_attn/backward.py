"""torch tensors -> one backward: the checks of cute_attn.bwd, then what computes it.

Kept apart from launch.py, which every forward reads on its warm path.
"""

import torch
from torch import Tensor

from cute_attn import launch


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
        raise not_built(plan.device)  # the kernel's launch goes here
    from cute_attn import reference_backward

    if scale is not None and abs(scale) < launch.MIN_SCALE:
        scale = 0.0
    return reference_backward.attention_backward_blockwise(
        dout, q, k, v, out, lse, causal=causal, softmax_scale=scale, dlse=dlse
    )


def not_built(device: torch.device) -> NotImplementedError:
    """Raised in place of the launch, and before a forward that would need one."""
    return NotImplementedError(
        f"q.device is {device}: the backward kernel is not built yet for CUDA tensors; call under "
        "torch.no_grad() if no gradients are wanted (CPU tensors have a backward)"
    )


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
