"""python -m cute_attn bench: this library and its peers on the same data, interleaved."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from cute_attn.tools import cases as c
from cute_attn.tools import measure, passes, peers, peers_fp8, peers_v1, records
from cute_attn.tools.cases import Case
from cute_attn.tools.peers import Implementation
from cute_attn.tools.progress import Progress
from cute_attn.tools.records import Record

FAR_OFF = 10.0  # times the best one's error: not roundings, and its time says little
SMALL = 50.0  # TFLOP/s below which a time says more than a rate


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m cute_attn bench",
        description="Time attention, the forward by default: device time, medians, implementations "
        "interleaved in rotating order on the same data.",
    )
    which = p.add_mutually_exclusive_group()
    which.add_argument("--backward", action="store_true", help="time the backward instead")
    which.add_argument(
        "--fwd-bwd",
        action="store_true",
        help="time steps of both through autograd, host included: the wall clock of "
        f"{measure.STEPS} in a row, from an idle GPU to an idle GPU",
    )
    which.add_argument(
        "--fp8",
        nargs="?",
        const="fp8",
        choices=("fp8", "fp8_hp"),
        help="time the FP8 forward on inputs quantised beforehand; beside ours: cudnn, fa3, bf16 "
        "(ours in 16 bits) and quantise+ours",
    )
    p.add_argument(
        "--impl",
        default="",
        help="ours,cudnn,fa2,fa3,fa4,sdpa (default: all but sdpa); with --arch sm80 also "
        f"{','.join(peers_v1.NAMES)}, which --cases {peers_v1.CASE_SET} alone takes by default",
    )
    p.add_argument("--arch", choices=("sm80", "sm90"), default="", help="of ours in 16 bits")
    p.add_argument(
        "--cases",
        "--case",
        action="append",
        default=[],
        metavar="SET|NAME",
        help=f"{', '.join(c.CASES)}, or one name of --list; again or comma for more",
    )
    p.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="b=..,hq=..,sq=..,d=..",
        help="any of b hq hk sq sk d dv causal dtype; again for more",
    )
    p.add_argument("--data", default="", help=f"{', '.join(c.DATA)}; comma for more (normal)")
    p.add_argument(
        "--slope",
        type=float,
        default=c.SLOPE,
        help="ramp: binades the scores rise by over 128 keys (%(default)s)",
    )
    p.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="KEY=VALUE,..",
        help="fields replacing the tuned config's; 'pick' is the tuned config; given "
        "more than once they are timed as ours#1, ours#2, ...",
    )
    p.add_argument("--rounds", type=int, default=60, help="at most, per cell (%(default)s)")
    p.add_argument(
        "--seconds", type=float, default=2.5, help="time for the rounds of one cell (%(default)s)"
    )
    p.add_argument(
        "--host", action="store_true", help="host time of a warm call instead of device time"
    )
    p.add_argument("--no-check", action="store_true", help="skip the comparison with fp64")
    p.add_argument("--device", choices=("cuda", "cpu"), default="", help="default: cuda if any")
    p.add_argument("--out", metavar="FILE.jsonl", help="append the records to this file")
    p.add_argument("--list", action="store_true", help="print the cases and stop")
    return p


def pass_of(args: argparse.Namespace) -> str:
    if args.fp8:
        return f"fwd_{args.fp8}"
    return "bwd" if args.backward else "fwd_bwd" if args.fwd_bwd else "fwd"


def implementations_of(args: argparse.Namespace, device: str) -> list[Implementation]:
    """Raises ValueError for an unknown name or field."""
    names, which = split([args.impl]), pass_of(args)
    if split(args.cases) == [peers_v1.CASE_SET] and which == "fwd" and not (names or args.shape):
        names, args.arch = list(peers_v1.NAMES), args.arch or "sm80"
    if set(names) & set(peers_v1.NAMES):
        if device == "cpu":
            raise ValueError(f"{', '.join(peers_v1.NAMES)}: they are timed on a GPU only")
        return peers_v1.chosen(names, args.config, which, args.arch)
    if args.fp8:
        if device == "cpu":
            raise ValueError("--fp8: it is timed on a GPU only")
        return peers_fp8.chosen(names or list(peers_fp8.default(args.fp8)), args.config, args.fp8)
    if args.arch and which == "fwd_bwd":
        raise ValueError("--arch with --fwd-bwd: flash_attn_func takes none")
    return peers.chosen(names or list(peers.default(device, which)), args.config, which, args.arch)


def split(texts: Sequence[str]) -> list[str]:
    return [part for text in texts for part in text.split(",") if part]


def cells_of(args: argparse.Namespace, device: str) -> list[tuple[Case, str]]:
    """(case, data) in the order they are timed. Raises ValueError for what is not known."""
    data = split([args.data]) or ["normal"]
    unknown = [d for d in data if d not in c.DATA]
    if unknown:
        raise ValueError(f"--data {unknown[0]!r}: allowed are {', '.join(c.DATA)}")
    found = c.find_cases(split(args.cases)) + [(c.parse_shape(s), "") for s in args.shape]
    if not found:
        usual = "smoke" if device != "cuda" else "step" if args.fwd_bwd else "main18"
        found = c.find_cases(["host" if args.host else usual])
    if not args.fwd_bwd:  # whose steps count the host's time anyway
        args.host = args.host or all(case in c.CASES["host"] for case, _ in found)
    cells = [(case, d) for d in data for case, fixed in found if not fixed]
    return cells + [(case, fixed) for case, fixed in found if fixed]


def prepared(
    implementations: list[Implementation],
    case: Case,
    inputs: tuple[Any, ...],
    timer: measure.Timer,
    check: bool = True,
    which: str = "fwd",
) -> tuple[list[Record], dict[int, Any]]:
    """Compile, call once and compare with fp64. A record each; calls for those that work."""
    errors = passes.oracle(which, case, inputs) if check else None
    found: list[Record] = []
    calls = {}
    for n, impl in enumerate(implementations):
        record: Record = {"impl": impl.label, "ours": impl.ours}
        try:
            record["config"] = impl.config_record(case)
            with impl.scope():
                call = impl.prepare(case, *inputs)
                started = time.perf_counter()
                out = impl.to_output(call())
            timer.synchronize()
            record["first_call_s"] = round(time.perf_counter() - started, 3)
            if errors is not None:
                record |= errors(out)
            calls[n] = call
        except Exception as error:  # a peer must not end the run
            record["error"] = records.error_line(error)
        found.append(record)
    return found, calls


def run_cell(
    args: argparse.Namespace,
    implementations: list[Implementation],
    timer: measure.Timer,
    cell: tuple[Case, str],
    tick: Callable[[float], None],
) -> list[Record]:
    """Records of one cell, without the environment's fields."""
    (case, data), which = cell, pass_of(args)
    inputs = passes.make_inputs(which, case, data, "cuda" if timer.gpu else "cpu", args.slope)
    found, calls = prepared(implementations, case, inputs, timer, not args.no_check, which)
    scopes = [implementations[n].scope for n in calls]
    if args.host:
        # a backward is several launches, and all must fit the launch queue
        in_a_row = measure.HOST_CALLS // (1 if passes.forward(which) else 4)
        warm = list(calls.values())
        unit, times = "us", timer.host(warm, scopes, min(args.rounds, 20), in_a_row)
    else:
        warm, steps = list(calls.values()), measure.STEPS if which == "fwd_bwd" else 0
        timer.fills = measure.FILLS if which == "fwd" else measure.FILLS_BACKWARD
        timer.rounds(warm, scopes, 2, 1.0)
        unit, times = "ms", timer.rounds(warm, scopes, args.rounds, args.seconds, tick, steps)
    for at, (n, measured) in enumerate(zip(calls, times, strict=True)):
        record = found[n]
        for q in (20, 50, 80):
            record[f"p{q}_{unit}"] = measure.quantile(measured, q / 100)
        record["rounds"] = len(measured)
        if not args.host and timer.late[at]:
            record["late"] = timer.late[at]  # rounds whose time may hold host time
        if not args.host:
            record["tflops"] = passes.WORK[which] * case.flops() / record["p50_ms"] * 1e-9
    records.rate_against_peers(found, f"p50_{unit}")
    arch = {"arch": args.arch} if args.arch else {}
    shape = {"pass": which, **arch, "case": case.name, "problem": asdict(case), "data": data}
    if data == "ramp":
        shape["slope"] = args.slope
    return [shape | record for record in found]


