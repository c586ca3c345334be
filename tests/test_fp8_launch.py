"""What reaches the FP8 kernel: a stand-in computes from the kernel's own arguments, as
kernels/hopper/fp8_fwd.py describes them, and fwd's CPU path from the pack."""

import contextlib
import copy
import io
from dataclasses import replace

import pytest
import standin_fp8
import torch
from fp8_oracle import E4M3
from helpers import BF16, rand

import cute_attn
from cute_attn import fp8, fp8_autograd, fp8_launch, fp8_prepare, launch, quantize, quantize_launch
from cute_attn.config import Fp8Config
from cute_attn.fp8_prepare import transpose_v
from cute_attn.quantize import QuantizedQKV
from cute_attn.reference_fp8 import attention_fp8

PROMOTING = Fp8Config(128, 128, promote=4)


@pytest.fixture
def seen(stand_in, monkeypatch):
    """Calls of CPU tensors are planned, but quantize_qkv stays in torch; see kernels."""
    return standin_fp8.install_forward(monkeypatch, stand_in)


def made(sq=40, sk=400, **options):
    q, k, v = rand((2, sq, 4, 64)), rand((2, sk, 2, 64), seed=1), rand((2, sk, 2, 48), seed=2)
    return cute_attn.quantize_qkv(*(t.to(BF16) for t in (q, k, v)), **options)


def check(pack, causal=True, scale=0.2, dtype=BF16, config=None, out=None):
    options = {"causal": causal, "softmax_scale": scale, "out_dtype": dtype, "config": config}
    first = cute_attn.fwd(pack, **options).clone()
    got, lse = cute_attn.fwd(pack, out=out, return_lse=True, **options)
    assert torch.equal(first, got)
    want, want_lse = attention_fp8(pack, causal=causal, softmax_scale=scale, out_dtype=dtype)
    assert got.dtype == dtype and got.shape == want.shape
    assert (got.float() - want.float()).norm() < 0.04 * want.float().norm()
    torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=1e-5)
    return got


@pytest.mark.parametrize("k_block", [None, 16, 48, 256, 384, "head", 512])
def test_factors_of_keys(k_block, seen):
    check(made(k_block=k_block))
    assert seen[0][0].fine_k == (k_block in (16, 48))


def test_factors_and_shifts_of_channels(seen):
    check(made(v_scales="channel"), causal=False)
    check(made(v_scales="channel", v_shift=False, k_shift=False))
    pack = made(v_scales="channel")
    odd = torch.zeros(2, 2, 49)[..., 1:].copy_(pack.v_descale)
    check(replace(pack, v_descale=odd, v_shift=pack.v_shift[0].double()))


def test_16_bit_v(seen):
    check(made(preset="fp8_hp"), dtype=torch.float16)
    assert seen[0][0].v_dtype == "bf16" and seen[0][0].dtype == "fp16"


def test_negative_scale(seen):
    check(made(), scale=-0.3)
    assert seen[0][0].negative_scale


@pytest.mark.parametrize("form", ["none", "one", "head", "strided"])
def test_flash_attention_3_convention(form, seen):
    pack = made(k_shift=False, v_shift=False)
    scales = torch.rand(3, 2, 2) + 0.5
    if form == "strided":
        scales = scales.transpose(1, 2).contiguous().transpose(1, 2)
    given = {"none": (None,) * 3, "one": scales.flatten()[:3].split(1)}.get(form, tuple(scales))
    wide = torch.zeros(2, 40, 4, 72, dtype=torch.uint8)
    q = wide.view(E4M3)[..., 8:]
    q.view(torch.uint8).copy_(pack.q.view(torch.uint8))
    check(QuantizedQKV(q, pack.k, pack.v, *given, 128, "fp8", BF16, *[None] * 5))


@pytest.mark.parametrize("form", ["head", "channel", "vt", "out"])
def test_wide_v_in_two_launches_where_sums_leave_the_tensor_core(form, seen):
    q, k, v = (rand((2, 200, 2, d), seed=d).to(BF16) for d in (64, 80, 208))
    scales = "head" if form == "head" else "channel"
    pack = cute_attn.quantize_qkv(q, k[..., :64], v, v_scales=scales)
    want = check(pack)
    assert seen[-1][0].head_dim_v == 224
    given = replace(pack, v=None, vt=transpose_v(pack.v)) if form == "vt" else pack
    out = torch.empty(2, 200, 2, 209, dtype=BF16)[..., 1:] if form == "out" else None
    options = {"causal": True, "softmax_scale": 0.2, "config": PROMOTING, "out": out}
    for _ in range(2):
        got = cute_attn.fwd(given, **options)
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)
        assert [problem.head_dim_v for problem, *_ in seen[-2:]] == [128, 96]
    check(made(), config=PROMOTING)
    assert seen[-1][0].head_dim_v == 64


