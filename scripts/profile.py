"""Nsight Compute on one launch of the kernel: what it waits for, and how busy the units are.

python scripts/profile.py --shape b=4,hq=16,sq=4096,d=128,causal=1 --config tile_n=112
python scripts/profile.py --shape ... --out report --full      # report.ncu-rep for the GUI
"""

import argparse
import csv
import io
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.pop(0)  # scripts/ has a profile.py, as Python has
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cute_attn.tools import cases
from cute_attn.tools.records import ROOT

WARM = 3  # launches before the one that is profiled
METRICS = {
    "gpu__time_duration.sum": "time",
    "sm__cycles_elapsed.max": "cycles",
    "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active": "WGMMA issue",
    "sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_active": "tensor cores",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": "MUFU (exp2)",
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active": "FMA",
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active": "ALU",
    "sm__inst_issued.avg.pct_of_peak_sustained_active": "issue slots",
    "lts__t_sector_hit_rate.pct": "L2 hits",
    "dram__bytes.sum": "DRAM bytes",
    "launch__registers_per_thread": "registers",
    "launch__shared_mem_per_block_dynamic": "dynamic smem",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "stall: memory",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": "stall: barrier",
    "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio": "stall: WGMMA",
    "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio": "stall: pipe",
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": "stall: fixed wait",
}


def launch(args):
    """The profiled process: WARM launches, then the one of interest."""
    import torch

    import cute_attn

    case = cases.parse_shape(args.shape)
    q, k, v = cases.make_inputs(case, args.data)
    if args.backward:
        config = cases.bwd_config_for(case, args.config)
        out, lse = cute_attn.fwd(q, k, v, causal=case.causal, return_lse=True)
    else:
        config = cases.config_for(case, args.config)
    for _ in range(WARM + 1):
        if args.backward:
            cute_attn.bwd(out, q, k, v, out, lse, causal=case.causal, config=config)
        else:
            cute_attn.fwd(q, k, v, causal=case.causal, config=config)
    torch.cuda.synchronize()


def command(args):
    me = [sys.executable, __file__, "--child", "--shape", args.shape, "--data", args.data]
    me += ["--config", args.config] + ["--backward"] * args.backward
    ncu = ["ncu", "--clock-control", "none", "--kernel-name"]
    ncu += ["regex:cute_attn_bwd" if args.backward else "regex:cute_attn_fwd"]
    ncu += ["--launch-skip", str(WARM), "--launch-count", "1"]
    if args.full:
        ncu += ["--set", "full", "--import-source", "yes"]
    else:
        ncu += ["--metrics", ",".join(METRICS)]
    if args.out:
        return [*ncu, "--force-overwrite", "--export", args.out, *me]
    return [*ncu, "--csv", "--page", "raw", *me]


def table(text):
    """ncu's raw page as lines 'name value unit'."""
    rows = list(csv.reader(io.StringIO(text[text.index('"ID"') :])))
    names, units, values = rows[:3]
    found = {name: (values[i], units[i]) for i, name in enumerate(names)}
    for metric, what in METRICS.items():
        value, unit = found.get(metric, ("not on this GPU", ""))
        yield f"{what:18} {value:>16} {unit}"


def main(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--backward", action="store_true", help="the backward's main kernel instead")
    p.add_argument("--shape", default="b=4,hq=16,sq=4096,d=128")
    p.add_argument("--config", default="", help="KEY=VALUE,.. on top of the tuned config")
    p.add_argument("--data", default="normal", choices=cases.DATA)
    p.add_argument("--out", help="write OUT.ncu-rep instead of a table")
    p.add_argument("--full", action="store_true", help="all sections, with source")
    p.add_argument("--print", action="store_true", help="print the ncu command and stop")
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    try:
        pick = cases.bwd_config_for if args.backward else cases.config_for
        pick(cases.parse_shape(args.shape), args.config)
    except (TypeError, ValueError) as error:
        p.error(str(error))
    if args.child:
        launch(args)
        return 0
    if args.print:
        print(shlex.join(command(args)))
        return 0
    try:
        done = subprocess.run(command(args), cwd=ROOT, text=True, stdout=subprocess.PIPE)
    except FileNotFoundError:
        print("ncu is not on PATH: it comes with the CUDA toolkit", file=sys.stderr)
        return 1
    if done.returncode or '"ID"' not in done.stdout:
        print(done.stdout)
        return done.returncode
    print(*table(done.stdout), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
