"""Which configuration serves which FP8 problem. Imports no torch and no cutlass."""

from dataclasses import replace
from typing import Any

from cute_attn.config import Fp8Config
from cute_attn.problem import Fp8Problem

# (largest head_dim, largest head_dim_v, config when not causal, config when causal): the first row
# that holds both serves. Blocks of 128 keys, because those share a factor of K by default.
Rows = tuple[tuple[int, int, Fp8Config, Fp8Config], ...]


def _late(tile_m: int, tile_n: int, **knobs: Any) -> Fp8Config:
    return Fp8Config(tile_m, tile_n, exact_max=False, pingpong=False, **knobs)


FORWARD: Rows = (
    (64, 64, _late(192, 128, kv_stages=4), _late(192, 128, kv_stages=4)),
    (96, 96, Fp8Config(192, 128), Fp8Config(192, 128)),
    (128, 128, _late(128, 128, kv_stages=3), _late(128, 128, kv_stages=3)),
    (256, 128, Fp8Config(128, 128), Fp8Config(128, 128)),
    (256, 256, _late(128, 128, q_slots=3), _late(128, 128, q_slots=3)),
)

# The same for raw V, whose mean nobody took out, on more than LOSSLESS keys: the tensor core's sums
# would lose it (kernels/hopper/fp8_mainloop.py). Not timed on a GPU yet; what these are the most of
# is registers: late weights have some up to 96 columns of V, and above 128 it is two launches.
_RAW = (
    (64, 64, _late(128, 128, kv_stages=4, promote=4)),
    (128, 96, Fp8Config(128, 128, kv_stages=3, exact_max=False, promote=4)),
    (128, 128, Fp8Config(128, 128, kv_stages=3, promote=4)),
    (256, 256, Fp8Config(128, 128, promote=4)),
)
FORWARD_RAW: Rows = tuple((*row, row[-1]) for row in _RAW)
LOSSLESS = 512  # keys: what promote=4 leaves to the tensor core, too, whose mean is 0.35 % off then

# The same with P and V in 16 bits.
FORWARD_HP: Rows = (
    (64, 64, Fp8Config(192, 128), Fp8Config(192, 128)),
    (128, 128, _late(128, 128), _late(128, 128)),
    (256, 128, Fp8Config(128, 128), Fp8Config(128, 128)),
    (256, 192, Fp8Config(128, 128, q_slots=2), Fp8Config(128, 128, q_slots=2)),
    (256, 256, _late(128, 64), _late(128, 64)),
)


def pick(problem: Fp8Problem) -> Fp8Config:
    """Depends on head dims, mask, V's dtype, and with raw V on the keys of a sequence: a row's
    bits must not depend on the batch."""
    return _first(problem, problem.raw_v and problem.seqlen_k > LOSSLESS)


def all_of(problem: Fp8Problem) -> tuple[Fp8Config, ...]:
    """For any number of keys."""
    return tuple(_first(problem, raw) for raw in (False, True)[: 1 + problem.raw_v])


def _first(problem: Fp8Problem, raw: bool) -> Fp8Config:
    table = FORWARD_RAW if raw else FORWARD if problem.v_dtype == "e4m3" else FORWARD_HP
    for head_dim, head_dim_v, full, causal in table:
        if problem.head_dim <= head_dim and problem.head_dim_v <= head_dim_v:
            return for_output(problem, causal if problem.causal else full)
    raise AssertionError(f"no row serves {problem}")


def for_output(problem: Fp8Problem, config: Fp8Config) -> Fp8Config:
    """The row's config, or with O in e4m3 one that leaves registers for its rounding."""
    if problem.dtype == "e4m3" and config.few_registers(problem.tile_dim_v):
        return replace(config, exact_max=True)
    return config
