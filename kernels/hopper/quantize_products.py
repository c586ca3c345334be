"""Queries and keys in bf16 to e4m3 with the Hadamard transform on the tensor cores, of tiles of 128
rows of a head (quantize_rows.py has the other ways, cute_attn.quantize the steps).

The matrix of a head dim d is H16 (x) H(d/16): with G = d/16 and channel = k * G + g, column =
n * G + g', the sum over k is for every g a product of mma.sync, and the sum over g is made of sums
and differences of what one thread holds. The products' other operand is H16 times the factors of
channels: signs and powers of two, so that bf16 holds it and every product is exact.

A warp has 16 rows, and lane 4r + c has of rows r and r + 8 what it reads and what it writes: k is
summed over in any order, and a fragment's position may stand for any column. It reads 16 bytes of
channels 32j + 8c + e, as it has brought them, and writes 16 bytes of columns 64j + 16c + e (8 bytes
with head dim 32): nothing of a row changes threads but its largest value.

- Keys: H(f * (k - shift)) = H(f * k) - H(f * shift); accumulators begin at what the shift makes of
  the sum over k, so that what is added next is small again.
- Queries' products with the shift are one more tile of columns: three of them hold bf16 numbers
  that add up to the shift.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from cute_attn.kernels.common import bits, vectors
from cute_attn.kernels.common.bits import fma, from_bits, packed_e4m3, word_of
from cute_attn.kernels.hopper import hadamard, quantize_rows
from cute_attn.kernels.hopper import quantize_slots as slots
from cute_attn.kernels.hopper.hadamard import LANES, STRIDE, VECTOR
from cute_attn.kernels.hopper.quantize_balance import finite
from cute_attn.kernels.hopper.quantize_rows import ROWS, Head, floats, put, scale_of
from cute_attn.kernels.hopper.quantize_slots import STAGES

DIMS = (32, 64, 128)  # with 256 a thread would hold 128 numbers
THREADS = 256
WARPS = THREADS // 32
WARP_ROWS = ROWS // WARPS
HALF = WARP_ROWS // 2  # from a thread's first row to its second
STEP = 16  # of a product's inner dimension
PARTS = 3  # bf16 numbers that add up to a fp32 one
# What is left of keys that are the shift, next to the largest number that it was taken off from: 17
# numbers of a product and G sums lose a bit of 24 each
ROUNDING = 2.0**-17
TO_ZERO = 2.0**-120  # times it, every finite number that is left becomes 0, and infinity stays

Halves = list[list[list[Float32]]]  # of both rows: of the thread's four k or n, G values each


class Stage(NamedTuple):
    """What a CTA has in shared memory."""

    raw: cute.Tensor  # of the rows to come, see quantize_slots.py
    table: cute.Tensor  # fp32 (2, head_dim): factors, shift
    matrix: cute.Tensor  # words (4, 32, G): what a lane has of both tiles of columns of a product
    shift: cute.Tensor  # words: of keys (4, 2, 4, G), of queries (2, 32, G); see fill
    maxima: cute.Tensor  # fp32 (WARPS, 2)
    sizes: cute.Tensor  # of keys' shift: fp32 (G)


class Tiles(NamedTuple):
    """What a thread does tile after tile: of rows first, first + 8, and those of the next tile."""

    stage: Stage
    slots: Int32  # address of its first one
    first: Int32
    count: Int32


class Rows(NamedTuple):
    """Two of a thread, but for the norm."""

    values: Halves
    tops: list[Int32]  # bits of the largest finite |x|
    dots: list[Float32]  # with parts of the shift, two columns added up; None: no shift


def stage_of(cfg, words: cute.Tensor, dtype) -> Stage:
    """Carved from stage_words(cfg) words."""
    d, g, raw = cfg.dim, cfg.dim // STEP, slots.words(cfg)
    table = cute.recast_ptr(words.iterator + raw // 2, dtype=Float32)
    matrix = words.iterator + raw // 2 + 2 * d
    shift = matrix + 4 * 32 * g
    maxima = cute.recast_ptr(shift + 2 * 32 * g, dtype=Float32)
    return Stage(
        cute.make_tensor(cute.recast_ptr(words.iterator, dtype=dtype), raw),
        cute.make_tensor(table, cute.make_layout((2, d), stride=(d, 1))),
        cute.make_tensor(matrix, cute.make_layout((4, 32, g))),
        cute.make_tensor(shift, cute.make_layout(2 * 32 * g)),
        cute.make_tensor(maxima, cute.make_layout((WARPS, 2))),
        cute.make_tensor(maxima + 2 * WARPS, cute.make_layout(g)),
    )


def stage_words(cfg) -> int:
    return slots.words(cfg) // 2 + 2 * cfg.dim + (6 * 32 + 1) * (cfg.dim // STEP) + 2 * WARPS


# Who has what


def k_of(dim: int, lane: Int32, i: int | Int32):
    """The i-th of four of a lane of a quad: its slots 2 * lane, 2 * lane + 1, and those + 8."""
    at = i * (dim // STEP)
    return (at // VECTOR * STRIDE + lane * VECTOR + at % VECTOR) // (dim // STEP)


def n_of(dim: int, lane: Int32, i: int | Int32):
    """The i-th of four: columns 2 * lane and 2 * lane + 1 of the first tile and of the second."""
    at, n = i * (dim // STEP), run(dim)
    return (at // n * n * LANES + lane * n + at % n) // (dim // STEP)


def run(dim: int) -> int:
    """Neighbouring columns of a thread."""
    return min(16, dim // LANES)


# Tiles


@cute.jit
def quantise_queries(cfg: cutlass.Constexpr, x: Head, dots, stage: Stage, tiles):
    """As quantize_rows.quantise_queries. An even lane makes the scale of the quad's first row, an
    odd one that of the second."""
    lane, end = cute.arch.lane_idx() % LANES, x.x.shape[0]
    odd = lane % 2 != 0
    t = begin(cfg, x, stage, tiles, const_expr(False))
    for i in cutlass.range(t.count, unroll=1):
        mine = transformed(cfg, x, t, i, const_expr(False))
        top = swapped(odd, mine.tops, cutlass.max)
        top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, 2))
        scale = scale_of(from_bits(top) * cfg.norms[0])
        inverse = cute.arch.rcp_approx(scale)
        other = cute.arch.shuffle_sync_bfly(inverse, 1)
        inverses = [cutlass.select_(odd, other, inverse), cutlass.select_(odd, inverse, other)]
        first = t.first + i * ROWS
        store(cfg, mine, x, first, inverses)
        if const_expr(dots is not None):
            dot = swapped(odd, mine.dots, lambda a, b: a + b)
            if cute.arch.vote_any_sync(dot != dot):
                dot = dot_of(cfg, t, i, odd)
            row = first + HALF * (lane % 2)
            if lane < 2 and row < end:
                x.scale[row] = scale
                dots[row] = dot
        else:
            row = first + HALF * (lane % 2)
            if lane < 2 and row < end:
                x.scale[row] = scale


@cute.jit
def quantise_keys(cfg: cutlass.Constexpr, x: Head, stage: Stage, tiles, block: Int32):
    """As quantize_rows.quantise_keys, of tiles that hold all keys of a scale."""
    tidx, end = cute.arch.thread_idx()[0], x.x.shape[0]
    t = begin(cfg, x, stage, tiles, const_expr(True))
    least = Float32(0.0)
    if const_expr(x.shift is not None):
        largest = bits.bits(stage.sizes[cute.arch.lane_idx() % (cfg.dim // STEP)])
        least = from_bits(cute.arch.warp_redux_sync(largest, "max")) * ROUNDING
    for i in cutlass.range(t.count, unroll=1):
        mine = transformed(cfg, x, t, i, const_expr(True))
        top = cute.arch.warp_redux_sync(cutlass.max(*mine.tops), "max")
        top = of_block(cfg, from_bits(top), stage.maxima[None, i % 2])
        nothing = top < least  # but roundings
        scale = scale_of(cutlass.select_(nothing, Float32(0.0), top * cfg.norms[0]))
        inverse, first = cute.arch.rcp_approx(scale), t.first + i * ROWS
        if const_expr(x.shift is not None):
            inverse = cutlass.select_(nothing, Float32(TO_ZERO), inverse)
        store(cfg, mine, x, first, [inverse, inverse])
        if tidx % (32 * max(1, cfg.k_block // WARP_ROWS)) == 0 and first < end:
            x.scale[first // cfg.k_block] = scale


@cute.jit
def begin(cfg: cutlass.Constexpr, x: Head, stage: Stage, tiles, keys: cutlass.Constexpr) -> Tiles:
    """tiles: (the first, how many). Rows are on their way while the operands are made."""
    warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
    row = warp * WARP_ROWS + lane // LANES
    slot = stage.raw.iterator.toint() + (row * LANES + lane % LANES) * slots.SLOT
    t = Tiles(stage, slot, tiles[0] * ROWS + row, tiles[1])
    for tile in cutlass.range_constexpr(STAGES - 1):
        load(cfg, x, t, Int32(tile))
    fill(cfg, x, t, keys)
    return t


@cute.jit
def load(cfg: cutlass.Constexpr, x: Head, t: Tiles, tile: Int32):
    """The thread's two rows to come, what is outside read inside, into slots of its own."""
    lane, kind = cute.arch.lane_idx() % LANES, x.x.element_type
    if tile < t.count:
        for h in cutlass.range_constexpr(2):
            row = cutlass.min(t.first + (tile * ROWS + h * HALF), x.x.shape[0] - 1)
            for j in cutlass.range_constexpr(hadamard.vectors(cfg.dim)):
                source = vectors.at(x.x[row, None], j * STRIDE + lane * VECTOR, VECTOR)
                cute.copy(slots.copy_ahead(kind), source, slots.at(kind, place(cfg, t, tile, h, j)))
    cute.arch.cp_async_commit_group()


