"""Tables of README.md and docs/measured.md and a plot, from committed benchmark records.

    python scripts/report.py                    # all of benchmarks/*.jsonl
    python scripts/report.py --check            # 1 if a table is not what the records say
    python scripts/report.py --plot docs/forward.svg
    python scripts/report.py --plot docs/backward.svg --backward
    python scripts/report.py --plot docs/fp8.svg --fp8

Tables stand between `<!-- report:NAME -->` and `<!-- /report -->`. Records of several runs are
put together: the median of the rates, the geometric mean of the ratios. A cell takes the runs of
the newest code that was timed there. Losses are marked. The table of what is supported comes from
no record: cute_attn/tools/support.py asks the checks.
"""

import argparse
import re
import statistics
import sys
from pathlib import Path

sys.path.pop(0)  # scripts/ has a profile.py, as Python has
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cute_attn.tools import cases, peers_v1, records
from cute_attn.tools.records import ROOT

PLACES = ("README.md", "docs/measured.md", "docs/flash_attention_2.md")
MARKERS = re.compile(r"(<!-- report:(\w+) -->\n)(.*?)(<!-- /report -->)", re.S)
PEERS = ("cudnn", "fa2", "fa3", "fa4", "bf16", "quantise+ours")
DATA_NAME = {
    "normal": "N(0,1) data",
    "ramp": "ramp data (scores rise by 10 binades over 128 keys; the maximum moves in every block)",
    "ramp-20": "ramp data of 20 binades over 128 keys",
    "x30": "30·N(0,1) data",
    "outliers": "N(0,1) + N(0,100)·Bernoulli(0.001) data",
}
PASS_NAME = {"fwd": "forward", "bwd": "backward", "fwd_fp8": "FP8 forward"}
NOTHING = "*No records yet.*\n"


def of_slope(r):
    """A ramp other than the usual one is data of its own."""
    usual = r.get("slope", cases.SLOPE) == cases.SLOPE
    return r if usual else r | {"data": f"ramp-{r['slope']:g}"}


def kind(r):
    """What a record timed, apart from others where configs of ours were timed beside each other."""
    return records.pass_of(r) + " configs" * r.get("impl", "").startswith("ours#")


def newest(found):
    """Records without those that a later run of other code has overtaken, cell by cell."""

    def key(r):
        return kind(r), r["case"], r["data"], "p50_us" in r

    latest = {key(r): r.get("source") for r in sorted(found, key=lambda r: r["time"])}
    return [r for r in found if latest[key(r)] == r.get("source")]


def of_pass(found, which):
    return [r for r in found if kind(r) == which]


def cells(found, names, data):
    """{case: {impl: (rate, ratio, time)}} over all runs, for the given cases, in their order."""
    table = {}
    for name in names:
        here = [r for r in found if r["case"] == name and r["data"] == data and "p50_ms" in r]
        for impl in dict.fromkeys(r["impl"] for r in here):
            mine = [r for r in here if r["impl"] == impl]
            ratios = [r["ratio"] for r in mine if "ratio" in r]
            table.setdefault(name, {})[impl] = (
                statistics.median(r["tflops"] for r in mine),
                records.geometric_mean(ratios) if ratios else None,
                statistics.median(r["p50_ms"] for r in mine),
            )
    return {name: by for name, by in table.items() if "ours" in by}


def heading(found):
    """Where the figures come from: command, GPU, driver, versions, runs."""
    commands = dict.fromkeys(r["command"] for r in found)
    gpus = dict.fromkeys(f"{r['gpu']}, driver {r['driver']}" if r["gpu"] else "CPU" for r in found)
    versions = {}
    for r in found:
        versions |= r["versions"]
    runs = len({r["run"] for r in found})
    days = sorted({r["time"][:10] for r in found})
    lines = [f"`{command}`  " for command in commands]
    known = ("torch", "cudnn", "cutlass_dsl", "fa3", "fa4")
    text = ", ".join(f"{name} {versions[name]}" for name in known if name in versions)
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    lines.append(f"{'; '.join(gpus)}; {text}; {runs} run{'s' * (runs > 1)}, {span}.")
    return lines


