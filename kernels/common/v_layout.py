"""The order in which V's keys lie for an FP8 product P V.

A thread's scores are a pair of neighbouring columns of every 8 (the fp32 accumulator of a WGMMA);
as an 8-bit A operand it gives 4 neighbouring columns of every 16 (PTX ISA, register fragments of
wgmma.m64k32). Where V's keys are permuted within every 32 in the same way, weights become that
operand without an exchange between threads.
"""

GROUP = 32  # keys that are permuted among each other
PAD = 128  # keys to which V is padded, with zeros


def key_at(position: int) -> int:
    """Which key of a group of 32 lies at this position: 16h + 4t + j holds 16h + 8(j / 2) + 2t +
    j % 2, for the halves h, the four threads t that share a row, and the 4 values j of a thread."""
    half, thread, value = position // 16, position // 4 % 4, position % 4
    return 16 * half + 8 * (value // 2) + 2 * thread + value % 2


ORDER = tuple(key_at(position) for position in range(GROUP))
