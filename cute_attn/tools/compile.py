"""python -m cute_attn compile: fill the cache of compiled kernels, on any machine with the DSL."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from cute_attn import tuning, tuning_bwd, tuning_bwd_sm80, tuning_fp8, tuning_sm80
from cute_attn.compile import AnyConfig, Config, target
from cute_attn.config import Fp8Config, QuantizeConfig, TransposeConfig
from cute_attn.problem import DTYPES, Fp8Problem, Problem
from cute_attn.tools import cases as c
from cute_attn.tools.inspect import Resources, cubin_of_object, main_kernel, resources
from cute_attn.tools.progress import Progress

Job = tuple[Problem, Config]
AnyJob = tuple[Problem, AnyConfig]


@dataclass(frozen=True)
class Built:
    job: Job
    seconds: float
    resources: Resources | None = None  # of the main kernel; None where no cache holds it
    error: str = ""


Builder = Callable[[Job, str], Built]


def table_jobs(dtypes: Sequence[str] = tuple(DTYPES.values())) -> list[Job]:
    """Every row of the tuning table for every dtype, both masks."""
    return [
        (Problem(dtype, head_dim, head_dim_v, causal), causal_config if causal else full_config)
        for dtype in dtypes
        for head_dim, head_dim_v, full_config, causal_config in tuning.FORWARD
        for causal in (False, True)
    ]


def ampere_jobs(chip: str, dtypes: Sequence[str] = tuple(DTYPES.values())) -> list[Job]:
    """The same for the Ampere kernels on a chip, as the compiler calls it."""
    return [
        (Problem(dtype, head_dim, head_dim_v, causal), config)
        for dtype in dtypes
        for head_dim, head_dim_v, config in tuning_sm80.table(chip)
        for causal in (False, True)
    ]


def backward_jobs(dtypes: Sequence[str] = tuple(DTYPES.values())) -> list[Job]:
    """The same for the backward."""
    return [
        (Problem(dtype, head_dim, head_dim_v, causal), config)
        for dtype in dtypes
        for head_dim, head_dim_v, config in tuning_bwd.BACKWARD
        for causal in (False, True)
    ]


def ampere_backward_jobs(chip: str, dtypes: Sequence[str] = tuple(DTYPES.values())) -> list[Job]:
    """Of the backward on a chip."""
    return [
        (Problem(dtype, head_dim, head_dim_v, causal), config)
        for dtype in dtypes
        for head_dim, head_dim_v, config in tuning_bwd_sm80.table(chip)
        for causal in (False, True)
    ]


def fp8_jobs(dtype: str = "bf16") -> list[Job]:
    """The same for FP8: of packs as quantize_qkv makes them by default, and of raw V."""
    tables = (
        ("e4m3", True, tuning_fp8.FORWARD),
        (dtype, True, tuning_fp8.FORWARD_HP),
        ("e4m3", False, tuning_fp8.FORWARD_RAW),
    )
    return [
        (config.launches(problem)[0], config)
        for v_dtype, v_shift, rows in tables
        for d, dv, *configs in rows
        for causal, config in zip((False, True), configs, strict=True)
        for problem in [Fp8Problem(dtype, d, dv, causal, v_dtype=v_dtype, v_shift=v_shift)]
    ]


def fp8_rows(preset: str, dtypes: Sequence[str]) -> list[AnyJob]:
    """What fp8_class says of every row of the preset's table, both masks."""
    rows = tuning_fp8.FORWARD if preset == "fp8" else tuning_fp8.FORWARD_HP
    jobs = [
        job
        for dtype in dtypes
        for d, dv, *_ in rows
        for causal in (False, True)
        for job in fp8_class(Problem(dtype, d, dv, causal), preset)
    ]
    return list(dict.fromkeys(jobs))


def fp8_class(problem: Problem, preset: str) -> list[AnyJob]:
    """What quantises and attends to 16-bit tensors of a class; with 'fp8' also what takes e4m3
    tensors of its head dims, on few keys and on many."""
    from cute_attn import fp8

    jobs: list[AnyJob] = list(fp8.kernels_of_preset(problem, preset, None))
    if preset == "fp8":
        head_dims = problem.head_dim, problem.head_dim_v
        raw = Fp8Problem(problem.dtype, *head_dims, problem.causal, problem.negative_scale)
        for config in tuning_fp8.all_of(raw):
            jobs += [(part, config) for part in config.launches(raw)]
        jobs.append((Problem("bf16", 16, problem.head_dim_v), TransposeConfig()))
    return [(each.static(), config) for each, config in jobs]


def build(job: Job, arch: str) -> Built:
    from cute_attn import compile

    problem, config = job
    started = time.perf_counter()
    try:
        compile.get(problem, config, arch)
        found = cached_resources(job, arch)
    except Exception as error:  # reported per kernel, the others go on
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return Built(job, time.perf_counter() - started, error=text)
    return Built(job, time.perf_counter() - started, found)


def cached_resources(job: Job, arch: str) -> Resources | None:
    from cute_attn import compile

    path = compile.object_path(*job, arch)
    if path is None or not path.is_file():
        return None
    return main_kernel(resources(cubin_of_object(path.read_bytes())))


