"""Statistics of a chunk of rows of a head, channel by channel, from one read: of what means of K
and V, mean squares of q and K and the largest values of V are made (quantize_combine.py). Where the
caller gives shifts and balance, only V's largest values are left.

All sums have one order, whatever else the GPU does: results repeat to the bit. The largest
|v - shift| of a channel is one of its smallest or largest v, since rounding keeps order: it needs
no pass after the mean is known.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_attn.config import COUNT, HIGH, LOW, PIVOT, SQUARES, SUM
from cute_attn.kernels.common import vectors
from cute_attn.kernels.common.bits import fma
from cute_attn.kernels.hopper.quantize_balance import NAN, finite
from cute_attn.kernels.hopper.quantize_rows import floats, rotated

THREADS = 256
VECTOR = 8
IN_FLIGHT = 4  # rows of which a thread reads a vector before it waits for one
START = {LOW: float("inf"), HIGH: -float("inf")}

Kinds = tuple[str, ...]  # which statistics of a tensor are taken, in the order of their planes


class Measured(NamedTuple):
    """Of a head, in one batch."""

    x: cute.Tensor  # (seqlen, width), 16 bit
    cos: cute.Tensor  # None: no RoPE
    sin: cute.Tensor
    pivot: (
        cute.Tensor
    )  # what sums are taken about: (width) fp32, or row 0 of (seqlen, width); None: 0
    parts: cute.Tensor  # fp32 (width, planes), of this chunk


# Chunks of rows


class Shape(NamedTuple):
    """Known at trace time."""

    kinds: Kinds
    lanes: int  # threads that share a row
    half: int  # pairs of channels that RoPE turns


def lanes_of(width: int) -> int:
    """One a vector, as a power of two."""
    return 1 << (width // VECTOR - 1).bit_length()


@cute.jit
def measure_chunk(
    shape: cutlass.Constexpr, m: Measured, stage: cute.Tensor, first: Int32, rows: Int32
):
    """Of rows first to first + rows."""
    tidx, groups = cute.arch.thread_idx()[0], THREADS // shape.lanes
    col = cutlass.min(tidx % shape.lanes * VECTOR, m.x.shape[1] - VECTOR)
    end = cutlass.min(first + rows, m.x.shape[0])
    pivot = pivot_of(shape.half, m, col)
    sums = start(shape.kinds)
    at, step = first + tidx // shape.lanes, groups * IN_FLIGHT
    begin = (end - first) // step  # passes whose rows are all there
    for i in cutlass.range(begin, unroll=1):
        add_rows(shape, m, sums, pivot, col, (at + i * step, groups, end), const_expr(False))
    begin = counted(shape.kinds, sums, begin)
    for i in cutlass.range(begin, cute.ceil_div(end - first, step), unroll=1):
        add_rows(shape, m, sums, pivot, col, (at + i * step, groups, end), const_expr(True))
    if const_expr(PIVOT in shape.kinds):
        for e in cutlass.range_constexpr(VECTOR):
            sums[shape.kinds.index(PIVOT)][e] = pivot[e]
    for n in cutlass.range_constexpr(len(shape.kinds)):
        fold(shape.kinds[n], sums[n], stage, shape.lanes, m.parts[None, n])


@cute.jit
def counted(kinds: cutlass.Constexpr, sums: list, passes: Int32) -> Int32:
    """How many of the passes stand. All but the count is there; all is taken again if something was
    not finite, which is rare."""
    stand = passes
    if not all_finite(sums):
        stand = Int32(0)
    for n in cutlass.range_constexpr(len(kinds)):
        for e in cutlass.range_constexpr(VECTOR):
            value = sums[n][e]
            if const_expr(kinds[n] == COUNT):
                value = Float32(passes * IN_FLIGHT)
            sums[n][e] = cutlass.select_(stand > 0, value, Float32(START.get(kinds[n], 0.0)))
    return stand


def start(kinds: Kinds) -> list[cute.Tensor]:
    sums = [cute.make_rmem_tensor(VECTOR, Float32) for _ in kinds]
    for kind, values in zip(kinds, sums):
        values.fill(START.get(kind, 0.0))
    return sums


def all_finite(sums: list[cute.Tensor]):
    """Whether all that was added up was, and no sum is too large. An extreme that has seen no
    number is infinite too."""
    top = Float32(0.0)
    for values in sums:
        for e in range(VECTOR):
            # fmax would lose a NaN, a product with 0 does not: it is one for an infinity, too
            top = fma(values[e], Float32(0.0), top)
    return top == 0.0


def add_rows(shape: Shape, m: Measured, sums: list, pivot: list, col: Int32, rows, checked: bool):
    """IN_FLIGHT rows; rows: (the first, how far the next is, where they end). checked: some may be
    outside, and what is not finite does not count, not even as a row."""
    at, step, end = rows
    here = [at + n * step for n in range(IN_FLIGHT)]
    inside = [cutlass.min(row, end - 1) if checked else row for row in here]
    read = [vectors.load(m.x[row, None], col, VECTOR) for row in inside]
    of_kind = dict(zip(shape.kinds, sums))
    for row, safe, raw in zip(here, inside, read):
        values = turned_row(shape.half, m, raw, safe, col)
        if checked:
            add_finite(of_kind, values, pivot, row < end)
        else:
            add_row(of_kind, values, pivot)


def turned_row(half: int, m: Measured, raw: cute.Tensor, row: Int32, col: Int32) -> list[Float32]:
    values = floats(raw)
    if half == 0:
        return values
    return rotated(half, values, m.x[row, None], m.cos[row, None], m.sin[row, None], col)


def pivot_of(half: int, m: Measured, col: Int32) -> list[Float32]:
    """A number near the mean: sums about it lose less. Any finite one is right."""
    if m.pivot is None:
        return [Float32(0.0)] * VECTOR
    if m.pivot.element_type == Float32:
        return floats(vectors.load(m.pivot, col, VECTOR))
    raw = vectors.load(m.pivot[0, None], col, VECTOR)
    return [finite(v) for v in turned_row(half, m._replace(x=m.pivot), raw, Int32(0), col)]


def add_row(sums: dict, values: list[Float32], pivot: list[Float32]):
    """All but the count, to the same bits as add_finite."""
    for e, value in enumerate(values):
        away = value - pivot[e]
        if SUM in sums:
            sums[SUM][e] = sums[SUM][e] + away
        if SQUARES in sums:
            sums[SQUARES][e] = fma(away, away, sums[SQUARES][e])
        if LOW in sums:
            sums[LOW][e] = cute.arch.fmin(sums[LOW][e], value)
            sums[HIGH][e] = cute.arch.fmax(sums[HIGH][e], value)


def add_finite(sums: dict, values: list[Float32], pivot: list[Float32], inside):
    """Of finite values only."""
    for e, value in enumerate(values):
        ok = inside & (cute.math.absf(value) < Float32.inf)
        away = cutlass.select_(ok, value - pivot[e], Float32(0.0))
        if COUNT in sums:
            sums[COUNT][e] = sums[COUNT][e] + cutlass.select_(ok, Float32(1.0), Float32(0.0))
        if SUM in sums:
            sums[SUM][e] = sums[SUM][e] + away
        if SQUARES in sums:
            sums[SQUARES][e] = fma(away, away, sums[SQUARES][e])
        if LOW in sums:
            value = cutlass.select_(ok, value, Float32(NAN))  # which is no extreme
            sums[LOW][e] = cute.arch.fmin(sums[LOW][e], value)
            sums[HIGH][e] = cute.arch.fmax(sums[HIGH][e], value)


@cute.jit
def fold(
    kind: cutlass.Constexpr[str],
    mine: cute.Tensor,
    stage: cute.Tensor,
    lanes: cutlass.Constexpr[int],
    to: cute.Tensor,
):
    """Over the threads that have the same channels, in their order. stage: THREADS * VECTOR."""
    tidx, width = cute.arch.thread_idx()[0], lanes * VECTOR
    cute.arch.barrier()  # the statistics before are read
    for e in cutlass.range_constexpr(VECTOR):
        stage[tidx * VECTOR + e] = mine[e]
    cute.arch.barrier()
    if tidx < to.shape[0]:
        total = stage[tidx]
        for i in cutlass.range_constexpr(1, THREADS // lanes):
            total = joined(kind, total, stage[i * width + tidx])
        to[tidx] = total


def joined(kind: str, a: Float32, b: Float32) -> Float32:
    if kind == LOW:
        return cute.arch.fmin(a, b)
    if kind == HIGH:
        return cute.arch.fmax(a, b)
    return a if kind == PIVOT else a + b
