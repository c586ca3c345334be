"""Builds FlashAttention-1's schedule of the Ampere kernels; needs the DSL, no GPU."""

import pytest
from builds import no_float_maxima

from cute_attn import tuning_sm80, tuning_v1
from cute_attn.config import AMPERE_SMEM_LIMITS
from cute_attn.problem import Problem
from cute_attn.tools import inspect, peers_v1

pytestmark = pytest.mark.compile
CELLS = [
    (name, chip, Problem("fp16" if chip == "sm_90a" and not causal else "bf16", d, d, causal))
    for name in peers_v1.UNDONE
    for d in (64, 128)
    for chip, causal in (("sm_80", d == 64), ("sm_90a", d == 128))
]
# of each a small one for an A100 and a large one for Hopper; the others are for -m exhaustive
FEW = [c for c in CELLS if (c[1] == "sm_90a") == (c[2].head_dim == 128)]
MORE = [c for c in CELLS if c not in FEW]
LEFT_OUT = [pytest.mark.slow, pytest.mark.exhaustive]


def built(name, chip, problem):
    config = tuning_v1.pick(problem, chip, **peers_v1.changes(name))
    with no_float_maxima() as floats:
        used = inspect.build(problem, config, f"sm80:{chip}").resources
    assert not floats
    return config, used


@pytest.mark.parametrize(
    "cell",
    FEW + [pytest.param(cell, marks=LEFT_OUT) for cell in MORE],
    ids=lambda c: f"{c[0]}-{c[1]}-d{c[2].head_dim}-{c[2].causal}",
)
def test_build(cell):
    name, chip, problem = cell
    config, used = built(*cell)
    assert used.smem == config.smem_bytes(problem), "infeasible() would not see it coming"
    assert used.smem <= AMPERE_SMEM_LIMITS[chip]
    assert used.registers * config.threads * config.ctas <= 65536
    for opcode in ("HMMA", "LDSM", "LDGSTS", "STG", "MUFU.EX2"):
        assert used.counts.get(opcode), opcode
    # as the kernel that it is compared with may on that chip: test_compile_sm80.py
    spills = 0 if chip == "sm_80" else 80
    assert used.frame <= spills, used
    assert all(loop.get("STL", 0) + loop.get("LDL", 0) <= spills // 10 for loop in used.loops), used
    barriers = [loop["BAR"] for loop in used.loops]
    assert barriers == [3 if config.split_keys else 1] * len(barriers)


def test_o_is_multiplied_twice_a_block_where_it_is_kept_normalised():
    problem = Problem("bf16", 64, 64)
    _, used = built("divide", "sm_80", problem)
    v2 = inspect.build(problem, tuning_sm80.pick(problem), "sm80").resources
    O = 2 * 64 // 2  # registers a thread: two m-tiles
    more = [loop["FMUL"] - old["FMUL"] for loop, old in zip(used.loops, v2.loops)]
    assert all(n >= O for n in more), more