def marked(ratio):
    """Losses stand out."""
    if ratio is None:
        return "-"
    return f"{ratio:.2f}×" if round(ratio, 3) >= 1 else f"**{ratio:.3f}× ▼**"


def verdict(table):
    ratios = {name: by["ours"][1] for name, by in table.items() if by["ours"][1] is not None}
    if not ratios:
        return ["No peer ran."]
    lost = [name for name, ratio in ratios.items() if round(ratio, 3) < 1]
    mean = records.geometric_mean(ratios.values())
    text = f"Geometric mean {mean:.3f} of the best peer over {len(ratios)} cells; "
    return [text + (f"lost: {', '.join(lost)}." if lost else "no cell lost.")]


def of_names(found, names):
    wanted = set(names)
    return [r for r in found if r["case"] in wanted and "p50_ms" in r]


def compact(found):
    """head_dim and mask down, seqlen across: rate and ratio of ours on N(0,1) data."""
    main = cases.CASES["main18"]
    table = cells(found, [c.name for c in main], "normal")
    if not table:
        return NOTHING
    lengths = sorted({c.seqlen_q for c in main})
    here = [r for r in of_names(found, table) if r["data"] == "normal"]
    lines = [*heading(here), ""]
    lines += ["| head_dim | mask |" + "".join(f" {s // 1024}k |" for s in lengths)]
    lines += ["|---|---|" + "---|" * len(lengths)]
    for d in sorted({c.head_dim for c in main}):
        for causal in (False, True):
            texts = []
            for s in lengths:
                by = table.get(cases.standard(d, s, causal).name, {})
                texts.append(f"{by['ours'][0]:.0f} · {marked(by['ours'][1])}" if by else "-")
            lines.append(f"| {d} | {'causal' if causal else 'full'} | {' | '.join(texts)} |")
    return "\n".join([*lines, "", *verdict(table)]) + "\n"


def full(found, name, data, what="TFLOP/s"):
    """One row a cell, everyone in it."""
    names = [c.name for c in cases.CASES[name]]
    table = cells(found, names, data)
    if not table:
        return NOTHING
    here = [r for r in of_names(found, table) if r["data"] == data]
    peers = [p for p in PEERS if any(p in by for by in table.values())]
    head = ["cell", "ours", *peers, "ours / best peer"]
    lines = [*heading(here), "", f"{what} on {DATA_NAME[data]}.", ""]
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for cell, by in table.items():
        rates = [shown(by[i]) if i in by else "-" for i in ("ours", *peers)]
        lines.append(f"| {cell} | {' | '.join(rates)} | {marked(by['ours'][1])} |")
    return "\n".join([*lines, "", *verdict(table)]) + "\n"


def shown(entry):
    rate, _, ms = entry
    return f"{rate:.0f}" if rate >= 50 else f"{ms * 1e3:.1f} µs"


def host(found):
    here = [r for r in found if "p50_us" in r]
    if not here:
        return NOTHING
    lines = [
        *heading(here),
        "",
        "| shape | implementation | host µs a warm call |",
        "|---|---|---|",
    ]
    for case, impl in dict.fromkeys((r["case"], r["impl"]) for r in here):
        mine = [r["p50_us"] for r in here if (r["case"], r["impl"]) == (case, impl)]
        lines.append(f"| {case} | {impl} | {statistics.median(mine):.1f} |")
    return "\n".join(lines) + "\n"


def accuracy(found):
    """Of several runs of a cell on a device the last."""
    if not found:
        return NOTHING
    last = {(r["case"], r["device"]): r for r in sorted(found, key=lambda r: r["time"])}
    here = list(last.values())
    return "\n".join([*heading(here), "", *records.error_table(here)]) + "\n"


def deterministic(found):
    """Of runs that timed it beside the default, all of the main cells."""
    here, rows, ratios = [], [], []
    for case in (*cases.CASES["main18"], *cases.CASES["gqa"]):
        mine = [r for r in found if r["case"] == case.name]
        default, fixed = (
            statistics.median([r["tflops"] for r in mine if r["config"]["deterministic"] is flag])
            for flag in (False, True)
        )
        here, ratios = here + mine, [*ratios, fixed / default]
        rows.append(f"| {case.name} | {default:.0f} | {fixed:.0f} | {fixed / default:.2f} |")
    lines = [*heading(here), "", "| cell | default | deterministic | ratio |", "|---|---|---|---|"]
    mean = f"Geometric mean {records.geometric_mean(ratios):.3f}, least {min(ratios):.2f}."
    return "\n".join([*lines, *rows, "", mean]) + "\n"


