"""O and row statistics in the registers of the threads that made them."""

import cutlass
import cutlass.cute as cute

from cute_attn.kernels.common.layout import acc_as_rows


@cute.jit
def normalise(acc_O: cute.Tensor, norm: cute.Tensor):
    O = acc_as_rows(acc_O)
    for r in cutlass.range_constexpr(cute.size(norm)):
        O[r, None].store(O[r, None].load() * norm[r])


@cute.jit
def store_rows(to: cute.Tensor, rows: cute.Tensor, cS: cute.Tensor, tile, row0, seqlen_q):
    """rows: one value per row this thread owns; the thread that owns column 0 writes it."""
    C = acc_as_rows(cS)
    if C[0, 0][1] == 0:
        for r in cutlass.range_constexpr(cute.size(rows)):
            row = row0 + C[r, 0][0]
            if row < seqlen_q:
                to[row, tile.head, tile.batch] = rows[r]
