"""Which configuration serves which backward. Imports no torch and no cutlass.

Apart from tuning.py, so that a change here does not make records of the forward old.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from cute_attn.config import BwdConfig
from cute_attn.problem import Problem

# (largest head_dim, largest head_dim_v, config): the first row that holds both serves.
BACKWARD: tuple[tuple[int, int, BwdConfig], ...] = (
    (64, 64, BwdConfig()),
    (128, 128, BwdConfig()),
    (256, 256, BwdConfig()),
)

# In blocks of queries: what a tile costs beside its blocks, and what each part of a tile that CTAs
# share costs the one that adds them up.
TILE_COST, PART_COST = 3.0, 0.5
MAX_PARTS, FEWEST = 8, 4  # parts of a tile, and blocks of a part
MAX_SHARES = 256, 384  # parts in scratch memory: 32 MiB for head dims above 64, or 48 if causal
MANY_HEADS, FEW_ROUNDS = 4, 8  # query heads of a KV head, tiles of a multiprocessor: causal masks


class Tiles(NamedTuple):
    """Blocks of keys of a KV head, in the order in which CTAs take them."""

    whole: int  # of a CTA each
    shared: int  # the others
    parts: int  # CTAs that share one of those


STAGES, SLOTS = (2, 3), (3, 4)  # what a sweep tries


def pick(problem: Problem) -> BwdConfig:
    """The config for a problem; its infeasible() says why where the kernel cannot serve it."""
    for head_dim, head_dim_v, config in BACKWARD:
        if problem.head_dim <= head_dim and problem.head_dim_v <= head_dim_v:
            return config
    raise AssertionError(f"no row serves {problem}")


def tiles_of(problem: Problem, config: BwdConfig, sms: int) -> Tiles:
    """On so many multiprocessors."""
    n_blocks = -(-problem.seqlen_k // config.tile(problem)[1])
    tiles = problem.batch * problem.heads_kv * n_blocks
    if not config.shares(problem):
        return Tiles(tiles, 0, 1)
    if problem.causal:
        rest, parts = _of_last_heads(problem, config, n_blocks, tiles, sms)
    else:
        rest, parts = _of_last_round(problem, config, tiles, sms)
    return Tiles(tiles - rest, rest, parts) if parts > 1 else Tiles(tiles, 0, 1)


def _of_last_round(problem: Problem, config: BwdConfig, tiles: int, sms: int) -> tuple[int, int]:
    """Tiles are alike: those left after full rounds, if parts of them end earlier."""
    blocks = -(-problem.seqlen_q // config.tile_m(problem)) * problem.heads_q // problem.heads_kv
    rest = tiles % sms
    best, parts = blocks + TILE_COST - 1, 1
    for n in range(2, min(MAX_PARTS, blocks // FEWEST) + 1):
        time = -(-rest * n // sms) * (blocks / n + TILE_COST) + n * PART_COST
        if rest and time < best and rest * (n - 1) <= MAX_SHARES[0]:
            best, parts = time, n
    return rest, parts


def _of_last_heads(
    problem: Problem, config: BwdConfig, n_blocks: int, tiles: int, sms: int
) -> tuple[int, int]:
    """Tiles of many query heads: a few long ones, of KV heads that follow each other for the sake
    of the L2 cache, would end late. Each part has one block at least, as there are query heads."""
    group, heads = problem.heads_q // problem.heads_kv, tiles // n_blocks
    blocks = group * -(-problem.seqlen_q // config.tile_m(problem))  # of a long tile
    if group < MANY_HEADS or tiles > FEW_ROUNDS * sms:
        return 0, 1
    rest = min(heads, max(1, sms // n_blocks)) * n_blocks
    return rest, min(group, MAX_SHARES[1] // rest + 1, MAX_PARTS, blocks // (2 * FEWEST))


def candidates(problem: Problem) -> Iterator[BwdConfig]:
    """Configs worth trying for a problem, feasible or not."""
    base = pick(problem)
    # the wide kernel has as many slots as stages
    slots = (base.ds_slots,) if base.wide(problem) else SLOTS
    for stages, ds_slots in product(STAGES, slots):
        yield replace(base, stages=stages, ds_slots=ds_slots)
