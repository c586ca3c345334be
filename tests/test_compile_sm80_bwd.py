"""Builds the Ampere backward for the chips it is meant for, and looks at it; needs the DSL, no GPU.
As test_compile_sm80.py does:

    UPDATE_GOLDEN=1 python -m pytest tests/test_compile_sm80_bwd.py -n 2 -m "slow or not slow"
"""

from dataclasses import replace
from pathlib import Path

import pytest
from builds import compare_golden, no_float_maxima, one_of_each
from test_compile_sm80 import CHIPS, MASKS, OTHER_MASKS, check_fits, name

from cute_attn import tuning_bwd_sm80
from cute_attn.config import AmpereBwdConfig
from cute_attn.problem import MAX_HEAD_DIM, Problem
from cute_attn.tools import inspect

pytestmark = pytest.mark.compile
GOLDEN = Path(__file__).with_name("golden_counts_sm80_bwd.json")
slow = pytest.mark.slow


def rows(chip, masks=MASKS):
    """(chip, problem, config) of a chip's table."""
    return [
        (chip, Problem(dtype, d, dv, causal), config)
        for d, dv, config in tuning_bwd_sm80.table(chip)
        for dtype, causal in masks
    ]


TABLE = [row for chip in CHIPS for row in rows(chip)]
# of the chip that runs it in our GPU tests the usual head dims, of the others a few of their own
FEW = [r for r in rows("sm_90a", MASKS[:1]) if r[1].head_dim == r[1].head_dim_v != 96]
FEW += [r for c in ("sm_80", "sm_86") for r in rows(c, MASKS[:1]) if r[1].head_dim in (64, 256)]
MORE = rows("sm_80", OTHER_MASKS)[::2]
CLASSES = [
    ("sm_80", problem, tuning_bwd_sm80.pick(problem, "sm_80"))
    for d in range(16, MAX_HEAD_DIM + 1, 16)
    for problem in (Problem(dtype, d, d, causal) for dtype, causal in [MASKS[d // 16 % 2]])
    if (d, d) not in [row[:2] for row in tuning_bwd_sm80.table("sm_80")]
]
PAIRS = [
    ("sm_80", problem, tuning_bwd_sm80.pick(problem, "sm_80"))
    for d, dv in ((128, 64), (64, 256), (16, 256), (256, 16), (40, 72))
    for problem in [Problem("bf16", d, dv, True)]
]
BASE = Problem("bf16", 128, 128, True)
TWO_CTAS = AmpereBwdConfig(64, 64, 2, 2, ctas=2, vector_adds=True)
KNOBS = [
    ("sm_90a", BASE, TWO_CTAS),
    ("sm_90a", Problem("bf16", 64, 64), AmpereBwdConfig(128, 128, vector_adds=True)),
]
IN_TURN = [
    (chip, problem, replace(config, deterministic=True))
    for chip, problem, config in TABLE
    if problem.dtype == "bf16" and chip == "sm_80"
]
OTHERS = [job for job in TABLE if job not in FEW] + MORE + CLASSES + PAIRS + IN_TURN


def check(job):
    """Every kernel of a backward; Resources of the main one."""
    chip, problem, config = job
    with no_float_maxima() as floats:
        built = inspect.build(problem, config, f"sm80:{chip}")
    assert not floats
    assert len(built.kernels) == 3 and built.kernels[1] is built.resources
    for before_or_after in (built.kernels[0], built.kernels[2]):
        assert not before_or_after.spills, before_or_after
    used = built.resources
    assert used.name.startswith("cute_attn_bwd_sm80_"), "scripts/profile.py would not find it"
    check_fits(used, *job)
    assert any(op.startswith("RED") for op in used.counts), "dQ is added up by reductions"
    assert ("red.relaxed.gpu.global.add.v4.f32" in built.ptx) == config.vector_adds
    assert ("mbarrier.try_wait" in built.ptx) == config.split_barrier
    assert used.name.endswith("_deterministic_1") == config.deterministic
    (loop,) = used.loops
    assert loop.get("MUFU.EX2") and loop["HMMA"] > 60
    # Numbers that do not change in the loop, put away once a tile: of its two thousand instructions
    # a few fetch them, mostly where elements are masked
    assert used.frame <= 64, used
    assert not loop.get("STL") and loop.get("LDL", 0) <= 12, used
    return used


@pytest.mark.parametrize("job", FEW, ids=name)
def test_tuning_row(job):
    compare_golden(GOLDEN, name(job), check(job).golden(), map(name, TABLE))


@slow
@pytest.mark.parametrize(
    "job", one_of_each([job for job in TABLE if job not in FEW], OTHERS, 2), ids=name
)
def test_tuning_row_of_another_chip(job):
    compare_golden(GOLDEN, name(job), check(job).golden(), map(name, TABLE))


@slow
@pytest.mark.parametrize("job", one_of_each(MORE + CLASSES + PAIRS, OTHERS, 2), ids=name)
def test_more_masks_and_head_dims(job):
    check(job)


@pytest.mark.parametrize(
    "job", [j for j in IN_TURN if j[1:2] == (BASE,) and j[0] == "sm_80"], ids=name
)
def test_deterministic(job):
    check(job)


@slow
@pytest.mark.parametrize("job", one_of_each(IN_TURN, OTHERS, 2), ids=name)
def test_every_deterministic_row(job):
    check(job)


@slow
@pytest.mark.parametrize("job", KNOBS, ids=name)
def test_knobs(job):
    check(job)
