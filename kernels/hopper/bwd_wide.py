"""Hopper backward attention for head dims above 128: a CTA per block of 64 keys and KV head, one
producer warp, two consumer warpgroups that share the queries of a block while they compute scores,
and the columns of dQ, dK and dV.

Row statistics, loads and dQ's last step are those of bwd.py.
"""

from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.utils import hopper_helpers as hopper

from cute_attn.kernels.hopper import bwd, bwd_wide_mainloop
from cute_attn.kernels.hopper.bwd_operands import Mmas


class Layout(bwd.Layout):
    @property
    def folded(self) -> bool:
        return False  # 256 columns leave no room in shared memory

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
    def announce(self, pipes, shape, tile):
        """Warpgroups themselves do: the other waits for it."""

    layout = Layout
    main = bwd_wide_mainloop

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
