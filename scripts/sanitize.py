"""compute-sanitizer over small cases of each kernel family; exit status 1 if it finds anything.

python scripts/sanitize.py                      # memcheck, racecheck and synccheck
python scripts/sanitize.py --tool memcheck

A finding counts where it names one of our kernels: the runtime's own probing of driver entry points
also shows up as API errors. Small kernels beside a main one have the compiler's names.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "synccheck")
OURS = ("cute_attn_fwd", "cute_attn_bwd", "kernel_cutlass_")
HEAD_DIMS = (64, 96, 128, (192, 128), 256)
CASES = """
import torch, cute_attn
for dims in {dims}:
    d, dv = dims if isinstance(dims, tuple) else (dims, dims)
    for causal in (False, True):
        for sq, sk in ((200, 330), (65, 129)):
            q = torch.randn(2, sq, 4, d, device="cuda", dtype=torch.bfloat16)
            k = torch.randn(2, sk, 2, d, device="cuda", dtype=torch.bfloat16)
            v = torch.randn(2, sk, 2, dv, device="cuda", dtype=torch.bfloat16)
            v[0, sk - 1] = float("nan")  # takes the branch that confines it
            cute_attn.fwd(q, k, v, causal=causal)
            cute_attn.fwd(q * 30, k * 30, v, causal=causal)  # scores too rough to weigh at once
            v.nan_to_num_(0.0)
            if not cute_attn.explain(q, k, v, causal=causal, backward=True).refused:
                out, lse = cute_attn.fwd(q, k, v, causal=causal, return_lse=True)
                cute_attn.bwd(out, q, k, v, out, lse, causal=causal)
    q = torch.randn(2, 40, 4, d, device="cuda", dtype=torch.bfloat16)  # few queries: keys are split
    k = torch.randn(2, 2100, 2, d, device="cuda", dtype=torch.bfloat16)
    v = torch.randn(2, 2100, 2, dv, device="cuda", dtype=torch.bfloat16)
    assert cute_attn.explain(q, k, v).parts > 1
    cute_attn.fwd(q, k, v, causal=True)
torch.cuda.synchronize()
print("ran")
"""


def findings(text: str) -> list[str]:
    """The reports that name one of our kernels: a report begins where a line is not indented."""
    reports = re.split(r"^(?=={9} \S)", text, flags=re.MULTILINE)
    return [report for report in reports if any(name in report for name in OURS)]


def run(tool: str, seconds: int) -> bool:
    command = ["compute-sanitizer", "--tool", tool, sys.executable, "-c"]
    code = CASES.format(dims=HEAD_DIMS)
    try:
        done = subprocess.run(
            [*command, code], cwd=ROOT, capture_output=True, text=True, timeout=seconds
        )
    except FileNotFoundError:
        raise SystemExit("compute-sanitizer is not on the PATH: it comes with CUDA") from None
    except subprocess.TimeoutExpired:
        print(f"{tool}: not finished after {seconds} s")
        return False
    text = done.stdout + done.stderr
    found = findings(text)
    summary = re.findall(r"========= .*SUMMARY.*", text)
    print(f"{tool}: {len(found)} in our kernels; {'; '.join(summary) or 'no summary'}")
    for report in found[:5]:
        print(report.strip()[:2000])
    return "ran" in done.stdout and not found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", choices=TOOLS, action="append")
    parser.add_argument("--seconds", type=int, default=600, help="limit for one tool")
    options = parser.parse_args()
    clean = [run(tool, options.seconds) for tool in options.tool or TOOLS]
    return 0 if all(clean) else 1


if __name__ == "__main__":
    raise SystemExit(main())
