"""A consumer warpgroup of the backward: 64 keys, all queries that see them.

for every head of the group, every block i of queries:
    S^T  = K Q_i^T,  dP^T = V dO_i^T
    P^T  = exp(S^T - LSE_i), 0 where masked
    dS^T = P^T * (dP^T - delta_i)
    dV  += P^T dO_i,  dQ_(i-1) += dS_(i-1) K,  dK += dS^T Q_i
then dQ of the last block, and the tile's dK and dV leave through the memory of dS.
dK, dV (and dQ at the end) are multiplied with what softmax_scale leaves to do. The last product of
S^T and dP^T adds -LSE_i / scale and -delta_i.

Scores are computed transposed, so that P and dS are operands of dV and dK where they are, in
registers; dQ alone needs dS of both warpgroups, through shared memory.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from cute_attn.kernels.common import bwd_rows, bwd_walk
from cute_attn.kernels.common.bwd_walk import Shape, Tile
from cute_attn.kernels.common.layout import acc_as_operand_a, acc_as_rows
from cute_attn.kernels.hopper import bwd_parts, bwd_tickets, bwd_turns
from cute_attn.kernels.hopper.bwd_operands import Inputs, Mmas, Smem
from cute_attn.kernels.hopper.gemm import STEP, gemm, issue
from cute_attn.kernels.hopper.operands import TmaOperand

OF_S, OF_DP = 0, 1  # statistics
KEYS_BARRIER = 1  # both warpgroups: what the operands hold from the start; last dQ of a tile done
OUTPUT_BARRIER = 2  # + warpgroup: dK and dV in shared memory, or read; bwd_turns.py has the next
WRITTEN_BARRIER = 8  # + warpgroup: its dS is in shared memory


class Fragments(NamedTuple):
    rK: cute.Tensor  # descriptors (MMA, 1, head_dim/16)
    rV: cute.Tensor
    rQ: cute.Tensor  # descriptors (MMA, 1, head_dim/16, stages)
    rdO: cute.Tensor
    rQt: cute.Tensor  # descriptors (MMA, 1, tile_m/16, stages), Q^T
    rdOt: cute.Tensor
    rdS: cute.Tensor  # descriptors (MMA, 1, 64/16, ds_slots * warpgroups), dS
    rKt: cute.Tensor  # descriptors (MMA, 1, 64/16, warpgroups), K^T
    rStatistics: cute.Tensor  # descriptors (MMA, 1, 1, stages)
    rOnes: cute.Tensor  # descriptors (MMA, 1, 1, 2), what picks those of S or of dP
    acc_dK: cute.Tensor
    acc_dV: cute.Tensor
    cS: cute.Tensor  # (key, query) of every score this thread owns
    tidx: Int32  # within the warpgroup
    wg: Int32


def transposed(sX: cute.Tensor) -> cute.Tensor:
    rows, width, slots = sX.shape[0], sX.shape[1], sX.shape[2]
    rows, width, slots = (cute.size(n) for n in (rows, width, slots))
    return cute.composition(sX, cute.make_ordered_layout((width, rows, slots), order=(1, 0, 2)))


@cute.jit
def make_fragments(cfg, mmas: Mmas, smem: Smem, tidx, wg) -> Fragments:
    scores, dv, dk, dq, statistics = [mma.get_slice(0) for mma in mmas]
    sdS, sKt = transposed(smem.ds), transposed(smem.k)
    if const_expr(cfg.dq_by_rows):
        sdS = cute.local_tile(sdS, (64, 64, cfg.ds_slots * cfg.warpgroups), (wg, 0, 0))
    else:
        sKt = cute.local_tile(sKt, (cfg.dq_width, 64, cfg.warpgroups), (wg, 0, 0))
    make = cute.make_rmem_tensor
    return Fragments(
        scores.make_fragment_A(scores.partition_A(smem.k))[None, None, None, wg],
        scores.make_fragment_A(scores.partition_A(smem.v))[None, None, None, wg],
        scores.make_fragment_B(scores.partition_B(smem.q)),
        scores.make_fragment_B(scores.partition_B(smem.do)),
        dk.make_fragment_B(dk.partition_B(transposed(smem.q))),
        dv.make_fragment_B(dv.partition_B(transposed(smem.do))),
        dq.make_fragment_A(dq.partition_A(sdS)),
        dq.make_fragment_B(dq.partition_B(sKt)),
        statistics.make_fragment_B(statistics.partition_B(smem.statistics)),
        statistics.make_fragment_A(statistics.partition_A(smem.ones)),
        make(mmas.dk.partition_shape_C((64, cfg.width)), Float32),
        make(mmas.dv.partition_shape_C((64, cfg.width_v)), Float32),
        mmas.scores.get_slice(tidx).partition_C(cute.make_identity_tensor((64, cfg.tile_m))),
        tidx,
        wg,
    )


@cute.jit
def rounded(acc: cute.Tensor, dtype: cutlass.Constexpr) -> cute.Tensor:
    r = cute.make_rmem_tensor_like(acc, dtype)
    r.store(acc.load().to(dtype))
    return r


@cute.jit
def fill_operands(cfg, smem: Smem, tidx: Int32, threads: cutlass.Constexpr[int]):
    """Zeros to the columns of statistics that no load fills, and the ones that pick among the
    others, 16 bytes at a time: eight columns of a row, all rows of such columns after one another.
    The producer's first loads need not wait for it."""
    half, rows = STEP // 2, cfg.tile_m
    vector = cute.make_rmem_tensor(half, BFloat16)
    vector.fill(0.0)
    for i in cutlass.range(tidx, rows * cfg.stages, threads, unroll=1):
        stage = i // rows
        cute.autovec_copy(vector, vector_of(smem.statistics, i + (stage + 1) * rows))
    for i in cutlass.range(tidx, 2 * 2 * 64, threads, unroll=1):
        which = i // 128
        which = which if i // 64 % 2 == 0 else Int32(-1)  # only zeros
        for column in cutlass.range_constexpr(half):
            one = which == column // bwd_rows.PARTS
            vector[column] = BFloat16(1.0) if one else BFloat16(0.0)
        cute.autovec_copy(vector, vector_of(smem.ones, i))
    cute.arch.fence_view_async_shared()


