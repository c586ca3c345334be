"""FlashAttention-2 backward: a CTA has a block of keys of a KV head, and visits all queries that
see them.

for every head of the group, every block i of queries:
    S^T  = K Q_i^T,  dP^T = V dO_i^T
    P^T  = exp(S^T - LSE_i), 0 where masked
    dS^T = P^T * (dP^T - delta_i)
    dV  += P^T dO_i,  dK += dS^T Q_i
    dQ_i += dS K
then dK and dV leave through K's and V's place in shared memory.

Scores are computed transposed, so that P and dS are operands of dV and dK where they are, in
registers. key_warps share the keys. column_warps have the same keys: in S and dP they share the
queries, in dV and dK the columns, so each takes the P and dS of the others from shared memory,
where all of dS must be for dQ anyway. 16 queries, or columns, of each in turn: those of warp j
begin 16 j further on, an XOR of the lane's address.

A block has two barriers: its Q and dO are there and the dS before is read; its dS is there. A third
one where a ring of one stage must be free before it is filled.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_attn.kernels.ampere import epilogue, load, ptx
from cute_attn.kernels.ampere.bwd_operands import At, Inputs, Places, Visit
from cute_attn.kernels.ampere.bwd_storage import Storage
from cute_attn.kernels.ampere.products import STEP, accumulator, mma
from cute_attn.kernels.ampere.storage import TileLayout
from cute_attn.kernels.common import bwd_walk
from cute_attn.kernels.common.bits import fma
from cute_attn.kernels.common.bwd_walk import Shape, Tile
from cute_attn.kernels.common.layout import acc_as_operand_a

OF_S, OF_DP = 0, 1  # statistics


@dataclass(frozen=True)
class Worker:
    """A thread, with what it holds for one block of keys."""

    cfg: object
    problem: object
    x: Inputs
    shape: Shape
    tile: Tile
    smem: Storage
    at: Places
    scale_log2: Float32
    acc_dK: cute.Tensor  # ((2, 2, width/8/column_warps), key tiles, 1) fp32
    acc_dV: cute.Tensor
    tidx: Int32

    # Loads

    @cute.jit
    def load_rows(self, matrix: cute.Tensor, layout: TileLayout, sure: int, to: Int32, row: Int32):
        of_thread = load.source(matrix, layout, self.tidx)
        load.load(of_thread, layout, self.cfg.threads, sure, to, row, False)

    @cute.jit
    def load_keys(self):
        x, smem, row = self.x, self.smem, self.tile.n_block * self.cfg.tile_n
        kv = None, None, self.tile.kv_head, self.tile.batch
        sure, sure_v = self.cfg.sure, self.cfg.sure_v
        self.load_rows(x.gK[kv], smem.k, sure, self.at.base, row)
        self.load_rows(x.gV[kv], smem.v, sure_v, self.at.base + smem.v_start, row)

    @cute.jit
    def load_q(self, v: Visit, stage: Int32):
        """Q of a block and the statistics of its rows."""
        smem, at = self.smem, self.at
        gQ = self.x.gQ[None, None, v.head, self.tile.batch]
        to = at.base + smem.q_start + stage * smem.q.bytes
        self.load_rows(gQ, smem.q, self.cfg.sure, to, v.m * self.cfg.tile_m)
        words = self.x.statistics[None, v.m, v.head, self.tile.batch]
        to = at.base + smem.statistics_start + stage * smem.statistics_bytes
        for first in cutlass.range_constexpr(0, smem.statistics_bytes // 16, self.cfg.threads):
            i = first + self.tidx
            if i < smem.statistics_bytes // 16:
                ptx.cp_async(to + 16 * i, Int64(words.iterator.toint()) + 16 * i, Int32(16))

    @cute.jit
    def load_do(self, v: Visit, stage: Int32):
        gdO = self.x.gdO[None, None, v.head, self.tile.batch]
        to = self.at.base + self.smem.do_start + stage * self.smem.do.bytes
        self.load_rows(gdO, self.smem.do, self.cfg.sure_v, to, v.m * self.cfg.tile_m)

    @cute.jit
    def load_early(self, v: Visit, stage: Int32):
        """What has a slot of its own, beside the block before."""
        if const_expr(self.cfg.q_stages > 1):
            self.load_q(v, stage)
        if const_expr(self.cfg.do_stages > 1):
            self.load_do(v, stage)

    @cute.jit
    def load_late(self, v: Visit):
        """What has not."""
        if const_expr(self.cfg.q_stages == 1):
            self.load_q(v, Int32(0))
        if const_expr(self.cfg.do_stages == 1):
            self.load_do(v, Int32(0))

    def following(self, v: Visit) -> Visit:
        return Visit(*bwd_walk.following(self.shape, self.tile, v.head, v.m))

    # Matrix products

    @cute.jit
    def keys(self, layout: TileLayout, at: At, k: int) -> cute.Tensor:
        """16 columns of this warp's rows of a tile of keys, as A operands (8, key tiles)."""
        A = cute.make_rmem_tensor((8, self.cfg.key_tiles), self.x.gK.element_type)
        for m in cutlass.range_constexpr(self.cfg.key_tiles):
            down = m * self.cfg.key_warps * STEP * layout.pitch
            ptx.ldmatrix(A[None, m], layout.step(at.lane, k) + (at.start + down))
        return A

    @cute.jit
    def products(self, acc: cute.Tensor, A: cute.Tensor, layout: TileLayout, at: At, k: int):
        """acc (keys, queries) += keys of step k times those columns of the queries."""
        for n in cutlass.range_constexpr(self.cfg.step_m // STEP):
            B = cute.make_rmem_tensor(8, A.element_type)
            down = n * self.cfg.column_warps * STEP * layout.pitch
            ptx.ldmatrix(B, layout.step(at.lane, k) + (at.start + down))
            for m in cutlass.range_constexpr(self.cfg.key_tiles):
                for half in cutlass.range_constexpr(2):
                    mma(acc, m, 2 * n + half, A[None, m], B, half)

    @cute.jit
    def add_rows(self, acc: cute.Tensor, A: cute.Tensor, layout: TileLayout, at: At):
        """acc (keys, columns) += A (8, key tiles), of 16 queries, times their rows."""
        steps = layout.width // (STEP * self.cfg.column_warps)
        for n in cutlass.range_constexpr(steps):
            B = cute.make_rmem_tensor(8, A.element_type)
            address = layout.step(at.lane, n * self.cfg.column_warps) + at.start
            ptx.ldmatrix(B, address, transpose=True)
            for m in cutlass.range_constexpr(self.cfg.key_tiles):
                for half in cutlass.range_constexpr(2):
                    mma(acc, m, 2 * n + half, A[None, m], B, half)

    # Scores

    @cute.jit
    def statistics(self, which: int, start: Int32, part: int, c: int) -> cute.Tensor:
        """Of the two queries of group c whose scores this thread has."""
        found = cute.make_rmem_tensor(2, Float32)
        address = start + 4 * (which * self.cfg.tile_m + self.query_of(part, c))
        cute.autovec_copy(epilogue.shared(Float32, address, 2), found)
        return found

    @cute.jit
    def minus_delta(self, acc_dP: cute.Tensor, start: Int32, part: int):
        """What dP is added to."""
        for c in cutlass.range_constexpr(self.cfg.step_m // 8):
            of_dP = self.statistics(OF_DP, start, part, c)
            for m in cutlass.range_constexpr(self.cfg.key_tiles):
                for i in cutlass.range_constexpr(4):
                    acc_dP[(i % 2, i // 2, c), m, 0] = of_dP[i % 2]

    def query_of(self, part: int, c: int) -> int:
        """Which query of a block, from this warp's first on, begins group c of 8 in a part."""
        step = part * (self.cfg.step_m // STEP) + c // 2
        return STEP * self.cfg.column_warps * step + c % 2 * 8

    @cute.jit
    def weigh(self, S: cute.Tensor, start: Int32, part: int, groups: range):
        """P = exp(S - LSE), of groups of 8 queries."""
        for c in cutlass.range_constexpr(groups.start, groups.stop):
            of_S = self.statistics(OF_S, start, part, c)
            for m in cutlass.range_constexpr(self.cfg.key_tiles):
                for i in cutlass.range_constexpr(4):
                    score = S[(i % 2, i // 2, c), m, 0]
                    bits = fma(score, self.scale_log2, of_S[i % 2])
                    S[(i % 2, i // 2, c), m, 0] = cute.math.exp2(bits, fastmath=True)

    @cute.jit
    def mask(self, P: cute.Tensor, dP: cute.Tensor, v: Visit, part: int):
        """P = 0 where the query does not see the key, or there is no such key, and dP too, lest
        0 times what is not finite is NaN."""
        groups = self.cfg.step_m // 8
        for r in cutlass.range_constexpr(2 * self.cfg.key_tiles):
            tile, half = r // 2, r % 2
            key = self.at.key + tile * self.cfg.key_warps * STEP + 8 * half
            first = Int32(0)  # query that sees the key
            if const_expr(self.problem.causal):
                first = key - (self.shape.seqlen_k - self.shape.seqlen_q)
            first = first if key < self.shape.seqlen_k else Int32(2**30)
            first = first - v.m * self.cfg.tile_m - self.at.query
            for c in cutlass.range_constexpr(groups):
                for e in cutlass.range_constexpr(2):
                    i = e + 2 * half + 4 * c + 4 * groups * tile
                    unseen = self.query_of(part, c) + e < first
                    P[i] = Float32(0.0) if unseen else P[i]
                    dP[i] = Float32(0.0) if unseen else dP[i]

    @cute.jit
    def masked(self, v: Visit):
        """Whether some query of the block does not see some key of the tile."""
        last = (self.tile.n_block + 1) * self.cfg.tile_n
        partly = last > self.shape.seqlen_k
        if const_expr(self.problem.causal):
            first_query = v.m * self.cfg.tile_m + self.shape.seqlen_k - self.shape.seqlen_q
            partly = partly | (last - 1 > first_query)
        return partly

    @cute.jit
    def gradients(self, v: Visit, at_q: At, at_do: At, start: Int32, part: int):
        """P and dS of a part of the block's queries, in 16 bits. exp of the scores lies between
        the products of dP."""
        cfg, smem = self.cfg, self.smem
        steps, steps_v = self.problem.head_dim // STEP, self.problem.head_dim_v // STEP
        down = part * (cfg.step_m * cfg.column_warps)
        acc_S, acc_dP = (accumulator(cfg.key_tiles, cfg.step_m) for _ in range(2))
        acc_S.fill(0.0)
        for k in cutlass.range_constexpr(steps):
            A = self.keys(smem.k, self.at.k, k)
            self.products(acc_S, A, smem.q, at_q.down(down * smem.q.pitch), k)
        size, groups = cute.size(acc_S), cfg.step_m // 8
        self.minus_delta(acc_dP, start, part)
        for k in cutlass.range_constexpr(steps_v):
            A = self.keys(smem.v, self.at.v, k)
            self.products(acc_dP, A, smem.do, at_do.down(down * smem.do.pitch), k)
            self.weigh(
                acc_S, start, part, range(groups * k // steps_v, groups * (k + 1) // steps_v)
            )
        if self.masked(v):
            self.mask(acc_S, acc_dP, v, part)
        for i in cutlass.range_constexpr(size):
            acc_dP[i] = acc_S[i] * acc_dP[i]
        return [self.rounded(acc) for acc in (acc_S, acc_dP)]

    def rounded(self, acc: cute.Tensor) -> cute.Tensor:
        r = cute.make_rmem_tensor_like(acc, self.x.gQ.element_type)
        r.store(acc.load().to(self.x.gQ.element_type))
        return r

    @cute.jit
    def put(self, layout: TileLayout, to: At, values: cute.Tensor, first: int):
        """16-bit values of this thread, in the order of accumulators, into a tile of keys, from
        this warp's step `first` of 16 columns on. to: of the thread's first pair."""
        words = cute.recast_tensor(values, Int32)
        groups = cute.size(words) // (2 * self.cfg.key_tiles)
        for i in cutlass.range_constexpr(cute.size(words)):
            half, c, tile = i % 2, i // 2 % groups, i // 2 // groups
            right = layout.step(to.lane, self.cfg.column_warps * (first + c // 2)) ^ (16 * (c % 2))
            down = (tile * self.cfg.key_warps * STEP + 8 * half) * layout.pitch
            word = cute.make_rmem_tensor(1, Int32)
            word[0] = words[i]
            cute.autovec_copy(word, epilogue.shared(Int32, right + (to.start + down), 1))

    # dQ

    @cute.jit
    def dq_of(self) -> cute.Tensor:
        """This warp's rows and columns of dS K."""
        cfg, smem = self.cfg, self.smem
        row_warps, col_warps = cfg.dq_warps
        tiles, steps = cfg.tile_m // (STEP * row_warps), cfg.width // (STEP * col_warps)
        acc = accumulator(tiles, steps * STEP)
        acc.fill(0.0)
        for k in cutlass.range_constexpr(cfg.key_tiles * cfg.key_warps):
            A = cute.make_rmem_tensor((8, tiles), self.x.gQ.element_type)
            down = k * STEP * smem.weights.pitch
            for m in cutlass.range_constexpr(tiles):
                at = smem.weights.step(self.at.ds_t.lane, m * row_warps) + (
                    self.at.ds_t.start + down
                )
                ptx.ldmatrix(A[None, m], at, transpose=True)
            for n in cutlass.range_constexpr(steps):
                B = cute.make_rmem_tensor(8, A.element_type)
                down = self.at.k_t.start + k * STEP * smem.k.pitch
                at = smem.k.step(self.at.k_t.lane, n * col_warps) + down
                ptx.ldmatrix(B, at, transpose=True)
                for m in cutlass.range_constexpr(tiles):
                    for half in cutlass.range_constexpr(2):
                        mma(acc, m, 2 * n + half, A[None, m], B, half)
        return acc

    @cute.jit
    def add_dq(self, acc: cute.Tensor, v: Visit):
        """dQ of the block += this tile's part, where common/bwd_rows.py says."""
        cfg = self.cfg
        row_warps, col_warps = cfg.dq_warps
        at_once = min(cfg.tile_m, 64) // STEP  # tiles of 16 rows next to each other
        groups, part = acc.shape[0][2], self.x.dq[None, v.m, v.head, self.tile.batch]
        start = part.iterator.toint() + 4 * self.at.dq
        for m in cutlass.range_constexpr(acc.shape[1]):
            tile = m * row_warps
            down = tile // at_once * 64 * cfg.width + tile % at_once * 128
            for c in cutlass.range_constexpr(groups):
                group = c // 2 * 2 * col_warps + c % 2
                address = start + 4 * (down + group * at_once * 128)
                ptx.add_four(address, acc[(None, None, c), m, 0], cfg.dq_vectors)

    @cute.jit
    def counter_of(self, v: Visit) -> cute.Pointer:
        words = self.x.statistics[None, v.m, v.head, self.tile.batch]
        address = (words.iterator + self.cfg.statistics).toint()
        return cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)

    @cute.jit
    def add_in_turn(self, acc: cute.Tensor, v: Visit):
        """After those of other blocks of keys whose turn is before. Of tiles that are not done the
        one with the lowest ticket waits for none, as all tiles before it in a head's order have
        lower ones."""
        turn = bwd_walk.turn_of(self.cfg, self.problem.causal, self.shape, self.tile, v.m)
        if self.tidx == 0:
            bwd_walk.wait_until(self.counter_of(v), turn)
        cute.arch.barrier()
        self.add_dq(acc, v)
        # The barrier orders the CTA's reductions before this store, and a release is cumulative:
        # reductions after the acquire that reads it come after them.
        cute.arch.barrier()
        if self.tidx == 0:
            cute.arch.store(self.counter_of(v), turn + 1, sem="release", scope="gpu")

    # The algorithm

    @cute.jit
    def block(self, v: Visit, stage: Int32, more):
        """One block of queries; more: whether another one follows."""
        cfg, smem, at = self.cfg, self.smem, self.at
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        q_slot = stage if const_expr(cfg.q_stages > 1) else Int32(0)
        do_slot = stage if const_expr(cfg.do_stages > 1) else Int32(0)
        if more:
            self.load_early(self.following(v), 1 - stage)
        cute.arch.cp_async_commit_group()
        q, do = q_slot * smem.q.bytes, do_slot * smem.do.bytes
        if const_expr(cfg.narrows):
            if self.narrow(v):
                replace(self, cfg=replace(cfg, narrow=True)).work(v, q, do, stage, more)
            else:
                self.work(v, q, do, stage, more)
        else:
            self.work(v, q, do, stage, more)

    def barrier(self) -> cute.Pointer:
        address = self.at.base + self.smem.barrier_start
        return cute.make_ptr(Int64, address, cute.AddressSpace.smem, assumed_align=8)

    @cute.jit
    def announce(self):
        """This thread's P and dS of the block are in shared memory."""
        cute.arch.mbarrier_arrive(self.barrier())

    def narrow(self, v: Visit):
        """Whether the block's last query sees none but the first 16 keys of every warp."""
        seen = (v.m + 1) * self.cfg.tile_m + self.shape.seqlen_k - self.shape.seqlen_q
        return seen <= self.tile.n_block * self.cfg.tile_n + STEP * self.cfg.key_warps

    @cute.jit
    def work(self, v: Visit, q: Int32, do: Int32, stage: Int32, more):
        """What the block adds to dQ, dK and dV. q, do: where in the rings its rows are; stage: of
        two, in turn, whatever the rings have."""
        cfg, smem, at = self.cfg, self.smem, self.at
        slot = stage if const_expr(cfg.q_stages > 1) else Int32(0)
        start = at.statistics + slot * smem.statistics_bytes
        for part in cutlass.range_constexpr(cfg.parts):
            rP, rdS = self.gradients(v, at.q.down(q), at.do.down(do), start, part)
            first = part * (cfg.step_m // STEP)
            if const_expr(cfg.column_warps > 1):
                self.put(smem.weights, at.ds.down(smem.weights.bytes), rP, first)
            self.put(smem.weights, at.ds, rdS, first)
            if const_expr(cfg.split_barrier and part == cfg.parts - 1):
                self.announce()
            self.own_products(rP, rdS, at.q_t.down(q), at.do_t.down(do), part)
        if const_expr(cfg.split_barrier):
            cute.arch.mbarrier_wait(self.barrier(), stage)
        else:
            cute.arch.barrier()
        for i in cutlass.range_constexpr(1, cfg.column_warps):
            self.others_products(at.q_t.down(q), at.do_t.down(do), i)
        if const_expr(cfg.q_stages == 1 or cfg.do_stages == 1):
            cute.arch.barrier()
            if more:
                self.load_late(self.following(v))
            cute.arch.cp_async_commit_group()
        acc_dQ = self.dq_of()
        if const_expr(cfg.deterministic):
            self.add_in_turn(acc_dQ, v)
        else:
            self.add_dq(acc_dQ, v)

    @cute.jit
    def own_products(self, rP, rdS, at_q: At, at_do: At, part: int):
        """dV += P^T dO, dK += dS^T Q of the queries whose P and dS this warp holds."""
        cfg, smem = self.cfg, self.smem
        P, dS = acc_as_operand_a(rP), acc_as_operand_a(rdS)
        for s in cutlass.range_constexpr(cfg.step_m // STEP):
            down = self.query_of(part, 2 * s) + self.at.own
            self.add_rows(self.acc_dV, P[None, None, s], smem.do, at_do.down(down * smem.do.pitch))
            self.add_rows(self.acc_dK, dS[None, None, s], smem.q, at_q.down(down * smem.q.pitch))

    @cute.jit
    def others_products(self, at_q: At, at_do: At, i: int):
        """The same of another warp's, from shared memory."""
        cfg, smem, weights = self.cfg, self.smem, self.smem.weights
        other = (self.at.own // STEP) ^ i
        at_ds = At(weights.step(self.at.ds_a.lane, other), self.at.ds_a.start)
        for s in cutlass.range_constexpr(cfg.tile_m // (STEP * cfg.column_warps)):
            down = STEP * (s * cfg.column_warps + other)
            step = s * cfg.column_warps
            P = self.keys(weights, at_ds.down(weights.bytes), step)
            self.add_rows(self.acc_dV, P, smem.do, at_do.down(down * smem.do.pitch))
            dS = self.keys(weights, at_ds, step)
            self.add_rows(self.acc_dK, dS, smem.q, at_q.down(down * smem.q.pitch))

    @cute.jit
    def run(self):
        """All blocks of the tile."""
        cfg, shape, tile = self.cfg, self.shape, self.tile
        self.acc_dK.fill(0.0)
        self.acc_dV.fill(0.0)
        self.load_keys()
        head, m = tile.head, tile.m
        self.load_q(Visit(head, m), Int32(0))
        self.load_do(Visit(head, m), Int32(0))
        cute.arch.cp_async_commit_group()
        if const_expr(cfg.split_barrier):  # the first block's barrier is behind it
            if self.tidx == 0:
                cute.arch.mbarrier_init(self.barrier(), cfg.threads)
        stage, blocks = Int32(0), tile.blocks
        for i in cutlass.range(blocks, unroll=1):
            self.block(Visit(head, m), stage, i + 1 < blocks)
            head, m = bwd_walk.following(shape, tile, head, m)
            stage = 1 - stage

    @cute.jit
    def end(self, softmax_scale: Float32):
        """dK and dV leave."""
        x, smem, at, threads = self.x, self.smem, self.at, self.cfg.threads
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        dK = self.acc_dK
        for i in cutlass.range_constexpr(cute.size(dK)):
            dK[i] = dK[i] * softmax_scale
        self.put(smem.k, at.dk, self.rounded(dK), 0)
        self.put(smem.v, at.dv, self.rounded(self.acc_dV), 0)
        cute.arch.barrier()
        kv = None, None, self.tile.kv_head, self.tile.batch
        row = self.tile.n_block * self.cfg.tile_n
        epilogue.store(smem.k, threads, at.base, x.gdK[kv], row, self.tidx)
        epilogue.store(smem.v, threads, at.base + smem.v_start, x.gdV[kv], row, self.tidx)
