"""Named bundles of the backward, so that device functions take few arguments."""

from typing import NamedTuple

import cutlass.cute as cute

from cute_attn.kernels.hopper.operands import TmaOperand


class Mmas(NamedTuple):
    scores: cute.TiledMma  # S^T = K Q^T and dP^T = V dO^T, both operands from shared memory
    dv: cute.TiledMma  # dV += P^T dO, P in registers
    dk: cute.TiledMma  # dK += dS^T Q, dS in registers
    dq: cute.TiledMma  # dQ = dS K, both from shared memory
    statistics: cute.TiledMma | None  # ones times statistics, which S and dP end with; bf16


class Inputs(NamedTuple):
    q: TmaOperand
    k: TmaOperand
    v: TmaOperand
    do: TmaOperand
    dk: TmaOperand
    dv: TmaOperand
    ds: cute.ComposedLayout  # shared memory, (64 keys, tile_m, shared_tiles)
    statistics: cute.Tensor  # (block_words, block, head, batch)
    dq: cute.Tensor  # (tile_m * head_dim, block, head, batch) fp32, in accumulators' order
    shares: cute.Tensor  # fp32, of tiles that CTAs share (bwd_parts.py)


class Smem(NamedTuple):
    q: cute.Tensor  # (tile_m, head_dim, stages)
    k: cute.Tensor  # (64, head_dim, warpgroups)
    v: cute.Tensor  # (64, head_dim_v, warpgroups)
    do: cute.Tensor  # (tile_m, head_dim_v, stages)
    ds: cute.Tensor  # (64, tile_m, shared_tiles): ds_tiles a slot, then P, if passed on
    statistics: cute.Tensor  # (tile_m, STEP, stages) bf16, an operand, or (tile_m, 2, stages) fp32
    ones: cute.Tensor  # (64, STEP, 2) bf16, the other operand
    tickets: cute.Tensor  # (8,) a tile's coordinates, from the loader to everybody else
    out: cute.Tensor  # (64, 64, pieces) of dK and dV, in dS's memory
