"""Tiles that several CTAs share, each a part of the queries: those that would be left for a last
round in which most multiprocessors idle.

All parts but the last put their dK and dV into scratch memory, in accumulators' order, and count
themselves; the last waits for the count, and adds them to its own in the order of the parts: the
same bits every time.

Why nobody waits for ever: the parts of a tile are tickets after one another, drawn by CTAs that run
(bwd_tickets.py), and a part that is not the last one waits for nobody.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_attn.config import SHARE_WORDS
from cute_attn.kernels.common.bwd_walk import wait_until

PART_BARRIER = 10  # + warpgroup: its numbers are in scratch memory, or may be read there
THREADS = 128  # of a consumer warpgroup
VECTOR = 2  # four would cost a register too many


def counter_of(c, shared: Int32) -> cute.Pointer:
    """Of the parts of a tile whose numbers for this warpgroup are in scratch memory."""
    first = c.x.shares.iterator + (shared * SHARE_WORDS + c.f.wg)
    return cute.make_ptr(Int32, first.toint(), cute.AddressSpace.gmem, assumed_align=4)


@cute.jit
def vector_of(c, slot: Int32, i: int) -> cute.Tensor:
    """The i-th of this thread's vectors of dK and dV in a slot of scratch memory, those of a
    warpgroup's threads after one another."""
    vectors = (cute.size(c.f.acc_dK) + cute.size(c.f.acc_dV)) // VECTOR
    at = ((slot * c.cfg.warpgroups + c.f.wg) * vectors + i) * THREADS + c.f.tidx
    first = c.x.shares.iterator + (c.shape.shared * SHARE_WORDS + VECTOR * at)
    first = cute.make_ptr(Float32, first.toint(), cute.AddressSpace.gmem, assumed_align=4 * VECTOR)
    return cute.make_tensor(first, cute.make_layout(VECTOR))


@cute.jit
def give(c, shared: Int32, part: Int32):
    values, n = cute.make_rmem_tensor(VECTOR, Float32), cute.size(c.f.acc_dK) // VECTOR
    for i in cutlass.range_constexpr(n + cute.size(c.f.acc_dV) // VECTOR):
        acc, first = (c.f.acc_dK, VECTOR * i) if i < n else (c.f.acc_dV, VECTOR * (i - n))
        for j in cutlass.range_constexpr(VECTOR):
            values[j] = acc[first + j]
        cute.autovec_copy(values, vector_of(c, shared * (c.shape.parts - 1) + part, i))
    # The barrier orders the warpgroup's stores before the count, and a release is cumulative.
    cute.arch.barrier(barrier_id=PART_BARRIER + c.f.wg, number_of_threads=THREADS)
    if c.f.tidx == 0:
        counter = counter_of(c, shared).llvm_ptr
        cute.arch.atomic_add(counter, Int32(1), sem="release", scope="gpu")


@cute.jit
def take(c, shared: Int32, parts: Int32):
    if c.f.tidx == 0:
        wait_until(counter_of(c, shared), parts)
    cute.arch.barrier(barrier_id=PART_BARRIER + c.f.wg, number_of_threads=THREADS)
    values, n = cute.make_rmem_tensor(VECTOR, Float32), cute.size(c.f.acc_dK) // VECTOR
    for part in cutlass.range(parts, unroll=1):
        for i in cutlass.range_constexpr(n + cute.size(c.f.acc_dV) // VECTOR):
            acc, first = (c.f.acc_dK, VECTOR * i) if i < n else (c.f.acc_dV, VECTOR * (i - n))
            cute.autovec_copy(vector_of(c, shared * parts + part, i), values)
            for j in cutlass.range_constexpr(VECTOR):
                acc[first + j] = acc[first + j] + values[j]


@cute.jit
def join(c, share: Int32) -> Boolean:
    """Whether dK and dV of this CTA are now those of the tile, of which it may hold a part."""
    whole = Boolean(True)
    if share >= 0:
        shared, others = share // c.shape.parts, c.shape.parts - 1
        part = share % c.shape.parts
        whole = part == others
        if whole:
            take(c, shared, others)
        else:
            give(c, shared, part)
    return whole
