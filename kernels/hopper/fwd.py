"""Hopper forward attention: one producer warp, `warpgroups` consumers, persistent over tiles.

producer: load.py  ->  Q, K, V rings  ->  consumer: mainloop.py  ->  epilogue.py
scheduler.py says which tile comes next.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync

from cute_attn.config import FwdConfig
from cute_attn.kernels.common import schedule
from cute_attn.kernels.common.merge import launch_merge
from cute_attn.kernels.common.schedule import Shape
from cute_attn.kernels.common.softmax import make_softmax
from cute_attn.kernels.hopper import epilogue, gemm, load, mainloop, scheduler, storage
from cute_attn.kernels.hopper.operands import Dtypes, Inputs, Mmas, Parts, TmaOperand
from cute_attn.problem import Problem

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
LOG2_E = 1.4426950408889634
# What torch hands over -> (seqlen, width, heads, batch, parts of the keys), as the kernels read it
ROWS, LSE, PART_ROWS, PART_LSE = [1, 3, 2, 0], [2, 1, 0], [2, 4, 3, 1, 0], [3, 2, 1, 0]


def reordered(t: cute.Tensor, modes: list[int]) -> cute.Tensor:
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=modes))


class ForwardSm90:
    def __init__(self, problem: Problem, config: FwdConfig):
        self.problem, self.cfg = problem.static(), config
        self.dtypes = Dtypes(*[DTYPES[problem.dtype]] * 4)
        dims = f"d{self.problem.head_dim}_dv{self.problem.head_dim_v}"
        tile = f"{config.tile_m}x{config.tile_n}x{config.kv_stages}"
        mask = "causal" if problem.causal else "full"
        self.name = f"cute_attn_fwd_sm90_{problem.dtype}_{dims}_{mask}_{tile}"

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
        mLSE (batch, heads_q, seqlen_q), of stride 0 if nobody wants it, counter (1,): zero, and
        zero again afterwards."""
        tensors = [reordered(t, ROWS) for t in (mQ, mK, mV, mO)]
        lse = reordered(mLSE, LSE)
        self.launch(*tensors, lse, None, counter, sms, softmax_scale, stream)

    @cute.jit
    def launch(self, mQ, mK, mV, mO, mLSE, parts, counter, sms, softmax_scale, stream):
        cfg = self.cfg
        shape = self.shape(mQ, mK, mV, parts)
        mmas = gemm.make_mmas(cfg, self.problem, self.dtypes.q)
        grid = shape.m_blocks * shape.head_batches * shape.parts
        if const_expr(cfg.schedule != "grid"):
            grid = cutlass.min(grid, sms)
        x = Inputs(*self.operands(mQ, mK, mV, mO), mQ, mK, mV, mLSE, parts, counter)
        self.kernel(x, mmas, shape, softmax_scale * LOG2_E).launch(
            grid=(grid, 1, 1), block=(cfg.threads, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    def shape(self, mQ, mK, mV, parts=None) -> Shape:
        heads_q, q_per_kv = mQ.shape[2], mQ.shape[2] // mK.shape[2]
        # K and V bytes of one head; in Int64, as a long sequence passes 2^31
        head_bytes = Int64(mK.shape[0]) * self.key_bytes(mK.shape[1], mV.shape[1])
        heads = heads_q * mQ.shape[3]
        group, tail = schedule.groups(self.cfg.l2_mb, heads, q_per_kv, head_bytes)
        m_blocks = cute.ceil_div(mQ.shape[0], self.cfg.tile_m)
        count, blocks = Int32(1), cute.ceil_div(mK.shape[0], self.cfg.tile_n)
        if const_expr(self.cfg.split_kv):
            count = parts.log_sum.shape[3]
            blocks = cute.ceil_div(blocks, count)
        return Shape(
            mQ.shape[0], mK.shape[0], heads_q, q_per_kv, m_blocks, heads, group, tail, count, blocks
        )  # fmt: skip

    def key_bytes(self, d, dv):
        return 2 * (d + dv)

    def operands(self, mQ, mK, mV, mO) -> tuple[TmaOperand, ...]:
        cfg, d, dv = self.cfg, self.problem.tile_dim, self.problem.tile_dim_v
        get, put = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        types, slots, slot = self.dtypes, cfg.q_ring, 64 * max(d, dv)
        return (
            self.operand(get, mQ, types.q, (64, d), slots, slot),
            self.operand(get, mK, types.k, (cfg.tile_n, d), cfg.kv_stages),
            self.operand(get, mV, types.v, (cfg.tile_n, dv), cfg.v_ring),
            self.operand(put, mO, types.o, (64, dv), slots, slot),
        )

    def operand(self, op, tensor, dtype, tile, stages, stage_elements=0) -> TmaOperand:
        layout = storage.tile_layout(dtype, tile, stages, stage_elements)
        one_tile = cute.select(layout, mode=[0, 1])
        atom, coords = cpasync.make_tiled_tma_atom(op, tensor, one_tile, tile)
        return TmaOperand(atom, coords, layout)

    @cute.kernel
    def kernel(self, x: Inputs, mmas: Mmas, shape: Shape, scale_log2: Float32):
        cfg, problem = self.cfg, self.problem
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = cutlass.memory.SmemAllocator().allocate(
            storage.storage_struct(cfg, self.dtypes, x)
        )
        smem = storage.smem_tensors(cfg, shared, self.dtypes, x)
        pipes = storage.make_pipelines(cfg, self.dtypes, shared, x)
        consumer_regs, producer_regs = cfg.registers

        if warp < 4:
            cute.arch.setmaxregister_decrease(producer_regs)
            if warp == 0:
                load.load(cfg, problem, x, smem, pipes, shape)
            if warp == 1:
                epilogue.store(cfg, problem, x, smem, pipes)
        else:
            cute.arch.setmaxregister_increase(consumer_regs)
            self.consume(x, mmas, smem, pipes, shape, scale_log2)

    @cute.jit
    def consume(self, x, mmas, smem, pipes, shape, scale_log2):
        cfg = self.cfg
        tidx = cute.arch.thread_idx()[0] - 128
        wg = cute.arch.make_warp_uniform(tidx // 128)
        f = mainloop.make_fragments(cfg, self.problem, mmas, smem, tidx - wg * 128, wg)
        c = self.consumer(x, smem, f, pipes, shape, scale_log2)
        consumer = pipeline.PipelineUserType.Consumer
        q = pipeline.PipelineState(cfg.q_ring, Int32(0), wg, Int32(0))
        k = pipeline.make_pipeline_state(consumer, cfg.kv_stages)
        v = pipeline.make_pipeline_state(consumer, cfg.v_ring)
        c.give_first_turn()
        tile = scheduler.receive(cfg, smem, pipes, Int32(0))
        while tile.kv_end > 0:
            rows, q = c.rows_of(tile), c.queries(q, tile)
            k, v, rough = c.begin(q, k, v, tile, rows)
            k, v = c.blocks(q, k, v, tile, rows, rough)
            q, v, number = c.end(q, v, tile, rows)
            tile = scheduler.receive(cfg, smem, pipes, number + 1)

    def consumer(self, x, smem, f, pipes, shape, scale_log2):
        softmax = make_softmax(self.problem, scale_log2)
        return mainloop.Consumer(self.cfg, self.problem, x, smem, f, softmax, pipes, shape)


class SplitForwardSm90(ForwardSm90):
    """The same over parts of the keys, and a second kernel that merges them."""

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
        mPartO: cute.Tensor,
        mPartRows: cute.Tensor,
        stream: cuda.CUstream,
    ):
        """mPartO (parts, batch, seqlen_q, heads_q, head_dim_v) and mPartRows (2, parts, batch,
        heads_q, seqlen_q) are fp32 scratch."""
        tensors = [reordered(t, ROWS) for t in (mQ, mK, mV, mO)]
        lse = reordered(mLSE, LSE)
        rows = [reordered(mPartRows[i, None, None, None, None], PART_LSE) for i in range(2)]
        parts = Parts(reordered(mPartO, PART_ROWS), *rows)
        self.launch(*tensors, lse, parts, counter, sms, softmax_scale, stream)
        launch_merge(*parts, tensors[3], lse, stream)


def compile_fwd(problem: Problem, config: FwdConfig, options: str = ""):
    """Compile for the target in CUTE_DSL_ARCH; needs no GPU and no torch. Sizes, head counts,
    head dims within their class and strides stay run-time values."""
    kernel = (SplitForwardSm90 if config.split_kv else ForwardSm90)(problem, config)
    dtype = kernel.dtypes.q
    b, sq, sk, hq, hk, d, dv = (cute.sym_int32() for _ in range(7))

    def tensor(s, h, width):
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return cute.runtime.make_fake_tensor(
            dtype, (b, s, h, width), (*strides, 1), assumed_align=16
        )

    q, k, v, o = tensor(sq, hq, d), tensor(sk, hk, d), tensor(sk, hk, dv), tensor(sq, hq, dv)
    lse_strides = tuple(cute.sym_int64() for _ in range(3))
    lse = cute.runtime.make_fake_tensor(Float32, (b, hq, sq), lse_strides, assumed_align=4)
    counter = cute.runtime.make_fake_compact_tensor(Int32, (1,), assumed_align=4)
    for part in (kernel.kernel, kernel.__call__):
        part.set_name_prefix(kernel.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    parts = ()
    if config.split_kv:
        n = cute.sym_int32()
        parts = tuple(
            cute.runtime.make_fake_compact_tensor(
                Float32, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=16
            )
            for shape in ((n, b, sq, hq, dv), (2, n, b, hq, sq))
        )
    return cute.compile(
        kernel, q, k, v, o, lse, counter, Int32(1), Float32(1.0), *parts, stream,
        options=f"--enable-tvm-ffi {options}",
    )  # fmt: skip
