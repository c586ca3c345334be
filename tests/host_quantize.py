"""Stands in for kernels/hopper/quantize.py: takes what its kernels take, and runs on the CPU."""

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.config import QuantizeSizes
from cute_attn.kernels.hopper import quantize
from cute_attn.kernels.hopper.quantize_operands import carved


class HostQuantise:
    """scratch[0] = the words that the kernels make use of."""

    def __init__(self, config):
        self.config = config

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        k_shift: cute.Tensor,
        v_shift: cute.Tensor,
        given: cute.Tensor,
        balance: cute.Tensor,
        signs: cute.Tensor,
        q8: cute.Tensor,
        k8: cute.Tensor,
        out_v: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        dots: cute.Tensor,
        scratch: cute.Tensor,
        q_rows: Int32,
        k_rows: Int32,
        k_block: Int32,
    ):
        sizes = QuantizeSizes(
            *(q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3]),
            *(cute.ceil_div(t.shape[1], rows) for t, rows in ((q, q_rows), (k, k_rows))),
            cute.ceil_div(k.shape[1], 8),
        )
        words = Int32(0)
        for t in carved(scratch, self.config.scratch_shapes(sizes)):
            words = words + (Int32(0) if t is None else Int32(cute.size(t)))
        scratch[0] = Float32(words)


def compile_quantize(problem, config, options=""):
    tensors = quantize.fake_tensors(quantize.QuantizeSm90(problem, config), problem.head_dim)
    return cute.compile(
        HostQuantise(config), *tensors, Int32(1), Int32(1), Int32(1),
        options=f"{options} --enable-tvm-ffi",
    )  # fmt: skip
