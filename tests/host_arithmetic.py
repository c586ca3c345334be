"""The kernels' own index arithmetic, compiled for the CPU: which tile an index means, and which
keys and blocks a row reads; what the backward's statistics become."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import cutlass
import cutlass.cute as cute
import pytest
from cutlass import BFloat16, Float32, Int32, const_expr

from cute_attn.kernels.common import bwd_walk
from cute_attn.kernels.common.bwd_rows import score, store_statistics
from cute_attn.kernels.common.mask import first_full_block, keys_seen, kv_block_end
from cute_attn.kernels.hopper import bwd, bwd_mainloop
from cute_attn.kernels.hopper.bwd_operands import Smem
from cute_attn.kernels.hopper.fwd import ForwardSm90
from cute_attn.kernels.hopper.operands import Parts
from cute_attn.kernels.hopper.scheduler import kv_begin, tile_at


class Arithmetic:
    def __init__(self, problem, config):
        self.kernel = ForwardSm90(problem, config)
        self.problem, self.cfg = self.kernel.problem, self.kernel.cfg

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        tiles: cute.Tensor,
        rows: cute.Tensor,
        part_lse: cute.Tensor,
    ):
        """tiles (n, 6): m_block, head, batch, kv_end, part and first block of index 0 .. n - 1.
        rows (m, 3): keys_seen of row i, and kv_block_end and first_full_block of the 64 rows from i
        on. part_lse (1, 1, 1, parts): nothing but its size counts."""
        mQ, mK, mV = [
            cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))
            for t in (mQ, mK, mV)
        ]
        shape = self.kernel.shape(mQ, mK, mV, Parts(None, part_lse, part_lse))
        for i in cutlass.range(tiles.shape[0]):
            tile = tile_at(self.cfg, self.problem, shape, Int32(i))
            for j in cutlass.range_constexpr(5):
                tiles[i, j] = tile[j]
            tiles[i, 5] = kv_begin(self.cfg, shape, tile)
        for i in cutlass.range(rows.shape[0]):
            rows[i, 0] = keys_seen(self.problem, Int32(i), shape)
            rows[i, 1] = kv_block_end(self.cfg, self.problem, Int32(i + 64), shape)
            rows[i, 2] = first_full_block(self.cfg, self.problem, Int32(i), shape)


ALL = 2**30  # tiles, none of which is shared


class BackwardArithmetic:
    def __init__(self, problem, config):
        self.kernel = bwd.kernel_of(problem, config)
        self.problem, self.cfg = self.kernel.problem, self.kernel.cfg

    @cute.jit
    def __call__(self, mQ: cute.Tensor, mK: cute.Tensor, tiles: cute.Tensor, turns: cute.Tensor):
        """tiles (n, 4): n_block, kv_head, batch and the first block of queries that sees a key, of
        index 0 .. n - 1. turns (n, blocks of queries): its turn at each, if the tile has a turn
        there. On 8 multiprocessors."""
        mQ, mK = [
            cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0])) for t in (mQ, mK)
        ]
        shape = bwd_walk.shape_of(self.cfg, mQ, mK, turns.shape[1], Int32(8), Int32(ALL), Int32(1))
        for i in cutlass.range(tiles.shape[0]):
            tile = bwd_walk.tile_at(self.cfg, self.problem.causal, shape, Int32(i))
            begin = shape.m_blocks - tile.blocks // shape.q_per_kv
            for j, x in enumerate((*tile[:3], begin)):
                tiles[i, j] = x
            for m in cutlass.range(turns.shape[1]):
                of_tile = self.cfg, self.problem.causal, shape, tile
                turns[i, m] = bwd_walk.turn_of(*of_tile, Int32(m))


class Walk:
    def __init__(self, problem, config):
        self.kernel = bwd.kernel_of(problem, config)
        self.problem, self.cfg = self.kernel.problem, self.kernel.cfg

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        tiles: cute.Tensor,
        visits: cute.Tensor,
        index: Int32,
        whole: Int32,
        parts: Int32,
    ):
        """tiles (1, 4): n_block, kv_head, batch and share of the one of this index. visits (blocks,
        4): head and block, and those before. Tiles from `whole` on are cut into parts."""
        mQ, mK = [
            cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0])) for t in (mQ, mK)
        ]
        m_blocks = cute.ceil_div(mQ.shape[0], self.cfg.tile_m)
        shape = bwd_walk.shape_of(self.cfg, mQ, mK, m_blocks, Int32(8), whole, parts)
        tile = bwd_walk.tile_at(self.cfg, self.problem.causal, shape, index)
        for j, x in enumerate((*tile[:3], tile.share)):
            tiles[0, j] = x
        head, m = tile.head, tile.m
        for i in cutlass.range(tile.blocks):
            before = bwd_walk.before(shape, tile, head, m)
            for j, x in enumerate((head, m, *before)):
                visits[i, j] = x
            head, m = bwd_walk.following(shape, tile, head, m)


class Statistics:
    def __init__(self, problem, config):
        self.cfg = bwd.kernel_of(problem, config).cfg

    @cute.jit
    def __call__(
        self,
        rows: cute.Tensor,
        words: cute.Tensor,
        statistics: cute.Tensor,
        ones: cute.Tensor,
        of_statistics: cute.Tensor,
        of_ones: cute.Tensor,
    ):
        """rows (blocks * tile_m, 2): what is added to S and dP. words (blocks, statistics): the
        scratch. statistics and ones: shared memory of the two operands before the first load, and
        of_statistics (tile_m, STEP, stages), of_ones (64, STEP, 2): where in it their elements lie,
        if a product adds them."""
        cfg = self.cfg
        for i in cutlass.range(rows.shape[0]):
            block, row = i // cfg.tile_m, i % cfg.tile_m
            store_statistics(cfg, words[block, None], Int32(row), rows[i, 0], rows[i, 1])
        if const_expr(cfg.folded):
            layouts = bwd.statistics_layout(cfg), bwd.ones_layout(cfg)
            views = [cute.make_tensor(t.iterator, x) for t, x in zip((statistics, ones), layouts)]
            smem = Smem(*[None] * 5, *views, None, None)
            bwd_mainloop.fill_operands(cfg, smem, Int32(0), 1)
            places(of_statistics, layouts[0])
            places(of_ones, layouts[1])


@cute.jit
def scores(lse: cute.Tensor, scale_log2: Float32):
    """lse (n, 1), in place."""
    for i in cutlass.range(lse.shape[0]):
        lse[i, 0] = score(lse[i, 0], scale_log2)


@cute.jit
def places(to: cute.Tensor, layout: cutlass.Constexpr):
    for i in cutlass.range(to.shape[0]):
        for j in cutlass.range(to.shape[1]):
            for k in cutlass.range(to.shape[2]):
                to[i, j, k] = cute.crd2idx((i, j, k), layout)


# What LLVM calls to round to bf16 where the CPU cannot; libgcc has it from version 13 on.
ROUND_TO_BF16 = """
#include <string.h>
float __truncsfbf2(float x) {  /* a bf16 is returned in the lower half of a float's register */
    unsigned u;
    memcpy(&u, &x, 4);
    u = x != x ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
    memcpy(&x, &u, 4);
    return x;
}
"""


def cpu_flags():
    info = Path("/proc/cpuinfo")
    return info.read_text().split() if info.exists() else []


@functools.cache
def provide_rounding():
    if hasattr(ctypes.CDLL(None), "__truncsfbf2") or "avx512_bf16" in cpu_flags():
        return
    if shutil.which("cc") is None:
        pytest.skip(
            "this CPU has no conversion to bf16, nor this machine a compiler (cc) to make one"
        )
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/rounding.so"
        command = ["cc", "-O1", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
        subprocess.run(command, input=ROUND_TO_BF16, text=True, check=True)
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def tensor(dtype, rank):
    i32, i64 = cute.sym_int32, cute.sym_int64
    shape, strides = (i32() for _ in range(rank)), (i64() for _ in range(rank - 1))
    return cute.runtime.make_fake_tensor(
        dtype, tuple(shape), (*strides, 1), memspace=cute.AddressSpace.generic
    )


def compile_arithmetic(problem, config):
    """A function of torch CPU tensors (q, k, v, tiles, rows, part_lse)."""
    io = [tensor(BFloat16, 4) for _ in range(3)] + [tensor(Int32, 2) for _ in range(2)]
    io.append(tensor(Float32, 4))
    return cute.compile(Arithmetic(problem, config), *io, options="--enable-tvm-ffi")


def compile_backward_arithmetic(problem, config):
    """A function of torch CPU tensors (q, k, tiles, last)."""
    io = [tensor(t, rank) for t, rank in ((BFloat16, 4), (BFloat16, 4), (Int32, 2), (Int32, 2))]
    return cute.compile(BackwardArithmetic(problem, config), *io, options="--enable-tvm-ffi")


def compile_walk(problem, config):
    """A function of torch CPU tensors (q, k, tiles, visits), an index, and whole and parts."""
    io = [tensor(t, rank) for t, rank in ((BFloat16, 4), (BFloat16, 4), (Int32, 2), (Int32, 2))]
    numbers = (Int32(0),) * 3
    return cute.compile(Walk(problem, config), *io, *numbers, options="--enable-tvm-ffi")


def compile_statistics(problem, config):
    """A function of torch CPU tensors (rows, words, statistics, ones, of_statistics, of_ones)."""
    io = [tensor(t, rank) for t, rank in ((Float32, 2), (Float32, 2), (BFloat16, 1), (BFloat16, 1))]
    io += [tensor(Int32, 3) for _ in range(2)]
    provide_rounding()
    with mock.patch.object(cute.arch, "fence_view_async_shared", lambda: None):
        return cute.compile(Statistics(problem, config), *io, options="--enable-tvm-ffi")


def compile_scores():
    """A function of a torch CPU tensor (n, 1) and a scale."""
    return cute.compile(scores, tensor(Float32, 2), Float32(1.0), options="--enable-tvm-ffi")
