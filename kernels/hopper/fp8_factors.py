"""Factors of FP8 operands on their way to the consumers, ahead of them."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm

from cute_attn.kernels.hopper.operands import Scales, Shape, Tile

LANES = 32
SECTOR = 8  # words that come together


@cute.jit
def prefetch(cfg, problem, scales: Scales, shape: Shape, tile: Tile):
    """What the next tile's consumers will read, into the L1 they share with this warp: as Q, it
    comes ahead of them. They would wait for memory several times a tile otherwise."""
    lane, kv_head = cute.arch.lane_idx(), tile.head // shape.q_per_kv
    row = cutlass.min(tile.m_block * cfg.tile_m + lane * (cfg.tile_m // LANES), shape.seqlen_q - 1)
    _touch(scales.q[None, tile.head // scales.q_heads, tile.batch], row)
    _touch(scales.q_dot[None, tile.head, tile.batch], row)
    last = (tile.kv_end - 1) >> scales.k_shift
    if const_expr(problem.fine_k):
        last = cute.ceil_div(shape.seqlen_k, 16) - 1
    _touch(scales.k[None, kv_head, tile.batch], cutlass.max(last - lane * SECTOR, 0))
    for given, values in ((problem.channels, scales.v), (problem.v_shift, scales.v_shift)):
        channel = lane * SECTOR if const_expr(given) else Int32(0)
        if channel < values.shape[0]:
            _touch(values[None, kv_head, tile.batch], channel)


@cute.jit
def _touch(values: cute.Tensor, at: Int32):
    address = (values.iterator + cute.crd2idx(at, values.layout)).toint()
    llvm.inline_asm(
        None, [Int64(address).ir_value()], "prefetch.global.L1 [$0];", "l", has_side_effects=True
    )
