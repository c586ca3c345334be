"""What the kernels of quantize.py work on: tensors as they index them, tiles, scratch."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_attn.config import QuantizeConfig
from cute_attn.kernels.hopper import hadamard, quantize_products, quantize_rows, quantize_v
from cute_attn.kernels.hopper import quantize_stats as stats
from cute_attn.kernels.hopper.fwd import reordered
from cute_attn.problem import Problem

TRANSPOSED = [2, 3, 1, 0]  # (batch, head, width, keys) -> (width, keys, head, batch)
TOPS = [3, 2, 1, 0]
PARTS = [3, 1, 0, 2]  # (planes, chunks, heads, width) -> (width, chunks, planes, heads)


@dataclass(frozen=True)
class Layout:
    """What follows from a problem and a config, for the tiles."""

    problem: Problem
    cfg: QuantizeConfig

    @property
    def dim(self) -> int:
        return self.problem.head_dim

    @property
    def norms(self) -> list[float]:
        if self.hadamard:
            return hadamard.norms(self.dim)
        return [1.0] * hadamard.vectors(self.dim)

    @property
    def hadamard(self) -> bool:
        return self.cfg.hadamard

    @property
    def products(self) -> bool:
        """Whether tensor cores transform q and K (quantize_products.py)."""
        plain = self.hadamard and not self.rope and self.k_block != 0
        return plain and self.problem.dtype == "bf16" and self.dim in quantize_products.DIMS

    @property
    def quarters(self) -> bool:
        """Whether threads share rows by quarters (hadamard.py)."""
        plain = self.hadamard and not self.rope and not self.products
        return plain and hadamard.has_quarters(self.dim)

    @property
    def threads(self) -> int:
        """Of a CTA with rows of q or K, or with some of V whose largest values it looks for."""
        return quantize_products.THREADS if self.products else quantize_rows.THREADS

    @property
    def rope(self) -> bool:
        return bool(self.cfg.rope)

    @property
    def half(self) -> int:
        return self.cfg.half

    @property
    def k_block(self) -> int:
        return self.cfg.k_block

    @property
    def tiles(self) -> int:
        return self.cfg.tiles

    @property
    def v_plan(self) -> quantize_v.Plan:
        return quantize_v.plan(self.problem.tile_dim_v, 16, self.cfg.v_by_channel)

    @property
    def lanes_v(self) -> int:
        return stats.lanes_of(self.problem.tile_dim_v)

    @property
    def v_ahead(self) -> int:
        """Rows of V of which a thread that looks for the largest values reads a vector before it
        waits for one."""
        return 16 if self.products and self.block_min == 2 else 8

    @property
    def shift_rows(self) -> int:
        """That a thread shifts."""
        return 4

    @property
    def shift_keys(self) -> int:
        return quantize_v.THREADS // self.lanes_v * self.shift_rows

    @property
    def block_min(self) -> int:
        """CTAs with rows of q or K on an SM. What a thread holds of a row decides, and whether the
        assembler gets along with 64 registers without spilling, which must be seen from a build:
        with twice as many on the tensor cores, or fewer."""
        if self.products:
            return {32: 4, 64: 3, 128: 2}[self.dim]
        clean = self.dim % 32 == 0 or self.dim == 16
        return 2 if clean and self.dim <= 128 and self.k_block and not self.rope else 1


class Tensors(NamedTuple):
    """As kernels index them; None where a config has no use for one."""

    q: cute.Tensor  # (seqlen_q, head_dim, head, batch), 16 bit
    k: cute.Tensor  # (seqlen_k, head_dim, head, batch)
    v: cute.Tensor  # (seqlen_k, head_dim_v, head, batch)
    cos: cute.Tensor  # (at least seqlen, half)
    sin: cute.Tensor
    k_shift: cute.Tensor  # fp32 (head_dim, head[, batch]); written where it is measured
    v_shift: cute.Tensor  # fp32 (head_dim_v, head[, batch])
    given: cute.Tensor  # balance: fp32 (head_dim, head[, batch]), any positive numbers
    balance: cute.Tensor  # the same, powers of two; written
    signs: cute.Tensor  # fp32 (head_dim), of the Hadamard transform
    factors: cute.Tensor  # of q, of K: fp32 (head_dim, head, batch), measured; scratch
    q8: cute.Tensor  # e4m3, as q
    k8: cute.Tensor
    out_v: cute.Tensor  # e4m3 (head_dim_v, padded keys, head, batch), or as v in 16 bit
    q_scale: cute.Tensor  # fp32 (seqlen_q, head, batch)
    k_scale: cute.Tensor  # fp32 (blocks, head, batch)
    v_scale: cute.Tensor  # fp32 (head_dim_v or 1, head, batch)
    dots: cute.Tensor  # fp32 (seqlen_q, head, batch): q . k_shift
    tops: cute.Tensor  # fp32 (head_dim_v or 1, chunks, head, batch): largest |v - shift|; scratch
    maxima: cute.Tensor  # fp32 (ceil(seqlen_k / 8), head, batch); scratch
    q_parts: cute.Tensor  # fp32 (head_dim, chunks of all batches, planes, head); scratch
    k_parts: cute.Tensor
    v_parts: cute.Tensor


class Sizes(NamedTuple):
    """Of a call."""

    q_rows: Int32  # of a chunk
    k_rows: Int32
    k_block: Int32  # keys of a scale
    tiles: Int32  # of q or K that a CTA takes


@cute.jit
def place(index: Int32, blocks: Int32, heads: Int32):
    """(block, head, batch). Heads come first, since a row's are mostly next to each other."""
    rest = index // heads
    batch = rest // blocks
    return rest - batch * blocks, index - rest * heads, batch


@cute.jit
def of_head(t: cute.Tensor, head: Int32, batch: Int32):
    """t[..., head] or t[..., head, batch] of a vector that batches may share."""
    if const_expr(cute.rank(t) == 2):
        return t[None, head]
    else:
        return t[None, head, batch]


@cute.jit
def shared_words(words: cutlass.Constexpr[int], kind: cutlass.Constexpr):
    allocator = cutlass.memory.SmemAllocator()
    return allocator.allocate_tensor(kind, cute.make_layout(words), byte_alignment=128)


def carved(scratch, shapes) -> list:
    """Its parts, one after another."""
    tensors, begin = [], 0
    for shape in shapes:
        if shape is None:
            tensors.append(None)
            continue
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        layout = cute.make_layout(shape, stride=tuple(strides))
        tensors.append(cute.make_tensor(scratch.iterator + begin, layout))
        begin = begin + strides[0] * shape[0]
    return tensors


def heads_only(t):
    """(batch, head) -> (1, head, batch)"""
    if t is None:
        return None
    (batch, heads), (d_batch, d_head) = t.shape, t.stride
    layout = cute.make_layout((1, heads, batch), stride=(0, d_head, d_batch))
    return cute.make_tensor(t.iterator, layout)


def maybe(t, modes: list[int]):
    return None if t is None else reordered(t, modes)


def backwards(t):
    """([batch,] head, width) -> (width, head[, batch])"""
    return None if t is None else reordered(t, list(reversed(range(cute.rank(t)))))


def per_tensor(factors):
    """(2, [batch,] head, width) -> a tensor of q and one of K, (width, head[, batch])."""
    if factors is None:
        return None
    return tuple(backwards(factors[(i, *[None] * (cute.rank(factors) - 1))]) for i in range(2))


def compact(kind, *shape):
    """Contiguous, as torch makes it."""
    return cute.runtime.make_fake_compact_tensor(
        kind, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=16
    )
