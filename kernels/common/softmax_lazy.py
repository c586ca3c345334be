"""Online softmax whose references follow the row maxima at a distance.

Weights are taken against a reference that need not be the row maximum: O / l is the same. It is the
maximum when it is set, and moves again only when a score of the warp's rows lies too far above its
own. Few blocks after the first then cost an exchange between threads or a rescaling of O.

How far is too far: a weight other than 1 is rounded in P, by up to half a unit in the last place,
while the one of the maximum itself is exact. That shows in O as far as the key has a large share
of its row. What may have more than SHARE of the weights so far becomes the reference.

Scores are looked at before they become weights, and those may be taken a few at a time: nothing
between exp and the matrix product that reads them keeps the two from overlapping.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr

from cute_attn.kernels.common.bits import fma
from cute_attn.kernels.common.layout import acc_as_rows
from cute_attn.kernels.common.softmax import LN_2, as_kept

SHARE = 0.25
FARTHEST = 8.0  # binades: fp16 weights stay far below 65504


@dataclass(frozen=True)
class LazySoftmax:
    ref: cute.Tensor  # (rows,) running reference of scale_log2 * scores; 0 if no key was seen
    limit: cute.Tensor  # (rows,) score above which it moves; -inf if no key was seen
    row_sum: cute.Tensor  # (rows,) running sum of weights, this thread's columns only
    unit: cute.Tensor  # (rows,) weight of the maximum: 1 up to the rounding of ref, which P loses
    scale_log2: Float32  # |softmax_scale| * log2(e)
    problem: object
    exact: bool  # every new maximum becomes the reference

    @property
    def fine(self) -> bool:
        """Whether P is finer than scores in the thousands, whose ref fp32 rounds by 2^-12."""
        return self.problem.dtype == "fp16"

    @property
    def rows(self) -> int:
        """That a thread owns: 2 in every 16 that its warp has."""
        return cute.size(self.ref)

    @cute.jit
    def reset(self):
        self.ref.fill(0.0)
        self.limit.fill(-Float32.inf)
        self.row_sum.fill(0.0)
        self.unit.fill(1.0)

    @cute.jit
    def look(self, acc_S: cute.Tensor, acc_O: cute.Tensor):
        """At the scores of a block: references, sums and O are ready for their weights then."""
        S, peaks, high = acc_as_rows(acc_S), cute.make_rmem_tensor(self.rows, Float32), False
        for r in cutlass.range_constexpr(self.rows):
            if const_expr(self.problem.negative_scale):
                S[r, None].store(-S[r, None].load())
            peaks[r] = S[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
            high = high | (fma(peaks[r], self.scale_log2, -self.limit[r]) > 0.0)
        if cute.arch.vote_any_sync(Boolean(high)):
            self.follow(peaks, acc_O)

    @cute.jit
    def follow(self, peaks: cute.Tensor, acc_O: cute.Tensor):
        """References become the row maxima."""
        O = acc_as_rows(acc_O)
        for r in cutlass.range_constexpr(self.rows):
            old, none_yet = self.ref[r], self.limit[r] == -Float32.inf
            peak = cute.arch.warp_reduction_max(peaks[r], threads_in_group=4)
            top = -Float32.inf if none_yet else old
            top = cute.arch.fmax(peak * self.scale_log2, top)
            self.ref[r] = Float32(0.0) if top == -Float32.inf else top
            if const_expr(self.fine):
                unit = cute.math.exp2(fma(peak, self.scale_log2, -top), fastmath=True)
                self.unit[r] = unit if none_yet | (top > old) else self.unit[r]
            fix = cute.math.exp2(old - self.ref[r], fastmath=True)
            fix = Float32(0.0) if none_yet else fix
            self.row_sum[r] = self.row_sum[r] * fix
            self.limit[r] = top + self.distance(r)
            O[r, None].store(O[r, None].load() * fix)

    @cute.jit
    def distance(self, r: cutlass.Constexpr[int]) -> Float32:
        """How far above the reference a score has SHARE of the weights so far, of which this
        thread has a quarter."""
        distance = Float32(0.0)
        if const_expr(not self.exact):
            share = cute.math.log2(self.row_sum[r] * (4 * SHARE), fastmath=True)
            distance = cute.arch.fmin(cute.arch.fmax(share, 0.0), FARTHEST)
        return distance

    @cute.jit
    def weigh(self, scores: cute.Tensor, first: cutlass.Constexpr[int]):
        """Scores become weights. scores: pairs of columns of the rows first and first + 1 in turn,
        as an A operand has them."""
        for i in cutlass.range_constexpr(cute.size(scores)):
            r = first + i // 2 % 2
            x = fma(scores[i], self.scale_log2, -self.ref[r])
            scores[i] = cute.math.exp2(x, fastmath=True)
            self.row_sum[r] = self.row_sum[r] + scores[i]

    @cute.jit
    def finish(self):
        """(1 / row sum, log-sum-exp in natural log) of every row; (0, -inf) if it saw no key."""
        norm, lse = (cute.make_rmem_tensor(self.rows, Float32) for _ in range(2))
        for r in cutlass.range_constexpr(self.rows):
            total = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=4)
            empty = total == 0.0
            norm[r] = Float32(0.0) if empty else cute.arch.rcp_approx(total)
            if const_expr(self.fine):
                norm[r] = norm[r] * as_kept(self.unit[r])
            whole = fma(self.ref[r], LN_2, cute.math.log2(total, fastmath=True) * LN_2)
            lse[r] = -Float32.inf if empty else whole
        return norm, lse


def make_lazy_softmax(problem, scale_log2: Float32, rows: int, exact: bool) -> LazySoftmax:
    ref, limit, row_sum, unit = (cute.make_rmem_tensor(rows, Float32) for _ in range(4))
    return LazySoftmax(ref, limit, row_sum, unit, scale_log2, problem, exact)
