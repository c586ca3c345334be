"""Which block of keys a CTA works on next: tickets, drawn from a counter in global memory.

The loader draws and divides (`publish`), everybody else reads coordinates (`receive`), from shared
memory; one place is enough, as a tile's have been read long before the next one is drawn. That is
when all loads of the tile are issued: late, so that tiles go to the CTAs that are nearest to their
end, but early enough for the next one's first loads to run beside that end.

The counter lies behind the statistics of the first block of queries, and `row_statistics` of the
same call zeroes it. To load K and V before that kernel has ended, a CTA's first tile is that of its
index; not in the deterministic kernel (bwd_turns.py says why), nor if CTAs share such tiles.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_attn.kernels.hopper import bwd_walk
from cute_attn.kernels.hopper.bwd_operands import Shape, Smem, Tile

COORDINATES = len(Tile._fields) - 1  # all but the share
NO_TILE = -1  # as a block of keys: the work is done


@cute.jit
def tile_at(cfg, causal: cutlass.Constexpr[bool], shape: Shape, index: Int32) -> Tile:
    """As many heads at a time as the L2 cache holds; of them the blocks of keys that most queries
    see come first, so that the short ones fill the gaps at the end. They come last where dQ is
    added up in turn (bwd_turns.py). Several tickets after one another may be parts of a tile
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
        n_block = shape.n_blocks - 1 - n_block
    begin = Int32(0)
    if const_expr(causal):
        first_query = n_block * cfg.tile_n - (shape.seqlen_k - shape.seqlen_q)
        begin = cutlass.max(first_query, 0) // cfg.tile_m
    n_block = n_block if valid else Int32(NO_TILE)
    kv_head = head - batch * shape.heads_kv
    walk = bwd_walk.walk(cfg, shape, kv_head, begin, part, parts)
    return Tile(n_block, kv_head, batch, *walk, share)


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


@cute.jit
def publish(smem: Smem, tickets, tile: Tile, at):
    tickets.producer_acquire(at)
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(COORDINATES):
            smem.tickets[i] = tile[i]
        smem.tickets[COORDINATES + (1 - at.phase)] = tile.share
    tickets.producer_commit(at)


@cute.jit
def receive(smem: Smem, tickets, at) -> Tile:
    tickets.consumer_wait(at)
    tile = [smem.tickets[i] for i in range(COORDINATES)]
    tickets.consumer_release(at)
    return Tile(*[cute.arch.make_warp_uniform(x) for x in tile])


@cute.jit
def share_of(smem: Smem, at) -> Int32:
    """Of the tile received at `at`, when it is done: from a place of its own, since it would take a
    register till then, and the next tile is drawn already. The one after that has this place."""
    return cute.arch.make_warp_uniform(smem.tickets[COORDINATES + at.phase])


def readers(cfg) -> int:
    """Threads that receive: consumers, the warp that announces dS, and who follows the turns."""
    turns = 32 * cfg.warpgroups if cfg.deterministic else 0
    return 128 * cfg.warpgroups + 32 + turns
