"""Which tile comes next: round-robin, or by tickets drawn from a counter in global memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline

from cute_attn.kernels.common.mask import kv_block_end
from cute_attn.kernels.common.schedule import Shape, place
from cute_attn.kernels.hopper.operands import Smem, Tile


@cute.jit
def tile_at(cfg, problem, shape: Shape, index: Int32) -> Tile:
    """Past the last index: no tile. Parts of the keys, where there are several, follow each
    other."""
    part = Int32(0)
    valid = index < shape.m_blocks * shape.head_batches * shape.parts
    if const_expr(cfg.split_kv):
        part = index // (shape.m_blocks * shape.head_batches)
        index = index - part * (shape.m_blocks * shape.head_batches)
    m_block, head, batch = place(problem, shape, index)
    end = kv_block_end(cfg, problem, (m_block + 1) * cfg.tile_m, shape)
    if const_expr(cfg.split_kv):
        begin = part * shape.part_blocks
        end = cutlass.max(cutlass.min(end, begin + shape.part_blocks), begin + 1)
    end = end if valid else Int32(0)
    return Tile(m_block, head, batch, end, part)


@cute.jit
def kv_begin(cfg, shape: Shape, tile: Tile) -> Int32:
    """The tile's first KV block."""
    begin = Int32(0)
    if const_expr(cfg.split_kv):
        begin = tile.part * shape.part_blocks
    return begin


@cute.jit
def draw_ticket(counter: cute.Tensor, total: Int32) -> Int32:
    """One warp takes the next tile; whoever draws the last ticket resets the counter."""
    ticket = Int32(0)
    if cute.arch.lane_idx() == 0:
        ticket = cute.arch.atomic_add(counter.iterator.llvm_ptr, Int32(1))
        if ticket == total - 1:
            counter[0] = Int32(0)
    return cute.arch.shuffle_sync(ticket, 0) + cute.arch.grid_dim()[0]


@cute.jit
def next_index(cfg, counter: cute.Tensor, index: Int32, total: Int32) -> Int32:
    if const_expr(cfg.schedule == "dynamic"):
        following = draw_ticket(counter, total)
    else:
        following = index + cute.arch.grid_dim()[0]
    return following


@cute.jit
def publish(cfg, smem: Smem, pipes, tile: Tile, t):
    """The loader alone divides indices into coordinates; the others read them here."""
    pipes.tickets.producer_acquire(t)
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(5 if cfg.split_kv else 4):
            smem.tickets[i, t.index] = tile[i]
    pipes.tickets.producer_commit(t)
    t.advance()
    return t


@cute.jit
def receive(cfg, smem: Smem, pipes, number: Int32) -> Tile:
    """The CTA's tile of that number, from 0 on."""
    t = pipeline.PipelineState(2, number, number & 1, number >> 1 & 1)
    pipes.tickets.consumer_wait(t)
    m_block, head, batch, kv_end = [smem.tickets[i, t.index] for i in range(4)]
    part = Int32(0)
    if const_expr(cfg.split_kv):
        part = smem.tickets[4, t.index]
    pipes.tickets.consumer_release(t)
    uniform = cute.arch.make_warp_uniform
    return Tile(*[uniform(x) for x in (m_block, head, batch, kv_end, part)], number)


def q_state(cfg, tile: Tile, wg: Int32) -> pipeline.PipelineState:
    """Where a warpgroup's Q of the tile lies."""
    count = cute.arch.make_warp_uniform(tile.number * cfg.warpgroups + wg)
    return pipeline.PipelineState(cfg.q_ring, count, count % cfg.q_ring, count // cfg.q_ring & 1)
