"""python -m cute_attn tune: sweep the configs of one kernel class and rank those that are right.

Feasible configs are compiled in parallel, compared with fp64 on the timed shapes and on an odd
one, timed interleaved (all of them briefly, the best at length) and ranked by geometric mean.
"""

import argparse
import ast
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from cute_attn import tuning, tuning_bwd
from cute_attn.compile import Config
from cute_attn.config import BwdConfig, FwdConfig
from cute_attn.problem import Problem
from cute_attn.tools import cases as c
from cute_attn.tools import measure, passes
from cute_attn.tools.cases import Case
from cute_attn.tools.compile import Built, build_all, describe
from cute_attn.tools.demo import kernels_run_here
from cute_attn.tools.progress import Progress
from cute_attn.tools.records import geometric_mean

TOLERANCE = {"bf16": 8e-3, "fp16": 1e-3}  # relative error: twice what torch's SDPA has
TOLERANCE_BWD = {"bf16": 2e-2, "fp16": 2.5e-3}  # wrong, not merely rounded otherwise
SCREENING = 6  # rounds in which all configs take part


@dataclass(frozen=True)
class Result:
    built: Built
    ms: tuple[float, ...]  # median of each case
    score: float  # geometric mean over the cases of the current config's time / this one's


def config_source(config: Config) -> str:
    """The shortest expression for a config, as tuning.py writes it."""
    places = (config.tile_m, config.tile_n) if isinstance(config, FwdConfig) else ()
    default: Config = FwdConfig(*places) if isinstance(config, FwdConfig) else BwdConfig()
    named = [
        f'{f.name}="{value}"' if isinstance(value, str) else f"{f.name}={value}"
        for f in fields(config)[len(places) :]
        if (value := getattr(config, f.name)) != getattr(default, f.name)
    ]
    return f"{type(config).__name__}({', '.join([*map(str, places), *named])})"


def sort_out(
    problem: Problem, limit: int, backward: bool = False
) -> tuple[list[Config], list[tuple[Config, str]]]:
    """(feasible, the table's config first; infeasible with the reason)."""
    table: Any = tuning_bwd if backward else tuning
    every: dict[Config, None] = dict.fromkeys([table.pick(problem), *table.candidates(problem)])
    good, bad = [], []
    for config in every:
        why = config.infeasible(problem)
        if why:
            bad.append((config, why))
        else:
            good.append(config)
    return good[: limit or None], bad


def odd_case(case: Case) -> Case:
    """Lengths that no tile divides, grouped heads, more keys than queries."""
    return replace(case, batch=2, heads_q=4, heads_kv=2, seqlen_q=333, seqlen_k=481)


class Item:
    """A case with its inputs and fp64 sample, made once for all configs."""

    def __init__(self, case: Case, args: argparse.Namespace) -> None:
        import cute_attn

        which = "bwd" if args.backward else "fwd"
        self.case = case
        self.inputs = passes.make_inputs(which, case, args.data, "cuda", args.slope)
        self.errors = passes.oracle(which, case, self.inputs)
        self.saved: tuple[Any, ...] = ()
        if args.backward:
            q, k, v, _ = self.inputs
            self.saved = cute_attn.fwd(q, k, v, causal=case.causal, return_lse=True)

    def call(self, config: Any) -> Callable[[], Any]:
        import cute_attn

        q, k, v = self.inputs[:3]
        causal = self.case.causal
        if self.saved:
            dout, (out, lse) = self.inputs[3], self.saved
            return lambda: cute_attn.bwd(dout, q, k, v, out, lse, causal=causal, config=config)
        return lambda: cute_attn.fwd(q, k, v, causal=causal, config=config)

    def wrong(self, config: Config) -> str:
        """'' if the result is close enough to fp64, else what is not."""
        try:
            found = self.errors(self.call(config)())
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        table = TOLERANCE_BWD if self.saved else TOLERANCE
        if found["finite"] and found["rel_error"] <= table[self.case.dtype]:
            return ""
        return f"wrong: relative error {found['rel_error']:.1e} on {self.case.name}"


