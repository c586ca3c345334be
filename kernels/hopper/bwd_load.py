"""Producer warp of the backward: K and V once, then Q, dO and their row statistics, block by block
and head by head of the group."""

import cutlass
import cutlass.cute as cute
from cutlass import pipeline
from cutlass.cute.nvgpu import cpasync

from cute_attn.kernels.hopper.bwd_operands import Inputs, Shape, Smem, Tile
from cute_attn.kernels.hopper.operands import TmaOperand


@cute.jit
def _partition(op: TmaOperand, sX: cute.Tensor, shape: cutlass.Constexpr, head, batch):
    gX = cute.local_tile(op.tensor[None, None, head, batch], shape, (None, 0))
    return cpasync.tma_partition(
        op.atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    )


@cute.jit
def _issue(cfg, op: TmaOperand, src, dst, rows, to_rows, m, ring, state):
    """A tile of Q or dO, and the statistics of its rows, on one barrier."""
    ring.producer_acquire(state)
    barrier = ring.producer_get_barrier(state)
    cute.copy(op.atom, src[None, m], dst[None, state.index], tma_bar_ptr=barrier)
    bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), rows.element_type)
    part = cute.local_tile(rows, (cfg.statistics,), (m,))
    with cute.arch.elect_one():
        cute.copy(bulk, part, to_rows[None, state.index], mbar_ptr=barrier)
    state.advance()
    return state


@cute.jit
def _keys(op: TmaOperand, sX: cute.Tensor, cfg, width: cutlass.Constexpr, tile: Tile, ring):
    s, g = _partition(op, sX, (64, width), tile.kv_head, tile.batch)
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
    ring.producer_acquire(state)
    for w in cutlass.range_constexpr(cfg.key_tiles):
        cute.copy(
            op.atom,
            g[None, tile.n_block * cfg.key_tiles + w],
            s[None, w],
            tma_bar_ptr=ring.producer_get_barrier(state),
        )


@cute.jit
def load(cfg, x: Inputs, smem: Smem, pipes, shape: Shape, tile: Tile):
    producer = pipeline.PipelineUserType.Producer
    q = pipeline.make_pipeline_state(producer, cfg.stages)
    do = pipeline.make_pipeline_state(producer, cfg.stages)
    _keys(x.k, smem.k, cfg, cfg.width, tile, pipes.k)
    _keys(x.v, smem.v, cfg, cfg.width_v, tile, pipes.v)
    cute.arch.griddepcontrol_wait()  # row statistics
    for g in cutlass.range(shape.q_per_kv, unroll=1):
        head = tile.kv_head * shape.q_per_kv + g
        sQ, gQ = _partition(x.q, smem.q, (cfg.tile_m, cfg.width), head, tile.batch)
        sdO, gdO = _partition(x.do, smem.do, (cfg.tile_m, cfg.width_v), head, tile.batch)
        lse, delta = x.lse[None, head, tile.batch], x.delta[None, head, tile.batch]
        for m in cutlass.range(tile.m_begin, shape.m_blocks, unroll=1):
            q = _issue(cfg, x.q, gQ, sQ, lse, smem.lse, m, pipes.q, q)
            do = _issue(cfg, x.do, gdO, sdO, delta, smem.delta, m, pipes.do, do)