def quantise(found):
    here = [r for r in found if r["impl"] != "copy"]
    if not here:
        return NOTHING
    lines = [
        *heading(here),
        "",
        "| batch, tokens, heads of q and k, d; what | µs | GB/s | of a copy | host µs |",
    ]
    lines.append("|---" * 5 + "|")
    for case, impl in dict.fromkeys((r["case"], r["impl"]) for r in here):
        mine = [r for r in here if (r["case"], r["impl"]) == (case, impl)]
        of = lambda key, mine=mine: statistics.median(r[key] for r in mine)
        sizes = f"{of('ms') * 1e3:.1f} | {of('gb_per_s'):.0f} | {of('of_copy'):.3f}"
        lines.append(f"| {case}, {impl} | {sizes} | {of('host_us'):.1f} |")
    return "\n".join(lines) + "\n"


def support(found):
    from cute_attn.tools import support  # takes torch, which the other tables do without

    return support.table()


def v1v2(found):
    """What FlashAttention-2 changed: v2's rate, and how many times as long it takes with a change
    undone."""
    kept = "v2"
    undone = [name for name in peers_v1.NAMES if name != kept]
    rows, gains = [], {}
    for case in cases.CASES[peers_v1.CASE_SET]:
        here = [r for r in of_names(found, [case.name]) if r["data"] == "normal"]
        ms = {i: [r["p50_ms"] for r in here if r["impl"] == i] for i in peers_v1.NAMES}
        ms = {impl: statistics.median(times) for impl, times in ms.items() if times}
        if kept not in ms:
            continue
        gain = {impl: ms[impl] / ms[kept] for impl in undone if impl in ms}
        gains.setdefault(case.batch, []).append(gain)
        rate = case.flops() / ms[kept] * 1e-9
        rows.append(f"| {case.name} | {rate:.0f} | {times_of(gain, undone)} |")
    if not rows:
        return NOTHING
    names = [c.name for c in cases.CASES[peers_v1.CASE_SET]]
    head = ["cell", f"{kept}, TFLOP/s", *undone]
    lines = [*heading(of_names(found, names)), "", "| " + " | ".join(head) + " |"]
    lines += ["|---" * len(head) + "|", *rows]
    for batch, group in gains.items():
        ran = [impl for impl in undone if all(impl in gain for gain in group)]
        means = {impl: records.geometric_mean(gain[impl] for gain in group) for impl in ran}
        lines.append(f"| geometric mean, batch {batch} | | {times_of(means, undone)} |")
    return "\n".join(lines) + "\n"


def times_of(gain, impls):
    return " | ".join(f"{gain[impl]:.2f}×" if impl in gain else "-" for impl in impls)


STEPS = "TFLOP/s of forward and backward through autograd, the host's time included,"
TABLES = {  # name -> the pass, and the table of its records
    "compact": ("fwd", compact),
    "main": ("fwd", lambda found: full(found, "main18", "normal")),
    "ramp": ("fwd", lambda found: full(found, "main18", "ramp")),
    "steep": ("fwd", lambda found: full(found, "main18", "ramp-20")),
    "extra": ("fwd", lambda found: full(found, "extra", "normal")),
    "tuning": ("fwd", lambda found: full(found, "tuning", "normal")),
    "host": ("fwd", host),
    "sm80_main": ("fwd_sm80", lambda found: full(found, "main18", "normal")),
    "v1v2": ("fwd_sm80", v1v2),
    "bwd_compact": ("bwd", compact),
    "bwd_main": ("bwd", lambda found: full(found, "main18", "normal")),
    "bwd_gqa": ("bwd", lambda found: full(found, "gqa", "normal")),
    "bwd_deterministic": ("bwd configs", deterministic),
    "sm80_bwd": ("bwd_sm80", lambda found: full(found, "main18", "normal")),
    "bwd_extra": ("bwd", lambda found: full(found, "extra", "normal")),
    "bwd_tuning": ("bwd", lambda found: full(found, "tuning", "normal")),
    "fp8_compact": ("fwd_fp8", compact),
    "fp8_main": ("fwd_fp8", lambda found: full(found, "main18", "normal")),
    "fp8_ramp": ("fwd_fp8", lambda found: full(found, "main18", "ramp")),
    "fp8_hp": ("fwd_fp8_hp", lambda found: full(found, "main18", "normal")),
    "quantise": ("quantise", quantise),
    "accuracy": ("accuracy", accuracy),
    "support": ("", support),
    "fwd_bwd": ("fwd_bwd", lambda found: full(found, "step", "normal", STEPS)),
}


