"""Online softmax as FlashAttention-1 has it: a block's row maxima first, then its weights and their
sums; O is brought up to date in every block, and divided by the row sums if it is kept normalised.

A block takes three steps, so that warps may share rows and tell each other maxima and sums between:

    factor = follow(peaks of the block's scores)    O * factor is ready for the block's weights
    add(sums of the block's weights)
    after()                                         (O * factor + P V) * after is normalised
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from cute_attn.kernels.common.bits import fma
from cute_attn.kernels.common.layout import acc_as_rows
from cute_attn.kernels.common.softmax import LN_2
from cute_attn.kernels.common.softmax_lazy import LazySoftmax


@dataclass(frozen=True)
class StepSoftmax:
    ref: cute.Tensor  # (rows,) running maximum of scale_log2 * scores; 0 if no key was seen
    row_sum: cute.Tensor  # (rows,) of the block's weights, this thread's columns only
    total: cute.Tensor  # (rows,) of all weights so far; 0 if no key was seen
    scale_log2: Float32  # softmax_scale * log2(e)
    divides: bool  # O is kept normalised

    @property
    def rows(self) -> int:
        """That a thread owns: 2 in every 16 that its warp has."""
        return cute.size(self.ref)

    @cute.jit
    def reset(self):
        for t in (self.ref, self.row_sum, self.total):
            t.fill(0.0)

    @cute.jit
    def peaks(self, acc_S: cute.Tensor) -> cute.Tensor:
        """Row maxima of the scores."""
        S, peaks = acc_as_rows(acc_S), cute.make_rmem_tensor(self.rows, Float32)
        for r in cutlass.range_constexpr(self.rows):
            peak = S[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
            peaks[r] = cute.arch.warp_reduction_max(peak, threads_in_group=4)
        return peaks

    @cute.jit
    def follow(self, peaks: cute.Tensor) -> cute.Tensor:
        """References become the maxima of all keys so far; what O is then to be multiplied with."""
        factor = cute.make_rmem_tensor(self.rows, Float32)
        for r in cutlass.range_constexpr(self.rows):
            old, none_yet = self.ref[r], self.total[r] == 0.0
            top = -Float32.inf if none_yet else old
            top = cute.arch.fmax(peaks[r] * self.scale_log2, top)
            self.ref[r] = Float32(0.0) if top == -Float32.inf else top
            fix = cute.math.exp2(old - self.ref[r], fastmath=True)
            fix = Float32(0.0) if none_yet else fix
            self.total[r] = self.total[r] * fix
            factor[r] = self.total[r] if const_expr(self.divides) else fix
            self.row_sum[r] = Float32(0.0)
        return factor

    weigh = LazySoftmax.weigh  # against references and into sums of the same names

    @cute.jit
    def sums(self) -> cute.Tensor:
        """Row sums of the block's weights."""
        sums = cute.make_rmem_tensor(self.rows, Float32)
        for r in cutlass.range_constexpr(self.rows):
            sums[r] = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=4)
        return sums

    @cute.jit
    def add(self, sums: cute.Tensor):
        for r in cutlass.range_constexpr(self.rows):
            self.total[r] = self.total[r] + sums[r]

    @cute.jit
    def after(self) -> cute.Tensor:
        """1 / row sums so far; 0 where no key was seen."""
        factor = cute.make_rmem_tensor(self.rows, Float32)
        for r in cutlass.range_constexpr(self.rows):
            total = self.total[r]
            factor[r] = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total)
        return factor

    @cute.jit
    def finish(self):
        """(What O is still to be multiplied with, log-sum-exp in natural log) of every row."""
        norm, lse = self.after(), cute.make_rmem_tensor(self.rows, Float32)
        if const_expr(self.divides):
            norm.fill(1.0)
        for r in cutlass.range_constexpr(self.rows):
            total = self.total[r]
            whole = fma(self.ref[r], LN_2, cute.math.log2(total, fastmath=True) * LN_2)
            lse[r] = -Float32.inf if total == 0.0 else whole
        return norm, lse


def make_step_softmax(scale_log2: Float32, rows: int, divides: bool) -> StepSoftmax:
    ref, row_sum, total = (cute.make_rmem_tensor(rows, Float32) for _ in range(3))
    return StepSoftmax(ref, row_sum, total, scale_log2, divides)
