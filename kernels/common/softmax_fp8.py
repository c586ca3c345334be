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

from cute_attn.kernels.common.bits import bits, fma, from_bits
from cute_attn.kernels.common.layout import acc_as_rows
from cute_attn.kernels.common.softmax import OnlineSoftmax

OFFSET = 8.0  # log2 of the largest weight, of e4m3 ones
TINY = 1e-37  # a factor of 0 would make NaN of what the mask has made -inf

ROUND = 1.5 * 2.0**23  # added and taken off, it rounds to an integer, which is left in its low bits
POLY = (1.0, 0.69328293, 0.24221106, 0.05500897)  # 2^f for |f| <= 1/2, to 1.0e-4 of it


@dataclass(frozen=True)
class Fp8Softmax(OnlineSoftmax):
    scale: cute.Tensor  # (2,) the row's share of the factor
    old: cute.Tensor  # (2,) log2 of fix
    new: cute.Tensor  # (2,) sum of the block's weights
    before: cute.Tensor  # (2,) row_sum without them

    @property
    def offset(self) -> float:
        return OFFSET if self.problem.v_dtype == "e4m3" else 0.0

    @cute.jit
    def exact_fp8(
        self, acc_S: cute.Tensor, factors: cute.Tensor, poly: cutlass.Constexpr[int]
    ) -> Boolean:
        """Scores become weights against the new row maximum; whether a reference moved. factors: of the block, or of every 16 of its keys."""
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
            self.old[r] = old - safe
            self.ref[r] = top
            moved = moved | (top > old)
            self.new[r] = self.weigh_fp8(S, r, scale, self.offset - safe, poly)
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
    def scale_columns(self, S: cute.Tensor, factors: cute.Tensor):
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                S[r, c] = S[r, c] * factors[c // 4]  # a thread has 4 of 16 columns

    @cute.jit
    def weigh_fp8(
        self,
        S,
        r: cutlass.Constexpr[int],
        scale: Float32,
        bias: Float32,
        poly: cutlass.Constexpr[int],
    ) -> Float32:
        """Row r of S becomes weights; their sum. Of 8 exponentials `poly` are a polynomial."""
        x = S[r, None].load() * scale + bias
        if const_expr(poly == 0):
            S[r, None].store(cute.math.exp2(x, fastmath=True))
        else:
            S[r, None].store(x)
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                by_poly = (c + 1) * poly // 8 > c * poly // 8
                if const_expr(by_poly):
                    S[r, c] = exp2_poly(S[r, c])
                else:
                    S[r, c] = cute.math.exp2(S[r, c], fastmath=True)
        return S[r, None].load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)

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


@cute.jit
def exp2_poly(x: Float32) -> Float32:
    """2^x on the units that multiply and add; 2^-120 at least."""
    x = Float32(-120.0) if x < -120.0 else x  # a NaN stays
    shifted = x + ROUND
    f = x - (shifted - ROUND)
    p = Float32(POLY[-1])
    for c in reversed(POLY[:-1]):
        p = fma(p, f, c)
    return from_bits(bits(p) + (bits(shifted) << 23))


def make_fp8_softmax(problem, scale_log2: Float32) -> Fp8Softmax:
    ref, row_sum, fix, unit, *more = (cute.make_rmem_tensor(2, Float32) for _ in range(8))
    limit, raises = (cute.make_rmem_tensor(2, Int32) for _ in range(2))
    return Fp8Softmax(ref, row_sum, fix, unit, limit, raises, scale_log2, problem, *more)
