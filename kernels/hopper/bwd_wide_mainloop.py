"""A consumer warpgroup of the backward for head dims above 128: half the queries of every block,
then half the columns of every gradient.

    S^T  = K Q_i^T,  dP^T = V dO_i^T      64 keys, 32 queries
    P^T, dS^T                             through shared memory to the other warpgroup
    dV  += P^T dO_i,  dK += dS^T Q_i,  dQ_i = dS K      64 keys or queries, half the columns

dK and dV of 64 keys and 256 columns take all registers of one warpgroup; halves leave room for
dQ, and for scores of the next block beside gradients of this one.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup

from cute_attn.kernels.common.layout import acc_as_rows
from cute_attn.kernels.hopper import bwd_mainloop
from cute_attn.kernels.hopper.bwd_mainloop import (
    KEYS_BARRIER,
    OUTPUT_BARRIER,
    rounded,
    transposed,
)
from cute_attn.kernels.hopper.bwd_operands import Mmas, Smem, Tile
from cute_attn.kernels.hopper.gemm import STEP, gemm
from cute_attn.kernels.hopper.operands import TmaOperand


class Fragments(NamedTuple):
    rK: cute.Tensor  # descriptors (MMA, 1, head_dim/16)
    rV: cute.Tensor
    rQ: cute.Tensor  # descriptors (MMA, 1, head_dim/16, stages), this warpgroup's queries
    rdO: cute.Tensor
    rQt: cute.Tensor  # descriptors (MMA, 1, tile_m/16, stages), its columns of Q, transposed
    rdOt: cute.Tensor
    rPt: cute.Tensor  # descriptors (MMA, 1, tile_m/16, shared_tiles), P^T and dS^T
    rdS: cute.Tensor  # descriptors (MMA, 1, 64/16, shared_tiles), dS
    rKt: cute.Tensor  # descriptors (MMA, 1, 64/16), its columns of K, transposed
    acc_dK: cute.Tensor
    acc_dV: cute.Tensor
    acc_dQ: cute.Tensor
    cS: cute.Tensor  # (key, query) of every score this thread owns
    tidx: Int32  # within the warpgroup
    wg: Int32


@cute.jit
def part_of(sX: cute.Tensor, rows: cutlass.Constexpr[int], wg: Int32):
    """A warpgroup's share of the first mode."""
    return cute.local_tile(sX, (rows, sX.shape[1], sX.shape[2]), (wg, 0, 0))


