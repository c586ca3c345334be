"""What surrounds the backward's main kernel: row statistics before, dQ in 16 bits after."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.common.layout import acc_as_rows
from cute_attn.kernels.common.merge import pair_at

WARPS = 4
VECTOR = 8  # elements a lane reads at a time


@cute.kernel
def row_statistics(cfg: cutlass.Constexpr, o, do, lse, dlse, to_lse, to_delta, dq, scale):
    """For tile_m rows of one head, what S and dP start from: -LSE / scale, so far off that P is 0
    where the row sees no key or does not exist; -delta = dLSE - rowsum(dO * O) (FlashAttention-2,
    algorithm 2, line 4); dQ's accumulator = 0.

    o, do (seqlen_q, head_dim_v, head, batch); lse, dlse (seqlen_q, head, batch)."""
    block, head, batch = cute.arch.block_idx()
    tidx = cute.arch.thread_idx()[0]
    warp, lane = tidx // 32, tidx % 32
    for i in cutlass.range(cfg.tile_m // WARPS, unroll=2):
        at = i * WARPS + warp
        row = block * cfg.tile_m + at
        total, of_row = Float32(0.0), Float32.inf
        if row < o.shape[0]:
            total = dot(o[row, None, head, batch], do[row, None, head, batch], lane)
            total = dlse[row, head, batch] - total
            of_row = lse[row, head, batch]
            if of_row == -Float32.inf:  # no key seen: dLSE may be anything
                of_row, total = Float32.inf, Float32(0.0)
        if lane == 0:
            for copy in cutlass.range_constexpr(cfg.copies):
                to_lse[slot(cfg, row, copy), head, batch] = -of_row / scale
                to_delta[slot(cfg, row, copy), head, batch] = total
    part = dq[None, block, head, batch]
    zero = cute.make_rmem_tensor(4, Float32)
    zero.fill(0.0)
    for i in cutlass.range(cute.size(part) // (4 * 32 * WARPS), unroll=4):
        cute.autovec_copy(zero, four_at(part, 4 * (i * 32 * WARPS + tidx)))


def slot(cfg, row: Int32, copy: int) -> Int32:
    """Where a row's statistic lies. Twice, in pairs of neighbours, if accumulators start from it:
    a thread's accumulators hold two keys of each pair of queries."""
    if cfg.copies == 1:
        return row
    return row // 2 * 4 + row % 2 + 2 * copy


@cute.jit
def dot(a: cute.Tensor, b: cute.Tensor, lane: Int32) -> Float32:
    """a . b in fp32 by one warp; their length is a multiple of 8, their start 16-byte aligned."""
    total = Float32(0.0)
    for start in cutlass.range(0, a.shape[0], 32 * VECTOR, unroll=1):
        col = start + lane * VECTOR
        if col < a.shape[0]:
            x, y = (cute.make_rmem_tensor(VECTOR, a.element_type) for _ in range(2))
            cute.autovec_copy(vector_at(a, col), x)
            cute.autovec_copy(vector_at(b, col), y)
            product = x.load().to(Float32) * y.load().to(Float32)
            total = total + product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
    return cute.arch.warp_reduction_sum(total)


def vector_at(row: cute.Tensor, col: Int32) -> cute.Tensor:
    return _at(row, col, VECTOR)


def four_at(row: cute.Tensor, col: Int32) -> cute.Tensor:
    return _at(row, col, 4)


def _at(row: cute.Tensor, col: Int32, n: int) -> cute.Tensor:
    """n neighbours from col on, 16 bytes, and aligned so."""
    pointer = cute.make_ptr(
        row.element_type,
        (row.iterator + col).toint(),
        cute.AddressSpace.gmem,
        assumed_align=16,
    )
    return cute.make_tensor(pointer, cute.make_layout(n))


@cute.kernel
def finish_dq(cfg: cutlass.Constexpr, mma, parts, dq, scale: Float32):
    """dq (seqlen_q, head_dim, head, batch) = scale * parts, which lie in the order in which the
    main kernel's threads hold their accumulators."""
    block, head, batch = cute.arch.block_idx()
    tidx = cute.arch.thread_idx()[0]
    wg, tidx = tidx // 128, tidx % 128
    part = parts[None, block, head, batch]
    acc = cute.make_rmem_tensor(mma.partition_shape_C((64, cfg.dq_width)), Float32)
    base = wg * 64 * cfg.dq_width
    for i in cutlass.range_constexpr(cute.size(acc) // 4):
        four = cute.make_tensor(acc.iterator + 4 * i, cute.make_layout(4))
        cute.autovec_copy(four_at(part, base + 4 * (i * 128 + tidx)), four)
    C = mma.get_slice(tidx).partition_C(cute.make_identity_tensor((64, cfg.dq_width)))
    row0 = block * cfg.tile_m + (wg * 64 if cfg.dq_by_rows else 0)
    col0 = 0 if cfg.dq_by_rows else wg * cfg.dq_width
    write_rows(acc_as_rows(acc), acc_as_rows(C), dq[None, None, head, batch], row0, col0, scale)


@cute.jit
def write_rows(values, coords, out, row0, col0, scale):
    for r in cutlass.range_constexpr(2):
        row = row0 + coords[r, 0][0]
        if row < out.shape[0]:
            for c in cutlass.range_constexpr(0, cute.size(values, mode=[1]), 2):
                col = col0 + coords[r, 0][1] + 4 * c
                if col < out.shape[1]:
                    pair = cute.make_rmem_tensor(2, out.element_type)
                    for j in cutlass.range_constexpr(2):
                        pair[j] = out.element_type(values[r, c + j] * scale)
                    cute.autovec_copy(pair, pair_at(out[row, None], col))
