"""The kernels of the GPU tests, compiled from all cores before the first test.

One at a time they take minutes: a class (dtype, head_dim rounded up to 16, head_dim_v to 32, mask,
for the forward the sign of the scale and few queries, for the backward deterministic or not) is
about 5 s. A run on a GPU says which kernels it used that are not here.
"""

import os

from helpers import BF16, FP16, HEAD_DIMS, sweep_causal

from cute_attn import backward, tuning
from cute_attn import compile as jit
from cute_attn.problem import DTYPES, Problem
from cute_attn.tools.compile import build_ahead, describe

FEW_TESTS = 20  # that compile what they need by themselves
BACKWARD_FILES = (
    *("test_backward", "test_backward_deterministic", "test_autograd", "test_public_reports_bwd"),
    "test_train",
)
PAIRS = [(192, 128), (128, 64), (40, 96), (256, 64), (8, 256), (64, 128), (16, 24)]
IN_TURN = [(64, 64), (128, 128), (192, 128), (256, 256), (16, 24)]  # deterministic=True


def classes():
    """(dtype, head_dim, head_dim_v, causal) that both the forward and the backward run."""
    found = {(t, d, d, sweep_causal(t, d)) for t in (BF16, FP16) for d in HEAD_DIMS}
    found |= {(t, d, d, c) for t in (BF16, FP16) for d in (64, 128) for c in (False, True)}
    found |= {(BF16, *dims, c) for dims in (*PAIRS, (256, 256), (16, 16)) for c in (False, True)}
    found |= {(FP16, 64, 128, c) for c in (False, True)}
    found |= {(BF16, d, 128, False) for d in (144, 160, 176)}
    return found | {(FP16, 16, 16, False), (BF16, 32, 32, False)}


def problem(dtype, *rest):
    return Problem(DTYPES[str(dtype)], *rest).static()


def forward_jobs():
    found = [problem(*c) for c in classes()]
    found += [problem(FP16, 256, 256, c) for c in (False, True)]
    found += [problem(BF16, 64, 256, False)]
    found += [problem(BF16, *dims, c, True) for dims in ((64, 64), (16, 24)) for c in (False, True)]
    few = (
        [(BF16, d, d) for d in (64, 128, 256)]
        + [(BF16, 192, 128)]
        + [(FP16, d, d) for d in (64, 128)]
    )
    few = [problem(*c, causal) for c in few for causal in (False, True)]
    return [(p, tuning.pick(p)) for p in found] + [(p, tuning.split(p)) for p in few]


def backward_jobs():
    found = [backward_job(problem(*c)) for c in classes()]
    in_turn = {(BF16, *dims, c) for dims in IN_TURN for c in (False, True)}
    in_turn |= {(FP16, 64, 64, False), (BF16, 16, 16, False)}
    return found + [backward_job(problem(*c), True) for c in in_turn]


def backward_job(problem, deterministic=False):
    return problem, backward.choose_config(problem, None, deterministic)


def jobs_of(items):
    """What the chosen tests need: nothing for a few of them."""
    gpu = [item for item in items if "gpu" in item.keywords]
    if len(gpu) <= FEW_TESTS and not any("head_dim" in item.name for item in gpu):
        return []
    backward = any(item.path.stem in BACKWARD_FILES for item in gpu)
    return sorted({*forward_jobs(), *(backward_jobs() if backward else ())}, key=repr)


def compile_ahead(items):
    """The jobs that are ready afterwards; raises RuntimeError where that fails."""
    jobs = jobs_of(items)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if jobs:
        build_ahead(jobs, max(1, (os.cpu_count() or 1) // workers))
    return jobs


def of_table(problem):
    ours = [backward_job(problem, fixed)[1] for fixed in (False, True)]
    return [tuning.pick(problem), tuning.split(problem), *ours]


def left_out(jobs):
    """Lines about kernels that this process has loaded and that were not among the jobs. Configs
    that a test names are its own matter."""
    known = {(*job, "sm90") for job in jobs}
    return [
        f"{describe(problem)} {type(config).__name__}"
        f"{' deterministic' if getattr(config, 'deterministic', False) else ''}"
        for problem, config, arch in jit._memory
        if (problem, config, arch) not in known and config in of_table(problem)
    ]
