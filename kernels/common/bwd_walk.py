"""The tiles of the backward, each a block of keys of a KV head: which is whose, and in which order
it visits blocks of queries: of each block all heads of the group, then of the next block. Loaders,
those who compute and those who follow the turns walk alike.

Where heads share K and V, from the last block to the first: the tiles of a KV head all visit that
one, so CTAs that begin together stay together and find in the L2 cache what the others read and
add to. From the first block on, head after head, tiles of 8 query heads and a causal mask are soon
a head or two apart.

Where dQ is added up in turn each block of queries has the sums of all tiles in one order, which
their tickets follow, so that a tile waits for lower tickets only. Heads that share K and V are
walked from the last block on, by the first keys first: those tiles are long, and late they would
end late (8 KV heads of 8 query heads, 8k, as a list for 132 multiprocessors: 1.26 of the time
without gaps last keys first, 1.03 first keys first). A single head is walked from the first block
on, by the last keys first: with a causal mask a CTA begins at the first queries that see its keys,
which no later keys share, and the CTAs of later keys are ahead of it when it comes to theirs. By
the first keys first it would begin by waiting for one that has all earlier queries before it.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

NO_TILE = -1  # as a block of keys: the work is done
L2_KB = 32 * 1024  # of the heads whose tiles follow each other
FEW = 6  # tiles a multiprocessor; below, heads are taken together where tiles differ in length


class Shape(NamedTuple):
    """Run-time extents of one launch."""

    seqlen_q: Int32
    seqlen_k: Int32
    q_per_kv: Int32  # query heads that share a KV head
    m_blocks: Int32
    n_blocks: Int32
    heads_kv: Int32
    heads: Int32  # heads_kv * batch
    together: Int32  # of them, those whose tiles are taken in one go
    whole: Int32  # tiles of a CTA each, before
    shared: Int32  # tiles that several share,
    parts: Int32  # which so many do


class Tile(NamedTuple):
    """Coordinates of one CTA's work: a block of keys of one KV head, and the blocks of queries that
    see some of them, or a part of these."""

    n_block: Int32  # -1: no tile, the work is done
    kv_head: Int32
    batch: Int32
    head: Int32  # of queries, and
    m: Int32  # block of queries, the first that is visited
    blocks: Int32  # that are visited
    share: Int32 | None = None  # number among the parts of all tiles that CTAs share, or negative


@cute.jit
def shape_of(cfg, mQ, mK, m_blocks, sms: Int32, whole: Int32, parts: Int32) -> Shape:
    """Of mQ, mK (seqlen, head_dim, heads, batch) on so many multiprocessors."""
    problem = cfg.problem
    heads, q_per_kv = mK.shape[2] * mK.shape[3], mQ.shape[2] // mK.shape[2]
    n_blocks = cute.ceil_div(mK.shape[0], cfg.tile_n)
    row = 2 * (problem.head_dim + problem.head_dim_v)  # bytes
    m_kb = cfg.tile_m * (row + 4 * cfg.width) // 1024
    n_kb = cfg.tile_n * 2 * row // 1024
    together = L2_KB // (q_per_kv * m_blocks * m_kb + n_blocks * n_kb)
    together = cutlass.max(cutlass.min(together, heads), 1)
    if const_expr(problem.causal):
        # The last heads' long tiles would begin when others end: 8 KV heads of 8 query heads,
        # 8k, scheduled on 132 multiprocessors as a list, take 1.24 of the time without gaps one
        # head at a time and 1.01 four or eight together. Two tiles a multiprocessor or nearly
        # so even each other out. The L2 cache matters less in a group's order.
        rounds = cutlass.max(heads * n_blocks // (2 * sms - sms // 16), 1)
        even = cutlass.max(together, cute.ceil_div(heads, rounds))
        few = (q_per_kv > 1) | (heads * n_blocks < FEW * sms)
        # Where several heads' Q, dO and dQ are more than the cache, CTAs share the last tiles.
        together = even if few & (parts == 1) else together
    extents = mQ.shape[0], mK.shape[0], q_per_kv, m_blocks, n_blocks
    tiles = n_blocks * heads
    return Shape(*extents, mK.shape[2], heads, together, whole, tiles - whole, parts)


@cute.jit
def tile_at(cfg, causal: cutlass.Constexpr[bool], shape: Shape, index: Int32) -> Tile:
    """As many heads at a time as the L2 cache holds; of them the blocks of keys that most queries
    see come first, so that the short ones fill the gaps at the end. They come last where dQ of a
    single head is added up in turn. Several tickets after one another may be parts of a tile
    (bwd_parts.py)."""
    share, part, parts = Int32(-1), Int32(0), Int32(1)
    if const_expr(cfg.shares):
        share = index - shape.whole
        if share >= 0:
            parts = shape.parts
            index = shape.whole + share // parts
            part = share % parts
    valid = index < shape.n_blocks * shape.heads
    index = index if valid else Int32(0)
    group = index // (shape.together * shape.n_blocks)
    index = index - group * shape.together * shape.n_blocks
    first = group * shape.together
    heads = cutlass.min(shape.together, shape.heads - first)
    n_block = index // heads
    head = first + index - n_block * heads
    batch = head // shape.heads_kv
    if const_expr(cfg.deterministic):
        n_block = shape.n_blocks - 1 - n_block if shape.q_per_kv == 1 else n_block
    begin = Int32(0)
    if const_expr(causal):
        first_query = n_block * cfg.tile_n - (shape.seqlen_k - shape.seqlen_q)
        begin = cutlass.max(first_query, 0) // cfg.tile_m
    n_block = n_block if valid else Int32(NO_TILE)
    kv_head = head - batch * shape.heads_kv
    return Tile(n_block, kv_head, batch, *walk(shape, kv_head, begin, part, parts), share)


def counter_of(cfg, words: cute.Tensor) -> cute.Pointer:
    """Of the tickets drawn. words (block_words, block, head, batch)."""
    first = words[None, 0, 0, 0].iterator + cfg.ticket_word
    return cute.make_ptr(Int32, first.toint(), cute.AddressSpace.gmem, assumed_align=4)


@cute.jit
def draw(cfg, words: cute.Tensor) -> Int32:
    """The next ticket, by one warp; after griddepcontrol.wait."""
    ticket = Int32(0)
    if cute.arch.lane_idx() == 0:
        ticket = cute.arch.atomic_add(counter_of(cfg, words).llvm_ptr, Int32(1))
    return cute.arch.shuffle_sync(ticket, 0)


def step(shape: Shape) -> Int32:
    """From a block to the next one."""
    return cutlass.select_(shape.q_per_kv == 1, Int32(1), Int32(-1))


@cute.jit
def walk(shape: Shape, kv_head: Int32, begin: Int32, part: Int32, parts: Int32):
    """(head, block, blocks): where a part begins to visit all heads' blocks from `begin` on, and
    how many it visits."""
    n = shape.q_per_kv
    blocks = n * (shape.m_blocks - begin)  # one at least
    first = blocks * part // parts
    m = begin if step(shape) > 0 else shape.m_blocks - 1
    m = m + first // n * step(shape)
    return kv_head * n + first % n, m, blocks * (part + 1) // parts - first


@cute.jit
def following(shape: Shape, tile: Tile, head: Int32, m: Int32):
    """The block of queries after (head, m)."""
    head = head + 1
    if head == (tile.kv_head + 1) * shape.q_per_kv:
        head = tile.kv_head * shape.q_per_kv
        m = m + step(shape)
    return head, m


@cute.jit
def before(shape: Shape, tile: Tile, head: Int32, m: Int32):
    """The block of queries before (head, m), if that is not the first."""
    if head == tile.kv_head * shape.q_per_kv:
        head = head + shape.q_per_kv
        m = m - step(shape)
    return head - 1, m


@cute.jit
def turn_of(cfg, causal: cutlass.Constexpr[bool], shape: Shape, tile: Tile, m: Int32) -> Int32:
    """How many tiles add to block m of queries before this one: of those that visit it, all from
    the first block of keys to the last that one of its queries sees."""
    turn = tile.n_block
    if shape.q_per_kv == 1:
        last = shape.n_blocks - 1
        if const_expr(causal):
            last_key = shape.seqlen_k - shape.seqlen_q + (m + 1) * cfg.tile_m - 1
            last = cutlass.min(last, last_key // cfg.tile_n)
        turn = last - tile.n_block
    return turn


@cute.jit
def wait_until(counter: cute.Pointer, turn: Int32):
    seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    while seen != turn:
        seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
