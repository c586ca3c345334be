"""Queries and keys to e4m3: RoPE, shift, rebalance, Hadamard transform, scale and cast, of tiles of
128 rows of a head, in registers from the load to the store (cute_attn.quantize has the steps).

Four threads a row (hadamard.py), a warp 8 rows. A query's scale is the quad's, a block's of keys
the CTA's: what the threads hold is all that the scale is taken of, and it is cast where it is.
Scales of blocks that no tile holds are measured by a pass of their own over the same steps.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

from cute_attn.kernels.common import vectors
from cute_attn.kernels.common.bits import copied, fma, from_bits, packed_e4m3, product
from cute_attn.kernels.hopper import hadamard
from cute_attn.kernels.hopper import quantize_slots as slots
from cute_attn.kernels.hopper.hadamard import LANES, STRIDE, VECTOR, Values
from cute_attn.kernels.hopper.quantize_balance import finite, power_of_two
from cute_attn.kernels.hopper.quantize_slots import STAGES, THREADS

ROWS = THREADS // LANES  # of a tile
WARP_ROWS = 32 // LANES
WARPS = THREADS // 32
E4M3_MAX = 448.0
MIN_SCALE = 2.0**-100  # as in cute_attn.quantize


class Head(NamedTuple):
    """Of queries or keys, in one batch."""

    x: cute.Tensor  # (seqlen, head_dim), 16 bit
    cos: cute.Tensor  # (at least seqlen, half of the rotated channels); None: no RoPE
    sin: cute.Tensor
    shift: cute.Tensor  # fp32 (head_dim); None: 0
    factors: "Factors"
    out: cute.Tensor  # e4m3 (seqlen, head_dim)
    scale: cute.Tensor  # fp32 (seqlen) or (blocks)


class Factors(NamedTuple):
    """Of channels, fp32 (head_dim) each; None: 1."""

    measured: cute.Tensor  # in which the others are, if the balance was measured
    given: cute.Tensor  # balance, any positive numbers
    signs: cute.Tensor
    balance: cute.Tensor  # where the first tile writes the given one as a power of two; None: no

    @property
    def some(self) -> bool:
        return any(t is not None for t in self[:3])


class Stage(NamedTuple):
    """What a CTA has in shared memory."""

    raw: cute.Tensor  # of the rows to come, see quantize_slots.py
    table: cute.Tensor  # fp32 (2, head_dim), see fill_table
    maxima: cute.Tensor  # fp32 (WARPS, 2)


class Tiles(NamedTuple):
    """What a thread does tile after tile: of rows first, first + ROWS, ..."""

    stage: Stage
    reads: Int32  # addresses of slots: of the first one that the thread reads
    writes: Int32  # and writes
    first: Int32
    count: Int32


class Row(NamedTuple):
    """What is cast but for norms."""

    values: Values
    signs: list[Float32]  # of vectors; None: 1


# Tiles


@cute.jit
def quantise_queries(cfg: cutlass.Constexpr, x: Head, dots, stage: Stage, tiles):
    """dots (seqlen): q . shift, before the balance; None where there is no shift."""
    tidx, end = cute.arch.thread_idx()[0], x.x.shape[0]
    t = begin(cfg, x, stage, tiles, const_expr(False))
    for i in cutlass.range(t.count, unroll=1):
        row = copied(t.first) + i * ROWS  # addresses kept from tile to tile would spill
        mine, dot = transformed(cfg, x, t, i, const_expr(False))
        top = of_quad(largest(cfg, mine.values), const_expr(True))
        scale = scale_of(top)
        if const_expr(dots is not None):
            dot = of_quad(dot, const_expr(False))
        if row < end:
            store(cfg, mine, x.out[row, None], cute.arch.rcp_approx(scale))
            if tidx % LANES == 0:
                x.scale[row] = scale
                if const_expr(dots is not None):
                    dots[row] = dot


@cute.jit
def quantise_keys(cfg: cutlass.Constexpr, x: Head, stage: Stage, tiles, block: Int32):
    """block: keys of a scale where no tile holds them all."""
    tidx, end = cute.arch.thread_idx()[0], x.x.shape[0]
    t = begin(cfg, x, stage, tiles, const_expr(True))
    for i in cutlass.range(t.count, unroll=1):
        row = t.first + i * ROWS
        mine, _ = transformed(cfg, x, t, i, const_expr(True))
        if const_expr(cfg.k_block == 0):
            scale = x.scale[cutlass.min(row, end - 1) // block]
        else:
            top = cute.arch.warp_reduction_max(largest(cfg, mine.values))
            scale = scale_of(of_block(cfg, top, stage.maxima[None, i % 2]))
        if row < end:
            store(cfg, mine, x.out[row, None], cute.arch.rcp_approx(scale))
            if const_expr(cfg.k_block != 0):
                if tidx % (LANES * cfg.k_block) == 0:
                    x.scale[row // cfg.k_block] = scale


@cute.jit
def measure_keys(cfg: cutlass.Constexpr, x: Head, stage: Stage, tiles, maxima: cute.Tensor):
    """maxima (ceil(seqlen / 8)), of 8 keys each: what a warp holds."""
    tidx, end = cute.arch.thread_idx()[0], x.x.shape[0]
    t = begin(cfg, x, stage, tiles, const_expr(True))
    for i in cutlass.range(t.count, unroll=1):
        row = t.first + i * ROWS
        mine, _ = transformed(cfg, x, t, i, const_expr(True))
        top = cute.arch.warp_reduction_max(largest(cfg, mine.values))
        if row < end and tidx % 32 == 0:
            maxima[row // WARP_ROWS] = top


@cute.jit
def begin(cfg: cutlass.Constexpr, x: Head, stage: Stage, tiles, keys: cutlass.Constexpr) -> Tiles:
    """tiles: (the first, how many). Rows are on their way while the table is filled."""
    first = tiles[0] * ROWS + cute.arch.thread_idx()[0] // LANES
    t = Tiles(stage, *slots.of_thread(cfg, stage.raw), first, tiles[1])
    for tile in cutlass.range_constexpr(STAGES - 1):
        load(cfg, x, t, Int32(tile))
    fill_table(cfg, x, t, keys)
    return t


@cute.jit
def fill_table(cfg: cutlass.Constexpr, x: Head, t: Tiles, keys: cutlass.Constexpr):
    """Factors, and of queries the shift, of keys -shift * factor: (k - shift) * factor is one
    multiply-add then, to the same bits, since factors are powers of two."""
    channel, table = cute.arch.thread_idx()[0], t.stage.table
    if channel < cfg.dim:
        factor = factor_of(x.factors, channel, t.first, keys)
        place = table_place(cfg, channel)
        table[0, place] = factor
        if const_expr(x.shift is not None):
            shift = x.shift[channel]
            table[1, place] = -shift * factor if const_expr(keys) else shift
    cute.arch.barrier()


@cute.jit
def factor_of(x: Factors, channel: Int32, row: Int32, keys: cutlass.Constexpr) -> Float32:
    """row: the thread's first. Queries are multiplied by the balance, keys divided by it."""
    factor = Float32(1.0)
    if const_expr(x.measured is not None):
        factor = x.measured[channel]
    else:
        if const_expr(x.signs is not None):
            factor = x.signs[channel]
        if const_expr(x.given is not None):
            power = power_of_two(x.given[channel])
            if const_expr(x.balance is not None):
                if row < ROWS:
                    x.balance[channel] = power
            factor = factor / power if const_expr(keys) else factor * power
    return factor


