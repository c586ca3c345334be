"""O: registers -> the warpgroup's Q slot -> TMA store by its own warp. LSE: straight to global."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync, warp

from cute_attn.kernels.common.bits import bits, e4m3_pair, magnitude
from cute_attn.kernels.common.layout import acc_as_rows
from cute_attn.kernels.common.merge import pair_at
from cute_attn.kernels.hopper import scheduler
from cute_attn.kernels.hopper.operands import Inputs, Smem, Tile


def same_slots(problem) -> bool:
    """Whether 16 rows of O lie within the same 16 rows of Q in a slot: a warp may then overwrite
    its rows, which no other warp reads, without a barrier."""
    return problem.tile_dim == problem.tile_dim_v or (
        problem.tile_dim % 64 == 0 and problem.tile_dim_v % 64 == 0
    )


@cute.jit
def measure(amax: cute.Tensor, f, row0, seqlen_q):
    """The largest finite |O|, of the rows that there are, into a cell: bits of what is not negative
    compare as integers, and a maximum does not ask for an order."""
    top = largest_size(f, row0, seqlen_q, False)
    if top == Float32.inf:
        top = largest_size(f, row0, seqlen_q, True)
    whole = cute.arch.warp_redux_sync(bits(top), "max")
    if f.tidx % 32 == 0:
        cute.arch.atomic_max(amax.iterator.llvm_ptr, whole)


@cute.jit
def largest_size(f, row0, seqlen_q, finite: cutlass.Constexpr[bool]) -> Float32:
    """Of this thread's O. fmax passes a NaN over; finite: infinities too."""
    O, C = acc_as_rows(f.acc_O), acc_as_rows(f.cS)
    top = Float32(0.0)
    for r in cutlass.range_constexpr(2):
        if row0 + C[r, 0][0] < seqlen_q:
            for c in cutlass.range_constexpr(0, cute.size(O, mode=[1]), 2):
                for i in cutlass.range_constexpr(2):
                    size = magnitude(O[r, c + i])
                    if const_expr(finite):
                        size = Float32(0.0) if size == Float32.inf else size
                    top = cute.arch.fmax(top, size)
    return top


@cute.jit
def hand_over_codes(x: Inputs, smem: Smem, f, ring, slot: Int32):
    """As hand_over_output, for O in e4m3: stmatrix has no place for bytes, two columns are stored
    as one of 16 bits."""
    O, C = acc_as_rows(f.acc_O), acc_as_rows(f.cS)
    scale = x.rounding.scale[0]
    # recast_tensor alone would forget the swizzle
    base = cute.recast_ptr(smem.o.iterator, x.o.layout.inner, dtype=Int16)
    pairs = cute.make_tensor(base, cute.recast_layout(16, 8, smem.o.layout))
    for r in cutlass.range_constexpr(2):
        for c in cutlass.range_constexpr(0, cute.size(O, mode=[1]), 2):
            code = e4m3_pair(O[r, c] * scale, O[r, c + 1] * scale)
            pairs[C[r, 0][0], C[r, 0][1] // 2 + 2 * c, slot] = code
    cute.arch.fence_view_async_shared()
    cute.arch.mbarrier_arrive(ring.sync_object_full.get_barrier(slot))


@cute.jit
def hand_over_output(smem: Smem, f, ring, slot: Int32):
    dtype = smem.o.element_type
    rO = cute.make_rmem_tensor_like(f.acc_O, dtype)
    rO.store(f.acc_O.load().to(dtype))
    matrices = 4 if cute.size(rO) % 8 == 0 else 2
    atom = cute.make_copy_atom(
        warp.StMatrix8x8x16bOp(transpose=False, num_matrices=matrices), dtype
    )
    copy = cute.make_tiled_copy_C(atom, f.mmas.pv).get_slice(f.tidx)
    cute.copy(atom, copy.retile(rO), copy.partition_D(smem.o)[None, None, None, slot])
    cute.arch.fence_view_async_shared()
    cute.arch.mbarrier_arrive(ring.sync_object_full.get_barrier(slot))


@cute.jit
def write_part(x: Inputs, f, norm: cute.Tensor, tile: Tile, row0, seqlen_q, ring, slot: Int32):
    """O over a part of the keys, in fp32: registers -> global memory."""
    O, C = acc_as_rows(f.acc_O), acc_as_rows(f.cS)
    width = x.parts.out.shape[1]
    for r in cutlass.range_constexpr(cute.size(norm)):
        row = row0 + C[r, 0][0]
        if row < seqlen_q:
            out = x.parts.out[row, None, tile.head, tile.batch, tile.part]
            for c in cutlass.range_constexpr(0, cute.size(O, mode=[1]), 2):
                if 4 * c < width:
                    values = cute.make_rmem_tensor(2, Float32)
                    for j in cutlass.range_constexpr(2):
                        values[j] = O[r, c + j] * norm[r]
                    cute.autovec_copy(values, pair_at(out, C[r, 0][1] + 4 * c))
    cute.arch.mbarrier_arrive(ring.sync_object_full.get_barrier(slot))


@cute.jit
def store_tile(cfg, problem, x: Inputs, smem: Smem, pipes, tile: Tile, q):
    gO = cute.local_tile(
        x.o.tensor[None, None, tile.head, tile.batch], (64, problem.tile_dim_v), (None, 0)
    )
    sO, gO = cpasync.tma_partition(
        x.o.atom, 0, cute.make_layout(1), cute.group_modes(smem.o, 0, 2), cute.group_modes(gO, 0, 2)
    )
    for w in cutlass.range_constexpr(cfg.warpgroups):
        pipes.o.consumer_wait(q)
        if const_expr(not cfg.split_kv):  # parts were written by the consumers
            cute.copy(x.o.atom, sO[None, q.index], gO[None, tile.m_block * cfg.warpgroups + w])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        pipes.q.consumer_release(q)
        q.advance()
    return q


@cute.jit
def store(cfg, problem, x: Inputs, smem: Smem, pipes):
    """One warp: O of every tile to global memory, then the slot goes back to the loader."""
    consumer = pipeline.PipelineUserType.Consumer
    q = pipeline.make_pipeline_state(consumer, cfg.q_ring)
    tile = scheduler.receive(cfg, smem, pipes, Int32(0))
    while tile.kv_end > 0:
        q = store_tile(cfg, problem, x, smem, pipes, tile, q)
        tile = scheduler.receive(cfg, smem, pipes, tile.number + 1)
