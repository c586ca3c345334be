"""Which configuration serves which backward. Imports no torch and no cutlass.

Apart from tuning.py, so that a change here does not make records of the forward old.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from cute_attn.config import BwdConfig
from cute_attn.problem import Problem

# (largest head_dim, largest head_dim_v, config): the first row that holds both serves.
BACKWARD: tuple[tuple[int, int, BwdConfig], ...] = (
    (64, 64, BwdConfig()),
    (128, 128, BwdConfig()),
    (256, 256, BwdConfig()),
)

STAGES, SLOTS = (2, 3), (3, 4)  # what a sweep tries


def pick(problem: Problem) -> BwdConfig:
    """The config for a problem; its infeasible() says why where the kernel cannot serve it."""
    for head_dim, head_dim_v, config in BACKWARD:
        if problem.head_dim <= head_dim and problem.head_dim_v <= head_dim_v:
            return config
    raise AssertionError(f"no row serves {problem}")


def candidates(problem: Problem) -> Iterator[BwdConfig]:
    """Configs worth trying for a problem, feasible or not."""
    base = pick(problem)
    # the wide kernel has as many slots as stages
    slots = (base.ds_slots,) if base.wide(problem) else SLOTS
    for stages, ds_slots in product(STAGES, slots):
        yield replace(base, stages=stages, ds_slots=ds_slots)
