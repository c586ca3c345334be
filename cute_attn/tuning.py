"""Which configuration serves which problem. Imports no torch and no cutlass."""

from collections.abc import Iterator
from itertools import product

from cute_attn.config import FwdConfig
from cute_attn.problem import Problem

# (largest head_dim or head_dim_v of the row, config when not causal, config when causal)
FORWARD: tuple[tuple[int, FwdConfig, FwdConfig], ...] = (
    (64, FwdConfig(192, 128, schedule="static"), FwdConfig(192, 128)),
    (96, FwdConfig(192, 96, schedule="static"), FwdConfig(192, 96)),
    (128, FwdConfig(128, 128, schedule="static"), FwdConfig(128, 128)),
    (192, FwdConfig(128, 96, q_slots=2, schedule="static"), FwdConfig(128, 96, q_slots=2)),
    (256, FwdConfig(128, 64, q_slots=3, schedule="static"), FwdConfig(128, 64, q_slots=3)),
)


def pick(problem: Problem) -> FwdConfig:
    """The measured best config. It depends on nothing but dtype, head dims and mask, so that a
    row's bits never depend on what else is in the batch."""
    width = max(problem.head_dim, problem.head_dim_v)
    for limit, full, causal in FORWARD:
        if width <= limit:
            return causal if problem.causal else full
    raise AssertionError(f"Problem admits no head_dim of {width}")


def candidates(problem: Problem) -> Iterator[FwdConfig]:
    """Configs worth trying for a problem, feasible or not."""
    for tile_m, tile_n in product((64, 128, 192), (64, 80, 96, 112, 128, 160, 176)):
        warpgroups = tile_m // 64
        for q_slots in sorted({warpgroups, min(warpgroups + 1, 2 * warpgroups), 2 * warpgroups}):
            for pingpong, schedule in product((True, False), ("static", "dynamic")):
                if warpgroups > 1 or not pingpong:
                    yield FwdConfig(
                        tile_m, tile_n, q_slots=q_slots, pingpong=pingpong, schedule=schedule
                    )