def build_all(
    jobs: Sequence[Job], arch: str, workers: int, build: Builder = build
) -> Iterator[Built]:
    """As they get ready. Processes, because the compiler is not thread-safe. Raises
    BrokenProcessPool if one dies."""
    if workers <= 1 or len(jobs) <= 1:
        yield from (build(job, arch) for job in jobs)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context) as pool:
        for future in as_completed([pool.submit(build, job, arch) for job in jobs]):
            yield future.result()


def build_ahead(
    jobs: Sequence[Job], workers: int = 0, arch: str = "sm90", build: Builder = build
) -> None:
    """Fill the disk cache from many processes, by default one a core, before something that would
    compile one kernel after another. Raises RuntimeError if a kernel is not there afterwards."""
    from cute_attn import compile

    todo = [job for job in dict.fromkeys(jobs) if compile.state(*job, arch) != "on disk"]
    workers = max(1, min(workers or os.cpu_count() or 1, len(todo)))
    say(f"{len(jobs)} kernels, {len(todo)} to compile by {workers} processes")
    started, failed = time.perf_counter(), []
    with Progress(len(todo), "compile") as bar:
        for n, built in enumerate(build_all(todo, arch, workers, build), 1):
            bar.at(n, describe(built.job[0]))
            if built.error or built.resources is None:
                failed.append(f"{describe(built.job[0])}: {built.error or 'not kept on disk'}")
    if failed:
        raise RuntimeError("\n".join([f"{len(failed)} kernels are not ready:", *failed]))
    say(f"ready after {time.perf_counter() - started:.0f} s")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def describe(problem: Problem) -> str:
    mask = "causal" if problem.causal else "full"
    kind = f"{problem.v_dtype}-" if isinstance(problem, Fp8Problem) else ""
    kind = f"raw-{kind}" if isinstance(problem, Fp8Problem) and problem.raw_v else kind
    return f"{kind}{problem.dtype} d{problem.head_dim}/{problem.head_dim_v} {mask}"


def label(job: AnyJob) -> str:
    problem, config = job
    if isinstance(config, TransposeConfig):
        return f"transpose v e4m3 d{problem.head_dim_v}"
    before = "quantise " if isinstance(config, QuantizeConfig) else ""
    promotes = " promote" if isinstance(config, Fp8Config) and config.promote else ""
    return before + describe(problem) + promotes


def jobs_of(shapes: Sequence[c.Case], arch: str, backward: bool, dtypes: list[str]) -> list[Job]:
    """Of the shapes, else of the tuning table."""
    chip = target(arch) if arch.startswith("sm80") else ""
    pick: Callable[..., Config] = c.bwd_config_for if backward else c.config_for
    jobs = [(case.problem().static(), pick(case, "", chip)) for case in shapes]
    if jobs:
        return list(dict.fromkeys(jobs))
    if chip:
        return (ampere_backward_jobs if backward else ampere_jobs)(chip, dtypes)
    return (backward_jobs if backward else table_jobs)(dtypes)


def wanted_jobs(args: argparse.Namespace, shapes: Sequence[c.Case]) -> list[Any]:
    """Raises ValueError for a shape that FP8 does not take."""
    dtypes = args.dtype.split(",")
    if args.fp8:
        jobs = [job for case in shapes for job in fp8_class(case.problem(), args.fp8)]
        return list(dict.fromkeys(jobs)) or fp8_rows(args.fp8, dtypes)
    return jobs_of(shapes, args.arch, args.backward, dtypes)


def main(argv: Sequence[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m cute_attn compile", description=__doc__)
    p.add_argument(
        "--arch",
        default="sm90",
        help="sm90, or sm80 with the chip: sm80:sm_86, sm80:sm_90a (%(default)s)",
    )
    p.add_argument("--backward", action="store_true", help="the backward's kernels instead")
    p.add_argument(
        "--fp8",
        nargs="?",
        const="fp8",
        choices=("fp8", "fp8_hp"),
        metavar="PRESET",
        help="those of FP8 calls instead: of fp8 (default; of e4m3 tensors too) or fp8_hp",
    )
    p.add_argument("--shape", action="append", default=[], metavar="b=..,hq=..,sq=..,d=..")
    p.add_argument("--cases", action="append", default=[], metavar="SET|NAME")
    p.add_argument("--dtype", default=",".join(DTYPES.values()), help="of the table's rows")
    p.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8), help="processes")
    args = p.parse_args(argv)
    if args.fp8 and args.backward:
        p.error("--fp8 and --backward: the backward has no kernels of its own for FP8")
    try:
        wanted = c.find_cases(",".join(args.cases).split(",") if args.cases else [])
        shapes = [case for case, _ in wanted] + [c.parse_shape(s) for s in args.shape]
    except ValueError as error:
        p.error(str(error))
    try:
        jobs = wanted_jobs(args, shapes)
    except ValueError as error:
        p.error(str(error))
    bad = 0
    with Progress(len(jobs), "compile") as bar:
        for n, built in enumerate(build_all(jobs, args.arch, args.jobs), 1):
            bar.clear()
            used = built.resources
            text = f"{used.registers} registers, {used.frame} bytes local" if used else "not cached"
            bad += bool(built.error)
            print(f"{label(built.job):34} {built.seconds:5.1f} s  {built.error or text}")
            sys.stdout.flush()
            bar.at(n)
    return 1 if bad else 0
