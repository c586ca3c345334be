"""Online softmax over the rows a thread owns (Milakov & Gimelshein 2018, FlashAttention-2).

The running reference `ref` that weights are taken against need not be the row maximum: any value
near it gives the same quotient O / l. Two steps are built on that:

exact  takes the maximum of the block first, as the papers do.
late   weighs the block against the reference it finds, at once, and only then looks at the row
       sums. Where a sum shows that a weight may have a large share of its row, the reference is
       raised to the largest weight, which then is 1 and survives the rounding of P, as with the
       maximum first. Steady blocks cost no maximum, no exchange between threads and no rescaling
       of O. Weights that left float32's safe range are weighed again, exactly, from scores that
       the caller brings back.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cute_attn.kernels.common.bits import bits, bits_of, fma, from_bits, largest
from cute_attn.kernels.common.layout import acc_as_rows

LN_2 = 0.6931471805599453
KEPT, RAISED, LOST = 0, 1, 2  # what `late` did to the reference
REPAIRABLE = 110.0  # log2 of a row sum above which weights may have overflowed
NEVER = 0x7FFFFFFF  # a limit that no bit pattern exceeds
SHARE = 0.02  # of a row's weights: with more than that `late` makes a key's weight exact,
# if it is also the weight of so many average keys of N(0,1) data. Early rows, whose few keys have
# large shares anyway and are taken exactly, dominate the error of a causal problem.
OUTSTANDING = {False: 60.0, True: 150.0}  # causal
FEW = 8.0  # keys: the mean weight of so many is off by half
RECORDS = 4  # raises after which a row counts as climbing, no longer as steady,
STEEP = 8.0  # and a weight beyond which it does at once, if the thread's other row has one too


@dataclass(frozen=True)
class Slack:
    """In binades. bf16 weights have the range of float32, of which 2^80 either way remains for
    values of V. fp16 weights must stay below 65504, and as 2^-25 rounds to 0 the largest must not
    be small either: a long tail of small weights would be lost from O."""

    sum: float  # row sum, of one thread and block, that `late` lets pass at most
    ahead: float  # how far above the largest weight a climbing row's reference is raised


SLACK = {"bf16": Slack(40.0, 24.0), "fp16": Slack(12.0, 0.0)}


@dataclass(frozen=True)
class OnlineSoftmax:
    ref: cute.Tensor  # (2,) running reference of scale_log2 * scores
    row_sum: cute.Tensor  # (2,) running sum of weights, this thread's columns only
    fix: cute.Tensor  # (2,) what O has to be multiplied with to meet ref
    unit: cute.Tensor  # (2,) the largest weight: 1 up to the rounding of ref, which P loses
    limit: cute.Tensor  # (2,) bits of the sum of one block's weights that `late` lets pass
    raises: cute.Tensor  # (2,) blocks in which `late` raised the reference
    scale_log2: Float32  # |softmax_scale| * log2(e)
    problem: object

    @property
    def fine(self) -> bool:
        """Whether P is finer than scores in the thousands, whose ref fp32 rounds by 2^-12."""
        return self.problem.dtype == "fp16"

    @cute.jit
    def reset(self):
        self.ref.fill(-Float32.inf)
        self.row_sum.fill(0.0)
        self.unit.fill(1.0)

    @cute.jit
    def exact(self, acc_S: cute.Tensor):
        """Scores become weights against the new row maximum; fix says what O needs."""
        S, new = acc_as_rows(acc_S), cute.make_rmem_tensor(2, Float32)
        self._negate_if_asked(S)
        for r in cutlass.range_constexpr(2):
            old = self.ref[r]
            peak = S[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
            peak = cute.arch.warp_reduction_max(peak, threads_in_group=4)
            top = cute.arch.fmax(peak * self.scale_log2, old)
            if const_expr(self.fine):
                unit = cute.math.exp2(fma(peak, self.scale_log2, -top), fastmath=True)
                self.unit[r] = unit if top > old else self.unit[r]
            safe = Float32(0.0) if top == -Float32.inf else top  # a row may have seen no key yet
            self.fix[r] = cute.math.exp2(old - safe, fastmath=True)
            self.ref[r] = top
            new[r] = self._weigh(S, r, safe)
        self._add(new)

    @cute.jit
    def expect(self, r: cutlass.Constexpr[int], seen: Int32, keys: Int32, per_block: float):
        """Before the first `late` of a row: what its `seen` keys say of the others of all `keys`.
        A thread's sum of `per_block` weights passes until one key may hold SHARE of the row."""
        total = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=4)
        n = Float32(seen)
        mean = total * (n + FEW) * cute.arch.rcp_approx(n * n)
        one = cute.arch.fmax(Float32(keys) * SHARE, Float32(OUTSTANDING[self.problem.causal]))
        limit = bits(mean * (one + per_block))
        limit = cutlass.max(limit, Int32(bits_of(1.0)))  # the sum of the largest weight alone
        limit = cutlass.min(limit, Int32(bits_of(2.0 ** SLACK[self.problem.dtype].sum)))
        self.limit[r] = limit if total == total else Int32(NEVER)
        self.raises[r] = Int32(0)

    @cute.jit
    def late(self, acc_S: cute.Tensor) -> Int32:
        """The same against the old reference, corrected if that was too low: KEPT, RAISED (fix
        says what O needs), or LOST: the state is as before and the scores are gone."""
        S, new = acc_as_rows(acc_S), cute.make_rmem_tensor(2, Float32)
        self._negate_if_asked(S)
        over = Boolean(False)
        for r in cutlass.range_constexpr(2):
            self.fix[r] = Float32(1.0)
            new[r] = self._weigh(S, r, self.ref[r])
            over = over | (bits(new[r]) > self.limit[r])
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
    def _correct(self, S, new) -> Int32:
        lost = Boolean(False)
        for r in cutlass.range_constexpr(2):
            limit = cutlass.max(self.limit[r], Int32(bits_of(2.0**REPAIRABLE)))
            lost = lost | (bits(new[r]) > limit)
        outcome = Int32(RAISED)
        if cute.arch.vote_any_sync(lost):
            new.fill(0.0)
            outcome = Int32(LOST)
        else:
            self._raise(S, new)
        return outcome

    @cute.jit
    def _raise(self, S, new):
        """All rows of the warp with a weight above 1, not only those above their limit: rows that
        climb alike are then raised in the same blocks, and not one after the other in every one."""
        slack, tops = SLACK[self.problem.dtype], cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            tops[r] = cute.arch.warp_reduction_max(largest(S[r, None]), threads_in_group=4)
        both = cute.arch.fmin(tops[0], tops[1]) > STEEP
        for r in cutlass.range_constexpr(2):
            top = tops[r]
            above = top > 1.0
            climbing = both | (self.raises[r] >= RECORDS)
            ahead = Float32(slack.ahead) if climbing else Float32(0.0)
            ref = self.ref[r] + cute.arch.fmin(cute.math.log2(top, fastmath=True) + ahead, 120.0)
            ref = ref if above else self.ref[r]
            down = cute.math.exp2(self.ref[r] - ref, fastmath=True)  # of ref as it was rounded
            self.ref[r], self.fix[r] = ref, down
            if const_expr(self.fine):
                self.unit[r] = top * down if above else self.unit[r]
            vain = (top <= 1.0) & (bits(new[r]) > self.limit[r])  # many weights, none of them large
            limit = bits(from_bits(self.limit[r]) * (Float32(2.0) if vain else down))
            limit = cutlass.max(limit, Int32(bits_of(1.0)))
            self.limit[r] = Int32(bits_of(2.0**slack.sum)) if above & climbing else limit
            self.raises[r] = self.raises[r] + Int32(above)
            new[r] = new[r] * down
            S[r, None].store(S[r, None].load() * down)

    @cute.jit
    def rescale(self, acc_O: cute.Tensor):
        O = acc_as_rows(acc_O)
        for r in cutlass.range_constexpr(2):
            O[r, None].store(O[r, None].load() * self.fix[r])

    @cute.jit
    def finish(self):
        """(1 / row sum, log2 of the row sum) of every row; (0, -inf) if it saw no key."""
        norm, log_sum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=4)
            empty = total == 0.0
            norm[r] = Float32(0.0) if empty else cute.arch.rcp_approx(total)
            if const_expr(self.fine):
                norm[r] = norm[r] * as_kept(self.unit[r])
            log_sum[r] = -Float32.inf if empty else cute.math.log2(total, fastmath=True)
        return norm, log_sum

    @cute.jit
    def lse(self, log_sum: cute.Tensor) -> cute.Tensor:
        """Log-sum-exp in natural log, rounded once: in the thousands the backward notices twice."""
        lse = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            empty = log_sum[r] == -Float32.inf
            lse[r] = -Float32.inf if empty else fma(self.ref[r], LN_2, log_sum[r] * LN_2)
        return lse


@cute.jit
def as_kept(unit: Float32) -> Float32:
    """A weight over what an fp16 P holds of it."""
    kept = Float32(unit.to(cutlass.Float16))
    sane = (kept > 0.0) & (kept < Float32.inf)
    return unit * cute.arch.rcp_approx(kept) if sane else Float32(1.0)


def make_softmax(problem, scale_log2: Float32) -> OnlineSoftmax:
    ref, row_sum, fix, unit = (cute.make_rmem_tensor(2, Float32) for _ in range(4))
    limit, raises = (cute.make_rmem_tensor(2, Int32) for _ in range(2))
    return OnlineSoftmax(ref, row_sum, fix, unit, limit, raises, scale_log2, problem)
