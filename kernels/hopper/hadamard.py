"""The Hadamard transform of rows in registers, four threads a row.

All sums and differences are taken in the order of cute_attn.quantize.walsh_hadamard, nearest
channels first, so that all roundings are the same. There are two ways to share a row:

- By stripes: a thread holds 8 neighbouring channels, the quad 32, and that again every 32 channels:
  thread t has channels 32j + 8t + e, as a list of vectors j of eight values e. For all dims, and
  RoPE finds both channels of a pair in a thread; sums 8 and 16 channels apart leave the thread.
- By quarters, where the dim is one power of two: thread t has channels t * dim / 4 + r, and the two
  last sums leave the thread. Before either of them, threads exchange halves of what they hold: each
  then makes sums and differences of half the channels, and one of two values has gone to another
  thread, not every one. It ends with channels u * dim / 2 + t * dim / 8 + r of a row.

The functions are plain Python: they write out code, for registers have no run-time index.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.common.bits import fma

LANES = 4  # threads that share a row
VECTOR = 8  # neighbouring channels of a thread
STRIDE = LANES * VECTOR  # channels from a thread's vector to its next

Values = list[list[Float32]]


def vectors(dim: int) -> int:
    """Of a thread; with dim % 32 == 16 the last one of threads 2 and 3 is outside."""
    return -(-dim // STRIDE)


def block_sizes(dim: int) -> list[int]:
    """For every vector, of which power of two it is part: those that add up to dim, largest first,
    each at a multiple of itself (cute_attn.quantize.hadamard_blocks)."""
    sizes = []
    for bit in reversed(range(dim.bit_length())):
        if dim >> bit & 1:
            sizes += [1 << bit] * max(1, (1 << bit) // STRIDE)
    return sizes


def norms(dim: int) -> list[float]:
    """For every vector, what makes its block orthonormal."""
    return [size**-0.5 for size in block_sizes(dim)]


def transform(x: Values, dim: int) -> Values:
    """x times the matrices of +1 and -1 of its blocks."""
    sizes = block_sizes(dim)
    for half in (1, 2, 4):
        x = [sums_within(vector, half) for vector in x]
    for half in (8, 16):
        sign = sign_of(half // VECTOR)
        x = [
            sums_across(vector, half // VECTOR, sign) if size > half else vector
            for vector, size in zip(x, sizes)
        ]
    half = STRIDE
    while half < dim:
        step = half // STRIDE
        for j in range(len(x) - step):
            if j // step % 2 == 0 and sizes[j] > half:
                a, b = x[j], x[j + step]
                x[j], x[j + step] = [p + q for p, q in zip(a, b)], [p - q for p, q in zip(a, b)]
        half *= 2
    return x


def sums_within(x: list[Float32], half: int) -> list[Float32]:
    return [x[i] + x[i + half] if i & half == 0 else x[i - half] - x[i] for i in range(VECTOR)]


def sign_of(bit: int) -> Float32:
    """Which of two threads takes the difference."""
    upper = cute.arch.lane_idx() & bit != 0
    return Float32(Int32(1) - 2 * Int32(upper))


def sums_across(x: list[Float32], bit: int, sign: Float32) -> list[Float32]:
    """The other thread's value plus or minus the own one: rounded once, as a sum is."""
    return [fma(value, sign, cute.arch.shuffle_sync_bfly(value, bit)) for value in x]


# By quarters


def has_quarters(dim: int) -> bool:
    return dim >= STRIDE and dim & dim - 1 == 0


def transform_quarters(x: list[Float32]) -> tuple[Values, list[Float32]]:
    """Of a quarter of a row, in order: (u = 0 and u = 1, what each is to be multiplied by). Who
    takes a difference the wrong way around says so by -1: no rounding minds."""
    n = len(x)
    half = 1
    while half < n // 2:
        x = [x[i] + x[i + half] if i & half == 0 else x[i - half] - x[i] for i in range(n)]
        half *= 2
    odd, upper = sign_of(1), sign_of(2)
    mine, other = halves(x[:half], x[half:], odd)  # an even thread keeps sums, an odd one the rest
    mine, other = halves(mine, received(other, 1), upper)
    other = received(other, 2)
    ends = [[a + b for a, b in zip(mine, other)], [a - b for a, b in zip(mine, other)]]
    sign = cutlass.select_(upper < 0.0, odd, Float32(1.0))
    return ends, [sign, sign * upper]


def halves(a: list[Float32], b: list[Float32], sign: Float32):
    """(sums, differences), or the other way around where sign is -1."""
    kept = [fma(sign, q, p) for p, q in zip(a, b)]
    return kept, [fma(-sign, q, p) for p, q in zip(a, b)]


def received(x: list[Float32], bit: int) -> list[Float32]:
    return [cute.arch.shuffle_sync_bfly(value, bit) for value in x]
