"""Which tiles FlashAttention-1's schedule gets, on which chip. Imports no torch and no cutlass."""

from dataclasses import asdict

from cute_attn import tuning_sm80
from cute_attn.config_v1 import V1Config
from cute_attn.problem import Problem


def pick(
    problem: Problem,
    target: str = "sm_80",
    divide_always: bool = True,
    split_keys: bool = True,
    walk_rows: bool = True,
) -> V1Config:
    """Where warps divide the rows, the tiles of FlashAttention-2's schedule. Where they divide the
    keys, as many rows as leave the registers room for a block's P V, which every warp has of all
    of them, and the shared memory for that of all warps."""
    changes = {"divide_always": divide_always, "split_keys": split_keys, "walk_rows": walk_rows}
    if not split_keys:
        return V1Config(**asdict(tuning_sm80.pick(problem, target)), **changes)
    rows = 64 if problem.head_dim_v <= 64 else 32
    return V1Config(rows, 64, **changes)
