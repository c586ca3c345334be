"""Which configuration serves which problem. Imports no torch and no cutlass."""

from collections.abc import Iterator
from itertools import product

from cute_attn.config import FwdConfig
from cute_attn.problem import Problem

# (largest head_dim, largest head_dim_v, config when not causal, config when causal): the first row
# that holds both serves. Reasons are in docs/measured.md.
FORWARD: tuple[tuple[int, int, FwdConfig, FwdConfig], ...] = (
    (64, 64, FwdConfig(192, 128, kv_stages=4), FwdConfig(192, 128, kv_stages=4)),
    (96, 96, FwdConfig(192, 96), FwdConfig(192, 96)),
    (128, 128, FwdConfig(128, 128), FwdConfig(128, 128)),
    (192, 128, FwdConfig(128, 96), FwdConfig(128, 96)),
    (192, 192, FwdConfig(128, 96, q_slots=3), FwdConfig(128, 96, q_slots=3)),
    (256, 256, FwdConfig(128, 64, q_slots=3), FwdConfig(128, 64, q_slots=3)),
)

# The same where few queries meet many keys: one sequence would leave most of the GPU idle.
SPLIT: tuple[tuple[int, int, FwdConfig], ...] = (
    (128, 128, FwdConfig(128, 128, split_kv=True)),
    (192, 128, FwdConfig(128, 96, split_kv=True)),
    (192, 192, FwdConfig(128, 96, q_slots=3, split_kv=True)),
    (256, 256, FwdConfig(128, 64, q_slots=3, split_kv=True)),
)
FEWEST_PARTS = 4  # below that the second kernel costs more than idle SMs do


def pick(problem: Problem) -> FwdConfig:
    """The measured best config. It depends on head dims and mask, and on lengths and heads where
    the keys are split, but never on the batch: a row's bits must not depend on what else is in
    it."""
    few_queries = split(problem)
    if few_queries.parts(problem) >= FEWEST_PARTS:
        return few_queries
    for head_dim, head_dim_v, full, causal in FORWARD:
        if problem.head_dim <= head_dim and problem.head_dim_v <= head_dim_v:
            return causal if problem.causal else full
    raise AssertionError(f"no row serves {problem}")


def split(problem: Problem) -> FwdConfig:
    """What pick takes for problems of this class with few queries on many keys."""
    for head_dim, head_dim_v, config in SPLIT:
        if problem.head_dim <= head_dim and problem.head_dim_v <= head_dim_v:
            return config
    raise AssertionError(f"no row serves {problem}")


def candidates(problem: Problem) -> Iterator[FwdConfig]:
    """Configs worth trying for a problem, feasible or not."""
    for tile_m, tile_n in product((64, 128, 192), (64, 80, 96, 112, 128, 160, 176)):
        warpgroups = tile_m // 64
        # two tiles are written 0, as the table does: else one kernel would be tried twice
        for q_slots in sorted({0, warpgroups, warpgroups + 1} - {2 * warpgroups}):
            for pingpong, schedule in product((True, False), ("static", "dynamic")):
                if warpgroups > 1 or not pingpong:
                    yield FwdConfig(
                        tile_m, tile_n, q_slots=q_slots, pingpong=pingpong, schedule=schedule
                    )
