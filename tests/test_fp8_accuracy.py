"""Errors of FP8 against fp64, by data: not worse than a second implementation of the scheme in
tests/fp8_oracle.py on the same data, and below limits per set.

The limits are from a simulation of the scheme, plus 5 to 10 % for the choice of seeds. Errors are
of fp32 results: rounding them to bf16 would add to those of vbias, whose results are around 50.
FlashAttention-3's experiment (arXiv 2407.08608, section 4.3) depends on seqlen and head_dim: at
seqlen 1024 it is milder than at 8192, where its figure of 9.1e-3 is.
"""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fp8_oracle import attention, data, relative, rmse
from helpers import script

import cute_attn
from cute_attn import reference
from cute_attn.reference_fp8 import attention_fp8
from cute_attn.tools import cases, records
from cute_attn.tools.cases import Case

WORSE = 1.05  # than the oracle, whose signs differ
FA3_SIMULATED = {1024: 7.8e-3, 2048: 8.5e-3, 8192: 9.3e-3}  # head_dim 128, all in e4m3


def ours(q, k, v, **options):
    return attention_fp8(cute_attn.quantize_qkv(q, k, v, **options), out_dtype=torch.float32)[0]


def compare(kind, seqlen, preset, seeds=(0, 2), **sizes):
    """(our RMSE, the oracle's, rms of the answer) over several seeds. vbias: rms about the mean."""
    sums = torch.zeros(3, dtype=torch.float64)
    for seed in seeds:
        q, k, v = data(kind, seqlen, seed=seed, **sizes)
        want, _ = reference.attention(q, k, v)
        other = attention(q, k, v, hp=preset == "fp8_hp")
        size = want - want.mean(1, keepdim=True) if kind == "vbias" else want
        each = rmse(ours(q, k, v, preset=preset), want), rmse(other, want), rmse(size, 0 * size)
        sums += torch.tensor(each, dtype=torch.float64).square() / len(seeds)
    return sums.sqrt().tolist()


@pytest.mark.parametrize("preset", ["fp8", "fp8_hp"])
def test_fa3_experiment_at_1024(preset):
    got, other, _ = compare("fa3", 1024, preset, heads=4)
    limit = 1.1 * FA3_SIMULATED[1024] * (0.87 if preset == "fp8_hp" else 1)
    assert got <= WORSE * other and got <= limit, (got, other)


def test_fa3_experiment_at_2048():
    got, other, _ = compare("fa3", 2048, "fp8", heads=2, rows=1024)
    assert got <= WORSE * other and got <= 1.1 * FA3_SIMULATED[2048], (got, other)


@pytest.mark.slow
@pytest.mark.long
def test_fa3_experiment_at_8192():
    """The protocol's own size: 8 heads of 1024 rows."""
    for preset, limit in (("fp8", 9.6e-3), ("fp8_hp", 7.2e-3)):
        got, other, _ = compare("fa3", 8192, preset, seeds=(0,), heads=8, rows=1024)
        assert got <= WORSE * other, (preset, got, other)
        assert got <= limit, (preset, got)


LIMITS = {  # relative: (fp8, fp8_hp)
    "gauss": (0.057, 0.041),
    "kbias": (0.058, 0.042),
    "qkbias": (0.065, 0.053),
    "kzero": (0.060, 0.045),
    "vbias": (0.070, 0.051),
    "sink": (0.105, 0.095),
}


@pytest.mark.parametrize("preset", ["fp8", "fp8_hp"])
@pytest.mark.parametrize("kind", LIMITS)
def test_data_sets(kind, preset):
    got, other, size = compare(kind, 1024, preset, rows=512)
    assert got <= WORSE * other, (got, other)
    assert got / size <= LIMITS[kind][preset == "fp8_hp"], got / size


@pytest.mark.parametrize("causal", [False, True])
def test_causal_gqa_and_other_head_dims(causal):
    q, k, v = data("fa3", 512, dim=96, heads=4)
    k, v = k[:, :, ::2], v[:, :, ::2]
    want, _ = reference.attention(q, k, v, causal=causal)
    pack = cute_attn.quantize_qkv(q, k, v)
    got, _ = attention_fp8(pack, causal=causal, out_dtype=torch.float32)
    other = attention(q, *(t.repeat_interleave(2, 2) for t in (k, v)), causal=causal)
    assert rmse(got, want) <= 1.1 * rmse(other, want)


@pytest.mark.parametrize("kind, gain", [("kbias", 2), ("qkbias", 10), ("vbias", 8), ("fa3", 1.4)])
def test_preset_beats_casting_by_head(kind, gain):
    """The scales that FlashAttention-3's interface takes, on tensors as they are."""
    q, k, v = data(kind, 1024, rows=512)
    want, _ = reference.attention(q, k, v)
    plain = ours(q, k, v, hadamard_seed=None, k_shift=False, v_shift=False, k_block="head")
    assert gain * relative(ours(q, k, v), want) < relative(plain, want)


