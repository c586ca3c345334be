"""explain and warmup of FP8, without a GPU: as test_api.py and test_tools_bwd.py."""

from dataclasses import replace

import pytest
import standin_fp8
import torch
from fp8_oracle import E4M3
from helpers import BF16, FP16, qkv

import cute_attn
from cute_attn import compile as jit
from cute_attn import launch, quantize
from cute_attn.config import BwdConfig, Fp8Config, QuantizeConfig, TransposeConfig
from cute_attn.problem import Fp8Problem, Problem
from cute_attn.tools import compile as tools


@pytest.fixture
def kernels(stand_in, monkeypatch):
    seen = standin_fp8.install_forward(monkeypatch, stand_in)
    monkeypatch.setattr(quantize, "_has_kernels", lambda q: isinstance(q, torch.Tensor))
    return seen


def sixteen_bit(device="cpu", dtype=BF16):
    return [t.to(device) for t in qkv(2, 300, 500, (4, 2), (64, 48), dtype=dtype)]


def calls():
    q, k, v = sixteen_bit()
    scales = {f"{n}_descale": torch.rand(2, 2) for n in "qkv"}
    eight = [t.to(E4M3) for t in (q, k, v)]
    return [
        ((q, k, v), {"preset": "fp8"}),
        ((q, k, v), {"preset": "fp8_hp", "k_block": 48, "out_dtype": FP16}),
        ((cute_attn.quantize_qkv(q, k, v, v_scales="channel"),), {}),
        ((cute_attn.quantize_qkv(q, k, v, v_shift=False, k_block=48),), {"out_dtype": FP16}),
        (eight, scales),
        ((*eight[:2], v), {"config": Fp8Config(128, 64)}),
        ([torch.cat([t, t], 1) for t in eight], {}),
        ((q, k, v), {"preset": "fp8", "out_dtype": E4M3, "return_amax": True}),
    ]


@pytest.mark.parametrize("options", [{}, {"causal": True, "softmax_scale": -0.3}])
def test_what_is_explained_reaches_the_kernel(options, kernels, stand_in):
    for args, more in calls():
        before = cute_attn.explain(*args, **options, **more)
        stand_in.built.clear()
        jit.forget()
        cute_attn.fwd(*args, **options, **more)
        after = cute_attn.explain(*args, **options, **more)
        assert after.compiled == "in memory" and replace(after, compiled=before.compiled) == before
        problem, config, _ = kernels[-1]
        assert (problem, config) == (after.problem.static(), after.config)
        quantised = [c for _, c, _ in stand_in.built if isinstance(c, QuantizeConfig)]
        assert quantised in ([], [after.quantise])
        assert (after.quantise is None) == ("preset" not in more)