def test_raw_v_of_many_keys_leaves_the_tensor_core(seen, monkeypatch):
    """Unless a config says otherwise; packs whose mean was taken out have no need to."""
    for sk, promoted in ((512, False), (513, True)):
        q, k, v = (rand((2, n, 2, d), seed=d).to(E4M3) for n, d in ((9, 64), (sk, 64), (sk, 160)))
        agree(monkeypatch, q, k, v)
        assert len(seen) == 2 + 2 * promoted and bool(seen[-1][1].promote) == promoted
        agree(monkeypatch, q, k, v, config=Fp8Config(128, 128))
        assert len(seen) == 4 + 2 * promoted and not seen[-1][1].promote
        seen.clear()
    for shift in (None, False):
        check(made(sk=600, v_shift=shift))
        assert bool(seen[-1][1].promote) == (shift is False)
    check(made(sk=600, v_shift=False, preset="fp8_hp"))
    assert not seen[-1][1].promote


def test_out_and_config(seen):
    out = torch.empty(2, 40, 4, 49, dtype=BF16)[..., 1:]
    assert check(made(), out=out, config=Fp8Config(128, 224)) is out
    assert seen[0][1].tile_n == 224 and seen[0][0].fine_k
    with pytest.raises(ValueError, match="shared memory"):
        check(made(), config=Fp8Config(128, 224, kv_stages=8))


# Plans


@pytest.fixture
def kernels(seen, monkeypatch):
    """quantize_qkv goes to stand-ins too."""
    monkeypatch.setattr(quantize, "_has_kernels", lambda q: isinstance(q, torch.Tensor))
    return seen


def sixteen_bit(batch=2, seed=0, dtype=BF16):
    shapes = (batch, 40, 4, 64), (batch, 400, 2, 64), (batch, 400, 2, 48)
    return [rand(s, seed=seed + i).to(dtype) for i, s in enumerate(shapes)]


def e4m3(seed=0):
    """FlashAttention-3's convention."""
    tensors = [t.to(E4M3) for t in sixteen_bit(seed=seed)]
    scales = torch.rand(3, 2, 2, generator=torch.Generator().manual_seed(seed)) + 0.5
    return tensors, {f"{n}_descale": s for n, s in zip("qkv", scales)}


def expected(monkeypatch, *args, **options):
    """By the CPU path."""
    with monkeypatch.context() as m:
        m.setattr(fp8_launch, "serves", lambda q: False)
        m.setattr(quantize, "_has_kernels", lambda q: False)
        return cute_attn.fwd(*args, return_lse=True, **options)


def agree(monkeypatch, *args, **options):
    """Twice: the plan is made, then found."""
    want, want_lse = expected(monkeypatch, *args, **options)
    for _ in range(2):
        out, lse = cute_attn.fwd(*args, return_lse=True, **options)
        assert out.dtype == want.dtype and out.shape == want.shape
        assert (out.float() - want.float()).norm() < 0.05 * want.float().norm()
        torch.testing.assert_close(lse, want_lse, atol=2e-2, rtol=1e-3)


def calls():
    q, k, v = sixteen_bit()
    tensors, descales = e4m3()
    return {
        "pack": ((cute_attn.quantize_qkv(q, k, v),), {}),
        "e4m3": (tensors, descales),
        "preset": ((q, k, v), {"preset": "fp8"}),
        "wide": ((q, k, torch.cat([v] * 4, 3)), {"preset": "fp8", "config": PROMOTING}),
    }


