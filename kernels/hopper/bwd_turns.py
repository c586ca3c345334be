"""dQ in a fixed order: the CTAs of a KV head add their parts of a block of queries in turn.

A counter in global memory for each block of queries, query head and consumer warpgroup says how
many blocks of keys have been added. For each consumer warpgroup a warp beside the producer follows
it, so that consumers neither poll nor wait until their reductions have reached memory:

    keep_order                consumers (add_dq)
    counter == turn?
    TURN_BARRIER         ->   wait_for_turn
                              reductions to dQ
    ADDED_BARRIER        <-   end_turn
    counter = turn + 1, when they are done

Why nobody waits for ever: of the tiles of a head, the first to add has the lowest index, the next
one the next (common/bwd_walk.py), and a tile waits for lower indices only. Tiles are tickets, drawn
in the order of their index by CTAs that run, and a CTA works on its own in that order: of the tiles
that are not done, the one with the lowest index is worked on, and waits for none. So a CTA's first
tile is a ticket too. Were it that of the CTA's index, others would wait for a CTA that finds no
room beside them, as where other work keeps some multiprocessors. (The wide kernel has a CTA per
tile, which the hardware starts in the order of their index.)
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline

from cute_attn.config import TURN_WORDS
from cute_attn.kernels.common.bwd_walk import Shape, Tile, following, turn_of, wait_until
from cute_attn.kernels.hopper import bwd_tickets
from cute_attn.kernels.hopper.bwd_operands import Smem

TURN_BARRIER = 4  # + warpgroup: it may add its part
ADDED_BARRIER = 6  # + warpgroup: its reductions are issued
THREADS = 32 + 128  # the warp that counts, and the warpgroup that adds


@cute.jit
def keep_order(
    cfg, causal: cutlass.Constexpr[bool], x, smem: Smem, tickets, shape: Shape, wg: Int32
):
    """One warp, for all parts that warpgroup wg adds, in their order."""
    cute.arch.griddepcontrol_wait()  # counters' zeros
    at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
    tile = bwd_tickets.receive(smem, tickets, at)
    while tile.n_block >= 0:
        keep_order_of(cfg, causal, x, shape, tile, wg)
        at.advance()
        tile = bwd_tickets.receive(smem, tickets, at)


@cute.jit
def keep_order_of(cfg, causal: cutlass.Constexpr[bool], x, shape: Shape, tile: Tile, wg: Int32):
    """Of one tile."""
    head, m = tile.head, tile.m
    for _ in cutlass.range(tile.blocks, unroll=1):
        turn = turn_of(cfg, causal, shape, tile, m)
        counter = counter_of(cfg, x.statistics[None, m, head, tile.batch], wg)
        with cute.arch.elect_one():
            wait_until(counter, turn)
        cute.arch.sync_warp()
        cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + wg, number_of_threads=THREADS)
        cute.arch.barrier(barrier_id=ADDED_BARRIER + wg, number_of_threads=THREADS)
        # The barrier orders the warpgroup's reductions before this store, and a release is
        # cumulative: reductions after the acquire that reads it come after them.
        with cute.arch.elect_one():
            cute.arch.store(counter, turn + 1, sem="release", scope="gpu")
        head, m = following(shape, tile, head, m)


def counter_of(cfg, words: cute.Tensor, wg: Int32) -> cute.Pointer:
    """After a block's statistics; warpgroups have cache lines of their own."""
    first = words.iterator + (cfg.statistics + TURN_WORDS // 2 * wg)
    return cute.make_ptr(Int32, first.toint(), cute.AddressSpace.gmem, assumed_align=4)


def wait_for_turn(wg: Int32):
    cute.arch.barrier(barrier_id=TURN_BARRIER + wg, number_of_threads=THREADS)


def end_turn(wg: Int32):
    cute.arch.barrier_arrive(barrier_id=ADDED_BARRIER + wg, number_of_threads=THREADS)
