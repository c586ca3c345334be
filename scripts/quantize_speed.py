"""How fast quantize_qkv is beside a copy on the same GPU, and what a call costs the host.

python scripts/quantize_speed.py --out benchmarks/quantize-h200.jsonl

Device time as in `python -m cute_attn bench`. Bytes are those of q, k and v once and of what the
pack holds of them, scales included; the copy is of 1 GiB, read and written.
"""

import argparse
import sys
from pathlib import Path

sys.path.pop(0)  # scripts/ has a profile.py, as Python has
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from contextlib import nullcontext

import torch

import cute_attn
from cute_attn.tools import records
from cute_attn.tools.measure import FILL_BYTES, Timer, quantile

# batch, seqlen, query heads, KV heads, head_dim
SHAPES = (
    (4, 4096, 16, 16, 128),
    (1, 16384, 16, 16, 128),
    (8, 1024, 16, 16, 128),
    (4, 4096, 32, 8, 128),
    (4, 4096, 32, 32, 64),
    (4, 4096, 8, 8, 256),
)
VARIANTS = {
    "shifts and balance given": {},
    "given, no Hadamard": {"hadamard_seed": None},
    "given, fp8_hp": {"preset": "fp8_hp"},
    "all measured": {"k_shift": None, "v_shift": None, "qk_balance": None},
}


def calls_of(shape):
    """(name, call, bytes)s, a copy first."""
    batch, seqlen, heads_q, heads_kv, d = shape
    q, k, v = (
        torch.randn(batch, seqlen, h, d, device="cuda", dtype=torch.bfloat16)
        for h in (heads_q, heads_kv, heads_kv)
    )
    given = cute_attn.channel_statistics(q, k, v)._asdict()
    source = torch.empty(FILL_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    yield "copy", lambda: target.copy_(source), 2 * FILL_BYTES
    for name, options in VARIANTS.items():
        options = {**given, **options}

        def call(options=options):
            return cute_attn.quantize_qkv(q, k, v, **options)

        pack = call()
        out = (pack.q, pack.k, pack.v, pack.vt, pack.q_descale, pack.k_descale, pack.v_descale)
        yield name, call, sum(t.nbytes for t in (q, k, v, *out) if t is not None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each shape")
    parser.add_argument("--out", help="append records to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU: python -m cute_attn info says why")
    timer = Timer("cuda")
    where = records.environment("cuda", [], "fwd_fp8")
    where["command"] = records.command_line(["python scripts/quantize_speed.py", *sys.argv[1:]])
    print(f"{'':34}{'':28}{'us':>8}{'GB/s':>8}{'of copy':>9}{'host us':>9}")
    for shape in SHAPES:
        label = "b{}-s{}-h{}k{}-d{}".format(*shape)
        names, calls, sizes = zip(*calls_of(shape))
        scopes = [nullcontext] * len(calls)
        times = timer.rounds(calls, scopes, 200, options.seconds)
        hosts = timer.host(calls[1:], scopes[1:], 5, 50)
        host = [None, *(quantile(h, 0.5) for h in hosts)]
        rates = [n / quantile(t, 0.5) / 1e6 for n, t in zip(sizes, times)]
        for i, name in enumerate(names):
            ms = quantile(times[i], 0.5)
            record = {
                "shape": dict(zip(("batch", "seqlen", "heads_q", "heads_kv", "d"), shape)),
                "pass": "quantise",
                "case": label,
                "data": "normal",
                "impl": name,
                "ms": ms,
                "gb_per_s": rates[i],
                "of_copy": rates[i] / rates[0],
                "host_us": host[i],
            }
            if options.out:
                records.append(options.out, [{**where, **record}])
            shown = f"{host[i]:9.1f}" if host[i] else ""
            row = f"{ms * 1e3:8.1f}{rates[i]:8.0f}{rates[i] / rates[0]:9.3f}{shown}"
            print(f"{label:34}{name:28}{row}", flush=True)


if __name__ == "__main__":
    main()
