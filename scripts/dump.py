"""PTX, SASS, registers and instruction counts of a kernel. Needs no GPU.

python scripts/dump.py --shape b=1,hq=1,sq=1,d=128,causal=1 --config tile_n=96 --out dump
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.pop(0)  # scripts/ has a profile.py, as Python has
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cute_attn.tools import cases, inspect
from cute_attn.tools.tune import config_source

SHOWN = (
    *("TOTAL", "HGMMA", "MUFU.EX2", "FFMA", "FMUL", "FADD", "FMNMX", "VIMNMX", "FSEL", "F2FP"),
    *("SHFL", "VOTE", "SYNCS", "BAR", "WARPGROUP", "UTMALDG", "UTMASTG", "REDG"),
    *("STL", "LDL"),
)


def main(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--backward", action="store_true", help="the backward's kernels instead")
    p.add_argument("--shape", default="b=1,hq=1,sq=1,d=128", help="head dims, dtype and mask count")
    p.add_argument("--config", action="append", default=[], help="KEY=VALUE,..; again to compare")
    p.add_argument("--out", help="folder for NAME.ptx, .sass, .cubin and .json")
    args = p.parse_args(argv)
    try:
        case = cases.parse_shape(args.shape)
        pick = cases.bwd_config_for if args.backward else cases.config_for
        configs = [pick(case, text) for text in args.config or [""]]
    except (TypeError, ValueError) as error:
        p.error(str(error))
    columns = []
    for n, config in enumerate(configs):
        why = config.infeasible(case.problem())
        if why:
            print(f"note: {config_source(config)} is infeasible: {why}")
        built = inspect.build(case.problem(), config)
        used = built.resources
        print(f"#{n + 1} {config_source(config)}")
        for k in built.kernels:
            print(f"   registers {k.registers}  local {k.frame}  smem {k.smem}  {k.name[:60]}")
        columns += [(f"#{n + 1}", used.counts)]
        columns += [(f"#{n + 1} loop {i}", loop) for i, loop in enumerate(used.loops, 1)]
        if args.out:
            folder = Path(args.out)
            folder.mkdir(parents=True, exist_ok=True)
            stem = folder / f"{used.name}_{n + 1}"
            stem.with_suffix(".ptx").write_text(built.ptx)
            stem.with_suffix(".sass").write_text(built.sass)
            stem.with_suffix(".cubin").write_bytes(built.cubin)
            stem.with_suffix(".json").write_text(json.dumps(used.golden(), indent=1) + "\n")
    print(
        "\nstatic counts of the kernel with matrix products, and of its innermost loops that have"
    )
    print("some, in address order")
    print(" " * 10 + "".join(head.rjust(12) for head, _ in columns))
    for opcode in SHOWN:
        if any(counts.get(opcode) for _, counts in columns):
            print(f"{opcode:10}" + "".join(f"{c.get(opcode, 0):12}" for _, c in columns))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
