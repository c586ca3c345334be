"""test_compile.py for the FP8 forward; counts are in golden_counts_fp8.json."""

from dataclasses import replace
from pathlib import Path

import pytest
from builds import compare_golden, job_id, no_float_maxima, one_of_each

from cute_attn import tuning_fp8
from cute_attn.config import SMEM_LIMIT, Fp8Config
from cute_attn.problem import MAX_HEAD_DIM, Fp8Problem
from cute_attn.tools import inspect
from cute_attn.tools.compile import fp8_jobs

pytestmark = pytest.mark.compile
GOLDEN = Path(__file__).with_name("golden_counts_fp8.json")
slow = pytest.mark.slow

TABLE = fp8_jobs()
USUAL = (64, 128, 256)
FIRST = [
    (p, c)
    for p, c in TABLE
    if (p.v_dtype, p.raw_v) == ("e4m3", False) and p.head_dim == p.head_dim_v in USUAL
]
BASE = Fp8Problem("bf16", 128, 128, True)
ALL = replace(BASE, dtype="fp16", negative_scale=True, fine_k=True, channels=True, v_shift=True)
PROMOTING = Fp8Config(128, 128, promote=4)
LATE = replace(PROMOTING, exact_max=False)
PROMOTED = [  # a second accumulator in what registers are left
    (replace(ALL, fine_k=False), replace(PROMOTING, kv_stages=3)),
    (replace(BASE, causal=False), replace(LATE, tile_n=96, promote=2)),
    (Fp8Problem("bf16", 64, 64, True), replace(LATE, kv_stages=4, pingpong=False)),
    (Fp8Problem("bf16", 64, 64, True), replace(PROMOTING, tile_m=192, tile_n=96, promote=8)),
    (Fp8Problem("bf16", 96, 96, True), LATE),
    (Fp8Problem("bf16", 256, 128, True, channels=True, v_shift=True), PROMOTING),
    (Fp8Problem("bf16", 64, 64, True, v_dtype="bf16"), PROMOTING),
]
KNOBS = [
    (replace(BASE, channels=True, v_shift=True), Fp8Config()),
    (replace(BASE, fine_k=True), Fp8Config(128, 160)),
    (replace(BASE, dtype="fp16", negative_scale=True), Fp8Config(128, 224)),
    (Fp8Problem("bf16", 256, 256, True, channels=True, v_shift=True), Fp8Config(q_slots=2)),
    (BASE, Fp8Config(64, 128, pingpong=False, schedule="grid")),
    *((p, tuning_fp8.pick(p)) for d in (64, 128) for p in [replace(ALL, head_dim=d, head_dim_v=d)]),
]
CLASSES = [
    (problem, tuning_fp8.pick(problem))
    for v_dtype in ("e4m3", "fp16")
    for d in range(32, MAX_HEAD_DIM + 1, 32)
    for dv in [(16, d)[d // 32 % 2]]
    for problem in [Fp8Problem("bf16", d, dv, True, v_dtype=v_dtype, v_shift=True)]
]
ROUNDED = [  # O in e4m3, by every row of the tables
    (rounded, tuning_fp8.for_output(rounded, c))
    for p, c in TABLE
    for rounded in [replace(p, dtype="e4m3", fine_k=p.causal, channels=p.causal)]
] + [(Fp8Problem("e4m3", 16, 16, v_shift=True), tuning_fp8.pick(Fp8Problem("e4m3", 16, 16)))]
RAW = {  # whatever the head dims, with all that a call may add
    (part.static(), config)
    for d in (16, 80, 128, 256)
    for dv in (16, 96, 128, 256)
    for p in [replace(ALL, head_dim=d, head_dim_v=dv, v_shift=False, seqlen_k=1 << 20)]
    for config in [tuning_fp8.pick(p)]
    for part in config.launches(p)
}


def check(problem, config):
    with no_float_maxima() as floats:
        used = inspect.build(problem, config).resources
    assert not floats
    assert used.frame == 0 and not used.spills, used
    assert 0 < used.smem <= SMEM_LIMIT
    assert used.smem <= config.smem_bytes(problem), "infeasible() would not see it coming"
    assert bool(used.counts.get("HGMMA")) == (problem.v_dtype != "e4m3")
    products = [loop.get("QGMMA", 0) for loop in used.loops]
    of_scores = problem.static().tile_dim // 32
    of_output = config.tile_n // 32 if problem.v_dtype == "e4m3" else 0
    assert products and set(products) == {of_scores + of_output}
    # more would be waits that ptxas puts in because it finds products out of order
    assert all(loop["WARPGROUP"] <= 5 for loop in used.loops)
    assert used.registers * config.threads <= 65536
    return used


@pytest.mark.parametrize("job", FIRST, ids=job_id)
def test_tuning_row(job):
    compare_golden(GOLDEN, job_id(job), check(*job).golden(), map(job_id, TABLE))


@slow
@pytest.mark.parametrize("job", one_of_each(job for job in TABLE if job not in FIRST), ids=job_id)
def test_more_tuning_rows(job):
    compare_golden(GOLDEN, job_id(job), check(*job).golden(), map(job_id, TABLE))


@pytest.mark.parametrize("job", KNOBS[:1] + PROMOTED[:1] + ROUNDED[4:5])
def test_factors_of_channels_sums_in_fp32_and_out_in_e4m3(job):
    check(*job)


@slow
@pytest.mark.parametrize(
    "job",
    one_of_each([*KNOBS[1:], *PROMOTED[1:], *CLASSES, *sorted(RAW, key=repr), *ROUNDED], every=2),
    ids=job_id,
)
def test_more_head_dims_and_knobs(job):
    check(*job)
