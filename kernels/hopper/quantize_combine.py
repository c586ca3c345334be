"""Partial statistics (quantize_stats.py) -> shifts, balance, scales of V, factors of q and K: a CTA
for a KV head of a batch, every channel a few threads. Chunks are added up in one order always.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_attn.config import COUNT, HIGH, LOW, PIVOT, SQUARES, SUM
from cute_attn.kernels.common.bits import from_bits
from cute_attn.kernels.hopper.quantize_rows import finite, scale_of
from cute_attn.kernels.hopper.quantize_stats import NAN, START, joined

THREADS = 1024
WARPS = THREADS // 32
TINY = 1e-30  # as in cute_attn.quantize
MAX_BALANCE = 32.0


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
def total_of(
    kinds: cutlass.Constexpr,
    kind: cutlass.Constexpr[str],
    parts: Parts,
    heads: Int32,
    stage: cute.Tensor,
) -> Float32:
    """Of thread tidx % width's channel, over some heads; the same number in all threads of a
    channel. stage: THREADS words."""
    tidx, width = cute.arch.thread_idx()[0], parts.x.shape[0]
    at, plane = channel_of(width), const_expr(kinds.index(kind))
    slices = THREADS // width
    total = Float32(START.get(kind, 0.0))
    for i in cutlass.range(tidx // width, heads * parts.chunks, slices, unroll=4):
        head = i // parts.chunks
        chunk = parts.first + i - head * parts.chunks
        total = joined(kind, total, parts.x[at, chunk, plane, parts.first_head + head])
    cute.arch.barrier()  # what was there is read
    stage[tidx] = total
    cute.arch.barrier()
    total = stage[at]
    for i in cutlass.range(1, slices, unroll=1):
        total = joined(kind, total, stage[i * width + at])
    return total


@cute.jit
def channel_of(width: Int32) -> Int32:
    return cute.arch.thread_idx()[0] % width


@cute.jit
def moments(kinds: cutlass.Constexpr, parts: Parts, heads: Int32, stage: cute.Tensor) -> Moments:
    """Means, 0 where nothing is finite. Squares are about the mean if there is a pivot, which
    stands for it, else about what the sums are about."""
    count = total_of(kinds, COUNT, parts, heads, stage)
    count = cute.arch.fmax(count, Float32(1.0))
    mean, square = Float32(0.0), Float32(0.0)
    if const_expr(SUM in kinds):
        mean = total_of(kinds, SUM, parts, heads, stage) / count
    if const_expr(SQUARES in kinds):
        square = total_of(kinds, SQUARES, parts, heads, stage) / count
    if const_expr(PIVOT in kinds):
        square = square - mean * mean
        plane = const_expr(kinds.index(PIVOT))
        mean = mean + parts.x[channel_of(parts.x.shape[0]), parts.first, plane, parts.first_head]
    return Moments(mean, square)


@cute.jit
def largest_distance(
    kinds: cutlass.Constexpr, parts: Parts, shift: Float32, stage: cute.Tensor
) -> Float32:
    """The largest |v - shift| of a channel's finite v, 0 without any."""
    low = total_of(kinds, LOW, parts, Int32(1), stage)
    high = total_of(kinds, HIGH, parts, Int32(1), stage)
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


# Balance


@cute.jit
def balance_of(of_k: Float32, of_q: Float32) -> Float32:
    """The power of two next to sqrt(rms k / rms q), from mean squares; one that is infinite counts
    as 0, as it does on the CPU."""
    k = cute.arch.fmax(finite(of_k), Float32(TINY))
    q = cute.arch.fmax(finite(of_q), Float32(TINY))
    return exp2_of_integer((cute.math.log2(k) - cute.math.log2(q)) * 0.25)


@cute.jit
def power_of_two(x: Float32) -> Float32:
    """Next to x > 0 by its logarithm; NaN for what has none."""
    power = exp2_of_integer(cute.math.log2(x))
    return power if x >= 0.0 else Float32(NAN)


def exp2_of_integer(binades: Float32) -> Float32:
    """Of the nearest one within limits, the even one of two."""
    limited = cute.arch.fmax(cute.arch.fmin(binades, Float32(MAX_BALANCE)), Float32(-MAX_BALANCE))
    return from_bits((cute.math.roundeven(limited).to(Int32) + 127) << 23)


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
