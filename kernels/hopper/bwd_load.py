"""Producer warp of the backward: K and V once, then Q, dO and statistics of their rows, block by
block and head by head of the group."""

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
        statistics = x.statistics[None, None, head, tile.batch]
        for m in cutlass.range(tile.m_begin, shape.m_blocks, unroll=1):
            _issue(x.q, gQ, sQ, m, pipes.q, q)
            _issue_statistics(cfg, statistics, smem, m, pipes.q, q)
            _issue(x.do, gdO, sdO, m, pipes.do, do)
            q.advance()
            do.advance()
