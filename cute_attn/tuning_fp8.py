"""Which configuration serves which FP8 problem. Imports no torch and no cutlass."""

from cute_attn.config import Fp8Config
from cute_attn.problem import Fp8Problem

# (largest head_dim, largest head_dim_v, config): the first row that holds both serves. Blocks of
# 128 keys, because those share a factor of K by default.
FORWARD: tuple[tuple[int, int, Fp8Config], ...] = (
    (64, 64, Fp8Config(192, 128, kv_stages=4, exact_max=False, pingpong=False)),
    (96, 96, Fp8Config(192, 128)),
    (128, 128, Fp8Config(128, 128, kv_stages=3, exact_max=False)),
    (256, 128, Fp8Config(128, 128)),
    (256, 256, Fp8Config(128, 128, q_slots=2)),
)

# The same with P and V in 16 bits.
FORWARD_HP: tuple[tuple[int, int, Fp8Config], ...] = (
    (64, 64, Fp8Config(192, 128)),
    (128, 128, Fp8Config(128, 128)),
    (256, 128, Fp8Config(128, 128)),
    (256, 192, Fp8Config(128, 128, q_slots=2)),
    (256, 256, Fp8Config(128, 64, q_slots=2)),
)


def pick(problem: Fp8Problem) -> Fp8Config:
    """Depends on head dims and V's dtype alone: a row's bits must not depend on the batch."""
    for head_dim, head_dim_v, config in FORWARD if problem.v_dtype == "e4m3" else FORWARD_HP:
        if problem.head_dim <= head_dim and problem.head_dim_v <= head_dim_v:
            return config
    raise AssertionError(f"no row serves {problem}")
