"""Hopper forward attention on FP8 operands: fwd.py's kernel with other operands and scales.

V in e4m3 is stored by columns, its keys in the order of common/v_layout.py and padded with zeros:
8-bit WGMMA reads operands along the inner dimension of the product only, here the keys.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_attn.config import Fp8Config
from cute_attn.kernels.common.softmax_fp8 import make_fp8_softmax
from cute_attn.kernels.hopper import gemm, storage
from cute_attn.kernels.hopper.fp8_mainloop import Fp8Consumer
from cute_attn.kernels.hopper.fwd import DTYPES, LOG2_E, LSE, ROWS, ForwardSm90, reordered
from cute_attn.kernels.hopper.operands import Dtypes, Inputs, Rounding, Scales, TmaOperand
from cute_attn.problem import Fp8Problem

E4M3 = cutlass.Float8E4M3FN
COLUMNS = [3, 2, 1, 0]  # V stored by columns -> (seqlen, width, heads, batch)


class Fp8ForwardSm90(ForwardSm90):
    def __init__(self, problem: Fp8Problem, config: Fp8Config):
        self.problem, self.cfg = problem.static(), config
        v = DTYPES.get(problem.v_dtype, E4M3)
        self.dtypes = Dtypes(E4M3, E4M3, v, DTYPES.get(problem.dtype, E4M3))
        dims = f"d{self.problem.head_dim}_dv{self.problem.head_dim_v}"
        tile = f"{config.tile_m}x{config.tile_n}x{config.kv_stages}"
        mask = "causal" if problem.causal else "full"
        kind = "fp8" if v is E4M3 else f"fp8_v{problem.v_dtype}"
        self.name = f"cute_attn_fwd_sm90_{kind}_{problem.dtype}_{dims}_{mask}_{tile}"

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
        q_heads: Int32,
        k_shift: Int32,
        mQScale: cute.Tensor,
        mKScale: cute.Tensor,
        mVScale: cute.Tensor,
        mVShift: cute.Tensor,
        mQDot: cute.Tensor,
        stream: cuda.CUstream,
    ):
        """As the 16-bit kernel's, but mV in e4m3 is (batch, heads_kv, head_dim_v, padded keys).
        In fp32, 0 strides welcome: mQScale (batch, groups of q_heads query heads, seqlen_q),
        mKScale (batch, heads_kv, groups of 2^k_shift KV blocks, or of 16 keys where
        problem.fine_k), mVScale and mVShift (batch, heads_kv, head_dim_v), channels next to each
        other where the problem has them, mQDot (batch, heads_q, seqlen_q)."""
        per_head = [reordered(t, LSE) for t in (mQScale, mKScale, mVScale, mVShift, mQDot)]
        scales = Scales(*per_head, q_heads, k_shift)
        self.launch_scaled(
            (mQ, mK, mV, mO), mLSE, scales, None, counter, sms, softmax_scale, stream
        )  # fmt: skip

    @cute.jit
    def launch_scaled(
        self, tensors, mLSE, scales, rounding, counter, sms, softmax_scale, stream
    ):  # fmt: skip
        mQ, mK, mV, mO = tensors
        q, k, o = (reordered(t, ROWS) for t in (mQ, mK, mO))
        v = reordered(mV, COLUMNS if const_expr(self.dtypes.v.width == 8) else ROWS)
        shape = self.shape(q, k, v)
        mmas = gemm.make_mmas_fp8(self.cfg, self.problem, self.dtypes)
        grid = shape.m_blocks * shape.head_batches
        if const_expr(self.cfg.schedule != "grid"):
            grid = cutlass.min(grid, sms)
        lse, no_tensors = reordered(mLSE, LSE), (None, None, None)
        x = Inputs(*self.operands(q, k, v, o), *no_tensors, lse, None, counter, scales, rounding)
        self.kernel(x, mmas, shape, softmax_scale * LOG2_E).launch(
            grid=(grid, 1, 1), block=(self.cfg.threads, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    def key_bytes(self, d, dv):
        return d + self.dtypes.v.width // 8 * dv

    def operands(self, mQ, mK, mV, mO) -> tuple[TmaOperand, ...]:
        cfg, d, dv = self.cfg, self.problem.tile_dim, self.problem.tile_dim_v
        get, put = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        types, slots, slot = self.dtypes, cfg.q_ring, 64 * max(d, 2 * dv)  # bytes
        v_tile = self.operand if types.v.width == 16 else self.column_operand
        return (
            self.operand(get, mQ, types.q, (64, d), slots, slot),
            self.operand(get, mK, types.k, (cfg.tile_n, d), cfg.kv_stages),
            v_tile(get, mV, types.v, (cfg.tile_n, dv), cfg.v_ring),
            self.operand(put, mO, types.o, (64, dv), slots, slot // (types.o.width // 8)),
        )

    def column_operand(self, op, tensor, dtype, tile, stages) -> TmaOperand:
        """A tile whose columns are contiguous, in memory as in shared memory."""
        by_columns = storage.tile_layout(dtype, (tile[1], tile[0]), stages)
        layout = cute.select(by_columns, mode=[1, 0, 2])
        atom, coords = cpasync.make_tiled_tma_atom(
            op, tensor, cute.select(layout, mode=[0, 1]), tile
        )
        return TmaOperand(atom, coords, layout)

    def consumer(self, x, smem, f, pipes, shape, scale_log2):
        softmax = make_fp8_softmax(self.cfg, self.problem, scale_log2)
        at = cute.make_rmem_tensor(2, Int32)
        total = f.acc_O.layout if const_expr(self.cfg.promote) else cute.make_layout(1)
        total = cute.make_rmem_tensor(total, Float32)
        k_factors = cute.make_rmem_tensor(1, cutlass.Int64)
        return Fp8Consumer(
            self.cfg, self.problem, x, smem, f, softmax, pipes, shape, at, k_factors, total
        )


class Fp8RoundingSm90(Fp8ForwardSm90):
    """The same with O in e4m3, and the largest |O|."""

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
        q_heads: Int32,
        k_shift: Int32,
        mQScale: cute.Tensor,
        mKScale: cute.Tensor,
        mVScale: cute.Tensor,
        mVShift: cute.Tensor,
        mQDot: cute.Tensor,
        mOScale: cute.Tensor,
        mAmax: cute.Tensor,
        stream: cuda.CUstream,
    ):
        """mOScale and mAmax are fp32 (1,): O times the first is rounded; the second is 0, and the
        largest finite |O| afterwards, or what it was where that is more."""
        per_head = [reordered(t, LSE) for t in (mQScale, mKScale, mVScale, mVShift, mQDot)]
        scales = Scales(*per_head, q_heads, k_shift)
        rounding = Rounding(mOScale, mAmax)
        self.launch_scaled(
            (mQ, mK, mV, mO), mLSE, scales, rounding, counter, sms, softmax_scale, stream
        )  # fmt: skip


def compile_fp8_fwd(problem: Fp8Problem, config: Fp8Config, options: str = ""):
    """As fwd.compile_fwd, for FP8."""
    rounds = problem.dtype == "e4m3"
    kernel = (Fp8RoundingSm90 if rounds else Fp8ForwardSm90)(problem, config)
    b, sq, sk, hq, hk, d, dv, padded, groups, q_groups = (cute.sym_int32() for _ in range(10))

    def tensor(dtype, *shape):
        strides = tuple(cute.sym_int64(divisibility=128 // dtype.width) for _ in range(3))
        return cute.runtime.make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=16)

    def scales(*shape, pairs=False):
        strides = [cute.sym_int64(divisibility=2 if pairs else 1) for _ in range(3)]
        strides[2] = 1 if pairs else strides[2]
        return cute.runtime.make_fake_tensor(
            Float32, shape, tuple(strides), assumed_align=8 if pairs else 4
        )

    types = kernel.dtypes
    v_shape = (b, hk, dv, padded) if types.v.width == 8 else (b, sk, hk, dv)
    tensors = [
        tensor(types.q, b, sq, hq, d),
        tensor(types.k, b, sk, hk, d),
        tensor(types.v, *v_shape),
        tensor(types.o, b, sq, hq, dv),
        scales(b, hq, sq),
        cute.runtime.make_fake_compact_tensor(Int32, (1,), assumed_align=4),
    ]
    of_v = [scales(b, hk, dv, pairs=x) for x in (problem.channels, problem.v_shift)]
    factors = [scales(b, q_groups, sq), scales(b, hk, groups), *of_v, scales(b, hq, sq)]
    if rounds:
        factors += [
            cute.runtime.make_fake_compact_tensor(Float32, (1,), assumed_align=4) for _ in range(2)
        ]
    for part in (kernel.kernel, kernel.__call__):
        part.set_name_prefix(kernel.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        kernel, *tensors, Int32(1), Float32(1.0), Int32(1), Int32(0), *factors, stream,
        options=f"--enable-tvm-ffi {options}",
    )  # fmt: skip
