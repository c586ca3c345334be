"""A consumer warpgroup: FlashAttention forward over 64 query rows a tile.

for every KV block j, last to first:
    S  = Q K_j^T
    S  = -inf where masked
    P  = exp(S - m), m a running reference near the row maximum;  l = l e^(m-m') + rowsum P
    O  = O e^(m-m') + P V_j
O = O / l;  LSE = m + log l

Software pipeline: S of the next block is issued before O += P V of this one, so that the tensor
cores work while the scores become weights.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_attn.kernels.common import output, rare
from cute_attn.kernels.common.layout import acc_as_operand_a, acc_as_rows, operand_a_like
from cute_attn.kernels.common.mask import first_full_block, keys_seen, kv_block_end, mask_scores
from cute_attn.kernels.common.schedule import Shape
from cute_attn.kernels.common.softmax import KEPT, LOST, OnlineSoftmax
from cute_attn.kernels.hopper import epilogue, scheduler
from cute_attn.kernels.hopper.gemm import STEP, gemm
from cute_attn.kernels.hopper.operands import Inputs, Mmas, Smem, Tile

TURN_BARRIER = 1  # + warpgroup
OUTPUT_BARRIER = 4  # + warpgroup


class Fragments(NamedTuple):
    mmas: Mmas
    rQ: cute.Tensor  # descriptors (MMA, 1, head_dim/16, slots)
    rK: cute.Tensor  # descriptors (MMA, 1, head_dim/16, stages)
    rK_half: cute.Tensor  # the same of the first half of a block's keys
    rV: cute.Tensor  # descriptors (MMA, 1, tile_n/16, stages)
    acc_O: cute.Tensor  # (MMA, 1, 1) fp32
    P: cute.Tensor  # weights as A operand
    cS: cute.Tensor  # (row, col) of every score this thread owns
    tidx: Int32  # within the warpgroup
    wg: Int32


class Rows(NamedTuple):
    """What a warpgroup's 64 rows of a tile read."""

    first: Int32  # row
    begin: Int32  # their first KV block
    end: Int32  # one past their last KV block
    full: Int32  # blocks below need no element mask


@cute.jit
def make_fragments(cfg, problem, mmas: Mmas, smem: Smem, tidx, wg):
    qk, half, pv = [mma.get_slice(0) for mma in mmas]
    width = problem.tile_dim_v
    sVt = cute.composition(
        smem.v, cute.make_ordered_layout((width, cfg.tile_n, cfg.v_ring), order=(1, 0, 2))
    )
    first_half = (cfg.qk_widths[1], problem.tile_dim, cfg.kv_stages)
    sK_half = cute.local_tile(smem.k, first_half, (0, 0, 0))
    acc_S = cute.make_rmem_tensor(mmas.qk.partition_shape_C((64, cfg.tile_n)), Float32)
    return Fragments(
        mmas,
        qk.make_fragment_A(qk.partition_A(smem.q)),
        qk.make_fragment_B(qk.partition_B(smem.k)),
        half.make_fragment_B(half.partition_B(sK_half)),
        pv.make_fragment_B(pv.partition_B(sVt)),
        cute.make_rmem_tensor(mmas.pv.partition_shape_C((64, width)), Float32),
        operand_a_like(acc_S, smem.v.element_type),
        mmas.qk.get_slice(tidx).partition_C(cute.make_identity_tensor((64, cfg.tile_n))),
        tidx,
        wg,
    )


