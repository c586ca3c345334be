"""Producer warp of the backward: K and V of a tile, and Q, dO and statistics of their rows, block
by block and head by head of the group; tile after tile."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync

from cute_attn.kernels.common import bwd_walk
from cute_attn.kernels.common.bwd_walk import Shape, Tile
from cute_attn.kernels.hopper import bwd_tickets
from cute_attn.kernels.hopper.bwd_operands import Inputs, Smem
from cute_attn.kernels.hopper.operands import TmaOperand


@cute.jit
def _partition(op: TmaOperand, sX: cute.Tensor, shape: cutlass.Constexpr, head, batch):
    gX = cute.local_tile(op.tensor[None, None, head, batch], shape, (None, 0))
    return cpasync.tma_partition(
        op.atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    )


@cute.jit
def _issue(op: TmaOperand, src, dst, m, ring, state):
    """A tile of Q or dO."""
    ring.producer_acquire(state)
    barrier = ring.producer_get_barrier(state)
    cute.copy(op.atom, src[None, m], dst[None, state.index], tma_bar_ptr=barrier)


@cute.jit
def _issue_statistics(cfg, words, smem: Smem, m, ring, state):
    """Of the rows of Q, on the barrier of Q."""
    src = cute.local_tile(words[None, m], (cfg.statistics,), (0,))
    dst = smem.statistics[None, None, state.index].iterator
    dst = cute.make_tensor(cute.recast_ptr(dst, dtype=src.element_type), src.layout)
    bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), src.element_type)
    with cute.arch.elect_one():
        cute.copy(bulk, src, dst, mbar_ptr=ring.producer_get_barrier(state))


@cute.jit
def _operand(op: TmaOperand, sX: cute.Tensor, cfg, width: cutlass.Constexpr, tile: Tile, ring, at):
    s, g = _partition(op, sX, (64, width), tile.kv_head, tile.batch)
    ring.producer_acquire(at)
    for w in cutlass.range_constexpr(cfg.key_tiles):
        cute.copy(
            op.atom,
            g[None, tile.n_block * cfg.key_tiles + w],
            s[None, w],
            tma_bar_ptr=ring.producer_get_barrier(at),
        )


@cute.jit
def _keys(cfg, x: Inputs, smem: Smem, pipes, tile: Tile, at):
    _operand(x.k, smem.k, cfg, cfg.width, tile, pipes.k, at)
    _operand(x.v, smem.v, cfg, cfg.width_v, tile, pipes.v, at)


@cute.jit
def _following_keys(cfg, x: Inputs, smem: Smem, pipes, tile: Tile, at):
    """V first: consumers hand it back before K."""
    _operand(x.v, smem.v, cfg, cfg.width_v, tile, pipes.v, at)
    _operand(x.k, smem.k, cfg, cfg.width, tile, pipes.k, at)


@cute.jit
def _block(cfg, x: Inputs, smem: Smem, pipes, tile: Tile, head: Int32, m: Int32, at):
    """A block of queries of one head."""
    sQ, gQ = _partition(x.q, smem.q, (cfg.tile_m, cfg.width), head, tile.batch)
    sdO, gdO = _partition(x.do, smem.do, (cfg.tile_m, cfg.width_v), head, tile.batch)
    _issue(x.q, gQ, sQ, m, pipes.q, at)
    _issue_statistics(cfg, x.statistics[None, None, head, tile.batch], smem, m, pipes.q, at)
    _issue(x.do, gdO, sdO, m, pipes.do, at)


@cute.jit
def _queries(cfg, x: Inputs, smem: Smem, pipes, shape: Shape, tile: Tile, at, done: Int32):
    """All of a tile's blocks but the first, where that is done."""
    head, m = tile.head, tile.m
    if done > 0:
        head, m = bwd_walk.following(shape, tile, head, m)
    for _ in cutlass.range(done, tile.blocks, unroll=1):
        _block(cfg, x, smem, pipes, tile, head, m, at)
        at.advance()
        head, m = bwd_walk.following(shape, tile, head, m)
    return at


@cute.jit
def load_one(cfg, x: Inputs, smem: Smem, pipes, shape: Shape, tile: Tile):
    """A CTA's only tile."""
    producer = pipeline.PipelineUserType.Producer
    _keys(cfg, x, smem, pipes, tile, pipeline.make_pipeline_state(producer, 1))
    cute.arch.griddepcontrol_wait()  # row statistics
    at = pipeline.make_pipeline_state(producer, cfg.stages)
    _queries(cfg, x, smem, pipes, shape, tile, at, Int32(0))


@cute.jit
def load(cfg, causal: cutlass.Constexpr[bool], x: Inputs, smem: Smem, pipes, shape: Shape):
    """Consumers hand back slots of Q and dO while they are in a tile's last block, then V, then K:
    the following tile's first block comes before its keys."""
    producer = pipeline.PipelineUserType.Producer
    at = pipeline.make_pipeline_state(producer, cfg.stages)
    of_tile = pipeline.make_pipeline_state(producer, 1)  # its ticket, K and V
    first = cute.arch.grid_dim()[0]  # tile that is drawn first
    index = cute.arch.block_idx()[0]
    if const_expr(cfg.deterministic):
        first = Int32(0)
        cute.arch.griddepcontrol_wait()  # the counter's zero
        index = bwd_walk.draw(cfg, x.statistics)
    if const_expr(cfg.shares):
        if shape.whole < first:  # as in the deterministic kernel
            first = Int32(0)
            cute.arch.griddepcontrol_wait()
            index = bwd_walk.draw(cfg, x.statistics)
    tile = bwd_walk.tile_at(cfg, causal, shape, index)
    bwd_tickets.publish(smem, pipes.tickets, tile, of_tile)
    _keys(cfg, x, smem, pipes, tile, of_tile)
    if const_expr(not cfg.deterministic):
        cute.arch.griddepcontrol_wait()  # row statistics, and the counter's zero
    done = Int32(0)
    while tile.n_block >= 0:
        at = _queries(cfg, x, smem, pipes, shape, tile, at, done)
        index = first + bwd_walk.draw(cfg, x.statistics)
        tile = bwd_walk.tile_at(cfg, causal, shape, index)
        of_tile.advance()
        bwd_tickets.publish(smem, pipes.tickets, tile, of_tile)
        if tile.n_block >= 0:
            head, m = tile.head, tile.m
            _block(cfg, x, smem, pipes, tile, head, m, at)
            at.advance()
            _following_keys(cfg, x, smem, pipes, tile, of_tile)
        done = Int32(1)
