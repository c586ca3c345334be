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
from cutlass import Int32

from cute_attn.kernels.common.bwd_walk import Tile
from cute_attn.kernels.hopper.bwd_operands import Smem

COORDINATES = len(Tile._fields) - 1  # all but the share


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
