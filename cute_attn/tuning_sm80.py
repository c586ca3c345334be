"""Which configuration of the Ampere kernels serves which problem, on which chip. Imports no torch
and no cutlass."""

from collections.abc import Iterator
from itertools import product

from cute_attn.config import AmpereConfig, ampere_smem_limit
from cute_attn.problem import Problem

Table = tuple[tuple[int, int, AmpereConfig], ...]

# (largest head_dim, largest head_dim_v, config): the first row that holds both serves. A warp with
# 32 rows reads half as much of K and V from shared memory for each product as one with 16; above
# 128 columns O of 32 rows does not fit its registers. Two CTAs of 4 warps an SM, or one of 8, so
# that one is in its softmax while another multiplies.
# The H200's builds of the rows with two CTAs and more than 64 columns keep up to 16 registers in
# local memory, used around the main loop and three times a block at most (test_compile_sm80.py):
# at 4k, head dim 128, 430 TFLOP/s in bf16 and 417 in fp16, FlashAttention-2 356 and 352.
ROOMY: Table = (  # 227 KiB a CTA, 228 an SM: an H100 or H200 that is asked for arch="sm80"
    (64, 64, AmpereConfig(128, 64, ctas=2)),
    (96, 96, AmpereConfig(128, 64, ctas=2)),
    (128, 128, AmpereConfig(128, 64, ctas=2)),
    (192, 128, AmpereConfig(128, 48, ctas=2)),
    (192, 192, AmpereConfig(128, 64, warps=8)),
    (256, 256, AmpereConfig(128, 64, warps=8)),
)
A100: Table = (  # 163 KiB a CTA, 164 an SM
    (64, 64, AmpereConfig(128, 64, ctas=2)),
    (96, 96, AmpereConfig(128, 64, ctas=2)),
    (128, 128, AmpereConfig(128, 32, ctas=2)),
    (192, 128, AmpereConfig(128, 64, warps=8)),
    (192, 192, AmpereConfig(128, 64, warps=8)),
    (256, 256, AmpereConfig(128, 32, warps=8)),
)
SMALL: Table = (  # 99 KiB a CTA, 100 an SM
    (64, 64, AmpereConfig(128, 64, ctas=2)),
    (96, 96, AmpereConfig(128, 64, warps=8)),
    (128, 128, AmpereConfig(128, 32, warps=8)),
    (192, 128, AmpereConfig(128, 32, warps=8)),
    (192, 192, AmpereConfig(128, 32, warps=8)),
    (256, 256, AmpereConfig(64, 32)),
)


def table(target: str) -> Table:
    """target: the compiler's name of the chip."""
    limit = ampere_smem_limit(target)
    return ROOMY if limit > 200_000 else A100 if limit > 150_000 else SMALL


def pick(problem: Problem, target: str = "sm_80") -> AmpereConfig:
    """It depends on head dims alone: a row's bits must not depend on what else is in the batch."""
    for head_dim, head_dim_v, config in table(target):
        if problem.head_dim <= head_dim and problem.head_dim_v <= head_dim_v:
            return config
    raise AssertionError(f"no row serves {problem}")


def candidates(problem: Problem) -> Iterator[AmpereConfig]:
    """Configs worth trying for a problem, feasible or not."""
    either = False, True
    for tile_m, warps in ((64, 4), (128, 4), (128, 8), (256, 8)):
        for ctas in range(1, 1 + 12 // warps):
            for tile_n, stages in product((32, 48, 64, 96, 128), (2, 3)):
                for q_in_regs, exact_max in product(either, either):
                    yield AmpereConfig(tile_m, tile_n, warps, stages, q_in_regs, ctas, exact_max)
