"""Neighbours in memory that one instruction reads or writes."""

import cutlass.cute as cute
from cutlass import Int32


def at(row: cute.Tensor, col: Int32, n: int) -> cute.Tensor:
    """n neighbours of a row from col on, aligned to what they take, 16 bytes at most."""
    size = n * row.element_type.width // 8
    pointer = cute.make_ptr(
        row.element_type,
        (row.iterator + col).toint(),
        row.iterator.memspace,
        assumed_align=min(size, 16),
    )
    return cute.make_tensor(pointer, cute.make_layout(n))


def load(row: cute.Tensor, col: Int32, n: int) -> cute.Tensor:
    """The same in registers."""
    values = cute.make_rmem_tensor(n, row.element_type)
    cute.autovec_copy(at(row, col, n), values)
    return values