def vector_of(operand: cute.Tensor, i: Int32) -> cute.Tensor:
    return cute.make_tensor(operand.iterator + STEP // 2 * i, cute.make_layout(STEP // 2))


@cute.jit
def announce(cfg, smem: Smem, pipes, shape: Shape):
    """A warp tells both warpgroups when dS of one is in shared memory: the fence would keep a
    warpgroup until its stores have passed the other's products, and nobody waits for dS yet. The
    named barrier orders the stores before the fence, and the fence orders them before products,
    which see memory through the async proxy. Neither warpgroup is two blocks ahead here, since it
    takes the other's dS of the block before first."""
    consumer = pipeline.PipelineUserType.Consumer
    state = pipeline.make_pipeline_state(consumer, cfg.ds_slots)
    at = pipeline.make_pipeline_state(consumer, 1)
    tile = bwd_tickets.receive(smem, pipes.tickets, at)
    while tile.n_block >= 0:
        for _ in cutlass.range(tile.blocks, unroll=1):
            for wg in cutlass.range_constexpr(cfg.warpgroups):
                announce_one(pipes, wg, state)
            state.advance()
        at.advance()
        tile = bwd_tickets.receive(smem, pipes.tickets, at)


@cute.jit
def announce_one(pipes, wg: cutlass.Constexpr[int], state):
    cute.arch.barrier(barrier_id=WRITTEN_BARRIER + wg, number_of_threads=128 + 32)
    cute.arch.fence_view_async_shared()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(pipes.ds.sync_object_full.get_barrier(state.index))


class Rings(NamedTuple):
    """Where a warpgroup is in them."""

    now: pipeline.PipelineState  # Q and dO of a block
    written: pipeline.PipelineState  # its dS


@dataclass(frozen=True)
class Consumer:
    cfg: object
    problem: object
    x: Inputs
    smem: Smem
    mmas: Mmas
    pipes: object
    shape: Shape
    scale_log2: Float32
    f: Fragments | None = None

    def of_warpgroup(self, wg: Int32):
        tidx = cute.arch.thread_idx()[0] - 128 - 128 * wg
        return replace(self, f=make_fragments(self.cfg, self.mmas, self.smem, tidx, wg))

    @cute.jit
    def scores(self) -> cute.Tensor:
        shape = self.mmas.scores.partition_shape_C((64, self.cfg.tile_m))
        return cute.make_rmem_tensor(shape, Float32)

    def first_key(self, tile: Tile):
        return tile.n_block * self.cfg.tile_n + self.f.wg * 64

    @cute.jit
    def mask(self, acc_P: cute.Tensor, tile: Tile, m: Int32):
        """P = 0 where the query does not see the key, or there is no such key; whatever the sign of
        the scale, and whatever weight the score would have had."""
        P, C = acc_as_rows(acc_P), acc_as_rows(self.f.cS)
        for r in cutlass.range_constexpr(2):
            key = self.first_key(tile) + C[r, 0][0]
            first = Int32(0)  # query that sees the key
            if const_expr(self.problem.causal):
                first = key - (self.shape.seqlen_k - self.shape.seqlen_q)
            first = first if key < self.shape.seqlen_k else Int32(2**30)
            first = first - m * self.cfg.tile_m - C[0, 0][1]
            for c in cutlass.range_constexpr(cute.size(P, mode=[1])):
                P[r, c] = Float32(0.0) if c // 2 * 8 + c % 2 < first else P[r, c]

    @cute.jit
    def masked(self, tile: Tile, m: Int32):
        """Whether some query of block m does not see some key of the tile."""
        last = (tile.n_block + 1) * self.cfg.tile_n
        partly = last > self.shape.seqlen_k
        if const_expr(self.problem.causal):
            first_query = m * self.cfg.tile_m + self.shape.seqlen_k - self.shape.seqlen_q
            partly = partly | (last - 1 > first_query)
        return partly

    @cute.jit
    def weigh(self, acc_S: cute.Tensor):
        """P = exp(S - LSE); the accumulator holds S - LSE / softmax_scale."""
        for i in cutlass.range_constexpr(cute.size(acc_S)):
            acc_S[i] = cute.math.exp2(acc_S[i] * self.scale_log2, fastmath=True)

    @cute.jit
    def differentiate(self, acc_P: cute.Tensor, acc_dP: cute.Tensor):
        """dS = P * (dP - delta), in dP's place, which holds dP - delta."""
        for i in cutlass.range_constexpr(cute.size(acc_P)):
            acc_dP[i] = acc_P[i] * acc_dP[i]

    @cute.jit
    def share_ds(self, rdS: cute.Tensor, written):
        """dS of 64 keys to shared memory, for both warpgroups."""
        slot = written.index * self.cfg.warpgroups + self.f.wg
        self.put(rdS, self.mmas.scores, self.smem.ds[None, None, slot])
        self.hand_over()

    @cute.jit
    def hand_over(self):
        """`announce` goes on from here."""
        cute.arch.barrier_arrive(barrier_id=WRITTEN_BARRIER + self.f.wg, number_of_threads=128 + 32)

    @cute.jit
    def issue_dv(self, rP: cute.Tensor, at):
        dOt = self.f.rdOt[None, None, None, at.index]
        P = acc_as_operand_a(rP)
        gemm(self.mmas.dv, self.f.acc_dV, P, dOt, self.cfg.tile_m // STEP, zero=False)

    @cute.jit
    def issue_dq(self, acc_dQ: cute.Tensor, slot: Int32):
        warpgroup.fence()
        for w in cutlass.range_constexpr(self.cfg.ds_tiles):
            dS = self.f.rdS[None, None, None, slot * self.cfg.ds_tiles + w]
            Kt = self.f.rKt[None, None, None, w]
            issue(self.mmas.dq, acc_dQ, dS, Kt, 64 // STEP, zero=w == 0)
        warpgroup.commit_group()

    @cute.jit
    def add_dq(self, acc_dQ: cute.Tensor, tile: Tile, head: Int32, m: Int32):
        """dQ of the block += this tile's part: four floats of a thread next to each other, the
        threads of a warpgroup after one another."""
        part = self.x.dq[None, m, head, tile.batch]
        base = self.f.wg * 64 * self.cfg.dq_width + 4 * self.f.tidx
        if const_expr(self.cfg.deterministic):
            bwd_turns.wait_for_turn(self.f.wg)
        for i in cutlass.range_constexpr(cute.size(acc_dQ) // 4):
            address = (part.iterator + (base + 4 * 128 * i)).toint()
            cute.arch.inline_ptx(
                "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[address, *[acc_dQ[4 * i + j] for j in range(4)]],
            )
        if const_expr(self.cfg.deterministic):
            bwd_turns.end_turn(self.f.wg)

    @cute.jit
    def products(self, acc: cute.Tensor, A, B, width: int, which: cutlass.Constexpr[int], at):
        """S or dP of 64 keys as a group of products, and a statistic of each query as the last one:
        loads from shared memory, sixteen of a thread or more, are long in coming beside others'
        products. Last, since tensor cores cut off what an addend has below 24 bits or so of the
        largest: begun from an LSE in the thousands, S would not be the sum that gave that LSE."""
        mma, stage = self.mmas.statistics, self.f.rStatistics[None, None, None, at.index]
        warpgroup.fence()
        issue(self.mmas.scores, acc, A, B, width // STEP, zero=which == OF_DP)
        issue(mma, acc, self.f.rOnes[None, None, None, which], stage, 1, zero=False)
        warpgroup.commit_group()

    @cute.jit
    def issue_scores(self, acc_S: cute.Tensor, at):
        self.pipes.q.consumer_wait(at)
        acc_S.fill(0.0)  # else the assembler lacks registers, and serialises products
        Q = self.f.rQ[None, None, None, at.index]
        self.products(acc_S, self.f.rK, Q, self.cfg.width, OF_S, at)

    @cute.jit
    def issue_dp(self, acc_dP: cute.Tensor, at):
        self.pipes.do.consumer_wait(at)
        dO = self.f.rdO[None, None, None, at.index]
        self.products(acc_dP, self.f.rV, dO, self.cfg.width_v, OF_DP, at)

    @cute.jit
    def gradients(self, now, written, tile: Tile, m: Int32) -> cute.Tensor:
        """P and dS of a block, dS for the other warpgroup too. Its dV and dK and dQ of the
        block before, which is returned, are on their way."""
        dtype, early = self.smem.q.element_type, self.cfg.early_dv
        acc_S, acc_dP = self.scores(), self.scores()
        self.issue_scores(acc_S, now)
        self.issue_dp(acc_dP, now)
        warpgroup.wait_group(1)
        self.weigh(acc_S)
        if self.masked(tile, m):
            self.mask(acc_S, tile, m)
        rP = rounded(acc_S, dtype)
        if const_expr(early):
            self.issue_dv(rP, now)
        warpgroup.wait_group(1 if early else 0)
        self.differentiate(acc_S, acc_dP)
        rdS = rounded(acc_dP, dtype)
        if const_expr(not early):
            self.issue_dv(rP, now)
        before = self.slot_before(written)
        self.pipes.ds.consumer_wait(before)
        if const_expr(not self.cfg.late_ds):
            self.share_ds(rdS, written)
        acc_dQ = self.dq_of(before)
        self.issue_dk(rdS, now)
        if const_expr(self.cfg.late_ds):
            self.share_ds(rdS, written)
        return acc_dQ

    @cute.jit
    def issue_dk(self, rdS: cute.Tensor, at):
        Qt = self.f.rQt[None, None, None, at.index]
        dS = acc_as_operand_a(rdS)
        gemm(self.mmas.dk, self.f.acc_dK, dS, Qt, self.cfg.tile_m // STEP, zero=False)

    @cute.jit
    def dq_of(self, read) -> cute.Tensor:
        """dQ of a block whose dS both warpgroups have written; on its way."""
        shape = self.mmas.dq.partition_shape_C((64, self.cfg.dq_width))
        acc_dQ = cute.make_rmem_tensor(shape, Float32)
        self.issue_dq(acc_dQ, read.index)
        return acc_dQ

    @cute.jit
    def fill_operands(self):
        threads = 128 * self.cfg.warpgroups
        fill_operands(self.cfg, self.smem, self.f.wg * 128 + self.f.tidx, threads)
        cute.arch.barrier(barrier_id=KEYS_BARRIER, number_of_threads=threads)

    def first_slots(self) -> Rings:
        consumer, cfg = pipeline.PipelineUserType.Consumer, self.cfg
        return Rings(
            pipeline.make_pipeline_state(consumer, cfg.stages),
            pipeline.make_pipeline_state(consumer, cfg.ds_slots),
        )

    @cute.jit
    def slot_before(self, written):
        """Of dS of the block before. A tile's first block finds one that was full before, or in the
        first tile none, for which nobody waits either; what lies there does not matter."""
        index, phase = written.index - 1, written.phase
        if written.index == 0:
            index, phase = Int32(self.cfg.ds_slots - 1), phase ^ 1
        return pipeline.PipelineState(self.cfg.ds_slots, Int32(0), index, phase)

    @cute.jit
    def tile(self, tile: Tile, keys, rings: Rings) -> Rings:
        """dQ lags a block behind, so that the warpgroups need not wait for each other's dS and one
        computes weights while the other's products run. It is added up while dK runs: the adder
        takes long to read its registers."""
        f, cfg, shape = self.f, self.cfg, self.shape
        now, written = rings
        f.acc_dK.fill(0.0)
        f.acc_dV.fill(0.0)
        head, m = tile.head, tile.m
        for i in cutlass.range(tile.blocks, unroll=1):
            acc_dQ = self.gradients(now, written, tile, m)
            warpgroup.wait_group(1)  # all but dK
            self.pipes.do.consumer_release(now)
            before = bwd_walk.before(shape, tile, head, m)
            head, m = bwd_walk.following(shape, tile, head, m)
            written.advance()
            if i > 0:  # after all that takes registers: those of dQ are not free for long
                self.add_dq(acc_dQ, tile, *before)
            warpgroup.wait_group(0)
            self.pipes.q.consumer_release(now)
            now.advance()
        self.pipes.v.consumer_release(keys)
        before = self.slot_before(written)
        self.pipes.ds.consumer_wait(before)
        acc_dQ = self.dq_of(before)
        warpgroup.wait_group(0)
        self.pipes.k.consumer_release(keys)
        self.add_dq(acc_dQ, tile, *bwd_walk.before(shape, tile, head, m))
        return Rings(now, written)

    @cute.jit
    def put(self, rX: cute.Tensor, mma, sX: cute.Tensor):
        """What lies in 16 bits in an accumulator's registers, to shared memory."""
        atom = cute.make_copy_atom(
            warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), sX.element_type
        )
        copy = cute.make_tiled_copy_C(atom, mma).get_slice(self.f.tidx)
        cute.copy(atom, copy.retile(rX), copy.partition_D(sX))

    @cute.jit
    def store(self, acc: cute.Tensor, mma, sX: cute.Tensor, scale: Float32):
        """An accumulator in 16 bits to shared memory."""
        acc.store(acc.load() * scale)
        self.put(rounded(acc, sX.element_type), mma, sX)

    def first_warp(self):
        """Of the warpgroup."""
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0

    def piece(self, i: int) -> Int32:
        """Of 64 columns of this warpgroup's dK and dV, next to each other, where the i-th is:
        where dS of its own keys was, so that the other's stores and products do not matter."""
        in_slot = self.cfg.tile_m // 64
        return (i // in_slot * self.cfg.warpgroups + self.f.wg) * in_slot + i % in_slot

    def pieces(self, first: int, width: int) -> cute.Tensor:
        """(64, width) from piece `first` on."""
        tile = self.smem.out[None, None, self.piece(first)]
        slot = 64 * self.cfg.tile_m * self.cfg.warpgroups  # from one to the next
        layout = cute.make_layout((64, (64, width // 64)), stride=(64, (1, slot)))
        return cute.make_tensor(tile.iterator, layout)

    @cute.jit
    def send(self, op: TmaOperand, first: cutlass.Constexpr, width: cutlass.Constexpr, tile: Tile):
        """64 keys of dK or dV on their way to global memory, by one warp."""
        gX = op.tensor[None, None, tile.kv_head, tile.batch]
        s, g = cpasync.tma_partition(
            op.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(self.smem.out, 0, 2),
            cute.group_modes(cute.local_tile(gX, (64, 64), (None, None)), 0, 2),
        )
        keys = tile.n_block * self.cfg.key_tiles + self.f.wg
        for i in cutlass.range_constexpr(width // 64):
            cute.copy(op.atom, s[None, self.piece(first + i)], g[None, keys, i])

    @cute.jit
    def finish(self, tile: Tile, scale: Float32, share: Int32):
        """dK and dV leave where dS was: K and V of the next tile are on their way."""
        cfg = self.cfg
        cute.arch.barrier(barrier_id=KEYS_BARRIER, number_of_threads=128 * cfg.warpgroups)
        whole = Boolean(True)
        if const_expr(cfg.shares):
            whole = bwd_parts.join(self, share)
        if whole:
            self.put_out(tile, scale)

    @cute.jit
    def put_out(self, tile: Tile, scale: Float32):
        cfg, f = self.cfg, self.f
        of_dk = cfg.width // 64  # pieces
        self.store(f.acc_dK, self.mmas.dk, self.pieces(0, cfg.width), scale)
        self.store(f.acc_dV, self.mmas.dv, self.pieces(of_dk, cfg.width_v), Float32(1.0))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=OUTPUT_BARRIER + f.wg, number_of_threads=128)
        if self.first_warp():
            self.send(self.x.dk, 0, cfg.width, tile)
            self.send(self.x.dv, of_dk, cfg.width_v, tile)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def wait_until_sent(self):
        """This warpgroup's dK and dV of the tile before have been read: dS may follow. That they
        are written, the end of the kernel says."""
        if self.first_warp():
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=OUTPUT_BARRIER + self.f.wg, number_of_threads=128)