@cute.jit
def make_fragments(cfg, mmas: Mmas, smem: Smem, tidx, wg) -> Fragments:
    scores, dv, dk, dq = [mma.get_slice(0) for mma in mmas[:4]]
    sQ, sdO = [part_of(t, cfg.score_columns, wg) for t in (smem.q, smem.do)]
    sQt, sKt = [part_of(transposed(t), cfg.dq_width, wg) for t in (smem.q, smem.k)]
    sdOt = part_of(transposed(smem.do), cfg.dv_width, wg)
    cS = cute.local_tile(
        cute.make_identity_tensor((64, cfg.tile_m)), (64, cfg.score_columns), (0, wg)
    )
    make = cute.make_rmem_tensor
    return Fragments(
        scores.make_fragment_A(scores.partition_A(smem.k))[None, None, None, 0],
        scores.make_fragment_A(scores.partition_A(smem.v))[None, None, None, 0],
        scores.make_fragment_B(scores.partition_B(sQ)),
        scores.make_fragment_B(scores.partition_B(sdO)),
        dk.make_fragment_B(dk.partition_B(sQt)),
        dv.make_fragment_B(dv.partition_B(sdOt)),
        dk.make_fragment_A(dk.partition_A(smem.ds)),
        dq.make_fragment_A(dq.partition_A(transposed(smem.ds))),
        dq.make_fragment_B(dq.partition_B(sKt))[None, None, None, 0],
        make(mmas.dk.partition_shape_C((64, cfg.dq_width)), Float32),
        make(mmas.dv.partition_shape_C((64, cfg.dv_width)), Float32),
        make(mmas.dq.partition_shape_C((64, cfg.dq_width)), Float32),
        mmas.scores.get_slice(tidx).partition_C(cS),
        tidx,
        wg,
    )


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
    @cute.jit
    def columns_of(self, which: cutlass.Constexpr[int], slot: Int32):
        """A statistic of this thread's queries."""
        rows = self.smem.statistics[None, which, slot]
        return columns(rows, self.f.cS, self.cfg.score_columns)

    @cute.jit
    def differentiate(self, acc_P: cute.Tensor, acc_dP: cute.Tensor, delta: cute.Tensor):
        """dS = P * (dP - delta), in dP's place."""
        for i in cutlass.range_constexpr(cute.size(acc_P)):
            acc_dP[i] = acc_P[i] * (acc_dP[i] + delta[i // 4 * 2 + i % 2])

    def first_key(self, tile: Tile):
        return tile.n_block * self.cfg.tile_n

    @cute.jit
    def weigh(self, acc_S: cute.Tensor, slot: Int32):
        """P = exp(S - LSE)."""
        start = self.columns_of(0, slot)
        for i in cutlass.range_constexpr(cute.size(acc_S)):
            shifted = acc_S[i] + start[i // 4 * 2 + i % 2]
            acc_S[i] = cute.math.exp2(shifted * self.scale_log2, fastmath=True)

    @cute.jit
    def issue_scores(self, acc_S: cute.Tensor, at):
        """Columns past head_dim are 0 and may be left out, here and in dP."""
        self.pipes.q.consumer_wait(at)
        Q = self.f.rQ[None, None, None, at.index]
        gemm(self.mmas.scores, acc_S, self.f.rK, Q, self.problem.tile_dim // STEP, zero=True)

    @cute.jit
    def issue_dp(self, acc_dP: cute.Tensor, at):
        self.pipes.do.consumer_wait(at)
        dO = self.f.rdO[None, None, None, at.index]
        gemm(self.mmas.scores, acc_dP, self.f.rV, dO, self.problem.tile_dim_v // STEP, zero=True)

    @cute.jit
    def issue_dv(self, at):
        Pt = self.f.rPt[None, None, None, 2 * at.index]
        dOt = self.f.rdOt[None, None, None, at.index]
        gemm(self.mmas.dv, self.f.acc_dV, Pt, dOt, self.cfg.tile_m // STEP, zero=False)

    @cute.jit
    def issue_dk(self, at):
        dSt = self.f.rPt[None, None, None, 2 * at.index + 1]
        Qt = self.f.rQt[None, None, None, at.index]
        gemm(self.mmas.dk, self.f.acc_dK, dSt, Qt, self.cfg.tile_m // STEP, zero=False)

    @cute.jit
    def issue_dq(self, at):
        dS = self.f.rdS[None, None, None, 2 * at.index + 1]
        gemm(self.mmas.dq, self.f.acc_dQ, dS, self.f.rKt, 64 // STEP, zero=True)

    @cute.jit
    def share(self, acc: cute.Tensor, slot: Int32):
        """This warpgroup's queries of P or dS to shared memory."""
        sX = cute.local_tile(
            self.smem.ds[None, None, slot], (64, self.cfg.score_columns), (0, self.f.wg)
        )
        self.put(rounded(acc, sX.element_type), self.mmas.scores, sX)

    @cute.jit
    def hand_over(self, slot):
        cute.arch.fence_view_async_shared()
        cute.arch.mbarrier_arrive(self.pipes.ds.sync_object_full.get_barrier(slot))

    @cute.jit
    def wait_until_read(self, at):
        """A slot is written again two blocks later, when nothing else orders this warpgroup after
        the other's last product that reads it, dQ: the other has written the block between, but
        perhaps gone no further."""
        empty = self.pipes.ds.sync_object_empty.get_barrier(at.index)
        cute.arch.mbarrier_wait(empty, at.phase ^ 1)

    @cute.jit
    def has_read(self, slot: Int32):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.pipes.ds.sync_object_empty.get_barrier(slot))

    @cute.jit
    def share_weights(self, acc_S: cute.Tensor, at, tile: Tile, m: Int32):
        """P, which stays in S's place too."""
        self.weigh(acc_S, at.index)
        if self.masked(tile, m):
            self.mask(acc_S, tile, m)
        self.wait_until_read(at)
        self.share(acc_S, 2 * at.index)

    @cute.jit
    def share_gradients(self, acc_P: cute.Tensor, acc_dP: cute.Tensor, at):
        self.differentiate(acc_P, acc_dP, self.columns_of(1, at.index))
        self.share(acc_dP, 2 * at.index + 1)
        self.hand_over(at.index)

    @cute.jit
    def first(self, at, tile: Tile):
        """P and dS of the first block."""
        acc_S, acc_dP = self.scores(), self.scores()
        self.issue_scores(acc_S, at)
        self.issue_dp(acc_dP, at)
        warpgroup.wait_group(1)
        self.share_weights(acc_S, at, tile, tile.m_begin)
        warpgroup.wait_group(0)
        self.share_gradients(acc_S, acc_dP, at)

    @cute.jit
    def following(self, tile: Tile, head: Int32, m: Int32):
        """The block of queries after (head, m)."""
        m = m + 1
        if m == self.shape.m_blocks:
            m = tile.m_begin
            head = head + 1
        return head, m

    @cute.jit
    def tile(self, tile: Tile):
        """Scores run a block ahead, so that products of one block run beside the weights of the
        next.

        Products end in the order of their issue. dK is the first and dV follows the scores of the
        next block: its ring slot of Q is free early, and the load of two blocks ahead has the time
        of dV, dQ and the next dK."""
        f, cfg, shape = self.f, self.cfg, self.shape
        f.acc_dK.fill(0.0)
        f.acc_dV.fill(0.0)
        f.acc_dQ.fill(0.0)
        now = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.stages)
        ahead = now.clone()
        ahead.advance()
        self.first(now, tile)
        self.pipes.ds.consumer_wait(now)
        self.issue_dk(now)
        head, m = tile.kv_head * shape.q_per_kv, tile.m_begin
        head_before, m_before = head, m
        blocks = shape.q_per_kv * (shape.m_blocks - tile.m_begin)
        for i in cutlass.range(blocks - 1, unroll=1):
            next_head, next_m = self.following(tile, head, m)
            acc_S = self.scores()
            self.issue_scores(acc_S, ahead)
            self.add_before(i, tile, head_before, m_before)
            self.step(acc_S, now, ahead, tile, next_m)
            head_before, m_before = head, m
            head, m = next_head, next_m
            now.advance()
            ahead.advance()
        self.issue_dv(now)
        self.add_before(blocks - 1, tile, head_before, m_before)
        self.issue_dq(now)
        warpgroup.wait_group(0)
        self.add_dq(f.acc_dQ, tile, head, m)

    @cute.jit
    def add_before(self, i: Int32, tile: Tile, head: Int32, m: Int32):
        """dQ of the block before, if there was one."""
        if i > 0:
            self.add_dq(self.f.acc_dQ, tile, head, m)

    @cute.jit
    def step(self, acc_S: cute.Tensor, now, ahead, tile: Tile, m: Int32):
        """P and dS of block `ahead`, which is m, and its dK on the way; dV and dQ of block `now`,
        whose dK is on its way."""
        acc_dP = self.scores()
        self.issue_dp(acc_dP, ahead)
        self.issue_dv(now)
        warpgroup.wait_group(2)  # dK and S
        self.pipes.q.consumer_release(now)
        self.share_weights(acc_S, ahead, tile, m)
        warpgroup.wait_group(1)  # dP
        self.share_gradients(acc_S, acc_dP, ahead)
        self.issue_dq(now)
        warpgroup.wait_group(1)  # dV
        self.pipes.do.consumer_release(now)
        self.pipes.ds.consumer_wait(ahead)
        self.issue_dk(ahead)
        # Only an accumulator that the loop does not read may be ahead of its next turn: of others
        # the assembler does not see that they are waited for, and takes products one at a time.
        warpgroup.wait_group(1)  # dQ
        self.has_read(now.index)

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
    def finish(self, tile: Tile, scale: Float32):
        """dK and dV leave where K and V were."""
        cfg, f, threads = self.cfg, self.f, 128 * self.cfg.warpgroups
        sK = cute.local_tile(self.smem.k[None, None, 0], (64, cfg.dq_width), (0, f.wg))
        sV = cute.local_tile(self.smem.v[None, None, 0], (64, cfg.dv_width), (0, f.wg))
        cute.arch.barrier(barrier_id=KEYS_BARRIER, number_of_threads=threads)
        self.store(f.acc_dK, self.mmas.dk, sK, scale)
        self.store(f.acc_dV, self.mmas.dv, sV, Float32(1.0))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=OUTPUT_BARRIER, number_of_threads=threads)
        if f.tidx < 32:
            if f.wg == 0:
                self.send(self.x.dk, self.smem.k, cfg.width, tile)
            else:
                self.send(self.x.dv, self.smem.v, cfg.width_v, tile)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=False)
