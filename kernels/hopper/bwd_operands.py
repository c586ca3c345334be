"""Named bundles of the backward, so that device functions take few arguments."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

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


class Shape(NamedTuple):
    """Run-time extents of one launch."""

    seqlen_q: Int32
    seqlen_k: Int32
    q_per_kv: Int32  # query heads that share a KV head
    m_blocks: Int32
    n_blocks: Int32
    heads_kv: Int32
    heads: Int32  # heads_kv * batch
    together: Int32  # of them, those whose tiles are taken in one go
    whole: Int32  # tiles of a CTA each, before
    shared: Int32  # tiles that several share,
    parts: Int32  # which so many do


class Tile(NamedTuple):
    """Coordinates of one CTA's work: a block of keys of one KV head, and the blocks of queries that
    see some of them, or a part of these."""

    n_block: Int32  # -1: no tile, the work is done
    kv_head: Int32
    batch: Int32
    head: Int32  # of queries, and
    m: Int32  # block of queries, the first that is visited
    blocks: Int32  # that are visited (bwd_walk.py)
    share: Int32 | None = None  # number among the parts of all tiles that CTAs share, or negative
