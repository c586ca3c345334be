"""V for the forward kernel: less its shift, cast to e4m3 and transposed, keys in the order of
kernels/common/v_layout.py; or V in e4m3 transposed alone.

A thread reads 16 bytes, neighbouring channels, of the four keys whose codes are one word of vt, so
that bytes change places in registers. Words go through shared memory, from which a warp writes
whole rows of vt: 16 keys, a chunk, are 16 bytes of a thread.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.common import v_layout, vectors
from cute_attn.kernels.common.bits import packed_e4m3
from cute_attn.kernels.hopper.quantize_rows import THREADS, WARPS, floats

CHUNK = 16  # keys, whose codes a thread writes
WORD = 4  # keys of a word
QUAD = CHUNK // WORD
SWIZZLE = 8  # chunks whose places are exchanged, so that a warp writes to all banks at once


class Values(NamedTuple):
    """Of a head, in one batch."""

    v: cute.Tensor  # (seqlen_k, head_dim_v)
    vt: cute.Tensor  # e4m3 (head_dim_v, padded keys)
    scale: cute.Tensor | Float32  # (channels) in shared memory, or one; None: v is e4m3 already


class Plan(NamedTuple):
    """How a CTA takes a tile, at trace time."""

    vector: int  # channels of 16 bytes
    strips: int  # groups of 8 threads' vectors: what a warp reads of a key
    keys: int  # of a tile
    by_channel: bool  # whether every channel has its scale

    @property
    def words(self) -> int:
        """Of a channel."""
        return self.keys // WORD

    @property
    def channels(self) -> int:
        return self.strips * 8 * self.vector

    @property
    def chunks(self) -> int:
        return self.keys // CHUNK


def plan(head_dim_v: int, bits: int, by_channel: bool = False) -> Plan:
    """A tile gives every warp as many chunks of a strip to read; two of 16 bits, for what a warp
    does but once takes as many instructions as a chunk."""
    vector = 128 // bits
    strips = -(-head_dim_v // (8 * vector))
    keys = v_layout.PADDING
    while strips * keys // CHUNK % WARPS or strips * keys // CHUNK < WARPS * bits // 8:
        keys *= 2
    return Plan(vector, strips, keys, by_channel)


def tiles(p: Plan, padded):
    return -(-padded // p.keys)


class Read(NamedTuple):
    """What a thread has of a chunk: of four keys, and the shift of its channels."""

    keys: list[cute.Tensor]
    shift: cute.Tensor  # None: 0


def read_tile(p: Plan, v: cute.Tensor, shift, tile: Int32) -> list[Read]:
    """On its way: the chunks of strips that the warp reads."""
    raw = [keys_of_word(p, v, tile, unit) for unit in units(p)]
    if shift is None:
        return [Read(keys, None) for keys in raw]
    # a warp has one strip, if their number allows it
    own = units(p) if WARPS % p.strips else units(p)[:1]
    read = [vectors.load(shift, inside(p, v, unit), p.vector) for unit in own]
    return [Read(keys, read[i % len(read)]) for i, keys in enumerate(raw)]


def units(p: Plan) -> list[Int32]:
    return [cute.arch.warp_idx() + i * WARPS for i in range(p.strips * p.chunks // WARPS)]


@cute.jit
def transpose_tile(
    p: cutlass.Constexpr, x: Values, read: cutlass.Constexpr, stage: cute.Tensor, tile: Int32
):
    """read: from read_tile. stage: (channels * words) of Int32 in shared memory."""
    tidx = cute.arch.thread_idx()[0]
    for unit, mine in zip(units(p), read):
        words_to_stage(p, x, mine, stage, tile, unit)
    cute.arch.barrier()
    for i in cutlass.range_constexpr(p.channels * p.chunks // THREADS):
        item = i * THREADS + tidx
        channel, chunk = item // p.chunks, item % p.chunks
        key = tile * p.keys + chunk * CHUNK
        if channel < x.vt.shape[0] and key < x.vt.shape[1]:
            words = cute.make_rmem_tensor(QUAD, Int32)
            at = place(p, channel, chunk)
            cute.autovec_copy(four_words(stage, at), words)
            codes = cute.recast_tensor(words, x.vt.element_type)
            cute.autovec_copy(codes, vectors.at(x.vt[channel, None], key, CHUNK))


def keys_of_word(p: Plan, v: cute.Tensor, tile: Int32, unit: Int32) -> list[cute.Tensor]:
    """The thread's channels of the four keys; what is outside is read inside."""
    lane, last = cute.arch.lane_idx(), v.shape[0] - 1
    col = inside(p, v, unit)
    first = tile * p.keys + unit // p.strips * CHUNK
    keys = [first + v_layout.key_at(lane % QUAD * WORD + j) for j in range(WORD)]
    return [vectors.load(v[cutlass.min(key, last), None], col, p.vector) for key in keys]


