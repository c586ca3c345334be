"""The main loop with changes of FlashAttention-2 undone; the rest is mainloop.py's.

StepWorker    warps own rows, as in FlashAttention-2; O is rescaled and divided in every block.
SplitWorker   warps own keys, as in FlashAttention-1. For every KV block j:

    S_w = Q K_jw^T           a warp's keys, all rows of the tile
    m   = row maxima, of all warps through shared memory
    P_w = exp(S_w - m)
    O   = O e^(m_old - m) + sum over w of P_w V_jw, through shared memory, with row sums of P_w
                             O l e^(m_old - m) + ..., divided by the new l, if kept normalised

A warp keeps columns of O, of all rows. Two barriers more a block than in FlashAttention-2.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from cute_attn.kernels.ampere.epilogue import shared
from cute_attn.kernels.ampere.mainloop import Worker
from cute_attn.kernels.ampere.products import STEP, accumulator
from cute_attn.kernels.common import output, rare
from cute_attn.kernels.common.layout import acc_as_rows, grouped

FRAGMENT = 512  # bytes of 16 rows and 8 columns of an accumulator, 16 a thread


class Output(NamedTuple):
    """What rare.confine_nan computes again."""

    acc_O: cute.Tensor
    cS: cute.Tensor  # (row, col) of O, as far as it is looked at: rows, and the first column


@dataclass(frozen=True)
class StepWorker(Worker):
    @cute.jit
    def attend(
        self,
        block: Int32,
        stage: Int32,
        masked: cutlass.Constexpr[bool],
        narrow: cutlass.Constexpr[bool],
    ):
        softmax, acc_S = self.softmax, accumulator(self.cfg.m_tiles, self.keys)
        self.scores(acc_S, stage, narrow)
        self.load_next(block, stage)
        if const_expr(masked):
            self.mask(acc_S, block)
        factor = softmax.follow(softmax.peaks(acc_S))
        if block < self.rows.end - 1:  # O is not 0
            output.normalise(self.acc_O, factor)
        self.add_values(acc_S, self.acc_O, stage, narrow)
        softmax.add(softmax.sums())
        output.normalise(self.acc_O, softmax.after())

    @cute.jit
    def confine_nan(self):
        """As in mainloop.py, where O is not normalised yet."""
        if const_expr(self.problem.causal):
            if rare.has_nan(self.acc_O) & (self.rows.first < self.shape.seqlen_q):
                rare.confine_nan(
                    self.problem, self.x, Output(self.acc_O, self.cO), self.softmax, self.tile,
                    self.tile.kv_head, self.rows.first, self.rows.full * self.cfg.tile_n, None,
                    self.shape,
                )  # fmt: skip
                if const_expr(self.softmax.divides):
                    output.normalise(self.acc_O, self.softmax.after())


@dataclass(frozen=True)
class SplitWorker(StepWorker):
    """acc_O is what a warp keeps of O, ((2, 2, head_dim_v / warps / 8), m-tiles, 1)."""

    @property
    def keys(self) -> int:
        return self.cfg.warp_keys

    @property
    def narrower(self) -> int:
        return 0  # warps wait for each other in every block: all have to go through it

    @property
    def columns(self) -> int:
        """Of O, that a warp keeps."""
        return self.cfg.warp_columns(self.problem)

    @property
    def warp(self) -> Int32:
        return cute.arch.make_warp_uniform(self.tidx // 32)

    @property
    def cO(self) -> cute.Tensor:
        first = self.warp * self.columns
        return coordinates(self.x, self.cfg.tile_m, self.columns, first, self.tidx)

    @property
    def o_step(self) -> Int32:
        return self.warp * (self.columns // STEP)

    @cute.jit
    def attend(
        self,
        block: Int32,
        stage: Int32,
        masked: cutlass.Constexpr[bool],
        narrow: cutlass.Constexpr[bool],
    ):
        softmax, acc_S = self.softmax, accumulator(self.cfg.m_tiles, self.keys)
        self.scores(acc_S, stage, False)
        self.load_next(block, stage)
        if const_expr(masked):
            self.mask(acc_S, block)
        self.tell(self.smem.peaks_start, softmax.peaks(acc_S))
        cute.arch.barrier()
        peaks = self.heard(self.smem.peaks_start, cute.ReductionOp.MAX)
        output.normalise(self.acc_O, softmax.follow(peaks))
        part = accumulator(self.cfg.m_tiles, self.problem.tile_dim_v)
        part.fill(0.0)
        self.add_values(acc_S, part, stage, False)
        self.tell(self.smem.sums_start, softmax.sums())
        self.put_part(part)
        cute.arch.barrier()
        softmax.add(self.heard(self.smem.sums_start, cute.ReductionOp.ADD))
        self.add_parts()
        if const_expr(softmax.divides):
            output.normalise(self.acc_O, softmax.after())

    # What warps tell each other

    @cute.jit
    def tell(self, start: cutlass.Constexpr[int], values: cute.Tensor):
        """One number of every row, to all warps. Theirs of a row are neighbours."""
        C = acc_as_rows(self.cS)
        if self.tidx % 4 == 0:
            for r in cutlass.range_constexpr(cute.size(values)):
                row = C[r, 0][0] * self.cfg.warps
                place = shared(Float32, self.base + start + (row + self.warp) * 4, 1)
                place[0] = values[r]

    @cute.jit
    def heard(self, start: cutlass.Constexpr[int], op: cutlass.Constexpr) -> cute.Tensor:
        """Of every row, the maximum or sum of what the warps told."""
        C, found = acc_as_rows(self.cS), cute.make_rmem_tensor(self.softmax.rows, Float32)
        for r in cutlass.range_constexpr(self.softmax.rows):
            row = C[r, 0][0] * self.cfg.warps
            told = cute.make_rmem_tensor(self.cfg.warps, Float32)
            cute.autovec_copy(shared(Float32, self.base + start + row * 4, self.cfg.warps), told)
            least = -Float32.inf if const_expr(op == cute.ReductionOp.MAX) else Float32(0.0)
            found[r] = told.load().reduce(op, least, 0)
        return found

    def fragment(self, warp: Int32, m: int, n: Int32) -> cute.Tensor:
        """A thread's share, in shared memory, of 16 rows and 8 columns of a warp's P V."""
        groups = self.problem.tile_dim_v // 8
        place = ((warp * self.cfg.m_tiles + m) * groups + n) * FRAGMENT + self.tidx % 32 * 16
        return shared(Float32, self.base + self.smem.parts_start + place, 4)

    @cute.jit
    def put_part(self, part: cute.Tensor):
        for m in cutlass.range_constexpr(self.cfg.m_tiles):
            for n in cutlass.range_constexpr(self.problem.tile_dim_v // 8):
                mine = cute.make_rmem_tensor(4, Float32)
                mine.store(part[(None, None, n), m, 0].load().reshape(4))
                cute.autovec_copy(mine, self.fragment(self.warp, m, n))

    @cute.jit
    def add_parts(self):
        """All warps' P V to the columns that this one keeps of O."""
        first = self.warp * (self.columns // 8)
        for m in cutlass.range_constexpr(self.cfg.m_tiles):
            for n in cutlass.range_constexpr(self.columns // 8):
                O = self.acc_O[(None, None, n), m, 0]
                for w in cutlass.range_constexpr(self.cfg.warps):
                    part = cute.make_rmem_tensor(4, Float32)
                    cute.autovec_copy(self.fragment(Int32(w), m, first + n), part)
                    for i in cutlass.range_constexpr(4):
                        O[i] = O[i] + part[i]


def coordinates(x, rows: int, columns: int, first: Int32, tidx: Int32) -> cute.Tensor:
    """(row, col) of what a thread owns of a warp's accumulator of so many rows and of the columns
    from `first` on."""
    atom = warp.MmaF16BF16Op(x.gQ.element_type, Float32, (16, 8, 16))
    mma = cute.make_tiled_mma(atom, (1, 1, 1))
    tile = cute.domain_offset((0, first), cute.make_identity_tensor((rows, columns)))
    return grouped(mma.get_slice(tidx % 32).partition_C(tile))
