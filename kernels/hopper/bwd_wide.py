"""Hopper backward attention for head dims above 128: a CTA per block of 64 keys and KV head, one
producer warp, two consumer warpgroups that share the queries of a block while they compute scores,
and the columns of dQ, dK and dV.

Row statistics, loads and dQ's last step are those of bwd.py.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.utils import hopper_helpers as hopper

from cute_attn.kernels.hopper import bwd, bwd_load, bwd_tickets, bwd_turns, bwd_wide_mainloop
from cute_attn.kernels.hopper.bwd_operands import Inputs, Mmas, Shape, Smem, Tile
from cute_attn.kernels.hopper.operands import TmaOperand


class Layout(bwd.Layout):
    @property
    def folded(self) -> bool:
        return False  # 256 columns leave no room in shared memory

    @property
    def persistent(self) -> bool:
        return False

    @property
    def ds_slots(self) -> int:
        """As many as the rings have stages, so that one state counts both."""
        return self.stages

    @property
    def tile_n(self) -> int:
        return 64

    @property
    def key_tiles(self) -> int:
        return 1

    @property
    def score_columns(self) -> int:
        return self.tile_m // self.warpgroups

    @property
    def shared_tiles(self) -> int:
        return 2 * self.ds_slots  # P and dS

    @property
    def ds_writers(self) -> int:
        return 128 * self.warpgroups

    @property
    def ds_readers(self) -> int:
        return 4 * self.warpgroups  # warps

    @property
    def column_parts(self) -> int:
        return self.warpgroups  # a part of 96 columns must not begin within a swizzled row

    @property
    def dq_by_rows(self) -> bool:
        return False

    @property
    def dq_width(self) -> int:
        return self.width // self.warpgroups

    @property
    def dv_width(self) -> int:
        return self.width_v // self.warpgroups


class BackwardWideSm90(bwd.BackwardSm90):
    layout = Layout
    main = bwd_wide_mainloop

    @cute.jit
    def only_tile(self, shape: Shape):
        index = cute.arch.block_idx()[0]
        return bwd_tickets.tile_at(self.cfg, self.problem.causal, shape, index)

    @cute.jit
    def load(self, x: Inputs, smem: Smem, pipes, shape: Shape, tile: Tile):
        bwd_load.load_one(self.cfg, x, smem, pipes, shape, tile)

    def announce(self, smem, pipes, shape):
        """Warpgroups themselves do: the other waits for it."""

    @cute.jit
    def keep_order(self, x: Inputs, smem: Smem, pipes, shape: Shape, tile: Tile, wg: Int32):
        cute.arch.griddepcontrol_wait()  # counters' zeros
        bwd_turns.keep_order_of(self.cfg, self.problem.causal, x, shape, tile, wg)

    @cute.jit
    def consume(self, c, tile: Tile, softmax_scale: Float32):
        once = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        c.pipes.k.consumer_wait(once)
        c.pipes.v.consumer_wait(once)
        cute.arch.griddepcontrol_wait()  # dQ's zeros
        c.tile(tile)
        c.finish(tile, softmax_scale)

    def outputs(self, mdK, mdV) -> list[TmaOperand]:
        cfg, put = self.cfg, cpasync.CopyBulkTensorTileS2GOp()
        widths = (mdK, cfg.width), (mdV, cfg.width_v)
        return [self.operand(put, t, (64, width), cfg.key_tiles) for t, width in widths]

    def mmas(self) -> Mmas:
        cfg, dtype = self.cfg, self.dtype
        K, MN = OperandMajorMode.K, OperandMajorMode.MN
        make, one = hopper.make_trivial_tiled_mma, (1, 1, 1)
        return Mmas(
            make(dtype, dtype, K, K, Float32, one, (64, cfg.score_columns)),
            make(dtype, dtype, K, MN, Float32, one, (64, cfg.dv_width)),
            make(dtype, dtype, K, MN, Float32, one, (64, cfg.dq_width)),
            make(dtype, dtype, MN, MN, Float32, one, (64, cfg.dq_width)),
            None,
        )
