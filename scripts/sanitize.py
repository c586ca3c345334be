"""compute-sanitizer over small cases of each kernel family; exit status 1 if it finds anything.

python scripts/sanitize.py                      # memcheck, racecheck and synccheck
python scripts/sanitize.py --tool memcheck

Kernels are compiled before, without the sanitizer, from all cores. Each call allocates from the
driver, so that memory used after it was freed is seen.

A finding counts where it names one of our kernels: the runtime's own probing of driver entry points
also shows up as API errors. Small kernels beside a main one have the compiler's names.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.pop(0)  # scripts/ has a profile.py, as Python has
sys.path.insert(0, str(ROOT))

TOOLS = ("memcheck", "racecheck", "synccheck")
OURS = ("cute_attn_fwd", "cute_attn_bwd", "kernel_cutlass_")
# padded columns; two warpgroups' whole tiles; two widths; the widest: each pair takes 7 kernels
HEAD_DIMS = ((40, 40), (128, 128), (192, 128), (256, 256))
LENGTHS = ((200, 330), (65, 129))
FEW = (40, 2100)  # few queries: keys are split


def cases():
    """(seqlen_q, seqlen_k, head_dim, head_dim_v, causal)"""
    for dims in HEAD_DIMS:
        yield from ((*n, *dims, causal) for causal in (False, True) for n in LENGTHS)
        yield (*FEW, *dims, True)


def tensors(case, device):
    import torch

    sq, sk, d, dv, _ = case
    shapes = (2, sq, 4, d), (2, sk, 2, d), (2, sk, 2, dv)
    return tuple(torch.randn(s, device=device, dtype=torch.bfloat16) for s in shapes)


def explained(case, tensors, **options):
    import cute_attn

    return cute_attn.explain(*tensors, causal=case[-1], arch="sm90", **options)


def jobs():
    """The kernels that the cases run."""
    found = []
    for case in cases():
        meta = tensors(case, "meta")
        found.append(explained(case, meta))
        found += [explained(case, meta, backward=True, deterministic=x) for x in (False, True)]
    assert any(e.parts > 1 for e in found if hasattr(e, "parts"))
    return list(dict.fromkeys((e.problem.static(), e.config) for e in found))


def call(case):
    """What the sanitizer watches of one case."""
    import cute_attn

    q, k, v = tensors(case, "cuda")
    causal = case[-1]
    v[0, -1] = float("nan")  # takes the branch that confines it
    cute_attn.fwd(q, k, v, causal=causal)
    cute_attn.fwd(q * 30, k * 30, v, causal=causal)  # scores too rough to weigh at once
    v.nan_to_num_(0.0)
    out, lse = cute_attn.fwd(q, k, v, causal=causal, return_lse=True)
    for deterministic in (False, True):
        cute_attn.bwd(out, q, k, v, out, lse, causal=causal, deterministic=deterministic)


def child():
    import torch

    from cute_attn import compile as jit

    for case in cases():
        call(case)
    torch.cuda.synchronize()
    print(f"ran, {jit.count()} kernels compiled on the way")


def findings(text: str) -> list[str]:
    """The reports that name one of our kernels: a report begins where a line is not indented."""
    reports = re.split(r"^(?=={9} \S)", text, flags=re.MULTILINE)
    return [report for report in reports if any(name in report for name in OURS)]


def run(tool: str, seconds: int) -> bool:
    command = ["compute-sanitizer", "--tool", tool, sys.executable, __file__, "--child"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds
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
    for report in found[:5]:
        print(report.strip()[:2000])
    if not ran:
        print(text[-2000:])
    return bool(ran) and not found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", choices=TOOLS, action="append")
    parser.add_argument("--seconds", type=int, default=600, help="limit for one tool")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child()
        return 0
    from cute_attn.tools.compile import build_ahead

    build_ahead(jobs())
    clean = [run(tool, options.seconds) for tool in options.tool or TOOLS]
    return 0 if all(clean) else 1


if __name__ == "__main__":
    raise SystemExit(main())