@cute.jit
def load(cfg: cutlass.Constexpr, x: Head, t: Tiles, tile: Int32):
    """The quad's row to come, into its slots, which no other quad reads or writes; what is outside
    is read inside. One group a tile, whether there is one or not."""
    lane = cute.arch.lane_idx() % LANES
    if tile < t.count:
        row = x.x[row_of(x, t, tile), None]
        for j in cutlass.range_constexpr(hadamard.vectors(cfg.dim)):
            kind, source = x.x.element_type, vectors.at(row, column(cfg, j, lane), VECTOR)
            to = slots.at(kind, slots.written(cfg, t.writes, tile, j))
            cute.copy(slots.copy_ahead(kind), source, to)
    cute.arch.cp_async_commit_group()


def row_of(x: Head, t: Tiles, tile: Int32) -> Int32:
    return cutlass.min(t.first + tile * ROWS, x.x.shape[0] - 1)


# Steps of a row


@cute.jit
def transformed(cfg: cutlass.Constexpr, x: Head, t: Tiles, tile: Int32, keys: cutlass.Constexpr):
    """(the row, what the thread has of the dot product with the shift)."""
    load(cfg, x, t, tile + STAGES - 1)  # to the slots that the tile before this one had
    cute.arch.cp_async_wait_group(STAGES - 1)
    if const_expr(cfg.quarters):
        cute.arch.sync_warp()  # others have read some of the thread's channels
    values, dot = scaled(cfg, x, t, tile, keys)
    signs = None
    if const_expr(cfg.quarters):
        values, signs = hadamard.transform_quarters([value for part in values for value in part])
    elif const_expr(cfg.hadamard):
        values = hadamard.transform(values, cfg.dim)
    return Row(values, signs), dot


