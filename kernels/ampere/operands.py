"""Named bundles, so that device functions take few arguments."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32


class Inputs(NamedTuple):
    """Global memory."""

    gQ: cute.Tensor  # (seqlen_q, head_dim, head, batch)
    gK: cute.Tensor  # (seqlen_k, head_dim, kv_head, batch)
    gV: cute.Tensor  # (seqlen_k, head_dim_v, kv_head, batch)
    gO: cute.Tensor  # (seqlen_q, head_dim_v, head, batch)
    lse: cute.Tensor  # (seqlen_q, head, batch)


class Tile(NamedTuple):
    """Coordinates of one CTA's work."""

    m_block: Int32
    head: Int32
    batch: Int32
    kv_head: Int32


class Rows(NamedTuple):
    """What the rows of a tile read."""

    first: Int32  # row
    last: Int32  # row of this warp
    end: Int32  # one past their last KV block
    full: Int32  # blocks below need no element mask