@pytest.mark.parametrize("kind", ["pack", "e4m3", "preset", "wide"])
def test_a_warm_call_asks_nothing(kind, kernels, monkeypatch):
    args, options = calls()[kind]
    want = cute_attn.fwd(*args, **options)

    def forbidden(*_, **__):
        raise AssertionError("asked on the warm path")

    for owner, names in (
        (fp8, ("_checked_call", "_check_tensors", "checked_preset", "_quantised")),
        (fp8_launch, ("make_plan", "plan_preset", "choose_config", "shaped_as_v")),
        (fp8_prepare, ("make_plan", "_loadable")),
        (quantize_launch, ("find", "make_plan")),
        (launch, ("choose_arch", "multiprocessors", "loadable", "compiled", "_bind")),
        (torch, ("full", "empty")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, forbidden)
    assert torch.equal(cute_attn.fwd(*args, **options), want)


def test_lse_is_allocated_for_who_wants_it(kernels, monkeypatch):
    one = torch.zeros(())
    monkeypatch.setattr(launch, "_no_lse", {0: one})
    for args, options in calls().values():
        cute_attn.fwd(*args, **options)
        assert kernels[-1][2].data_ptr() == one.data_ptr() and not any(kernels[-1][2].stride())
        lse = cute_attn.fwd(*args, return_lse=True, **options)[1]
        assert kernels[-1][2].data_ptr() == lse.data_ptr() and lse.is_contiguous()


@pytest.mark.parametrize("preset", ["fp8", "fp8_hp"])
def test_a_preset_is_quantize_qkv_and_fwd(preset, kernels, monkeypatch):
    for seed in range(2):
        q, k, v = sixteen_bit(seed=seed)
        pack = cute_attn.quantize_qkv(q, k, v, preset=preset, k_block=64)
        for options in ({}, {"causal": True, "softmax_scale": 1, "out_dtype": torch.float16}):
            want = cute_attn.fwd(pack, return_lse=True, **options)
            out = torch.empty(2, 40, 4, 48, dtype=want[0].dtype)
            for given in (None, out):
                got = cute_attn.fwd(
                    q, k, v, preset=preset, k_block=64, return_lse=True, out=given, **options
                )
                assert all(map(torch.equal, got, want)) and (given is None or got[0] is out)
    agree(monkeypatch, *sixteen_bit(), preset=preset)


@pytest.mark.parametrize("kind", ["pack", "e4m3", "preset", "wide"])
def test_out_in_e4m3(kind, kernels, monkeypatch):
    args, options = calls()[kind]
    exact, exact_lse = cute_attn.fwd(*args, **options, return_lse=True)
    top = exact.float().abs().max()
    empty = torch.empty(exact.numel() + 1, dtype=torch.uint8)[1:].view(E4M3).view(exact.shape)
    dtype = {"out_dtype": E4M3}
    for _ in range(2):
        for scale, out in (
            (None, {}),
            (torch.tensor([150.0]), {}),
            (torch.tensor(300.0), {}),
            (1e6 * torch.ones(3)[1:2], {"out": empty}),
        ):
            more = options | dtype | out
            got, lse, amax = cute_attn.fwd(
                *args, **more, o_scale=scale, return_lse=True, return_amax=True
            )
            assert got.dtype == E4M3 and torch.equal(lse, exact_lse) and amax.shape == (1,)
            assert not out or got is empty
            assert amax.item() == pytest.approx(top.item(), rel=1e-2)
            want = quantize.saturate(exact.float() * (1 if scale is None else scale)).float()
            assert (got.float() - want).norm() < 0.03 * want.norm()
            alone = cute_attn.fwd(*args, **more, o_scale=scale).float()
            assert torch.equal(alone, got.float())
            pair = cute_attn.fwd(*args, **more, o_scale=scale, return_amax=True)
            assert len(pair) == 2 and torch.equal(pair[1], amax)
    assert {p.dtype for p, *_ in kernels} == {"bf16", "e4m3"}
    with pytest.raises(ValueError, match="return_amax is given and out is in torch.bfloat16"):
        cute_attn.fwd(*args, **options, return_amax=True)


def test_out_in_e4m3_of_nothing_and_in_a_graph(kernels, stand_in, monkeypatch):
    (q, k, v), _ = e4m3()
    options = {"out_dtype": E4M3, "return_amax": True}
    for given in ((q[:, :0], k, v), (q, k[:, :0], v[:, :0])):
        got, amax = cute_attn.fwd(*given, **options)
        assert got.shape == (2, given[0].shape[1], 4, 48) and got.dtype == E4M3
        assert not got.float().any() and amax.tolist() == [0.0]
    want = cute_attn.fwd(q, k, v, **options)
    fp8_launch._plans.clear(), fp8_launch._constants.clear()
    stand_in.capturing = True
    for _ in range(2):
        got = cute_attn.fwd(q, k, v, **options)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(got, want))


