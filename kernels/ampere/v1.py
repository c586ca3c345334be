"""The forward with changes of FlashAttention-2 undone, each by a field of V1Config: a baseline to
measure them against. docs/flash_attention_2.md explains them.

divide_always   v1_softmax.py, v1_mainloop.py (StepWorker)
split_keys      v1_mainloop.py (SplitWorker)
walk_rows       the kernel below
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_attn.config_v1 import V1Config
from cute_attn.kernels.ampere import mainloop, products
from cute_attn.kernels.ampere.fwd import ForwardSm80, compiled
from cute_attn.kernels.ampere.operands import Inputs, Tile
from cute_attn.kernels.ampere.storage import Storage, make_storage
from cute_attn.kernels.ampere.v1_mainloop import SplitWorker, StepWorker, coordinates
from cute_attn.kernels.ampere.v1_softmax import make_step_softmax
from cute_attn.kernels.common import schedule
from cute_attn.kernels.common.schedule import Shape
from cute_attn.problem import Problem


@dataclass(frozen=True)
class SplitStorage(Storage):
    """Behind the rings what warps tell each other, in fp32: maxima and sums (tile_m, warps), and
    P V (warps, tile_m, head_dim_v)."""

    warps: int

    @property
    def peaks_start(self) -> int:
        return super().bytes

    @property
    def sums_start(self) -> int:
        return self.peaks_start + 4 * self.q.rows * self.warps

    @property
    def parts_start(self) -> int:
        return self.sums_start + 4 * self.q.rows * self.warps

    @property
    def bytes(self) -> int:
        return self.parts_start + 4 * self.warps * self.o.rows * self.o.width


class ForwardV1(ForwardSm80):
    def __init__(self, problem: Problem, config: V1Config):
        super().__init__(problem, config)
        flags = (config.divide_always, config.split_keys, config.walk_rows)
        self.name += "_v1_" + "".join(str(int(flag)) for flag in flags)
        if config.split_keys:
            self.worker_class, s = SplitWorker, make_storage(config, self.problem)
            self.smem = SplitStorage(s.q, s.k, s.v, s.o, s.stages, config.warps)
        elif config.divide_always:
            self.worker_class = StepWorker

    def softmax(self, scale_log2: Float32):
        cfg = self.cfg
        if self.worker_class is mainloop.Worker:
            return super().softmax(scale_log2)
        return make_step_softmax(scale_log2, 2 * cfg.m_tiles, cfg.divide_always)

    def ctas(self, shape: Shape) -> Int32:
        return shape.head_batches if self.cfg.walk_rows else super().ctas(shape)

    @cute.kernel
    def kernel(self, x: Inputs, shape: Shape, scale_log2: Float32):
        index = cute.arch.block_idx()[0]
        shared = cutlass.memory.SmemAllocator().allocate(self.smem.bytes, byte_alignment=1024)
        if const_expr(self.cfg.walk_rows):
            batch = index // shape.heads_q
            head = index - batch * shape.heads_q
            for m_block in cutlass.range(shape.m_blocks, unroll=1):
                self.attend_rows(x, shape, (m_block, head, batch), shared.toint(), scale_log2)
                cute.arch.barrier()  # O of this tile has left Q's place
        else:
            place = schedule.place(self.problem, shape, index)
            self.attend_rows(x, shape, place, shared.toint(), scale_log2)

    @cute.jit
    def attend_rows(self, x: Inputs, shape: Shape, place, base: Int32, scale_log2: Float32):
        """One tile of queries."""
        m_block, head, batch = place
        tile = Tile(m_block, head, batch, head // shape.q_per_kv)
        worker = self.worker(x, shape, tile, base, scale_log2)
        if const_expr(self.cfg.split_keys):
            worker = self.with_keys(worker)
        worker.begin()
        worker.blocks()
        worker.end()

    def with_keys(self, w: SplitWorker) -> SplitWorker:
        """Every warp has all rows, and its own keys of a block."""
        cfg, smem, lane = self.cfg, self.smem, w.tidx % 32
        first = w.warp * cfg.warp_keys
        keys = first + lane % 8 + lane // 16 * 8
        return replace(
            w,
            rows=w.rows._replace(last=w.rows.first + cfg.tile_m - 1),
            at_q=w.base + smem.q.at(lane % 16, lane // 16),
            at_k=w.base + smem.k_start + smem.k.at(keys, lane // 8 % 2),
            at_v=w.base + smem.v_start + smem.v.at(first + lane % 16, lane // 16),
            acc_O=products.accumulator(cfg.m_tiles, w.columns),
            cS=coordinates(w.x, cfg.tile_m, cfg.warp_keys, first, w.tidx),
        )


def compile_v1(problem: Problem, config: V1Config, options: str = ""):
    """As fwd.compile_fwd."""
    return compiled(ForwardV1(problem, config), options)
