"""Rebalance of channels of q and K: powers of two, by which products keep all bits."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.common.bits import from_bits

NAN = float("nan")
TINY = 1e-30  # as in cute_attn.quantize
MAX_BALANCE = 32.0


@cute.jit
def balance_of(of_k: Float32, of_q: Float32) -> Float32:
    """The power of two next to sqrt(rms k / rms q), from mean squares; one that is infinite counts
    as 0, as it does on the CPU."""
    k = cute.arch.fmax(finite(of_k), Float32(TINY))
    q = cute.arch.fmax(finite(of_q), Float32(TINY))
    return exp2_of_integer((cute.math.log2(k) - cute.math.log2(q)) * 0.25)


@cute.jit
def power_of_two(x: Float32) -> Float32:
    """Next to x > 0 by its logarithm; NaN for what has none."""
    power = exp2_of_integer(cute.math.log2(x))
    return power if x >= 0.0 else Float32(NAN)


def exp2_of_integer(binades: Float32) -> Float32:
    """Of the nearest one within limits, the even one of two."""
    limited = cute.arch.fmax(cute.arch.fmin(binades, Float32(MAX_BALANCE)), Float32(-MAX_BALANCE))
    return from_bits((cute.math.roundeven(limited).to(Int32) + 127) << 23)


def finite(value: Float32) -> Float32:
    return cutlass.select_(cute.math.absf(value) < Float32.inf, value, Float32(0.0))
