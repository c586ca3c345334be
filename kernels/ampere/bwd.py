"""Ampere backward attention by recomputation (FlashAttention-2, algorithm 2). A tile is a block of
keys of one KV head, a CTA each.

row_statistics -> the main kernel (common/bwd_walk.py, bwd_mainloop.py, bwd_storage.py) -> finish_dq

The first and the last are common/bwd_rows.py.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_attn.config import AmpereBwdConfig
from cute_attn.kernels.ampere.bwd_mainloop import Worker
from cute_attn.kernels.ampere.bwd_operands import At, Inputs, Places
from cute_attn.kernels.ampere.bwd_storage import make_storage
from cute_attn.kernels.ampere.fwd import DTYPES, LOG2_E, LSE, ROWS, reordered
from cute_attn.kernels.ampere.products import STEP, accumulator
from cute_attn.kernels.ampere.storage import TileLayout
from cute_attn.kernels.common import bwd_rows, bwd_walk
from cute_attn.kernels.common.bwd_walk import Shape, Tile
from cute_attn.problem import Problem


@dataclass(frozen=True)
class Layout:
    """What follows from a problem and a config."""

    problem: Problem
    cfg: AmpereBwdConfig
    narrow: bool = False  # of blocks that see the first 16 keys of every warp alone

    def __getattr__(self, name: str):
        """Knobs, by their names."""
        return getattr(self.cfg, name)

    @property
    def persistent(self) -> bool:
        """Whether CTAs draw tickets for tiles."""
        return self.cfg.deterministic

    @property
    def chained(self) -> bool:
        return False

    @property
    def shares(self) -> bool:
        return False

    @property
    def folded(self) -> bool:
        return False

    @property
    def from_scores(self) -> bool:
        """LSE in bits as the main kernel has a score in bits, so that P is 1 as closely as can be
        where a row sees one large score."""
        return True

    @property
    def dq_vectors(self) -> bool:
        return self.cfg.vector_adds

    @property
    def dq_by_rows(self) -> bool:
        return self.cfg.tile_m == 128

    @property
    def width(self) -> int:
        return self.cfg.width(self.problem)

    @property
    def width_v(self) -> int:
        return self.cfg.width_v(self.problem)

    @property
    def dq_warps(self) -> tuple[int, int]:
        return self.cfg.dq_warps(self.problem)

    @property
    def key_tiles(self) -> int:
        """Of 16 keys, that a warp works on."""
        return 1 if self.narrow else self.cfg.key_tiles

    @property
    def narrows(self) -> bool:
        """Whether there are such blocks, with aligned lengths."""
        within = self.cfg.tile_m <= STEP * self.cfg.key_warps
        return self.problem.causal and self.cfg.key_tiles > 1 and within

    @property
    def parts(self) -> int:
        """Of a warp's queries, one after another."""
        return self.cfg.tile_m // (self.cfg.step_m * self.cfg.column_warps)

    @property
    def sure(self) -> int:
        """Columns that any head dim of the class has."""
        return self.problem.head_dim - 8

    @property
    def sure_v(self) -> int:
        return self.problem.head_dim_v - 24


