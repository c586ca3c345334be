"""What reaches the kernel: layouts, outputs, plans, counters. No GPU: see standin.py."""

import contextlib
import itertools
import math

import pytest

torch = pytest.importorskip("torch")

from standin import BF16, check, tensors  # noqa: E402

import cute_attn  # noqa: E402
from cute_attn import compile as jit  # noqa: E402
from cute_attn import launch  # noqa: E402
from cute_attn.config import FwdConfig  # noqa: E402


def strided(t, kind):
    """The same values in other memory."""
    b, s, h, d = t.shape
    if kind == "heads first":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "sliced rows":
        return torch.cat([t, t], 3)[..., :d]
    if kind == "rows of 20":  # 40 bytes: not a multiple of 16
        return torch.cat([t, t], 3).repeat(1, 1, 1, 2)[..., : d + 4].contiguous()[..., :d]
    if kind == "strided last dim":
        return torch.stack([t, t], 4).flatten(3)[..., ::2]
    if kind == "last dim first":
        return t.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    if kind == "misaligned base":
        return torch.cat([torch.zeros(1, dtype=t.dtype), t.flatten()])[1:].view(t.shape)
    if kind == "expanded batch":
        return t[:1].expand(t.shape)
    if kind == "expanded seqlen":
        return t[:, :1].expand(t.shape)
    if kind == "expanded heads":
        return t[:, :, :1].expand(t.shape)
    if kind == "expanded, misaligned":
        return strided(t[:, :, :1].contiguous(), "misaligned base").expand(t.shape)
    if kind == "expanded everywhere":
        return t[:1, :1, :1, :1].expand(t.shape)
    raise AssertionError(kind)


KINDS = {  # kind -> copied
    "heads first": False,
    "sliced rows": False,
    "rows of 20": True,
    "strided last dim": True,
    "last dim first": True,
    "misaligned base": True,
    "expanded batch": False,
    "expanded seqlen": False,
    "expanded heads": False,
    "expanded, misaligned": True,
    "expanded everywhere": True,
}


@pytest.mark.parametrize("kind, copied", KINDS.items())
@pytest.mark.parametrize("which", [0, 1, 2])
def test_strides(stand_in, kind, copied, which):
    qkv = list(tensors())
    qkv[which] = strided(qkv[which], kind)
    before = [t.clone() for t in qkv]
    explained = cute_attn.explain(*qkv, arch="sm90")
    assert explained.copies == (("q", "k", "v")[which],) * copied
    for _ in range(2):  # a plan that was found must copy too
        check(*qkv)
        for i, (given, used) in enumerate(zip(qkv, stand_in.launches[-1])):
            assert (given.data_ptr() != used.data_ptr()) == (copied and i == which)
    assert all(torch.equal(t, b) for t, b in zip(qkv, before))
    assert len(stand_in.built) == 1


def test_expanded_heads_are_copied_once(stand_in):
    """A copy of an expanded tensor is no larger than what it shows."""
    q, k, v = tensors()
    check(q, strided(k, "expanded, misaligned"), v)
    assert stand_in.launches[-1][1].stride(2) == 0


@pytest.mark.parametrize("kind", ["odd", "zero", "huge"])
def test_b35_any_stride_on_dimensions_of_size_one(stand_in, kind):
    stride = {"odd": 3, "zero": 0, "huge": 1 << 45}[kind]
    q, k, v = tensors(1, 1, 1, 1, 1, 64, 64)
    odd = [t.as_strided(t.shape, (stride, stride, stride, 1)) for t in (q, k, v)]
    out = torch.empty_like(q).as_strided(q.shape, (stride, stride, stride, 1))
    assert check(*odd, out=out)[0] is out
    for given, used in zip((*odd, out), stand_in.launches[-1]):
        assert given.data_ptr() == used.data_ptr()
    assert not cute_attn.explain(*odd, arch="sm90").copies


