"""python -m cute_attn and scripts/: on this machine as it is, and with torch or the DSL missing."""

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, script

import cute_attn
from cute_attn import reference
from cute_attn.__main__ import COMMANDS
from cute_attn.__main__ import main as run
from cute_attn.config import FwdConfig
from cute_attn.problem import Problem
from cute_attn.tools import bench, cases, inspect, measure, peers, records
from cute_attn.tools.cases import Case
from cute_attn.tools.compile import build
from cute_attn.tools.progress import Progress


def python(*arguments, **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, cwd="/"
    )


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
import cute_attn
assert not {blocked!r} & {{m.split(".")[0] for m in sys.modules}}
from cute_attn.__main__ import main
sys.exit(main({argv!r}))
"""


def blocked(argv, *names, **environment):
    return python("-c", BLOCKED.format(blocked=set(names), argv=argv), **environment)


# info and the command line


def test_info_here():
    done = python("-m", "cute_attn", "info", CUTE_ATTN_CACHE_DIR="/nowhere/at/all")
    assert done.returncode == 0, done.stderr
    assert torch.__version__.split("+")[0] in done.stdout and "/nowhere/at/all" in done.stdout
    assert "cpu     runs the block-wise path" in done.stdout


def test_info_without_the_dsl():
    done = blocked(["info"], "cutlass", "tvm_ffi", "cuda")
    assert done.returncode == 0, done.stderr
    assert "cannot compile kernels: " in done.stdout and "No module named 'cutlass" in done.stdout


def test_info_without_torch_or_the_dsl():
    done = blocked(["info"], "torch", "cutlass", "tvm_ffi", "cuda", "numpy")
    assert done.returncode == 0, done.stderr
    assert "nothing runs: torch does not import" in done.stdout and "cache" in done.stdout


def test_info_without_a_home():
    env = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME")}
    env |= {"PYTHONPATH": str(ROOT), "CUTE_ATTN_CACHE_DIR": ""}
    command = [sys.executable, "-m", "cute_attn", "info"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["file", "below a file", "long name", "nobody's home"])
def test_info_says_that_kernels_are_not_kept(tmp_path, kind):
    (tmp_path / "file").write_text("")
    place = {
        "file": tmp_path / "file",
        "below a file": tmp_path / "file" / "below",
        "long name": tmp_path / ("x" * 300),
        "nobody's home": "~no_such_user/x",
    }[kind]
    done = python("-m", "cute_attn", "info", CUTE_ATTN_CACHE_DIR=str(place))
    assert done.returncode == 0, done.stderr
    assert ("not kept" in done.stdout) == (kind != "nobody's home")


def test_import_takes_neither_torch_nor_the_dsl():
    code = "import sys, cute_attn; print([m for m in ('torch', 'cutlass') if m in sys.modules])"
    assert python("-c", code).stdout.strip() == "[]"


def test_demo_without_the_dsl():
    """The README's first command must work where the DSL has no wheel."""
    done = blocked(["demo"], "cutlass", "tvm_ffi", "cuda")
    assert done.returncode == 0, done.stderr + done.stdout


def test_demo_without_torch_says_so():
    done = blocked(["demo"], "torch")
    assert done.returncode == 1 and "needs torch" in done.stderr and "Trace" not in done.stderr


def test_every_command_has_help(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit) as stop:
            run([name, "--help"])
        assert stop.value.code == 0
    capsys.readouterr()
    assert run([]) == 0 and all(name in capsys.readouterr().out for name in ("bench",))
    assert run(["nonsense"]) == 2


@pytest.mark.parametrize(
    "name", ["bench", "tune", "report", "dump", "profile", "fp8_accuracy", "quantize_speed"]
)
def test_scripts_start(name):
    """From scripts/ itself: its profile.py must not hide Python's module from torch."""
    done = python(str(ROOT / "scripts" / f"{name}.py"), "--help", PYTHONPATH="")
    assert done.returncode == 0, done.stderr


# cases and data


