"""Builds the backward's kernels for sm_90a and looks at them; needs the DSL, no GPU.

As test_compile.py. A row of tuning_bwd.BACKWARD is built and its counts compared with
tests/golden_counts_bwd.json; a class of head dims that BwdConfig takes is built by the slow tests.

    UPDATE_GOLDEN=1 python -m pytest tests/test_compile_backward.py -n 2     # if a change is meant
"""

from dataclasses import replace
from pathlib import Path

import pytest
from builds import compare_golden, job_id, no_float_maxima, one_of_each

from cute_attn import backward, tuning_bwd
from cute_attn import compile as jit
from cute_attn.config import BARRIER_BYTES, SMEM_LIMIT, BwdConfig
from cute_attn.problem import MAX_HEAD_DIM, Problem
from cute_attn.tools import inspect
from cute_attn.tools.compile import backward_jobs

pytestmark = pytest.mark.compile
GOLDEN = Path(__file__).with_name("golden_counts_bwd.json")
slow = pytest.mark.slow


def jobs(dims, dtypes=("bf16", "fp16"), masks=(False, True)):
    """Those that the kernel takes and that the table's rows do not build."""
    problems = [Problem(t, d, dv, causal) for t in dtypes for d, dv in dims for causal in masks]
    known = {problem.static() for problem, _ in TABLE}
    picked = {p.static(): (p, tuning_bwd.pick(p)) for p in problems if p.static() not in known}
    return [(p, config) for p, config in picked.values() if not config.infeasible(p)]


TABLE = backward_jobs(["bf16"])  # with golden counts
FEW = jobs([(64, 64), (128, 128)], ["fp16"], [True])
FEW += jobs([(64, 128), (136, 40)], ["bf16"], [False])
FEW += jobs([(40, 72), (192, 128)], ["bf16"], [True])
SWEEP = range(16, MAX_HEAD_DIM + 1, 16)
CLASSES = jobs([(d, d) for d in SWEEP])
UNEQUAL = [(64, 128), (128, 64), (40, 72), (16, 128), (128, 16)]
UNEQUAL += [(256, 64), (64, 256), (192, 128), (40, 192), (136, 40), (16, 256)]
PAIRS = jobs(UNEQUAL, ["bf16"], [True]) + jobs(UNEQUAL, ["fp16"], [False])
KNOBS = [
    (problem, config)
    for problem in (*(Problem("bf16", d, d, d > 64) for d in (64, 128)), Problem("fp16", 192, 128))
    for config in tuning_bwd.candidates(problem)
    if config != tuning_bwd.pick(problem) and not config.infeasible(problem)
]


def deterministic(jobs):
    return [(problem, replace(config, deterministic=True)) for problem, config in jobs]


IN_TURN = deterministic([FEW[0], *jobs([(128, 128)], ["fp16"], [False])])
IN_TURN += deterministic(job for job in TABLE if job[0].head_dim > 64 and job[0].causal)
EVERY_IN_TURN = deterministic(
    (p, config)
    for p, config in TABLE + CLASSES + PAIRS
    if p.dtype == "bf16" and (p.causal or p.head_dim != p.head_dim_v)
)


def check(problem, config):
    """Every kernel of a backward: no local memory, and what the main ones are made of."""
    with no_float_maxima() as floats:
        built = inspect.build(problem, config)
    assert not floats
    assert not any(n["frame"] for n in inspect.elf_numbers(built.cubin).values())  # subroutines too
    for used in built.kernels:
        assert used.frame == 0 and not used.spills, used
        assert 0 <= used.smem <= SMEM_LIMIT, used.name
    main = [k for k in built.kernels if k.counts.get("HGMMA")]
    assert main and len(built.kernels) > len(main), "row statistics at least are apart"
    for used in main:
        spare = config.smem_bytes(problem) - used.smem
        assert 0 <= spare < BARRIER_BYTES, "infeasible() would take or refuse too much"
        assert used.counts.get("UTMALDG") and used.counts.get("MUFU.EX2")
        # a product whose accumulators are touched too early makes the assembler fence every one
        assert 0 < used.counts["WARPGROUP"] < used.counts["HGMMA"]
        loops = [bool(loop.get("MUFU.EX2")) for loop in used.loops]
        wide = config.wide(problem)  # one warpgroup of P, and one that takes it
        assert loops == [True, False] if wide else loops and all(loops)
        assert used.registers * 128 * 3 <= 65536
        assert used.name.startswith("cute_attn_bwd_"), "scripts/profile.py would not find it"
    waits = [k.counts.get("ACQBULK", 0) for k in built.kernels]  # for the kernel before to end
    readers = 2  # the loader and consumers
    if config.deterministic or config.shares(problem):
        readers = (
            3  # who follows the turns, or the loader before it draws a first tile that is shared
        )
    assert waits == [0, readers, 1], "row_statistics is ordered by its launch; the others must wait"
    assert any(op.startswith("RED") for k in main for op in k.counts), (
        "dQ is added up by reductions"
    )
    for used in main:  # a count is released after a fence, in one place
        assert used.name.endswith("_deterministic_1") == config.deterministic
        counts = config.deterministic or config.shares(problem)  # parts of shared tiles
        assert (used.counts.get("ERRBAR", 0) > 0) == counts
    return main


@pytest.mark.parametrize("job", TABLE, ids=job_id)
def test_tuning_row(job):
    counts = [used.golden() for used in check(*job)]
    compare_golden(GOLDEN, job_id(job), counts, map(job_id, TABLE))


@pytest.mark.parametrize("job", FEW, ids=job_id)
def test_other_head_dims(job):
    check(*job)


@pytest.mark.parametrize("job", IN_TURN, ids=job_id)
def test_deterministic(job):
    check(*job)


@slow
@pytest.mark.parametrize(
    "job",
    one_of_each([j for j in CLASSES + PAIRS + EVERY_IN_TURN if j not in FEW], every=2),
    ids=job_id,
)
def test_every_head_dim_class(job):
    """Deterministic and not."""
    check(*job)


@slow
@pytest.mark.parametrize("job", one_of_each(KNOBS), ids=lambda job: f"{job_id(job)}-{job[1]}")
def test_what_a_sweep_tries(job):
    check(*job)


def test_every_class_has_a_build():
    """A head dim that the kernel takes falls into a class that one of the tests above builds."""
    built = {job[0].static() for job in TABLE + CLASSES}
    for d in range(8, MAX_HEAD_DIM + 1, 8):
        for causal in (False, True):
            problem = Problem("bf16", d, d, causal)
            if not tuning_bwd.pick(problem).infeasible(problem):
                tile = (problem.tile_dim, problem.tile_dim_v, causal)
                assert any((b.tile_dim, b.tile_dim_v, b.causal) == tile for b in built), d


def test_what_a_launch_passes(tmp_path, monkeypatch):
    """backward.py passes ten tensors, three of scratch, the number of multiprocessors, two numbers
    about tiles that CTAs share, and two scales; the sign of the scale and the sizes of a call make
    no other kernel."""
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path))
    problem = Problem("bf16", 64, 64, False, True, 2, 300, 500, 4, 2)
    kernel = jit.get(backward.kernel_problem(problem), BwdConfig(), "sm90")
    with pytest.raises(TypeError, match="Expects 18 parameters"):
        kernel()
    other = replace(problem, negative_scale=False, batch=1, seqlen_q=7)
    assert jit.in_memory(backward.kernel_problem(other), BwdConfig(), "sm90") is kernel
