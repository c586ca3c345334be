"""scripts/train_tiny_gpt.py: both implementations learn the same; a broken one is noticed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cute_attn

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "train_tiny_gpt.py"


def load(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script takes its own folder off
    spec = importlib.util.spec_from_file_location("train_tiny_gpt", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(SCRIPT.parent))
    monkeypatch.setitem(sys.modules, "train_tiny_gpt", module)  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def command(*options):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # more wait for each other on a busy machine
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], env=env, capture_output=True, text=True, cwd="/"
    )


def trained(tmp_path, *options):
    """The record of a run that has to succeed."""
    file = tmp_path / "record.jsonl"
    done = command("--json", str(file), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens/s" in done.stdout and "within noise" in done.stdout
    (line,) = file.read_text().splitlines()
    return json.loads(line)


def check(record, close, preset=None, preset_close=0.0):
    if preset:
        run = record["runs"].pop()
        ours = record["runs"][1]
        assert run["impl"] == f"cute_attn/{preset}" and record["training"]["preset"] == preset
        assert run["losses"] != ours["losses"]  # or nothing was rounded
        np.testing.assert_allclose(run["losses"], ours["losses"], atol=preset_close)
        assert run["validation_loss"] == pytest.approx(ours["validation_loss"], abs=preset_close)
        assert 0 < record["preset_gap"] < preset_close and "source_fp8" in record
    else:
        assert "preset_gap" not in record
    assert record["within_noise"] and record["gap"] <= 2 * record["noise"]
    assert 0 < record["noise"] < close
    names = [run["impl"] for run in record["runs"]]
    assert names[:2] == ["sdpa", "cute_attn"] and len(names) == 6
    sdpa, ours = record["runs"][:2]
    for run in (sdpa, ours):
        assert run["losses"][0] == pytest.approx(np.log(256), abs=0.3)  # knows nothing yet
        assert run["training_loss"] < run["losses"][0] - 0.5
        assert run["validation_loss"] < run["losses"][0] - 0.5
        assert run["tokens_per_s"] > 0
    assert ours["losses"][0] == pytest.approx(sdpa["losses"][0], abs=2e-3)  # the same weights
    np.testing.assert_allclose(ours["losses"], sdpa["losses"], atol=close)
    assert ours["validation_loss"] == pytest.approx(sdpa["validation_loss"], abs=close)


def test_both_learn_the_same_on_the_cpu(tmp_path):
    record = trained(tmp_path, "--cpu", "--steps", "16", "--batch", "8")
    assert record["device"] == "cpu"
    check(record, close=0.01)


@pytest.mark.parametrize("preset", ["fp8", "fp8_hp"])
def test_fp8_learns_as_bf16_does_on_the_cpu(tmp_path, preset):
    plot = tmp_path / "loss.svg"
    options = ["--cpu", "--steps", "16", "--batch", "8", "--preset", preset]
    if importlib.util.find_spec("matplotlib"):
        options += ["--out", str(plot)]
    record = trained(tmp_path, *options)
    check(record, 0.01, preset, 0.02)
    assert not plot.exists() or f"cute_attn/{preset}" in plot.read_text()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [(), ("--compile",)], ids=["eager", "compiled"])
def test_fp8_learns_as_bf16_does_on_the_gpu(tmp_path, compiled):
    options = ("--steps", "40", "--layers", "4", "--width", "256", "--heads", "2")
    record = trained(tmp_path, *options, "--seqlen", "512", "--preset", "fp8", *compiled)
    check(record, 0.1, "fp8", 0.15)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [4, 2], ids=["head_dim 64", "head_dim 128"])
def test_both_learn_the_same_on_the_gpu(tmp_path, heads):
    options = ("--steps", "40", "--layers", "4", "--width", "256", "--seqlen", "512")
    record = trained(tmp_path, *options, "--heads", str(heads), "--batch", "16")
    assert record["device"] == "cuda"
    check(record, close=0.1)


@pytest.mark.gpu
def test_compiled_blocks_learn_the_same_on_the_gpu(tmp_path):
    options = ("--steps", "40", "--layers", "2", "--width", "256", "--heads", "4")
    check(trained(tmp_path, *options, "--seqlen", "512", "--compile"), close=0.1)


def test_curves_of_a_wrong_gradient_part(monkeypatch, capsys):
    script = load(monkeypatch)

    def no_gradient_of_v(q, k, v):
        return cute_attn.flash_attn_func(q, k, v.detach(), causal=True)

    monkeypatch.setattr(script, "attend_ours", no_gradient_of_v)
    assert script.main(["--cpu", "--steps", "12", "--batch", "8"]) == 1
    assert "curves PART" in capsys.readouterr().out


def test_a_gap_that_is_not_a_number_is_no_agreement(monkeypatch):
    script = load(monkeypatch)
    a, b, c = (script.Run(n, np.full(9, x), 1.0, 1.0) for n, x in
               (("sdpa", 1.0), ("cute_attn", np.nan), ("sdpa/math", 1.1)))  # fmt: skip
    assert not script.compare([a, b, c]).within
    b.losses[:] = 1.15
    assert script.compare([a, b, c]).within
    d = script.Run("cute_attn/fp8", np.full(9, 5.0), 1.0, 1.0)  # seen, and not judged
    assert script.compare([a, b, c, d]).within and script.compare([a, b, c, d]).preset_gap == 4.0
    b.losses[:] = 1.25
    assert not script.compare([a, b, c]).within
    c.losses[-1] = np.inf
    assert not script.compare([a, b, c]).within
    assert script.compare([a, c]) is None and script.compare([a, b]) is None


@pytest.mark.parametrize(
    "message, options",
    [
        ("--impl has 'fa9'", "--impl fa9"),
        ("no multiple of --heads 3", "--heads 3"),
        ("head_dim is then 4", "--width 8 --heads 2"),
        ("--preset fp8: head_dim is 8, no multiple of 16", "--preset fp8 --width 16"),
        ("argument --preset: invalid choice: 'int4'", "--preset int4"),
        ("argument --steps: 0 is not positive", "--steps 0"),
        ("argument --layers: invalid", "--layers x"),
        ("do not hold a sequence", "--seqlen 100000000"),
        ("--lr is -1.0", "--lr -1"),
        ("--lr is nan", "--lr nan"),
        ("--seed is", "--seed 99999999999999999999"),
        (".svg or .png", "--out loss.txt"),
        ("No such file", "--text /nowhere/to/be/found"),
    ],
)
def test_wrong_options_are_named(monkeypatch, capsys, message, options):
    script = load(monkeypatch)
    with pytest.raises(SystemExit) as exit:
        script.main(["--cpu", *options.split()])
    assert exit.value.code == 2 and message in capsys.readouterr().err


def test_plot_without_matplotlib_says_how_to_get_it(monkeypatch, capsys):
    script = load(monkeypatch)
    monkeypatch.setattr(script, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        script.main(["--cpu", "--out", "loss.svg"])
    assert "pip install -e '.[plot]'" in capsys.readouterr().err


def test_one_alone_is_compared_with_nothing(monkeypatch, capsys, tmp_path):
    script = load(monkeypatch)
    text = tmp_path / "text"
    text.write_bytes(b"to be or not to be, " * 400)
    assert script.main(["--cpu", "--impl", "cute_attn", "--steps", "3", "--text", str(text)]) == 0
    out = capsys.readouterr().out
    assert "cute_attn" in out and "sdpa" not in out and "8000 bytes" in out


def test_a_record_is_plotted_again(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run = {"validation_loss": 1.0, "tokens_per_s": 5000}
    runs = [
        {"impl": name, "losses": [3.0 - 0.01 * i for i in range(40)]} | run
        for name in ("sdpa", "cute_attn", "sdpa/math", "cute_attn/fp8")
    ]
    training = {"layers": 2, "width": 64, "seqlen": 128}
    records, picture = tmp_path / "training.jsonl", tmp_path / "loss.svg"
    records.write_text(json.dumps({"runs": runs, "training": training, "gpu": None}) + "\n")
    train = load(monkeypatch)
    assert train.main(["--replot", str(records), "--out", str(picture)]) == 0
    assert picture.read_text().count("<svg") == 1
    with pytest.raises(SystemExit):
        train.main(["--replot", str(records)])
    assert "--replot needs --out" in capsys.readouterr().err
