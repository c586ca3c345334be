"""Calls without a GPU: the CPU path, errors, explain and warmup."""

import math
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from standin import BF16, check, tensors  # noqa: E402

import cute_attn  # noqa: E402
from cute_attn import compile as jit  # noqa: E402
from cute_attn import launch  # noqa: E402
from cute_attn.config import FwdConfig  # noqa: E402
from cute_attn.problem import Problem  # noqa: E402

META = torch.zeros(2, 7, 2, 16, dtype=BF16, device="meta")


# The CPU


def test_import_is_light():
    code = "import sys, cute_attn; assert not {'torch', 'cutlass', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {"fwd", "merge", "explain", "warmup"} <= set(dir(cute_attn))
    with pytest.raises(AttributeError, match="no attribute 'attention'"):
        cute_attn.attention  # noqa: B018


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3, -0.3, 0, 0.0])
def test_cpu(causal, scale):
    q, k, v = tensors(d=24, dv=40)
    out, _ = check(q, k, v, causal=causal, softmax_scale=scale)
    assert out.is_contiguous() and out.dtype == BF16 and out.shape == (2, 5, 4, 40)


def test_cpu_out():
    q, k, v = tensors()
    out = torch.empty(2, 4, 5, 16, dtype=BF16).transpose(1, 2)
    assert check(q, k, v, out=out)[0] is out


def test_merge_is_the_reference():
    q, k, v = tensors()
    halves = [
        cute_attn.fwd(q, x, y, return_lse=True)
        for x, y in ((k[:, :3], v[:, :3]), (k[:, 3:], v[:, 3:]))
    ]
    out, lse = cute_attn.merge(*halves[0], *halves[1])
    want, want_lse = cute_attn.fwd(q, k, v, return_lse=True)
    torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 0},
        {"seqlen_q": 0},
        {"seqlen_k": 0},
        {"heads_q": 0},
        {"seqlen_q": 0, "seqlen_k": 0},
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_empty_problems_launch_nothing(stand_in, sizes, causal):
    q, k, v = tensors(**sizes)
    out, lse = cute_attn.fwd(q, k, v, causal=causal, return_lse=True)
    assert out.shape == (*q.shape[:3], 16) and out.count_nonzero() == 0
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and (lse == -math.inf).all()
    assert not stand_in.launches and not stand_in.built
    given = torch.full_like(out, 7)
    assert cute_attn.fwd(q, k, v, causal=causal, out=given) is given
    assert given.count_nonzero() == 0


# Errors


