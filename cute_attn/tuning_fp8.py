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

# The same for raw V, whose mean nobody took out, on more than LOSSLESS keys: the tensor core's sums
# would lose it (kernels/hopper/fp8_mainloop.py). Not timed on a GPU yet; what these are the most of
# is registers: late weights have some up to 96 columns of V, and above 128 it is two launches.
FORWARD_RAW: tuple[tuple[int, int, Fp8Config], ...] = (
    (64, 64, Fp8Config(128, 128, kv_stages=4, exact_max=False, pingpong=False, promote=4)),
    (128, 96, Fp8Config(128, 128, kv_stages=3, exact_max=False, promote=4)),
    (128, 128, Fp8Config(128, 128, kv_stages=3, promote=4)),
    (256, 256, Fp8Config(128, 128, promote=4)),
)
LOSSLESS = 512  # keys: what promote=4 leaves to the tensor core, too, whose mean is 0.35 % off then

# The same with P and V in 16 bits.
FORWARD_HP: tuple[tuple[int, int, Fp8Config], ...] = (
    (64, 64, Fp8Config(192, 128)),
    (128, 128, Fp8Config(128, 128)),
    (256, 128, Fp8Config(128, 128)),
    (256, 192, Fp8Config(128, 128, q_slots=2)),
    (256, 256, Fp8Config(128, 64, q_slots=2)),
)


def pick(problem: Fp8Problem) -> Fp8Config:
    """Depends on head dims, V's dtype, and with raw V on the keys of a sequence: a row's bits must
    not depend on the batch."""
    return _first(problem, problem.raw_v and problem.seqlen_k > LOSSLESS)


def all_of(problem: Fp8Problem) -> tuple[Fp8Config, ...]:
    """For any number of keys."""
    return tuple(_first(problem, raw) for raw in (False, True)[: 1 + problem.raw_v])


def _first(problem: Fp8Problem, raw: bool) -> Fp8Config:
    table = FORWARD_RAW if raw else FORWARD if problem.v_dtype == "e4m3" else FORWARD_HP
    for head_dim, head_dim_v, config in table:
        if problem.head_dim <= head_dim and problem.head_dim_v <= head_dim_v:
            return config
    raise AssertionError(f"no row serves {problem}")
