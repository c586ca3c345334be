"""compute-sanitizer over small cases of each kernel family; exit status 1 if it finds anything.

python scripts/sanitize.py                      # memcheck, racecheck and synccheck
python scripts/sanitize.py --tool memcheck --family ampere

First the cases run without the sanitizer, shared out to all cores: that compiles their kernels.
Each call allocates from the driver, so that memory used after it was freed is seen.

A finding counts where it names one of our kernels: the runtime's own probing of driver entry points
also shows up as API errors. Small kernels beside a main one have the compiler's names.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.pop(0)  # scripts/ has a profile.py, as Python has
sys.path.insert(0, str(ROOT))

TOOLS = ("memcheck", "racecheck", "synccheck")
OURS = ("cute_attn_fwd", "cute_attn_bwd", "kernel_cutlass_")
LENGTHS = ((200, 330), (65, 129))
FEW = (40, 2100)  # few queries: keys are split
LONG = (130, 1100)  # sums of raw V are taken up in fp32 once on the way
# padded columns; two warpgroups' whole tiles; two widths; the widest
HEAD_DIMS = ((40, 40), (128, 128), (192, 128), (256, 256))
FP8_HEAD_DIMS = ((48, 80), (128, 128), (256, 256))
MASKS = (False, True)


class Case(NamedTuple):
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool
    heads_q: int = 4
    heads_kv: int = 2


def cases(family: str) -> list[Case]:
    dims = FP8_HEAD_DIMS if family == "fp8" else HEAD_DIMS
    found = [Case(*n, *d, causal) for d in dims for causal in MASKS for n in LENGTHS]
    if family == "hopper":
        found += [Case(*FEW, *d, True) for d in dims]
        # CTAs share tiles: with a causal mask of many query heads, without one in those above too
        found += [Case(200, 330, *d, True, 8, 1) for d in ((40, 40), (128, 128))]
    if family == "fp8":
        found += [Case(*LONG, *d, causal) for d in dims for causal in MASKS]
    return found


def tensors(case: Case, device: str = "cuda"):
    import torch

    sq, sk, d, dv, _, heads_q, heads_kv = case
    shapes = (2, sq, heads_q, d), (2, sk, heads_kv, d), (2, sk, heads_kv, dv)
    return tuple(torch.randn(s, device=device, dtype=torch.bfloat16) for s in shapes)


def call(case: Case, arch: str) -> None:
    """What the sanitizer watches of one case in 16 bits."""
    import cute_attn

    q, k, v = tensors(case)
    options = {"causal": case.causal, "arch": arch}
    v[0, -1] = float("nan")  # takes the branch that confines it
    cute_attn.fwd(q, k, v, **options)
    cute_attn.fwd(q * 30, k * 30, v, **options)  # scores too rough to weigh at once
    v.nan_to_num_(0.0)
    out, lse = cute_attn.fwd(q, k, v, return_lse=True, **options)
    for deterministic in (False, True):
        cute_attn.bwd(out, q, k, v, out, lse, deterministic=deterministic, **options)


def call_fp8(case: Case) -> None:
    """Of one in FP8: quantising, both presets, raw tensors, output in e4m3."""
    import torch

    import cute_attn

    q, k, v = tensors(case)
    for preset in ("fp8", "fp8_hp"):
        cute_attn.fwd(q, k, v, causal=case.causal, preset=preset)
    pack = cute_attn.quantize_qkv(q, k, v)
    e4m3 = torch.float8_e4m3fn
    cute_attn.fwd(pack, causal=case.causal, out_dtype=e4m3, return_amax=True)
    cute_attn.fwd(*(t.to(e4m3) for t in (q, k, v)), causal=case.causal)


FAMILIES = {
    "hopper": lambda case: call(case, "sm90"),
    "fp8": call_fp8,
    "ampere": lambda case: call(case, "sm80"),
}


def child(families: list[str], head_dims: list[int], first: int, step: int) -> None:
    """Every step-th case, in this process."""
    import torch

    from cute_attn import compile as jit

    every = [
        (FAMILIES[family], case)
        for family in families
        for case in cases(family)
        if not head_dims or case.head_dim in head_dims
    ]
    for run_case, case in every[first::step]:
        run_case(case)
    torch.cuda.synchronize()
    print(f"ran {len(every[first::step])} cases, {jit.count()} kernels compiled on the way")


def command(families: list[str], head_dims: list[int], first: int = 0, step: int = 1) -> list[str]:
    names = [word for family in families for word in ("--family", family)]
    names += [word for d in head_dims for word in ("--head-dim", str(d))]
    return [sys.executable, __file__, "--child", str(first), str(step), *names]


def compile_ahead(families: list[str], head_dims: list[int]) -> None:
    """Raises SystemExit if a case does not run at all."""
    n = min(os.cpu_count() or 1, sum(len(cases(family)) for family in families))
    started = [subprocess.Popen(command(families, head_dims, i, n), cwd=ROOT) for i in range(n)]
    if any([process.wait() for process in started]):
        raise SystemExit("a case fails without the sanitizer too")


def findings(text: str) -> list[str]:
    """The reports that name one of our kernels: a report begins where a line is not indented."""
    reports = re.split(r"^(?=={9} \S)", text, flags=re.MULTILINE)
    return [report for report in reports if any(name in report for name in OURS)]


def by_kernel(found: list[str]) -> dict[str, list[str]]:
    """By the first of our kernels that a report names."""
    table: dict[str, list[str]] = {}
    for report in found:
        name = next(word for word in re.findall(r"\w+", report) if word.startswith(OURS))
        table.setdefault(name, []).append(report)
    return table


def run(tool: str, families: list[str], head_dims: list[int], seconds: int) -> bool:
    sanitizer = ["compute-sanitizer", "--tool", tool, "--print-limit", "1000"]
    watched = [*sanitizer, *command(families, head_dims)]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            watched, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except FileNotFoundError:
        raise SystemExit("compute-sanitizer is not on the PATH: it comes with CUDA") from None
    except subprocess.TimeoutExpired:
        print(f"{tool}: not finished after {seconds} s")
        return False
    text = done.stdout + done.stderr
    found = findings(text)
    summary = re.findall(r"========= .*SUMMARY.*", text)
    ran = re.findall(r"^ran.*", done.stdout, flags=re.MULTILINE)
    print(f"{tool}: {len(found)} in our kernels; {'; '.join(summary) or 'no summary'}; {ran}")
    for name, reports in by_kernel(found).items():
        print(f"{name}: {len(reports)}, the first:\n{reports[0].strip()[:1000]}")
    if not ran:
        print(text[-2000:])
    return bool(ran) and not found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", choices=TOOLS, action="append")
    parser.add_argument("--family", choices=tuple(FAMILIES), action="append")
    parser.add_argument("--head-dim", type=int, action="append", help="of these cases alone")
    parser.add_argument("--seconds", type=int, default=600, help="limit for one tool")
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    what = options.family or list(FAMILIES), options.head_dim or []
    if options.child:
        child(*what, *options.child)
        return 0
    compile_ahead(*what)
    clean = [run(tool, *what, options.seconds) for tool in options.tool or TOOLS]
    return 0 if all(clean) else 1


if __name__ == "__main__":
    raise SystemExit(main())