@dataclass(frozen=True)
class Consumer:
    cfg: object
    problem: object
    x: Inputs
    smem: Smem
    f: Fragments
    softmax: OnlineSoftmax
    pipes: object
    shape: Shape

    @cute.jit
    def take_token(self):
        """The right to issue matrix products, which passes from warpgroup to warpgroup."""
        if const_expr(self.cfg.ordered):
            self.await_turn()

    @cute.jit
    def pass_token(self):
        if const_expr(self.cfg.ordered):
            self.pass_turn()

    @cute.jit
    def await_turn(self):
        cute.arch.barrier(barrier_id=TURN_BARRIER + self.f.wg, number_of_threads=256)

    @cute.jit
    def pass_turn(self):
        after = self.f.wg + 1 if self.f.wg + 1 < self.cfg.warpgroups else 0
        cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + after, number_of_threads=256)

    @cute.jit
    def give_first_turn(self):
        if const_expr(self.cfg.ordered or self.cfg.queries_in_turn):
            if self.f.wg == self.cfg.warpgroups - 1:
                self.pass_turn()

    @cute.jit
    def scores(self) -> cute.Tensor:
        shape = self.f.mmas.qk.partition_shape_C((64, self.cfg.tile_n))
        return cute.make_rmem_tensor(shape, Float32)

    @property
    def qk_steps(self) -> int:
        return self.problem.head_dim // STEP

    @property
    def pv_steps(self) -> int:
        return self.cfg.tile_n // STEP

    @cute.jit
    def issue_qk(self, acc_S, slot, k):
        Q, K = self.f.rQ[None, None, None, slot], self.f.rK[None, None, None, k.index]
        gemm(self.f.mmas.qk, acc_S, Q, K, self.qk_steps, zero=True)

    @cute.jit
    def issue_qk_half(self, acc_S, slot, k):
        Q, K = self.f.rQ[None, None, None, slot], self.f.rK_half[None, None, None, k.index]
        gemm(self.f.mmas.qk_half, acc_S, Q, K, self.qk_steps, zero=True)

    @cute.jit
    def issue_pv(self, v):
        f = self.f
        V = f.rV[None, None, None, v.index]
        gemm(f.mmas.pv, f.acc_O, f.P, V, self.pv_steps, zero=False)

    @cute.jit
    def weigh_masked(self, acc_S, rows: Rows, block):
        """Mask what the first row, and so some row, does not see; then scores become weights."""
        key = block * self.cfg.tile_n
        if keys_seen(self.problem, rows.first, self.shape) < key + self.cfg.tile_n:
            mask_scores(self.problem, acc_S, self.f.cS, rows.first, key, self.shape)
        self.softmax.exact(acc_S)

    @cute.jit
    def keep_weights(self, acc_S):
        """P = 16-bit S, a k-step at a time so that two values share one conversion."""
        P = self.f.P
        S = acc_as_operand_a(acc_S, P.element_type.width)
        for i in cutlass.range_constexpr(cute.size(P, mode=[2])):
            P[None, None, i].store(S[None, None, i].load().to(P.element_type))

    @cute.jit
    def confine_nan(self, tile: Tile, rows: Rows):
        """Once a tile, when O has taken up all blocks that some of its rows see in part."""
        if const_expr(self.problem.causal):
            if rare.has_nan(self.f.acc_O) & (rows.first < self.shape.seqlen_q):
                head = tile.head // self.shape.q_per_kv
                key0 = rows.full * self.cfg.tile_n
                key_end = tile.kv_end * self.cfg.tile_n if self.cfg.split_kv else None
                rare.confine_nan(
                    self.problem, self.x, self.f, self.softmax, tile, head, rows.first, key0,
                    key_end, self.shape,
                )  # fmt: skip

    def queries(self, q, tile: Tile):
        """Where Q of the tile lies."""
        return q

    @cute.jit
    def rows_of(self, tile: Tile) -> Rows:
        row = tile.m_block * self.cfg.tile_m + self.f.wg * 64
        begin = scheduler.kv_begin(self.cfg, self.shape, tile)
        end = kv_block_end(self.cfg, self.problem, row + 64, self.shape)
        end = end if row < self.shape.seqlen_q else Int32(1)  # all rows past the end: least work
        if const_expr(self.cfg.split_kv):
            end = cutlass.max(cutlass.min(end, tile.kv_end), begin + 1)
        full = cutlass.min(first_full_block(self.cfg, self.problem, row, self.shape), end - 1)
        if const_expr(self.cfg.split_kv):
            full = cutlass.max(full, begin)
        return Rows(row, begin, end, full)

    @cute.jit
    def skip(self, k, v, count: Int32):
        """Blocks that other warpgroups read and this one does not. K and V go back in turn: the
        loader runs only one block ahead with K."""
        for _ in cutlass.range(count, unroll=1):
            self.take_token()
            self.pass_token()
            self.pipes.k.consumer_wait(k)
            self.pipes.k.consumer_release(k)
            self.pipes.v.consumer_wait(v)
            self.pipes.v.consumer_release(v)
            k.advance()
            v.advance()
        return k, v

    @cute.jit
    def begin(self, q, k, v, tile: Tile, rows: Rows):
        """First scores of a tile, and their weights; whether the scores are rough (block)."""
        if const_expr(self.cfg.queries_in_turn):
            # Before blocks are skipped: their slots come back when all have left them, and nobody
            # else begins before this warpgroup has passed the turn.
            self.await_turn()
            self.pipes.q.consumer_wait(q)
            self.pass_turn()
        k, v = self.skip(k, v, tile.kv_end - rows.end)
        if const_expr(not self.cfg.queries_in_turn):
            self.pipes.q.consumer_wait(q)
        self.pipes.k.consumer_wait(k)
        self.take_token()
        self.softmax.reset()
        if const_expr(self.problem.causal and self.cfg.halves):
            keys = keys_seen(self.problem, rows.first + 63, self.shape)
            if keys - (rows.end - 1) * self.cfg.tile_n <= self.cfg.tile_n // 2:
                self.first_half_block(q, k, rows)
            else:
                self.first_block(q, k, rows)
        else:
            self.first_block(q, k, rows)
        k.advance()
        self.f.acc_O.fill(0.0)
        return k, v, self.is_rough(rows)

    @cute.jit
    def is_rough(self, rows: Rows) -> Boolean:
        """Whether some row's first block says that scores may jump by more than `late` can take:
        a thread that sees a quarter of its keys, and all of them lie 2^120 below the best."""
        if const_expr(self.cfg.exact_max):
            return Boolean(True)
        C = acc_as_rows(self.f.cS)
        rough = Boolean(False)
        for r in cutlass.range_constexpr(2):
            keys = keys_seen(self.problem, rows.first + C[r, 0][0], self.shape)
            enough = keys - (rows.end - 1) * self.cfg.tile_n >= 8
            rough = rough | (enough & (self.softmax.row_sum[r] < 2.0**-120))
        return cute.arch.vote_any_sync(rough)

    @cute.jit
    def first_block(self, q, k, rows: Rows):
        acc_S = self.scores()
        self.issue_qk(acc_S, q.index, k)
        self.pass_token()
        warpgroup.wait_group(0)
        self.pipes.k.consumer_release(k)
        self.weigh_masked(acc_S, rows, rows.end - 1)
        self.keep_weights(acc_S)

    @cute.jit
    def first_half_block(self, q, k, rows: Rows):
        """No row sees more than the first half of the block's keys: the others weigh nothing."""
        acc_S = self.scores()
        shape = self.f.mmas.qk_half.partition_shape_C((64, self.cfg.tile_n // 2))
        half = cute.make_tensor(acc_S.iterator, cute.make_rmem_tensor(shape, Float32).layout)
        self.issue_qk_half(half, q.index, k)
        self.pass_token()
        warpgroup.wait_group(0)
        self.pipes.k.consumer_release(k)
        self.weigh_masked(half, rows, rows.end - 1)
        for i in cutlass.range_constexpr(cute.size(half), cute.size(acc_S)):
            acc_S[i] = Float32(0.0)
        self.keep_weights(acc_S)

    @cute.jit
    def products(self, q, k, v, block: Int32):
        """S of one block issued, then O += P V of the block before it; S is there on return."""
        acc_S = self.issue_products(q, k, v, block)
        self.await_scores()
        return acc_S, self.release_k(k)

    @cute.jit
    def issue_products(self, q, k, v, block: Int32) -> cute.Tensor:
        acc_S = self.scores()
        self.pipes.k.consumer_wait(k)
        self.take_token()
        self.issue_qk(acc_S, q.index, k)
        self.beside_scores(block)
        self.pipes.v.consumer_wait(v)
        self.issue_pv(v)
        self.pass_token()
        return acc_S

    @cute.jit
    def await_scores(self):
        warpgroup.wait_group(1 if self.cfg.overlap else 0)

    @cute.jit
    def release_k(self, k):
        self.pipes.k.consumer_release(k)
        k.advance()
        return k

    @cute.jit
    def beside_scores(self, block: Int32):
        """What there is to be done with O while the tensor core has S of this block to compute."""

    @cute.jit
    def masked_block(self, q, k, v, rows: Rows, block: Int32):
        """A block on the diagonal or at the end of the keys."""
        acc_S, k = self.products(q, k, v, block)
        self.weigh_masked(acc_S, rows, block)
        warpgroup.wait_group(0)
        self.pipes.v.consumer_release(v)
        v.advance()
        self.keep_weights(acc_S)
        self.softmax.rescale(self.f.acc_O)
        return k, v

    @cute.jit
    def block(self, q, k, v, tile: Tile, rows: Rows, block: Int32, rough: Boolean):
        """A block that every row sees whole. rough: this warp takes the maximum first."""
        acc_S, k = self.products(q, k, v, block)
        outcome = Int32(LOST)
        if not rough:
            outcome = self.softmax.late(acc_S)
        warpgroup.wait_group(0)
        self.pipes.v.consumer_release(v)
        v.advance()
        if outcome != KEPT:
            if outcome == LOST:  # here rather than before: P's registers are free now
                self.weigh_exactly(acc_S, tile, rows, block, rough)
                rough = Boolean(True)
            self.softmax.rescale(self.f.acc_O)
        self.keep_weights(acc_S)
        if block == rows.full - 1:
            self.confine_nan(tile, rows)
        return k, v, rough

    @cute.jit
    def weigh_exactly(self, acc_S, tile: Tile, rows: Rows, block: Int32, rough: Boolean):
        if not rough:  # softmax.late has overwritten the scores
            row0 = rows.first + cute.arch.warp_idx() % 4 * 16
            kv_head, key0 = tile.head // self.shape.q_per_kv, block * self.cfg.tile_n
            rare.scores_again(self.x, acc_S, tile, kv_head, row0, key0)
        self.softmax.exact(acc_S)

    @cute.jit
    def expect(self, rows: Rows):
        """What the blocks so far say of those that every row sees whole."""
        if const_expr(not self.cfg.exact_max):
            C = acc_as_rows(self.f.cS)
            for r in cutlass.range_constexpr(2):
                keys = keys_seen(self.problem, rows.first + C[r, 0][0], self.shape)
                if const_expr(self.cfg.split_kv):
                    keys = cutlass.min(keys, rows.end * self.cfg.tile_n)
                seen = keys - rows.full * self.cfg.tile_n
                keys = keys - rows.begin * self.cfg.tile_n
                self.softmax.expect(r, seen, keys, self.cfg.tile_n / 4)

    @cute.jit
    def blocks(self, q, k, v, tile: Tile, rows: Rows, rough: Boolean):
        """All blocks of a tile but the first, whose weights are there."""
        for i in cutlass.range(rows.end - 1 - rows.full, unroll=1):
            k, v = self.masked_block(q, k, v, rows, rows.end - 2 - i)
        self.expect(rows)
        for i in cutlass.range(rows.full - rows.begin, unroll=1):
            k, v, rough = self.block(q, k, v, tile, rows, rows.full - 1 - i, rough)
        return k, v

    @cute.jit
    def end(self, q, v, tile: Tile, rows: Rows):
        """The last O += P V of a tile; O and LSE leave. The tile's number comes back."""
        self.pipes.v.consumer_wait(v)
        self.take_token()
        self.issue_pv(v)
        self.pass_token()
        norm, log_sum = self.softmax.finish()
        statistics = [(self.x.lse, self.softmax.lse(log_sum))]
        if const_expr(self.cfg.split_kv):
            parts = self.x.parts
            statistics = [(parts.ref, self.softmax.ref), (parts.log_sum, log_sum)]
            statistics = [(to[None, None, None, tile.part], values) for to, values in statistics]
        for to, values in statistics:
            output.store_rows(to, values, self.f.cS, tile, rows.first, self.shape.seqlen_q)
        warpgroup.wait_group(0)
        self.pipes.v.consumer_release(v)
        v.advance()
        if rows.full == rows.begin:
            self.confine_nan(tile, rows)
        if const_expr(not epilogue.same_slots(self.problem)):
            cute.arch.barrier(barrier_id=OUTPUT_BARRIER + self.f.wg, number_of_threads=128)
        if const_expr(self.cfg.split_kv):
            epilogue.write_part(
                self.x, self.f, norm, tile, rows.first, self.shape.seqlen_q, self.pipes.o, q.index
            )
        else:
            output.normalise(self.f.acc_O, norm)
            epilogue.hand_over_output(self.smem, self.f, self.pipes.o, q.index)
        q.advance(self.cfg.warpgroups)
        return q, v, tile.number
