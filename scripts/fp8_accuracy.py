"""Errors of FP8 attention on FlashAttention-3's experiment, as a table.

    python scripts/fp8_accuracy.py                       # seqlen 1024 and 8192, head_dim 128
    python scripts/fp8_accuracy.py --seqlen 4096 --head-dim 64 --heads 2
    python scripts/fp8_accuracy.py --out benchmarks/fp8_accuracy.jsonl  # then scripts/report.py

q, k and v are N(0,1) + N(0,100) * Bernoulli(0.001), rounded to bf16; no mask. Root of the mean
squared error against fp64 on the same inputs, over all heads and the first --rows queries of each.
`tensor` is a plain cast of q, k and v with one scale each, for comparison. On the CPU sums are in
fp32 and `bf16` rounds the result alone, not P.

Paper: arXiv 2407.08608, section 4.3, table 3: 9.1e-3 for FlashAttention-3, 2.4e-2 for a baseline
with one scale a tensor. It states neither seqlen nor head_dim, on which the figures depend.
"""

import argparse
import math
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.pop(0)  # scripts/ has a profile.py, as Python has
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from torch import Tensor

import cute_attn
from cute_attn import reference
from cute_attn.quantize import E4M3_MAX, saturate
from cute_attn.tools import cases, records
from cute_attn.tools.progress import Progress

SCHEMES = ("bf16", "fp8_hp", "fp8", "tensor")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--seqlen", type=positive, nargs="+", default=[1024, 8192])
    p.add_argument("--head-dim", type=positive, default=128, help="a multiple of 16 up to 256")
    p.add_argument("--heads", type=positive, default=8)
    p.add_argument(
        "--rows", type=positive, default=1024, help="queries a head, at most (%(default)s)"
    )
    p.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    p.add_argument("--out", help="append records to this file")
    return p


def cast(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax() / E4M3_MAX
    return saturate(x.float() / scale), scale.reshape(1)


def run(scheme: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if scheme == "bf16":
        return cute_attn.fwd(q, k, v)
    if scheme != "tensor":
        return cute_attn.fwd(q, k, v, preset=scheme)
    (q, a), (k, b), (v, c) = map(cast, (q, k, v))
    return cute_attn.fwd(q, k, v, q_descale=a, k_descale=b, v_descale=c)


def measure(case: cases.Case, rows: int, device: str, bar: Progress) -> records.Record:
    """rms of the answer, and scheme -> RMSE; a scheme that is not built for the device is missing.
    A head at a time: the scores of the reference are all in memory."""
    inputs = [t.to(device) for t in cases.make_inputs(case, "outliers", "cpu")]
    size, squares = 0.0, dict.fromkeys(SCHEMES, 0.0)
    for head in range(case.heads_q):
        q, k, v = (t[:, :, head : head + 1] for t in inputs)
        q = q[:, :rows]
        want, _ = reference.attention(q, k, v)
        size += want.square().mean().item() / case.heads_q
        for scheme in list(squares):
            try:
                error = run(scheme, q, k, v).double() - want
                squares[scheme] += error.square().mean().item() / case.heads_q
            except NotImplementedError as reason:
                del squares[scheme]
                bar.clear()
                print(f"{scheme}: {reason}", file=sys.stderr)
        bar.at(bar.done + 1, f"seqlen {case.seqlen_k}, head {head + 1} of {case.heads_q}")
    rmse = {scheme: math.sqrt(square) for scheme, square in squares.items()}
    problem = {"problem": asdict(case), "rows": rows, "rms": math.sqrt(size), "rmse": rmse}
    return {"pass": "accuracy", "case": case.name, "data": "outliers", **problem}


def main(argv: list[str]) -> None:
    p = parser()
    args = p.parse_args(argv)
    if args.head_dim % 16 or args.head_dim > 256:
        p.error(f"--head-dim {args.head_dim}: FP8 allows the multiples of 16 up to 256")
    if args.device == "cuda" and not torch.cuda.is_available():
        p.error("--device cuda: torch finds no GPU; python -m cute_attn info says why")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    base = records.environment(device, [])
    base["command"] = records.command_line(["python scripts/fp8_accuracy.py", *argv])
    found = []
    with Progress(len(args.seqlen) * args.heads, "FP8 accuracy") as bar:
        for seqlen in args.seqlen:
            shape = seqlen, seqlen, args.head_dim, args.head_dim
            case = cases.Case(1, args.heads, args.heads, *shape)
            found.append(base | measure(case, args.rows, device, bar))
    if args.out:
        records.append(args.out, found)
    print(f"RMSE, {base['gpu'] or 'CPU'}, torch {torch.__version__}")
    print("\n".join(records.error_table(found)))


if __name__ == "__main__":
    main(sys.argv[1:])
