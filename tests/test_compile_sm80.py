"""Builds the Ampere kernels for the chips they are meant for, and looks at them; needs the DSL, no
GPU. As test_compile.py does:

    UPDATE_GOLDEN=1 python -m pytest tests/test_compile_sm80.py -n 2 -m "slow or not slow"
"""

from dataclasses import replace
from pathlib import Path

import pytest
from builds import compare_golden, job_id, no_float_maxima, one_of_each

from cute_attn import tuning_sm80
from cute_attn.config import AMPERE_SMEM_LIMITS, AmpereConfig
from cute_attn.problem import MAX_HEAD_DIM, Problem
from cute_attn.tools import inspect

pytestmark = pytest.mark.compile
GOLDEN = Path(__file__).with_name("golden_counts_sm80.json")
slow = pytest.mark.slow
CHIPS = ("sm_80", "sm_86", "sm_89", "sm_90a")  # the last for arch="sm80" on an H100 or H200
SM_SMEM = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90a": 228}  # KiB of an SM, 1 a CTA its own
MASKS = (("bf16", True), ("fp16", False))


def rows(chip, masks=MASKS):
    """(chip, problem, config) of a chip's table."""
    return [
        (chip, Problem(dtype, d, dv, causal), config)
        for d, dv, config in tuning_sm80.table(chip)
        for dtype, causal in masks
    ]


def name(job):
    return f"{job[0]}-{job_id(job[1:])}"


TABLE = [row for chip in CHIPS for row in rows(chip)]
# all of one chip, and of the others what their tables have of their own
FEW = rows("sm_90a", MASKS[:1]) + [r for c in ("sm_80", "sm_86") for r in rows(c, MASKS[:1])[2::3]]
OTHER_MASKS = [(t, not c) for t, c in MASKS]
MORE = rows("sm_80", OTHER_MASKS)
CLASSES = [
    ("sm_80", problem, tuning_sm80.pick(problem))
    for d in range(16, MAX_HEAD_DIM + 1, 16)
    for problem in (Problem(dtype, d, d, causal) for dtype, causal in [MASKS[d // 16 % 2]])
    if (d, d) not in [row[:2] for row in tuning_sm80.table("sm_80")]
]
PAIRS = [
    ("sm_80", problem, tuning_sm80.pick(problem))
    for d, dv in ((128, 64), (64, 256), (16, 256), (256, 16))
    for problem in [Problem("bf16", d, dv, True)]
]
BASE = Problem("bf16", 64, 64, True)
KNOBS = [
    ("sm_90a", replace(BASE, negative_scale=True), AmpereConfig()),
    ("sm_90a", BASE, AmpereConfig(exact_max=True)),
    ("sm_90a", BASE, AmpereConfig(64, 64, kv_stages=3, q_in_regs=True, ctas=2)),
]
OTHERS = [job for job in TABLE if job not in FEW] + MORE + CLASSES + PAIRS


def check_fits(used, chip, problem, config):
    """As many CTAs an SM as the config wants, made of what Ampere has."""
    assert 0 < used.smem <= AMPERE_SMEM_LIMITS[chip]
    assert used.smem == config.smem_bytes(problem), "infeasible() would not see it coming"
    assert config.ctas * (used.smem + 1024) <= SM_SMEM[chip] * 1024, "fewer CTAs an SM than asked"
    assert used.registers * config.threads * config.ctas <= 65536
    for opcode in ("HMMA", "LDSM", "LDGSTS", "STG", "MUFU.EX2"):
        assert used.counts.get(opcode), opcode


def check(job):
    chip, problem, config = job
    with no_float_maxima() as floats:
        used = inspect.build(problem, config, f"sm80:{chip}").resources
    assert not floats
    check_fits(used, *job)
    assert used.loops and all(loop.get("MUFU.EX2") for loop in used.loops)
    # a few registers, once a tile; of a block's hundreds of instructions at most three
    assert used.frame <= 64, used
    assert all(loop.get("STL", 0) + loop.get("LDL", 0) <= 3 for loop in used.loops), used
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


@pytest.mark.parametrize("job", KNOBS, ids=name)
def test_knobs(job):
    check(job)
