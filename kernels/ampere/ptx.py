"""The instructions of this generation that move tiles, cp.async and ldmatrix (PTX ISA 7.0), and
reductions.

Shared memory is named by 32-bit addresses. Both stand where they are written, as far as the
compiler knows: what orders them against each other is the barrier between.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T


def cp_async(to: Int32, source: Int64, size: Int32):
    """16 bytes from global to shared memory, of which the first `size` are read and the others are
    zeros: with 0 nothing is read, and the source may lie anywhere."""
    llvm.inline_asm(
        None,
        [Int32(to).ir_value(), Int64(source).ir_value(), Int32(size).ir_value()],
        "cp.async.cg.shared.global [$0], [$1], 16, $2;",
        "r,l,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def ldmatrix(to: cute.Tensor, address: Int32, transpose: bool = False):
    """Four 8x8 matrices of 16-bit elements into to, 8 of them: lane 8 i + r gives the address of
    row r of matrix i, and receives the elements 2 (lane % 4) and the next one of row lane / 4 of
    each; with transpose, of that column."""
    code = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transpose else ''}.shared.b16"
    result = llvm.inline_asm(
        llvm.StructType.get_literal([T.i32()] * 4),
        [Int32(address).ir_value()],
        code + " {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    words = cute.recast_tensor(to, Int32)
    for i in range(4):
        words[i] = Int32(llvm.extractvalue(T.i32(), result, [i]))


def add_four(address: Int64, values: cute.Tensor, vectors: bool):
    """Add four numbers to those in global memory: to neighbours at once, which compute capability
    9.0 can, or one after another to every 32nd, where lanes are neighbours."""
    x = [values[i] for i in range(4)]
    if vectors:
        cute.arch.inline_ptx(
            "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[address, *x],
        )
    else:
        for i in range(4):
            cute.arch.inline_ptx(
                "red.relaxed.gpu.global.add.f32 [{$r0}], {$r1};",
                read_only_args=[address + 128 * i, x[i]],
            )
