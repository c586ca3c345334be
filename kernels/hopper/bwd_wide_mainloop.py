"""A consumer warpgroup of the backward for head dims above 128: all keys and queries of every
block, and of each pair of products one.

    warpgroup 0                         warpgroup 1
    S^T  = K Q_i^T                      dP^T = V dO_i^T
    P^T  = exp(S^T - LSE_i)       P ->  dS^T = P^T * (dP^T - delta_i)
    dV  += P^T dO_i                     dK  += dS^T Q_i
    dQ_(i-1) += dS_(i-1) K        <- dS the same, of the other half of the columns

P^T and dS^T are operands where they are, in registers. P goes from thread to thread, since both
accumulators have one layout; dS goes to dQ's products of both. With 64 x 64 scores a product's
operands keep the pipe of shared memory as busy as the tensor cores, and with one operand in
registers half as busy; and one warpgroup's products run while the other is between two of its own.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup

from cute_attn.kernels.common import bwd_walk
from cute_attn.kernels.common.bwd_walk import Shape, Tile
from cute_attn.kernels.common.layout import acc_as_rows
from cute_attn.kernels.hopper import bwd_mainloop
from cute_attn.kernels.hopper.bwd_mainloop import KEYS_BARRIER, OUTPUT_BARRIER, transposed
from cute_attn.kernels.hopper.bwd_operands import Mmas, Smem
from cute_attn.kernels.hopper.gemm import STEP, gemm
from cute_attn.kernels.hopper.operands import TmaOperand

WEIGHTS_BARRIER = 10  # P of a block is in shared memory
READ_BARRIER = 12  # and has been read there
OF_P, OF_DS = 0, 1  # warpgroups
SHARED_SCALE = 2.0**15  # of P in fp16 between them: P is at most 1, and has 11 bits from 2^-29 on


class Fragments(NamedTuple):
    rK: cute.Tensor  # descriptors (MMA, 1, head_dim/16)
    rV: cute.Tensor
    rQ: cute.Tensor  # descriptors (MMA, 1, head_dim/16, stages)
    rdO: cute.Tensor
    rQt: cute.Tensor  # descriptors (MMA, 1, tile_m/16, stages), Q^T
    rdOt: cute.Tensor
    rdS: cute.Tensor  # descriptors (MMA, 1, 64/16, shared_tiles), dS
    rKt: cute.Tensor  # descriptors (MMA, 1, 64/16, 1), its columns of K, transposed
    acc_dK: cute.Tensor  # one warpgroup's
    acc_dV: cute.Tensor  # the other's
    cS: cute.Tensor  # (key, query) of every score this thread owns
    tidx: Int32  # within the warpgroup
    wg: int


@cute.jit
def make_fragments(cfg, mmas: Mmas, smem: Smem, tidx, wg: cutlass.Constexpr[int]) -> Fragments:
    scores, dv, dk, dq = [mma.get_slice(0) for mma in mmas[:4]]
    sKt = cute.local_tile(transposed(smem.k), (cfg.dq_width, 64, 1), (wg, 0, 0))
    make = cute.make_rmem_tensor
    return Fragments(
        scores.make_fragment_A(scores.partition_A(smem.k))[None, None, None, 0],
        scores.make_fragment_A(scores.partition_A(smem.v))[None, None, None, 0],
        scores.make_fragment_B(scores.partition_B(smem.q)),
        scores.make_fragment_B(scores.partition_B(smem.do)),
        dk.make_fragment_B(dk.partition_B(transposed(smem.q))),
        dv.make_fragment_B(dv.partition_B(transposed(smem.do))),
        dq.make_fragment_A(dq.partition_A(transposed(smem.ds))),
        dq.make_fragment_B(dq.partition_B(sKt)),
        make(mmas.dk.partition_shape_C((64, cfg.width)), Float32),
        make(mmas.dv.partition_shape_C((64, cfg.width_v)), Float32),
        mmas.scores.get_slice(tidx).partition_C(cute.make_identity_tensor((64, cfg.tile_m))),
        tidx,
        wg,
    )


@cute.jit
def announce(cfg, pipes, shape: Shape, tile: Tile):
    """As bwd_mainloop.announce, of one tile and one warpgroup. That is not two blocks ahead here
    either: its dS takes P, which the other writes after it has seen dS of the block before."""
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.ds_slots)
    for _ in cutlass.range(tile.blocks, unroll=1):
        bwd_mainloop.announce_one(pipes, OF_DS, state)
        state.advance()


@cute.jit
def columns(row: cute.Tensor, coords: cute.Tensor, n: cutlass.Constexpr[int]):
    """Of a statistic in shared memory, the values of this thread's n / 4 queries, in order."""
    first = row.iterator + acc_as_rows(coords)[0, 0][1]
    pairs = cute.make_tensor(
        cute.make_ptr(Float32, first.toint(), cute.AddressSpace.smem, assumed_align=8),
        cute.make_layout((2, n // 8), stride=(1, 8)),
    )
    mine = cute.make_rmem_tensor(cute.make_layout((2, n // 8)), Float32)
    for i in cutlass.range_constexpr(n // 8):
        cute.autovec_copy(pairs[None, i], mine[None, i])
    return mine


class Consumer(bwd_mainloop.Consumer):
    """What both warpgroups do; the rest is in Weights and Gradients."""

    def of_warpgroup(self, wg: int):
        tidx = cute.arch.thread_idx()[0] - 128 - 128 * wg
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["f"] = make_fragments(self.cfg, self.mmas, self.smem, tidx, wg)
        return (Weights, Gradients)[wg](**fields)

    def barrier(self, number: int):
        cute.arch.barrier(barrier_id=number, number_of_threads=128 * self.cfg.warpgroups)

    def arrive(self, number: int):
        cute.arch.barrier_arrive(barrier_id=number, number_of_threads=128 * self.cfg.warpgroups)

    def first_key(self, tile: Tile):
        return tile.n_block * self.cfg.tile_n

    @cute.jit
    def columns_of(self, which: cutlass.Constexpr[int], slot: Int32):
        """A statistic of this thread's queries."""
        rows = self.smem.statistics[None, which, slot]
        return columns(rows, self.f.cS, self.cfg.tile_m)

    @property
    def halved(self) -> bool:
        """Whether P goes over in fp16, at half the traffic: its rounding is an eighth of that of
        dS in bf16, but as large as that in fp16."""
        return self.smem.q.element_type is BFloat16

    def weights(self) -> cute.Tensor:
        """This thread's in shared memory, (values of 16 bytes, vectors): it is thread to thread,
        those of a warp next to each other."""
        dtype, n = (Float16, 8) if self.halved else (Float32, 4)
        first = self.smem.ds[None, None, self.cfg.ds_slots].iterator.toint() + 16 * self.f.tidx
        pointer = cute.make_ptr(dtype, first, cute.AddressSpace.smem, assumed_align=16)
        layout = cute.make_layout((n, self.cfg.tile_m // (2 * n)), stride=(1, n * 128))
        return cute.make_tensor(pointer, layout)

    @cute.jit
    def tile(self, tile: Tile):
        """Products of a block run while the other warpgroup weighs: that one needs P, which is
        ready when this one's begin. dQ lags a block, so that its operand is there, and goes ahead
        of the gradient, beside which it is added up: the next scores take its registers."""
        f, cfg, shape = self.f, self.cfg, self.shape
        now = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.stages)
        ahead = now.clone()
        ahead.advance()
        self.clear()
        head, m = tile.head, tile.m
        acc = self.scores()
        operand = cute.make_rmem_tensor_like(acc, self.smem.q.element_type)  # P or dS
        self.issue_scores(acc, now)
        self.weigh(acc, operand, self.slot_before(now), now, tile, m, const_expr(True))
        blocks = tile.blocks
        for i in cutlass.range(blocks - 1, unroll=1):
            acc_dQ = self.dq_of(self.slot_before(now))
            self.issue_gradient(operand, now)
            warpgroup.wait_group(1)  # dQ
            if i > 0:
                self.add_dq(acc_dQ, tile, *bwd_walk.before(shape, tile, head, m))
            acc = self.scores()
            self.issue_scores(acc, ahead)
            warpgroup.wait_group(1)  # the gradient
            self.release(now)
            head, m = bwd_walk.following(shape, tile, head, m)
            self.weigh(acc, operand, now, ahead, tile, m, const_expr(False))
            now.advance()
            ahead.advance()
        acc_dQ = self.dq_of(self.slot_before(now))
        self.issue_gradient(operand, now)
        warpgroup.wait_group(1)  # dQ
        if blocks > 1:
            self.add_dq(acc_dQ, tile, *bwd_walk.before(shape, tile, head, m))
        self.pipes.ds.consumer_wait(now)
        acc_dQ = self.dq_of(now)
        warpgroup.wait_group(0)
        self.add_dq(acc_dQ, tile, head, m)

    @cute.jit
    def send(self, op: TmaOperand, sX: cute.Tensor, width: cutlass.Constexpr, tile: Tile):
        """dK or dV of the tile on its way to global memory, by one warp."""
        gX = cute.local_tile(
            op.tensor[None, None, tile.kv_head, tile.batch], (64, width), (None, 0)
        )
        s, g = cpasync.tma_partition(
            op.atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )
        cute.copy(op.atom, s[None, 0], g[None, tile.n_block])

    @cute.jit
    def leave(self, op, acc, mma, sX, width: cutlass.Constexpr, scale: Float32, tile: Tile):
        """dK or dV leaves where K or V was."""
        self.store(acc, mma, sX[None, None, 0], scale)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=OUTPUT_BARRIER + self.f.wg, number_of_threads=128)
        if self.first_warp():
            self.send(op, sX, width, tile)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)


class Weights(Consumer):
    """Warpgroup 0: S, P, dV."""

    def clear(self):
        self.f.acc_dV.fill(0.0)

    @cute.jit
    def issue_scores(self, acc_S: cute.Tensor, at):
        """Columns past head_dim are 0 and may be left out, here and in dP."""
        self.pipes.q.consumer_wait(at)
        Q = self.f.rQ[None, None, None, at.index]
        gemm(self.mmas.scores, acc_S, self.f.rK, Q, self.problem.tile_dim // STEP, zero=True)

    def issue_gradient(self, rP: cute.Tensor, at):
        self.pipes.do.consumer_wait(at)
        self.issue_dv(rP, at)

    def release(self, at):
        self.pipes.do.consumer_release(at)

    @cute.jit
    def weigh(
        self,
        acc_S: cute.Tensor,
        rP: cute.Tensor,
        before,
        at,
        tile: Tile,
        m: Int32,
        first: cutlass.Constexpr[bool],
    ):
        """P = exp(S - LSE), to the other warpgroup too, once that has read P of the block before.
        dS of it is there then, or soon: dQ, the next product, takes it."""
        start = self.columns_of(0, at.index)
        warpgroup.wait_group(0)
        for i in cutlass.range_constexpr(cute.size(acc_S)):
            bits = acc_S[i] * self.scale_log2 + start[i // 4 * 2 + i % 2]
            acc_S[i] = cute.math.exp2(bits, fastmath=True)
        cute.arch.sync_warp()  # one thread releases what all have read
        self.pipes.q.consumer_release(at)
        if self.masked(tile, m):
            self.mask(acc_S, tile, m)
        self.pipes.ds.consumer_wait(before)
        if const_expr(not first):
            self.barrier(READ_BARRIER)
        self.share_weights(acc_S)
        rP.store(acc_S.load().to(rP.element_type))

    @cute.jit
    def share_weights(self, acc_P: cute.Tensor):
        to = self.weights()
        n, vectors = to.shape
        scaled = cute.make_rmem_tensor(cute.make_layout((n, vectors)), to.element_type)
        for i in cutlass.range_constexpr(vectors):
            P = cute.make_tensor(acc_P.iterator + n * i, cute.make_layout(n)).load()
            if const_expr(self.halved):
                P = (P * SHARED_SCALE).to(Float16)
            scaled[None, i].store(P)
            cute.autovec_copy(scaled[None, i], to[None, i])
        self.arrive(WEIGHTS_BARRIER)

    def finish(self, tile: Tile, scale: Float32):
        """V has no reader left: dP of the last block went into its dS."""
        x, smem, width = self.x, self.smem, self.cfg.width_v
        self.arrive(KEYS_BARRIER)
        self.barrier(READ_BARRIER)  # of the last block: nobody's arrival is left over
        self.leave(x.dv, self.f.acc_dV, self.mmas.dv, smem.v, width, Float32(1.0), tile)


class Gradients(Consumer):
    """Warpgroup 1: dP, dS, dK."""

    def clear(self):
        self.f.acc_dK.fill(0.0)

    @cute.jit
    def issue_scores(self, acc_dP: cute.Tensor, at):
        self.pipes.do.consumer_wait(at)
        dO = self.f.rdO[None, None, None, at.index]
        gemm(self.mmas.scores, acc_dP, self.f.rV, dO, self.problem.tile_dim_v // STEP, zero=True)

    @cute.jit
    def issue_gradient(self, rdS: cute.Tensor, at):
        """dK takes dS from registers: its stores run beside it. The slot is free: its dQ of two
        blocks ago has ended in both warpgroups before P of this block was written."""
        self.issue_dk(rdS, at)
        self.put(rdS, self.mmas.scores, self.smem.ds[None, None, at.index])
        self.hand_over()

    @cute.jit
    def release(self, at):
        cute.arch.sync_warp()  # one thread releases what all have read
        self.pipes.q.consumer_release(at)

    @cute.jit
    def weigh(
        self,
        acc_dP: cute.Tensor,
        rdS: cute.Tensor,
        before,
        at,
        tile: Tile,
        m: Int32,
        first: cutlass.Constexpr[bool],
    ):
        """dS = P * (dP - delta)."""
        self.pipes.q.consumer_wait(at)  # its statistics
        start = self.columns_of(1, at.index)
        P = self.weights_of_block()
        warpgroup.wait_group(0)
        self.pipes.do.consumer_release(at)
        unscale = 1 / SHARED_SCALE if self.halved else 1.0
        for i in cutlass.range_constexpr(cute.size(acc_dP)):
            delta = start[i // 4 * 2 + i % 2] * unscale
            acc_dP[i] = P[i].to(Float32) * (acc_dP[i] * unscale + delta)
        rdS.store(acc_dP.load().to(rdS.element_type))

    @cute.jit
    def weights_of_block(self) -> cute.Tensor:
        """P of the other warpgroup's same thread."""
        there = self.weights()
        P = cute.make_rmem_tensor(cute.make_layout(there.shape), there.element_type)
        self.barrier(WEIGHTS_BARRIER)
        for i in cutlass.range_constexpr(there.shape[1]):
            cute.autovec_copy(there[None, i], P[None, i])
        self.arrive(READ_BARRIER)
        return P

    def finish(self, tile: Tile, scale: Float32):
        """K has no reader left: the other warpgroup's last dQ is done."""
        x, smem, width = self.x, self.smem, self.cfg.width
        self.barrier(KEYS_BARRIER)
        self.leave(x.dk, self.f.acc_dK, self.mmas.dk, smem.k, width, scale, tile)