def cell_text(record: Record) -> str:
    if "error" in record:
        return "-"
    if "p50_us" in record:
        return f"{record['p50_us']:.1f} us"
    if record["tflops"] < SMALL:
        return f"{record['p50_ms'] * 1e3:.1f} us"
    return f"{record['tflops']:.0f}"


def row(found: list[Record]) -> str:
    texts = [cell_text(r).rjust(9) for r in found]
    ours = [r for r in found if r["ours"]]
    ratios = [f"{r['ratio']:.3f}" if "ratio" in r else "-" for r in ours]
    best = next((r["best_peer"] for r in found if "best_peer" in r), "-")
    wrong = [f"{r['rel_error']:.1e}" for r in ours if "rel_error" in r]
    notes = [f"{r['impl']} NOT FINITE" for r in found if r.get("finite") is False]
    checked = [r for r in found if "rel_error" in r and r["impl"] != peers_fp8.SIXTEEN_BITS]
    bar = FAR_OFF * min((r["rel_error"] for r in checked), default=0.0)
    notes += [f"{r['impl']} WRONG {r['rel_error']:.0e}" for r in checked if r["rel_error"] > bar]
    parts = [f"{found[0]['case']:32} {found[0]['data']:8}", *texts, "  " + " ".join(ratios)]
    return " ".join([*parts, f"of {best:6}", " ".join(wrong), *notes])


