"""The host side of the Ampere kernels: configs, which GPU runs what, what a launch passes. No GPU:
see standin.py."""

from dataclasses import asdict, replace

import pytest

torch = pytest.importorskip("torch")

from standin import BF16, check, tensors  # noqa: E402

import cute_attn  # noqa: E402
from cute_attn import compile as jit  # noqa: E402
from cute_attn import launch, tuning_sm80  # noqa: E402
from cute_attn.config import AMPERE_SMEM_LIMITS, AmpereConfig, FwdConfig  # noqa: E402
from cute_attn.problem import Problem  # noqa: E402
from cute_attn.tools import bench, cases, peers  # noqa: E402
from cute_attn.tools.compile import ampere_jobs, jobs_of  # noqa: E402

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """A function that puts a GPU of some compute capability here."""

    def put(major, minor):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d=None: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda d=None: "a GPU")

    return put


# configs


@pytest.mark.parametrize(
    "field, value",
    [("tile_m", 24), ("tile_m", 32), ("tile_n", 8), ("warps", 3), ("kv_stages", 1), ("ctas", 0)],
)
def test_value_that_is_not_allowed(field, value):
    with pytest.raises(ValueError, match=f"config.{field} is {value!r}.*allowed"):
        replace(AmpereConfig(), **{field: value})


@pytest.mark.parametrize("field, value", [("tile_m", 128.0), ("q_in_regs", 1), ("warps", None)])
def test_value_of_the_wrong_type(field, value):
    with pytest.raises(TypeError, match=f"config.{field} is {value!r}.*wanted"):
        replace(AmpereConfig(), **{field: value})


def test_one_warp_would_copy_rows_to_places_of_others():
    """32 threads copy 4 rows of 128 bytes at a time; places are permuted with a period of 8."""
    with pytest.raises(ValueError, match="config.warps is 1: allowed are 2, 4, 8"):
        AmpereConfig(16, 64, warps=1)


def test_limits():
    wide, config = Problem("bf16", 256, 256), AmpereConfig(128, 32, warps=8)
    assert config.smem_bytes(wide) == 2 * 256 * (128 + 2 * 2 * 32)
    assert config.infeasible(wide, "sm_80") == ""
    for chip in ("sm_86", "sm_89", "sm_99"):  # of a chip not known, the least is taken
        assert config.infeasible(wide, chip) == "shared memory 131072 bytes > 101376"
    assert "227" not in AmpereConfig(128, 64, warps=8).infeasible(wide, "sm_90a")
    assert "shared memory" in AmpereConfig(128, 64, warps=8).infeasible(wide, "sm_80")
    assert "registers per thread > 231" in AmpereConfig(128, 32).infeasible(wide, "sm_80")
    assert "registers per thread > 144" in AmpereConfig(128, 128, ctas=3).infeasible(
        Problem("bf16", 64, 64)
    )


@pytest.mark.parametrize("chip", [*AMPERE_SMEM_LIMITS, "sm_120a"])
def test_every_head_dim_has_a_config_that_fits_the_chip(chip):
    for d in range(8, 257, 8):
        for dv in range(8, 257, 8):
            problem = Problem("bf16", d, dv, True)
            assert tuning_sm80.pick(problem, chip).infeasible(problem, chip) == ""


def test_candidates_are_configs():
    problem = Problem("bf16", 128, 128)
    found = list(tuning_sm80.candidates(problem))
    assert len(set(found)) == len(found)
    assert any(not c.infeasible(problem, "sm_90a") for c in found)


# which GPU runs what


def test_capabilities(gpu):
    for minor, target in ((0, "sm80"), (6, "sm80:sm_86"), (7, "sm80:sm_87"), (9, "sm80:sm_89")):
        gpu(8, minor)
        for arch in (None, "sm80"):
            assert launch.choose_arch(CUDA, arch) == "sm80"
        assert launch.compile_target(CUDA, "sm80") == target
        with pytest.raises(ValueError, match="arch is 'sm90', but q.device is cuda:0, which runs"):
            launch.choose_arch(CUDA, "sm90")
    gpu(9, 0)
    assert launch.choose_arch(CUDA, None) == "sm90"
    assert launch.choose_arch(CUDA, "sm80") == "sm80"
    assert launch.compile_target(CUDA, "sm80") == "sm80:sm_90a"
    assert launch.compile_target(CUDA, "sm90") == "sm90"
    gpu(10, 0)
    assert launch.choose_arch(CUDA, "sm80") == "sm80"
    with pytest.raises(NotImplementedError, match="10.0.*arch='sm80' runs here too"):
        launch.choose_arch(CUDA, None)


@pytest.mark.parametrize("arch", [None, "sm80"])
def test_a_gpu_that_is_too_old(gpu, arch):
    gpu(7, 5)
    with pytest.raises(NotImplementedError, match=r"a GPU of compute capability 7\.5: .* 8\.0"):
        launch.choose_arch(CUDA, arch)


