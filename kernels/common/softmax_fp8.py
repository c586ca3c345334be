"""Online softmax over scores that are products of FP8 operands.

A score's factor, softmax_scale * log2(e) * q_descale * k_descale, is one of a row and a block of
keys: it takes the place of the scale in the FFMA in front of exp2, and costs nothing. So does the
offset of the weights: e4m3 weights are 2^8 times as large as softmax's, at most 256 of 448, so that
small ones have bits left. The row sum is as much larger, O / l is not. Where weights come before
the maximum, it is 2^5: they may rise to 14 times that before the reference must.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cute_attn.kernels.common.bits import bits, bits_of, fma, word_of
from cute_attn.kernels.common.layout import acc_as_operand_a, acc_as_rows
from cute_attn.kernels.common.softmax import OnlineSoftmax

OFFSET = 8.0  # log2 of the largest weight, of e4m3 ones
OFFSET_LATE = 5.0  # the same where references stay as they are until a weight passes
# A thread's sum of a block's weights that these types hold, whatever its share: the largest number
# of e4m3; of fp16, less what a sum of many may have; of bf16, what leaves V room up to 2^80.
LARGEST = {"e4m3": 448.0, "fp16": 2.0**12, "bf16": 2.0**40}
TINY = 1e-37  # a factor of 0 would make NaN of what the mask has made -inf


@dataclass(frozen=True)
class Fp8Softmax(OnlineSoftmax):
    """ref is lower by the offset here: an FFMA negates it on the way, and adds nothing."""

    scale: cute.Tensor  # (2,) the row's share of the factor
    old: cute.Tensor  # (2,) log2 of fix
    new: cute.Tensor  # (2,) sum of the block's weights
    before: cute.Tensor  # (2,) row_sum without them
    exact_max: bool

    @property
    def offset(self) -> float:
        if self.problem.v_dtype != "e4m3":
            return 0.0  # wide enough as they are
        return OFFSET if self.exact_max else OFFSET_LATE

    @property
    def largest(self) -> Int32:
        """Its bits."""
        return Int32(bits_of(LARGEST[self.problem.v_dtype]))

    @cute.jit
    def prepare(self, acc_S: cute.Tensor, factors: cute.Tensor):
        """The factor of a row, from those of the block or of every 16 of its keys."""
        S, scales = acc_as_rows(acc_S), cute.make_rmem_tensor(2, Float32)
        self._negate_if_asked(S)
        factor = factors[0]
        if const_expr(self.problem.fine_k):
            self.scale_columns(S, factors)
            factor = Float32(1.0)
        for r in cutlass.range_constexpr(2):
            scale = self.scale[r] * factor
            scales[r] = Float32(TINY) if scale < TINY else scale  # a NaN stays
        return scales

    @cute.jit
    def distances(self, acc_S: cute.Tensor, factors: cute.Tensor):
        """Scores become their distances from the reference, or from 0 where a row has none yet."""
        scales, S = self.prepare(acc_S, factors), acc_as_rows(acc_S)
        for r in cutlass.range_constexpr(2):
            base = Float32(0.0) if self.ref[r] == -Float32.inf else self.ref[r]
            S[r, None].store(S[r, None].load() * scales[r] - base)

    @cute.jit
    def late_fp8(self, acc_S: cute.Tensor, words: cute.Tensor) -> Boolean:
        """Weights against the references as they are, in P's type, beside the distances; whether
        one may be too large for it, in this warp. All of a sum below the largest are below it
        too."""
        n = cute.size(acc_S) // cute.size(words)  # weights in a word
        S, sums = acc_as_operand_a(acc_S, 32 // n), cute.make_rmem_tensor(4, Float32)
        sums.fill(0.0)
        for i in cutlass.range_constexpr(cute.size(words)):
            w = cute.make_rmem_tensor(n, Float32)
            for j in cutlass.range_constexpr(n):
                w[j] = cute.math.exp2(S[n * i + j], fastmath=True)
                at = 2 * (i % 2) + j % 2  # words of the two rows take turns
                sums[at] = sums[at] + w[j]
            words[i] = word_of(self.problem.v_dtype, [w[j] for j in range(n)])
        over = Boolean(False)
        for r in cutlass.range_constexpr(2):
            self.new[r] = sums[2 * r] + sums[2 * r + 1]
            over = over | (bits(self.new[r]) > self.largest) | (self.ref[r] == -Float32.inf)
        return cute.arch.vote_any_sync(over)

    @cute.jit
    def raise_fp8(self, acc_S: cute.Tensor) -> Boolean:
        """Distances become weights against references raised to the maximum; whether one moved.
        Where late_fp8 found a sum too large but no weight is, there are many alike, and a higher
        reference lets the next ones pass; the small ones that this loses are of no weight beside
        them."""
        S, moved = acc_as_rows(acc_S), Boolean(False)
        for r in cutlass.range_constexpr(2):
            sums = cute.arch.warp_reduction(
                bits(self.new[r]), lambda a, b: cutlass.max(a, b), threads_in_group=4
            )
            peak = S[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
            up = cute.arch.warp_reduction_max(peak, threads_in_group=4) - self.offset
            empty = self.ref[r] == -Float32.inf
            raised = cute.arch.fmax(up, 0.0)
            raised = raised + 2.0 if (sums > self.largest) & (raised < 3.0) else raised
            up = up if empty else raised
            self.old[r] = Float32(0.0) if empty else -up
            self.ref[r] = up if empty else self.ref[r] + up
            moved = moved | (up != 0.0)
            self.new[r] = self.weigh_fp8(S, r, Float32(1.0), -up)
        return cute.arch.vote_any_sync(moved)

    @cute.jit
    def exact_fp8(self, acc_S: cute.Tensor, scales: cute.Tensor) -> Boolean:
        """Scores become weights against the new row maximum; whether a reference moved."""
        S, moved = acc_as_rows(acc_S), Boolean(False)
        for r in cutlass.range_constexpr(2):
            old = self.ref[r]
            scale = scales[r]
            peak = S[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
            peak = cute.arch.warp_reduction_max(peak, threads_in_group=4)
            top = cute.arch.fmax(fma(peak, scale, -self.offset), old)
            safe = Float32(0.0) if top == -Float32.inf else top  # a row may have seen no key yet
            self.old[r] = old - safe
            self.ref[r] = top
            moved = moved | (top > old)
            self.new[r] = self.weigh_fp8(S, r, scale, -safe)
        return cute.arch.vote_any_sync(moved)

    @cute.jit
    def add(self):
        """The block's weights into the sums, if no reference moved."""
        for r in cutlass.range_constexpr(2):
            self.before[r] = self.row_sum[r]
            self.row_sum[r] = self.row_sum[r] + self.new[r]

    @cute.jit
    def add_fixed(self):
        """After add, if one did."""
        for r in cutlass.range_constexpr(2):
            self.fix[r] = cute.math.exp2(self.old[r], fastmath=True)
            self.row_sum[r] = self.before[r] * self.fix[r] + self.new[r]

    @cute.jit
    def lower_sums(self):
        """Before add."""
        for r in cutlass.range_constexpr(2):
            self.fix[r] = cute.math.exp2(self.old[r], fastmath=True)
            self.row_sum[r] = self.row_sum[r] * self.fix[r]

    @cute.jit
    def scale_columns(self, S: cute.Tensor, factors: cute.Tensor):
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                S[r, c] = S[r, c] * factors[c // 4]  # a thread has 4 of 16 columns

    @cute.jit
    def weigh_fp8(self, S, r: cutlass.Constexpr[int], scale: Float32, bias: Float32) -> Float32:
        """Row r of S becomes weights; their sum."""
        S[r, None].store(cute.math.exp2(S[r, None].load() * scale + bias, fastmath=True))
        return S[r, None].load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)

    @cute.jit
    def finish_fp8(self):
        """(1 / row sum, log2 of the row sum) of every row; (0, -inf) if it saw no key."""
        norm, log_sum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=4)
            empty = total == 0.0
            norm[r] = Float32(0.0) if empty else cute.arch.rcp_approx(total)
            log_sum[r] = -Float32.inf if empty else cute.math.log2(total, fastmath=True)
        return norm, log_sum


def make_fp8_softmax(cfg, problem, scale_log2: Float32) -> Fp8Softmax:
    ref, row_sum, fix, unit, *more = (cute.make_rmem_tensor(2, Float32) for _ in range(8))
    limit, raises = (cute.make_rmem_tensor(2, Int32) for _ in range(2))
    return Fp8Softmax(
        ref, row_sum, fix, unit, limit, raises, scale_log2, problem, *more, cfg.exact_max
    )
