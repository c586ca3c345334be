"""The kernels of the GPU tests, compiled from all cores before the first test.

One at a time they take minutes: a class (dtype, head_dim rounded up to 16, head_dim_v to 32, mask,
for the forward the sign of the scale and few queries, for the backward deterministic or not) is
about 5 s. A run on a GPU says which kernels it used that are not here.
"""

import os
from dataclasses import replace

import torch
from helpers import BF16, FP16, HEAD_DIMS, sweep_causal

from cute_attn import backward, launch, quantize_launch, tuning, tuning_fp8, tuning_sm80, tuning_v1
from cute_attn import compile as jit
from cute_attn.config import QuantizeConfig, TransposeConfig
from cute_attn.config_v1 import HEAD_DIMS as HEAD_DIMS_V1
from cute_attn.config_v1 import V1Config
from cute_attn.problem import DTYPES, Fp8Problem, Problem
from cute_attn.tools import peers_v1
from cute_attn.tools.compile import build_ahead, describe

FEW_TESTS = 20  # that compile what they need by themselves
BACKWARD_FILES = (
    *("test_backward", "test_backward_deterministic", "test_autograd", "test_public_reports_bwd"),
    *("test_train", "test_fp8_autograd"),
)
FP8_FILES = ("test_fp8_gpu", "test_fp8_autograd", "test_quantize_gpu")
PAIRS = [(192, 128), (128, 64), (40, 96), (256, 64), (8, 256), (64, 128), (16, 24)]
IN_TURN = [(64, 64), (128, 128), (192, 128), (256, 256), (16, 24)]  # deterministic=True


def classes():
    """(dtype, head_dim, head_dim_v, causal) that both the forward and the backward run."""
    found = {(t, d, d, sweep_causal(t, d)) for t in (BF16, FP16) for d in HEAD_DIMS}
    found |= {(t, d, d, c) for t in (BF16, FP16) for d in (64, 128) for c in (False, True)}
    found |= {(BF16, *dims, c) for dims in (*PAIRS, (256, 256), (16, 16)) for c in (False, True)}
    found |= {(FP16, *dims, c) for dims in ((64, 128), (256, 256)) for c in (False, True)}
    found |= {(BF16, d, 128, False) for d in (144, 160, 176)}
    return found | {(FP16, 16, 16, False), (BF16, 32, 32, False)}


def problem(dtype, *rest):
    return Problem(DTYPES[str(dtype)], *rest).static()


def forward_jobs():
    found = [problem(*c) for c in classes()]
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


def fp8_jobs():
    """Of test_fp8_gpu.py: (head_dim, head_dim_v, mask) of packs, and the variants of one class."""
    packs = [(d, d, c) for d in (64, 128, 256) for c in (False, True)]
    packs += [(48, 80, False), (192, 128, True)]
    found = [Fp8Problem("bf16", *p, v_shift=True) for p in packs]
    found += [Fp8Problem("bf16", 16, 16, True)]
    found += [Fp8Problem("bf16", 128, 128, c) for c in (False, True)]
    hp = [(64, 64, True), (128, 128, False), (128, 128, True), (256, 256, True)]
    hp = [Fp8Problem("bf16", *p, v_dtype="bf16") for p in hp]
    shifted = Fp8Problem("bf16", 128, 128, True, v_shift=True)
    found += [replace(p, v_shift=True) for p in hp]
    found += [replace(hp[2], v_shift=True, fine_k=True), replace(shifted, channels=True)]
    found += [replace(shifted, causal=False, fine_k=True), replace(shifted, dtype="fp16")]
    found += [replace(shifted, negative_scale=True)]
    raw = [(64, 64, True), (128, 128, False), (256, 240, True), (16, 16, True), (128, 128, True)]
    found += [Fp8Problem("bf16", *p, channels=p[1] == 240) for p in raw]
    found += [Fp8Problem("bf16", d, d) for d in (64, 96, 256)]
    found += [replace(p, dtype=t) for p in found for t in ("e4m3", "fp16") if p.dtype == "bf16"]
    jobs = [(p, config) for p in found for config in tuning_fp8.all_of(p)]
    return [(part.static(), config) for p, config in jobs for part in config.launches(p)]


def quantize_job(dims, dtype="bf16", given=(None, None, None), half=0, angles=None, **options):
    of = {"preset": "fp8", "seed": 0, "block": 128, "v_scales": "head"} | options
    rope = (torch.empty(1, half, dtype=angles),) * 2 if half else (None, None)
    config = quantize_launch.choose_config((*given, *rope), **of)
    return Problem(dtype, *dims), config