def test_every_field_of_the_call_counts(seen, monkeypatch):
    tensors, heads = e4m3()
    fine = {
        "q_descale": torch.rand(2, 4, 40) + 0.5,
        "k_descale": torch.rand(2, 2, 7) + 0.5,
        "v_descale": torch.rand(2, 2, 48) + 0.5,
    }
    strided = {n: t.transpose(0, 1).contiguous().transpose(0, 1) for n, t in fine.items()}
    one = {n: torch.rand(1) + 0.5 for n in heads}
    for _ in range(2):
        for scales in ({}, one, heads, fine, strided):
            block = {"k_block": 64} if scales is fine or scales is strided else {}
            for option in (
                {},
                {"causal": True},
                {"softmax_scale": -0.2},
                {"softmax_scale": 1},
                {"softmax_scale": -1e-38},
                {"out_dtype": torch.float16},
                {"config": Fp8Config(128, 64)},
            ):
                agree(monkeypatch, *tensors, **scales, **option, **block)
    agree(monkeypatch, *tensors, **heads, out_dtype=torch.float16)
    q, k, v = tensors
    agree(monkeypatch, q, k, v.to(BF16), q_descale=heads["q_descale"])


def test_same_layout_other_alignment(seen, monkeypatch):
    """Alignment is no part of a plan: of tensors, and of factors that are read in pairs."""
    tensors, scales = e4m3()
    scales["v_descale"] = torch.rand(2, 2, 48) + 0.5
    agree(monkeypatch, *tensors, **scales)
    for i in range(3):
        t = tensors[i]
        moved = torch.zeros(t.numel() + 1, dtype=torch.uint8)[1:].view(E4M3).view(t.shape)
        moved.copy_(t)
        agree(monkeypatch, *tensors[:i], moved, *tensors[i + 1 :], **scales)
    scales["v_descale"] = torch.rand(2 * 2 * 48 + 1)[1:].view(2, 2, 48) + 0.0
    odd = torch.rand(2 * 2 * 48 + 1)[1:].view(2, 2, 48)
    agree(monkeypatch, *tensors, **scales | {"v_descale": odd})


def test_factors_that_start_inside_their_storage(seen, monkeypatch):
    tensors, _ = e4m3()
    scales = torch.rand(4, 2, 2) + 0.5
    agree(monkeypatch, *tensors, q_descale=scales[3], k_descale=scales[1], v_descale=scales[2])


GRAD, OVERLAP = "a leaf", "memory of q"
WRONG = [
    {"causal": 1},
    {"causal": None},
    {"softmax_scale": "1"},
    {"softmax_scale": float("nan")},
    {"softmax_scale": 1e39},
    {"out": 1},
    {"out": torch.empty(2, 40, 4, 48)},
    {"out": torch.empty(2, 40, 4, 32, dtype=BF16)},
    {"out": torch.empty(2, 40, 4, 48, dtype=BF16, device="meta")},
    {"out": torch.empty(2, 40, 4, 48, dtype=BF16, requires_grad=True)},
    {"out": torch.empty(2, 40, 1, 48, dtype=BF16).expand(2, 40, 4, 48)},
    {"out": torch.empty(2, 40, 4, 48, dtype=BF16), "out_dtype": torch.float16},
    {"out_dtype": torch.float32},
    {"return_amax": True},
    {"o_scale": torch.ones(1)},
    {"out_dtype": E4M3, "o_scale": 1.0},
    {"out_dtype": E4M3, "o_scale": torch.ones(2)},
    {"out_dtype": E4M3, "o_scale": torch.ones(1).double()},
    {"out_dtype": E4M3, "o_scale": torch.ones(1, device="meta")},
    {"out_dtype": E4M3, "o_scale": torch.ones(1, requires_grad=True)},
    {"config": 3},
    {"config": []},
    {"arch": "sm80"},
    {"k_block": 128.0},
    {"k_block": 24},
    {"k_block": True},
    {"k": None},
    {"v": None},
    {"q_descale": torch.ones(2)},
    {"k_descale": torch.ones(2, 2, 3)},
    {"k_descale": torch.ones(1, requires_grad=True)},
    {"v_descale": torch.ones(2, 2, dtype=torch.float64)},
    {"q": GRAD},
    {"out": OVERLAP},
]


