"""In which order a tile visits blocks of queries: of each block all heads of the group, then of the
next block. Loader, consumers and the warps that follow the turns walk alike.

Where heads share K and V, from the last block to the first: the tiles of a KV head all visit that
one, so CTAs that begin together stay together and find in the L2 cache what the others read and
add to. From the first block on, head after head, tiles of 8 query heads and a causal mask are soon
a head or two apart.

In the deterministic kernel from the first block on: bwd_turns.py says why.
"""

import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_attn.kernels.hopper.bwd_operands import Shape, Tile


@cute.jit
def step(cfg, shape: Shape) -> Int32:
    """From a block to the next one."""
    one = Int32(1)
    if const_expr(not cfg.deterministic):
        one = Int32(1) if shape.q_per_kv == 1 else Int32(-1)
    return one


@cute.jit
def walk(cfg, shape: Shape, kv_head: Int32, begin: Int32, part: Int32, parts: Int32):
    """(head, block, blocks): where a part begins to visit all heads' blocks from `begin` on, and
    how many it visits."""
    n = shape.q_per_kv
    blocks = n * (shape.m_blocks - begin)  # one at least
    first = blocks * part // parts
    m = begin if step(cfg, shape) > 0 else shape.m_blocks - 1
    m = m + first // n * step(cfg, shape)
    return kv_head * n + first % n, m, blocks * (part + 1) // parts - first


@cute.jit
def following(cfg, shape: Shape, tile: Tile, head: Int32, m: Int32):
    """The block of queries after (head, m)."""
    head = head + 1
    if head == (tile.kv_head + 1) * shape.q_per_kv:
        head = tile.kv_head * shape.q_per_kv
        m = m + step(cfg, shape)
    return head, m


@cute.jit
def before(cfg, shape: Shape, tile: Tile, head: Int32, m: Int32):
    """The block of queries before (head, m), if that is not the first."""
    if head == tile.kv_head * shape.q_per_kv:
        head = head + shape.q_per_kv
        m = m - step(cfg, shape)
    return head - 1, m
