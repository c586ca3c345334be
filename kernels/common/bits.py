"""Float32 in registers: fused multiply-add, and bit patterns. Those of values that are never
negative compare as integers, with infinity and NaN above every finite value."""

import functools
import struct

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32, Int64
from cutlass._mlir.dialects import llvm, math
from cutlass.cutlass_dsl import T

INF_BITS = 0x7F800000


def bits(x: Float32) -> Int32:
    return Int32(llvm.bitcast(T.i32(), Float32(x).ir_value()))


def from_bits(x: Int32) -> Float32:
    return Float32(llvm.bitcast(T.f32(), Int32(x).ir_value()))


def bits_of(value: float) -> int:
    """The same at trace time."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def magnitude(x: Float32) -> Float32:
    return Float32(math.absf(Float32(x).ir_value()))


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c, rounded once."""
    return Float32(llvm.intr_fma(*(Float32(x).ir_value() for x in (a, b, c))))


def e4m3_pair(low: Float32, high: Float32) -> Int16:
    """Both rounded to e4m3, what is too large to 448."""
    asm = "cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;"
    return Int16(_asm(T.i16(), asm, "=h,f,f", (high, low)))


def kept(x: Int64) -> Int64:
    """x, which the compiler is not to compute again wherever it is used."""
    values = [Int64(x).ir_value()]
    return Int64(llvm.inline_asm(T.i64(), values, "mov.b64 $0, $1;", "=l,l", has_side_effects=True))


def copied(x: Int32) -> Int32:
    """A copy made where it stands."""
    asm, values = "mov.b32 $0, $1;", [Int32(x).ir_value()]
    return Int32(llvm.inline_asm(T.i32(), values, asm, "=r,r", has_side_effects=True))


def any_of_threads(condition: Boolean, barrier: Int32, threads: int) -> Boolean:
    """Whether it holds in one of those that meet at the barrier."""
    asm = (
        "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; "
        f"bar.red.or.pred q, $2, {threads}, p; selp.s32 $0, 1, 0, q; }}"
    )
    values = [Int32(x).ir_value() for x in (condition, barrier)]
    found = llvm.inline_asm(T.i32(), values, asm, "=r,r,r", has_side_effects=True)
    return Int32(found) != 0


def largest(values: cute.Tensor) -> Float32:
    """Of values that are not negative. Integers have a maximum of three operands, and a tree of
    them has none of a long chain's latency."""
    top = [bits(values[i]) for i in range(cute.size(values))]
    while len(top) > 1:
        top = [functools.reduce(cutlass.max, top[i : i + 3]) for i in range(0, len(top), 3)]
    return from_bits(top[0])


def pair_extremum(dtype: str, name: str, a: Int32, b: Int32) -> Int32:
    """min or max of two 16-bit numbers at once; of a NaN and a number, the number."""
    kind = {"bf16": "bf16x2", "fp16": "f16x2"}[dtype]
    values = [Int32(x).ir_value() for x in (a, b)]
    return Int32(
        llvm.inline_asm(
            T.i32(), values, f"{name}.{kind} $0, $1, $2;", "=r,r,r", has_side_effects=False
        )
    )


def product(a: Float32, b: Float32) -> Float32:
    """a * b, rounded before anything is added to it: the assembler leaves it alone."""
    return Float32(_asm(T.f32(), "mul.rn.f32 $0, $1, $2;", "=f,f,f", (a, b)))


def packed_e4m3(a: Float32, b: Float32, c: Float32, d: Float32) -> Int32:
    """Four numbers as float8_e4m3fn, a in the lowest byte: +-448 for what is beyond, NaN stays."""
    code = (
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }"
    )
    return Int32(_asm(T.i32(), code, "=r,f,f,f,f", (a, b, c, d)))


def word_of(dtype: str, values) -> Int32:
    """As many numbers as 32 bits hold, rounded to dtype, the first in the lowest bits."""
    if dtype == "e4m3":
        return packed_e4m3(*values)
    low, high = values
    kind = {"bf16": "bf16x2", "fp16": "f16x2"}[dtype]
    return Int32(_asm(T.i32(), f"cvt.rn.{kind}.f32 $0, $2, $1;", "=r,f,f", (low, high)))


def _asm(result, code: str, constraints: str, values):
    return llvm.inline_asm(
        result,
        [Float32(x).ir_value() for x in values],
        code,
        constraints,
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