def test_scales_of_heads_serve_as_well_once_rotated():
    for kind in ("fa3", "kbias", "qkbias"):
        q, k, v = data(kind, 1024, rows=512)
        want, _ = reference.attention(q, k, v)
        blocks, heads = (relative(ours(q, k, v, k_block=b), want) for b in (128, "head"))
        assert heads < 1.1 * blocks


def test_rotation_without_rebalance_would_hurt():
    """K's wide channels, which Q damps, would spread over all: why the two go together."""
    q, k, v = data("kzero", 1024, rows=512)
    want, _ = reference.attention(q, k, v)
    balanced, not_balanced, neither = (
        relative(ours(q, k, v, **options), want)
        for options in ({}, {"qk_balance": torch.ones(2, 128)}, {"hadamard_seed": None})
    )
    assert not_balanced > 3 * balanced and balanced < neither


def test_shifts_of_earlier_data_serve_as_well():
    """As a running average gives them: another sequence's statistics, on a bias they share."""
    q, k, v = data("qkbias", 2048)
    stats = cute_attn.channel_statistics(q[:, :1024], k[:, :1024], v[:, :1024])._asdict()
    q, k, v = (t[:, 1024:] for t in (q, k, v))
    want, _ = reference.attention(q, k, v)
    measured, given = relative(ours(q, k, v), want), relative(ours(q, k, v, **stats), want)
    assert given < 1.1 * measured and math.isfinite(given)


def fp8_accuracy(*arguments):
    script = Path(__file__).resolve().parents[1] / "scripts" / "fp8_accuracy.py"
    command = [sys.executable, str(script), "--device", "cpu", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_script_records_what_it_prints(tmp_path):
    out = tmp_path / "r.jsonl"
    sizes = "--seqlen 256 300 --head-dim 64 --heads 2 --rows 64 --out".split()
    done = fp8_accuracy(*sizes, out)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if re.match(r"\| \d+ \|", line)]
    found = records.read([out])
    assert [r[1] for r in rows] == ["256", "300"] and len(found) == 2
    for row, record in zip(rows, found):
        errors = record["rmse"]
        shown = [float(cell.strip(" |")) for cell in row[4:]]
        assert shown == [float(f"{e:.2e}") for e in errors.values()]
        assert errors["bf16"] < errors["fp8_hp"] < errors["fp8"] < record["rms"]
        assert record["pass"] == "accuracy" and record["device"] == "cpu"
    case = Case(1, 2, 2, 256, 256, 64, 64)  # the same once more, by other ways
    q, k, v = cases.make_inputs(case, "outliers", "cpu")
    q = q[:, :64]
    error = rmse(cute_attn.fwd(q, k, v, preset="fp8"), reference.attention(q, k, v)[0])
    assert math.isclose(error, found[0]["rmse"]["fp8"], rel_tol=1e-3)


@pytest.mark.parametrize(
    "message, arguments",
    [
        ("0 is not positive", ["--heads", 0]),
        ("--head-dim 24: FP8 allows", ["--head-dim", 24]),
        ("--device cuda: torch finds no GPU", ["--device", "cuda"]),
    ],
)
def test_script_says_what_is_wrong(message, arguments):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = fp8_accuracy(*arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_report_takes_the_last_run_of_each_device():
    def record(day, device, **rmse):
        problem = {"head_dim": 64, "seqlen_k": 256, "heads_q": 2}
        where = {"device": device, "gpu": "NVIDIA H200" if device == "cuda" else None}
        run = {"time": f"2026-01-0{day}T00:00:00Z", "run": f"{day}", "command": "x", "versions": {}}
        base = {"case": "a", "pass": "accuracy", "driver": "1.2", "problem": problem, "rms": 0.1}
        return base | where | run | {"rmse": rmse}

    found = [record(2, "cpu", bf16=1e-4, fp8=2e-3), record(1, "cpu", bf16=0.5, fp8=0.5)]
    text = script("report").table_of("accuracy", [*found, record(3, "cuda", bf16=3e-4)])
    assert "CPU; NVIDIA H200, driver 1.2" in text and "0.5" not in text
    assert "| 64 | 256 | 2 | 0.100 | 1.00e-04 | 2.00e-03 |\n" in text
    assert "| 64 | 256 | 2 | 0.100 | 3.00e-04 | not built |\n" in text
    assert script("report").table_of("accuracy", []) == script("report").NOTHING
