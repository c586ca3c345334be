"""quantize_qkv's device path on CPU tensors, by stand-ins for the kernels: plans, what a kernel is
given, what the pack holds. And the layout of vt."""

import dataclasses
import functools

import pytest
import standin_fp8
import torch
from fp8_oracle import E4M3
from helpers import BF16, FP16, qkv, rand, views

import cute_attn
from cute_attn import fp8_prepare, quantize, quantize_launch
from cute_attn import reference_fp8 as reference
from cute_attn.config import QuantizeConfig
from cute_attn.kernels.common import v_layout

NAMES = ("q_descale", "k_descale", "v_descale", "q_dot_k_shift", "k_shift", "v_shift", "qk_balance")


@pytest.fixture
def device(monkeypatch, stand_in):
    return standin_fp8.install(monkeypatch, stand_in)


def on_cpu(monkeypatch, *tensors, **options):
    with monkeypatch.context() as m:
        m.setattr(quantize, "_has_kernels", lambda q: False)
        return cute_attn.quantize_qkv(*tensors, **options)


def same_pack(got, want, same=torch.equal):
    """same: of scales and vectors. Torch's sums depend on strides."""
    for name in ("q", "k"):
        assert torch.equal(getattr(got, name).float(), getattr(want, name).float()), name
    assert torch.equal(quantize.values(got).float(), want.v.float())
    for name in NAMES:
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        assert a is None or a.shape == b.shape and same(a, b), name
    for name in ("k_block", "preset", "dtype", "hadamard_seed"):
        assert getattr(got, name) == getattr(want, name), name


