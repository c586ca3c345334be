"""Online softmax over scores that are products of FP8 operands.

A score's factor, softmax_scale * log2(e) * q_descale * k_descale, is one of a row and a block of
keys: it takes the place of the scale in the FFMA in front of exp2, and costs nothing. So does the
offset of the weights: e4m3 weights are 2^8 times as large as softmax's, at most 256 of 448, so that
small ones have bits left. The row sum is as much larger, O / l is not.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cute_attn.kernels.common.layout import acc_as_rows
from cute_attn.kernels.common.softmax import OnlineSoftmax

OFFSET = 8.0  # log2 of the largest weight, of e4m3 ones
TINY = 1e-37  # a factor of 0 would make NaN of what the mask has made -inf


@dataclass(frozen=True)
class Fp8Softmax(OnlineSoftmax):
    scale: cute.Tensor  # (2,) the row's share of the factor

    @property
    def offset(self) -> float:
        return OFFSET if self.problem.v_dtype == "e4m3" else 0.0

    @cute.jit
    def exact_fp8(self, acc_S: cute.Tensor, factors: cute.Tensor) -> Boolean:
        """Scores become weights against the new row maximum; whether O needs fix. factors: of the
        block, or of every 16 of its keys."""
        S, new = acc_as_rows(acc_S), cute.make_rmem_tensor(2, Float32)
        self._negate_if_asked(S)
        moved = Boolean(False)
        factor = factors[0]
        if const_expr(self.problem.fine_k):
            self.scale_columns(S, factors)
            factor = Float32(1.0)
        for r in cutlass.range_constexpr(2):
            old = self.ref[r]
            scale = self.scale[r] * factor
            scale = Float32(TINY) if scale < TINY else scale  # a NaN stays
            peak = S[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
            peak = cute.arch.warp_reduction_max(peak, threads_in_group=4)
            top = cute.arch.fmax(peak * scale, old)
            safe = Float32(0.0) if top == -Float32.inf else top  # a row may have seen no key yet
            self.fix[r] = cute.math.exp2(old - safe, fastmath=True)
            self.ref[r] = top
            moved = moved | (top > old)
            new[r] = self.weigh_fp8(S, r, scale, self.offset - safe)
        self._add(new)
        return cute.arch.vote_any_sync(moved)

    @cute.jit
    def scale_columns(self, S: cute.Tensor, factors: cute.Tensor):
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                S[r, c] = S[r, c] * factors[c // 4]  # a thread has 4 of 16 columns

    @cute.jit
    def weigh_fp8(self, S, r: cutlass.Constexpr[int], scale: Float32, bias: Float32) -> Float32:
        """Row r of S becomes weights; their sum."""
        p = cute.math.exp2(S[r, None].load() * scale + bias, fastmath=True)
        S[r, None].store(p)
        return p.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)

    @cute.jit
    def finish_fp8(self):
        """(1 / row sum, log2 of the sum of softmax's own weights) of every row; (0, -inf) if it
        saw no key."""
        norm, log_sum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=4)
            empty = total == 0.0
            norm[r] = Float32(0.0) if empty else cute.arch.rcp_approx(total)
            log_total = cute.math.log2(total, fastmath=True) - self.offset
            log_sum[r] = -Float32.inf if empty else log_total
        return norm, log_sum


def make_fp8_softmax(problem, scale_log2: Float32) -> Fp8Softmax:
    ref, row_sum, fix, unit, scale = (cute.make_rmem_tensor(2, Float32) for _ in range(5))
    limit, raises = (cute.make_rmem_tensor(2, Int32) for _ in range(2))
    return Fp8Softmax(ref, row_sum, fix, unit, limit, raises, scale_log2, problem, scale)
