"""Attention in plain torch: the oracle of tests and benches, the default for CPU tensors, merge.

Shapes: q (batch, seqlen_q, nheads_q, head_dim), k (batch, seqlen_k, nheads_kv, head_dim),
v (batch, seqlen_k, nheads_kv, head_dim_v), out (batch, seqlen_q, nheads_q, head_dim_v) and
lse (batch, nheads_q, seqlen_q), the natural logarithm of the sum of e^score. The causal mask is
aligned bottom-right: query i sees the keys j <= i + seqlen_k - seqlen_q.
"""

import math

import torch
from torch import Tensor

_TILE_ELEMENTS = 1 << 22  # scores in flight at once on the CPU: 16 MB in fp32
_ROWS = 16  # tiles are padded to this: from here on BLAS gives a row the same bits in any batch


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention by its definition, all scores in memory, computed and returned in dtype.

    A key is visible to a query when the mask admits it and its score is not -inf. Rows without a
    visible key have out 0 and lse -inf. NaN in a row of k or v reaches exactly the queries that
    see the key. Differentiable.
    """
    batch, seqlen_q, _, head_dim = q.shape
    scale, group = _scale(q, softmax_scale), _group(q, k)
    Q = q.to(dtype).reshape(batch, seqlen_q, k.shape[2], group, head_dim)
    Q = Q.permute(0, 2, 3, 1, 4)  # (b, hk, g, sq, d)
    K = k.to(dtype).permute(0, 2, 3, 1).unsqueeze(2)  # (b, hk, 1, d, sk)
    V = v.to(dtype).transpose(1, 2).unsqueeze(2)  # (b, hk, 1, sk, dv)
    S = _scaled(Q @ K, scale)  # (b, hk, g, sq, sk)
    if causal:
        S = S.masked_fill(_hidden(0, seqlen_q, 0, k.shape[1], q, k), -math.inf)
    top = S.detach().amax(-1, keepdim=True) if k.shape[1] else S.new_full((*S.shape[:-1], 1), 0.0)
    top = top.masked_fill(top == -math.inf, 0.0)  # -inf - -inf is NaN
    P = torch.exp(S - top)
    total = P.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    out = _weighted_sum(P, V, S != -math.inf) / total
    lse = (top + total.log()).masked_fill(empty, -math.inf)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.squeeze(-1).flatten(1, 2)


def attention_blockwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    block_q: int = 128,
    block_k: int = 128,
) -> tuple[Tensor, Tensor]:
    """Attention with the tiling and the online softmax of FlashAttention (Dao et al. 2022, 2023).

    One pass over the keys for every block of queries; scores, statistics and accumulators are fp32
    and exist for one tile at a time, so that memory grows with seqlen, not with its square. out is
    contiguous and in q.dtype, lse is fp32. Empty rows, NaN and masks as in attention(). A row's
    bits depend on its own sequence and head only. Not differentiable; autocast does not apply.
    """
    with torch.autocast(q.device.type, enabled=False):
        return _attention_blockwise(q, k, v, causal, softmax_scale, block_q, block_k)


def _attention_blockwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    block_q: int,
    block_k: int,
) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, heads = q.shape[:3]
    _group(q, k)
    q, k, v, scale = q.detach(), k.detach(), v.detach(), _scale(q, softmax_scale)
    out = q.new_empty(batch, seqlen_q, heads, v.shape[3])
    lse = q.new_empty(batch, heads, seqlen_q, dtype=torch.float32)
    if out.numel() == 0 and lse.numel() == 0:
        return out, lse
    block_q, block_k = _padded(block_q, seqlen_q), _padded(block_k, k.shape[1])
    step = max(1, _TILE_ELEMENTS // (heads * block_q * block_k))
    finite = bool(v.isfinite().all())
    for b in range(0, batch, step):
        part = slice(b, b + step)
        for i in range(0, seqlen_q, block_q):
            rows = slice(i, min(i + block_q, seqlen_q))
            out_tile, lse_tile = _query_block(
                q[part], k[part], v[part], rows, block_k, causal, scale, finite
            )
            out[part, rows] = out_tile.transpose(1, 2)
            lse[part, :, rows] = lse_tile
    return out, lse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys from the attention over each.

    out_a, out_b: (batch, seqlen, nheads, head_dim) or packed (total, nheads, head_dim), any
    floating dtype; lse_a, lse_b: fp32 (batch, nheads, seqlen) or (nheads, total). Returns
    (out, lse) in the same layouts, out in out_a's dtype; computed in fp32. The operation is
    associative and commutative (within rounding), with (0, -inf) as its neutral element: an lse of
    -inf means a part without keys, whose out is not looked at. An lse of NaN or +inf makes the row
    NaN. Raises TypeError for dtypes, ValueError for shapes and devices.
    Source: section 2.3 of FlashAttention (Dao et al. 2022).
    """
    _check_merge(out_a, lse_a, out_b, lse_b)
    top = torch.maximum(lse_a, lse_b).detach()
    top = top.masked_fill(top == -math.inf, 0.0)
    w_a, w_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = w_a + w_b
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (top + total.log()).masked_fill(empty, -math.inf)
    out = _part(out_a, lse_a, w_a / total) + _part(out_b, lse_b, w_b / total)
    return out.to(out_a.dtype), lse


