"""Which tile of queries comes when: the longest first where tiles differ, and heads that share
their keys, or the L2 with them, together."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr


class Shape(NamedTuple):
    """Run-time extents of one launch."""

    seqlen_q: Int32
    seqlen_k: Int32
    heads_q: Int32
    q_per_kv: Int32  # query heads that share a KV head
    m_blocks: Int32
    head_batches: Int32  # heads_q * batch
    group: Int32  # heads whose K and V share the L2
    tail: Int32  # heads of the last group
    parts: Int32 | None = None  # of the keys, each worked on by a CTA of its own; 1: all in one
    part_blocks: Int32 | None = None  # KV blocks of a part


def groups(l2_mb: int, heads: Int32, q_per_kv: Int32, head_bytes: Int64):
    """(heads whose K and V, head_bytes each, share l2_mb megabytes; heads of the last group).
    heads: of all sequences."""
    group = cutlass.max(Int64(l2_mb << 20) // head_bytes, Int64(1)) * q_per_kv
    group = Int32(cutlass.min(group, Int64(heads)))
    return group, heads - (heads - group) // group * group  # whole groups before it


@cute.jit
def place(problem, shape: Shape, index: Int32):
    """(m_block, head, batch) of the index-th tile."""
    if const_expr(problem.causal):
        tail = shape.head_batches - shape.tail
        first = index // (shape.m_blocks * shape.group) * shape.group
        width = shape.group
        if first >= tail:
            first = tail
            width = shape.tail
        rest = index - first * shape.m_blocks
        row = rest // width
        m_block = shape.m_blocks - 1 - row
        head_batch = first + rest - row * width
    else:
        head_batch = index // shape.m_blocks
        m_block = index - head_batch * shape.m_blocks
    batch = head_batch // shape.heads_q
    return m_block, head_batch - batch * shape.heads_q, batch
