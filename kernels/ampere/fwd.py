"""Ampere forward attention: a CTA for each tile of queries, longest first.

storage.py says where tiles lie in shared memory; load.py fills them; mainloop.py is the algorithm;
epilogue.py writes O. common/schedule.py says which tile a CTA takes.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warp

from cute_attn.config import AmpereConfig
from cute_attn.kernels.ampere import load, mainloop, products
from cute_attn.kernels.ampere.operands import Inputs, Tile
from cute_attn.kernels.ampere.storage import make_storage
from cute_attn.kernels.common import schedule
from cute_attn.kernels.common.layout import grouped
from cute_attn.kernels.common.schedule import Shape
from cute_attn.kernels.common.softmax_lazy import make_lazy_softmax
from cute_attn.problem import Problem

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
LOG2_E = 1.4426950408889634
# What torch hands over -> (seqlen, width, heads, batch), as the kernel reads it
ROWS, LSE = [1, 3, 2, 0], [2, 1, 0]


def reordered(t: cute.Tensor, modes: list[int]) -> cute.Tensor:
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=modes))


class ForwardSm80:
    worker_class = mainloop.Worker

    def __init__(self, problem: Problem, config: AmpereConfig):
        self.problem, self.cfg = problem.static(), config
        self.dtype = DTYPES[problem.dtype]
        self.smem = make_storage(config, self.problem)
        dims = f"d{self.problem.head_dim}_dv{self.problem.head_dim_v}"
        tile = f"{config.tile_m}x{config.tile_n}x{config.kv_stages}"
        mask = "causal" if problem.causal else "full"
        self.name = f"cute_attn_fwd_sm80_{problem.dtype}_{dims}_{mask}_{tile}"

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        counter: cute.Tensor,
        sms: Int32,
        softmax_scale: Float32,
        stream: cuda.CUstream,
    ):
        """mQ (batch, seqlen_q, heads_q, head_dim), mK (batch, seqlen_k, heads_kv, head_dim),
        mV (batch, seqlen_k, heads_kv, head_dim_v), mO (batch, seqlen_q, heads_q, head_dim_v),
        mLSE (batch, heads_q, seqlen_q), of stride 0 if nobody wants it. counter and sms are what
        other kernels' schedules need, which are launched by the same code."""
        x = Inputs(*[reordered(t, ROWS) for t in (mQ, mK, mV, mO)], reordered(mLSE, LSE))
        shape = self.shape(x)
        self.kernel(x, shape, softmax_scale * LOG2_E).launch(
            grid=(self.ctas(shape), 1, 1),
            block=(self.cfg.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.cfg.ctas,
            preferred_smem_carveout=100,  # percent; unsaid, the DSL would ask a device
        )

    def shape(self, x: Inputs) -> Shape:
        (seqlen_q, _, heads_q, batch), heads_kv = x.gQ.shape, x.gK.shape[2]
        q_per_kv, heads = heads_q // heads_kv, heads_q * batch
        # K and V bytes of one head; in Int64, as a long sequence passes 2^31
        head_bytes = Int64(x.gK.shape[0]) * (2 * (x.gK.shape[1] + x.gV.shape[1]))
        group, tail = schedule.groups(self.cfg.l2_mb, heads, q_per_kv, head_bytes)
        m_blocks = cute.ceil_div(seqlen_q, self.cfg.tile_m)
        return Shape(seqlen_q, x.gK.shape[0], heads_q, q_per_kv, m_blocks, heads, group, tail)

    def ctas(self, shape: Shape) -> Int32:
        return shape.m_blocks * shape.head_batches

    @cute.kernel
    def kernel(self, x: Inputs, shape: Shape, scale_log2: Float32):
        m_block, head, batch = schedule.place(self.problem, shape, cute.arch.block_idx()[0])
        tile = Tile(m_block, head, batch, head // shape.q_per_kv)
        shared = cutlass.memory.SmemAllocator().allocate(self.smem.bytes, byte_alignment=1024)
        worker = self.worker(x, shape, tile, shared.toint(), scale_log2)
        worker.begin()
        worker.blocks()
        worker.end()

    @cute.jit
    def worker(self, x: Inputs, shape: Shape, tile: Tile, base: Int32, scale_log2: Float32):
        cfg, problem, smem = self.cfg, self.problem, self.smem
        tidx = cute.arch.thread_idx()[0]
        lane = tidx % 32
        row = cute.arch.make_warp_uniform(tidx // 32) * products.STEP + lane % 16
        keys = lane % 8 + lane // 16 * 8
        kv = None, None, tile.kv_head, tile.batch
        atom = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))
        mma = cute.make_tiled_mma(atom, (cfg.row_warps, 1, 1))
        cS = mma.get_slice(tidx).partition_C(cute.make_identity_tensor((cfg.tile_m, cfg.tile_n)))
        rQ = None
        if cutlass.const_expr(cfg.q_in_regs):
            steps = problem.head_dim // products.STEP
            rQ = cute.make_rmem_tensor((8, cfg.m_tiles, steps), self.dtype)
        return self.worker_class(
            cfg,
            problem,
            x,
            shape,
            tile,
            mainloop.rows_of(cfg, problem, tile, shape),
            smem,
            base,
            load.source(x.gK[kv], smem.k, tidx),
            load.source(x.gV[kv], smem.v, tidx),
            base + smem.q.at(row, lane // 16),
            base + smem.k_start + smem.k.at(keys, lane // 8 % 2),
            base + smem.v_start + smem.v.at(lane % 16, lane // 16),
            self.softmax(scale_log2),
            rQ,
            products.accumulator(cfg.m_tiles, problem.tile_dim_v),
            grouped(cS),
            tidx,
        )

    def softmax(self, scale_log2: Float32):
        cfg = self.cfg
        return make_lazy_softmax(self.problem, scale_log2, 2 * cfg.m_tiles, cfg.exact_max)


def compile_fwd(problem: Problem, config: AmpereConfig, options: str = ""):
    """Compile for the target that options name; needs no GPU and no torch. Sizes, head counts,
    head dims within their class and strides stay run-time values."""
    return compiled(ForwardSm80(problem, config), options)


def compiled(kernel: ForwardSm80, options: str):
    b, sq, sk, hq, hk, d, dv = (cute.sym_int32() for _ in range(7))

    def tensor(s, h, width):
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return cute.runtime.make_fake_tensor(
            kernel.dtype, (b, s, h, width), (*strides, 1), assumed_align=16
        )

    q, k, v, o = tensor(sq, hq, d), tensor(sk, hk, d), tensor(sk, hk, dv), tensor(sq, hq, dv)
    lse_strides = tuple(cute.sym_int64() for _ in range(3))
    lse = cute.runtime.make_fake_tensor(Float32, (b, hq, sq), lse_strides, assumed_align=4)
    counter = cute.runtime.make_fake_compact_tensor(Int32, (1,), assumed_align=4)
    for part in (kernel.kernel, kernel.__call__):
        part.set_name_prefix(kernel.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        kernel, q, k, v, o, lse, counter, Int32(1), Float32(1.0), stream,
        options=f"--enable-tvm-ffi {options}",
    )  # fmt: skip
