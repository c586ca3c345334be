"""Factors of FP8 operands on their way to the consumers, ahead of them."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from cute_attn.kernels.common.schedule import Shape
from cute_attn.kernels.hopper.operands import Scales, Tile

LANES = 32
SECTOR = 8  # words that come together


@cute.jit
def prefetch(cfg, problem, scales: Scales, shape: Shape, tile: Tile):
    """What the next tile's consumers will read, into the L1 they share with this warp: as Q, it
    comes ahead of them. They would wait for memory several times a tile otherwise."""
    if const_expr(problem.tile_dim == 224):  # loaded by 32 columns: no registers left
        return
    lane, kv_head = cute.arch.lane_idx(), tile.head // shape.q_per_kv
    step, last = cfg.tile_m // LANES, shape.seqlen_q - 1
    for rows in (
        scales.q[None, tile.head // scales.q_heads, tile.batch],
        scales.q_dot[None, tile.head, tile.batch],
    ):
        lane = _touch(rows, cutlass.min(tile.m_block * cfg.tile_m + lane * step, last), lane)
    last = (tile.kv_end - 1) >> scales.k_shift
    if const_expr(problem.fine_k):
        last = cute.ceil_div(shape.seqlen_k, 16) - 1
    keys = scales.k[None, kv_head, tile.batch]
    lane = _touch(keys, cutlass.max(last - lane * SECTOR, 0), lane)
    for given, values in ((problem.channels, scales.v), (problem.v_shift, scales.v_shift)):
        if const_expr(given):
            channel = cutlass.min(lane * SECTOR, values.shape[0] - 1)
            lane = _touch(values[None, kv_head, tile.batch], channel, lane)


@cute.jit
def _touch(values: cute.Tensor, at: Int32, lane: Int32) -> Int32:
    """lane again, so that the next address waits for this one: the loader has few registers."""
    address = (values.iterator + cute.crd2idx(at, values.layout)).toint()
    operands = [Int64(address).ir_value(), lane.ir_value()]
    asm = "prefetch.global.L1 [$1]; mov.b32 $0, $2;"
    return Int32(llvm.inline_asm(T.i32(), operands, asm, "=r,l,r", has_side_effects=True))