@pytest.mark.parametrize("kind", ["pack", "e4m3", "preset"])
def test_errors_are_those_of_the_cpu_path(kind, kernels, monkeypatch):
    """Word for word, when a plan was found for the right call."""
    args, options = calls()[kind]
    right = dict(zip(("q", "k", "v"), args)) | options
    cute_attn.fwd(**right, k_block=None if kind == "pack" else 128)
    for more in ({}, {"out_dtype": E4M3, "o_scale": torch.ones(1)}, {"out_dtype": E4M3}):
        cute_attn.fwd(**right, **more, return_amax="out_dtype" in more)
    q = args[0].q if kind == "pack" else args[0]
    wide = torch.zeros(2 * 40 * 4 * 64, dtype=BF16)
    overlapped = wide.view(q.dtype)[: q.numel()].view(q.shape).copy_(q)
    for wrong in WRONG:
        call, held, name = right | wrong, None, next(iter(wrong))
        if wrong[name] is OVERLAP:
            call["out"], held = wide[: 2 * 40 * 4 * 48].view(2, 40, 4, 48), overlapped
        elif wrong[name] is GRAD:
            held = q.detach().requires_grad_()
        if held is not None:
            call["q"] = replace(args[0], q=held) if kind == "pack" else held
        if kind == "pack" and name in ("k", "v"):
            continue
        found = []
        for by in (cute_attn.fwd, lambda **kw: expected(monkeypatch, **kw)):
            with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
                by(**call)
            found.append((error.type, str(error.value)))
        assert found[0] == found[1]


def test_gradients_of_a_packs_tensors_are_refused(kernels):
    pack = cute_attn.quantize_qkv(*sixteen_bit())
    cute_attn.fwd(pack)
    pack.v_descale.requires_grad_()
    with pytest.raises(NotImplementedError, match="v_descale requires grad"):
        cute_attn.fwd(pack)
    with torch.no_grad():
        cute_attn.fwd(pack)


# Packs


def test_packs_of_one_kind_share_a_plan(kernels):
    packs = [cute_attn.quantize_qkv(*sixteen_bit(seed=s)) for s in range(3)]
    assert packs[0].kind is packs[1].kind is not None
    for pack in packs:
        check(pack)
    assert len(fp8_launch._plans) == 1
    other = cute_attn.quantize_qkv(*sixteen_bit(batch=1))
    assert other.kind is not packs[0].kind
    check(other)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, replace, "saved"])
def test_copies_of_a_pack_have_no_kind(copied, kernels):
    pack = cute_attn.quantize_qkv(*sixteen_bit())
    check(pack)
    if copied == "saved":
        file = io.BytesIO()
        torch.save(pack, file)
        other = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    else:
        other = copied(pack)
    assert other.kind is None and pack.kind is not None
    check(other)
    check(replace(pack, k_descale=torch.rand(2, 2) + 0.5))


def test_a_given_shift_of_other_strides(kernels, monkeypatch):
    """The one tensor of a pack that its kind does not determine."""
    q, k, v = sixteen_bit()
    for shift in (
        torch.rand(2, 48),
        torch.rand(2, 2, 48),
        torch.rand(2 * 2 * 48 + 1)[1:].view(2, 2, 48),
        torch.rand(2, 48).double(),
        torch.rand(48, 2).t(),
    ):
        for _ in range(2):
            check(cute_attn.quantize_qkv(q, k, v, v_shift=shift))


def test_a_v_that_stays_the_callers(kernels):
    q, k, v = sixteen_bit()
    odd = torch.zeros(v.numel() + 1, dtype=BF16)[1:].view(v.shape).copy_(v)
    for given in (v, odd, v.transpose(1, 2).contiguous().transpose(1, 2)):
        pack = cute_attn.quantize_qkv(q, k, given, preset="fp8_hp", v_shift=False)
        assert pack.kind is None
        check(pack)


# Streams, graphs, devices


def test_nothing_is_kept_of_a_graph(kernels, stand_in, monkeypatch):
    """Constants made under capture are filled when the graph runs, and freed with it."""
    tensors, scales = e4m3()
    cute_attn.fwd(*tensors, **scales)
    for held in (fp8_launch._plans, fp8_launch._constants, launch._idle_counters, launch._slots):
        held.clear()
    stand_in.capturing = True
    agree(monkeypatch, *tensors, **scales)
    assert not fp8_launch._constants
    stand_in.capturing = False
    agree(monkeypatch, *tensors, **scales)
    assert len(fp8_launch._constants) == 1
    (plan,) = (p for p in fp8_launch._plans.values())
    assert not plan.missing and len(plan.steps) == 5


