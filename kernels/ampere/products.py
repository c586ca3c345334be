"""Matrix products of a warp: mma.sync m16n8k16, fp32 accumulators."""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warp

STEP = 16  # of a product's inner dimension, and rows of an m-tile


def accumulator(m_tiles: int, width: int) -> cute.Tensor:
    """Of a warp's rows, laid out as those of WGMMA are: ((2, 2, width/8), m-tiles, 1) fp32."""
    return cute.make_rmem_tensor(((2, 2, width // 8), m_tiles, 1), Float32)


@cute.jit
def mma(acc: cute.Tensor, m: int, n: int, A: cute.Tensor, B: cute.Tensor, half: int):
    """Of 16 rows, 8 columns and 16 steps, into tile (m, n) of acc. A: 8 numbers of a thread; B: 8
    of 16 columns, of which half says which 8 columns are meant."""
    atom = cute.make_mma_atom(warp.MmaF16BF16Op(A.element_type, Float32, (16, 8, 16)))
    C = acc[(None, None, n), m, 0]
    C = cute.make_tensor(C.iterator, cute.make_layout(((2, 2), 1, 1)))
    half_B = cute.make_tensor(B.iterator + 4 * half, cute.make_layout(((2, 2), 1, 1)))
    A = cute.make_tensor(A.iterator, cute.make_layout(((2, 2, 2), 1, 1)))
    cute.gemm(atom, C, A, half_B, C)
