"""Which tiles FlashAttention-1's schedule gets, on which chip. Imports no torch and no cutlass."""

from dataclasses import asdict, replace

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
    keys, 32 rows: every warp has a block's P V of all of them in registers. The more keys a block
    has, the fewer times is P V exchanged; FlashAttention-1 had 16 rows and 128 or 256 keys."""
    changes = {"divide_always": divide_always, "split_keys": split_keys, "walk_rows": walk_rows}
    if not split_keys:
        return V1Config(**asdict(tuning_sm80.pick(problem, target)), **changes)
    config = V1Config(32, 128, **changes)
    return replace(config, tile_n=64) if config.infeasible(problem, target) else config
