"""FP8 attention in plain torch, block by block in the order and with the casts of a Hopper kernel:
what fwd runs on CPU tensors, and what a kernel is compared with.

Source: FlashAttention-3 (arXiv 2407.08608), section 3.3; scales fold where they cost nothing.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_attn.quantize import E4M3, K_BLOCK, QuantizedQKV, saturate, values
from cute_attn.reference import _TILE_ELEMENTS, _hidden, _padded, _tile, _weighted_sum

P_SCALE = 2.0**8  # P is at most 1: times this it uses e4m3's range and stays below its end, 448
BLOCK_Q = 128


@dataclass(frozen=True)
class _Call:
    """One chunk of the batch, with the scales of every query head."""

    q: Tensor  # (batch, seqlen_q, nheads_q, head_dim)
    k: Tensor
    v: Tensor
    q_factor: Tensor  # fp32 (batch, nheads_q, seqlen_q), softmax_scale included
    k_factor: Tensor  # fp32 (batch, nheads_q, key blocks)
    causal: bool
    block_k: int
    finite: bool  # v has neither NaN nor infinities


def attention_fp8(
    pack: QuantizedQKV,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    p_scale: float = P_SCALE,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a pack: (batch, seqlen_q, nheads_q, head_dim_v) in out_dtype and fp32
    (batch, nheads_q, seqlen_q).

    Scores are products of e4m3 operands in fp32; both scales and softmax_scale are one factor of a
    row and a block of keys. P is rounded to e4m3 times p_scale, or to v's own dtype; its sum is
    taken before the cast. 1/sum, V's scale and V's shift come last. Empty rows are 0 with LSE -inf.
    """
    with torch.no_grad(), torch.autocast(pack.q.device.type, enabled=False):
        return _attention(pack, causal, softmax_scale, out_dtype, p_scale)


