"""Named bundles, so that device functions take few arguments."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

NOTES = 5  # address of K's factors; m_block, head, batch and number of the tile


class TmaOperand(NamedTuple):
    atom: cute.CopyAtom
    tensor: cute.Tensor  # TMA coordinate tensor, (seqlen, head_dim, head, batch)
    layout: cute.ComposedLayout  # shared memory, (tile, ..., stages)


class Dtypes(NamedTuple):
    """Of elements in memory; P has V's."""

    q: type
    k: type
    v: type
    o: type


class Mmas(NamedTuple):
    qk: cute.TiledMma  # S = Q K^T, both from shared memory
    qk_half: cute.TiledMma  # the same for the first half of a block's keys
    pv: cute.TiledMma  # O += P V, P in registers


class Parts(NamedTuple):
    """Attention over a part of the keys each, to be merged."""

    out: cute.Tensor  # (seqlen_q, head_dim_v, head, batch, part) fp32
    ref: cute.Tensor  # (seqlen_q, head, batch, part) fp32: what weights are relative to, in log2
    log_sum: cute.Tensor  # the same shape: log2 of their sum


class Scales(NamedTuple):
    """Factors of FP8 operands, fp32."""

    q: cute.Tensor  # (seqlen_q, group of heads, batch)
    k: cute.Tensor  # (groups of keys, kv_head, batch)
    v: cute.Tensor  # (head_dim_v, kv_head, batch)
    v_shift: cute.Tensor  # (head_dim_v, kv_head, batch): what was taken off V
    q_dot: cute.Tensor  # (seqlen_q, head, batch): q times what was taken off K
    q_heads: Int32  # query heads in a group
    k_shift: Int32  # log2 of the KV blocks in a group of keys


class Rounding(NamedTuple):
    """Of O in e4m3, fp32 (1,)."""

    scale: cute.Tensor  # O is multiplied by it before it is rounded
    amax: cute.Tensor  # the largest finite |O| before that; 0 at the launch


class Inputs(NamedTuple):
    q: TmaOperand
    k: TmaOperand
    v: TmaOperand
    o: TmaOperand
    gQ: (
        cute.Tensor | None
    )  # (seqlen_q, head_dim, head, batch), read outside TMA in rare branches only
    gK: cute.Tensor | None  # (seqlen_k, head_dim, kv_head, batch)
    gV: cute.Tensor | None  # (seqlen_k, head_dim_v, kv_head, batch)
    lse: cute.Tensor  # (seqlen_q, head, batch)
    parts: Parts | None  # where O and row statistics go if the keys are split
    counter: cute.Tensor  # (1,) int32, zero between launches
    scales: Scales | None = None  # of FP8 operands, whose gQ, gK and gV are None
    rounding: Rounding | None = None  # of O in e4m3


class Smem(NamedTuple):
    q: cute.Tensor  # (64, head_dim, slots)
    k: cute.Tensor  # (tile_n, head_dim, stages)
    v: cute.Tensor  # (tile_n, head_dim_v, stages)
    o: cute.Tensor  # (64, head_dim_v, slots), in the same slots as q
    tickets: cute.Tensor  # (5, 2) coordinates of tiles, from the loader to everybody else
    rows: cute.Tensor | None = None  # (tile_m,) fp32: factors of FP8 queries
    notes: cute.Tensor | None = None  # (NOTES, consumer warp) int64: what has no registers in FP8


class Tile(NamedTuple):
    """Coordinates of one CTA's work."""

    m_block: Int32
    head: Int32
    batch: Int32
    kv_end: Int32  # one past the last KV block; 0: no tile, the work is done
    part: Int32  # of the keys
    number: Int32 = Int32(0)  # among those of the CTA