def _part(out: Tensor, lse: Tensor, weight: Tensor) -> Tensor:
    """weight * out in fp32; 0 where the part has no keys, whatever out holds there."""
    missing = (lse == -math.inf).transpose(-1, -2).unsqueeze(-1)
    weight = weight.transpose(-1, -2).unsqueeze(-1)  # (..., seqlen, nheads, 1)
    return out.float().masked_fill(missing, 0.0) * weight


def _check_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    for name, t in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type(t).__name__}: a torch.Tensor is wanted")
        if t.device != out_a.device:
            raise ValueError(f"{name}.device is {t.device}: it must be out_a's, {out_a.device}")
    if not out_a.dtype.is_floating_point:
        raise TypeError(f"out_a.dtype is {out_a.dtype}: a floating dtype is wanted")
    if out_b.dtype != out_a.dtype:
        raise TypeError(f"out_b.dtype is {out_b.dtype}: it must be out_a's, {out_a.dtype}")
    if out_a.dim() not in (3, 4):
        raise ValueError(
            f"out_a.shape is {tuple(out_a.shape)}: (batch, seqlen, nheads, head_dim) or "
            "(total, nheads, head_dim) is wanted"
        )
    if out_b.shape != out_a.shape:
        raise ValueError(
            f"out_b.shape is {tuple(out_b.shape)}: it must be out_a's, {tuple(out_a.shape)}"
        )
    *lead, seqlen, heads, _ = out_a.shape
    for name, t in (("lse_a", lse_a), ("lse_b", lse_b)):
        if t.dtype != torch.float32:
            raise TypeError(f"{name}.dtype is {t.dtype}: torch.float32 is wanted")
        if tuple(t.shape) != (*lead, heads, seqlen):
            raise ValueError(
                f"{name}.shape is {tuple(t.shape)}: {(*lead, heads, seqlen)} is wanted for outs "
                f"of shape {tuple(out_a.shape)}"
            )


