"""Online softmax over the rows a thread owns (Milakov & Gimelshein 2018, FlashAttention-2).

The running reference `ref` that weights are taken against need not be the row maximum: any value
near it gives the same quotient O / l. Two steps are built on that:

exact  takes the maximum of the block first, as the papers do.
late   weighs the block against the reference it finds, at once, and only then looks at the row
       sums. A sum that is too large raises the reference and scales the block's weights down by a
       power of two, before they are rounded. Steady blocks cost no maximum, no exchange between
       threads and no rescaling of O. Weights that left float32's safe range are weighed again,
       exactly, from scores that the caller brings back.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cute_attn.kernels.common.bits import bits, bits_of, from_bits, quad_max_bits
from cute_attn.kernels.common.layout import acc_as_rows

LN_2 = 0.6931471805599453
KEPT, RAISED, LOST = 0, 1, 2  # what `late` did to the reference
REPAIRABLE = 110.0  # log2 of a row sum above which weights may have overflowed
PACE = 4  # blocks from one close look at the row sums to the next


@dataclass(frozen=True)
class Slack:
    """In binades. bf16 weights have the range of float32, of which 2^80 either way remains for
    values of V. fp16 weights must stay below 65504, and as 2^-25 rounds to 0 the largest must not
    be small either: a long tail of small weights would be lost from O."""

    usual: float  # row sum (of one thread and block) that `late` lets pass
    close: float  # the same in every PACE-th block: rows whose scores keep rising are raised in
    # these blocks, all at once, and not one after the other in every block
    ahead: int  # how far beyond the row sum the reference is raised, to be left alone for longer


SLACK = {"bf16": Slack(40.0, 8.0, 24), "fp16": Slack(12.0, 4.0, 0)}


@dataclass(frozen=True)
class OnlineSoftmax:
    ref: cute.Tensor  # (2,) running reference of scale_log2 * scores
    row_sum: cute.Tensor  # (2,) running sum of weights, this thread's columns only
    fix: cute.Tensor  # (2,) what O has to be multiplied with to meet ref
    scale_log2: Float32  # |softmax_scale| * log2(e)
    problem: object

    @cute.jit
    def reset(self):
        self.ref.fill(-Float32.inf)
        self.row_sum.fill(0.0)

    @cute.jit
    def exact(self, acc_S: cute.Tensor):
        """Scores become weights against the new row maximum; fix says what O needs."""
        S, new = acc_as_rows(acc_S), cute.make_rmem_tensor(2, Float32)
        self._negate_if_asked(S)
        for r in cutlass.range_constexpr(2):
            old = self.ref[r]
            top = S[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
            top = cute.arch.fmax(top * self.scale_log2, old)
            top = cute.arch.warp_reduction_max(top, threads_in_group=4)
            safe = Float32(0.0) if top == -Float32.inf else top  # a row may have seen no key yet
            self.fix[r] = cute.math.exp2(old - safe, fastmath=True)
            self.ref[r] = top
            new[r] = self._weigh(S, r, safe)
        self._add(new)

    @cute.jit
    def late(self, acc_S: cute.Tensor, block: Int32) -> Int32:
        """The same against the old reference, corrected if that was too low: KEPT, RAISED (fix
        says what O needs), or LOST: the state is as before and the scores are gone."""
        S, new = acc_as_rows(acc_S), cute.make_rmem_tensor(2, Float32)
        slack = SLACK[self.problem.dtype]
        usual, close = bits_of(2.0**slack.usual), bits_of(2.0**slack.close)
        limit = Int32(close) if block % PACE == 0 else Int32(usual)
        self._negate_if_asked(S)
        over = Boolean(False)
        for r in cutlass.range_constexpr(2):
            self.fix[r] = Float32(1.0)
            new[r] = self._weigh(S, r, self.ref[r])
            over = over | self._too_large(new, r, limit)
        outcome = Int32(KEPT)
        if cute.arch.vote_any_sync(over):
            outcome = self._correct(S, new)
        self._add(new)
        return outcome

    @cute.jit
    def _negate_if_asked(self, S):
        if const_expr(self.problem.negative_scale):
            for r in cutlass.range_constexpr(2):
                S[r, None].store(-S[r, None].load())

    @cute.jit
    def _weigh(self, S, r: cutlass.Constexpr[int], ref: Float32) -> Float32:
        """Row r of S becomes weights; their sum."""
        p = cute.math.exp2(S[r, None].load() * self.scale_log2 - ref, fastmath=True)
        S[r, None].store(p)
        return p.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)

    @cute.jit
    def _add(self, new):
        for r in cutlass.range_constexpr(2):
            self.row_sum[r] = self.row_sum[r] * self.fix[r] + new[r]

    @cute.jit
    def _too_large(self, new, r: cutlass.Constexpr[int], limit: Int32):
        """Above the limit, infinite or NaN, in a row that is not NaN already."""
        alive = self.row_sum[r] == self.row_sum[r]
        return alive & (bits(new[r]) > limit)

    @cute.jit
    def _correct(self, S, new) -> Int32:
        lost = Boolean(False)
        for r in cutlass.range_constexpr(2):
            lost = lost | self._too_large(new, r, Int32(bits_of(2.0**REPAIRABLE)))
        outcome = Int32(RAISED)
        if cute.arch.vote_any_sync(lost):
            new.fill(0.0)
            outcome = Int32(LOST)
        else:
            self._raise(S, new)
        return outcome

    @cute.jit
    def _raise(self, S, new):
        for r in cutlass.range_constexpr(2):
            top = quad_max_bits(new[r])
            up = (top >> 23) - 127  # the binade of the row sum; beyond 127 if infinite or NaN
            ahead = cutlass.min(up + SLACK[self.problem.dtype].ahead, 126)
            up = ahead if (up > 0) & (up < 128) else Int32(0)
            down = from_bits((127 - up) << 23)
            self.ref[r] = self.ref[r] + Float32(up)
            self.fix[r] = down
            new[r] = new[r] * down
            S[r, None].store(S[r, None].load() * down)

    @cute.jit
    def rescale(self, acc_O: cute.Tensor):
        O = acc_as_rows(acc_O)
        for r in cutlass.range_constexpr(2):
            O[r, None].store(O[r, None].load() * self.fix[r])

    @cute.jit
    def finish(self):
        """(1 / row sum, log-sum-exp in natural log) of every row; (0, -inf) if it saw no key."""
        norm, lse = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=4)
            empty = total == 0.0
            norm[r] = Float32(0.0) if empty else cute.arch.rcp_approx(total)
            lse_log2 = self.ref[r] + cute.math.log2(total, fastmath=True)
            lse[r] = -Float32.inf if empty else lse_log2 * LN_2
        return norm, lse


def make_softmax(problem, scale_log2: Float32) -> OnlineSoftmax:
    ref, row_sum, fix = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
    return OnlineSoftmax(ref, row_sum, fix, scale_log2, problem)
