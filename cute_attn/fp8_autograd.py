"""flash_attn_func with a preset, as a torch operator with gradients: torch.ops.cute_attn.fwd_fp8.
Importing this module registers it. The forward is in FP8, the backward in the inputs' dtype.

The backward recomputes P from q and k as they were, with FP8's LSE. K's rounding errors in the
scores then make a row of dS sum up to something other than 0, and dQ = dS K gets that sum times K's
mean, which may be large. So it takes K less its mean, with the LSE of those scores: the same
gradients in exact arithmetic, without that error.
"""

from typing import Any

import torch
from torch import Tensor

from cute_attn import autograd, fp8, launch, quantize
from cute_attn.fp8 import Options

_library = torch.library.Library("cute_attn", "FRAGMENT")  # its operator lives as long as it does
_library.define(
    "fwd_fp8(Tensor q, Tensor k, Tensor v, float? softmax_scale, bool causal, bool deterministic,"
    " str preset) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    deterministic: bool,
    preset: str,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable; lse may hold nothing unless return_lse. Arguments and errors are
    those of cute_attn.flash_attn_func. Where nothing watches operators the dispatcher is spared, as
    in autograd.attention."""
    for name, flag in (("causal", causal), ("deterministic", deterministic)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} is {flag!r}: a bool is wanted")
    quantize._check_preset(preset)
    if not torch.compiler.is_compiling():  # there fwd_fp8 checks, when it runs
        autograd.refuse_transforms()
        options = Options(causal, softmax_scale)
        tangents = launch._forward_ad._current_level >= 0
        if _plain(q, k, v) and not tangents:
            return fp8.forward(q, k, v, fp8.NO_DESCALES, preset, options, return_lse)[:2]
        if not fp8.knows(q, k, v, preset, options):
            softmax_scale, _ = fp8.checked_preset(q, k, v, preset, options)
        if tangents:  # torch's own message names no argument
            launch._refuse_tangents(q, k, v)
        if autograd._spares_dispatcher(q, k, v):
            out, lse = _Attention.apply(q, k, v, softmax_scale, causal, deterministic, preset)
            return out, lse
    out, lse = torch.ops.cute_attn.fwd_fp8(q, k, v, softmax_scale, causal, deterministic, preset)
    return out, lse


def _plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether fwd can answer."""
    return autograd._spares_dispatcher(q, k, v) and autograd._plain(q, k, v)


def _fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    deterministic: bool,
    preset: str,
) -> tuple[Tensor, Tensor]:
    """deterministic is for the backward: the forward always is."""
    return fp8.forward(q, k, v, fp8.NO_DESCALES, preset, Options(causal, softmax_scale))[:2]


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * 7
    q, k, v, out, lse = ctx.saved_tensors
    softmax_scale, causal, deterministic, _ = ctx.options
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    if dout is None:
        dout = out.new_zeros(()).expand(out.shape)
    K = k.float()
    centre = _centre(K, k.dtype)
    centred = (K - quantize._per_token(centre)).to(k.dtype)
    of_head = quantize._per_query_head(centre, q.shape[2])  # (b, 1, hq, d)
    of_centre = (q * of_head).sum(-1).transpose(1, 2)  # fp32 (b, hq, sq)
    lse_centred = torch.sub(lse, of_centre, alpha=scale)
    dq, dk, dv = autograd._backward(
        dout, q, centred, v, out, lse_centred, dlse, scale, causal, deterministic
    )
    if dlse is not None:  # LSE moves with q . centre, whatever the weights
        of_row = (scale * dlse).masked_fill(lse == -torch.inf, 0.0).transpose(1, 2).unsqueeze(-1)
        dq = (dq.float() + of_row * of_head).to(q.dtype)
    return dq, dk, dv, None, None, None, None


_Attention = autograd._without_dispatcher(_fwd, _gradients)


def _centre(K: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 (batch, nheads_kv, head_dim): the mean key, 0 in channels where it is less than half of
    their root mean square. It does no harm there, and K less it, rounded to dtype, would: a large
    score would be off. 0 also where K less it has no room in that dtype, or there is no mean."""
    if not K.numel():
        return K.sum(1)
    variance, mean = torch.var_mean(K, 1, correction=0)
    small = 3 * mean.square() < variance  # which is the mean square less that of the mean
    reach = torch.linalg.vector_norm(K, torch.inf, 1) + mean.abs()
    wanted = ~small & (reach <= torch.finfo(dtype).max)  # not with an infinity or a NaN
    return torch.where(wanted, mean, 0.0)


_library.impl("fwd_fp8", _fwd, "CompositeExplicitAutograd")
torch.library.register_fake("cute_attn::fwd_fp8", autograd._fwd_fake, lib=_library)
torch.library.register_autograd(
    "cute_attn::fwd_fp8", _gradients, setup_context=autograd._save, lib=_library
)
