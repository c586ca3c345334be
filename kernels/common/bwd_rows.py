"""What surrounds the backward's main kernel: row statistics before, dQ in 16 bits after. Both do
little but move memory: every access is 16 bytes of a thread, neighbours next to each other."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

from cute_attn.config import SHARE_WORDS, TURN_WORDS
from cute_attn.kernels.common import vectors
from cute_attn.kernels.common.bits import fma, magnitude

LOG2_E = 1.4426950408889634
PARTS = 3  # bf16 numbers that hold the 24 bits of a fp32 one
FAR = 2.0**120
LOG2_E_REST = 1.9259629911e-08  # what LOG2_E has beyond 24 bits
WARPS = 8
THREADS = 32 * WARPS
VECTOR = 8  # elements of 16 bits that a thread reads or writes at a time
IN_FLIGHT = 4  # rows of which a thread reads a vector before it waits for one
STRIP = 32  # columns of dQ that a warp finishes, VECTOR by each thread of a quad
CHUNK = 16 * STRIP  # floats of dQ's accumulator, of 16 rows, that a warp finishes


@cute.jit
def place(parts: cute.Tensor, per_block: cutlass.Constexpr[int]):
    """(which of a block's CTAs, block, head, batch). Heads come first, since a row's heads are
    mostly next to each other in memory; in one dimension, since others end at 65,535."""
    blocks, heads, index = parts.shape[1], parts.shape[2], cute.arch.block_idx()[0]
    item = index // per_block
    rest = item // heads
    batch = rest // blocks
    return index % per_block, rest - batch * blocks, item - rest * heads, batch


# Before


class Rows(NamedTuple):
    """A head's, of one batch."""

    o: cute.Tensor  # (seqlen_q, head_dim_v)
    do: cute.Tensor
    lse: cute.Tensor  # (seqlen_q)
    dlse: cute.Tensor
    words: cute.Tensor  # (block_words, blocks)


@cute.kernel
def row_statistics(cfg: cutlass.Constexpr, o, do, lse, dlse, words, dq, shares, scale_log2, shared):
    """For tile_m rows of one head, what is added to S, or to S in bits: -LSE, so far off that P is
    0 where the row sees no key or does not exist; and to dP: -delta = dLSE - rowsum(dO * O)
    (FlashAttention-2, algorithm 2, line 4). dQ's accumulator = 0, and so are the counters of
    bwd_turns.py, bwd_tickets.py and bwd_parts.py.

    o, do (seqlen_q, head_dim_v, head, batch); lse, dlse (seqlen_q, head, batch)."""
    if const_expr(cfg.chained):
        cute.arch.griddepcontrol_launch_dependents()
    of_block, block, head, batch = place(dq, statistics_ctas(cfg))
    x = Rows(
        *(t[None, None, head, batch] for t in (o, do)),
        *(t[None, head, batch] for t in (lse, dlse)),
        words[None, None, head, batch],
    )
    share = cfg.tile_m * cfg.width // statistics_ctas(cfg)
    zeros = cute.local_tile(dq[None, block, head, batch], (share,), (of_block,))
    if const_expr(cfg.deterministic):
        no_turns(cfg, x.words[None, block])
    if const_expr(cfg.persistent):
        no_tickets(cfg, words)
    if const_expr(cfg.shares):
        no_parts(shares, shared)
    statistics(cfg, x, block * statistics_ctas(cfg) + of_block, zeros, scale_log2)


def lanes_of_row(cfg) -> int:
    """Threads that share a row: one a vector, as a power of two; a CTA has no more than tile_m."""
    vectors = cfg.problem.tile_dim_v // VECTOR
    return max(1 << (vectors - 1).bit_length(), THREADS // cfg.tile_m)


def rows_of_thread(cfg) -> int:
    return min(IN_FLIGHT, cfg.tile_m * lanes_of_row(cfg) // THREADS)


def statistics_ctas(cfg) -> int:
    """That a block of rows takes."""
    return cfg.tile_m * lanes_of_row(cfg) // (THREADS * rows_of_thread(cfg))


@cute.jit
def statistics(cfg, x: Rows, cta: Int32, zeros: cute.Tensor, scale_log2: Float32):
    """The lanes of a row add up together, n rows after one another; then each of the first n lanes
    has a row of its own. What is outside is read inside, and not used."""
    n, lanes, end = rows_of_thread(cfg), lanes_of_row(cfg), x.o.shape[0]
    tidx, step = cute.arch.thread_idx()[0], 32 // lanes
    first = (cta * WARPS + tidx // 32) * step * n + tidx % 32 // lanes
    lane = tidx % lanes
    col, my_row = lane * VECTOR, first + lane % n * step
    inside = cutlass.min(my_row, end - 1)
    of_row, mine = x.lse[inside], x.dlse[inside]
    any_col = col if col < x.o.shape[1] else Int32(0)
    a, b = (vectors_of(t, first, step, n, any_col) for t in (x.o, x.do))
    fill_with_zeros(zeros)  # which waits for none of these
    total = Float32(0.0)
    for i in cutlass.range_constexpr(n):
        product = a[None, i].load().to(Float32) * b[None, i].load().to(Float32)
        dot = product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        dot = dot if col < x.o.shape[1] else Float32(0.0)
        dot = cute.arch.warp_reduction_sum(dot, threads_in_group=lanes)
        total = dot if lane % n == i else total
    mine = mine - total
    if my_row >= end or of_row == -Float32.inf:  # no key seen: dLSE may be anything
        of_row, mine = Float32.inf, Float32(0.0)
    if lane < n:
        block, row = my_row // cfg.tile_m, my_row % cfg.tile_m
        of_S = -of_row * LOG2_E
        if const_expr(cfg.folded):
            of_S = -score(of_row, scale_log2)
        elif const_expr(cfg.from_scores):
            of_S = -score(of_row, scale_log2) * scale_log2
        store_statistics(cfg, x.words[None, block], row, of_S, mine)


@cute.jit
def no_turns(cfg, words: cute.Tensor):
    """Nobody has added to dQ yet. Each CTA of a block may say so."""
    tidx = cute.arch.thread_idx()[0]
    if tidx < TURN_WORDS:
        words[cfg.statistics + tidx] = Float32(0.0)


@cute.jit
def no_tickets(cfg, words: cute.Tensor):
    """None is drawn yet. One thread says so."""
    if cute.arch.block_idx()[0] == 0 and cute.arch.thread_idx()[0] == 0:
        words[cfg.ticket_word, 0, 0, 0] = Float32(0.0)


@cute.jit
def no_parts(shares: cute.Tensor, tiles: Int32):
    """Of so many tiles nobody has counted himself yet. By the first CTA of row_statistics."""
    if cute.arch.block_idx()[0] == 0:
        step = cute.arch.block_dim()[0]
        for i in cutlass.range(cute.arch.thread_idx()[0], tiles * SHARE_WORDS, step, unroll=1):
            shares[i] = Float32(0.0)


def vectors_of(x: cute.Tensor, first: Int32, step: int, n: int, col: Int32) -> cute.Tensor:
    """From n rows, the same VECTOR columns."""
    read = cute.make_rmem_tensor(cute.make_layout((VECTOR, n)), x.element_type)
    for i in range(n):
        row = cutlass.min(first + i * step, x.shape[0] - 1)
        cute.autovec_copy(vector_at(x[row, None], col), read[None, i])
    return read


def fill_with_zeros(x: cute.Tensor):
    """By all threads of a CTA; the length is a multiple of 4 * THREADS."""
    zero = cute.make_rmem_tensor(4, Float32)
    zero.fill(0.0)
    for i in range(cute.size(x) // (4 * THREADS)):
        cute.autovec_copy(zero, four_at(x, 4 * (i * THREADS + cute.arch.thread_idx()[0])))


@cute.jit
def score(lse: Float32, scale_log2: Float32) -> Float32:
    """The S of a key that is all its row sees: lse in bits / scale_log2, rounded once. The forward
    has multiplied S with the same scale_log2, which is some 2^-25 off from scale in bits: in a row
    with one large score P is closer to 1 than S in the thousands is to its neighbours."""
    bits = lse * LOG2_E
    x = bits / scale_log2
    rest = fma(lse, LOG2_E, -bits) + lse * LOG2_E_REST + fma(-x, scale_log2, bits)
    exact = magnitude(x) < FAR  # and nothing is infinite
    return x + rest / scale_log2 if exact else x


@cute.jit
def split(x: Float32):
    """x, or what is as far off as matters, as a sum of bf16 numbers: the tensor cores add them up.
    An infinity would be a NaN there, times 0."""
    x = Float32(FAR) if x > FAR else x
    x = Float32(-FAR) if x < -FAR else x
    parts = []
    for _ in cutlass.range_constexpr(PARTS):
        part = x.to(BFloat16)
        parts.append(part)
        x = x - part.to(Float32)
    return parts


@cute.jit
def store_statistics(cfg, to: cute.Tensor, row: Int32, of_S: Float32, of_dP: Float32):
    """Where a product adds them, as 16 bytes of an operand."""
    if const_expr(cfg.folded):
        mine = cute.make_rmem_tensor(VECTOR, BFloat16)
        mine.fill(0.0)
        for i, part in enumerate(split(of_S) + split(of_dP)):
            mine[i] = part
        cute.autovec_copy(cute.recast_tensor(mine, Float32), four_at(to, 4 * row))
    else:
        to[row], to[cfg.tile_m + row] = of_S, of_dP


def vector_at(row: cute.Tensor, col: Int32) -> cute.Tensor:
    return vectors.at(row, col, VECTOR)


def four_at(row: cute.Tensor, col: Int32) -> cute.Tensor:
    return vectors.at(row, col, 4)


# After


def finishing_ctas(cfg) -> int:
    """That dQ of a block of rows takes."""
    return -(-cfg.tile_m * cfg.width // (CHUNK * WARPS))


def row_tiles(cfg) -> int:
    """Of 16 rows, that are after one another in the accumulator."""
    return min(cfg.tile_m, 64) // 16


@cute.kernel
def finish_dq(cfg: cutlass.Constexpr, parts, dq, scale: Float32):
    """dq (seqlen_q, head_dim, head, batch) = scale * parts, which lie in the order in which the
    main kernel's threads hold their accumulators: for every 64 rows and 8 columns (32 rows where a
    block has no more), 16 rows after another 16, and of those what a thread of the MMA holds, two
    columns of two rows; or, without dq_vectors, the first number of all threads, the second, ..."""
    if const_expr(cfg.chained):  # every thread: the grid must not end before the main kernel
        cute.arch.griddepcontrol_wait()
    of_block, block, head, batch = place(parts, finishing_ctas(cfg))
    tidx = cute.arch.thread_idx()[0]
    chunk = of_block * WARPS + tidx // 32
    tiles = row_tiles(cfg)
    strip, warp, lane = chunk // tiles, chunk % tiles, tidx % 32
    row = block * cfg.tile_m + 16 * warp + lane // 4
    if const_expr(cfg.dq_by_rows):
        strips = cfg.width // STRIP
        row = row + strip // strips * 64
        col = strip % strips * STRIP
    else:
        col = strip * STRIP
    out = dq[None, None, head, batch]
    if col < out.shape[1]:
        each = 4 if const_expr(cfg.dq_vectors) else 1
        base = strip * tiles * CHUNK + warp * 128 + each * lane
        finish_rows(cfg, parts[None, block, head, batch], base, out, row, col, scale)


@cute.jit
def finish_rows(cfg, part, base: Int32, out: cute.Tensor, row: Int32, col: Int32, scale: Float32):
    """A thread reads two columns of four groups of eight, and writes one group, both in two rows,
    so that a quad reads and writes 64 bytes in a row."""
    groups, lane = STRIP // VECTOR, cute.arch.lane_idx()
    acc = cute.make_rmem_tensor(cute.make_layout((4, groups)), Float32)
    for i in cutlass.range_constexpr(groups):
        first = base + i * row_tiles(cfg) * 128
        if const_expr(cfg.dq_vectors):
            cute.autovec_copy(four_at(part, first), acc[None, i])
        else:
            for j in cutlass.range_constexpr(4):
                acc[j, i] = part[first + 32 * j]
    rounded = cute.make_rmem_tensor_like(acc, out.element_type)
    rounded.store((acc.load() * scale).to(out.element_type))
    pairs = cute.recast_tensor(rounded, Int32)  # (row, group)
    col = col + lane % 4 * VECTOR
    for r in cutlass.range_constexpr(2):
        group = transposed([pairs[r, i] for i in range(groups)], lane)
        if row + 8 * r < out.shape[0] and col < out.shape[1]:
            vector = cute.make_rmem_tensor(groups, Int32)
            for i in cutlass.range_constexpr(groups):
                vector[i] = group[i]
            vector = cute.recast_tensor(vector, out.element_type)
            cute.autovec_copy(vector, vector_at(out[row + 8 * r, None], col))


@cute.jit
def transposed(x: cutlass.Constexpr[list], lane: Int32):
    """Of four values in each thread of a quad, thread j gets value j of all, in their order."""
    for bit in cutlass.range_constexpr(2):
        step = 1 << bit
        upper = lane & step != 0
        for low in cutlass.range_constexpr(4):
            if const_expr(low & step == 0):
                a, b = x[low], x[low + step]
                got = cute.arch.shuffle_sync_bfly(a if upper else b, step)
                x[low], x[low + step] = got if upper else a, b if upper else got
    return x
