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
from cute_attn.kernels.common.bits import fma, from_bits, packed_e4m3, product
from cute_attn.kernels.hopper import hadamard
from cute_attn.kernels.hopper.hadamard import LANES, STRIDE, VECTOR, Values

THREADS = 512
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
    factor: cute.Tensor  # fp32 (head_dim): the balance times the signs; None: 1
    out: cute.Tensor  # e4m3 (seqlen, head_dim)
    scale: cute.Tensor  # fp32 (seqlen) or (blocks)


class Tiles(NamedTuple):
    """What a thread does tile after tile: of rows first, first + ROWS, ..."""

    raw: cute.Tensor  # in registers, (VECTOR, vectors): the next row
    table: cute.Tensor  # (2, head_dim) in shared memory, see fill_table
    first: Int32
    count: Int32


# Tiles


@cute.jit
def quantise_queries(cfg: cutlass.Constexpr, x: Head, dots, table, first_tile: Int32):
    """dots (seqlen): q . shift, before the balance; None where there is no shift."""
    tidx, end = cute.arch.thread_idx()[0], x.x.shape[0]
    t = begin(cfg, x, table, first_tile, const_expr(False))
    for i in cutlass.range(t.count, unroll=1):
        row = t.first + i * ROWS
        values, dot = transformed(cfg, x, t, i, const_expr(False))
        top = of_quad(largest(cfg, values), const_expr(True))
        scale = scale_of(top)
        if const_expr(dots is not None):
            dot = of_quad(dot, const_expr(False))
        if row < end:
            store(cfg, values, x.out[row, None], cute.arch.rcp_approx(scale))
            if tidx % LANES == 0:
                x.scale[row] = scale
                if const_expr(dots is not None):
                    dots[row] = dot


