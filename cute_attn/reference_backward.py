"""Gradients of attention in plain torch: the oracle of tests, the default for CPU tensors.

Shapes as in reference.py: q (batch, seqlen_q, nheads_q, head_dim), k (batch, seqlen_k, nheads_kv,
head_dim), v (batch, seqlen_k, nheads_kv, head_dim_v), out and its gradient dout
(batch, seqlen_q, nheads_q, head_dim_v), lse and its gradient dlse (batch, nheads_q, seqlen_q).

With S = scale * Q K^T, masked, and P = exp(S - LSE), section 3.1 of FlashAttention-2 (Dao 2023,
arXiv 2307.08691) gives
    D  = rowsum(dO * O) - dLSE        dS = P * (dO V^T - D)
    dQ = scale * dS K                 dK = scale * dS^T Q               dV = P^T dO
The term dLSE follows from dLSE/dS = P. A KV head sums over the query heads of its group.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cute_attn import reference


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dlse: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) by the formulas above, all scores in memory, computed and returned in dtype.

    out and LSE are computed here, in dtype as well. Rows that see no key have gradients 0 and give
    none to k and v, whatever dlse is there. Inputs must be finite.
    """
    scale, (seqlen_q, seqlen_k) = reference._scale(q, softmax_scale), (q.shape[1], k.shape[1])
    out, lse = reference.attention(q, k, v, causal=causal, softmax_scale=softmax_scale, dtype=dtype)
    dout, q, k, v = (t.to(dtype) for t in (dout, q, k, v))
    x = _grouped(dout, q, k, v, out, lse, dlse)
    K, V = x.k.unsqueeze(2), x.v.unsqueeze(2)  # (b, hk, 1, sk, d)
    S = reference._scaled(x.q @ K.mT, scale)  # (b, hk, g, sq, sk)
    if causal:
        S = S.masked_fill(reference._hidden(0, seqlen_q, 0, seqlen_k, q, k), -math.inf)
    P = torch.exp(S - x.lse.unsqueeze(-1))
    dS = P * (x.dout @ V.mT - x.D.unsqueeze(-1))
    dQ = scale * (dS @ K)
    dK = scale * (dS.mT @ x.q).sum(2)
    dV = (P.mT @ x.dout).sum(2)
    return dQ.permute(0, 3, 1, 2, 4).flatten(2, 3), dK.transpose(1, 2), dV.transpose(1, 2)


def attention_backward_blockwise(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dlse: Tensor | None = None,
    block_q: int = 128,
    block_k: int = 128,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) with the tiling of FlashAttention-2, algorithm 2: O(seqlen) memory.

    out and lse are those of the forward, lse in fp32; dlse fp32 or None. One pass over the queries
    for every block of keys; tiles and sums are fp32, P is computed again from LSE. Any strides.
    Results are contiguous and in the dtypes of q, k and v; the same call gives the same bits. Rows
    with an LSE of -inf have gradients 0. Non-finite inputs give unspecified values. Not
    differentiable; autocast does not apply.
    """
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        dq, dk, dv = (t.new_zeros(t.shape) for t in (q, k, v))
        scale = reference._scale(q, softmax_scale)
        heads = reference._group(q, k) * k.shape[2]
        if 0 in lse.shape or k.shape[1] == 0:
            return dq, dk, dv
        block_q, block_k = min(block_q, q.shape[1]), min(block_k, k.shape[1])
        step = max(1, reference._TILE_ELEMENTS // (heads * block_q * block_k))
        for b in range(0, q.shape[0], step):
            part = slice(b, b + step)
            x = _grouped(
                dout[part],
                q[part],
                k[part],
                v[part],
                out[part],
                lse[part],
                None if dlse is None else dlse[part],
            )
            dQ = torch.zeros(x.q.shape, dtype=torch.float32, device=q.device)
            for j in range(0, k.shape[1], block_k):
                keys = slice(j, min(j + block_k, k.shape[1]))
                dK, dV = _key_block(x, keys, block_q, causal, scale, dQ)
                dk[part, keys], dv[part, keys] = dK.transpose(1, 2), dV.transpose(1, 2)
            dq[part] = dQ.mul_(scale).permute(0, 3, 1, 2, 4).flatten(2, 3)
        return dq, dk, dv


class _Grouped(NamedTuple):
    """Query heads beside their KV head, b hk g = batch, nheads_kv, nheads_q / nheads_kv: one
    product over the rows of a whole group then sums dK and dV over it, and K is never repeated."""

    dout: Tensor  # (b, hk, g, sq, dv)
    q: Tensor  # (b, hk, g, sq, d)
    k: Tensor  # (b, hk, sk, d)
    v: Tensor  # (b, hk, sk, dv)
    lse: Tensor  # (b, hk, g, sq), +inf for rows without keys: their P is 0
    D: Tensor  # (b, hk, g, sq), 0 for rows without keys


def _grouped(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
) -> _Grouped:
    """Views; only lse and D are new, in lse's dtype."""
    heads = (k.shape[2], reference._group(q, k))
    # contiguous, so that strides do not change the order of the sum and with it the bits
    dO, O = (t.to(lse.dtype, memory_format=torch.contiguous_format) for t in (dout, out))
    D = (dO * O).sum(-1).transpose(1, 2)
    if dlse is not None:
        D = D - dlse.to(lse.dtype)
    empty = lse == -math.inf
    # the gradient of logaddexp(-inf, -inf), where partial results are merged, is NaN
    lse, D = lse.masked_fill(empty, math.inf), D.masked_fill(empty, 0.0)
    dout, q = (t.unflatten(2, heads).permute(0, 2, 3, 1, 4) for t in (dout, q))
    lse, D = (t.unflatten(1, heads) for t in (lse, D))
    return _Grouped(dout, q, k.transpose(1, 2), v.transpose(1, 2), lse, D)


