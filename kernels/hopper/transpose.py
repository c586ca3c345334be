"""V in e4m3 -> vt, the codes as they are."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_attn.config import TransposeConfig
from cute_attn.kernels.hopper import quantize_v
from cute_attn.kernels.hopper.fwd import ROWS, reordered
from cute_attn.kernels.hopper.quantize_operands import TRANSPOSED, compact, place, shared_words
from cute_attn.problem import Problem

CARVEOUT = 50  # percent of an SM's memory as shared; left out, the compiler would ask a GPU


class TransposeSm90:
    def __init__(self, problem: Problem):
        self.plan = quantize_v.plan(problem.tile_dim_v, 8)
        self.name = f"cute_attn_transpose_sm90_dv{problem.head_dim_v}"

    @cute.jit
    def __call__(self, v: cute.Tensor, vt: cute.Tensor, stream: cuda.CUstream):
        """v (batch, seqlen_k, heads_kv, head_dim_v), vt (batch, heads_kv, head_dim_v, padded)."""
        v, vt = reordered(v, ROWS), reordered(vt, TRANSPOSED)
        tiles = cute.ceil_div(vt.shape[1], self.plan.keys)
        self.kernel(v, vt).launch(
            grid=(tiles * v.shape[2] * v.shape[3], 1, 1),
            block=(quantize_v.THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=2,
            preferred_smem_carveout=CARVEOUT,
        )

    @cute.kernel
    def kernel(self, v: cute.Tensor, vt: cute.Tensor):
        tiles = cute.ceil_div(vt.shape[1], self.plan.keys)
        tile, head, batch = place(cute.arch.block_idx()[0], Int32(tiles), v.shape[2])
        stage = shared_words(self.plan.channels * self.plan.words, Int32)
        x = quantize_v.Values(v[None, None, head, batch], vt[None, None, head, batch], None)
        read = quantize_v.read_tile(self.plan, x.v, None, tile)
        quantize_v.transpose_tile(self.plan, x, read, stage, tile)


def compile_transpose(problem: Problem, config: TransposeConfig, options: str = ""):
    kernel = TransposeSm90(problem)
    b, s, h, dv, padded = (cute.sym_int32() for _ in range(5))
    strides = tuple(cute.sym_int64(divisibility=16) for _ in range(3))
    e4m3 = cutlass.Float8E4M3FN
    v = cute.runtime.make_fake_tensor(e4m3, (b, s, h, dv), (*strides, 1), assumed_align=16)
    for part in (kernel.kernel, kernel.__call__):
        part.set_name_prefix(kernel.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        kernel, v, compact(e4m3, b, h, dv, padded), stream, options=f"--enable-tvm-ffi {options}"
    )