def time_all(
    built: Sequence[Built], items: Sequence[Item], rounds: int, seconds: float, bar: Progress
) -> list[list[float]]:
    """Median milliseconds [config][case]."""
    timer = measure.Timer("cuda")
    medians: list[list[float]] = [[] for _ in built]
    scope = nullcontext
    for n, item in enumerate(items):
        calls = [item.call(b.job[1]) for b in built]
        times = timer.rounds(calls, [scope] * len(calls), rounds, seconds, bar.step(n))
        for i, measured in enumerate(times):
            medians[i].append(measure.quantile(measured, 0.5))
    return medians


def ranked(built: Sequence[Built], medians: Sequence[Sequence[float]]) -> list[Result]:
    """Best first; the first of built is what the others are compared with."""
    results = [
        Result(b, tuple(ms), geometric_mean(a / m for a, m in zip(medians[0], ms, strict=True)))
        for b, ms in zip(built, medians, strict=True)
    ]
    return sorted(results, key=lambda r: -r.score)


def table(results: Sequence[Result], shapes: Sequence[Case]) -> list[str]:
    lines = ["rank  score  " + "TFLOP/s".ljust(9 * len(shapes)) + "  regs    smem  config"]
    for n, r in enumerate(results, 1):
        problem, config = r.built.job
        work = passes.WORK["fwd" if isinstance(config, FwdConfig) else "bwd"]
        rates = [work * s.flops() / ms * 1e-9 for s, ms in zip(shapes, r.ms, strict=True)]
        used = r.built.resources
        lines.append(
            f"{n:4}  {r.score:.3f}  "
            + "".join(f"{rate:9.0f}" for rate in rates)
            + f"  {used.registers if used else '?':>4}  {config.smem_bytes(problem):6}  "
            + config_source(config)
        )
    return lines


def row_source(head_dim: int, head_dim_v: int, full: FwdConfig, causal: FwdConfig) -> list[str]:
    items = [str(head_dim), str(head_dim_v), config_source(full), config_source(causal)]
    line = f"    ({', '.join(items)}),"
    return [line] if len(line) <= 100 else ["    (", *(f"        {i}," for i in items), "    ),"]


