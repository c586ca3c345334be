"""The two matrix products of attention, as asynchronous WGMMA groups of one warpgroup."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_attn.kernels.hopper.operands import Mmas

STEP = 16  # elements of the inner dimension that one 16-bit WGMMA takes
STEP_8 = 32  # the same of an 8-bit one


def make_mmas(cfg, problem, dtype) -> Mmas:
    K, MN, RMEM = OperandMajorMode.K, OperandMajorMode.MN, warpgroup.OperandSource.RMEM
    one = (1, 1, 1)
    make = hopper.make_trivial_tiled_mma
    qk, qk_half = (make(dtype, dtype, K, K, Float32, one, (64, n)) for n in cfg.qk_widths)
    pv = make(dtype, dtype, K, MN, Float32, one, (64, problem.tile_dim_v), RMEM)
    return Mmas(qk, qk_half, pv)


def make_mmas_fp8(cfg, problem, dtypes) -> Mmas:
    """Q and K in e4m3. V either too, with its keys contiguous (8-bit WGMMA takes no other order),
    or in 16 bits as above."""
    K, MN, RMEM = OperandMajorMode.K, OperandMajorMode.MN, warpgroup.OperandSource.RMEM
    one = (1, 1, 1)
    make = hopper.make_trivial_tiled_mma
    qk, qk_half = (make(dtypes.q, dtypes.k, K, K, Float32, one, (64, n)) for n in cfg.qk_widths)
    major = K if dtypes.v.width == 8 else MN
    pv = make(dtypes.v, dtypes.v, K, major, Float32, one, (64, problem.tile_dim_v), RMEM)
    return Mmas(qk, qk_half, pv)


@cute.jit
def issue(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    A: cute.Tensor,
    B: cute.Tensor,
    steps: cutlass.Constexpr[int],
    zero: cutlass.Constexpr[bool],
):
    """acc (+)= A B^T over so many steps of the inner dimension, as part of a group: the caller
    fences before its first product and commits after its last."""
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not zero)
    for k in cutlass.range_constexpr(steps):
        cute.gemm(atom, acc, A[None, None, k], B[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)


@cute.jit
def gemm(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    A: cute.Tensor,
    B: cute.Tensor,
    steps: cutlass.Constexpr[int],
    zero: cutlass.Constexpr[bool],
):
    """Issue acc (+)= A B^T as a group of its own; the caller waits."""
    warpgroup.fence()
    issue(mma, acc, A, B, steps, zero)
    warpgroup.commit_group()
