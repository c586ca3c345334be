"""Kernels compiled by many processes before the GPU tests and the sanitizer, seen to work without a
GPU."""

from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import ahead
import conftest
import host_build
import test_quantize_gpu as quantise
import torch

from cute_attn import compile as jit
from cute_attn import tuning, tuning_bwd
from cute_attn.problem import Problem
from cute_attn.tools.compile import build_ahead

PROBLEMS = [Problem("bf16", d, 64) for d in (16, 32, host_build.BAD, 64, 80, 96)]
JOBS = [(p, tuning.pick(p)) for p in PROBLEMS]


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_several_processes_build_every_job_once(cache, capsys):
    build_ahead(JOBS + JOBS, 2, build=host_build.build)
    names = [path.name.split(maxsplit=1) for path in cache.iterdir()]
    assert sorted(rest for _, rest in names) == sorted(f"bf16 {p.head_dim} sm90" for p in PROBLEMS)
    assert len({pid for pid, _ in names}) == 2
    shown = capsys.readouterr().err
    assert "6 to compile by 2 processes" in shown and "ready after" in shown


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "build, words", [(host_build.fail, "no such tile"), (host_build.do_not_keep, "not kept")]
)
def test_a_kernel_that_is_not_ready_is_an_error(cache, workers, build, words):
    with pytest.raises(RuntimeError, match=rf"1 kernels are not ready.*\s.*d40/64.*{words}"):
        build_ahead(JOBS, workers, build=build)


def test_a_worker_that_dies_is_an_error(cache):
    with pytest.raises(BrokenProcessPool):
        build_ahead(JOBS, 2, build=host_build.die)


@pytest.mark.compile
def test_kernels_are_on_disk_afterwards_and_not_built_again(cache, capsys):
    p = Problem("bf16", 64, 64)
    jobs = [(p, tuning.pick(p)), (p, tuning_bwd.pick(p))]
    build_ahead(jobs, 2)
    assert [jit.state(*job, "sm90") for job in jobs] == ["on disk"] * 2
    build_ahead(jobs, 2, build=host_build.die)  # not called
    assert "0 to compile" in capsys.readouterr().err


# the GPU tests


def chosen_test(file, name="test_x", *keywords):
    return SimpleNamespace(
        path=Path(file),
        name=name,
        keywords={"gpu", *keywords},
        get_closest_marker=lambda mark: None,
    )


def test_jobs_follow_the_chosen_tests():
    many = [chosen_test("tests/test_forward.py")] * 30
    assert ahead.jobs_of(many[:5]) == []
    assert set(ahead.jobs_of(many)) == set(ahead.forward_jobs())
    (one,) = [chosen_test("tests/test_backward.py", "test_head_dims[dtype0-cuda]")]
    both = set(ahead.forward_jobs()) | set(ahead.backward_jobs())
    assert set(ahead.jobs_of([one])) == set(ahead.jobs_of([*many, one])) == both


def test_every_job_can_be_built():
    for problem, config in [*ahead.forward_jobs(), *ahead.backward_jobs()]:
        assert problem == problem.static() and not config.infeasible(problem)
    assert {type(config).__name__ for _, config in ahead.backward_jobs()} == {"BwdConfig"}
    assert {config.deterministic for _, config in ahead.backward_jobs()} == {False, True}


def parameters(test):
    (mark,) = test.pytestmark
    return mark.args[1]


def test_quantise_jobs_have_the_head_dims_of_the_tests():
    jobs, heads = ahead.quantize_jobs(), (torch.empty(2, 16),) * 3
    wanted = [
        ahead.quantize_job(dims, given=heads) for dims in parameters(quantise.test_given_vectors)
    ]
    wanted += [
        ahead.quantize_job((64, dim_v), given=heads, v_scales="channel")
        for dim_v in parameters(quantise.test_given_vectors_and_channels_of_v)
    ]
    wanted += [
        ahead.quantize_job(dims, "fp16")
        for dims in parameters(quantise.test_measured_other_head_dims)
    ]
    assert [job for job in wanted if job not in jobs] == []


def session(*items, collectonly=False):
    option = SimpleNamespace(collectonly=collectonly)
    return SimpleNamespace(items=items, config=SimpleNamespace(option=option))


def test_collection_ends_with_the_kernels(monkeypatch):
    calls = []
    for why in ("_why_no_gpu", "_why_no_dsl"):
        monkeypatch.setattr(conftest, why, lambda **_: "")
    monkeypatch.setattr(ahead, "build_ahead", lambda jobs, workers: calls.append((jobs, workers)))
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 16)
    chosen = [chosen_test("tests/test_forward.py")] * 30
    for workers, processes in ((None, 16), ("4", 4)):
        monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", workers or "1")
        given = session(*chosen)
        conftest.pytest_collection_finish(given)
        assert calls.pop() == (given.config.ready, processes) and given.config.ready
    conftest.pytest_collection_finish(session(*chosen, collectonly=True))
    conftest.pytest_collection_finish(session(SimpleNamespace(keywords={}, path=Path("x"))))
    assert not calls


def test_no_test_runs_without_its_kernels(monkeypatch):
    def broken(items):
        raise RuntimeError("1 kernels are not ready")

    for why in ("_why_no_gpu", "_why_no_dsl"):
        monkeypatch.setattr(conftest, why, lambda **_: "")
    monkeypatch.setattr(ahead, "compile_ahead", broken)
    with pytest.raises(pytest.exit.Exception, match="not ready"):
        conftest.pytest_collection_finish(session(chosen_test("tests/test_forward.py")))


def test_kernels_that_were_left_out_are_named(monkeypatch):
    (p, config), other = JOBS[0], (PROBLEMS[1], tuning_bwd.pick(PROBLEMS[1]))
    named = (p, tuning.pick(Problem("bf16", 256, 256)))  # a config that a test asks for
    monkeypatch.setattr(jit, "_memory", {(*j, "sm90"): None for j in ((p, config), other, named)})
    assert ahead.left_out([(p, config)]) == ["bf16 d32/64 full BwdConfig"]
    assert ahead.left_out([(p, config), other]) == []
    in_turn = other[0], replace(other[1], deterministic=True)
    monkeypatch.setattr(jit, "_memory", {(*in_turn, "sm90"): None})
    assert ahead.left_out([other]) == ["bf16 d32/64 full BwdConfig deterministic"]
