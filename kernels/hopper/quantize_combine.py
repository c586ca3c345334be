"""Partial statistics (quantize_stats.py) -> shifts, balance, scales of V, factors of q and K: a CTA
for a KV head of a batch and one for its V, every channel a few threads. Chunks are added up in one
order always.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_attn.config import COUNT, PIVOT, SQUARES, SUM
from cute_attn.kernels.hopper.quantize_rows import scale_of
from cute_attn.kernels.hopper.quantize_stats import START, joined

THREADS = 1024
UNROLL = 8  # chunks that are read at once
WARPS = THREADS // 32


class Parts(NamedTuple):
    """Of a head: of chunks first to first + chunks."""

    x: cute.Tensor  # fp32 (width, chunk, planes, head)
    first: Int32
    chunks: Int32
    first_head: Int32


class Moments(NamedTuple):
    mean: Float32
    square: Float32  # mean of squares about the shift


@cute.jit
def totals(
    kinds: cutlass.Constexpr[tuple[str, ...]], parts: Parts, heads: Int32, stage: cute.Tensor
) -> list[Float32]:
    """Of thread tidx % width's channel, over some heads; the same numbers in all threads of a
    channel. stage: THREADS words a kind. All kinds are read at once: it is their latency that
    takes the time."""
    tidx, width = cute.arch.thread_idx()[0], parts.x.shape[0]
    at, slices = channel_of(width), THREADS // width
    sums = cute.make_rmem_tensor(len(kinds), Float32)
    for n in cutlass.range_constexpr(len(kinds)):
        sums[n] = Float32(START.get(kinds[n], 0.0))
        if const_expr(kinds[n] == PIVOT):  # which all chunks have
            sums[n] = parts.x[at, parts.first, n, parts.first_head]
    i = tidx // width
    head, over = i // parts.chunks, slices // parts.chunks  # divided here, and not in the loop
    chunk, left = i - head * parts.chunks, slices - over * parts.chunks
    for _ in cutlass.range(cute.ceil_div(heads * parts.chunks - i, slices), unroll=UNROLL):
        for n in cutlass.range_constexpr(len(kinds)):
            if const_expr(kinds[n] != PIVOT):
                read = parts.x[at, parts.first + chunk, n, parts.first_head + head]
                sums[n] = joined(kinds[n], sums[n], read)
        chunk, head = chunk + left, head + over
        wraps = chunk >= parts.chunks
        chunk = cutlass.select_(wraps, chunk - parts.chunks, chunk)
        head = cutlass.select_(wraps, head + 1, head)
    cute.arch.barrier()  # what was there is read
    for n in cutlass.range_constexpr(len(kinds)):
        stage[n * THREADS + tidx] = sums[n]
    cute.arch.barrier()
    return [over_slices(kinds[n], stage, n * THREADS + at, width) for n in range(len(kinds))]


@cute.jit
def over_slices(
    kind: cutlass.Constexpr[str], stage: cute.Tensor, at: Int32, width: Int32
) -> Float32:
    total = stage[at]
    for i in cutlass.range(1, THREADS // width, unroll=1):
        total = joined(kind, total, stage[i * width + at])
    return total


@cute.jit
def channel_of(width: Int32) -> Int32:
    return cute.arch.thread_idx()[0] % width


def moments(kinds: tuple[str, ...], of: list[Float32]) -> Moments:
    """Means, 0 where nothing is finite, from totals. Squares are about the mean if there is a
    pivot, which stands for it, else about what the sums are about."""
    of_kind = dict(zip(kinds, of))
    count = cute.arch.fmax(of_kind[COUNT], Float32(1.0))
    mean = of_kind[SUM] / count if SUM in kinds else Float32(0.0)
    square = of_kind[SQUARES] / count if SQUARES in kinds else Float32(0.0)
    if PIVOT in kinds:
        square = square - mean * mean
        mean = mean + of_kind[PIVOT]
    return Moments(mean, square)


@cute.jit
def largest_distance(low: Float32, high: Float32, shift: Float32) -> Float32:
    """The largest |v - shift| of a channel's finite v, 0 without any."""
    top = cute.arch.fmax(cute.math.absf(low - shift), cute.math.absf(high - shift))
    return top if low <= high else Float32(0.0)


@cute.jit
def largest_of_cta(value: Float32, stage: cute.Tensor) -> Float32:
    tidx = cute.arch.thread_idx()[0]
    value = cute.arch.warp_reduction_max(value)
    cute.arch.barrier()
    if tidx % 32 == 0:
        stage[tidx // 32] = value
    cute.arch.barrier()
    return cute.arch.warp_reduction_max(stage[tidx % WARPS])


# Scales of blocks of keys that no tile holds


@cute.kernel
def scale_blocks(maxima: cute.Tensor, scale: cute.Tensor, per_block: Int32):
    """A warp each. maxima (groups of keys, head, batch), from quantize_rows.measure_keys; scale
    (blocks, head, batch); per_block: groups of a block."""
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    blocks, heads, batches = scale.shape
    item = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
    if item < blocks * heads * batches:
        rest = item // blocks
        block, batch = item - rest * blocks, rest // heads
        head = rest - batch * heads
        first, top = block * per_block, Float32(0.0)
        end = cutlass.min(first + per_block, maxima.shape[0])
        for i in cutlass.range(first + cute.arch.lane_idx(), end, 32, unroll=4):
            top = cute.arch.fmax(top, maxima[i, head, batch])
        top = cute.arch.warp_reduction_max(top)
        if cute.arch.lane_idx() == 0:
            scale[block, head, batch] = scale_of(top)
