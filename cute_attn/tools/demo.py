"""python -m cute_attn demo: the main job on whatever this machine is.

On a Hopper GPU: the kernel, its error against fp64 and its rate beside torch's. Without one: the
block-wise path on the CPU, its error, and what would be compiled.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from cute_attn.tools import cases, measure, peers
from cute_attn.tools.cases import Case

GPU_CASES = tuple(
    cases.standard(d, 4096, causal) for d in (64, 128, 256) for causal in (False, True)
)
CPU_CASES = (
    Case(1, 4, 4, 512, 512, 64, 64),
    Case(1, 8, 2, 512, 512, 128, 128, True),
    Case(1, 4, 1, 300, 700, 128, 96, True),
    Case(1, 2, 2, 256, 256, 256, 256, False, "fp16"),
)


def kernels_run_here() -> bool:
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0))


def describe(case: Case) -> str:
    heads = f"{case.heads_q} heads" + (
        f" on {case.heads_kv}" if case.heads_kv != case.heads_q else ""
    )
    width = f"{case.head_dim}" + (f"/{case.head_dim_v}" if case.head_dim_v != case.head_dim else "")
    length = f"{case.seqlen_q}x{case.seqlen_k}"
    mask = "causal" if case.causal else "full"
    return f"{case.dtype} {case.batch}x {length:11} {heads:12} head_dim {width:7} {mask:6}"


def checked(case: Case, device: str) -> tuple[Any, dict[str, Any], float]:
    """(inputs, errors of fwd against fp64, seconds of the first call)."""
    import torch

    import cute_attn

    q, k, v = cases.make_inputs(case, "normal", device)
    start = time.perf_counter()
    out = cute_attn.fwd(q, k, v, causal=case.causal)
    if device == "cuda":
        torch.cuda.synchronize()
    first = time.perf_counter() - start
    rows = cases.sample_rows(case)
    expected = cases.attention_rows(q, k, v, rows, causal=case.causal)
    return (q, k, v), cases.errors(out, rows, expected), first


def torch_error(case: Case, inputs: tuple[Any, Any, Any], call: Any, scope: Any) -> float:
    rows = cases.sample_rows(case)
    expected = cases.attention_rows(*inputs, rows, causal=case.causal)
    with scope():
        out = call().transpose(1, 2)
    return float(cases.errors(out, rows, expected)["rel_error"])


def on_gpu(rounds: int) -> bool:
    import torch

    timer = measure.Timer("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("relative error is against fp64; TFLOP/s is device time, ours and torch interleaved\n")
    good = True
    for case in GPU_CASES:
        inputs, found, first = checked(case, "cuda")
        calls, scopes = [peers.ours().prepare(case, *inputs)], [peers.ours().scope]
        sdpa = peers.PEERS["sdpa"]
        calls.append(sdpa.prepare(case, *inputs))
        scopes.append(sdpa.scope)
        theirs = torch_error(case, inputs, calls[1], sdpa.scope)
        times = timer.rounds(calls, scopes, rounds, 2.0)
        rates = [case.flops() / measure.quantile(t, 0.5) * 1e-9 for t in times]
        right = acceptable(found, theirs)
        good &= right
        print(
            f"{describe(case)}  error {found['rel_error']:.1e} (torch {theirs:.1e})  "
            f"{rates[0]:4.0f} TFLOP/s (torch {rates[1]:4.0f}, {rates[0] / rates[1]:.2f}x)  "
            f"first call {first:.1f} s{'' if right else '  WRONG'}",
            flush=True,
        )
    return good


def acceptable(found: dict[str, Any], theirs: float) -> bool:
    """Twice the error of torch in the same dtype, plus a floor."""
    return bool(found["finite"]) and found["rel_error"] <= 2 * theirs + 1e-3


def on_cpu() -> bool:
    import torch

    import cute_attn

    print(f"No Hopper GPU here: the block-wise path in torch {torch.__version__} runs instead.")
    print("It is the kernel's algorithm (same blocks, same online softmax) and its oracle.\n")
    good = True
    for case in CPU_CASES:
        inputs, found, seconds = checked(case, "cpu")
        right = acceptable(found, 3e-3)
        good &= right
        print(
            f"{describe(case)}  error against fp64 {found['rel_error']:.1e}  "
            f"{seconds * 1e3:.0f} ms{'' if right else '  WRONG'}"
        )
    case, (q, k, v) = CPU_CASES[1], cases.make_inputs(CPU_CASES[1], "normal", "cpu")
    print("\nWhat a Hopper GPU would run for the second of them:")
    print(cute_attn.explain(q, k, v, causal=case.causal, arch="sm90"))
    print("\npython -m cute_attn compile builds it here, for use there.")
    return good


def main(argv: Sequence[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m cute_attn demo", description=__doc__)
    p.add_argument("--rounds", type=int, default=30, help="timed calls a case (%(default)s)")
    p.add_argument("--cpu", action="store_true", help="the CPU path on a GPU machine too")
    args = p.parse_args(argv)
    try:
        import torch
    except ImportError as error:
        print(f"the demo needs torch ({error}): pip install torch", file=sys.stderr)
        return 1
    with torch.no_grad():
        good = on_gpu(args.rounds) if kernels_run_here() and not args.cpu else on_cpu()
    print("\nall results are right" if good else "\nsome results are WRONG")
    return 0 if good else 1
