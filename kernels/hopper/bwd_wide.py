"""Hopper backward attention for head dims above 128: a CTA per block of 64 keys and KV head, one
producer warp, one that announces dS, two consumer warpgroups: one for P and dV, one for dS and dK,
and half the columns of dQ each.

Row statistics, loads and dQ's last step are those of bwd.py.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import cpasync

from cute_attn.kernels.common import bwd_walk
from cute_attn.kernels.common.bwd_walk import Shape, Tile
from cute_attn.kernels.hopper import bwd, bwd_load, bwd_turns, bwd_wide_mainloop
from cute_attn.kernels.hopper.bwd_operands import Inputs, Smem
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
    def shared_tiles(self) -> int:
        return self.ds_slots + 2  # P, in fp32 at most

    @property
    def key_parts(self) -> int:
        return self.warpgroups  # a part of 96 columns must not begin within a swizzled row

    @property
    def dq_by_rows(self) -> bool:
        return False

    @property
    def dq_width(self) -> int:
        return self.width // self.warpgroups


class BackwardWideSm90(bwd.BackwardSm90):
    layout = Layout
    main = bwd_wide_mainloop

    @cute.jit
    def only_tile(self, shape: Shape):
        index = cute.arch.block_idx()[0]
        return bwd_walk.tile_at(self.cfg, self.problem.causal, shape, index)

    @cute.jit
    def load(self, x: Inputs, smem: Smem, pipes, shape: Shape, tile: Tile):
        bwd_load.load_one(self.cfg, x, smem, pipes, shape, tile)

    @cute.jit
    def announce(self, smem: Smem, pipes, shape: Shape, tile: Tile):
        bwd_wide_mainloop.announce(self.cfg, pipes, shape, tile)

    @cute.jit
    def keep_order(self, x: Inputs, smem: Smem, pipes, shape: Shape, tile: Tile, wg: Int32):
        cute.arch.griddepcontrol_wait()  # counters' zeros
        bwd_turns.keep_order_of(self.cfg, self.problem.causal, x, shape, tile, wg)

    @cute.jit
    def consume(self, c, wg: Int32, tile: Tile, softmax_scale: Float32):
        cute.arch.griddepcontrol_wait()  # dQ's zeros
        if wg == bwd_wide_mainloop.OF_P:
            self.consume_one(c.of_warpgroup(bwd_wide_mainloop.OF_P), tile, softmax_scale)
        else:
            self.consume_one(c.of_warpgroup(bwd_wide_mainloop.OF_DS), tile, softmax_scale)

    @cute.jit
    def consume_one(self, c, tile: Tile, softmax_scale: Float32):
        once = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        c.pipes.k.consumer_wait(once)
        c.pipes.v.consumer_wait(once)
        c.tile(tile)
        c.finish(tile, softmax_scale)

    def outputs(self, mdK, mdV) -> list[TmaOperand]:
        """In the layouts of K and V, whose memory they leave through."""
        cfg, put = self.cfg, cpasync.CopyBulkTensorTileS2GOp()
        return [
            self.operand(put, mdK, (64, cfg.width), cfg.key_tiles, cfg.key_parts),
            self.operand(put, mdV, (64, cfg.width_v), cfg.key_tiles),
        ]

    def statistics_mma(self) -> None:
        """They are added in registers."""
