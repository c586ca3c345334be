"""scripts/sanitize.py without a GPU: which kernels its cases run, and what it starts."""

import sys
from functools import partial

import pytest

torch = pytest.importorskip("torch")

import standin_fp8  # noqa: E402
from helpers import script  # noqa: E402

import cute_attn  # noqa: E402
from cute_attn import launch  # noqa: E402
from cute_attn.config import BwdConfig, Fp8Config, FwdConfig  # noqa: E402
from cute_attn.problem import Fp8Problem  # noqa: E402


def test_sanitizer_runs_every_kind_of_kernel(stand_in, monkeypatch):
    sanitize = script("sanitize")
    monkeypatch.setattr(sanitize, "tensors", partial(sanitize.tensors, device="cpu"))
    for family, arch in (("hopper", "sm90"), ("ampere", "sm80")):
        monkeypatch.setattr(launch, "_native_arch", lambda device, arch=arch: arch)
        stand_in.built.clear()
        for case in sanitize.cases(family):
            sanitize.FAMILIES[family](case)
        configs = {type(c) for _, c, _ in stand_in.built}
        assert len(stand_in.built) <= 32 and len(configs) == 2
        backward = {c.deterministic for _, c, _ in stand_in.built if hasattr(c, "deterministic")}
        assert backward == {False, True}
        if family == "hopper":
            assert configs == {FwdConfig, BwdConfig}
            assert any(c.split_kv for _, c, _ in stand_in.built if isinstance(c, FwdConfig))
            wide = {c.wide(p) for p, c, _ in stand_in.built if isinstance(c, BwdConfig)}
            assert wide == {False, True}
            assert {parts_of(case) for case in sanitize.cases(family)} >= {(False, 2), (True, 4)}


def parts_of(case):
    """The mask, and how many CTAs share a tile of the backward."""
    shapes = (
        (2, case.seqlen_q, case.heads_q, case.head_dim),
        (2, case.seqlen_k, case.heads_kv, case.head_dim),
        (2, case.seqlen_k, case.heads_kv, case.head_dim_v),
    )
    q, k, v = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes)
    explained = cute_attn.explain(q, k, v, causal=case.causal, arch="sm90", backward=True)
    return case.causal, explained.parts


def test_sanitizer_runs_fp8_of_every_kind(stand_in, monkeypatch):
    sanitize = script("sanitize")
    standin_fp8.install_forward(monkeypatch, stand_in)
    monkeypatch.setattr(sanitize, "tensors", partial(sanitize.tensors, device="cpu"))
    for case in sanitize.cases("fp8"):
        sanitize.FAMILIES["fp8"](case)
    problems = {p for p, c, _ in stand_in.built if isinstance(p, Fp8Problem)}
    assert {p.v_dtype for p in problems} == {"e4m3", "bf16"}
    assert {p.dtype for p in problems} == {"bf16", "e4m3"}
    assert any(c.promote for _, c, _ in stand_in.built if isinstance(c, Fp8Config))


def test_sanitizer_runs_cases_first_and_fails_where_the_child_does(monkeypatch, capsys, tmp_path):
    sanitize, calls = script("sanitize"), []
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho "$@" $PYTORCH_NO_CUDA_MEMORY_CACHING\n$RUN\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sanitize, "compile_ahead", lambda *what: calls.append(what))
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--tool", "memcheck", "--family", "fp8"])
    for command, status in (("echo ran", 0), ("echo crashed", 1)):
        monkeypatch.setenv("RUN", command)
        assert sanitize.main() == status
    assert calls == [(["fp8"], [])] * 2
    shown = capsys.readouterr().out
    assert "--tool memcheck" in shown and "--child 0 1 --family fp8" in shown
    assert "0 in our kernels" in shown


def test_sanitizer_shares_cases_out_to_processes(monkeypatch):
    sanitize = script("sanitize")
    program = "import sys; sys.exit(sys.argv[1:] == ['1', '3'])"
    monkeypatch.setattr(sanitize.os, "cpu_count", lambda: 3)
    monkeypatch.setattr(
        sanitize,
        "command",
        lambda families, dims, i, n: [sys.executable, "-c", program, str(i), str(n)],
    )
    with pytest.raises(SystemExit, match="without the sanitizer"):
        sanitize.compile_ahead(["hopper"], [])
    monkeypatch.setattr(sanitize.os, "cpu_count", lambda: 1)
    sanitize.compile_ahead(["hopper"], [])


def test_sanitizer_names_each_kernel_with_findings(monkeypatch, capsys, tmp_path):
    sanitize = script("sanitize")
    tool = tmp_path / "compute-sanitizer"
    report = "========= Error: Race at cute_attn_fwd_{0}+0x10\n=========     and at x\n"
    reports = "".join(report.format(name) for name in ("a", "b", "a"))
    (tmp_path / "reports").write_text("ran 1 cases\n" + reports)
    tool.write_text(f"#!/bin/sh\n/bin/cat {tmp_path}/reports\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not sanitize.run("racecheck", ["hopper"], [40], 60)
    shown = capsys.readouterr().out
    assert "racecheck: 3 in our kernels" in shown
    assert "cute_attn_fwd_a: 2, the first" in shown and "cute_attn_fwd_b: 1, the first" in shown