@pytest.mark.parametrize(
    "error, message, change",
    [
        (TypeError, "q is a list", {"q": [1.0]}),
        (TypeError, "k is a ndarray", {"k": "numpy"}),
        (TypeError, "q.dtype is torch.float32", {"q": torch.zeros(2, 5, 4, 16)}),
        (TypeError, "k.dtype is torch.float16", {"k": torch.zeros(2, 7, 2, 16).half()}),
        (ValueError, "v.device is meta", {"v": META}),
        (ValueError, "q.shape is", {"q": torch.zeros(5, 4, 16, dtype=BF16)}),
        (ValueError, "k.shape is.*q's batch, 2", {"k": torch.zeros(3, 7, 2, 16, dtype=BF16)}),
        (ValueError, "k.shape is.*head_dim, 16", {"k": torch.zeros(2, 7, 2, 24, dtype=BF16)}),
        (ValueError, "v.shape is.*seqlen, 7", {"v": torch.zeros(2, 8, 2, 16, dtype=BF16)}),
        (ValueError, "v.shape is.*nheads, 2", {"v": torch.zeros(2, 7, 4, 16, dtype=BF16)}),
        (ValueError, "nheads_q is 3 .* is 2", {"q": torch.zeros(2, 5, 3, 16, dtype=BF16)}),
        (ValueError, "head_dim_v is 20", {"v": torch.zeros(2, 7, 2, 20, dtype=BF16)}),
        (ValueError, "head_dim_v is 264", {"v": torch.zeros(2, 7, 2, 264, dtype=BF16)}),
        (TypeError, "k is nested or of layout torch.sparse_coo", {"k": "sparse"}),
        (TypeError, "causal is 'yes'", {"causal": "yes"}),
        (ValueError, "softmax_scale is nan", {"softmax_scale": math.nan}),
        (ValueError, "softmax_scale is inf", {"softmax_scale": math.inf}),
        (ValueError, "softmax_scale is 1e\\+300", {"softmax_scale": 1e300}),
        (TypeError, "softmax_scale is tensor", {"softmax_scale": torch.tensor(0.1)}),
        (TypeError, "softmax_scale is 'x'", {"softmax_scale": "x"}),
        (TypeError, "softmax_scale is True", {"softmax_scale": True}),
        (ValueError, "arch is 'sm100'", {"arch": "sm100"}),
        (ValueError, "arch is 'sm80', but q.device is cpu", {"arch": "sm80"}),
        (TypeError, "config is 128", {"config": 128}),
        (ValueError, "registers per thread", {"config": FwdConfig(192, 256, 1)}),
        (TypeError, "out is a list", {"out": []}),
        (TypeError, "out.dtype is torch.float16", {"out": torch.zeros(2, 5, 4, 16).half()}),
        (ValueError, "out.shape is.*4, 16", {"out": torch.zeros(2, 5, 4, 8, dtype=BF16)}),
        (ValueError, "out.device is meta", {"out": META[:, :5].repeat(1, 1, 2, 1)}),
        (ValueError, "expanded", {"out": torch.zeros(2, 5, 1, 16, dtype=BF16).expand(2, 5, 4, 16)}),
        (ValueError, "out overlaps q", {"out": "q"}),
        (TypeError, "unexpected keyword", {"window": 3}),
    ],
)  # fmt: skip
def test_wrong_calls(stand_in, error, message, change):
    arguments = dict(zip("qkv", tensors()))
    for name, value in change.items():
        if isinstance(value, str) and value in ("numpy", "sparse"):
            t = arguments[name].float()
            value = t.numpy() if value == "numpy" else t.to(BF16).to_sparse()
        arguments[name] = arguments["q"] if isinstance(value, str) and value == "q" else value
    for _ in range(2):  # the second call must not find a plan that the first one left
        with pytest.raises(error, match=message):
            cute_attn.fwd(**arguments)
    assert not stand_in.launches and not stand_in.built


def test_wrong_head_dims(stand_in):
    for d in (0, 4, 12, 60, 264):
        with pytest.raises(ValueError, match=f"head_dim is {d}: allowed are the multiples of 8"):
            cute_attn.fwd(*tensors(d=d))
    with pytest.raises(ValueError, match="nheads_kv is 0"):
        q, k, v = tensors()
        cute_attn.fwd(q, k[:, :, :0], v[:, :, :0])


def test_b36_head_counts_name_both():
    for heads_q, heads_kv in ((6, 4), (2, 4)):
        with pytest.raises(ValueError, match=f"{heads_q} .* {heads_kv}"):
            cute_attn.fwd(*tensors(heads_q=heads_q, heads_kv=heads_kv))


@pytest.mark.parametrize(
    "name, value",
    [
        *(("window_size", window) for window in ((3, 0), (-1, 0), (None, 5), (-2, -1))),
        *(("softcap", 10.0), ("max_seqlen_q", 5), ("max_seqlen_k", 7), ("score_mod", max)),
        *((name, torch.zeros(4)) for name in ("alibi_slopes", "sink", "cu_seqlens_q")),
        *((name, torch.zeros(4)) for name in ("cu_seqlens_k", "seqused_q", "seqused_k")),
    ],
)
def test_unbuilt_arguments_are_named(name, value):
    q, k, v = tensors()
    for call in (cute_attn.fwd, cute_attn.explain):
        with pytest.raises(NotImplementedError, match=name):
            call(q, k, v, **{name: value})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (-1, -1), (-1, None), [None, -1]])
def test_windows_without_a_bound(causal, window):
    q, k, v = tensors()
    want = cute_attn.fwd(q, k, v, causal=causal)
    got = cute_attn.fwd(q, k, v, causal=causal, window_size=window, softcap=0.0)
    assert torch.equal(got, want)


