"""The host side of the Ampere backward: configs, what a launch passes, the tools. No GPU: see
standin.py."""

import math
from dataclasses import asdict, replace

import pytest

torch = pytest.importorskip("torch")

from standin import BF16, tensors  # noqa: E402

import cute_attn  # noqa: E402
from cute_attn import compile as jit  # noqa: E402
from cute_attn import launch, tuning_bwd_sm80  # noqa: E402
from cute_attn.config import AMPERE_SMEM_LIMITS, AmpereBwdConfig, BwdConfig  # noqa: E402
from cute_attn.problem import Problem  # noqa: E402
from cute_attn.reference_backward import attention_backward  # noqa: E402
from cute_attn.tools import bench, cases, peers  # noqa: E402
from cute_attn.tools.compile import ampere_backward_jobs, jobs_of  # noqa: E402

# configs


@pytest.mark.parametrize(
    "field, value",
    [
        *(("tile_m", 48), ("tile_n", 72), ("tile_n", 96), ("key_warps", 3), ("column_warps", 8)),
        *(("step_m", 24), ("step_m", 64), ("q_stages", 3), ("do_stages", 0), ("ctas", 0)),
    ],
)
def test_value_that_is_not_allowed(field, value):
    with pytest.raises(ValueError, match=f"config.{field} is {value!r}.*"):
        AmpereBwdConfig(**{field: value})


@pytest.mark.parametrize("field, value", [("tile_m", 64.0), ("vector_adds", 1), ("ctas", None)])
def test_value_of_the_wrong_type(field, value):
    with pytest.raises(TypeError, match=f"config.{field} is {value!r}.*wanted"):
        AmpereBwdConfig(**{field: value})


def test_limits():
    problem, config = Problem("bf16", 128, 128), AmpereBwdConfig()
    rings, shared = 2 * 64 * 256, 2 * 128 * 64
    assert config.smem_bytes(problem) == 2 * (128 * 256 + rings + shared) + 2 * 64 * 2 * 4
    assert config.infeasible(problem, "sm_80") == ""
    assert config.infeasible(problem, "sm_86") == "shared memory 164864 bytes > 101376"
    assert "registers per thread > 215" in config.infeasible(Problem("bf16", 256, 128), "sm_90a")
    assert "registers per thread > 88" in replace(config, ctas=2).infeasible(problem)
    fast = replace(config, vector_adds=True)
    assert "compute capability 9.0 on, not for sm_80" in fast.infeasible(problem)
    assert fast.infeasible(problem, "sm_90a") == ""


@pytest.mark.parametrize("d", range(16, 257, 16))
def test_every_warp_has_as_much_of_dq(d):
    problem = Problem("bf16", d, d)
    for config in tuning_bwd_sm80.candidates(problem):
        rows, columns = config.dq_warps(problem)
        assert rows * columns == config.warps
        assert config.tile_m % (16 * rows) == config.width(problem) % (16 * columns) == 0


@pytest.mark.parametrize("chip", [*AMPERE_SMEM_LIMITS, "sm_120a"])
def test_every_head_dim_has_a_config_that_fits_the_chip(chip):
    for d in range(8, 257, 8):
        for dv in range(8, 257, 8):
            problem = Problem("bf16", d, dv, True)
            assert tuning_bwd_sm80.pick(problem, chip).infeasible(problem, chip) == ""


def test_candidates_are_configs():
    problem = Problem("bf16", 128, 128)
    found = list(tuning_bwd_sm80.candidates(problem, "sm_90a"))
    assert len(set(found)) == len(found) and tuning_bwd_sm80.pick(problem, "sm_90a") in found
    assert sum(not c.infeasible(problem, "sm_90a") for c in found) > 5


# launches


def gradients(q, k, v, dout=None, **keywords):
    """bwd against the oracle; the call's config."""
    options = {key: keywords[key] for key in ("causal", "softmax_scale") if key in keywords}
    out, lse = cute_attn.fwd(q, k, v, return_lse=True, **options)
    dout = torch.randn(out.shape).to(q.dtype) if dout is None else dout
    got = cute_attn.bwd(dout, q, k, v, out, lse, **keywords)
    options["dlse"] = keywords.get("dlse")
    for g, w in zip(got, attention_backward(dout, q, k, v, **options)):
        torch.testing.assert_close(g.double(), w, atol=3e-2, rtol=3e-2)


def test_calls(ampere):
    q, k, v = tensors(2, 70, 130, 4, 2, 64, 96)
    for keywords in ({}, {"causal": True}, {"softmax_scale": -0.3}, {"dlse": torch.ones(2, 4, 70)}):
        gradients(q, k, v, **keywords)
    built = [job for job in ampere.built if isinstance(job[1], AmpereBwdConfig)]
    assert [problem.causal for problem, *_ in built] == [False, True], "of either sign of the scale"
    for problem, config, arch in built:
        assert config == tuning_bwd_sm80.pick(problem, "sm_80") and arch == "sm80"
    gradients(q, k, v, deterministic=True)
    assert ampere.built[-1][1] == replace(config, deterministic=True)
    gradients(q, k, v, torch.ones((), dtype=BF16).expand(2, 70, 4, 96))
    assert ampere.launches[-1][4].stride(3) == 1, "a dout of stride 0 in its last dim is copied"


def test_gradients_through_autograd(ampere):
    q, k, v = (t.requires_grad_() for t in tensors(2, 70, 130, 4, 2, 64, 64))
    cute_attn.flash_attn_func(q, k, v, causal=True).sum().backward()
    assert isinstance(ampere.built[-1][1], AmpereBwdConfig)
    dout = torch.ones(2, 70, 4, 64, dtype=BF16)
    want = attention_backward(dout, *(t.detach() for t in (q, k, v)), causal=True)
    for t, w in zip((q, k, v), want):
        torch.testing.assert_close(t.grad.double(), w, atol=3e-2, rtol=3e-2)