def _key_block(
    x: _Grouped, keys: slice, block_q: int, causal: bool, scale: float, dQ: Tensor
) -> tuple[Tensor, Tensor]:
    """(dK, dV) of k[keys] and v[keys], (b, hk, keys, d) and (b, hk, keys, dv) in fp32; adds this
    block's part of dS K to dQ (b, hk, g, sq, d), which is fp32 and not scaled yet."""
    (batch, heads_kv, group, seqlen_q, _), seqlen_k = x.q.shape, x.k.shape[2]
    K, V = _rows(x.k[:, :, keys]), _rows(x.v[:, :, keys])  # (b * hk, keys, d)
    dK, dV = torch.zeros_like(K), torch.zeros_like(V)
    offset = seqlen_k - seqlen_q  # query i sees the keys j <= i + offset
    first = max(0, keys.start - offset) // block_q * block_q if causal else 0
    for i in range(first, seqlen_q, block_q):
        rows = slice(i, min(i + block_q, seqlen_q))
        Q, dO = _rows(x.q[:, :, :, rows]), _rows(x.dout[:, :, :, rows])  # (b * hk, g * rows, d)
        lse, D = _rows(x.lse[..., rows].unsqueeze(-1)), _rows(x.D[..., rows].unsqueeze(-1))
        S = reference._scaled(torch.bmm(Q, K.mT), scale)  # (b * hk, g * rows, keys)
        if causal and keys.stop > i + offset + 1:
            seen = torch.arange(i + offset, rows.stop + offset, device=S.device).unsqueeze(1)
            hidden = torch.arange(keys.start, keys.stop, device=S.device) > seen
            S.unflatten(1, (group, -1)).masked_fill_(hidden, -math.inf)
        P = S.sub_(lse).exp_()
        dS = torch.bmm(dO, V.mT).sub_(D).mul_(P)
        dV.baddbmm_(P.mT, dO)
        dK.baddbmm_(dS.mT, Q)
        dQ[:, :, :, rows] += torch.bmm(dS, K).view(batch, heads_kv, group, -1, K.shape[2])
    dK.mul_(scale)
    return dK.unflatten(0, (batch, heads_kv)), dV.unflatten(0, (batch, heads_kv))


def _rows(x: Tensor) -> Tensor:
    """A tile (b, hk, ..., rows, d) as (b * hk, ... * rows, d), contiguous and in fp32."""
    x = x.to(torch.float32, memory_format=torch.contiguous_format)
    return x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])