def scaled(cfg, x: Head, t: Tiles, tile: Int32, keys: bool):
    lane = cute.arch.lane_idx() % LANES
    values = loaded(cfg, x, t, tile, lane)
    dot = Float32(0.0)
    for j, vector in enumerate(values):
        col = column(cfg, j, lane)
        factor = shift = None
        if x.factors.some:
            factor = of_table(cfg, t, 0, j, col)
        if x.shift is not None:
            shift = of_table(cfg, t, 1, j, col)
        if keys and shift is not None:
            if factor is None:
                vector = [a + b for a, b in zip(vector, shift)]
            else:
                vector = [fma(*three) for three in zip(vector, factor, shift)]
            vector = kept(cfg, j, lane, vector)
        else:
            if shift is not None:
                part = Float32(0.0)
                for a, b in zip(vector, shift):
                    part = fma(a, b, part)
                dot = dot + part
            if factor is not None:
                vector = [a * b for a, b in zip(vector, factor)]
        values[j] = vector
        if not cfg.hadamard:
            cute.arch.sync_warp()  # else the assembler reads all tables at once, and spills
    return values, dot


def of_table(cfg, t: Tiles, row: int, j: int, col: Int32) -> list[Float32]:
    if not cfg.quarters:
        return floats(vectors.load(t.stage.table[row, None], col, VECTOR))
    lane, words = cute.arch.lane_idx() % LANES, VECTOR // 2
    places = [(2 * j + half) * LANES * words + lane * words for half in range(2)]
    return [v for at in places for v in floats(vectors.load(t.stage.table[row, None], at, words))]


