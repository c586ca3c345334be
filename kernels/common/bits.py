"""Float32 bit patterns in registers: for values that are never negative they compare as integers,
with infinity and NaN above every finite value."""

import struct

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

INF_BITS = 0x7F800000


def bits(x: Float32) -> Int32:
    return Int32(llvm.bitcast(T.i32(), Float32(x).ir_value()))


def from_bits(x: Int32) -> Float32:
    return Float32(llvm.bitcast(T.f32(), Int32(x).ir_value()))


def bits_of(value: float) -> int:
    """The same at trace time."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


@cute.jit
def quad_max_bits(x: Float32) -> Int32:
    """Largest bit pattern among the four threads that share a row."""
    return cute.arch.warp_reduction(bits(x), lambda a, b: cutlass.max(a, b), threads_in_group=4)
