"""Named bundles of the backward, so that device functions take few arguments."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32


class Inputs(NamedTuple):
    """Global memory."""

    gQ: cute.Tensor  # (seqlen_q, head_dim, head, batch)
    gK: cute.Tensor  # (seqlen_k, head_dim, kv_head, batch)
    gV: cute.Tensor  # (seqlen_k, head_dim_v, kv_head, batch)
    gdO: cute.Tensor  # (seqlen_q, head_dim_v, head, batch)
    gdK: cute.Tensor
    gdV: cute.Tensor
    statistics: cute.Tensor  # (block_words, block, head, batch) fp32
    dq: cute.Tensor  # (tile_m * width, block, head, batch) fp32, in accumulators' order


class Visit(NamedTuple):
    """A block of queries of one head."""

    head: Int32
    m: Int32


class At(NamedTuple):
    """An address in shared memory: start, which a warp's threads share, + lane. Steps to the right
    change lane alone (TileLayout.step), so places in like tiles have their registers in common."""

    lane: Int32
    start: Int32

    def down(self, size) -> "At":
        return At(self.lane, self.start + size)


class Places(NamedTuple):
    """Of the first slots of rings; of operands the row that the thread names to ldmatrix, of
    results its first pair. Columns of a warp of several begin at its own."""

    base: Int32
    k: At  # A operands of S and dP: 16 columns of this warp's keys
    v: At
    q: At  # B operands of S and dP: of this warp's queries
    do: At
    q_t: At  # B operands of dK and dV: this warp's columns of the first queries
    do_t: At
    ds_a: At  # A operands of dK: dS of this warp's keys; of dV: P, behind
    ds_t: At  # A operands of dQ: this warp's queries of dS
    k_t: At  # B operands of dQ: this warp's columns
    ds: At  # results: dS, and P, behind
    dk: At
    dv: At
    statistics: Int32  # of this thread's first query
    dq: Int32  # float of dQ's accumulator
    key: Int32  # first of this thread, in the sequence
    query: Int32  # first of this thread, in a block
    own: Int32  # first query of this warp
