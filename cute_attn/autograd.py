"""Attention as torch operators with gradients: torch.ops.cute_attn.fwd and .bwd.

Importing this module registers them with torch.library, once, with fake implementations for
torch.compile and torch.export. Both return fresh contiguous tensors that alias no input.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_attn import backward, launch, problem

_transforms_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_library = torch.library.Library("cute_attn", "DEF")  # its operators live as long as it does
_library.define(
    "fwd(Tensor q, Tensor k, Tensor v, float? softmax_scale, bool causal, bool deterministic)"
    " -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse,"
    " float? softmax_scale, bool causal, bool deterministic)"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    deterministic: bool,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Differentiable attention: (out, lse), lse None unless return_lse. Arguments and errors are
    those of cute_attn.flash_attn_func.

    Plain tensors take the short way, launch.forward, with gradients inside an autograd.Function:
    the dispatcher would cost more than a small kernel. It is needed where something watches it:
    torch.compile, dispatch modes, and tensors of other classes (fake ones among them).
    """
    if not isinstance(causal, bool):
        raise TypeError(f"causal is {causal!r}: a bool is wanted")
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic is {deterministic!r}: a bool is wanted")
    if not torch.compiler.is_compiling():
        refuse_transforms()
        if _plain(q, k, v):
            if return_lse:
                return _fwd(q, k, v, softmax_scale, causal, deterministic)
            return launch.forward(q, k, v, causal, softmax_scale), None
        if softmax_scale is not None:  # under torch.compile it may be symbolic; fwd checks it then
            softmax_scale = launch.checked_scale(softmax_scale)
        if launch._forward_ad._current_level >= 0:  # torch's own message names no argument
            launch._refuse_tangents(q, k, v)
        if _spares_dispatcher(q, k, v):
            out, lse = _Attention.apply(q, k, v, softmax_scale, causal, deterministic)
            return out, lse if return_lse else None
    if _device_type(q) not in ("cpu", "cuda"):  # for meta the fake implementation would answer
        launch.choose_arch(q.device, None)
    out, lse = torch.ops.cute_attn.fwd(q, k, v, softmax_scale, causal, deterministic)
    return out, lse if return_lse else None


def refuse_transforms() -> None:
    if _transforms_active():
        raise NotImplementedError(
            "torch.func transforms (grad, jvp, vmap) are not built: use torch.autograd"
        )


def _device_type(t: Tensor) -> str:
    return str(t.device.type)


def _plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether launch.forward can answer; it also has the errors for what is no tensor."""
    if type(q) is type(k) is type(v) is Tensor:
        return not (
            torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        )
    return not all(isinstance(t, Tensor) for t in (q, k, v))


def _watched() -> bool:
    """Whether a mode sees operators, and may act on them."""
    return bool(_dispatch_modes() or _function_modes())


def _spares_dispatcher(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nobody would see the operators."""
    return type(q) is type(k) is type(v) is Tensor and not _watched()


def _fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """deterministic is for the backward: the forward always is."""
    out, lse = launch.forward(q, k, v, causal, softmax_scale, return_lse=True)
    return out, lse


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    problem._check_devices(q, k, v)  # one on the meta device is enough to bring a call here
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_empty(batch, seqlen_q, heads, v.shape[3])
    return out, q.new_empty(batch, heads, seqlen_q, dtype=torch.float32)


def _bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return backward.backward(
        dout, q, k, v, out, lse, causal, softmax_scale, dlse=dlse, deterministic=deterministic
    )


def _bwd_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.options = options
    ctx.set_materialize_grads(False)  # an lse that nobody uses has no gradient to read


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 6
    if dout is None:
        dout = out.new_zeros(()).expand(out.shape)
    return *_backward(dout, q, k, v, out, lse, dlse, *ctx.options), None, None, None


def _backward(dout: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """_bwd, through the operator where that is watched: it also has the error for gradients of
    gradients."""
    if torch.is_grad_enabled() or _watched() or type(dout) is not Tensor:
        dq, dk, dv = torch.ops.cute_attn.bwd(dout, *others)
        return dq, dk, dv
    return _bwd(dout, *others)


def _without_dispatcher(run: Callable[..., Any], gradients: Callable[..., Any]) -> Any:
    """The autograd.Function that does what an operator registered with these and _save does of a
    tensor that requires grad."""

    class Attention(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = run(*inputs)
            _save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return gradients(ctx, *grads)

    return Attention


_Attention = _without_dispatcher(_fwd, _gradients)


def _no_second_gradients(ctx: Any, *_: Tensor | None) -> None:
    raise NotImplementedError(
        "double backward is not built: attention has first derivatives only, so gradients of its "
        "gradients (create_graph=True) cannot be taken"
    )


for _name, _kernel, _fake in (("fwd", _fwd, _fwd_fake), ("bwd", _bwd, _bwd_fake)):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cute_attn::{_name}", _fake, lib=_library)
torch.library.register_autograd("cute_attn::fwd", _gradients, setup_context=_save, lib=_library)
torch.library.register_autograd("cute_attn::bwd", _no_second_gradients, lib=_library)
