"""Errors of FP8 attention on FlashAttention-3's experiment, as a table.

    python scripts/fp8_accuracy.py                       # seqlen 1024 and 8192, head_dim 128
    python scripts/fp8_accuracy.py --seqlen 4096 --head-dim 64 --heads 2

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
from pathlib import Path

sys.path.pop(0)  # scripts/ has a profile.py, as Python has
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from torch import Tensor

import cute_attn
from cute_attn import reference
from cute_attn.tools.progress import Progress

SCHEMES = ("bf16", "fp8_hp", "fp8", "tensor")
E4M3_MAX = 448.0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--seqlen", type=int, nargs="+", default=[1024, 8192])
    p.add_argument("--head-dim", type=int, default=128)
    p.add_argument("--heads", type=int, default=8)
    p.add_argument("--rows", type=int, default=1024, help="queries a head, at most (%(default)s)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return p


def draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    hit = torch.rand(shape, generator=generator) < 0.001
    x = torch.randn(shape, generator=generator)
    return (x + 10 * torch.randn(shape, generator=generator) * hit).bfloat16()


def cast(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax() / E4M3_MAX
    return (x.float() / scale).to(torch.float8_e4m3fn), scale.reshape(1)


def run(scheme: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if scheme == "bf16":
        return cute_attn.fwd(q, k, v)
    if scheme != "tensor":
        return cute_attn.fwd(q, k, v, preset=scheme)
    (q, a), (k, b), (v, c) = map(cast, (q, k, v))
    return cute_attn.fwd(q, k, v, q_descale=a, k_descale=b, v_descale=c)


def measure(
    seqlen: int, args: argparse.Namespace, bar: Progress, done: int
) -> tuple[float, dict[str, float]]:
    """(rms of the answer, scheme -> RMSE); a scheme that is not built for the device is missing."""
    size, squares = 0.0, dict.fromkeys(SCHEMES, 0.0)
    for head in range(args.heads):
        generator = torch.Generator().manual_seed(1000 * args.seed + head)
        shape = 1, seqlen, 1, args.head_dim
        q, k, v = (draw(shape, generator).to(args.device) for _ in range(3))
        q = q[:, : args.rows]
        want, _ = reference.attention(q, k, v)
        size += want.square().mean().item()
        for scheme in list(squares):
            try:
                error = run(scheme, q, k, v).double() - want
                squares[scheme] += error.square().mean().item()
            except NotImplementedError as reason:
                del squares[scheme]
                bar.clear()
                print(f"{scheme}: {reason}", file=sys.stderr)
        bar.at(done + head + 1, f"seqlen {seqlen}, head {head + 1} of {args.heads}")
    mean = {scheme: math.sqrt(total / args.heads) for scheme, total in squares.items()}
    return math.sqrt(size / args.heads), mean


def main() -> None:
    args = parser().parse_args()
    lines = ["| seqlen | rms of O | " + " | ".join(SCHEMES) + " |", "|---" * 6 + "|"]
    with Progress(len(args.seqlen) * args.heads, "FP8 accuracy") as bar:
        for i, seqlen in enumerate(args.seqlen):
            size, found = measure(seqlen, args, bar, i * args.heads)
            cells = (f"{found[s]:.2e}" if s in found else "not built" for s in SCHEMES)
            lines.append(f"| {seqlen} | {size:.3f} | " + " | ".join(cells) + " |")
    where = torch.cuda.get_device_name(args.device) if "cuda" in args.device else args.device
    print(f"RMSE, head_dim {args.head_dim}, {args.heads} heads, {where}, torch {torch.__version__}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
