"""Results: registers -> shared memory -> global memory, 16 bytes a thread."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.ampere.load import rows_at_once
from cute_attn.kernels.ampere.storage import CHUNK, TileLayout
from cute_attn.kernels.common import vectors
from cute_attn.kernels.common.layout import acc_as_rows


def shared(dtype, address: Int32, n: int) -> cute.Tensor:
    """n neighbours in shared memory, aligned to what they take."""
    pointer = cute.make_ptr(
        dtype, address, cute.AddressSpace.smem, assumed_align=n * dtype.width // 8
    )
    return cute.make_tensor(pointer, cute.make_layout(n))


@cute.jit
def put(layout: TileLayout, to: Int32, acc_O: cute.Tensor, coords: cute.Tensor, dtype, step=0):
    """acc_O in 16 bits into the tile at the address `to`, from column 16 * step on, a pair of
    columns at a time."""
    O, C = acc_as_rows(acc_O), acc_as_rows(coords)
    for r in cutlass.range_constexpr(cute.size(O, mode=[0])):
        row, col = C[r, 0]
        start = layout.step(to + layout.at(row, Int32(0)) + col % CHUNK * 2, step)
        for c in cutlass.range_constexpr(0, cute.size(O, mode=[1]), 2):
            pair = cute.make_rmem_tensor(2, Float32)
            pair[0], pair[1] = O[r, c], O[r, c + 1]
            rounded = cute.make_rmem_tensor(2, dtype)
            rounded.store(pair.load().to(dtype))
            chunk = c // 2  # 8 columns, of which a thread has two
            chunks = layout.panel // CHUNK
            address = (start ^ (chunk % chunks * 16)) + chunk // chunks * layout.panel_bytes
            cute.autovec_copy(rounded, shared(dtype, address, 2))


@cute.jit
def store(
    layout: TileLayout,
    threads: cutlass.Constexpr[int],
    at: Int32,
    out: cute.Tensor,
    row: Int32,
    tidx,
):
    """The tile at the address `at` to rows of out (rows, width), from `row` on, by all threads."""
    chunks = layout.panel // CHUNK
    first, chunk = tidx // chunks, tidx % chunks
    start = at + layout.at(first, chunk)
    for down in cutlass.range_constexpr(0, layout.rows, rows_at_once(layout, threads)):
        to = row + first + down
        for p in cutlass.range_constexpr(layout.width // layout.panel):
            col = p * layout.panel + chunk * CHUNK
            there = (to < out.shape[0]) & (col < out.shape[1]) & (first + down < layout.rows)
            if there:
                values = cute.make_rmem_tensor(CHUNK, out.element_type)
                address = start + down * layout.pitch + p * layout.panel_bytes
                cute.autovec_copy(shared(out.element_type, address, CHUNK), values)
                cute.autovec_copy(values, vectors.at(out[to, None], col, CHUNK))
