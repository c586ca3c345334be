"""Attention over parts of the keys -> attention over all of them (FlashDecoding; the monoid of
cute_attn.merge). A warp a row: lane p holds the statistics of part p."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.common.bits import fma
from cute_attn.kernels.common.softmax import LN_2

WARPS = 4  # rows a CTA merges
PAIR = 2  # columns a lane holds at a time


@cute.jit
def share(ref: Float32, log_sum: Float32):
    """(this lane's share of the row's weights, the row's log-sum-exp) from one part a lane. Their
    sum would be rounded: scores that are large alike would lose what tells the parts apart."""
    top = cute.arch.warp_reduction_max(ref)
    safe = Float32(0.0) if top == -Float32.inf else top
    weight = cute.math.exp2((ref - safe) + log_sum, fastmath=True)
    total = cute.arch.warp_reduction_sum(weight)
    empty = total == 0.0
    whole = fma(top, LN_2, cute.math.log2(total, fastmath=True) * LN_2)
    whole = -Float32.inf if empty else whole
    return weight * (Float32(0.0) if empty else cute.arch.rcp_approx(total)), whole


@cute.kernel
def merge_parts(
    parts: cute.Tensor, ref: cute.Tensor, log_sum: cute.Tensor, out: cute.Tensor, lse: cute.Tensor
):
    """parts (seqlen, head_dim_v, head, batch, part), ref and log_sum (seqlen, head, batch, part) in
    fp32, both in log2; out (seqlen, head_dim_v, head, batch) in 16 bits; lse (seqlen, head, batch)
    in fp32."""
    seqlen, width, heads, batches = out.shape
    index = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
    if index < seqlen * heads * batches:
        rest = index // heads
        head = index - rest * heads
        batch = rest // seqlen
        row = rest - batch * seqlen
        merge_row(
            parts[row, None, head, batch, None],
            ref[row, head, batch, None],
            log_sum[row, head, batch, None],
            out[row, None, head, batch],
            lse,
            (row, head, batch),
        )


@cute.jit
def merge_row(parts, ref, log_sum, out, lse, at):
    lane, count = cute.arch.lane_idx(), log_sum.shape[0]
    my_ref, my_sum = -Float32.inf, -Float32.inf
    if lane < count:
        my_ref, my_sum = ref[lane], log_sum[lane]
    weight, whole = share(my_ref, my_sum)
    if lane == 0:
        lse[at] = whole
    for start in cutlass.range(0, out.shape[0], 32 * PAIR, unroll=1):
        col = start + lane * PAIR
        inside = col < out.shape[0]  # head_dim_v is a multiple of 8
        total, value = (cute.make_rmem_tensor(PAIR, Float32) for _ in range(2))
        total.fill(0.0)
        value.fill(0.0)
        for p in cutlass.range(count, unroll=4):
            w = cute.arch.shuffle_sync(weight, p)
            if inside:
                cute.autovec_copy(pair_at(parts[None, p], col), value)
            for j in cutlass.range_constexpr(PAIR):
                total[j] = total[j] + w * value[j]
        if inside:
            rounded = cute.make_rmem_tensor(PAIR, out.element_type)
            rounded.store(total.load().to(out.element_type))
            cute.autovec_copy(rounded, pair_at(out, col))


def pair_at(row: cute.Tensor, col: Int32) -> cute.Tensor:
    """PAIR neighbours of a row, from an even column on: rows begin at multiples of 16 bytes."""
    dtype = row.element_type
    address = (row.iterator + col).toint()
    aligned = cute.make_ptr(
        dtype, address, cute.AddressSpace.gmem, assumed_align=PAIR * dtype.width // 8
    )
    return cute.make_tensor(aligned, cute.make_layout(PAIR))


@cute.jit
def launch_merge(parts, ref, log_sum, out, lse, stream):
    rows = Int32(out.shape[0] * out.shape[2] * out.shape[3])
    merge_parts(parts, ref, log_sum, out, lse).launch(
        grid=(cute.ceil_div(rows, WARPS), 1, 1), block=(32 * WARPS, 1, 1), stream=stream
    )