def _query_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: slice,
    block_k: int,
    causal: bool,
    scale: float,
    finite: bool,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of q[:, rows]: (batch, nheads_q, rows, head_dim_v) and (batch, nheads_q, rows)."""
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, count = k.shape[1], rows.stop - rows.start
    Q = _tile(q, rows, heads)  # (batch * heads, padded rows, d)
    m = Q.new_full((*Q.shape[:2], 1), -math.inf)  # running maximum of the scores
    total = torch.zeros_like(m)
    O = Q.new_zeros(*Q.shape[:2], v.shape[3])
    first_hidden = seqlen_k - seqlen_q + rows.start + 1  # for the topmost row
    end = min(seqlen_k, seqlen_k - seqlen_q + rows.stop) if causal else seqlen_k
    for j in range(0, end, block_k):
        keys = slice(j, min(j + block_k, seqlen_k))
        K, V = _tile(k, keys, heads), _tile(v, keys, heads)
        S = _scaled(torch.bmm(Q, K.transpose(1, 2)), scale)  # (batch * heads, rows, keys)
        if S.shape[2] > keys.stop - j:
            S[:, :, keys.stop - j :] = -math.inf
        if causal and keys.stop > first_hidden:
            hidden = _hidden(rows.start, S.shape[1], j, S.shape[2], q, k)
            S.masked_fill_(hidden, -math.inf)
        visible = None if finite else S != -math.inf
        new = torch.maximum(m, S.amax(-1, keepdim=True))
        safe = new.masked_fill(new == -math.inf, 0.0)
        P = S.sub_(safe).exp_()
        fix = torch.exp(m - safe)
        total.mul_(fix).add_(P.sum(-1, keepdim=True))
        special = None if visible is None else ~V.isfinite()
        if special is not None:  # the finite rest goes the usual way, to the same bits
            V, infinite = V.masked_fill(special, 0.0), V.masked_fill(~special, 0.0)
        O = O.mul_(fix).baddbmm_(P, V)
        if special is not None:
            O.add_(_weighted_sum(P, infinite, visible))
        m = new
    empty = total == 0
    total.masked_fill_(empty, 1.0)
    lse = (m + total.log()).masked_fill_(empty, -math.inf)
    O = O.div_(total).view(batch, heads, -1, v.shape[3])
    return O[:, :, :count], lse.view(batch, heads, -1)[:, :, :count]


def _tile(x: Tensor, rows: slice, heads: int) -> Tensor:
    """x[:, rows] as (batch * heads, padded rows, d) in fp32; the heads of k and v are repeated for
    their group here, one tile at a time."""
    tile = x[:, rows].transpose(1, 2).float()  # (b, hx, n, d)
    pad = -tile.shape[2] % _ROWS
    if pad:
        tile = torch.nn.functional.pad(tile, (0, 0, 0, pad))
    if tile.shape[1] != heads:
        tile = tile.unsqueeze(2).expand(-1, -1, heads // tile.shape[1], -1, -1)
    return tile.reshape(-1, tile.shape[-2], tile.shape[-1])


def _weighted_sum(P: Tensor, V: Tensor, visible: Tensor) -> Tensor:
    """P @ V in which NaN and infinities of V reach the rows that see them, and no other: in the
    plain product a masked key contributes 0 * NaN."""
    if bool(V.isfinite().all()):
        return P @ V
    out = P @ V.masked_fill(~V.isfinite(), 0.0)
    seen = visible.to(P.dtype)
    for value in (math.nan, math.inf, -math.inf):
        where = V.isnan() if math.isnan(value) else V == value
        out = out + torch.where(seen @ where.to(P.dtype) > 0, value, 0.0)
    return out


def _scaled(S: Tensor, scale: float) -> Tensor:
    if scale == 0:  # the keys with a product of -inf stay hidden, as with any other scale
        return torch.where(S == -math.inf, S, S * 0.0)
    return S * scale


def _hidden(row: int, rows: int, key: int, keys: int, q: Tensor, k: Tensor) -> Tensor:
    """(rows, keys) bool: True where the causal mask hides a key, for the tile at (row, key)."""
    i = torch.arange(row, row + rows, device=q.device).unsqueeze(1)
    j = torch.arange(key, key + keys, device=q.device)
    return j > i + (k.shape[1] - q.shape[1])


def _scale(q: Tensor, softmax_scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)


def _group(q: Tensor, k: Tensor) -> int:
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"nheads_q is {q.shape[2]} and nheads_kv is {k.shape[2]}: "
            "nheads_q must be a multiple of nheads_kv"
        )
    return int(q.shape[2] // k.shape[2])


def _padded(block: int, seqlen: int) -> int:
    return max(_ROWS, min(block, -(-seqlen // _ROWS) * _ROWS))