def options_of(heads, dims, batch):
    shift, shift_v = rand((heads, dims[0]), torch.float32), rand((heads, dims[1]), torch.float32)
    balance = rand((batch, heads, dims[0]), torch.float32).exp()
    angles = rand((70, dims[0] // 2), torch.float32), rand((70, dims[0] // 2), torch.float32)
    return [
        {},
        {"preset": "fp8_hp"},
        {"preset": "fp8_hp", "v_shift": False, "k_shift": False},
        {"k_shift": shift, "v_shift": shift_v, "qk_balance": balance},
        {"k_shift": shift.double(), "v_shift": shift_v.to(BF16), "qk_balance": balance[0].half()},
        {"hadamard_seed": None, "k_shift": False, "v_shift": False, "v_scales": "channel"},
        {"hadamard_seed": 3, "k_block": 64, "v_scales": "channel"},
        {"k_block": "head"},
        {"k_block": 48, "qk_balance": balance},
        {"cos": angles[0], "sin": angles[1]},
        {"cos": angles[0].half(), "sin": angles[1].to(BF16)},
        {"cos": angles[0][:, :5].half(), "sin": angles[1][:, :5].half()},
        {"cos": angles[0].T.contiguous().T, "sin": angles[1]},
    ]


@pytest.mark.parametrize("case", range(13))
def test_the_pack_is_that_of_the_cpu_path(device, monkeypatch, case):
    q, k, v = qkv(2, 70, 70, (4, 2), (32, 48))
    options = options_of(2, (32, 48), 2)[case]
    want = on_cpu(monkeypatch, q, k, v, **options)
    for _ in range(2):
        same_pack(cute_attn.quantize_qkv(q, k, v, **options), want)
    assert len(device.built) == 1 and len(device.quantised) == 2


def test_every_class_of_call_has_its_kernel(device):
    q, k, v = qkv(2, 70, 70, (4, 2), (32, 48))
    configs = set()
    for options in options_of(2, (32, 48), 2):
        cute_attn.quantize_qkv(q, k, v, **options)
        configs.add(device.built[-1][1])
    assert len(configs) == 11 == len(device.built)  # three calls with cos and sin share one


@pytest.mark.parametrize("name", sorted(views("cpu")))
def test_strides(device, monkeypatch, name):
    q, k, v = views("cpu")[name]
    want = on_cpu(monkeypatch, q, k, v)
    same_pack(cute_attn.quantize_qkv(q, k, v), want, lambda a, b: torch.allclose(a, b, atol=1e-5))
    used = device.quantised[-1][:3]
    copied = [a.data_ptr() != b.data_ptr() for a, b in zip(used, (q, k, v))]
    assert any(copied) == (
        name in ("base not aligned", "stride not a multiple of 8") or "last" in name
    )


def test_what_a_pack_holds(device):
    q, k, v = qkv(1, 20, 150, (4, 2), (64, 80))
    pack = cute_attn.quantize_qkv(q, k, v)
    assert pack.v is None and pack.vt.shape == (1, 2, 80, 256) and pack.vt.dtype == E4M3
    assert (pack.vt[..., 160:].float() == 0).all()
    out, _ = reference.attention_fp8(pack)
    plain = dataclasses.replace(pack, v=quantize.values(pack), vt=None)
    assert torch.equal(out, reference.attention_fp8(plain)[0])
    high = cute_attn.quantize_qkv(q, k, v, preset="fp8_hp", v_shift=False)
    assert high.v is v and high.vt is None and high.v_descale is None
    shift = rand((2, 64), torch.float32)
    assert cute_attn.quantize_qkv(q, k, v, k_shift=shift).k_shift is shift


@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_empty_calls_need_no_kernel(device, monkeypatch, sizes):
    tensors = qkv(*sizes, (4, 2), 32)
    same_pack(cute_attn.quantize_qkv(*tensors), on_cpu(monkeypatch, *tensors))
    cute_attn.quantize.channel_statistics(*tensors)
    assert not device.built


def test_statistics(device, monkeypatch):
    q, k, v = qkv(2, 70, 70, (4, 2), (32, 48))
    got = cute_attn.channel_statistics(q, k, v)
    with monkeypatch.context() as m:
        m.setattr(quantize, "_has_kernels", lambda q: False)
        want = cute_attn.channel_statistics(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert device.built[-1][1].statistics
    cute_attn.quantize_qkv(q, k, v, **got._asdict())
    assert device.built[-1][1] == QuantizeConfig(k_shift="head", v_shift="head", balance="head")


def test_wrong_calls_are_refused_warm_and_cold(device):
    q, k, v = qkv(1, 20, 20, (4, 2), 32)
    for _ in range(2):
        for options, error in (
            ({"hadamard_seed": True}, TypeError),
            ({"hadamard_seed": 1.0}, TypeError),
            ({"k_shift": 0}, TypeError),
            ({"qk_balance": False}, TypeError),
            ({"preset": "int8"}, ValueError),
            ({"k_block": 128.0}, TypeError),
            ({"v_shift": torch.ones(3, 32)}, ValueError),
            ({"cos": torch.ones(20, 16)}, TypeError),
        ):
            with pytest.raises(error):
                cute_attn.quantize_qkv(q, k, v, **options)
        cute_attn.quantize_qkv(q, k, v, hadamard_seed=1)
    with pytest.raises(TypeError, match=r"q is a list"):
        cute_attn.quantize_qkv([1], k, v)
    with pytest.raises(TypeError, match=r"k.dtype"):
        cute_attn.quantize_qkv(q, k.to(FP16), v)


def test_a_graph_under_capture_is_not_made_to_wait(device):
    q, k, v = qkv(1, 20, 20, (4, 2), 32)
    device.capturing = True
    with pytest.raises(RuntimeError, match="warm up first"):
        cute_attn.quantize_qkv(q, k, v)
    with pytest.raises(RuntimeError, match="warm up first"):
        cute_attn.quantize_qkv(q, k, v, hadamard_seed=None)
    device.capturing = False
    cute_attn.quantize_qkv(q, k, v)
    device.capturing = True
    cute_attn.quantize_qkv(q, k, v)


def test_chunks_are_few():
    for seqlen in (1, 127, 128, 129, 8192, 8193, 16384, 131072, 10**6):
        rows = quantize_launch._chunk(seqlen)
        assert rows % 128 == 0 and -(-seqlen // rows) <= quantize_launch.MAX_CHUNKS
        assert rows == 128 or -(-seqlen // (rows - 128)) > quantize_launch.MAX_CHUNKS


# vt


def test_the_order_of_keys_is_a_permutation_of_16():
    keys = [v_layout.key_at(p) for p in range(v_layout.GROUP)]
    assert sorted(keys) == list(range(v_layout.GROUP))
    for p, key in enumerate(keys):
        h, t, j = p // 16, p // 4 % 4, p % 4
        assert key == 16 * h + 8 * (j >> 1) + 2 * t + (j & 1)
        assert v_layout.position_of(key) == p
    assert [v_layout.key_at(p + 32) for p in range(32)] == [key + 32 for key in keys]


@pytest.mark.parametrize("seqlen", [1, 31, 128, 200])
def test_torch_and_kernels_agree_on_vt(seqlen):
    v = rand((2, seqlen, 3, 32)).to(E4M3)
    vt = fp8_prepare.transposed(v)
    assert vt.shape == (2, 3, 32, -(-seqlen // 128) * 128) and vt.is_contiguous()
    for key in range(vt.shape[3]):
        got = vt[..., v_layout.position_of(key)].float()
        assert torch.equal(got, v[:, key].float() if key < seqlen else torch.zeros(2, 3, 32))
    assert torch.equal(fp8_prepare.restored(vt, seqlen).float(), v.float())


def test_transpose_v(device):
    whole = rand((2, 150, 3, 64)).to(E4M3)
    odd = rand((2, 150, 3, 72)).to(E4M3)[..., 3:67]
    for v in (whole, whole[:, ::2], whole[:, :1].expand(2, 150, 3, 64), odd, whole[..., :16]):
        assert torch.equal(fp8_prepare.transpose_v(v).float(), fp8_prepare.transposed(v).float())
    with pytest.raises(TypeError, match=r"v.dtype is torch.bfloat16"):
        fp8_prepare.transpose_v(rand((1, 5, 1, 16)))
    with pytest.raises(ValueError, match=r"v.shape is"):
        fp8_prepare.transpose_v(rand((1, 5, 1, 24)).to(E4M3))


def test_transpose_v_without_a_kernel():
    v = rand((1, 40, 2, 16)).to(E4M3)
    assert torch.equal(fp8_prepare.transpose_v(v).float(), fp8_prepare.transposed(v).float())
    assert fp8_prepare.transpose_v(v[:, :0]).shape == (1, 2, 16, 0)


# What the compiled function takes


@pytest.mark.compile
@pytest.mark.parametrize("case", range(14))
def test_the_compiled_function_takes_what_it_is_given(monkeypatch, stand_in, case):
    """Shapes, dtypes, strides and None of every argument; and both sides lay out scratch alike."""
    import cutlass.cute as cute
    import host_quantize

    standin_fp8.install(monkeypatch, stand_in)
    cpu = {"memspace": cute.AddressSpace.generic}
    for name in ("make_fake_tensor", "make_fake_compact_tensor"):
        plain = getattr(cute.runtime, name)
        monkeypatch.setattr(cute.runtime, name, functools.partial(plain, **cpu))
    seen = []

    def build(problem, config, arch):
        compiled = host_quantize.compile_quantize(problem, config)

        def call(*arguments):
            compiled(*arguments)
            seen.append((arguments[17][0].item(), arguments[17].numel()))

        return call

    monkeypatch.setattr(stand_in, "build", build)
    q, k, v = qkv(2, 70, 70, (4, 2), (32, 48))
    options = [*options_of(2, (32, 48), 2), None][case]
    if options is None:
        cute_attn.channel_statistics(q, k, v)
    else:
        cute_attn.quantize_qkv(q, k, v, **options)
    ((used, allocated),) = seen
    assert allocated == max(4, used)
