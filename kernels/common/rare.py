"""Branches a tile seldom takes, from global memory and without the pipelines: slow, and exact.

scores_again  a block's scores once more, by the warp's own mma.sync, where their tile is gone.
confine_nan   0 * NaN in a P V product is NaN: O where a NaN in V met a weight that the mask had
              made zero, computed again from the keys the row sees.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from cute_attn.kernels.common.bits import INF_BITS, bits
from cute_attn.kernels.common.layout import acc_as_rows
from cute_attn.kernels.common.mask import keys_seen


@cute.jit
def load_pairs(dst: cute.Tensor, row: cute.Tensor, col: Int32, first: cutlass.Constexpr[int]):
    """A thread's share of one operand row of mma.m16n8k16 (PTX ISA, fragment layouts): columns
    col, col + 1 and the same 8 further on, zero past the end. Head dims are multiples of 8."""
    for i in cutlass.range_constexpr(2):
        for j in cutlass.range_constexpr(2):
            value = row.element_type(0.0)
            if col + 8 * i < row.shape[0]:
                value = row[col + 8 * i + j]
            dst[first + 2 * i + j] = value


@cute.jit
def scores_again(x, acc_S: cute.Tensor, tile, kv_head, row0, key0):
    """acc_S = Q K^T of this warp's 16 rows from row0 and the keys from key0, all of them there."""
    gQ = x.gQ[None, None, tile.head, tile.batch]
    gK = x.gK[None, None, kv_head, tile.batch]
    dtype, last = gQ.element_type, gQ.shape[0] - 1
    group, pair = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4 * 2
    atom = cute.make_mma_atom(warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16)))
    A = cute.make_rmem_tensor(((2, 2, 2), 1, 1), dtype)
    B = cute.make_rmem_tensor(((2, 2), 1, 1), dtype)
    C = cute.make_rmem_tensor(((2, 2), 1, 1), Float32)
    acc_S.fill(0.0)
    # Registers have no run-time index, and the loop written out would be most of the kernel's
    # code: new values are shifted in at the end of a chunk.
    chunk = 16 if cute.size(acc_S) % 16 == 0 else 8
    for start in cutlass.range_constexpr(0, cute.size(acc_S), chunk):
        for n in cutlass.range(chunk // 4, unroll=1):
            C.fill(0.0)
            k_row = gK[key0 + start * 2 + n * 8 + group, None]
            for step in cutlass.range(cute.ceil_div(gQ.shape[1], 16), unroll=1):
                load_a(A, gQ, row0 + group, last, step * 16 + pair)
                load_pairs(B, k_row, step * 16 + pair, 0)
                cute.gemm(atom, C, A, B, C)
            for i in cutlass.range_constexpr(chunk - 4):
                acc_S[start + i] = acc_S[start + i + 4]
            for i in cutlass.range_constexpr(4):
                acc_S[start + chunk - 4 + i] = C[i]


@cute.jit
def load_a(A: cute.Tensor, gQ: cute.Tensor, row: Int32, last: Int32, col: Int32):
    """Rows `row` and `row` + 8 of the A operand; rows past the last repeat it."""
    for half in cutlass.range_constexpr(2):
        part = cute.make_rmem_tensor(4, A.element_type)
        load_pairs(part, gQ[cutlass.min(row + 8 * half, last), None], col, 0)
        for i in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(2):
                A[4 * i + 2 * half + j] = part[2 * i + j]


@cute.jit
def has_nan(acc_O: cute.Tensor):
    """Whether any thread of the warp holds a NaN (the tensor core's NaN has the sign bit clear) or
    an infinity."""
    tops = [Int32(0) for _ in range(4)]
    for i in cutlass.range_constexpr(cute.size(acc_O) // 8):
        for t in cutlass.range_constexpr(4):
            a, b = bits(acc_O[8 * i + 2 * t]), bits(acc_O[8 * i + 2 * t + 1])
            tops[t] = cutlass.max(cutlass.max(tops[t], a), b)
    top = cutlass.max(cutlass.max(tops[0], tops[1]), cutlass.max(tops[2], tops[3]))
    return cute.arch.vote_any_sync(top >= INF_BITS)


@cute.jit
def weigh_key(problem, q: cute.Tensor, k: cute.Tensor, softmax, r) -> Float32:
    """exp(q k - ref), rounded as P is, by the four threads that share the row."""
    score = Float32(0.0)
    for i in cutlass.range(q.shape[0] // 4, unroll=1):
        col = 4 * i + cute.arch.lane_idx() % 4
        score = score + Float32(q[col]) * Float32(k[col])
    score = cute.arch.warp_reduction_sum(score, threads_in_group=4)
    if const_expr(problem.negative_scale):
        score = -score
    ref = softmax.ref[r]
    ref = Float32(0.0) if ref == -Float32.inf else ref
    weight = cute.math.exp2(score * softmax.scale_log2 - ref, fastmath=True)
    return Float32(weight.to(q.element_type))


@cute.jit
def confine_nan(problem, x, f, softmax, tile, kv_head, row0, key0, key_end, shape):
    """O of this warp's rows, which has taken up the keys from key0 to key_end (None: to the last),
    once more: key by key, and each row only from keys it sees."""
    O, C = acc_as_rows(f.acc_O), acc_as_rows(f.cS)
    gQ = x.gQ[None, None, tile.head, tile.batch]
    gK = x.gK[None, None, kv_head, tile.batch]
    gV = x.gV[None, None, kv_head, tile.batch]
    for r in cutlass.range_constexpr(cute.size(O, mode=[0])):
        row = row0 + C[r, 0][0]
        end = keys_seen(problem, row, shape)
        if const_expr(key_end is not None):
            end = cutlass.min(end, key_end)
        q = gQ[cutlass.min(row, gQ.shape[0] - 1), None]
        # threads of a row exchange values below, so the whole warp walks the same keys
        last = cute.arch.warp_reduction(end, lambda a, b: cutlass.max(a, b))
        O[r, None].fill(0.0)
        for key in cutlass.range(key0, last, unroll=1):
            weight = weigh_key(problem, q, gK[key, None], softmax, r)
            if key < end:
                add_row(O[r, None], gV[key, None], C[r, 0][1], weight)


@cute.jit
def add_row(O: cute.Tensor, v: cute.Tensor, first: Int32, weight: Float32):
    """O += weight * v in the columns this thread owns."""
    for c in cutlass.range_constexpr(0, cute.size(O), 2):
        if 4 * c < v.shape[0]:
            for j in cutlass.range_constexpr(2):
                O[c + j] = O[c + j] + weight * Float32(v[first + 4 * c + j])
