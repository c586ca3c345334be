"""Which keys a query may see: block ranges first, then single elements."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_attn.kernels.common.layout import acc_as_rows


@cute.jit
def keys_seen(problem, row: Int32, shape) -> Int32:
    """How many keys query `row` sees, from key 0 on; not positive if none. Causal masks are
    aligned bottom-right."""
    seen = shape.seqlen_k
    if const_expr(problem.causal):
        seen = cutlass.min(seen, row + 1 + shape.seqlen_k - shape.seqlen_q)
    return seen


@cute.jit
def kv_block_end(cfg, problem, row_end: Int32, shape) -> Int32:
    """One past the last KV block that rows before row_end read; at least one block."""
    keys = keys_seen(problem, row_end - 1, shape)
    return cute.ceil_div(cutlass.max(keys, 1), cfg.tile_n)


@cute.jit
def first_full_block(cfg, problem, row: Int32, shape) -> Int32:
    """Blocks below this index need no element mask for rows from `row` on, and by then every row
    has seen a key."""
    full = shape.seqlen_k // cfg.tile_n
    if const_expr(problem.causal):
        keys = keys_seen(problem, row, shape)
        full = cutlass.min(full, cutlass.max(keys - 1, 0) // cfg.tile_n)
    return full


@cute.jit
def mask_scores(problem, acc_S: cute.Tensor, coords: cute.Tensor, row: Int32, key: Int32, shape):
    """coords: (row, col) of every accumulator value within the tile that starts at (row, key)."""
    S, C = acc_as_rows(acc_S), acc_as_rows(coords)
    first = C[0, 0][1]
    unseen = Float32.inf if const_expr(problem.negative_scale) else -Float32.inf
    for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
        # the rest of the column index is static
        limit = keys_seen(problem, row + C[r, 0][0], shape) - key - first
        for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
            col = c // 2 * 8 + c % 2
            S[r, c] = S[r, c] if col < limit else unseen