def test_windows_with_causal():
    """causal takes the smaller of the right bound and 0."""
    q, k, v = tensors()
    want = cute_attn.fwd(q, k, v, causal=True)
    assert torch.equal(cute_attn.fwd(q, k, v, causal=True, window_size=(-1, 3)), want)
    for window in ((-1, -2), (4, 0)):
        with pytest.raises(NotImplementedError, match="window_size"):
            cute_attn.fwd(q, k, v, causal=True, window_size=window)


def test_malformed_windows():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="a pair"):
        cute_attn.fwd(q, k, v, window_size=3)
    with pytest.raises(TypeError, match="bounds are int"):
        cute_attn.fwd(q, k, v, window_size=(1.5, None))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_no_backward_yet(stand_in, which):
    qkv = tensors()
    qkv[which].requires_grad_()
    with pytest.raises(NotImplementedError, match="fwd records no gradients: call flash_attn_func"):
        cute_attn.fwd(*qkv)
    assert not stand_in.built
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            check(*qkv)


def test_out_that_requires_grad():
    with pytest.raises(NotImplementedError, match="out requires grad and fwd records no"):
        cute_attn.fwd(*tensors(), out=torch.zeros(2, 5, 4, 16, dtype=BF16, requires_grad=True))


def test_devices_that_nothing_runs(monkeypatch):
    with pytest.raises(ValueError, match="q.device is meta"):
        cute_attn.fwd(*(t.to("meta") for t in tensors()))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d=None: "T4")
    with pytest.raises(NotImplementedError, match=r"T4 of compute capability 7\.5"):
        launch.choose_arch(torch.device("cuda", 0), None)
    with pytest.raises(ValueError, match="arch is 'sm90', but q.device is cpu"):
        cute_attn.fwd(*tensors(), arch="sm90")


# explain and warmup