class BackwardSm80:
    def __init__(self, problem: Problem, config: AmpereBwdConfig):
        self.problem = problem.static()
        self.cfg = Layout(self.problem, config)
        self.dtype = DTYPES[problem.dtype]
        self.smem = make_storage(self.cfg)
        self.name = config.kernel_name(self.problem)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mdLSE: cute.Tensor,
        mdQ: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        stats: cute.Tensor,
        partial_dq: cute.Tensor,
        sms: Int32,
        softmax_scale: Float32,
        score_scale: Float32,
        stream: cuda.CUstream,
    ):
        """As the Hopper kernel's: mQ, mdQ (batch, seqlen_q, heads_q, head_dim), mO, mdO (batch,
        seqlen_q, heads_q, head_dim_v), mK, mdK, mV, mdV likewise with seqlen_k and heads_kv; mLSE,
        mdLSE (batch, heads_q, seqlen_q). stats (batch, heads_q, blocks, block_words) and partial_dq
        (batch, heads_q, blocks, tile_m * width) are fp32 scratch."""
        cfg = self.cfg
        mQ, mK, mV, mO, mdO, mdQ, mdK, mdV = [
            reordered(t, ROWS) for t in (mQ, mK, mV, mO, mdO, mdQ, mdK, mdV)
        ]
        mLSE, mdLSE = reordered(mLSE, LSE), reordered(mdLSE, LSE)
        stats, dq = [reordered(t, [3, 2, 1, 0]) for t in (stats, partial_dq)]
        shape = bwd_walk.shape_of(cfg, mQ, mK, dq.shape[1], sms * cfg.ctas, Int32(0), Int32(1))
        blocks = shape.m_blocks * mQ.shape[2] * mQ.shape[3]
        scale_log2 = score_scale * LOG2_E
        rows = mO, mdO, mLSE, mdLSE, stats, dq
        bwd_rows.row_statistics(cfg, *rows, None, scale_log2, Int32(0)).launch(
            grid=(blocks * bwd_rows.statistics_ctas(cfg), 1, 1),
            block=(bwd_rows.THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )
        x = Inputs(mQ, mK, mV, mdO, mdK, mdV, stats, dq)
        self.kernel(x, shape, softmax_scale, scale_log2).launch(
            grid=(shape.n_blocks * shape.heads, 1, 1),
            block=(cfg.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=cfg.ctas,
            preferred_smem_carveout=100,  # percent; unsaid, the DSL would ask a device
        )
        bwd_rows.finish_dq(cfg, dq, mdQ, softmax_scale).launch(
            grid=(blocks * bwd_rows.finishing_ctas(cfg), 1, 1),
            block=(bwd_rows.THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Inputs, shape: Shape, softmax_scale: Float32, scale_log2: Float32):
        shared = cutlass.memory.SmemAllocator().allocate(self.smem.bytes, byte_alignment=1024)
        base, index = shared.toint(), cute.arch.block_idx()[0]
        if const_expr(self.cfg.deterministic):
            index = self.ticket(x, base)
        tile = bwd_walk.tile_at(self.cfg, self.problem.causal, shape, index)
        worker = self.worker(x, shape, tile, base, scale_log2)
        worker.run()
        worker.end(softmax_scale)

    @cute.jit
    def ticket(self, x: Inputs, base: Int32) -> Int32:
        """The tile of this CTA, for all its threads: in the order in which CTAs begin, so that none
        waits for one that may find no room beside it."""
        word = cute.make_ptr(Int32, base, cute.AddressSpace.smem, assumed_align=4)
        word = cute.make_tensor(word, cute.make_layout(1))
        if cute.arch.thread_idx()[0] < 32:
            drawn = bwd_walk.draw(self.cfg, x.statistics)
            word[0] = drawn
        cute.arch.barrier()
        index = cute.arch.make_warp_uniform(word[0])
        cute.arch.barrier()
        return index

    @cute.jit
    def worker(self, x: Inputs, shape: Shape, tile: Tile, base: Int32, scale_log2: Float32):
        cfg = self.cfg
        columns, columns_v = (w // cfg.column_warps for w in (cfg.width, cfg.width_v))
        return Worker(
            cfg,
            self.problem,
            x,
            shape,
            tile,
            self.smem,
            self.places(tile, base),
            scale_log2,
            accumulator(cfg.key_tiles, columns),
            accumulator(cfg.key_tiles, columns_v),
            cute.arch.thread_idx()[0],
        )

    @cute.jit
    def places(self, tile: Tile, base: Int32) -> Places:
        cfg, smem = self.cfg, self.smem
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        key_warp, own = warp % cfg.key_warps, warp // cfg.key_warps  # own: among column_warps
        row_warp, col_warp = warp % cfg.dq_warps[0], warp // cfg.dq_warps[0]  # of dQ
        q, do, weights = base + smem.q_start, base + smem.do_start, base + smem.ds_start
        # Rows and chunk of 8 columns that a lane names: of A operands and transposed B operands,
        # and of B operands and transposed A operands
        row, chunk = lane % 16, lane // 16
        row_b, chunk_b = lane % 8 + lane // 16 * 8, lane // 8 % 2
        mine, first, v = key_warp * STEP, key_warp * STEP + lane // 4, base + smem.v_start
        pair, group = lane % 4, 16 * min(cfg.tile_m, 64) // STEP * 8
        each = 4 if const_expr(cfg.dq_vectors) else 1
        at_once = min(cfg.tile_m, 64) // STEP
        down = row_warp // at_once * 64 * cfg.width + row_warp % at_once * 128
        return Places(
            base,
            At(smem.k.at(row, chunk), base + mine * smem.k.pitch),
            At(smem.v.at(row, chunk), v + mine * smem.v.pitch),
            At(smem.q.at(row_b, chunk_b), q + own * STEP * smem.q.pitch),
            At(smem.do.at(row_b, chunk_b), do + own * STEP * smem.do.pitch),
            At(smem.q.step(smem.q.at(row, chunk), own), q),
            At(smem.do.step(smem.do.at(row, chunk), own), do),
            At(smem.weights.at(row, chunk), weights + mine * smem.weights.pitch),
            At(smem.weights.step(smem.weights.at(row_b, chunk_b), row_warp), weights),
            At(smem.k.step(smem.k.at(row, chunk), col_warp), base),
            self.pair(smem.weights, weights, mine, own),
            self.pair(smem.k, base, mine, own),
            self.pair(smem.v, v, mine, own),
            base + smem.statistics_start + 4 * (own * STEP + 2 * pair),
            down + col_warp * 2 * group + each * lane,
            tile.n_block * cfg.tile_n + first,
            own * STEP + 2 * pair,
            own * STEP,
        )

    def pair(self, layout: TileLayout, start: Int32, mine: Int32, own: Int32) -> At:
        """Of accumulators, this thread's first."""
        lane = cute.arch.lane_idx()
        right = layout.step(layout.at(lane // 4, Int32(0)), own) + 4 * (lane % 4)
        return At(right, start + mine * layout.pitch)


def compile_bwd(problem: Problem, config: AmpereBwdConfig, options: str = ""):
    """Compile for the target that options name; needs no GPU and no torch."""
    kernel = BackwardSm80(problem, config)
    b, sq, sk, hq, hk, d, dv, blocks = (cute.sym_int32() for _ in range(8))

    def tensor(s, h, width):
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return cute.runtime.make_fake_tensor(
            kernel.dtype, (b, s, h, width), (*strides, 1), assumed_align=16
        )

    def of_rows():
        strides = tuple(cute.sym_int64() for _ in range(3))
        return cute.runtime.make_fake_tensor(Float32, (b, hq, sq), strides, assumed_align=4)

    def scratch(*shape):
        return cute.runtime.make_fake_compact_tensor(
            Float32, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=16
        )

    q, dq, o, do = tensor(sq, hq, d), tensor(sq, hq, d), tensor(sq, hq, dv), tensor(sq, hq, dv)
    k, dk, v, dvalue = tensor(sk, hk, d), tensor(sk, hk, d), tensor(sk, hk, dv), tensor(sk, hk, dv)
    block = config.tile_m * config.width(problem)
    for part in (kernel.kernel, kernel.__call__):
        part.set_name_prefix(kernel.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        kernel, q, k, v, o, do, of_rows(), of_rows(), dq, dk, dvalue,
        scratch(b, hq, blocks, config.block_words(problem)), scratch(b, hq, blocks, block),
        Int32(1), Float32(1.0), Float32(1.0), stream,
        options=f"--enable-tvm-ffi {options}",
    )  # fmt: skip