def test_explain_on_any_device():
    for device in ("cpu", "meta"):
        q, k, v = sixteen_bit(device)
        e = cute_attn.explain(q, k, v, causal=True, preset="fp8", arch="sm90")
        sizes = (2, 300, 500, 4, 2)
        assert e.problem == Fp8Problem("bf16", 64, 48, True, False, *sizes, v_shift=True)
        assert e.smem_bytes == e.config.smem_bytes(e.problem) and not e.copies and e.parts == 1
        assert e.tiles == 2 * 4 * -(-300 // e.config.tile_m) and e.grid == min(e.tiles, 132)
        for part in ("e4m3, v e4m3, out bf16 causal", "sm90", "before     QuantizeConfig("):
            assert part in str(e)
        eight = [t.to(E4M3) for t in (q, k, v)]
        assert cute_attn.explain(*eight, arch="sm90").copies == ("v",)  # to vt
        assert not cute_attn.explain(*eight[:2], v, arch="sm90").copies
    q, k, v = sixteen_bit()
    assert "in torch" in str(cute_attn.explain(q, k, v, preset="fp8"))
    assert "nothing" in str(cute_attn.explain(q, k[:, :0], v[:, :0], preset="fp8", arch="sm90"))
    large = Fp8Config(128, 224, kv_stages=8)  # nothing runs it
    empty = cute_attn.explain(q, k[:, :0], v[:, :0], preset="fp8", config=large)
    assert (
        not empty.tiles and cute_attn.fwd(q[:, :0], k, v, preset="fp8", config=large).numel() == 0
    )
    assert "QuantizeConfig" not in str(cute_attn.explain(cute_attn.quantize_qkv(q, k, v)))


def test_calls_of_two_launches(kernels, monkeypatch):
    config = Fp8Config(128, 128, promote=4)
    q, k, v = qkv(1, 200, 300, (2, 2), (64, 208), dtype=BF16)
    before = cute_attn.explain(q, k, v, preset="fp8", config=config)
    parts = config.launches(before.problem)
    assert [part.head_dim_v for part in parts] == [128, 80] and before.launches == 2
    assert before.smem_bytes == config.smem_bytes(parts[0]) and "tiles, 2 times" in str(before)
    jit.get(parts[0], config, "sm90")
    assert cute_attn.explain(q, k, v, preset="fp8", config=config) == before
    with monkeypatch.context() as m:
        m.setattr(jit, "state", lambda p, *_: f"not compiled ({p.head_dim_v})")
        after = cute_attn.explain(q, k, v, preset="fp8", config=config)
        assert after.compiled == "not compiled (128)"
    cute_attn.warmup(64, 208, arch="cpu", preset="fp8", config=config)
    cute_attn.fwd(q, k, v, preset="fp8", config=config)
    assert cute_attn.explain(q, k, v, preset="fp8", config=config).compiled == "in memory"


@pytest.mark.parametrize(
    "error, match, wrong",
    [
        (ValueError, "preset is 'fp4'", {"preset": "fp4"}),
        (ValueError, "q_descale is given with preset", {"q_descale": torch.ones(1)}),
        (TypeError, "FP8 wants an Fp8Config", {"config": cute_attn.FwdConfig()}),
        (ValueError, "shared memory", {"config": Fp8Config(128, 224, kv_stages=8)}),
        (TypeError, "k is missing", {"k": None}),
        (TypeError, "causal is 1", {"causal": 1}),
        (ValueError, "softmax_scale", {"softmax_scale": float("nan")}),
        (ValueError, "k_block is 24", {"k_block": 24}),
        (TypeError, "unexpected argument 'preset'", {"backward": True}),
        (NotImplementedError, "softcap is not built yet", {"softcap": 3.0}),
        (ValueError, "arch is 'sm70'", {"arch": "sm70"}),
    ],
)
def test_explain_errors(error, match, wrong):
    call = dict(zip("qkv", sixteen_bit())) | {"preset": "fp8"} | wrong
    with pytest.raises(error, match=match):
        cute_attn.explain(**call)


@pytest.mark.parametrize("preset", ["fp8", "fp8_hp"])
@pytest.mark.parametrize("options", [{}, {"causal": True, "softmax_scale": -1.0}])
def test_warmup_makes_what_a_call_takes(preset, options, kernels, stand_in, monkeypatch):
    monkeypatch.setattr(launch, "runs_here", lambda arch: False)
    cute_attn.warmup(64, 48, arch="sm90", preset=preset, **options)
    ready = len(stand_in.built)
    assert ready == 2
    cute_attn.fwd(*sixteen_bit(), preset=preset, **options)
    cute_attn.fwd(cute_attn.quantize_qkv(*sixteen_bit(), preset=preset), **options)
    assert len(stand_in.built) == ready and len(kernels) == 2


@pytest.mark.parametrize("width", [48, 208])
@pytest.mark.parametrize("causal", [False, True])
def test_compile_makes_what_calls_take(causal, width, kernels, stand_in, monkeypatch):
    """python -m cute_attn compile --fp8: of packs, presets and e4m3 tensors, few and many."""
    problem = Problem("bf16", 64, width, causal)
    made = {p: set(tools.fp8_class(problem, p)) for p in ("fp8", "fp8_hp")}
    q, k, v = qkv(1, 40, 600, (2, 1), (64, width), dtype=BF16)
    for preset, jobs in made.items():
        cute_attn.fwd(q, k, v, causal=causal, preset=preset)
        cute_attn.fwd(cute_attn.quantize_qkv(q, k, v, preset=preset), causal=causal)
        assert {(p, c) for p, c, _ in stand_in.built} == {
            (p, c)
            for p, c in jobs
            if isinstance(c, QuantizeConfig) or isinstance(p, Fp8Problem) and not p.raw_v
        }
        stand_in.built.clear()
    for n in (600, 512):
        cute_attn.fwd(*(t[:, :n].to(E4M3) for t in (q, k, v)), causal=causal)
    raw = {(p, c) for p, c in made["fp8"] if isinstance(p, Fp8Problem) and p.raw_v}
    assert {(p, c) for p, c, _ in stand_in.built} == raw and len(raw) == 2 + (width == 208)
    transpose = [p.head_dim_v for p, c in made["fp8"] if isinstance(c, TransposeConfig)]
    assert transpose == [64 if width == 48 else 224]
    assert all(job == (job[0].static(), job[1]) for job in raw)


def test_the_compile_command(capsys, monkeypatch):
    built = []

    def build_all(jobs, *_):
        built.append(jobs)
        return [tools.Built(job, 0.1) for job in jobs]

    monkeypatch.setattr(tools, "build_all", build_all)
    assert tools.main(["--fp8", "--shape", "b=1,hq=1,sq=1,d=64"]) == 0
    text = capsys.readouterr().out
    for part in (
        "quantise bf16 d64/64 full",
        "raw-e4m3-bf16 d64/64 full promote",
        "e4m3-bf16 d64/64 full ",
        "transpose v e4m3 d64",
    ):
        assert part in text
    assert len(built[0]) == 5
    assert tools.main(["--fp8", "--dtype", "fp16"]) == tools.main(["--fp8", "fp8_hp"]) == 0
    kinds = [{type(config) for _, config in jobs} for jobs in built[1:]]
    assert kinds == [{QuantizeConfig, Fp8Config, TransposeConfig}, {QuantizeConfig, Fp8Config}]
    assert {p.dtype for p, c in built[1] if not isinstance(c, TransposeConfig)} == {"fp16"}
    for wrong in (
        ["--fp8", "--backward"],
        ["--fp8", "fp4"],
        ["--fp8", "--shape", "b=1,hq=1,sq=1,d=24"],
    ):
        with pytest.raises(SystemExit):
            tools.main(wrong)
    assert "head_dim is 24" in capsys.readouterr().err


def test_warmup_for_training(kernels, stand_in, monkeypatch):
    monkeypatch.setattr(launch, "runs_here", lambda arch: False)
    cute_attn.warmup(64, arch="sm90", preset="fp8", backward=True)
    kinds = [type(config) for _, config, _ in stand_in.built]
    assert kinds == [QuantizeConfig, Fp8Config, BwdConfig]
    cute_attn.warmup(64, arch="sm90", preset="fp8", config=Fp8Config(128, 64))
    assert stand_in.built[-1][1] == Fp8Config(128, 64)


def test_warmup_errors():
    for arch in ("cpu", "sm90"):
        with pytest.raises(ValueError, match="preset is 'fp4'"):
            cute_attn.warmup(64, preset="fp4", arch=arch)
        with pytest.raises(ValueError, match="head_dim is 24: FP8 allows"):
            cute_attn.warmup(24, preset="fp8", arch=arch)
        with pytest.raises(TypeError, match="FP8 wants an Fp8Config"):
            cute_attn.warmup(64, preset="fp8", config=cute_attn.FwdConfig(), arch=arch)
    cute_attn.warmup(64, preset="fp8", arch="cpu")
