"""Producer warp: TMA loads, tile after tile; K runs one block ahead of V, last block first."""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr, pipeline
from cutlass.cute.nvgpu import cpasync

from cute_attn.kernels.common.schedule import Shape
from cute_attn.kernels.hopper import fp8_factors, scheduler
from cute_attn.kernels.hopper.operands import Inputs, Smem, Tile, TmaOperand


@cute.jit
def _partition(op: TmaOperand, sX: cute.Tensor, shape: cutlass.Constexpr, head, batch):
    gX = cute.local_tile(
        op.tensor[None, None, head, batch], shape, (None, 0)
    )  # (rows, head_dim, blocks)
    return cpasync.tma_partition(
        op.atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    )


@cute.jit
def _issue(atom, src, dst, ring, state):
    ring.producer_acquire(state)
    cute.copy(atom, src, dst[None, state.index], tma_bar_ptr=ring.producer_get_barrier(state))
    state.advance()
    return state


@cute.jit
def _views(cfg, problem, x: Inputs, smem: Smem, shape: Shape, tile: Tile):
    """(shared, global) views of this tile's Q, K and V, one mode of blocks each."""
    kv_head = tile.head // shape.q_per_kv
    d, dv = problem.tile_dim, problem.tile_dim_v
    return (
        _partition(x.q, smem.q, (64, d), tile.head, tile.batch),
        _partition(x.k, smem.k, (cfg.tile_n, d), kv_head, tile.batch),
        _partition(x.v, smem.v, (cfg.tile_n, dv), kv_head, tile.batch),
    )


@cute.jit
def _begin(cfg, problem, x: Inputs, smem: Smem, pipes, shape: Shape, tile: Tile, q, k):
    """The first K block, and Q, whose slots O of the tile before may still have to leave."""
    (tQs, tQg), (tKs, tKg), _ = _views(cfg, problem, x, smem, shape, tile)
    k = _issue(x.k.atom, tKg[None, tile.kv_end - 1], tKs, pipes.k, k)
    for w in cutlass.range_constexpr(cfg.warpgroups):
        q = _issue(x.q.atom, tQg[None, tile.m_block * cfg.warpgroups + w], tQs, pipes.q, q)
    return q, k


@cute.jit
def _blocks(cfg, problem, x: Inputs, smem: Smem, pipes, shape: Shape, tile: Tile, k, v):
    """K of every further block before V of the one it follows."""
    _, (tKs, tKg), (tVs, tVg) = _views(cfg, problem, x, smem, shape, tile)
    last = tile.kv_end - 1
    for i in cutlass.range(last - scheduler.kv_begin(cfg, shape, tile), unroll=1):
        k = _issue(x.k.atom, tKg[None, last - 1 - i], tKs, pipes.k, k)
        v = _issue(x.v.atom, tVg[None, last - i], tVs, pipes.v, v)
    return k, v


@cute.jit
def load(cfg, problem, x: Inputs, smem: Smem, pipes, shape: Shape):
    producer = pipeline.PipelineUserType.Producer
    q = pipeline.make_pipeline_state(producer, cfg.q_ring)
    k = pipeline.make_pipeline_state(producer, cfg.kv_stages)
    v = pipeline.make_pipeline_state(producer, cfg.v_ring)
    t = pipeline.make_pipeline_state(producer, 2)
    index = cute.arch.block_idx()[0]
    tile = scheduler.tile_at(cfg, problem, shape, index)
    t = scheduler.publish(cfg, smem, pipes, tile, t)
    if const_expr(x.scales is not None):
        fp8_factors.prefetch(cfg, problem, x.scales, shape, tile)
    q, k = _begin(cfg, problem, x, smem, pipes, shape, tile, q, k)
    while tile.kv_end > 0:
        k, v = _blocks(cfg, problem, x, smem, pipes, shape, tile, k, v)
        tiles = shape.m_blocks * shape.head_batches * shape.parts
        index = scheduler.next_index(cfg, x.counter, index, tiles)
        following = scheduler.tile_at(cfg, problem, shape, index)
        t = scheduler.publish(cfg, smem, pipes, following, t)
        if const_expr(x.scales is not None):
            if following.kv_end > 0:
                fp8_factors.prefetch(cfg, problem, x.scales, shape, following)
        _, _, (tVs, tVg) = _views(cfg, problem, x, smem, shape, tile)
        first = scheduler.kv_begin(cfg, shape, tile)
        v = _issue(x.v.atom, tVg[None, first], tVs, pipes.v, v)
        if following.kv_end > 0:
            q, k = _begin(cfg, problem, x, smem, pipes, shape, following, q, k)
        tile = following