def test_same_layout_other_alignment(stand_in):
    """Alignment is no part of the plan: an aligned call first, then a misaligned one."""
    q, k, v = tensors()
    check(q, k, v)
    moved = strided(q, "misaligned base")
    assert moved.stride() == q.stride()
    check(moved, k, v)
    assert stand_in.launches[-1][0].data_ptr() != moved.data_ptr()


OUTS = [
    "contiguous",
    "heads first",
    "sliced rows",
    "rows of 20",
    "strided last dim",
    "misaligned base",
]


@pytest.mark.parametrize("kind", OUTS)
def test_out_of_any_strides(stand_in, kind):
    q, k, v = tensors()
    out = torch.full((2, 5, 4, 16), math.nan, dtype=BF16)
    out = out if kind == "contiguous" else strided(out, kind)
    direct = kind in OUTS[:3]
    for _ in range(2):
        assert check(q, k, v, out=out)[0] is out
        assert (stand_in.launches[-1][3].data_ptr() == out.data_ptr()) == direct
    assert check(q, k, v, out=torch.empty(2, 5, 4, 16, dtype=BF16))[0] is not out


def test_out_overlapping_an_input(stand_in):
    buffer = torch.zeros(3 * 2 * 5 * 4 * 16, dtype=BF16)
    q, k, out = (buffer[i * 640 : (i + 1) * 640].view(2, 5, 4, 16) for i in range(3))
    for v in (q, k):
        cute_attn.fwd(q, k, v, out=out)
    for start in (0, 632, 1272):
        shifted = buffer[start : start + 640].view(2, 5, 4, 16)
        with pytest.raises(ValueError, match="out overlaps [qk]"):
            cute_attn.fwd(q, k, k, out=shifted)


# Plans


def test_one_kernel_for_all_sizes_and_strides(stand_in):
    for b, sq, sk, hk, group in itertools.product((1, 3), (1, 9), (1, 6), (1, 2), (1, 3)):
        check(*tensors(b, sq, sk, hk * group, hk))
    q, k, v = tensors()
    check(strided(q, "heads first"), strided(k, "sliced rows"), strided(v, "expanded heads"))
    assert len(stand_in.built) == 1


def test_b115_b116_every_field_of_the_call_counts(stand_in):
    """Same shapes, everything else toggled in all orders: each right."""
    q, k, v = tensors()
    calls = [
        {"causal": causal, "softmax_scale": scale}
        for causal in (False, True)
        for scale in (None, 0.1, 0.5, -0.5, 0)
    ]
    for order in (calls, calls[::-1], calls[::3] + calls[1::3]):
        for call in order:
            check(q, k, v, **call)
    for dtype in (torch.float16, BF16):
        check(*(t.to(dtype) for t in (q, k, v)))
    assert cute_attn.fwd(*(t.half() for t in (q, k, v))).dtype == torch.float16


def test_config_reaches_the_kernel(stand_in):
    q, k, v = tensors()
    for config in (FwdConfig(64, 64), FwdConfig(64, 32), FwdConfig(64, 64)):
        cute_attn.fwd(q, k, v, config=config)
        assert stand_in.built[-1][1] in (config, FwdConfig(64, 32))
    assert len(stand_in.built) == 2