def with_row(source: str, problem: Problem, config: FwdConfig) -> str:
    """tuning.py's text with config in a row of just the problem's class and mask.

    A row serves everything below its limits that no row before it serves, so up to two rows with
    the configs of before stand in front of the new one: no other class gets another config.
    Raises ValueError where source has no row for the problem.
    """
    d, dv = problem.static().head_dim, problem.static().head_dim_v
    table = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "FORWARD"
    ]
    if len(table) != 1 or not isinstance(table[0], ast.Tuple):
        raise ValueError("tuning.py has no table FORWARD")
    rows = [row for row in table[0].elts if isinstance(row, ast.Tuple)]
    limits = [(ast.literal_eval(row.elts[0]), ast.literal_eval(row.elts[1])) for row in rows]

    def first(head_dim: int, head_dim_v: int) -> int:
        """Which row serves; len(rows) if none does."""
        fits = (n for n, (a, b) in enumerate(limits) if head_dim <= a and head_dim_v <= b)
        return next(fits, len(rows))

    at = first(d, dv)
    if at == len(rows):
        raise ValueError(f"tuning.py has no row for head dims of {d} and {dv}")
    full, causal = (eval(ast.unparse(e), {"FwdConfig": FwdConfig}) for e in rows[at].elts[2:])
    if config == (causal if problem.causal else full):
        return source
    new = []
    for smaller in ((d - 16, dv), (d, dv - 32 if dv > 32 else dv - 16)):  # the next class down
        if min(smaller) > 0 and first(*smaller) == at:
            new += row_source(*smaller, full, causal)
    new += row_source(d, dv, *((full, config) if problem.causal else (config, causal)))
    lines, start = source.splitlines(), rows[at].lineno - 1
    lines[start : rows[at].end_lineno if limits[at] == (d, dv) else start] = new
    return "\n".join(lines) + "\n"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m cute_attn tune", description=__doc__)
    p.add_argument("--backward", action="store_true", help="sweep the backward's configs instead")
    p.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="b=..,hq=..,sq=..,d=..",
        help="again for more of the same head dims, dtype and mask",
    )
    p.add_argument("--cases", default="", metavar="NAME,..", help="names of bench --list")
    p.add_argument("--data", default="normal", choices=c.DATA)
    p.add_argument("--slope", type=float, default=c.SLOPE)
    p.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 16), help="compilers")
    p.add_argument("--limit", type=int, default=0, help="so many feasible configs, 0: all")
    p.add_argument("--top", type=int, default=8, help="timed at length (%(default)s)")
    p.add_argument("--rounds", type=int, default=40, help="of those (%(default)s)")
    p.add_argument("--seconds", type=float, default=20.0, help="at most, per case and stage")
    p.add_argument("--write", action="store_true", help="put the winner into tuning.py (forward)")
    return p


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    try:
        names = [name for name in args.cases.split(",") if name]
        shapes = [case for case, _ in c.find_cases(names)] + [c.parse_shape(s) for s in args.shape]
    except ValueError as error:
        parser().error(str(error))
    if len({case.problem().static() for case in shapes}) != 1:
        parser().error("give shapes of one kernel class: same head dims, dtype and mask")
    if args.backward and args.write:
        parser().error("--write with --backward: a row of tuning_bwd.BACKWARD is written by hand")
    problem = shapes[0].problem()
    if not args.limit and not kernels_run_here():
        args.limit = 4
        print(f"no Hopper GPU here: {args.limit} configs are compiled (--limit), none is timed")
    configs, skipped = sort_out(problem, args.limit, args.backward)
    print(f"{describe(problem)}: {len(configs)} configs to try, {len(skipped)} infeasible")
    for config, why in skipped:
        print(f"  skipped {config_source(config)}: {why}")
    if not configs:
        return 1
    built = compiled(problem, configs, args.jobs)
    if not kernels_run_here():
        print("not timed: no Hopper GPU here. Compiled:")
        print(*table([Result(b, (), 1.0) for b in built], []), sep="\n")
        return 0
    import torch

    with torch.no_grad():
        results = measured(args, shapes, built)
    if not results:
        print("no config gives right results")
        return 1
    print(*table(results, shapes), sep="\n")
    winner = results[0].built.job[1]
    print(f"winner: {config_source(winner)}, {results[0].score:.3f} of the table's config")
    if args.write and isinstance(winner, FwdConfig):
        path = Path(tuning.__file__)
        path.write_text(with_row(path.read_text(), problem, winner))
        print(f"written to {path}; its reason goes into docs/measured.md")
    return 0


def compiled(problem: Problem, configs: Sequence[Config], jobs: int) -> list[Built]:
    """In the order of configs, without those that do not compile (they are printed)."""
    done: dict[Config, Built] = {}
    with Progress(len(configs), "compile") as bar:
        todo = [(problem.static(), config) for config in configs]
        for n, b in enumerate(build_all(todo, "sm90", jobs), 1):
            bar.at(n)
            done[b.job[1]] = b
    for b in done.values():
        if b.error:
            print(f"  skipped {config_source(b.job[1])}: {b.error}")
        elif b.resources and b.resources.frame:
            print(f"  note    {config_source(b.job[1])}: spills {b.resources.frame} bytes")
    return [done[config] for config in configs if not done[config].error]


def measured(args: argparse.Namespace, shapes: list[Case], built: list[Built]) -> list[Result]:
    items = [Item(case, args) for case in (*shapes, odd_case(shapes[0]))]
    good = []
    with Progress(len(built), "check") as bar:
        for n, b in enumerate(built):
            bar.at(n, config_source(b.job[1]))
            why = next(filter(None, (item.wrong(b.job[1]) for item in items)), "")
            if why:
                bar.clear()
                print(f"  dropped {config_source(b.job[1])}: {why}")
            else:
                good.append(b)
    if not good:
        return []
    items = items[: len(shapes)]
    with Progress(len(shapes), "screen") as bar:
        first = ranked(good, time_all(good, items, SCREENING, args.seconds, bar))
    kept = [good[0]] + [r.built for r in first[: args.top] if r.built is not good[0]]
    with Progress(len(shapes), "time") as bar:
        return ranked(kept, time_all(kept, items, args.rounds, args.seconds, bar))
