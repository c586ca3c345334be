"""Which configuration serves which backward. Imports no torch and no cutlass.

Apart from tuning.py, so that a change here does not make records of the forward old.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import product
from typing import Any

from cute_attn.config import BwdConfig
from cute_attn.problem import Problem

# (largest head_dim, largest head_dim_v, config): the first row that holds both serves.
BACKWARD: tuple[tuple[int, int, BwdConfig], ...] = (
    (64, 64, BwdConfig()),
    (128, 128, BwdConfig()),
    (256, 256, BwdConfig()),
)

# What a sweep tries.
SPACE: dict[str, tuple[int, ...]] = {"stages": (2, 3), "ds_slots": (3, 4)}


def pick(problem: Problem) -> BwdConfig:
    """The config for a problem; its infeasible() says why where the kernel cannot serve it."""
    for head_dim, head_dim_v, config in BACKWARD:
        if problem.head_dim <= head_dim and problem.head_dim_v <= head_dim_v:
            return config
    raise AssertionError(f"no row serves {problem}")


def candidates(problem: Problem) -> Iterator[BwdConfig]:
    """Configs worth trying for a problem, feasible or not; knobs that BwdConfig lacks are left."""
    base = pick(problem)
    names = [f.name for f in fields(BwdConfig) if f.name in SPACE]
    if base.wide(problem):  # which has as many slots as stages
        names = [name for name in names if name != "ds_slots"]
    for values in product(*(SPACE[name] for name in names)):
        chosen: dict[str, Any] = dict(zip(names, values, strict=True))
        yield replace(base, **chosen)