def column(p: Plan, unit: Int32) -> Int32:
    """Where the thread's channels begin."""
    return (unit % p.strips * 8 + cute.arch.lane_idx() // QUAD) * p.vector


def inside(p: Plan, v: cute.Tensor, unit: Int32) -> Int32:
    """The same, for what is outside where v has them."""
    return cutlass.min(column(p, unit), v.shape[1] - p.vector)


def words_to_stage(p: Plan, x: Values, read: Read, stage: cute.Tensor, tile: Int32, unit: Int32):
    lane = cute.arch.lane_idx()
    words = codes(p, x, read, unit) if x.scale is not None else bytes_apart(read.keys)
    keep = there(x.v.shape[0], tile * p.keys + unit // p.strips * CHUNK, lane % QUAD)
    at = place(p, column(p, unit), unit // p.strips) + lane % QUAD
    for e, word in enumerate(words):
        stage[at + e * p.words] = word & keep


def there(end: Int32, first: Int32, thread: Int32) -> Int32:
    """A mask of the word's keys that exist."""
    mask = Int32(0)
    for j in range(WORD):
        key = first + v_layout.key_at(thread * WORD + j)
        mask = mask | cutlass.select_(key < end, Int32(signed(0xFF << 8 * j)), Int32(0))
    return mask


def signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def place(p: Plan, channel: Int32, chunk: Int32) -> Int32:
    """Where a chunk begins in the stage. The channels that a warp writes at once are a vector
    apart: chunks change places among SWIZZLE by which vector it is."""
    return channel * p.words + (chunk ^ (channel // p.vector % SWIZZLE)) * QUAD


def four_words(stage: cute.Tensor, at: Int32) -> cute.Tensor:
    pointer = cute.make_ptr(
        Int32, (stage.iterator + at).toint(), cute.AddressSpace.smem, assumed_align=16
    )
    return cute.make_tensor(pointer, cute.make_layout(QUAD))


# Words of four keys


def codes(p: Plan, x: Values, read: Read, unit: Int32) -> list[Int32]:
    """(v - shift) / scale of every channel."""
    n = p.vector
    keys = [floats(t) for t in read.keys]
    if read.shift is not None:
        shift = floats(read.shift)
        keys = [[a - b for a, b in zip(key, shift)] for key in keys]
    if p.by_channel:
        scale = floats(vectors.load(x.scale, column(p, unit), n))
    else:
        scale = [x.scale]
    inverse = [cute.arch.rcp_approx(s) for s in scale] * (n // len(scale))
    return [packed_e4m3(*(key[e] * inverse[e] for key in keys)) for e in range(n)]


def bytes_apart(raw: list[cute.Tensor]) -> list[Int32]:
    """Of four keys' codes, 16 channels each, a word of every channel."""
    keys = [cute.recast_tensor(t, Int32) for t in raw]
    words = []
    for i in range(cute.size(keys[0])):
        a, b, c, d = (key[i] for key in keys)
        for pick in (0x5140, 0x7362):  # two channels: a0 b0 a1 b1 and c0 d0 c1 d1
            low, high = prmt(a, b, pick), prmt(c, d, pick)
            words += [prmt(low, high, 0x5410), prmt(low, high, 0x7632)]
    return words


def prmt(a: Int32, b: Int32, pick: int) -> Int32:
    return Int32(cute.arch.prmt(a, b, pick))


# V in 16 bits, less its shift


@cute.jit
def shift_tile(cfg: cutlass.Constexpr, v, shift, out, tile: Int32):
    """out (seqlen_k, head_dim_v) = v - shift in v's dtype; cfg.shift_keys keys of a CTA."""
    lanes = cfg.lanes_v
    tidx, step = cute.arch.thread_idx()[0], THREADS // lanes
    col = tidx % lanes * 8
    rows = [tile * cfg.shift_keys + tidx // lanes + i * step for i in range(cfg.shift_rows)]
    inside = cutlass.min(col, v.shape[1] - 8)
    raw = [vectors.load(v[cutlass.min(row, v.shape[0] - 1), None], inside, 8) for row in rows]
    less = floats(vectors.load(shift, inside, 8))
    for i in cutlass.range_constexpr(cfg.shift_rows):
        moved = cute.make_rmem_tensor(8, v.element_type)
        for e in cutlass.range_constexpr(8):
            moved[e] = (raw[i][e].to(Float32) - less[e]).to(v.element_type)
        if rows[i] < v.shape[0] and col < v.shape[1]:
            cute.autovec_copy(moved, vectors.at(out[rows[i], None], col, 8))
