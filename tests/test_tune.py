"""python -m cute_attn tune: what is tried, how it is ranked, what is written into tuning.py."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from cute_attn import tuning
from cute_attn.__main__ import main as run
from cute_attn.config import FwdConfig
from cute_attn.problem import Problem
from cute_attn.tools import demo, tune
from cute_attn.tools.cases import Case
from cute_attn.tools.compile import Built


def test_config_source_reads_back():
    written = [config for row in tuning.FORWARD for config in row[2:]]
    for config in (*tuning.candidates(Problem("bf16", 64, 64)), FwdConfig(), *written):
        assert eval(tune.config_source(config)) == config


def test_no_candidate_is_another_in_other_words():
    tried = list(tuning.candidates(Problem("bf16", 64, 64)))
    meant = {replace(config, q_slots=config.q_ring, v_stages=config.v_ring) for config in tried}
    assert len(meant) == len(tried) and {config.q_slots for config in tried} >= {0, 2, 3}


def test_tune_skips_with_the_reason():
    good, bad = tune.sort_out(Problem("bf16", 256, 256), 0)
    assert good[0] == tuning.pick(Problem("bf16", 256, 256)) and len(set(good)) == len(good)
    assert bad and all(why and any(c.isdigit() for c in why) for _, why in bad)


WINNER = FwdConfig(64, 32, v_stages=3, q_slots=2, schedule="grid", pingpong=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "head_dim, head_dim_v",
    [(64, 64), (256, 256), (80, 80), (88, 72), (192, 128), (128, 64), (16, 256), (256, 16), (8, 8)],
)
def test_tune_writes_a_row(head_dim, head_dim_v, causal):
    problem = Problem("bf16", head_dim, head_dim_v, causal)
    source = tune.with_row(Path(tuning.__file__).read_text(), problem, WINNER)
    assert max(map(len, source.splitlines())) <= 100
    module = {}
    exec(compile(source, "tuning.py", "exec"), module)
    for d, dv, mask in itertools.product(range(8, 257, 8), range(8, 257, 8), (False, True)):
        other = Problem("bf16", d, dv, mask)
        same = other.static() == problem.static()
        assert module["pick"](other) == (WINNER if same else tuning.pick(other)), other
    static = problem.static()
    limits = [row[:2] for row in module["FORWARD"]]
    assert len(limits) == len(set(limits)) <= len(tuning.FORWARD) + 3
    assert {row[:2] for row in tuning.FORWARD} | {(static.head_dim, static.head_dim_v)} <= {*limits}


def test_tune_leaves_the_table_alone_when_its_config_wins():
    problem, source = Problem("bf16", 80, 80), Path(tuning.__file__).read_text()
    assert tune.with_row(source, problem, tuning.pick(problem)) == source


def test_tune_replaces_a_row_in_its_place():
    table = """FORWARD: tuple = (
    (32, 64, FwdConfig(64, 16), FwdConfig(64, 16)),
    (48, 64, FwdConfig(64, 64), FwdConfig(64, 64)),
    (64, 32, FwdConfig(64, 64), FwdConfig(64, 64)),
    (64, 64, FwdConfig(64, 64), FwdConfig(64, 80)),  # why
    (96, 96, FwdConfig(64, 96), FwdConfig(64, 96)),
)
"""
    lines = tune.with_row(table, Problem("bf16", 64, 64), FwdConfig(128, 64)).splitlines()
    old = table.splitlines()
    assert lines[4] == "    (64, 64, FwdConfig(128, 64), FwdConfig(64, 80)),"
    assert lines[:4] + lines[5:] == old[:4] + old[5:]
    with pytest.raises(ValueError, match="no row for head dims of 128 and 64"):
        tune.with_row(table, Problem("bf16", 128, 64), WINNER)


def test_tune_ranks_by_geometric_mean():
    configs = [FwdConfig(tile_n=n) for n in (128, 96, 64)]
    built = [Built((Problem("bf16", 128, 128), config), 1.0) for config in configs]
    results = tune.ranked(built, [[1.0, 2.0], [2.0, 2.0], [0.5, 2.0]])
    assert [r.built for r in results] == [built[2], built[0], built[1]]
    assert results[0].score == pytest.approx(2**0.5) and results[1].score == 1
    text = tune.table(results, [Case(1, 1, 1, 64, 64, 128, 128)] * 2)
    assert len(text) == 4 and text[1].endswith("FwdConfig(128, 64)")


def test_tune_wants_one_kernel_class(capsys):
    with pytest.raises(SystemExit):
        run(["tune", "--shape", "b=1,hq=1,sq=1,d=64", "--shape", "b=1,hq=1,sq=1,d=128"])
    with pytest.raises(SystemExit):
        run(["tune"])


@pytest.mark.compile
def test_tune_without_a_gpu_ranks_nothing_but_compiles(capsys, tmp_path, monkeypatch):
    if demo.kernels_run_here():
        pytest.skip("this machine has the GPU")
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path))
    assert run(["tune", "--shape", "b=1,hq=1,sq=128,d=64", "--limit", "1", "--jobs", "1"]) == 0
    shown = capsys.readouterr().out
    assert "skipped" in shown and "not timed: no Hopper GPU here" in shown
    assert tune.config_source(tuning.pick(Problem("bf16", 64, 64))) in shown