def test_empty_sizes_launch_nothing(ampere):
    for sizes in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        q, k, v = tensors(*sizes)
        out, lse = cute_attn.fwd(q, k, v, return_lse=True)
        got = cute_attn.bwd(out, q, k, v, out, lse)
        assert all(g.shape == t.shape and (g == 0).all() for g, t in zip(got, (q, k, v)))
    assert not ampere.launches


def test_config_is_the_kernels_own(ampere):
    q, k, v = tensors(d=64, dv=64)
    config = AmpereBwdConfig(64, 64, 2, 2, q_stages=1)
    gradients(q, k, v, config=config)
    assert ampere.built[-1][1] == config
    out, lse = cute_attn.fwd(q, k, v, return_lse=True)
    with pytest.raises(TypeError, match="an AmpereBwdConfig is wanted"):
        cute_attn.bwd(out, q, k, v, out, lse, config=BwdConfig())
    with pytest.raises(ValueError, match="vector_adds is for"):
        cute_attn.bwd(out, q, k, v, out, lse, config=AmpereBwdConfig(vector_adds=True))


def test_hopper_takes_no_ampere_config(stand_in):
    q, k, v = tensors()
    out, lse = cute_attn.fwd(q, k, v, return_lse=True)
    with pytest.raises(TypeError, match="a BwdConfig is wanted"):
        cute_attn.bwd(out, q, k, v, out, lse, config=AmpereBwdConfig())


def test_explain(ampere):
    q, k, v = tensors(2, 300, 500, 8, 2, 128, 128)
    options = {"causal": True, "arch": "sm80", "backward": True}
    e = cute_attn.explain(q, k, v, **options)
    assert e.config == tuning_bwd_sm80.pick(e.problem, "sm_80") and e.arch == "sm80"
    assert e.tile == (e.config.tile_m, e.config.tile_n) == (64, 128)
    assert e.tiles == e.grid == 2 * 2 * -(-500 // 128)
    assert e.smem_bytes == e.config.smem_bytes(e.problem)
    assert e.scratch_bytes == 4 * 2 * 8 * 5 * 64 * (2 + 128)
    assert e.kernel == "cute_attn_bwd_sm80_bf16_d128_dv128_causal" and "sm80" in str(e)
    meta = cute_attn.explain(*(t.to("meta") for t in (q, k, v)), deterministic=True, **options)
    assert meta.config == replace(e.config, deterministic=True)
    assert meta.scratch_bytes == e.scratch_bytes + 4 * 2 * 8 * 5 * (64 + 32)
    gradients(q, k, v, causal=True)
    assert 4 * sum(map(math.prod, ampere.scratch[-1])) == e.scratch_bytes


@pytest.mark.compile
def test_what_a_launch_passes(tmp_path, monkeypatch):
    """As on Hopper, so that backward.py needs to know nothing."""
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path))
    kernel = jit.get(Problem("bf16", 32, 32), AmpereBwdConfig(), "sm80")
    with pytest.raises(TypeError, match="Expects 15 parameters"):
        kernel()


@pytest.mark.compile
def test_warmup_for_a_named_arch(monkeypatch, tmp_path):
    monkeypatch.setitem(jit.AMPERE_BUILDERS, "sm80", "host_kernel:compile_fwd")
    monkeypatch.setitem(jit.AMPERE_BACKWARD_BUILDERS, "sm80", "host_kernel:compile_fwd")
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "runs_here", lambda arch: False)
    jit.forget()
    before = jit.count()
    cute_attn.warmup(64, arch="sm80", backward=True)
    assert jit.count() == before + 2, "the forward and the backward"
    cute_attn.warmup(64, arch="sm80", backward=True, deterministic=True)
    assert jit.count() == before + 3
    e = cute_attn.explain(*tensors(d=64, dv=64), arch="sm80", backward=True)
    assert e.compiled == "in memory"
    jit.forget()


def test_warmup_launches_on_its_gpu(ampere, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch, "runs_here", lambda arch: True)
    monkeypatch.setattr(launch, "_capability", lambda device: (8, 0))
    monkeypatch.setattr(launch, "_runs_sm80", lambda device: True)
    cute_attn.warmup(64, causal=True, arch="sm80", backward=True)
    assert [len(operands) for operands in ampere.launches] == [4, 5]


# tools


def test_tools_take_the_arch():
    (impl,) = peers.chosen(["ours"], ["q_stages=1"], "bwd", "sm80")
    case = cases.parse_shape("b=1,hq=8,sq=1024,d=128")
    picked = tuning_bwd_sm80.pick(case.problem(), peers.ampere_chip())
    assert impl.config_record(case) == asdict(replace(picked, q_stages=1))
    with pytest.raises(ValueError, match="ds_slots"):
        peers.chosen(["ours"], ["ds_slots=3"], "bwd", "sm80")
    args = bench.parser().parse_args(["--arch", "sm80", "--backward", "--impl", "ours,fa2"])
    assert [impl.label for impl in bench.implementations_of(args, "cuda")] == ["ours", "fa2"]
    jobs = jobs_of([], "sm80:sm_86", True, ["bf16"])
    assert jobs == ampere_backward_jobs("sm_86", ["bf16"]) and len(jobs) == 12
    picked = tuning_bwd_sm80.pick(case.problem(), "sm_80")
    assert jobs_of([case], "sm80", True, [])[0][1] == picked