def test_explain():
    q, k, v = tensors(2, 300, 500, 8, 2, 128, 128)
    e = cute_attn.explain(q, k, v, causal=True, arch="sm90", softcap=0.0)
    assert e.problem == Problem("bf16", 128, 128, True, False, 2, 300, 500, 8, 2)
    assert e.smem_bytes == e.config.smem_bytes(e.problem) and e.registers == e.config.registers
    assert e.tiles == 2 * 8 * -(-300 // e.config.tile_m) and e.grid == min(e.tiles, 132)
    assert "not compiled" in e.compiled or e.compiled in ("on disk", "in memory")
    for part in ("causal", "seqlen 300 x 500", "heads 8 over 2", f"{e.smem_bytes} bytes", "sm90"):
        assert part in str(e)
    with pytest.raises(AttributeError):
        e.grid = 3


def test_explain_elsewhere():
    q, k, v = tensors()
    assert "block-wise attention in torch" in str(cute_attn.explain(q, k, v))
    assert "nothing" in str(cute_attn.explain(q, k[:, :0], v[:, :0]))
    meta = cute_attn.explain(*(t.to("meta") for t in (q, k, v)), arch="sm90")
    assert meta.arch == "sm90" and not meta.copies
    grid = cute_attn.explain(q, k, v, arch="sm90", config=FwdConfig(64, 64, schedule="grid"))
    assert grid.grid == grid.tiles == 2 * 4
    with pytest.raises(TypeError, match="unexpected argument 'windows'"):
        cute_attn.explain(q, k, v, windows=(1, 2))
    with pytest.raises(ValueError, match="registers per thread"):
        cute_attn.explain(q, k, v, config=FwdConfig(192, 256, 1))
    with pytest.raises(ValueError, match="softmax_scale"):
        cute_attn.explain(q, k, v, softmax_scale=math.inf)


def test_warmup_errors():
    with pytest.raises(ValueError, match="head_dim is 60"):
        cute_attn.warmup(60, arch="sm90")
    with pytest.raises(ValueError, match="dtype"):
        cute_attn.warmup(64, dtype=torch.float32, arch="sm90")
    with pytest.raises(ValueError, match="shared memory"):
        cute_attn.warmup(256, config=FwdConfig(64, 64, 8), arch="sm90")
    with pytest.raises(ValueError, match="arch is 'sm_90a'"):
        cute_attn.warmup(64, arch="sm_90a")
    cute_attn.warmup(64, arch="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_warmup_without_a_gpu_wants_an_arch():
    with pytest.raises(ValueError, match="name one, 'sm90'"):
        cute_attn.warmup(64)


@pytest.mark.compile
def test_warmup_for_a_named_arch(monkeypatch, tmp_path):
    monkeypatch.setitem(jit.BUILDERS, "sm90", "host_kernel:compile_fwd")
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "runs_here", lambda arch: False)
    jit.forget()
    before = jit.count()
    for dtype in ("bf16", BF16):
        cute_attn.warmup(64, dtype=dtype, causal=True, arch="sm90")
    assert jit.count() == before + 2
    assert len(list(tmp_path.glob("*.o"))) == 2
    few = tensors(batch=1, seqlen_q=1, seqlen_k=4096, heads_q=2, heads_kv=1, d=64, dv=64)
    for shapes in (tensors(d=64, dv=64), few):
        e = cute_attn.explain(*shapes, causal=True, arch="sm90")
        assert e.compiled == "in memory" and e.config.split_kv == (shapes is few)
    jit.forget()
    e = cute_attn.explain(*tensors(d=64, dv=64), causal=True, arch="sm90")
    assert e.compiled == "on disk"
    cute_attn.warmup(64, causal=True, softmax_scale=-1.0, arch="sm90")
    assert jit.count() == before + 4
    cute_attn.warmup(64, dtype="fp16", config=FwdConfig(), arch="sm90")
    assert jit.count() == before + 5
    jit.forget()


@pytest.mark.parametrize("before", [False, True])
def test_causal_is_a_bool_whatever_was_called_before(before):
    q = torch.randn(1, 8, 2, 16, dtype=torch.bfloat16)
    if before:
        cute_attn.fwd(q, q, q, causal=True)
    for causal in (1, 1.0, "yes", None):
        with pytest.raises(TypeError, match="causal is .* a bool is wanted"):
            cute_attn.fwd(q, q, q, causal=causal)


@pytest.mark.parametrize("scale", [10**400, float("nan"), float("inf"), 1e39])
def test_scale_out_of_range(scale):
    q = torch.randn(1, 8, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="softmax_scale is"):
        cute_attn.fwd(q, q, q, softmax_scale=scale)


@pytest.mark.parametrize("scale", ["0.1", b"1", True, torch.tensor(1.0)])
def test_scale_of_another_type(scale):
    q = torch.randn(1, 8, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="softmax_scale is"):
        cute_attn.fwd(q, q, q, softmax_scale=scale)


def test_scale_below_float32_is_zero():
    q = torch.ones(1, 4, 1, 16, dtype=torch.bfloat16)
    k = q.clone()
    k[:, 1] = -torch.inf  # a masked key, whatever the scale
    out, lse = cute_attn.fwd(q, k, q, softmax_scale=1e-300, return_lse=True)
    assert (out == 1).all() and torch.allclose(lse, torch.tensor(3.0).log())


def test_tangents_are_not_dropped():
    q = torch.randn(1, 8, 2, 16, dtype=torch.bfloat16)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="k carries a tangent"):
            cute_attn.fwd(q, dual, q)
        cute_attn.fwd(q, q, q)
    with pytest.raises(NotImplementedError, match="q carries a tangent"):
        torch.func.jvp(lambda a: cute_attn.fwd(a, q, q), (q,), (q,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype):
    q = torch.randn(2, 70, 2, 16, dtype=dtype)
    for v in (q, q.index_fill(1, torch.tensor([3]), torch.nan)):
        want = cute_attn.fwd(q, q, v, return_lse=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = cute_attn.fwd(q, q, v, return_lse=True)
        for a, b in zip(got, want):
            assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))


@pytest.mark.parametrize(
    "error, name, arguments",
    [
        (TypeError, "head_dim is '128'", {"head_dim": "128"}),
        (TypeError, "head_dim is 64.0", {"head_dim": 64.0}),
        (ValueError, "head_dim_v is 0", {"head_dim": 64, "head_dim_v": 0}),
        (TypeError, "causal is 'yes'", {"head_dim": 64, "causal": "yes"}),
        (ValueError, "dtype '3'", {"head_dim": 64, "dtype": 3}),
    ],
)
@pytest.mark.parametrize("arch", ["cpu", "sm90"])
def test_warmup_of_what_cannot_be(arch, error, name, arguments):
    with pytest.raises(error, match=name):
        cute_attn.warmup(arch=arch, **arguments)
