"""The largest |v - shift| of chunks of a head's V, of all channels or of each, where shifts are
given: V's scales need no more, and whoever casts V takes the maximum of the chunks himself.

A difference's rounding keeps order, so that the smallest and the largest v of a channel are enough,
and they are found two channels an instruction, in 16 bits. Infinities do not count: a thread that
has one, which is rare, looks again.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_attn.kernels.common import vectors
from cute_attn.kernels.common.bits import pair_extremum
from cute_attn.kernels.hopper.quantize_rows import THREADS, floats, scale_of
from cute_attn.kernels.hopper.quantize_stats import VECTOR

WORDS = VECTOR // 2
NO_NUMBER = 0x7FFF7FFF  # two NaNs, of either 16-bit format


class Shape(NamedTuple):
    """Known at trace time."""

    dtype: str
    threads: int  # of a CTA
    lanes: int  # threads that share a row
    ahead: int  # rows of which a thread reads a vector before it waits for one
    by_channel: bool

    @property
    def groups(self) -> int:
        """Rows that are read at once."""
        return self.threads // self.lanes


@cute.jit
def measure_chunk(
    shape: cutlass.Constexpr,
    v: cute.Tensor,
    shift,
    tops: cute.Tensor,
    stage: cute.Tensor,
    rows,
):
    """shape: a Shape; v (seqlen, width); shift fp32 (width), None: 0; tops (1) or (width); stage:
    VECTOR words a thread; rows: (the first, where they end)."""
    tidx, groups = cute.arch.thread_idx()[0], const_expr(shape.groups)
    col = cutlass.min(tidx % shape.lanes * VECTOR, v.shape[1] - VECTOR)
    first, end = rows[0] + tidx // shape.lanes, rows[1]
    passes = cute.ceil_div(end - rows[0], groups * shape.ahead)
    less = [Float32(0.0)] * VECTOR
    if const_expr(shift is not None):
        less = floats(vectors.load(shift, col, VECTOR))
    low, high = numbers(NO_NUMBER), numbers(NO_NUMBER)
    for i in cutlass.range(passes, unroll=1):
        for raw in read(v, col, first + i * (groups * shape.ahead), (groups, shape.ahead), end):
            words = cute.recast_tensor(raw, Int32)
            for w in cutlass.range_constexpr(WORDS):
                low[w] = pair_extremum(shape.dtype, "min", low[w], words[w])
                high[w] = pair_extremum(shape.dtype, "max", high[w], words[w])
    ends = [floats(cute.recast_tensor(t, v.element_type)) for t in (low, high)]
    largest = cute.make_rmem_tensor(VECTOR, Float32)
    for e in cutlass.range_constexpr(VECTOR):
        largest[e] = cute.arch.fmax(
            cute.arch.fmax(cute.math.absf(ends[0][e] - less[e]), Float32(0.0)),
            cute.math.absf(ends[1][e] - less[e]),
        )
    if largest_of_vector(largest) == Float32.inf:
        measure_finite(v, col, (first, end, passes * shape.ahead), groups, less, largest)
    if const_expr(shape.by_channel):
        write_channels(shape, largest, tops, stage)
    else:
        write_largest(shape, largest_of_vector(largest), tops, stage)


def numbers(value: int) -> cute.Tensor:
    t = cute.make_rmem_tensor(WORDS, Int32)
    t.fill(Int32(value))
    return t


def read(v: cute.Tensor, col: Int32, first: Int32, every, end: Int32) -> list[cute.Tensor]:
    """every: (rows from one to the next, how many); the last one again for those outside."""
    rows = [cutlass.min(first + n * every[0], end - 1) for n in range(every[1])]
    return [vectors.load(v[row, None], col, VECTOR) for row in rows]


def largest_of_vector(x: cute.Tensor) -> Float32:
    top = x[0]
    for e in range(1, VECTOR):
        top = cute.arch.fmax(top, x[e])
    return top


@cute.jit
def measure_finite(
    v: cute.Tensor,
    col: Int32,
    rows,
    step: cutlass.Constexpr[int],
    less: list[Float32],
    largest: cute.Tensor,
):
    """The slow way: of finite v alone. rows: (the first, where they end, how many)."""
    first, end, count = rows
    largest.fill(Float32(0.0))
    for i in cutlass.range(count, unroll=1):
        values = floats(vectors.load(v[cutlass.min(first + i * step, end - 1), None], col, VECTOR))
        for e in cutlass.range_constexpr(VECTOR):
            away = cute.math.absf(values[e] - less[e])
            counts = cute.math.absf(values[e]) < Float32.inf
            away = cutlass.select_(counts, away, Float32(0.0))
            largest[e] = cute.arch.fmax(largest[e], away)


@cute.jit
def write_largest(shape: cutlass.Constexpr, largest: Float32, top: cute.Tensor, stage: cute.Tensor):
    """Of the CTA."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    largest = cute.arch.warp_reduction_max(largest)
    if lane == 0:
        stage[warp] = largest
    cute.arch.barrier()
    if warp == 0:
        largest = cute.arch.warp_reduction_max(stage[lane % (shape.threads // 32)])
        if lane == 0:
            top[0] = largest


@cute.jit
def write_channels(
    shape: cutlass.Constexpr, largest: cute.Tensor, tops: cute.Tensor, stage: cute.Tensor
):
    tidx, width = cute.arch.thread_idx()[0], const_expr(shape.lanes * VECTOR)
    for e in cutlass.range_constexpr(VECTOR):
        stage[tidx * VECTOR + e] = largest[e]
    cute.arch.barrier()
    if tidx < tops.shape[0]:
        top = stage[tidx]
        for i in cutlass.range_constexpr(1, shape.groups):
            top = cute.arch.fmax(top, stage[i * width + tidx])
        tops[tidx] = top


# Of all chunks


@cute.jit
def largest_of(tops: cute.Tensor) -> Float32:
    """Of a head, in every lane; tops (1, chunks)."""
    top = Float32(0.0)
    for i in cutlass.range(cute.arch.lane_idx(), tops.shape[1], 32, unroll=2):
        top = cute.arch.fmax(top, tops[0, i])
    return cute.arch.warp_reduction_max(top)


@cute.jit
def scales_of(tops: cute.Tensor, stage: cute.Tensor, channels: cutlass.Constexpr[int]):
    """Of channels, into stage (channels); tops (width, chunks). A few threads a channel, for it is
    latency that takes the time."""
    tidx, slices = cute.arch.thread_idx()[0], const_expr(THREADS // channels)
    channel = cutlass.min(tidx % channels, tops.shape[0] - 1)
    top = Float32(0.0)
    for i in cutlass.range(tidx // channels, tops.shape[1], slices, unroll=8):
        top = cute.arch.fmax(top, tops[channel, i])
    stage[tidx] = top
    cute.arch.barrier()
    if tidx < channels:  # whose place no other thread reads
        for i in cutlass.range_constexpr(1, slices):
            top = cute.arch.fmax(top, stage[tidx + i * channels])
        stage[tidx] = scale_of(top)
    cute.arch.barrier()