def table_of(name, found):
    which, table = TABLES[name]
    return table(of_pass(found, which))


def regenerate(text, found):
    return MARKERS.sub(lambda m: m[1] + table_of(m[2], found) + m[4], text)


def plot(found, path, which="fwd"):
    """Bars of everyone, a panel per head_dim and mask."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "cute_attn"  # the same file from the same records
    from matplotlib import pyplot

    found = of_pass(found, which)
    table = cells(found, [c.name for c in cases.CASES["main18"]], "normal")
    main = [c for c in cases.CASES["main18"] if c.name in table]
    dims, lengths = sorted({c.head_dim for c in main}), sorted({c.seqlen_q for c in main})
    if not main:
        raise SystemExit(f"{path}: no records of the {PASS_NAME[which]} to plot")
    impls = [
        i for i in ("fa2", "cudnn", "fa4", "fa3", "ours") if any(i in by for by in table.values())
    ]
    figure, axes = pyplot.subplots(2, len(dims), figsize=(11, 5.2), sharey=True, squeeze=False)
    for column, d in enumerate(dims):
        for row, causal in enumerate((False, True)):
            axis = axes[row][column]
            for n, impl in enumerate(impls):
                heights = [
                    table.get(cases.standard(d, s, causal).name, {}).get(impl, (0,))[0]
                    for s in lengths
                ]
                places = [i + (n - (len(impls) - 1) / 2) * 0.16 for i in range(len(lengths))]
                color = "#76b900" if impl == "ours" else str(0.8 - 0.15 * n)
                bars = axis.bar(places, heights, 0.15, label=impl, color=color)
                if impl == "ours":
                    axis.bar_label(bars, fmt="%.0f", fontsize=7)
            axis.set_title(f"head_dim {d}, {'causal' if causal else 'full'}", fontsize=9)
            axis.set_xticks(range(len(lengths)), [f"{s // 1024}k" for s in lengths])
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("TFLOP/s")
    axes[1][0].set_ylabel("TFLOP/s")
    axes[0][0].legend(fontsize=7, frameon=False)
    gpu = next((r["gpu"] for r in found if r["gpu"]), "?")
    dtype = "" if which == "fwd_fp8" else ", bf16"
    figure.suptitle(f"Attention {PASS_NAME[which]}{dtype}, 16k tokens, {gpu}", fontsize=10)
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)


def main(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("records", nargs="*", help="default: benchmarks/*.jsonl")
    p.add_argument("--check", action="store_true", help="write nothing")
    p.add_argument("--plot", metavar="FILE", help="SVG or PNG")
    shown = p.add_mutually_exclusive_group()
    shown.add_argument("--backward", action="store_true", help="what --plot shows")
    shown.add_argument("--fp8", action="store_true", help="what --plot shows")
    args = p.parse_args(argv)
    try:
        found = records.read(args.records or sorted((ROOT / "benchmarks").glob("*.jsonl")))
    except (OSError, ValueError) as error:
        p.error(str(error))
    # others are of test runs and of training
    found = newest([of_slope(r) for r in found if "case" in r])
    stale = []
    for place in PLACES:
        path = ROOT / place
        old = path.read_text(encoding="utf-8")
        new = regenerate(old, found)
        if new != old:
            stale.append(place)
            if not args.check:
                path.write_text(new, encoding="utf-8")
    if args.plot and not args.check:
        plot(found, args.plot, "bwd" if args.backward else "fwd_fp8" if args.fp8 else "fwd")
    print(f"{len(found)} records; " + (f"changed: {', '.join(stale)}" if stale else "up to date"))
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
