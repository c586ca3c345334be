"""python -m cute_attn COMMAND: the tools."""

import sys
from importlib import import_module

COMMANDS = {
    "info": "versions, devices, what runs there and why not, the cache",
    "demo": "the main job on this machine: the kernel on a GPU, the block-wise path without one",
    "bench": "time this library and its peers, interleaved, on the same data",
    "tune": "sweep the configs of a shape: feasible, right, ranked",
    "compile": "fill the cache of compiled kernels; needs no GPU",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("python -m cute_attn COMMAND [-h]\n")
        for name, what in COMMANDS.items():
            print(f"  {name:8} {what}")
        return 0
    if argv[0] not in COMMANDS:
        print(f"no command {argv[0]!r}: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return int(import_module(f"cute_attn.tools.{argv[0]}").main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