def summary(found: list[Record]) -> list[str]:
    """Geometric means of ours and the reasons for everything that did not run."""
    lines = []
    for label, data in dict.fromkeys((r["impl"], r["data"]) for r in found if r["ours"]):
        mine = [r for r in found if (r["impl"], r["data"]) == (label, data)]
        rated = [r for r in mine if "ratio" in r]
        if not rated:
            continue
        least = min(rated, key=lambda r: r["ratio"])
        mean = records.geometric_mean(r["ratio"] for r in rated)
        lines.append(
            f"{label} on {data}: geometric mean {mean:.3f} of the best peer over "
            f"{len(rated)} of {len(mine)} cells, least {least['ratio']:.3f} ({least['case']})"
        )
    for r in (r for r in found if "late" in r):
        lines.append(
            f"{r['impl']} on {r['case']}: in {r['late']} of {r['rounds']} rounds the GPU was there "
            "before the last launch was queued, and host time may count"
        )
    failed: dict[tuple[str, str], list[str]] = {}
    for r in found:
        if "error" in r:
            failed.setdefault((r["impl"], r["error"]), []).append(r["case"])
    for (label, reason), names in failed.items():
        lines.append(f"{label} did not run {len(names)} cells ({names[0]}, ...): {reason}")
    return lines


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    if args.list:
        for name, group in c.CASES.items():
            print(f"{name}:", *(case.name for case in group), sep="\n  ")
        return 0
    try:
        import torch
    except ImportError as error:
        print(f"the bench needs torch ({error}): pip install torch", file=sys.stderr)
        return 1
    if args.device == "cuda" and not torch.cuda.is_available():
        parser().error("--device cuda: torch finds no GPU; python -m cute_attn info says why")
    if args.host and args.fwd_bwd:
        parser().error("--host with --fwd-bwd: its steps count the host's time already")
    device, which = args.device or ("cuda" if torch.cuda.is_available() else "cpu"), pass_of(args)
    try:
        implementations, cells = implementations_of(args, device), cells_of(args, device)
    except ValueError as error:
        parser().error(str(error))
    base = records.environment(device, ["bench", *argv], which)
    timer, clocks = measure.Timer(device), measure.Clocks(device)
    print(f"{base['gpu'] or 'CPU'}  driver {base['driver']}  {base['versions']}")
    unit = "host time a call" if args.host else "TFLOP/s"
    print(
        f"{passes.NAMES[which]}: {unit}, ratio of ours to the best peer, error of ours against fp64"
    )
    print(" " * 41, *(impl.label.rjust(9) for impl in implementations))
    everything: list[Record] = []
    try:
        with torch.no_grad(), Progress(len(cells), "bench") as bar:
            for n, cell in enumerate(cells):
                bar.at(n, cell[0].name)
                started = time.monotonic()
                found = run_cell(args, implementations, timer, cell, bar.step(n))
                measured = {"clocks": clocks.since(started)}
                found = [base | r | measured for r in found]
                bar.clear()
                print(row(found), flush=True)
                everything += found
                if args.out:
                    records.append(args.out, found)
    except KeyboardInterrupt:
        print("stopped")
    finally:
        with suppress(OSError):
            clocks.close()
    print(*summary(everything), sep="\n")
    good = [r for r in everything if r["ours"] and "error" not in r]
    return 0 if good or not any(r["ours"] for r in everything) else 1
