"""Shared memory: layouts, the storage struct and the pipelines that guard it."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import pipeline
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum

from cute_attn.kernels.hopper.operands import NOTES, Dtypes, Inputs, Smem


def tile_layout(dtype, shape, stages, stage_elements=0, columns=0):
    """Row-major tile in the widest swizzle that divides its row, or so many columns of it, with a
    stage mode whose stride is at least stage_elements."""
    kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, columns or shape[1])
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    layout = cute.tile_to_shape(atom, (*shape, stages), order=(0, 1, 2))
    if stage_elements <= shape[0] * shape[1]:
        return layout
    tile = cute.select(layout.outer, mode=[0, 1])
    stage = cute.make_layout(stages, stride=stage_elements)
    outer = cute.make_layout((*tile.shape, stage.shape), stride=(*tile.stride, stage.stride))
    return cute.make_composed_layout(layout.inner, layout.offset, outer)


def instead_of_registers(cfg, x: Inputs) -> tuple[int, int]:
    """Factors of FP8 queries that lie here, and warps that note their tile."""
    if x.scales is None or not cfg.few_registers(cute.size(x.o.layout, mode=[1])):
        return 0, 0
    return cfg.tile_m, cfg.tile_m // 16


def storage_struct(cfg, dtypes: Dtypes, x: Inputs):
    def tile(dtype, elements):
        return cute.struct.Align[cute.struct.MemRange[dtype, elements], 1024]

    def ring(stages):
        return cute.struct.MemRange[cutlass.Int64, 2 * stages]

    o_elements = cute.cosize(x.o.layout) * dtypes.o.width // dtypes.q.width
    floats, warps = instead_of_registers(cfg, x)

    @cute.struct
    class Storage:
        q_full: ring(cfg.q_ring)
        k_full: ring(cfg.kv_stages)
        v_full: ring(cfg.v_ring)
        o_full: ring(cfg.q_ring)
        ticket_full: ring(2)
        tickets: cute.struct.MemRange[cutlass.Int32, 10]
        notes: cute.struct.MemRange[cutlass.Int64, NOTES * warps]
        rows: cute.struct.MemRange[cutlass.Float32, floats]
        q: tile(dtypes.q, max(cute.cosize(x.q.layout), o_elements))
        k: tile(dtypes.k, cute.cosize(x.k.layout))
        v: tile(dtypes.v, cute.cosize(x.v.layout))

    return Storage


class Pipelines(NamedTuple):
    q: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    o: pipeline.PipelineAsync  # only its full barriers: the Q ring hands the slots back
    tickets: pipeline.PipelineAsync


def make_pipelines(cfg, dtypes: Dtypes, storage, x: Inputs) -> Pipelines:
    """One producer thread; every consumer warp releases a K or V slot, one a Q slot."""

    def group(n):
        return pipeline.CooperativeGroup(pipeline.Agent.Thread, n)

    def ring(barriers, stages, dtype, layout, releases):
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers.data_ptr(),
            num_stages=stages,
            producer_group=group(1),
            consumer_group=group(releases),
            tx_count=cute.size_in_bytes(dtype, cute.select(layout, mode=[0, 1])),
            defer_sync=True,
        )

    def handshake(barriers, stages, writers, readers):
        return pipeline.PipelineAsync.create(
            barrier_storage=barriers.data_ptr(),
            num_stages=stages,
            producer_group=group(writers),
            consumer_group=group(readers),
            defer_sync=True,
        )

    pipes = Pipelines(
        ring(storage.q_full, cfg.q_ring, dtypes.q, x.q.layout, 1),
        ring(storage.k_full, cfg.kv_stages, dtypes.k, x.k.layout, 4 * cfg.warpgroups),
        ring(storage.v_full, cfg.v_ring, dtypes.v, x.v.layout, 4 * cfg.warpgroups),
        handshake(storage.o_full, cfg.q_ring, 128, 1),
        handshake(storage.ticket_full, 2, 32, 128 * cfg.warpgroups + 32),
    )
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    return pipes


def smem_tensors(cfg, storage, dtypes: Dtypes, x: Inputs) -> Smem:
    def view(field, layout, dtype=None):
        return field.get_tensor(layout.outer, swizzle=layout.inner, dtype=dtype)

    rows, warps = instead_of_registers(cfg, x)
    return Smem(
        q=view(storage.q, x.q.layout),
        k=view(storage.k, x.k.layout),
        v=view(storage.v, x.v.layout),
        o=view(storage.q, x.o.layout, dtypes.o),
        tickets=storage.tickets.get_tensor(cute.make_layout((5, 2))),
        rows=storage.rows.get_tensor(cute.make_layout(rows)) if rows else None,
        notes=storage.notes.get_tensor(cute.make_layout((NOTES, warps))) if warps else None,
    )