def test_main18_is_the_usual_grid():
    main = cases.CASES["main18"]
    assert len(main) == 18 and cases.CASES["ramp"] == main
    for c in main:
        assert c.batch * c.seqlen_q == 16384 and c.heads_q * c.head_dim == 2048
    assert not set(main) & set(cases.CASES["tuning"])
    again = ("ramp", "step")  # on other data, in another pass
    every = [c.name for name, group in cases.CASES.items() if name not in again for c in group]
    assert len(every) == len(set(every))


def test_flops():
    square = Case(2, 4, 4, 1024, 1024, 64, 64)
    assert square.flops() == 4 * 2 * 4 * 1024 * 1024 * 64
    assert replace(square, causal=True).flops() == square.flops() / 2
    assert replace(square, head_dim_v=128).flops() == square.flops() * 1.5
    last_row = Case(1, 1, 1, 1, 1000, 64, 64, True)
    assert last_row.flops() == pytest.approx(4 * 1000 * 64, rel=1e-3)


def test_parse_shape():
    text = "b=2,hq=8,hk=2,sq=100,sk=200,d=64,dv=128,causal=1,dtype=fp16"
    assert cases.parse_shape(text) == Case(2, 8, 2, 100, 200, 64, 128, True, "fp16")
    assert cases.parse_shape("b=1,hq=3,sq=5,d=8") == Case(1, 3, 3, 5, 5, 8, 8)


@pytest.mark.parametrize(
    "text",
    ["", "b=1", "b=1,hq=1,sq=1,d=7", "b=1,hq=1,sq=1,d=x", "b=1,hq=3,hk=2,sq=1,d=8", "q=1",
     "b=1,hq=1,sq=0,d=8", "b=1,hq=1,sq=1,d=8,dtype=fp8"],
)  # fmt: skip
def test_bad_shapes_are_refused(text, capsys):
    with pytest.raises(ValueError):
        cases.parse_shape(text)
    with pytest.raises(SystemExit):
        run(["bench", "--shape", text or ","])


def test_parse_config():
    base = FwdConfig()
    assert cases.parse_config("pick", base) == base == cases.parse_config("", base)
    changed = cases.parse_config("tile_n=96,schedule=static,pingpong=0", base)
    assert changed == replace(base, tile_n=96, schedule="static", pingpong=False)
    for wrong in ("tile=1", "tile_n", "tile_n=97", "pingpong=maybe", "schedule=best"):
        with pytest.raises(ValueError):
            cases.parse_config(wrong, base)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim, seqlen", [(8, 1024), (64, 1024), (128, 4096), (256, 16384)])
def test_ramp_moves_the_maximum_by_more_than_8_binades_in_every_block(dtype, head_dim, seqlen):
    case = Case(1, 2, 2, seqlen, seqlen, head_dim, head_dim, True, dtype)
    q, k, _ = cases.make_inputs(case, "ramp", "cpu")
    rows = cases.sample_rows(case, 16)
    scores = torch.einsum("rhd,khd->hrk", q[0, rows].double(), k[0].double())
    scores *= head_dim**-0.5 * 1.4426950408889634
    top = scores.unflatten(-1, (-1, 128)).amax(-1)  # (heads, rows, blocks), last block first
    rise = top[..., :-1] - top[..., 1:]
    assert rise.min() > 8 and rise.max() < 12