def quantize_jobs():
    """Of test_quantize_gpu.py, and the packs of test_fp8_gpu.py and test_fp8_autograd.py."""
    head, sequence = torch.empty(2, 16), torch.empty(2, 2, 16)  # of which only the rank matters
    heads, sequences = (head,) * 3, (sequence,) * 3
    given = [(32, 32), (64, 64), (128, 128), (256, 256), (96, 80), (192, 128), (16, 48)]
    found = [quantize_job(dims, given=heads) for dims in given]
    by_channel = [(64, dim_v) for dim_v in (64, 128, 192)]
    found += [quantize_job(dims, given=heads, v_scales="channel") for dims in by_channel]
    packs = [(64, 64), (128, 128), (256, 256), (48, 80), (192, 128), (16, 16)]
    found += [quantize_job(dims) for dims in packs]
    found += [quantize_job(dims, "fp16") for dims in ((240, 32), (64, 256))]
    for half, dtype in ((64, torch.float32), (16, BF16), (5, torch.float32)):
        found += [
            quantize_job((128, 128), given=vectors, half=half, angles=dtype)
            for vectors in ((None,) * 3, sequences)
        ]
    found += [quantize_job((64, 64), block=b, v_scales="channel") for b in (16, 64, 0)]
    found += [quantize_job((128, 128), block=0), quantize_job((128, 128), v_scales="channel")]
    hp = {"preset": "fp8_hp"}
    found += [quantize_job(dims, **hp) for dims in ((64, 96), *packs[:3])]
    found += [quantize_job((128, 128), block=0, **hp)]
    found += [quantize_job((64, 96), given=(False, False, None), **hp)]
    plain = [(64, 64), (128, 128)]
    found += [quantize_job(dims, given=(False, False, None), seed=None) for dims in plain]
    found += [quantize_job((64, 64), given=(None, False, head), seed=None)]
    found += [quantize_job((64, 64), statistics=True)]
    return found + [(Problem("bf16", 16, dv), TransposeConfig()) for dv in (16, 64, 96, 128, 256)]


def v1_config(name, d, chip="sm_80"):
    """What the bench times under this name."""
    return tuning_v1.pick(Problem("bf16", d, d), chip, **peers_v1.changes(name))


def v1_tiles(name):
    """Other tiles for head dim 64."""
    split = ((16, 128, 4), (32, 64, 2), (64, 64, 4)), ((64, 64, 4), (128, 32, 8))
    changes = peers_v1.changes(name)
    return [V1Config(m, n, w, 3, **changes) for m, n, w in split[not changes["split_keys"]]]


def v1_jobs(chip):
    """Of test_v1.py."""
    found = []
    for name in peers_v1.UNDONE:
        for causal in (False, True):
            found += [
                (problem(t, d, d, causal), v1_config(name, d, chip))
                for t in (BF16, FP16)
                for d in HEAD_DIMS_V1
            ]
            found += [(problem(BF16, 64, 64, causal), config) for config in v1_tiles(name)]
    return found


def jobs_of(items):
    """What the chosen tests need of Hopper's kernels: nothing for a few of them."""
    gpu = [item for item in items if "gpu" in item.keywords and "sm80" not in item.keywords]
    if len(gpu) <= FEW_TESTS and not any("head_dim" in item.name for item in gpu):
        return []
    files = {item.path.stem for item in gpu}
    found = [] if files <= set(FP8_FILES) else forward_jobs()
    if files & set(BACKWARD_FILES):
        found += backward_jobs()
    if files & set(FP8_FILES):
        found += fp8_jobs() + [(p.static(), config) for p, config in quantize_jobs()]
    return sorted(set(found), key=repr)


def ampere_jobs_of(items, chip):
    """The same of Ampere's, for a chip as the compiler calls it."""
    if sum("sm80" in item.keywords for item in items) <= FEW_TESTS:
        return []
    files = {item.path.stem for item in items if "sm80" in item.keywords}
    jobs = v1_jobs(chip) if "test_v1" in files else []
    if files == {"test_v1"}:
        return jobs
    problems = sorted({problem for problem, _ in forward_jobs()}, key=repr)
    jobs += [(p, tuning_sm80.pick(p, chip)) for p in problems]
    if files & set(BACKWARD_FILES):
        for p, config in backward_jobs():
            chosen = backward.choose_config(p, None, config.deterministic, f"sm80:{chip}")
            jobs.append((p, chosen))
    return jobs


def compile_ahead(items):
    """Hopper's jobs that are ready afterwards; raises RuntimeError where that fails."""
    runs = [item for item in items if not item.get_closest_marker("skip")]
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    processes = max(1, (os.cpu_count() or 1) // workers)
    jobs = jobs_of(runs)
    if jobs:
        build_ahead(jobs, processes)
    if any("sm80" in item.keywords for item in runs):
        target = launch.compile_target(torch.device("cuda"), "sm80")
        build_ahead(ampere_jobs_of(runs, jit.target(target)), processes, target)
    return jobs


def of_table(problem):
    if isinstance(problem, Fp8Problem):
        return list(tuning_fp8.all_of(problem))
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
        if (problem, config, arch) not in known
        and arch == "sm90"
        and (isinstance(config, QuantizeConfig | TransposeConfig) or config in of_table(problem))
    ]