def _attention(
    pack: QuantizedQKV,
    causal: bool,
    softmax_scale: float | None,
    out_dtype: torch.dtype,
    p_scale: float,
) -> tuple[Tensor, Tensor]:
    q, k, v = pack.q.detach(), pack.k.detach(), values(pack).detach()
    batch, seqlen_q, heads, head_dim = q.shape
    out = q.new_zeros(batch, seqlen_q, heads, v.shape[3], dtype=out_dtype)
    lse = q.new_full((batch, heads, seqlen_q), -math.inf, dtype=torch.float32)
    if lse.numel() == 0 or k.shape[1] == 0:
        return out, lse
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    # a tile of keys is what one scale of K serves, so that the scale is a factor of the tile
    block_k = pack.k_block if pack.k_descale is not None and pack.k_descale.dim() == 3 else K_BLOCK
    q_factor = _of_rows(pack.q_descale, q, k) * scale
    k_factor = _of_blocks(pack.k_descale, q, k, -(-k.shape[1] // block_k))
    v_factor = _of_channels(pack.v_descale, q, v)
    v_shift = 0.0 if pack.v_shift is None else _of_channels(pack.v_shift, q, v, shift=True)
    finite = bool(v.float().isfinite().all())
    rows_in_tile = _padded(BLOCK_Q, seqlen_q)
    step = max(1, _TILE_ELEMENTS // (heads * rows_in_tile * block_k))
    for b in range(0, batch, step):
        part = slice(b, b + step)
        call = _Call(
            q[part], k[part], v[part], q_factor[part], k_factor[part], causal, block_k, finite
        )  # fmt: skip
        for i in range(0, seqlen_q, rows_in_tile):
            rows = slice(i, min(i + rows_in_tile, seqlen_q))
            O, total, m = _query_block(call, rows, p_scale)
            empty = total == 0
            total = total.masked_fill(empty, 1.0)
            shift = v_shift if isinstance(v_shift, float) else v_shift[part]
            O = (O * (v_factor[part] / total) + shift).masked_fill(empty, 0.0)
            out[part, rows] = O.transpose(1, 2).to(out_dtype)
            lse[part, :, rows] = (m + total.log()).masked_fill(empty, -math.inf).squeeze(-1)
    if pack.q_dot_k_shift is not None:
        lse = torch.where(lse == -math.inf, lse, lse + scale * pack.q_dot_k_shift)
    return out, lse


def _query_block(call: _Call, rows: slice, p_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of q[:, rows]: the sum over P V, the sum over P and the largest score, (b, hq, rows, dv or 1)
    in fp32."""
    batch, seqlen_q, heads, _ = call.q.shape
    seqlen_k, count = call.k.shape[1], rows.stop - rows.start
    Q = _tile(call.q, rows, heads)  # (b * hq, padded rows, d)
    of_row = torch.zeros(Q.shape[0], Q.shape[1], 1)
    of_row[:, :count] = call.q_factor[:, :, rows].reshape(-1, count, 1)
    of_block = call.k_factor.reshape(-1, 1, call.k_factor.shape[2])  # (b * hq, 1, key blocks)
    m = Q.new_full((*Q.shape[:2], 1), -math.inf)
    total, O = torch.zeros_like(m), Q.new_zeros(*Q.shape[:2], call.v.shape[3])
    first_hidden = seqlen_k - seqlen_q + rows.start + 1  # for the topmost row
    end = min(seqlen_k, seqlen_k - seqlen_q + rows.stop) if call.causal else seqlen_k
    for j in range(0, end, call.block_k):
        keys = slice(j, min(j + call.block_k, seqlen_k))
        K, V = _tile(call.k, keys, heads), _tile(call.v, keys, heads)
        block = j // call.block_k
        S = torch.bmm(Q, K.transpose(1, 2)).mul_(of_row * of_block[:, :, block : block + 1])
        S[:, :, keys.stop - j :] = -math.inf  # rows of padding
        if call.causal and keys.stop > first_hidden:
            S.masked_fill_(
                _hidden(rows.start, S.shape[1], j, S.shape[2], call.q, call.k), -math.inf
            )
        new = torch.maximum(m, S.amax(-1, keepdim=True))
        safe = new.masked_fill(new == -math.inf, 0.0)
        visible = None if call.finite else S != -math.inf
        P = S.sub_(safe).exp_()
        fix = torch.exp(m - safe)
        total.mul_(fix).add_(P.sum(-1, keepdim=True))
        P = _rounded(P, call.v.dtype, p_scale)
        O.mul_(fix).add_(P @ V if visible is None else _weighted_sum(P, V, visible))
        m = new
    O, total, m = (t.unflatten(0, (batch, heads))[:, :, :count] for t in (O, total, m))
    return O, total, m


def _rounded(P: Tensor, dtype: torch.dtype, p_scale: float) -> Tensor:
    """P as an operand of P V, in fp32. Multiplied back at once: powers of two commute with sums."""
    if dtype == E4M3:
        return saturate(P * p_scale).float() / p_scale
    return P.to(dtype).float()


def rounded_output(o: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """(o times scale in e4m3, the largest finite |o|): as cute_attn.fwd gives them. o is in fp32,
    scale fp32 of one element, and the second is fp32 (1,)."""
    amax = o.abs().nan_to_num(0.0, 0.0, 0.0).flatten()
    largest = amax.amax(0, keepdim=True) if amax.numel() else amax.new_zeros(1)
    return saturate(o if scale is None else o * scale.detach()), largest


# Scales of every shape that fwd allows, as factors for query heads


def _of_rows(descale: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    """(b, hq, sq)"""
    batch, seqlen_q, heads, _ = q.shape
    if descale is None:
        descale = torch.ones(1)
    elif descale.dim() == 2:
        descale = _heads(descale, q, k).unsqueeze(2)
    return descale.expand(batch, heads, seqlen_q)


def _of_blocks(descale: Tensor | None, q: Tensor, k: Tensor, blocks: int) -> Tensor:
    """(b, hq, blocks)"""
    if descale is None:
        descale = torch.ones(1)
    elif descale.dim() > 1:
        descale = _heads(descale, q, k)
        descale = descale if descale.dim() == 3 else descale.unsqueeze(2)
    return descale.expand(q.shape[0], q.shape[2], blocks)


def _of_channels(x: Tensor | None, q: Tensor, v: Tensor, shift: bool = False) -> Tensor:
    """(b, hq, 1, dv); a shift of two dimensions is (hk, dv), a descale (b, hk)."""
    if x is None:
        x = torch.ones(1)
    elif x.dim() > 1:
        if x.dim() == 2:
            x = x.unsqueeze(0) if shift else x.unsqueeze(2)
        x = _heads(x, q, v).unsqueeze(2)
    return x.expand(q.shape[0], q.shape[2], 1, v.shape[3])


def _heads(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """(b, hk, ...) -> (b, hq, ...)"""
    return x.repeat_interleave(q.shape[2] // k.shape[2], 1)