@pytest.mark.parametrize("capturing", [False, True])
def test_constants_are_fp32_whatever_the_default(capturing, kernels, stand_in, monkeypatch):
    tensors, _ = e4m3()
    cute_attn.fwd(*tensors)
    fp8_launch._plans.clear(), fp8_launch._constants.clear()
    stand_in.capturing = capturing
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        agree(monkeypatch, *tensors)  # the stand-in asks for fp32
    finally:
        torch.set_default_dtype(default)


def test_no_compile_during_capture(seen, stand_in):
    tensors, scales = e4m3()
    stand_in.capturing = True
    with pytest.raises(RuntimeError, match="warm up first"):
        cute_attn.fwd(*tensors, **scales)
    stand_in.capturing = False
    cute_attn.fwd(*tensors, **scales)
    stand_in.capturing = True
    cute_attn.fwd(*tensors, **scales)


def test_launches_on_another_device_make_it_current(kernels, monkeypatch):
    entered = []

    @contextlib.contextmanager
    def guard(index):
        entered.append(index)
        yield

    made = calls().values()
    for args, options in made:
        cute_attn.fwd(*args, **options)
    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(launch, "_current_device", lambda: 1)
    for args, options in made:
        entered.clear()
        cute_attn.fwd(*args, **options)
        assert entered == [0]


def test_a_failed_launch_drops_its_counter(seen, monkeypatch):
    tensors, scales = e4m3()
    config = Fp8Config(128, 128, schedule="dynamic")
    cute_attn.fwd(*tensors, **scales, config=config)
    assert (0, 7) in launch._counters

    def fail(*_):
        raise RuntimeError("launch failed")

    (plan,) = fp8_launch._plans.values()
    monkeypatch.setattr(plan.call, "kernel", fail)
    with pytest.raises(RuntimeError, match="launch failed"):
        cute_attn.fwd(*tensors, **scales, config=config)
    assert not launch._counters


def test_the_plan_cache_is_bounded(seen, monkeypatch):
    monkeypatch.setattr(launch, "MAX_PLANS", 3)
    for n in range(1, 8):
        q, k, v = (t[:, :n].contiguous() for t in e4m3()[0])
        agree(monkeypatch, q, k, v)
        assert len(fp8_launch._plans) <= 3


def test_empty(kernels):
    (q, k, v), scales = e4m3()
    out = torch.full((2, 40, 4, 48), torch.nan, dtype=BF16)
    for _ in range(2):
        got, lse = cute_attn.fwd(q, k[:, :0], v[:, :0], **scales, out=out, return_lse=True)
        assert got is out and not out.any() and torch.isneginf(lse).all()
        assert cute_attn.fwd(q[:, :0], k, v).shape == (2, 0, 4, 48)
        q16, k16, v16 = sixteen_bit()
        got, lse = cute_attn.fwd(q16, k16[:, :0], v16[:, :0], preset="fp8", return_lse=True)
        assert not got.any() and torch.isneginf(lse).all()
    assert not kernels


def test_flash_attn_func(kernels, monkeypatch):
    """As fwd, checked once, with gradients too; the operator where something watches."""
    q, k, v = sixteen_bit()
    want, want_lse = cute_attn.fwd(q, k, v, preset="fp8", return_lse=True)
    operator = []
    attention = torch.ops.cute_attn.fwd_fp8
    monkeypatch.setattr(fp8_autograd.fp8, "checked_preset", None)
    monkeypatch.setattr(
        torch.ops.cute_attn, "fwd_fp8", lambda *a: operator.append(a) or attention(*a)
    )
    assert torch.equal(cute_attn.flash_attn_func(q, k, v, preset="fp8"), want)
    out, lse, _ = cute_attn.flash_attn_func(q, k, v, preset="fp8", return_attn_probs=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse) and not operator
    leaf = q.clone().requires_grad_()
    out, lse, _ = cute_attn.flash_attn_func(leaf, k, v, preset="fp8", return_attn_probs=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert not operator and out.requires_grad
    with torch.overrides.BaseTorchFunctionMode():
        watched = cute_attn.flash_attn_func(leaf, k, v, preset="fp8")
    assert torch.equal(watched, want) and operator and watched.requires_grad