def test_a_warm_call_asks_nothing(stand_in, monkeypatch):
    """One look-up: no check, no tuning, no device query, no dlpack."""
    q, k, v = tensors()
    want = cute_attn.fwd(q, k, v)

    def forbidden(*_, **__):
        raise AssertionError("asked on the warm path")

    for owner, names in (
        (launch, ("make_plan", "choose_config", "choose_arch", "multiprocessors", "loadable")),
        (jit, ("get", "in_memory", "state")),
        (torch.cuda, ("get_device_properties", "get_device_capability", "current_stream")),
        (torch.Tensor, ("__dlpack__", "as_strided", "contiguous", "clone")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, forbidden)
    stand_in.fake_result = want
    assert torch.equal(cute_attn.fwd(q, k, v), want)


def test_one_tensor_elsewhere_finds_no_plan():
    q, k, v = tensors()
    cute_attn.fwd(q, k, v)
    with pytest.raises(ValueError, match="v.device is meta"):
        cute_attn.fwd(q, k, v.to("meta"))


def test_the_plan_cache_is_bounded(stand_in, monkeypatch):
    monkeypatch.setattr(launch, "MAX_PLANS", 4)
    for n in range(1, 12):
        check(*tensors(1, n, n, 1, 1))
        assert len(launch._plans) <= 4


def test_launches_on_another_device_make_it_current(stand_in, monkeypatch):
    entered = []

    @contextlib.contextmanager
    def guard(index):
        entered.append(index)
        yield

    q, k, v = tensors()
    cute_attn.fwd(q, k, v)
    monkeypatch.setattr(torch.cuda, "device", guard)
    cute_attn.fwd(q, k, v)
    assert not entered
    monkeypatch.setattr(launch, "_current_device", lambda: 1)
    cute_attn.fwd(q, k, v)
    assert entered == [0]


# Counters


def dynamic(stand_in):
    cute_attn.fwd(*tensors(), config=FwdConfig(schedule="dynamic"))
    return stand_in.counters[-1]


def test_a_counter_per_stream(stand_in):
    first = dynamic(stand_in)
    assert dynamic(stand_in) == first
    stand_in.stream = 8
    second = dynamic(stand_in)
    assert second != first
    stand_in.stream = 7
    assert dynamic(stand_in) == first


def test_a_counter_per_captured_launch(stand_in):
    eager = dynamic(stand_in)
    stand_in.capturing = True
    captured = [dynamic(stand_in) for _ in range(8)]
    assert len({eager, *captured}) == 9
    assert dynamic(stand_in) not in captured  # none free: the graph clears its own
    stand_in.capturing = False
    assert dynamic(stand_in) == eager


def test_schedules_without_tickets_share_an_idle_counter(stand_in):
    for stream in (7, 8):
        stand_in.stream = stream
        cute_attn.fwd(*tensors(), config=FwdConfig(schedule="static"))
    assert len(set(stand_in.counters)) == 1 and not launch._counters


def test_a_failed_launch_drops_its_counter(stand_in):
    dynamic(stand_in)
    held = launch._counters[0, 7]
    stand_in.fail = True
    with pytest.raises(RuntimeError, match="launch failed"):
        dynamic(stand_in)
    stand_in.fail = False
    dynamic(stand_in)
    assert launch._counters[0, 7] is not held


def test_b103_no_compile_during_capture(stand_in):
    stand_in.capturing = True
    with pytest.raises(RuntimeError, match="warm up first"):
        cute_attn.fwd(*tensors())
    assert not stand_in.built
    stand_in.capturing = False
    check(*tensors())
    stand_in.capturing = True
    check(*tensors())
    check(*tensors(batch=3))  # another plan, the same kernel


def test_kernel_in_memory_but_device_never_prepared(stand_in):
    """Warmed up without a launch, then captured: counters that the graph clears."""
    q, k, v = tensors()
    plan = launch.make_plan(q, k, v)
    jit.get(plan.problem, plan.config, "sm90")
    stand_in.capturing = True
    check(q, k, v)


@pytest.mark.parametrize("batch", [1, 5])
def test_keys_are_split_for_few_queries(stand_in, batch):
    q, k, v = tensors(batch, 3, 4100, 4, 2, 64, 64)
    check(q, k, v, causal=True)
    assert stand_in.parts == 7  # of 5 blocks each but the last, whatever the batch
    assert cute_attn.explain(q, k, v, arch="sm90").parts == 7
    cute_attn.fwd(q, k, v, config=FwdConfig())
    assert stand_in.parts == 1
    check(*tensors(1, 3, 1000, 4, 2, 64, 64))
    assert stand_in.parts == 1
