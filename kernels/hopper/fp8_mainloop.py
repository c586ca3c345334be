"""A consumer warpgroup of the FP8 forward: mainloop.py with scaled e4m3 operands.

    S  = Q K_j^T                              e4m3 x e4m3
    P  = exp2(c S - m + 8)                    c = softmax_scale log2(e) q_descale k_descale
    O  = O 2^(m' - m) + P V_j                 e4m3 x e4m3, or both in 16 bits and without the 8
O = O v_descale / l + v_shift;  LSE = ln2 (m + log2 l - 8) + softmax_scale q_dot_k_shift

With exact_max the maximum of a row is taken in every block; O is multiplied only where it moved.
Without, 5 takes the 8's place, and a block that every row sees whole is weighed against the maximum
of those before it; a warp that finds a sum too large for P's type weighs again. A NaN in V reaches
every row of a 64-row tile that reads its block, also those the mask hides it from.

The tensor core drops of every term what lies some 2^13 below the sum that it is added to: a sum of
many terms alike stops growing. With `promote` the sum in it is of a few blocks, O of fp32 ones.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_attn.kernels.common import output
from cute_attn.kernels.common.bits import any_of_threads, copied, kept, word_of
from cute_attn.kernels.common.layout import acc_as_operand_a, acc_as_rows
from cute_attn.kernels.common.mask import keys_seen, mask_scores
from cute_attn.kernels.common.merge import pair_at
from cute_attn.kernels.common.softmax import LN_2
from cute_attn.kernels.hopper import epilogue, scheduler
from cute_attn.kernels.hopper.gemm import STEP, STEP_8
from cute_attn.kernels.hopper.mainloop import OUTPUT_BARRIER, Consumer, Rows
from cute_attn.kernels.hopper.operands import NOTES, Tile

# Blocks after which those that needed their maximum are counted. With a mask the block before the
# first may show a row few keys, so that the first often needs it.
TRIED_FIRST, TRIED_FIRST_CAUSAL, TRIED = 2, 3, 8
TOO_MANY, TO_GO = 5, 16  # of TRIED, or all of the first; more than TRIED
VOTE_BARRIER = 7  # + warpgroup


@dataclass(frozen=True)
class Fp8Consumer(Consumer):
    at: cute.Tensor  # (2,) KV head and batch of the tile
    k_factors: cute.Tensor  # (1,) address of that head's factors of K
    total: cute.Tensor  # what O was when the tensor core's sum began anew, if it does

    @property
    def few_registers(self) -> bool:
        return self.cfg.few_registers(self.problem.tile_dim_v)

    @property
    def room_for_columns(self) -> bool:
        """Whether S's registers hold V's factors until the last product is there."""
        p = self.problem
        if self.cfg.promote:
            return False
        of_scores = self.cfg.tile_n // 2
        shift_fits = not p.channels and p.tile_dim_v // 4 <= of_scores and p.dtype != "e4m3"
        return p.tile_dim_v <= 128 or (self.few_registers and shift_fits)

    @property
    def qk_steps(self) -> int:
        return self.problem.tile_dim // STEP_8

    @property
    def pv_steps(self) -> int:
        return self.cfg.tile_n // (STEP_8 if self.f.P.element_type.width == 8 else STEP)

    @cute.jit
    def scored(self, q, k, v, block: Int32):
        """products, and the factors of the block's keys, loaded while they run, or before where
        registers are scarce: ptxas spills a few otherwise."""
        early = self.cfg.promote or self.problem.fine_k
        if const_expr(early):
            factors = self.factors(block)
        acc_S = self.issue_products(q, k, v, block)
        if const_expr(not early):
            factors = self.factors(block)
        if const_expr(self.few_registers):
            C = acc_as_rows(self.afresh().f.cS)
            for r in cutlass.range_constexpr(2):
                self.softmax.scale[r] = self.smem.rows[self.f.wg * 64 + C[r, 0][0]]
        self.await_scores()
        return acc_S, factors

    @cute.jit
    def factors(self, block: Int32) -> cute.Tensor:
        """What belongs to a block's keys of the scores' factor."""
        scales = self.x.scales
        address = self.k_factors[0]
        if const_expr(self.few_registers):
            address = self.noted(0)
        first = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
        k = cute.make_tensor(first, cute.select(scales.k.layout, mode=[0]))
        count = self.cfg.tile_n // 16 if const_expr(self.problem.fine_k) else 1
        found = cute.make_rmem_tensor(count, Float32)
        if const_expr(self.problem.fine_k):
            last = cute.ceil_div(self.shape.seqlen_k, 16) - 1
            for i in cutlass.range_constexpr(count):
                found[i] = k[cutlass.min(block * count + i, last)]
        else:
            found[0] = k[block >> scales.k_shift]
        return found

    @cute.jit
    def weigh_masked(self, acc_S, rows: Rows, block: Int32):
        self.weigh_masked_by(acc_S, rows, block, self.factors(block))
        self.softmax.add()

    @cute.jit
    def weigh_masked_by(self, acc_S, rows: Rows, block: Int32, factors: cute.Tensor) -> Boolean:
        key = block * self.cfg.tile_n
        if keys_seen(self.problem, rows.first, self.shape) < key + self.cfg.tile_n:
            mask_scores(self.problem, acc_S, self.f.cS, rows.first, key, self.shape)
        return self.softmax.exact_fp8(acc_S, self.softmax.prepare(acc_S, factors))

    @cute.jit
    def begin(self, q, k, v, tile: Tile, rows: Rows):
        return self.afresh().start(q, k, v, tile, rows)

    @cute.jit
    def start(self, q, k, v, tile: Tile, rows: Rows):
        self.at[0], self.at[1] = tile.head // self.shape.q_per_kv, tile.batch
        C, scales = acc_as_rows(self.f.cS), self.x.scales
        self.k_factors[0] = kept(scales.k[None, self.at[0], self.at[1]].iterator.toint())
        for r in cutlass.range_constexpr(2):
            row = cutlass.min(rows.first + C[r, 0][0], self.shape.seqlen_q - 1)
            descale = scales.q[row, tile.head // scales.q_heads, tile.batch]
            self.softmax.scale[r] = self.softmax.scale_log2 * descale
        if const_expr(self.few_registers):
            cute.arch.sync_warp()  # the tile before has read them
            for r in cutlass.range_constexpr(2):
                self.smem.rows[self.f.wg * 64 + C[r, 0][0]] = self.softmax.scale[r]
            self.note(tile)
            cute.arch.sync_warp()
        self.total.fill(0.0)
        return Consumer.begin(self, q, k, v, tile, rows)

    @cute.jit
    def is_rough(self, rows: Rows) -> Boolean:
        return Boolean(False)

    @cute.jit
    def beside_scores(self, block: Int32):
        """Every so many blocks, by their place among the keys alone: a row's bits must not depend
        on other tiles."""
        if const_expr(self.cfg.promote):
            if block & (self.cfg.promote - 1) == 0:
                self.total.store(self.total.load() + self.f.acc_O.load())
                self.f.acc_O.fill(0.0)

    @cute.jit
    def masked_block(self, q, k, v, rows: Rows, block: Int32):
        acc_S, factors = self.scored(q, k, v, block)
        k = self.release_k(k)
        moved = self.afresh().weigh_masked_by(acc_S, rows, block, factors)
        v = self.take_up(acc_S, v, moved)
        return k, v

    @cute.jit
    def block(self, q, k, v, block: Int32):
        acc_S, factors = self.scored(q, k, v, block)
        k = self.release_k(k)
        scales = self.softmax.prepare(acc_S, factors)
        moved = self.softmax.exact_fp8(acc_S, scales)
        v = self.take_up(acc_S, v, moved)
        return k, v

    @cute.jit
    def late_block(self, q, k, v, block: Int32, failures: Int32):
        """block without a maximum, unless this warp needs one."""
        acc_S, factors = self.scored(q, k, v, block)
        k = self.release_k(k)
        self.softmax.distances(acc_S, factors)
        words = self.words()
        if self.softmax.late_fp8(acc_S, words):
            failures += 1
            self.after_late(acc_S, words)
        self.softmax.add()
        v = self.release_v(v)
        self.place(words)
        return k, v, failures

    @cute.jit
    def after_late(self, acc_S, words):
        moved = self.softmax.raise_fp8(acc_S)
        self.cast_into(words, acc_S)
        warpgroup.wait_group(0)
        if moved:
            self.softmax.lower_sums()
            self.rescale_output()

    @cute.jit
    def take_up(self, acc_S, v, moved: Boolean):
        """Once the product before is there, O and P are free."""
        early = const_expr(self.f.P.element_type.width == 8)
        words = self.words()
        if const_expr(early):
            self.cast_into(words, acc_S)
        self.softmax.add()
        if moved:  # has a wait of its own: ptxas moves one without a branch up, before the weights
            self.rescale()
        v = self.release_v(v)
        if const_expr(early):
            self.place(words)
        else:
            self.keep_weights(acc_S)
        return v

    @cute.jit
    def release_v(self, v):
        warpgroup.wait_group(0)
        self.pipes.v.consumer_release(v)
        v.advance()
        return v

    @cute.jit
    def words(self) -> cute.Tensor:
        """P, but not yet in the registers that the product before still reads: if those were
        written, ptxas would have products wait for each other."""
        return cute.make_rmem_tensor(cute.recast_tensor(self.f.P, Int32).layout, Int32)

    @cute.jit
    def cast_into(self, words: cute.Tensor, acc_S):
        width = self.f.P.element_type.width
        S, n = acc_as_operand_a(acc_S, width), 32 // width
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = word_of(self.problem.v_dtype, [S[n * i + j] for j in range(n)])

    @cute.jit
    def place(self, words: cute.Tensor):
        P = cute.recast_tensor(self.f.P, Int32)
        for i in cutlass.range_constexpr(cute.size(P)):
            P[i] = copied(words[i])

    @cute.jit
    def rescale(self):
        warpgroup.wait_group(0)
        self.softmax.add_fixed()
        self.rescale_output()

    @cute.jit
    def rescale_output(self):
        self.softmax.rescale(self.f.acc_O)
        if const_expr(self.cfg.promote):
            self.softmax.rescale(self.total)

    @cute.jit
    def blocks(self, q, k, v, tile: Tile, rows: Rows, rough: Boolean):
        for i in cutlass.range(rows.end - 1 - rows.full, unroll=1):
            k, v = self.masked_block(q, k, v, rows, rows.end - 2 - i)
        block = rows.full - 1
        if const_expr(not self.cfg.exact_max):
            k, v, block = self.late_blocks(q, k, v, block)
        for i in cutlass.range(block + 1, unroll=1):
            k, v = self.block(q, k, v, block - i)
        return k, v

    @cute.jit
    def late_blocks(self, q, k, v, block: Int32):
        """From this one down, as many as most warps weigh without a maximum; the next one."""
        rough = Boolean(False)
        first = TRIED_FIRST_CAUSAL if const_expr(self.problem.causal) else TRIED_FIRST
        # In one register: blocks to go before failures are counted, and failures
        state = cutlass.min(block + 1, first) * TO_GO + TOO_MANY - first
        while (block >= 0) & (not rough):
            while state >= TO_GO:
                k, v, state = self.late_block(q, k, v, block, state - TO_GO)
                block -= 1
            rough = self.in_some_warp(state >= TOO_MANY)
            state = cutlass.min(block + 1, TRIED) * TO_GO
        return k, v, block

    @cute.jit
    def in_some_warp(self, condition: Boolean) -> Boolean:
        """Of this warpgroup, whose warps take the same way: products are the warpgroup's."""
        return any_of_threads(condition, VOTE_BARRIER + self.f.wg, 128)

    def queries(self, q, tile: Tile):
        return scheduler.q_state(self.cfg, tile, self.f.wg) if self.few_registers else q

    @cute.jit
    def note(self, tile: Tile):
        """What the tile's end and its blocks would keep in registers."""
        notes = self.smem.notes
        values = self.k_factors[0], tile.m_block, tile.head, tile.batch, tile.number
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(NOTES):
                notes[i, consumer_warp()] = Int64(values[i])

    def noted(self, i: int) -> Int64:
        return self.smem.notes[i, consumer_warp()]

    @cute.jit
    def end(self, q, v, tile: Tile, rows: Rows):
        c = self.afresh()
        if const_expr(self.few_registers):
            m_block, head, batch, number = [Int32(self.noted(i)) for i in range(1, NOTES)]
            tile = Tile(m_block, head, batch, Int32(0), Int32(0), number)
            q = self.queries(q, tile)
            rows = rows._replace(first=m_block * self.cfg.tile_m + self.f.wg * 64)
            self.at[0], self.at[1] = head // self.shape.q_per_kv, batch
        return c.finish(q, v, tile, rows)

    def afresh(self) -> "Fp8Consumer":
        """Of a thread index that the compiler takes for another: what it makes of the first would
        wait in registers all the way."""
        if not self.few_registers:
            return self
        tidx = copied(cute.arch.thread_idx()[0]) & 127
        keys = cute.make_identity_tensor((64, self.cfg.tile_n))
        cS = self.f.mmas.qk.get_slice(tidx).partition_C(keys)
        return replace(self, f=self.f._replace(tidx=tidx, cS=cS))

    @cute.jit
    def finish(self, q, v, tile: Tile, rows: Rows):
        self.pipes.v.consumer_wait(v)
        self.take_token()
        self.issue_pv(v)
        self.pass_token()
        norm, log_sum = self.softmax.finish_fp8()
        lse = self.softmax.lse(log_sum)
        self.shift_lse(lse, tile, rows)
        seqlen_q = self.shape.seqlen_q
        output.store_rows(self.x.lse, lse, self.f.cS, tile, rows.first, seqlen_q)
        times, plus = self.of_channels()  # loaded while the product runs
        warpgroup.wait_group(0)
        self.pipes.v.consumer_release(v)
        v.advance()
        if const_expr(self.cfg.promote):
            self.f.acc_O.store(self.f.acc_O.load() + self.total.load())
        self.scale_output(norm, times, plus)
        if const_expr(not same_slots(self.problem)):
            cute.arch.barrier(barrier_id=OUTPUT_BARRIER + self.f.wg, number_of_threads=128)
        if const_expr(self.x.rounding is not None):
            epilogue.measure(self.x.rounding.amax, self.f, rows.first, seqlen_q)
            epilogue.hand_over_codes(self.x, self.smem, self.f, self.pipes.o, q.index)
        else:
            epilogue.hand_over_output(self.smem, self.f, self.pipes.o, q.index)
        q.advance(self.cfg.warpgroups)
        return q, v, tile.number

    @cute.jit
    def shift_lse(self, lse: cute.Tensor, tile: Tile, rows: Rows):
        """Scores of keys that a vector was taken off are all too low by q times that vector."""
        C = acc_as_rows(self.f.cS)
        sign = -LN_2 if const_expr(self.problem.negative_scale) else LN_2
        for r in cutlass.range_constexpr(2):
            row = cutlass.min(rows.first + C[r, 0][0], self.shape.seqlen_q - 1)
            dot = self.x.scales.q_dot[row, tile.head, tile.batch]
            shifted = lse[r] + dot * (self.softmax.scale_log2 * sign)
            lse[r] = lse[r] if lse[r] == -Float32.inf else shifted

    @cute.jit
    def of_channels(self):
        """V's scales and V's shift of this thread's columns: one number where all share it, none
        where there is no shift."""
        scales, first = self.x.scales, acc_as_rows(self.f.cS)[0, 0][1]
        found = []
        for given, values in (
            (self.problem.channels, scales.v),
            (self.problem.v_shift, scales.v_shift),
        ):
            of_head = values[None, self.at[0], self.at[1]]
            count = self.problem.tile_dim_v // 4 if const_expr(given) else 1
            x = cute.make_rmem_tensor(count, Float32)
            if const_expr(given and self.room_for_columns):
                x.fill(0.0)
                for c in cutlass.range_constexpr(0, count, 2):
                    if first + 4 * c < of_head.shape[0]:  # head dims are multiples of 16
                        pair = cute.make_tensor(x.iterator + c, cute.make_layout(2))
                        cute.autovec_copy(pair_at(of_head, first + 4 * c), pair)
            elif const_expr(not given):
                x[0] = of_head[0]
            found.append(x)
        return found[0], found[1]

    @cute.jit
    def scale_output(self, norm: cute.Tensor, times: cute.Tensor, plus: cute.Tensor):
        """O / l, times V's scale and plus V's shift; 0 for a row that has seen no key."""
        O = acc_as_rows(self.f.acc_O)
        if const_expr(not self.problem.channels):
            for r in cutlass.range_constexpr(2):
                norm[r] = norm[r] * times[0]
        if const_expr(not (self.problem.channels or self.problem.v_shift)):
            output.normalise(self.f.acc_O, norm)
        elif const_expr(self.room_for_columns):
            for r in cutlass.range_constexpr(2):
                seen = norm[r] != 0.0
                for c in cutlass.range_constexpr(cute.size(O, mode=[1])):
                    factor = norm[r] * times[c] if const_expr(self.problem.channels) else norm[r]
                    shift = plus[c] if const_expr(self.problem.v_shift) else Float32(0.0)
                    value = O[r, c] * factor + shift
                    O[r, c] = value if seen else Float32(0.0)
        else:
            self.scale_by_pairs(O, norm)

    @cute.jit
    def scale_by_pairs(self, O: cute.Tensor, norm: cute.Tensor):
        scales, first = self.x.scales, acc_as_rows(self.f.cS)[0, 0][1]
        scale = scales.v[None, self.at[0], self.at[1]]
        shift = scales.v_shift[None, self.at[0], self.at[1]]
        for c in cutlass.range_constexpr(0, cute.size(O, mode=[1]), 2):
            times = channel_pair(scale, first, c, 1.0, self.problem.channels)
            plus = channel_pair(shift, first, c, 0.0, self.problem.v_shift)
            for r in cutlass.range_constexpr(2):
                seen = norm[r] != 0.0
                for i in cutlass.range_constexpr(2):
                    value = O[r, c + i] * (norm[r] * times[i]) + plus[i]
                    O[r, c + i] = value if seen else Float32(0.0)


@cute.jit
def channel_pair(
    values: cute.Tensor,
    first: Int32,
    c: cutlass.Constexpr[int],
    default: cutlass.Constexpr[float],
    given: cutlass.Constexpr[bool],
):
    """values of the two channels that a thread's columns c and c + 1 are; head dims are multiples
    of 16, so that both are there or neither."""
    pair = cute.make_rmem_tensor(2, Float32)
    pair.fill(default)
    if const_expr(given):
        if 4 * c < values.shape[0]:
            cute.autovec_copy(pair_at(values, first + 4 * c), pair)
    return pair


def consumer_warp() -> Int32:
    """Computed where it stands."""
    return (copied(cute.arch.thread_idx()[0]) >> 5) - 4


def same_slots(problem) -> bool:
    """epilogue.same_slots where O's elements are twice as wide as Q's, or as wide."""
    if problem.dtype == "e4m3":
        return problem.tile_dim == problem.tile_dim_v
    return problem.tile_dim % 128 == 0 and problem.tile_dim_v % 64 == 0
