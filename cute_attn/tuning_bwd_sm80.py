"""Which configuration of the Ampere backward kernel serves which problem, on which chip. Imports no
torch and no cutlass."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from cute_attn.config import AmpereBwdConfig, ampere_smem_limit
from cute_attn.problem import Problem

Table = tuple[tuple[int, int, AmpereBwdConfig], ...]

# (largest head_dim, largest head_dim_v, config): the first row that holds both serves.
# dK and dV take half of all registers with 128 keys by 128 columns each, or as much. 32 keys a warp
# read least of Q and dO from shared memory for each product; with head dims up to 64 they have all
# columns, and P and dS stay with the warp, above 2 or 4 warps share them.
NEWER = {"vector_adds": True, "split_barrier": True}  # what compute capability 9.0 has
ROOMY: Table = (  # 227 KiB a CTA, 228 an SM: an H100 or H200 that is asked for arch="sm80"
    (64, 64, AmpereBwdConfig(64, 128, 4, 1, ctas=2, **NEWER)),
    (96, 96, AmpereBwdConfig(64, 128, 4, 2, **NEWER)),
    (128, 128, AmpereBwdConfig(64, 128, 4, 2, **NEWER)),
    (192, 128, AmpereBwdConfig(64, 96, 2, 4, step_m=16, **NEWER)),
    (192, 192, AmpereBwdConfig(64, 96, 2, 4, step_m=16, **NEWER)),
    (256, 256, AmpereBwdConfig(64, 64, 2, 4, step_m=16, **NEWER)),
)
A100: Table = (  # 163 KiB a CTA, 164 an SM
    (64, 64, AmpereBwdConfig(64, 128, 4, 1, ctas=2)),
    (96, 96, AmpereBwdConfig(64, 128, 4, 2)),
    (128, 128, AmpereBwdConfig(64, 128, 4, 2)),
    (192, 128, AmpereBwdConfig(64, 64, 2, 4, step_m=16)),
    (192, 192, AmpereBwdConfig(64, 64, 2, 4, step_m=16)),
    (256, 256, AmpereBwdConfig(64, 64, 2, 4, step_m=16, q_stages=1, do_stages=1)),
)
SMALL: Table = (  # 99 KiB a CTA, 100 an SM
    (64, 64, AmpereBwdConfig(64, 128, 4, 2)),
    (96, 96, AmpereBwdConfig(64, 64, 4, 2)),
    (128, 128, AmpereBwdConfig(64, 64, 4, 2, do_stages=1)),
    (192, 128, AmpereBwdConfig(64, 64, 2, 4, step_m=16, q_stages=1, do_stages=1)),
    (192, 192, AmpereBwdConfig(32, 64, 4, 2, step_m=16, do_stages=1)),
    (256, 256, AmpereBwdConfig(32, 32, 2, 2, step_m=16, do_stages=1)),
)


def table(target: str) -> Table:
    """target: the compiler's name of the chip."""
    limit = ampere_smem_limit(target)
    return ROOMY if limit > 200_000 else A100 if limit > 150_000 else SMALL


def pick(problem: Problem, target: str = "sm_80") -> AmpereBwdConfig:
    for head_dim, head_dim_v, config in table(target):
        if problem.head_dim <= head_dim and problem.head_dim_v <= head_dim_v:
            return config
    raise AssertionError(f"no row serves {problem}")


def candidates(problem: Problem, target: str = "sm_80") -> Iterator[AmpereBwdConfig]:
    """Configs worth trying for a problem, feasible or not."""
    base = pick(problem, target)
    for key_warps, column_warps in ((2, 2), (4, 1), (2, 4), (4, 2), (8, 1)):
        for tile_m, tile_n, step_m in product((32, 64, 128), (64, 96, 128), (16, 32)):
            if tile_n % (16 * key_warps) or tile_m % (step_m * column_warps):
                continue
            for stages, ctas in product(((1, 1), (2, 1), (2, 2)), (1, 2)):
                yield replace(
                    base,
                    tile_m=tile_m,
                    tile_n=tile_n,
                    key_warps=key_warps,
                    column_warps=column_warps,
                    step_m=step_m,
                    q_stages=stages[0],
                    do_stages=stages[1],
                    ctas=ctas,
                )
