"""Builds kernels for sm_90a and looks at them; needs the DSL, no GPU.

Every build is checked for local memory, shared memory and the instructions it is made of. For the
tuning table's rows the counts of the main loops are compared with tests/golden_counts.json:

    UPDATE_GOLDEN=1 python -m pytest tests/test_compile.py -n 2     # after a change that is meant
"""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
from builds import compare_golden, job_id, no_float_maxima, one_of_each

from cute_attn import compile as jit
from cute_attn import tuning
from cute_attn.config import SMEM_LIMIT, FwdConfig
from cute_attn.problem import MAX_HEAD_DIM, Problem
from cute_attn.tools import inspect
from cute_attn.tools.compile import table_jobs

pytestmark = pytest.mark.compile
GOLDEN = Path(__file__).with_name("golden_counts.json")
slow = pytest.mark.slow


def picked(problem):
    return problem, tuning.pick(problem)


TABLE = table_jobs()
ROWS = {problem.static() for problem, _ in TABLE}
# every class of equal head dims that is not a row of its own; static() rounds up to these
CLASSES = [
    picked(Problem(dtype, d, d, causal))
    for dtype in ("bf16", "fp16")
    for d in range(16, MAX_HEAD_DIM + 1, 16)
    for causal in (False, True)
    if Problem(dtype, d, d, causal).static() not in ROWS
]
PAIRS = [
    picked(Problem(dtype, d, dv, causal))
    for dtype, causal in (("bf16", True), ("fp16", False))
    for d, dv in ((64, 128), (128, 64), (64, 256), (256, 64), (16, 256), (256, 16))
    if Problem(dtype, d, dv, causal).static() not in ROWS
]
BASE = Problem("bf16", 128, 128, True)
KNOBS = [
    (replace(BASE, negative_scale=True), FwdConfig()),
    (BASE, FwdConfig(schedule="grid")),
    (BASE, FwdConfig(64, 128, pingpong=False)),
    (BASE, FwdConfig(overlap=False, exact_max=True)),
    (BASE, FwdConfig(128, 64, kv_stages=4, v_stages=3, pingpong=False)),
]
SPLIT = [
    (Problem(dtype, d, dv, causal), config)
    for d, dv, config in tuning.SPLIT
    for dtype, causal in (("bf16", True), ("fp16", False))
]
KNOBS += SPLIT
FEW = [job for job in PAIRS if job[0].dtype == "bf16"][:2] + KNOBS[:2]


def check(problem, config):
    with no_float_maxima() as floats:
        built = inspect.build(problem, config)
    used = built.resources
    assert not floats
    if config.split_kv:  # a few registers, about once a tile
        stores, loads = (used.counts.get(opcode, 0) for opcode in ("STL", "LDL"))
        assert used.frame <= 16 and stores <= 4 and loads <= 4, used
    else:
        assert used.frame == 0 and not used.spills, used
    assert 0 < used.smem <= SMEM_LIMIT
    assert used.smem <= config.smem_bytes(problem), "infeasible() would not see it coming"
    for opcode in ("HGMMA", "UTMALDG", "STG" if config.split_kv else "UTMASTG", "MUFU.EX2"):
        assert used.counts.get(opcode), opcode
    assert used.loops and all(loop.get("MUFU.EX2") for loop in used.loops)
    assert used.registers * config.threads <= 65536
    return used


@pytest.mark.parametrize("job", TABLE, ids=job_id)
def test_tuning_row(job):
    compare_golden(GOLDEN, job_id(job), check(*job).golden(), map(job_id, TABLE))


@pytest.mark.parametrize("job", FEW, ids=job_id)
def test_other_head_dims_and_knobs(job):
    check(*job)


@slow
@pytest.mark.parametrize("job", one_of_each(CLASSES), ids=job_id)
def test_every_head_dim_class(job):
    check(*job)


@slow
@pytest.mark.parametrize(
    "job", one_of_each([j for j in PAIRS + KNOBS if j not in FEW], every=2), ids=job_id
)
def test_more_head_dims_and_knobs(job):
    check(*job)


def test_every_class_has_a_build():
    """A head dim that Problem admits falls into a class that one of the tests above builds."""
    built = {job[0].static() for job in TABLE + CLASSES}
    for d in range(8, MAX_HEAD_DIM + 1, 8):
        for causal in (False, True):
            static = Problem("bf16", d, d, causal).static()
            assert any(
                (b.dtype, b.causal, b.tile_dim, b.tile_dim_v)
                == (static.dtype, static.causal, static.tile_dim, static.tile_dim_v)
                for b in built
            ), d


def test_the_ban_on_float_maxima_can_fail():
    import cutlass

    with no_float_maxima() as found, contextlib.suppress(Exception):
        cutlass.max(1.0, 2.0)
    assert found == ["cutlass.max(float, float)"]


def test_spills_are_seen():
    """A tile far too large for its registers: the reader must report local memory."""
    try:
        used = inspect.build(Problem("bf16", 256, 256), FwdConfig(128, 128, 1)).resources
    except Exception as error:
        pytest.skip(f"does not compile: {type(error).__name__}")
    assert used.spills and used.frame > 0


@pytest.mark.parametrize("config, parameters", [(FwdConfig(), 8), (SPLIT[0][1], 10)])
def test_what_a_launch_passes(config, parameters, tmp_path, monkeypatch):
    """launch.py passes scratch only where the keys are split."""
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path))
    kernel = jit.get(Problem("bf16", 64, 64), config, "sm90")
    with pytest.raises(TypeError, match=f"Expects {parameters} parameters"):
        kernel()
