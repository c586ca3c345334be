"""What sums of FP8 products lose on Hopper, emulated, and what Fp8Config's `promote` changes.

    python scripts/fp8_sums.py                       # half a minute
    python scripts/fp8_sums.py --keys 4096 --columns 16

The tensor core takes 32 products a step. It aligns them and the sum with the largest of all, drops
what lies below 2^-13 of that one's power of two, and adds. Cells are errors of O against exact sums
of the same numbers: of its mean in percent where V has one, else the root of the mean square.

`ones` divides O by a sum of weights that the tensor core made too, from a column of ones.
`parts of 8k` are keys of a launch each, merged. Neither is built: the table says why.
"""

import argparse
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

STEP = 32  # products that a WGMMA of 8-bit operands adds up at once
BITS = 13  # below the leading one of the largest
BLOCK = 128  # keys
ROWS = 4
PARTS = {"": 0, **{f"promote={n}": n for n in (1, 2, 4, 8, 32)}, "parts of 8k": 64}  # blocks


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).float()


def step(total: Tensor, products: Tensor) -> Tensor:
    """total (rows, columns) + products (STEP, rows, columns), as the tensor core adds them."""
    largest = torch.maximum(products.abs().amax(0), total.abs())
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1 - BITS)
    return ((total / unit).trunc() + (products / unit).trunc().sum(0)) * unit


def sums(P: Tensor, V: Tensor, marks: list[int], blocks: int) -> Iterator[Tensor]:
    """P V over so many first keys, each sum in the tensor core over so many blocks."""
    inside = torch.zeros(P.shape[0], V.shape[1])
    outside = torch.zeros_like(inside)
    for key in range(0, max(marks), STEP):
        p, v = P[:, key : key + STEP].T, V[key : key + STEP]
        inside = step(inside, p[:, :, None] * v[:, None])
        end = key + STEP
        if blocks and end % (blocks * BLOCK) == 0:
            outside, inside = outside + inside, torch.zeros_like(inside)
        if end in marks:
            yield outside.double() + inside


def weights(keys: int) -> Iterator[tuple[str, Tensor]]:
    yield "even", torch.full((1, keys), 32.0)
    x = torch.randn(ROWS, keys, generator=torch.Generator().manual_seed(1))
    yield "exp of N(0,1)", rounded(256 * (x - x.amax(1, keepdim=True)).exp())
    sink = torch.full((1, keys), 2.0**-6)
    sink[:, 0] = 256.0
    yield "2^8, others 2^-6", sink


def values(keys: int, columns: int) -> Iterator[tuple[str, Tensor]]:
    x = torch.randn(keys, columns, generator=torch.Generator().manual_seed(0))
    yield "1 + 0.05 N(0,1)", rounded(1 + 0.05 * x)
    yield "N(0,1)", rounded(x)


def error(out: Tensor, want: Tensor, mean: bool) -> str:
    if mean:
        return f"{100 * (out.mean() / want.mean() - 1).item():+.2f}"
    return f"{100 * ((out - want).norm() / want.norm()).item():.2f}"


def table(marks: list[int], columns: int) -> Iterator[str]:
    yield "| weights | V | sums | " + " | ".join(f"{n:,}" for n in marks) + " |"
    yield "|---" * (3 + len(marks)) + "|"
    longest = max(marks)
    for of_p, P in weights(longest):
        exact = [P[:, :n].double().sum(1, keepdim=True) for n in marks]
        ones = list(sums(P, torch.ones(longest, 1), marks, 0))
        for of_v, V in values(longest, columns):
            want = [P[:, :n].double() @ V[:n].double() / x for n, x in zip(marks, exact)]
            for name, blocks in PARTS.items():
                found = list(sums(P, V, marks, blocks))
                for label, by in ((name or "tensor core", exact), ("ones", ones)):
                    if label != "ones" or not blocks:
                        outs = [x / y for x, y in zip(found, by)]
                        cells = [error(*pair, of_v[0] == "1") for pair in zip(outs, want)]
                        yield f"| {of_p} | {of_v} | {label} | " + " | ".join(cells) + " |"


def main(argv: list[str]) -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    keys = [4096, 16384, 65536, 131072]
    p.add_argument("--keys", type=int, nargs="+", default=keys, help="multiples of 32")
    p.add_argument("--columns", type=int, default=32, help="of V (%(default)s)")
    args = p.parse_args(argv)
    if min(args.keys) < STEP or any(n % STEP for n in args.keys):
        p.error(f"--keys {args.keys}: allowed are the multiples of {STEP}")
    if args.columns < 1:
        p.error(f"--columns {args.columns} is not positive")
    for line in table(sorted(set(args.keys)), args.columns):
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