def place(cfg, t: Tiles, tile: Int32, h: int, j: int) -> Int32:
    """Of the thread's j-th vector of its h-th row: a tile's rows are in their order."""
    return slots.moved(cfg, t.slots, tile, 0, j) + h * (HALF * LANES * slots.SLOT)


# Operands


@cute.jit
def fill(cfg: cutlass.Constexpr, x: Head, t: Tiles, keys: cutlass.Constexpr):
    tidx, table = cute.arch.thread_idx()[0], t.stage.table
    if tidx < cfg.dim:
        table[0, tidx] = quantize_rows.factor_of(x.factors, tidx, t.first, keys)
        if const_expr(x.shift is not None):
            table[1, tidx] = x.shift[tidx]
    cute.arch.barrier()
    if tidx < 2 * cfg.dim:  # a warp for every g
        matrix = fill_matrix(cfg, t.stage)
        if const_expr(x.shift is not None):
            parts = parts_of_shift(cfg, t.stage)
            if const_expr(keys):
                fill_start(cfg, t.stage, parts, matrix)
            else:
                store_words(t.stage.shift.iterator + 2 * tidx, parts)
    cute.arch.barrier()


def of_lane(cfg, stage: Stage, row: int) -> list[Float32]:
    """From the table, of the lane's four k and the warp's g."""
    tidx, groups = cute.arch.thread_idx()[0], cfg.dim // STEP
    places = [k_of(cfg.dim, tidx % LANES, i) * groups + tidx // 32 for i in range(4)]
    return [stage.table[row, place] for place in places]


def fill_matrix(cfg, stage: Stage) -> list[Int32]:
    """H16 times factors: words of k in pairs, of the lane's column in either tile."""
    tidx, factors = cute.arch.thread_idx()[0], of_lane(cfg, stage, 0)
    lane, position, words = tidx % LANES, tidx % 32 // LANES, []
    for tile in range(2):
        n = n_of(cfg.dim, position // 2, 2 * tile + position % 2)
        signed = [
            bits.bits(factor) ^ (cute.arch.popc(k_of(cfg.dim, lane, i) & n) << 31)
            for i, factor in enumerate(factors)
        ]
        for low, high in (signed[:2], signed[2:]):
            words.append(Int32(cute.arch.prmt(low, high, 0x7632)))
    store_words(stage.matrix.iterator + 4 * tidx, words)
    return words


def parts_of_shift(cfg, stage: Stage) -> list[Int32]:
    """Words of k in pairs, of the part that the lane's column or row stands for; else zeros."""
    tidx, rest, words = cute.arch.thread_idx()[0], of_lane(cfg, stage, 1), []
    for a, b in (rest[:2], rest[2:]):
        word = Int32(0)
        for part in range(PARTS):
            rounded = word_of("bf16", (a, b))
            word = cutlass.select_(tidx % 32 // LANES == part, rounded, word)
            a, b = a - from_bits(rounded << 16), b - from_bits(rounded & -65536)
        words.append(word)
    return words


@cute.jit
def fill_start(
    cfg: cutlass.Constexpr,
    stage: Stage,
    parts: cutlass.Constexpr[list],
    matrix: cutlass.Constexpr[list],
):
    """What the shift makes of sums over k, taken off: its parts are rows of products, the smallest
    added first. Both rows of a lane begin at the same numbers. And the largest of all of these."""
    tidx, factors, shifts = cute.arch.thread_idx()[0], *(of_lane(cfg, stage, i) for i in range(2))
    A = [parts[0], Int32(0), parts[1], Int32(0)]
    size = Float32(0.0)
    for factor, shift in zip(factors, shifts):
        size = cute.arch.fmax(size, bits.magnitude(factor * shift))
    for tile in cutlass.range_constexpr(2):
        of_part = mma(A, matrix[2 * tile : 2 * tile + 2], [Float32(0.0)] * 4)[:2]
        sums = of_part
        for _ in cutlass.range_constexpr(PARTS - 1):
            rest = [cute.arch.shuffle_sync_down(value, LANES) for value in sums]
            sums = [a + b for a, b in zip(of_part, rest)]
        pair = [bits.bits(-value) for value in sums]
        if tidx % 32 < LANES:
            lane = tidx // 32 * LANES + tidx % 32
            store_words(stage.shift.iterator + (2 * lane + tile) * 4, [*pair, *pair])
            for value in sums:
                size = cute.arch.fmax(size, bits.magnitude(value))
    largest = cute.arch.warp_redux_sync(bits.bits(size), "max")
    if tidx % 32 == 0:
        stage.sizes[tidx // 32] = from_bits(largest)


def store_words(to, words: list[Int32]):
    values = cute.make_rmem_tensor(len(words), Int32)
    for i, word in enumerate(words):
        values[i] = word
    pointer = cute.make_ptr(Int32, to.toint(), cute.AddressSpace.smem, assumed_align=4 * len(words))
    cute.autovec_copy(values, cute.make_tensor(pointer, cute.make_layout(len(words))))


# Steps of a row


@cute.jit
def transformed(cfg: cutlass.Constexpr, x: Head, t: Tiles, tile: Int32, keys: cutlass.Constexpr):
    load(cfg, x, t, tile + STAGES - 1)  # to the slots that the tile before this one had
    cute.arch.cp_async_wait_group(STAGES - 1)
    raw = [words_of(cfg, x, t, tile, h) for h in range(2)]
    values, dots = products(cfg, x, t, raw, keys)
    values, tops = transform_groups(values)
    limit = Int32(bits.INF_BITS)
    if cutlass.max(*tops) >= limit:  # rare: NaN or infinity
        tops = [largest_finite(of_row) for of_row in values]
    return Rows(values, tops, dots)


def words_of(cfg, x: Head, t: Tiles, tile: Int32, h: int) -> list[Int32]:
    """Of a row, in the order of k and then g."""
    found = []
    for j in range(hadamard.vectors(cfg.dim)):
        words = cute.recast_tensor(slots.load(x.x.element_type, place(cfg, t, tile, h, j)), Int32)
        found += [words[i] for i in range(VECTOR // 2)]
    return found


def products(cfg, x: Head, t: Tiles, raw: list[list[Int32]], keys: bool):
    """Sums over k, and of queries those with parts of the shift."""
    groups, lane = cfg.dim // STEP, cute.arch.lane_idx()
    zeros = [Float32(0.0)] * 4
    sums: Halves = [[[] for _ in range(4)] for _ in range(2)]
    dots = None if keys or x.shift is None else zeros
    for g in range(groups):
        A = [pair(raw[h], groups, i, g) for i in (0, 2) for h in range(2)]
        matrix = load_words(t.stage.matrix[None, lane, g], 4, Int32)
        for tile in range(2):
            start = zeros
            if keys and x.shift is not None:
                at = t.stage.shift.iterator + ((g * LANES + lane % LANES) * 2 + tile) * 4
                start = load_words(cute.make_tensor(at, 4), 4, Float32)
            acc = mma(A, matrix[2 * tile : 2 * tile + 2], start)
            for i, value in enumerate(acc):
                sums[i // 2][2 * tile + i % 2].append(value)
        if dots is not None:
            at = t.stage.shift.iterator + (g * 32 + lane) * 2
            dots = mma(A, load_words(cute.make_tensor(at, 2), 2, Int32), dots)
    return sums, None if dots is None else [dots[0] + dots[1], dots[2] + dots[3]]


def load_words(source: cute.Tensor, n: int, kind) -> list:
    pointer = cute.make_ptr(
        kind, source.iterator.toint(), cute.AddressSpace.smem, assumed_align=4 * n
    )
    values = cute.make_rmem_tensor(n, kind)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(n)), values)
    return [values[i] for i in range(n)]


def pair(words: list[Int32], groups: int, i: int, g: int) -> Int32:
    """Channels of the i-th k and of the next one."""
    a, b = (words[(k * groups + g) // 2] for k in (i, i + 1))
    return Int32(cute.arch.prmt(a, b, 0x7632 if g % 2 else 0x5410))


def mma(A: list[Int32], B: list[Int32], C: list[Float32]) -> list[Float32]:
    """Of 16 rows, 16 steps and 8 columns, added to C."""
    result = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32()] * 4),
        [value.ir_value() for value in (*A, *B, *C)],
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return [Float32(llvm.extractvalue(T.f32(), result, [i])) for i in range(4)]


def transform_groups(values: Halves) -> tuple[Halves, list[Int32]]:
    """Sums and differences over g, and the bits of the largest |x| of either row: of a + b and
    a - b that is |a| + |b|, rounding included. Bits of NaN are above those of infinity."""
    groups, tops = len(values[0][0]), []
    half = 1
    while half < groups // 2:
        values = [[sums_within(x, half) for x in of_row] for of_row in values]
        half *= 2
    for of_row in values:
        sizes = cute.make_rmem_tensor(4 * half, Float32)
        for i, x in enumerate(of_row):
            for g in range(half):
                sizes[i * half + g] = bits.magnitude(x[g]) + bits.magnitude(x[g + half])
        tops.append(bits.bits(bits.largest(sizes)))
    return [[sums_within(x, half) for x in of_row] for of_row in values], tops


def sums_within(x: list[Float32], half: int) -> list[Float32]:
    n = len(x)
    return [x[i] + x[i + half] if i & half == 0 else x[i - half] - x[i] for i in range(n)]


def largest_finite(of_row: list[list[Float32]]) -> Int32:
    top = Float32(0.0)
    for vector in of_row:
        for value in vector:
            top = cute.arch.fmax(top, bits.magnitude(finite(value)))
    return bits.bits(top)


def swapped(odd, pair: list, combine):
    """An even lane's own of the first with its neighbour's, an odd one's of the second."""
    mine, other = cutlass.select_(odd, pair[1], pair[0]), cutlass.select_(odd, pair[0], pair[1])
    return combine(mine, cute.arch.shuffle_sync_bfly(other, 1))


@cute.jit
def dot_of(cfg: cutlass.Constexpr, t: Tiles, tile: Int32, odd):
    """The slow way, of a row with an infinity: its products with parts of the shift may differ in
    sign."""
    lane, dots = cute.arch.lane_idx() % LANES, [Float32(0.0), Float32(0.0)]
    for j in cutlass.range(hadamard.vectors(cfg.dim), unroll=1):
        shift = vectors.load(t.stage.table[1, None], j * STRIDE + lane * VECTOR, VECTOR)
        for h in cutlass.range_constexpr(2):
            values = floats(slots.load(t.stage.raw.element_type, place(cfg, t, tile, h, j)))
            for e in cutlass.range_constexpr(VECTOR):
                dots[h] = fma(values[e], shift[e], dots[h])
    dot = swapped(odd, dots, lambda a, b: a + b)
    return dot + cute.arch.shuffle_sync_bfly(dot, 2)


@cute.jit
def of_block(cfg: cutlass.Constexpr, top: Float32, maxima: cute.Tensor) -> Float32:
    """As quantize_rows.of_block."""
    warp, lane, warps = cute.arch.warp_idx(), cute.arch.lane_idx(), cfg.k_block // WARP_ROWS
    if const_expr(warps > 1):
        if lane == 0:
            maxima[warp] = top
        cute.arch.barrier()
        largest = bits.bits(maxima[(warp & -warps) + lane % warps])
        top = from_bits(cute.arch.warp_redux_sync(largest, "max"))
    return top


@cute.jit
def store(cfg: cutlass.Constexpr, mine: Rows, x: Head, first: Int32, inverses: list[Float32]):
    """Times the norm and the scales' inverses, in e4m3."""
    lane, n = cute.arch.lane_idx() % LANES, run(cfg.dim)
    for h in cutlass.range_constexpr(2):
        row, times = first + h * HALF, inverses[h] * cfg.norms[0]
        if row < x.x.shape[0]:
            values = [value for vector in mine.values[h] for value in vector]
            for begin in cutlass.range_constexpr(0, len(values), n):
                words = cute.make_rmem_tensor(n // 4, Int32)
                for i in cutlass.range_constexpr(n // 4):
                    at = const_expr(begin + 4 * i)
                    # the sum with 0 leaves no -0
                    four = [fma(v, times, Float32(0.0)) for v in values[at : at + 4]]
                    words[i] = packed_e4m3(*four)
                put(words, x.out[row, None], begin * LANES + lane * n)