def test_cpu_tensors_do_not_run_on_sm80():
    with pytest.raises(ValueError, match="arch is 'sm80', but q.device is cpu"):
        cute_attn.fwd(*tensors(), arch="sm80")


def test_what_is_not_built(ampere):
    q, k, v = tensors()
    with pytest.raises(NotImplementedError, match="sm80.*FP8 is not built"):
        cute_attn.fwd(q, k, v, preset="fp8")
    with pytest.raises(NotImplementedError, match="arch='sm80'"):
        cute_attn.warmup(64, arch="sm80", preset="fp8")


# launches


def test_calls(ampere):
    for keywords in ({}, {"causal": True}, {"softmax_scale": -0.5}, {"softmax_scale": 0}):
        check(*tensors(), **keywords)
    problem, config, arch = ampere.built[-1]
    assert isinstance(config, AmpereConfig) and arch == "sm80"
    assert ampere.parts == 1 and len(set(ampere.counters)) == 1 and not launch._counters
    check(*tensors(1, 3, 4100, 4, 2, 64, 64), causal=True)  # never split: nothing merges
    assert ampere.parts == 1


def test_config_is_the_kernels_own(ampere):
    q, k, v = tensors()
    config = AmpereConfig(64, 32, kv_stages=3)
    cute_attn.fwd(q, k, v, config=config)
    assert ampere.built[-1][1] == config
    with pytest.raises(TypeError, match="an AmpereConfig is wanted"):
        cute_attn.fwd(q, k, v, config=FwdConfig())
    with pytest.raises(ValueError, match="shared memory .* > 166912"):
        cute_attn.fwd(*tensors(d=256, dv=256), config=AmpereConfig(128, 64, warps=8))


def test_hopper_takes_no_ampere_config(stand_in):
    with pytest.raises(TypeError, match="a FwdConfig is wanted"):
        cute_attn.fwd(*tensors(), config=AmpereConfig())


def test_layouts_are_those_of_hopper(ampere):
    q, k, v = tensors()
    odd = torch.cat([q, q], 3).repeat(1, 1, 1, 2)[..., :20].contiguous()[..., :16]
    check(odd, k, v)
    assert ampere.launches[-1][0].data_ptr() != odd.data_ptr()
    check(q, k[:, :, :1].expand(k.shape), v)
    assert ampere.launches[-1][1].stride(2) == 0
    assert check(q, k, v, out=torch.empty(2, 5, 4, 16, dtype=BF16))[0] is not None


def test_explain(ampere):
    q, k, v = tensors(2, 300, 500, 8, 2, 128, 128)
    e = cute_attn.explain(q, k, v, causal=True, arch="sm80")
    assert e.arch == "sm80" and e.config == tuning_sm80.pick(e.problem, "sm_80")
    assert e.tiles == e.grid == 2 * 8 * -(-300 // e.config.tile_m)
    assert "at most 255" in str(e) and "sm80" in str(e)
    meta = cute_attn.explain(*(t.to("meta") for t in (q, k, v)), arch="sm80")
    assert meta.config == e.config


def test_what_a_key_names():
    p, config = Problem("bf16", 64, 64), AmpereConfig()
    assert jit.target("sm80") == "sm_80" and jit.target("sm80:sm_86") == "sm_86"
    assert jit.builder(config, "sm80:sm_86").endswith("ampere.fwd:compile_fwd")
    for arch, other in (("sm90", config), ("sm80", FwdConfig())):
        with pytest.raises(NotImplementedError, match=f"arch is '{arch}'"):
            jit.get(p, other, arch)


@pytest.mark.compile
def test_what_a_launch_passes(tmp_path, monkeypatch):
    """As on Hopper, so that launch.py needs to know nothing."""
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path))
    kernel = jit.get(Problem("bf16", 64, 64), AmpereConfig(ctas=2), "sm80:sm_90a")
    with pytest.raises(TypeError, match="Expects 8 parameters"):
        kernel()


# tools


def test_tools_take_the_arch():
    (impl,) = peers.chosen(["ours"], ["tile_n=32"], "fwd", "sm80")
    case = cases.parse_shape("b=1,hq=8,sq=1024,d=128")
    picked = tuning_sm80.pick(case.problem(), peers.ampere_chip())
    assert impl.config_record(case) == asdict(replace(picked, tile_n=32))
    with pytest.raises(ValueError, match="pingpong"):
        peers.chosen(["ours"], ["pingpong=1"], "fwd", "sm80")
    args = bench.parser().parse_args(["--arch", "sm80", "--fwd-bwd"])
    with pytest.raises(ValueError, match="--arch with --fwd-bwd"):
        bench.implementations_of(args, "cuda")
    jobs = jobs_of([], "sm80:sm_86", False, ["bf16"])
    assert jobs == ampere_jobs("sm_86", ["bf16"]) and len(jobs) == 12
    assert jobs_of([case], "sm80", False, [])[0][1] == tuning_sm80.pick(case.problem(), "sm_80")