@cute.jit
def quantise_keys(cfg: cutlass.Constexpr, x: Head, table, maxima, first_tile: Int32, block: Int32):
    """maxima: (WARPS, 2) in shared memory. block: keys of a scale where no tile holds them all."""
    tidx, end = cute.arch.thread_idx()[0], x.x.shape[0]
    t = begin(cfg, x, table, first_tile, const_expr(True))
    for i in cutlass.range(t.count, unroll=1):
        row = t.first + i * ROWS
        values, _ = transformed(cfg, x, t, i, const_expr(True))
        if const_expr(cfg.k_block == 0):
            scale = x.scale[cutlass.min(row, end - 1) // block]
        else:
            top = cute.arch.warp_reduction_max(largest(cfg, values))
            scale = scale_of(of_block(cfg, top, maxima[None, i % 2]))
        if row < end:
            store(cfg, values, x.out[row, None], cute.arch.rcp_approx(scale))
            if const_expr(cfg.k_block != 0):
                if tidx % (LANES * cfg.k_block) == 0:
                    x.scale[row // cfg.k_block] = scale


@cute.jit
def measure_keys(cfg: cutlass.Constexpr, x: Head, table, maxima, first_tile: Int32):
    """maxima (ceil(seqlen / 8)), of 8 keys each: what a warp holds."""
    tidx, end = cute.arch.thread_idx()[0], x.x.shape[0]
    t = begin(cfg, x, table, first_tile, const_expr(True))
    for i in cutlass.range(t.count, unroll=1):
        row = t.first + i * ROWS
        values, _ = transformed(cfg, x, t, i, const_expr(True))
        top = cute.arch.warp_reduction_max(largest(cfg, values))
        if row < end and tidx % 32 == 0:
            maxima[row // WARP_ROWS] = top


@cute.jit
def begin(
    cfg: cutlass.Constexpr, x: Head, table, first_tile: Int32, keys: cutlass.Constexpr
) -> Tiles:
    """The first row is on its way while the table is filled."""
    shape = cute.make_layout((VECTOR, hadamard.vectors(cfg.dim)))
    count = cutlass.min(cfg.tiles, cute.ceil_div(x.x.shape[0], ROWS) - first_tile)
    t = Tiles(
        cute.make_rmem_tensor(shape, x.x.element_type),
        table,
        first_tile * ROWS + cute.arch.thread_idx()[0] // LANES,
        count,
    )
    load(cfg, x, t, Int32(0))
    fill_table(cfg, x, table, keys)
    return t


@cute.jit
def fill_table(cfg: cutlass.Constexpr, x: Head, table, keys: cutlass.Constexpr):
    """Factors, and of queries the shift, of keys -shift * factor: (k - shift) * factor is one
    multiply-add then, to the same bits, since factors are powers of two."""
    channel = cute.arch.thread_idx()[0]
    if channel < cfg.dim:
        factor = x.factor[channel] if const_expr(x.factor is not None) else Float32(1.0)
        table[0, channel] = factor
        if const_expr(x.shift is not None):
            shift = x.shift[channel]
            table[1, channel] = -shift * factor if const_expr(keys) else shift
    cute.arch.barrier()


@cute.jit
def load(cfg: cutlass.Constexpr, x: Head, t: Tiles, tile: Int32):
    """A row to come; what is outside is read inside."""
    lane = cute.arch.lane_idx() % LANES
    row = x.x[row_of(x, t, tile), None]
    for j in cutlass.range_constexpr(hadamard.vectors(cfg.dim)):
        cute.autovec_copy(vectors.at(row, column(cfg, j, lane), VECTOR), t.raw[None, j])


def row_of(x: Head, t: Tiles, tile: Int32) -> Int32:
    return cutlass.min(t.first + tile * ROWS, x.x.shape[0] - 1)


# Steps of a row


@cute.jit
def transformed(cfg: cutlass.Constexpr, x: Head, t: Tiles, tile: Int32, keys: cutlass.Constexpr):
    """(what is cast but for norms, what the thread has of the dot product with the shift)."""
    if const_expr(not cfg.ahead):
        if tile > 0:
            load(cfg, x, t, tile)
    values, dot = scaled(cfg, x, t, tile, keys)
    if const_expr(cfg.ahead):
        if tile + 1 < t.count:
            load(cfg, x, t, tile + 1)
    if const_expr(cfg.hadamard):
        values = hadamard.transform(values, cfg.dim)
    return values, dot


def scaled(cfg, x: Head, t: Tiles, tile: Int32, keys: bool):
    lane = cute.arch.lane_idx() % LANES
    values = loaded(cfg, x, t, row_of(x, t, tile), lane)
    dot = Float32(0.0)
    for j, vector in enumerate(values):
        col = column(cfg, j, lane)
        factor = shift = None
        if x.factor is not None:
            factor = floats(vectors.load(t.table[0, None], col, VECTOR))
        if x.shift is not None:
            shift = floats(vectors.load(t.table[1, None], col, VECTOR))
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


def loaded(cfg, x: Head, t: Tiles, row: Int32, lane: Int32) -> Values:
    """Rotated, in fp32; zeros outside."""
    cols = [column(cfg, j, lane) for j in range(hadamard.vectors(cfg.dim))]
    values = [floats(t.raw[None, j]) for j in range(len(cols))]
    if cfg.rope:
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
    top = Float32(0.0)
    for norm in dict.fromkeys(cfg.norms):
        part = Float32(0.0)
        for vector in (v for v, n in zip(values, cfg.norms) if n == norm):
            for value in vector:
                part = cute.arch.fmax(part, cute.math.absf(value))
        top = cute.arch.fmax(top, part * norm)
    return top


def finite(value: Float32) -> Float32:
    return cutlass.select_(cute.math.absf(value) < Float32.inf, value, Float32(0.0))


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
    top = maxima[warp // warps * warps + lane % warps]
    return cute.arch.warp_reduction_max(top, threads_in_group=warps)


@cute.jit
def scale_of(top: Float32) -> Float32:
    """top / 448, correctly rounded: quotient, exact remainder, correction; 1 for zeros."""
    quotient = top * (1 / E4M3_MAX)
    quotient = fma(fma(-quotient, Float32(E4M3_MAX), top), Float32(1 / E4M3_MAX), quotient)
    scale = cute.arch.fmax(quotient, Float32(MIN_SCALE))
    return Float32(1.0) if top == 0.0 else scale


@cute.jit
def store(cfg: cutlass.Constexpr, values: cutlass.Constexpr[list], row: cute.Tensor, inverse):
    """Times the norms and the scale's inverse, in e4m3."""
    lane = cute.arch.lane_idx() % LANES
    for j in cutlass.range_constexpr(len(values)):
        times = inverse * cfg.norms[j]
        x = [value * times for value in values[j]]
        words = cute.make_rmem_tensor(VECTOR // 4, Int32)
        for i in cutlass.range_constexpr(VECTOR // 4):
            words[i] = packed_e4m3(*x[4 * i : 4 * i + 4])
        if const_expr((j + 1) * STRIDE <= cfg.dim):
            put(words, row, j * STRIDE + lane * VECTOR)
        elif j * STRIDE + lane * VECTOR < cfg.dim:
            put(words, row, j * STRIDE + lane * VECTOR)


def put(words: cute.Tensor, row: cute.Tensor, col: Int32):
    cute.autovec_copy(cute.recast_tensor(words, row.element_type), vectors.at(row, col, VECTOR))
