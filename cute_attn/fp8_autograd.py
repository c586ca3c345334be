"""flash_attn_func with a preset: the forward in FP8, the backward in the inputs' dtype.

The backward recomputes P from q and k as they were, with FP8's LSE. K's rounding errors in the
scores then make a row of dS sum up to something other than 0, and dQ = dS K gets that sum times K's
mean, which may be large. So it takes K less the forward's k_shift, with the LSE that goes with it:
the same gradients in exact arithmetic, without that error.
"""

from typing import Any

import torch
from torch import Tensor

from cute_attn import backward, fp8, launch
from cute_attn.fp8 import Options


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    deterministic: bool,
    preset: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable. Arguments and errors are those of cute_attn.flash_attn_func."""
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic is {deterministic!r}: a bool is wanted")
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"preset is {preset!r}: not built under torch.compile and torch.func transforms"
        )
    tensors = (q, k, v)
    if all(isinstance(t, Tensor) for t in tensors):
        if launch._forward_ad._current_level >= 0:
            launch._refuse_tangents(*tensors)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            both = _Attention.apply(q, k, v, softmax_scale, causal, deterministic, preset)
            return both[0], both[1]
    return fp8.forward(q, k, v, (None, None, None), preset, Options(causal, softmax_scale))


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        softmax_scale, causal, deterministic, preset = options
        call = Options(causal, softmax_scale)
        pack, scale, dtype = fp8.quantised(q, k, v, preset, call)
        out, lse = fp8.run(pack, call, scale, dtype)
        ctx.save_for_backward(q, k, v, out, lse, pack.k_shift, pack.q_dot_k_shift)
        ctx.options = q.shape[3] ** -0.5 if scale is None else scale, causal, deterministic
        ctx.set_materialize_grads(False)  # an lse that nobody uses has no gradient to read
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "double backward is not built: gradients of gradients (create_graph=True) cannot "
                "be taken"
            )
        if dout is None and dlse is None:
            return (None,) * 7
        return *_gradients(ctx, dout, dlse), None, None, None, None


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse, k_shift, q_dot_k_shift = ctx.saved_tensors
    scale, causal, deterministic = ctx.options
    if dout is None:
        dout = out.new_zeros(()).expand(out.shape)
    shifted = (k.float() - k_shift.unsqueeze(-3)).to(k.dtype)
    dq, dk, dv = backward.backward(
        dout, q, shifted, v, out, lse - scale * q_dot_k_shift, causal, scale,
        dlse=dlse, deterministic=deterministic,
    )  # fmt: skip
    if dlse is not None:  # LSE moves with q . k_shift, whatever the weights
        moves = (scale * dlse).masked_fill(lse == -torch.inf, 0.0).transpose(1, 2).unsqueeze(-1)
        of_head = k_shift.repeat_interleave(q.shape[2] // k.shape[2], -2).unsqueeze(-3)
        dq = (dq.float() + moves * of_head).to(q.dtype)
    return dq, dk, dv