@pytest.mark.parametrize("data", cases.DATA)
def test_inputs_repeat(data):
    case = Case(1, 2, 1, 64, 96, 32, 16)
    first, second = (cases.make_inputs(case, data, "cpu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert [tuple(t.shape) for t in first] == [(1, 64, 2, 32), (1, 96, 1, 32), (1, 96, 1, 16)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(65, 65), (40, 130), (130, 40)])
def test_sampled_oracle_agrees_with_the_dense_one(causal, seqlen_q, seqlen_k):
    case = Case(2, 4, 2, seqlen_q, seqlen_k, 32, 64, causal)
    q, k, v = cases.make_inputs(case, "normal", "cpu")
    rows = cases.sample_rows(case, 20)
    assert rows[0] == 0 and rows[-1] == seqlen_q - 1 and len(rows) == 20
    expected = reference.attention(q, k, v, causal=causal)[0][:, rows]
    torch.testing.assert_close(cases.attention_rows(q, k, v, rows, causal=causal), expected)


def test_errors_see_a_wrong_and_a_bad_value():
    out = torch.ones(1, 10, 1, 4)
    rows, expected = torch.tensor([0, 9]), torch.ones(1, 2, 1, 4, dtype=torch.float64)
    assert cases.errors(out, rows, expected) == {"rel_error": 0, "max_error": 0, "finite": True}
    out[0, 5] = torch.nan  # a row that is not sampled
    assert not cases.errors(out, rows, expected)["finite"]
    out[0, 9, 0, 0] = 3
    assert cases.errors(out, rows, expected)["max_error"] == 2


# bench


def test_everyone_has_every_place_and_goes_both_ways():
    for n in (1, 2, 5):
        orders = [measure.order(n, turn) for turn in range(2 * n)]
        assert all(sorted(o) == list(range(n)) for o in orders)
        for place in range(n):
            seats = [o[place] for o in orders]
            assert all(seats.count(i) == 2 for i in range(n))
    after = {(a, b) for t in range(10) for o in [measure.order(5, t)] for a, b in zip(o, o[1:])}
    assert (0, 1) in after and (1, 0) in after


def test_a_call_on_the_gpu_has_a_fill_in_front_and_events_around():
    log = []

    class Event:
        def __init__(self, enable_timing):
            self.at = None

        def record(self):
            log.append("event")
            self.at = len(log)

        def elapsed_time(self, end):
            return end.at - self.at

        def query(self):
            return log[self.at] == "b"  # the GPU was there before b was queued

    def call(name):
        return lambda: log.append(name)

    cuda = SimpleNamespace(Event=Event, synchronize=lambda: log.append("wait"))
    timer = measure.Timer("cpu")
    timer.gpu, timer.torch = True, SimpleNamespace(cuda=cuda)
    timer.filler = SimpleNamespace(zero_=call("fill"))
    times = timer.rounds([call("a"), call("b")], [nullcontext] * 2, 1, 1.0)
    assert log == [*("fill", "event", "a", "event"), *("fill", "event", "b", "event"), "wait"]
    assert times == [[2], [2]] and timer.late == [0, 1]
    log.clear()
    timer.fills = 3
    timer.rounds([call("a")], [nullcontext], 1, 1.0)
    assert log == [*("fill", "fill", "fill", "event", "a", "event"), "wait"]


def test_rounds_end_with_the_time_but_never_before_three():
    timer, slow = measure.Timer("cpu"), lambda: time.sleep(0.01)
    assert len(timer.rounds([slow], [nullcontext], 100, 0.0)[0]) == 3
    assert len(timer.rounds([slow], [nullcontext], 2, 0.0)[0]) == 2
    assert timer.rounds([], [], 5, 1.0) == []


def test_quantile():
    assert measure.quantile([3, 1, 2], 0.5) == 2 and measure.quantile([1, 2], 0.25) == 1.25
    assert measure.quantile([7], 0.8) == 7


def test_bench_on_cpu(tmp_path, capsys):
    out = tmp_path / "deep" / "records.jsonl"
    arguments = ["--device", "cpu", "--impl", "ours,sdpa,fa3", "--cases", "smoke"]
    arguments += ["--rounds", "3", "--data", "normal,ramp", "--out", str(out)]
    arguments += ["--config", "pick", "--config", "tile_n=64"]
    assert run(["bench", *arguments]) == 0
    found = records.read([out])
    shown = capsys.readouterr().out
    assert len(found) == 2 * 2 * 4
    ours = [r for r in found if r["impl"] == "ours#2" and "full" in r["case"]]
    assert [r["data"] for r in ours] == ["normal", "ramp"]
    for r in ours:
        assert r["rel_error"] < 1e-2 and r["finite"] and r["config"]["tile_n"] == 64
        assert 0 < r["p20_ms"] <= r["p50_ms"] <= r["p80_ms"] and r["rounds"] == 3
        assert r["best_peer"] == "sdpa" and r["ratio"] > 0 and r["tflops"] > 0
        fields = ("time", "run", "command", "git", "source", "gpu", "driver", "versions", "problem")
        assert all(field in r for field in (*fields, "clocks"))
    assert all("error" in r for r in found if r["impl"] == "fa3")
    assert "fa3 did not run 4 cells" in shown and "geometric mean" in shown


def test_bench_host_mode(tmp_path, capsys):
    out = tmp_path / "host.jsonl"
    assert run(["bench", "--device", "cpu", "--cases", "host", "--impl", "ours", "--no-check",
                "--rounds", "2", "--out", str(out)]) == 0  # fmt: skip
    (record,) = records.read([out])
    assert record["p50_us"] > 0 and "p50_ms" not in record and "ratio" not in record


def test_bench_reports_a_config_that_cannot_be(capsys):
    shape = "b=1,hq=1,sq=64,d=256"
    assert run(["bench", "--device", "cpu", "--shape", shape, "--impl", "ours", "--rounds", "1",
                "--config", "tile_n=256,kv_stages=8"]) == 1  # fmt: skip
    assert "ours did not run" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(["bench", "--config", "tile_n=1"])
    with pytest.raises(SystemExit):
        run(["bench", "--impl", "theirs"])
    with pytest.raises(SystemExit):
        run(["bench", "--cases", "everything"])


def test_causal_peers_of_another_alignment_are_not_timed():
    case = Case(1, 1, 1, 8, 16, 8, 8, True)
    with pytest.raises(peers.Unavailable, match="top-left"):
        peers.PEERS["fa2"].prepare(case, *cases.make_inputs(case, "normal", "cpu"))


def test_a_broken_peer_does_not_end_the_run():
    def prepare(case, q, k, v):
        raise OSError("libbroken.so:\nundefined symbol")

    broken = peers.Implementation("broken", prepare, lambda out: out)
    case = Case(1, 1, 1, 8, 8, 8, 8)
    inputs = cases.make_inputs(case, "normal", "cpu")
    timer = measure.Timer("cpu")
    found, calls = bench.prepared([broken, peers.PEERS["sdpa"]], case, inputs, timer)
    assert found[0]["error"] == "OSError: libbroken.so:" and list(calls) == [1]


def test_ratio_is_against_the_best_peer():
    group = [
        {"impl": "ours", "ours": True, "p50_ms": 2.0},
        {"impl": "fa3", "ours": False, "p50_ms": 3.0},
        {"impl": "fa2", "ours": False, "p50_ms": 6.0},
        {"impl": "fa4", "ours": False, "error": "not here"},
    ]
    records.rate_against_peers(group)
    assert [r.get("ratio") for r in group] == [1.5, 1.0, 0.5, None]
    assert group[0]["best_peer"] == "fa3"
    alone = [{"impl": "ours", "ours": True, "p50_ms": 2.0}]
    records.rate_against_peers(alone)
    assert "ratio" not in alone[0]
    assert records.geometric_mean([2, 0.5]) == 1


def test_a_damaged_record_is_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n\n{"a": \n')
    with pytest.raises(ValueError, match="x.jsonl:3"):
        records.read([path])


def test_progress_line():
    bar = Progress(4, "work")
    bar.done, bar.note = 1, "cell"
    line = bar.line(bar.started + 10)
    assert "25%" in line and "30 s left" in line and "cell" in line and line.count("#") == 6


def test_fa_2205_an_installed_flash_attn_2_hides_nothing(tmp_path):
    """Its top-level package is regular and has no `cute`: flash-attn 4 cannot be found then, which
    is one peer's error; cute_attn and the other peers do not notice."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("__version__ = '2.8.3'\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    code = "import flash_attn, cute_attn; print(flash_attn.__version__, cute_attn.__version__)"
    assert python("-c", code, PYTHONPATH=path).stdout.split() == ["2.8.3", cute_attn.__version__]
    bench = ["bench", "--device", "cpu", "--shape", "b=1,hq=1,sq=64,d=64", "--rounds", "1"]
    done = python("-m", "cute_attn", *bench, "--impl", "ours,sdpa,fa2,fa4", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    (missing,) = [line for line in done.stdout.splitlines() if "did not run" in line]
    assert missing.startswith("fa4") and missing.endswith("No module named 'flash_attn.cute'")


# compile


@pytest.mark.compile
def test_compile_command_fills_the_cache(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path))
    assert run(["compile", "--shape", "b=1,hq=1,sq=1,d=32", "--jobs", "1"]) == 0
    assert "registers" in capsys.readouterr().out and list(tmp_path.glob("*.o"))


def test_a_failed_build_is_reported():
    built = build((Problem("bf16", 64, 64), FwdConfig()), "sm42")
    assert "sm42" in built.error and built.resources is None


# looking at kernels

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 BRA `(.L_x_9) ;
.L_x_1:
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24 ;
        /*0030*/                   MUFU.EX2 R3, R4 ;
        /*0040*/              @!P0 BRA `(.L_x_8) ;
.L_x_2:
        /*0050*/                   FADD R3, R3, R4 ;
        /*0060*/               @P1 BRA `(.L_x_1) ;
        /*0070*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24 ;
        /*0080*/               @P2 BRA `(.L_x_1) ;
.L_x_9:
        /*0090*/                   EXIT ;
.L_x_8:
        /*00a0*/                   NANOSLEEP 0x20 ;
        /*00b0*/              @!P0 BRA `(.L_x_8) ;
        /*00c0*/                   BRA `(.L_x_2) ;
"""


def test_main_loop_is_found_and_waiting_is_not_taken_for_one():
    code = list(inspect.instructions(SASS))
    assert len(code) == 13
    (loop,) = inspect.mma_loops(code)
    counts = inspect.count(loop)
    assert counts["HGMMA"] == 2 and counts["MUFU.EX2"] == 1 and counts["NANOSLEEP"] == 1
    assert counts["EXIT"] == 0 and counts["LDC"] == 0


def test_an_object_without_a_cubin_is_refused():
    with pytest.raises(ValueError):
        inspect.cubin_of_object(b"\x7fELF and nothing else")


@pytest.mark.compile
def test_dump_writes_what_it_says(tmp_path, capsys):
    dump = script("dump")
    assert dump.main(["--shape", "b=1,hq=1,sq=1,d=32", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "registers" in shown and "HGMMA" in shown and "#1 loop 1" in shown
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".cubin", ".json", ".ptx", ".sass"]
    assert "wgmma.mma_async" in next(tmp_path.glob("*.ptx")).read_text()


def test_profile_prints_its_command(capsys):
    profile = script("profile")
    assert profile.main(["--print", "--config", "tile_n=96", "--out", "r"]) == 0
    command = capsys.readouterr().out
    assert "--clock-control none" in command and "tile_n=96" in command and "--export r" in command
    raw = '==PROF== x\n"ID","dram__bytes.sum"\n"","byte"\n"0","12"\n'
    assert any("DRAM bytes" in line and "12 byte" in line for line in profile.table(raw))


# report


def fake_records(loss):
    """Two runs of main18; ours wins by 1.1 but for one cell."""
    found = []
    for run_id in ("a", "b"):
        for n, case in enumerate(cases.CASES["main18"]):
            ratio = loss if n == 0 else 1.1
            group = [
                {"impl": "ours", "ours": True, "p50_ms": 1.0},
                {"impl": "fa3", "ours": False, "p50_ms": ratio},
                {"impl": "cudnn", "ours": False, "p50_ms": 2.0},
            ]
            records.rate_against_peers(group)
            for r in group:
                r |= {"case": case.name, "data": "normal", "run": run_id, "command": "bench x"}
                r |= {"tflops": case.flops() / r["p50_ms"] * 1e-9, "gpu": "NVIDIA H200"}
                r |= {"driver": "1.2", "time": "2026-01-02T03:04:05Z", "versions": {"torch": "2"}}
            found += group
    return found


def test_report_shows_losses():
    report = script("report")
    text = report.compact(fake_records(0.9))
    assert "**0.900× ▼**" in text and "lost: d64-s1024-full-b16h32." in text
    assert "2 runs, 2026-01-02" in text and "`bench x`" in text and "NVIDIA H200" in text
    assert "no cell lost" in report.compact(fake_records(1.0))
    full = report.full(fake_records(0.9), "main18", "normal")
    assert "| cell | ours | cudnn | fa3 | ours / best peer |" in full and "▼" in full
    assert report.full(fake_records(0.9), "main18", "ramp") == report.NOTHING


def test_report_takes_the_newest_code():
    report = script("report")
    old, new = fake_records(0.5), fake_records(1.3)[:6]
    for r in new:
        r |= {"time": "2026-02-02T03:04:05Z", "source": "changed"}
    kept = report.newest(old + new)
    assert len(kept) == len(old) - 2 * 6 + 6, "two cells lose both old runs and get one new one"
    assert all(r in kept for r in new)


def test_report_replaces_only_what_is_between_markers():
    report = script("report")
    text = "a\n<!-- report:compact -->\nold\n<!-- /report -->\nb\n"
    new = report.regenerate(text, fake_records(1.2))
    assert new.startswith("a\n<!-- report:compact -->\n`bench x`") and new.endswith("-->\nb\n")
    assert "old" not in new and report.regenerate(new, fake_records(1.2)) == new


def test_report_tables_are_those_of_the_committed_records():
    done = python(str(ROOT / "scripts" / "report.py"), "--check", PYTHONPATH="")
    assert done.returncode == 0, done.stdout


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    script("report").plot(fake_records(0.9), tmp_path / "x.svg")
    assert (
        "head_dim 128, causal" in (tmp_path / "x.svg").read_text()
        or (tmp_path / "x.svg").stat().st_size > 10000
    )


def test_records_are_plain_json(tmp_path):
    path = tmp_path / "r.jsonl"
    records.append(path, [records.environment("cpu", ["bench"])])
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["command"] == "python -m cute_attn bench"


def test_recorded_commands_name_no_place_on_a_machine():
    words = ["bench", "--out", "/root/out/x.jsonl", "--json=/root/y.jsonl", "--shape", "b=1,hq=2"]
    words += ["benchmarks/z.jsonl", "/root/tests/test_a.py::test_b", "--config", "pick"]
    assert records.environment("cpu", words)["command"] == (
        "python -m cute_attn bench --out x.jsonl --json=y.jsonl --shape b=1,hq=2 "
        "benchmarks/z.jsonl test_a.py::test_b --config pick"
    )


def test_recorded_errors_name_no_place_on_a_machine():
    text = "cannot import name 'f' from 'm' (/root/venv/lib/m.py), see https://a.b/c/d or b/c: 1/2"
    assert records.error_line(ImportError(text + "\nmore")) == (
        "ImportError: cannot import name 'f' from 'm' (m.py), see https://a.b/c/d or b/c: 1/2"
    )


SANITIZER = """ran
========= COMPUTE-SANITIZER
========= Program hit cudaErrorInvalidValue (error 1) on CUDA API call to cudaGetSymbol.
=========     Saved host backtrace up to driver entry point at error
========= {report}
=========     at {kernel}+0x1230
=========     by thread (3,0,0) in block (0,0,0)
========= ERROR SUMMARY: 2 errors
"""


@pytest.mark.parametrize(
    "report",
    [
        "Invalid __global__ read of size 4 bytes",
        "Error: Race reported between Read access and Write access [8 hazards]",
        "Barrier error detected. Divergent thread(s) in warp",
        "Illegal instruction",
    ],
)
def test_sanitizer_reports_are_found_in_our_kernels_alone(report):
    findings = script("sanitize").findings
    for kernel in (
        "cute_attn_fwd_sm90_bf16_d64_0",
        "cute_attn_bwd_1",
        "kernel_cutlass_finish_dq_2",
    ):
        ours = findings(SANITIZER.format(report=report, kernel=kernel))
        assert len(ours) == 1 and report in ours[0] and "cudaError" not in ours[0]
    assert findings(SANITIZER.format(report=report, kernel="at::native::fill")) == []