def table_place(cfg, channel: Int32) -> Int32:
    """By quarters, 16 bytes of all threads of a quad are next to each other."""
    if not cfg.quarters:
        return channel
    words, quarter = VECTOR // 2, cfg.dim // LANES
    at = channel % quarter
    return (at // words * LANES + channel // quarter) * words + at % words


def loaded(cfg, x: Head, t: Tiles, tile: Int32, lane: Int32) -> Values:
    """Rotated, in fp32; zeros outside."""
    cols = [column(cfg, j, lane) for j in range(hadamard.vectors(cfg.dim))]
    places = [slots.read(cfg, t.reads, tile, j) for j in range(len(cols))]
    values = [floats(slots.load(x.x.element_type, place)) for place in places]
    if cfg.rope:
        row = row_of(x, t, tile)
        cos, sin = x.cos[row, None], x.sin[row, None]
        if cfg.half % STRIDE == 0:
            values = rotated_pairs(cfg, values, cols, cos, sin)
        else:
            for j in range(-(-2 * cfg.half // STRIDE)):
                values[j] = rotated(cfg.half, values[j], x.x[row, None], cos, sin, cols[j])
                if cfg.dim > 96:
                    cute.arch.sync_warp()  # as in rotated_pairs
    return [kept(cfg, j, lane, vector) for j, vector in enumerate(values)]


def column(cfg, j: int, lane: Int32) -> Int32:
    """Where the thread's vector j begins; inside for a thread that has no such vector, too."""
    col = j * STRIDE + lane * VECTOR
    return cutlass.min(col, cfg.dim - VECTOR) if (j + 1) * STRIDE > cfg.dim else col


def kept(cfg, j: int, lane: Int32, vector: list[Float32]) -> list[Float32]:
    """Zeros where there is no such vector."""
    if (j + 1) * STRIDE <= cfg.dim:
        return vector
    inside = j * STRIDE + lane * VECTOR < cfg.dim
    return [cutlass.select_(inside, value, Float32(0.0)) for value in vector]


def floats(x: cute.Tensor) -> list[Float32]:
    """In registers; a bf16 number is the upper half of a fp32 one."""
    if x.element_type == BFloat16:
        words = cute.recast_tensor(x, Int32)
        pairs = [(words[i] << 16, words[i] & -65536) for i in range(cute.size(words))]
        return [from_bits(half) for pair in pairs for half in pair]
    wide = x.load().to(Float32)
    return [wide[i] for i in range(cute.size(x))]


# RoPE. Products are rounded before they are added, as torch does


def rotated_pairs(cfg, x: Values, cols: list[Int32], cos, sin) -> Values:
    """Where a thread holds both channels of a pair."""
    step = cfg.half // STRIDE
    for j in range(step):
        if cfg.dim > 128 and j % 2 == 0:
            cute.arch.sync_warp()  # else the assembler reads all angles at once, and spills
        c, s = (floats(vectors.load(t, cols[j], VECTOR)) for t in (cos, sin))
        a, b = x[j], x[j + step]
        x[j] = [product(a[e], c[e]) - product(b[e], s[e]) for e in range(VECTOR)]
        x[j + step] = [product(b[e], c[e]) + product(a[e], s[e]) for e in range(VECTOR)]
    return x


def rotated(half: int, x: list[Float32], row, cos, sin, col: Int32) -> list[Float32]:
    """Where they are apart: the other one is read again. Neighbours are rotated alike where half
    allows it; if not, this is slow. Addresses of wide rows may spill."""
    if half % VECTOR == 0:
        other, angle, first, inside = of_pair(half, col)
        partner, c, s = (
            floats(vectors.load(t, at, VECTOR))
            for t, at in ((row, other), (cos, angle), (sin, angle))
        )
        return [turned(*four, first, inside) for four in zip(x, partner, c, s)]
    turned_all = []
    for e, value in enumerate(x):
        other, angle, first, inside = of_pair(half, col + e)
        four = value, row[other].to(Float32), cos[angle].to(Float32), sin[angle].to(Float32)
        turned_all.append(turned(*four, first, inside))
    return turned_all


def of_pair(half: int, channel: Int32):
    """(its other channel, their angle, whether channel is the first one, whether it is rotated);
    indices are in range whatever channel is."""
    first, inside = channel < half, channel < 2 * half
    other = cutlass.select_(first, channel + half, cutlass.select_(inside, channel - half, channel))
    angle = cutlass.select_(first, channel, cutlass.select_(inside, channel - half, Int32(0)))
    return other, angle, first, inside


def turned(value: Float32, partner: Float32, c: Float32, s: Float32, first, inside) -> Float32:
    """a c - b s for the first of a pair, b c + a s for the second."""
    other = product(partner, s)
    other = cutlass.select_(first, -other, other)
    return cutlass.select_(inside, product(value, c) + other, value)


# Scales


@cute.jit
def largest(cfg: cutlass.Constexpr, values: cutlass.Constexpr[list]) -> Float32:
    """The largest finite |x| that the thread holds. NaN is no maximum of the hardware's either;
    with an infinity, which is rare, all are looked at again."""
    top = largest_of(cfg, values)
    if top == Float32.inf:
        top = largest_of(cfg, [[finite(v) for v in vector] for vector in values])
    return top


def largest_of(cfg, values: Values) -> Float32:
    """Before the norms but once: rounded products have the order of what they are products of."""
    top, norms = Float32(0.0), [norm_of(cfg, j) for j in range(len(values))]
    for norm in dict.fromkeys(norms):
        part = Float32(0.0)
        for vector in (v for v, n in zip(values, norms) if n == norm):
            for value in vector:
                part = cute.arch.fmax(part, cute.math.absf(value))
        top = cute.arch.fmax(top, part * norm)
    return top


def of_quad(value: Float32, maximum: bool) -> Float32:
    for bit in (1, 2):
        other = cute.arch.shuffle_sync_bfly(value, bit)
        value = cute.arch.fmax(value, other) if maximum else value + other
    return value


@cute.jit
def of_block(cfg: cutlass.Constexpr, top: Float32, maxima: cute.Tensor) -> Float32:
    """The largest of the warps that share a scale. maxima alternate from tile to tile, so that one
    barrier is enough."""
    warp, lane, warps = cute.arch.warp_idx(), cute.arch.lane_idx(), cfg.k_block // WARP_ROWS
    if lane == 0:
        maxima[warp] = top
    cute.arch.barrier()
    top = maxima[(warp & -warps) + lane % warps]
    return cute.arch.warp_reduction_max(top, threads_in_group=warps)


@cute.jit
def scale_of(top: Float32) -> Float32:
    """top / 448, correctly rounded: quotient, exact remainder, correction; 1 for zeros."""
    quotient = top * (1 / E4M3_MAX)
    quotient = fma(fma(-quotient, Float32(E4M3_MAX), top), Float32(1 / E4M3_MAX), quotient)
    scale = cute.arch.fmax(quotient, Float32(MIN_SCALE))
    return Float32(1.0) if top == 0.0 else scale


@cute.jit
def store(cfg: cutlass.Constexpr, mine: Row, row: cute.Tensor, inverse: Float32):
    """Times the norms and the scale's inverse, in e4m3."""
    lane = cute.arch.lane_idx() % LANES
    for j in cutlass.range_constexpr(len(mine.values)):
        times, n = inverse * norm_of(cfg, j), len(mine.values[j])
        if const_expr(mine.signs is not None):
            times = times * mine.signs[j]
        words = cute.make_rmem_tensor(n // 4, Int32)
        for i in cutlass.range_constexpr(n // 4):
            # the sum with 0 leaves no -0, which a wrong sign would have made
            four = [fma(value, times, Float32(0.0)) for value in mine.values[j][4 * i : 4 * i + 4]]
            words[i] = packed_e4m3(*four)
        if const_expr(cfg.quarters):
            put(words, row, (j * LANES + lane) * n)
        elif const_expr((j + 1) * STRIDE <= cfg.dim):
            put(words, row, j * STRIDE + lane * VECTOR)
        elif j * STRIDE + lane * VECTOR < cfg.dim:
            put(words, row, j * STRIDE + lane * VECTOR)


def norm_of(cfg, j: int) -> float:
    return cfg.norms[0 if cfg.quarters else j]


def put(words: cute.Tensor, row: cute.Tensor, col: Int32):
    """16 bytes at a time."""
    size = 4 * cute.size(words)
    for i in range(0, size, 16):
        n = min(size, 16)
        part = cute.recast_tensor(words, row.element_type)
        part = cute.make_tensor(part.iterator + i, cute.make_layout(n))
        cute.autovec_copy(part, vectors.at(row, col + i, n))
