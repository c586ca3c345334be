"""Global to shared memory by cp.async, every thread 16 bytes at a time: zeros for what is past the
end of a row or of the sequence."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_attn.kernels.ampere import ptx
from cute_attn.kernels.ampere.storage import CHUNK, TileLayout


class Source(NamedTuple):
    """A thread's part of the tiles of one matrix (rows, width) in global memory."""

    matrix: cute.Tensor  # (rows, width)
    row: Int32  # the thread's first in a tile
    column: Int32  # in a panel
    start: Int64  # address of its first chunk of row 0 of the matrix
    pitch: Int64  # bytes between rows
    to: Int32  # byte offset of its first chunk in a tile


def rows_at_once(layout: TileLayout, threads: int) -> int:
    """By all threads, a chunk each of one panel."""
    rows = threads * CHUNK // layout.panel
    assert rows % 8 == 0, "rows that a thread has in turn must be permuted alike"
    return rows


@cute.jit
def source(matrix: cute.Tensor, layout: TileLayout, tidx: Int32) -> Source:
    chunks = layout.panel // CHUNK
    row, chunk = tidx // chunks, tidx % chunks
    pitch = Int64(matrix.layout.stride[0]) * 2
    start = matrix.iterator.toint() + row * pitch + chunk * 16
    return Source(matrix, row, chunk * CHUNK, start, pitch, layout.at(row, chunk))


@cute.jit
def load(
    s: Source,
    layout: TileLayout,
    threads: cutlass.Constexpr[int],
    sure: cutlass.Constexpr[int],
    to: Int32,
    first: Int32,
    whole: cutlass.Constexpr[bool],
):
    """The tile from row `first` on to the address `to`; zeros alone if that is negative. sure:
    columns that any head dim of the class has; whole: all its rows are there."""
    at_once = rows_at_once(layout, threads)
    address = s.start + first * s.pitch
    for row in cutlass.range_constexpr(0, layout.rows, at_once):
        there = Int32(16) if first >= 0 else Int32(0)
        if const_expr(not whole):
            there = Int32(16) if first + s.row + row < s.matrix.shape[0] else Int32(0)
        if const_expr(row + at_once > layout.rows):  # more threads than chunks are left
            if s.row + row < layout.rows:
                load_row(s, layout, sure, to + row * layout.pitch, address, there)
        else:
            load_row(s, layout, sure, to + row * layout.pitch, address, there)
        address = address + s.pitch * at_once


@cute.jit
def load_row(
    s: Source,
    layout: TileLayout,
    sure: cutlass.Constexpr[int],
    to: Int32,
    address: Int64,
    there: Int32,
):
    """A chunk of every panel. there: 16 if the row is in the matrix, else 0."""
    for p in cutlass.range_constexpr(layout.width // layout.panel):
        size = there
        if const_expr((p + 1) * layout.panel > sure):
            inside = s.column + p * layout.panel < s.matrix.shape[1]
            size = there if inside else Int32(0)
        ptx.cp_async(to + s.to + p * layout.panel_bytes, address + p * layout.pitch, size)
