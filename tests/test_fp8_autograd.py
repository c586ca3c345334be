"""flash_attn_func with an FP8 preset: its forward, its gradients, what it refuses."""

import importlib
import math
import subprocess
import sys

import pytest
import torch
from fp8_oracle import E4M3, data
from helpers import BF16, FP16, ROOT, qkv, rand
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cute_attn
from cute_attn.reference_backward import attention_backward

# relative errors of dq, dk, dv against fp64: those simulated at seqlen 2048 and 10 to 15 %. A few
# rows with one large weight decide on fa3, where seeds differ by a third: three are pooled, and
# test_errors_are_those_of_the_forward says whose errors they are.
LIMITS = {
    "gauss": (0.009, 0.007, 0.006),
    "train": (0.015, 0.013, 0.012),
    "fa3": (0.09, 0.09, 0.10),
}


def leaves(*args, **options):
    return [t.requires_grad_() for t in qkv(*args, **options)]


def errors(got, want):
    return [((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, want)]


def train_data(seqlen, dim=128, heads=2):
    """Biased channels of K, means of V, and dout of all sizes around 1e-5."""
    g = torch.Generator().manual_seed(4)
    q, k, v = data("gauss", seqlen, dim, heads)
    k = k.float()
    for h in range(heads):
        k[:, :, h, torch.randperm(dim, generator=g)[:4]] += torch.tensor([10.0, -20, 30, -8])
    v = v + 0.5 * torch.randn(dim, generator=g)
    dout = torch.randn(q.shape, generator=g)
    dout *= torch.exp(1.5 * torch.randn(1, seqlen, heads, 1, generator=g)) * 1e-5
    return (q.float() * 1.5).to(BF16), k.to(BF16), v.to(BF16), dout.to(BF16)


def gradient_errors(q, k, v, dout):
    """Squared norms of the errors of dq, dk and dv, and of what is right."""
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    out = cute_attn.flash_attn_func(*inputs, preset="fp8")
    got = torch.autograd.grad(out, inputs, dout)
    want = attention_backward(dout, q, k, v)
    squares = [((g.double() - w).square().sum(), w.square().sum()) for g, w in zip(got, want)]
    return torch.tensor(squares, dtype=torch.float64)


@pytest.mark.parametrize("kind", LIMITS)
def test_accuracy_of_gradients(kind):
    if kind == "train":
        sums = gradient_errors(*train_data(2048))
    else:
        sums = torch.zeros(3, 2, dtype=torch.float64)
        for seed in range(3):
            q, k, v = data(kind, 1024, seed=seed)
            sums += gradient_errors(q, k, v, rand(tuple(q.shape), BF16, seed=9))
    found = (sums[:, 0] / sums[:, 1]).sqrt().tolist()
    assert all(e <= limit for e, limit in zip(found, LIMITS[kind])), found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gradients_of_out_and_lse(causal, dtype):
    """GQA, cross lengths, both head dims, a scale; 20 of the 150 queries see no key if causal."""
    q, k, v = leaves(2, 150, 130, (4, 2), (64, 48), dtype=dtype)
    with torch.no_grad():
        k += 3 * rand((2, 64), dtype, seed=5)  # a bias for k_shift to take off
    options = {"causal": causal, "softmax_scale": 0.1}
    out, lse, mask = cute_attn.flash_attn_func(
        q, k, v, return_attn_probs=True, preset="fp8", **options
    )
    inputs = [t.detach() for t in (q, k, v)]
    want = cute_attn.fwd(*inputs, preset="fp8", return_lse=True, **options)
    assert mask is None and torch.equal(out, want[0]) and torch.equal(lse, want[1])
    assert out.dtype == dtype
    dout = rand(tuple(out.shape), dtype, seed=9)
    dlse = rand(tuple(lse.shape), torch.float32, seed=8)
    zero = torch.zeros_like(dout)
    for outputs, given, of_lse in (
        ((out, lse), (dout, dlse), dlse),
        ((out,), (dout,), None),
        ((lse,), (dlse,), dlse),
    ):
        got = torch.autograd.grad(outputs, (q, k, v), given, retain_graph=True, allow_unused=True)
        of_out = zero if outputs[0] is lse else dout
        expected = attention_backward(of_out, *inputs, dlse=of_lse, **options)
        assert all(g.dtype == dtype and g.is_contiguous() for g in got)
        for g, w in zip(got, expected):
            if w.norm() == 0:  # dv of lse alone
                assert g.count_nonzero() == 0
            else:
                assert errors([g], [w])[0] < 0.06
        if causal:
            assert got[0][:, :20].count_nonzero() == 0


def test_without_gradients_it_is_fwd():
    q, k, v = qkv(1, 40, 40, 2, 64)
    for preset in ("fp8", "fp8_hp"):
        want = cute_attn.fwd(q, k, v, preset=preset)
        assert torch.equal(cute_attn.flash_attn_func(q, k, v, preset=preset), want)
    with torch.no_grad():
        leaf = q.clone().requires_grad_()
        assert not cute_attn.flash_attn_func(leaf, k, v, preset="fp8").requires_grad


def test_the_short_way_and_the_operators_give_the_same(monkeypatch):
    q, k, v = leaves(2, 70, 90, (4, 2), 64)
    call = lambda: cute_attn.flash_attn_func(
        q, k, v, causal=True, preset="fp8", return_attn_probs=True
    )[:2]
    outputs = call()
    given = rand(tuple(outputs[0].shape), seed=1), rand(tuple(outputs[1].shape), seed=2).float()
    with Calls() as calls:
        watched = call()
        want = torch.autograd.grad(watched, (q, k, v), given)
    assert {"cute_attn.fwd_fp8.default", "cute_attn.bwd.default"} <= set(calls.made)
    for name in ("fwd_fp8", "bwd"):
        monkeypatch.setattr(torch.ops.cute_attn, name, None)
    got = torch.autograd.grad(outputs, (q, k, v), given)
    pairs = zip((*outputs, *got), (*watched, *want))
    assert all(torch.equal(a, b) for a, b in pairs)
    call()[0].sum().backward()
    assert all(t.grad is not None for t in (q, k, v))


def test_a_nan_in_a_key_stays_in_its_channel():
    """Of rows that do not see the key; elsewhere K's mean must not take it."""
    q, k, v = qkv(1, 60, 60, 1, 32)
    k[0, 50, 0, 3] = math.nan
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = cute_attn.flash_attn_func(q, k, v, causal=True, preset="fp8")
    (dq,) = torch.autograd.grad(out[:, :50].sum(), q)
    others = torch.cat((dq[:, :50, :, :3], dq[:, :50, :, 4:]), -1)
    assert others.isfinite().all() and others.count_nonzero()


def test_one_input_with_gradients_and_expanded_dout():
    q, k, v = qkv(1, 40, 40, (2, 1), 32)
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    cute_attn.flash_attn_func(*whole, preset="fp8").sum().backward()
    for i in range(3):
        inputs = [q, k, v]
        inputs[i] = inputs[i].clone().requires_grad_()
        cute_attn.flash_attn_func(*inputs, preset="fp8").sum().backward()
        assert torch.equal(inputs[i].grad, whole[i].grad)


def test_errors_are_those_of_the_forward():
    """Against the formulas in fp64 on FP8's own out and lse: what the backward adds is small."""
    q, k, v = inputs = data("fa3", 1024)
    dout = rand(tuple(q.shape), BF16, seed=9)
    want = attention_backward(dout, q, k, v)
    found = [t.clone().requires_grad_() for t in inputs]
    out, lse, _ = cute_attn.flash_attn_func(*found, preset="fp8", return_attn_probs=True)
    got = torch.autograd.grad(out, found, dout)
    Q, K, V, dO, O = (t.detach().double().transpose(1, 2) for t in (q, k, v, dout, out))
    scale = q.shape[3] ** -0.5
    P = torch.exp(scale * Q @ K.mT - lse.detach().double().unsqueeze(-1))
    dS = P * (dO @ V.mT - (dO * O).sum(-1, keepdim=True))
    mean = K.mean(2, keepdim=True)  # a row of dS has a sum, which must not meet it
    ideal = [scale * dS @ (K - mean), scale * dS.mT @ Q, P.mT @ dO]
    bound = errors([t.transpose(1, 2) for t in ideal], want)
    assert all(e <= 1.01 * b for e, b in zip(errors(got, want), bound))


def test_large_means_of_k_do_not_reach_dq():
    """K 50 times as far from 0 as it is wide: without the shift dq's error would be above 1."""
    q, k, v = data("gauss", 512)
    g = torch.Generator().manual_seed(3)
    k = (k.float() + 50 * torch.randn(k.shape[3], generator=g)).to(BF16)
    sums = gradient_errors(q, k, v, rand(tuple(q.shape), BF16, seed=9))
    assert all(sums[:, 0].sqrt() < 0.01 * sums[:, 1].sqrt())


def test_fp16_keys_near_the_end_of_their_range():
    """Those on the other side of 0 would not fit once the mean is taken off."""
    q, k, v = qkv(1, 8, 40, 1, 32, dtype=FP16)
    k[:, :, :, 0], k[:, :8, :, 0], q[..., 0] = 6e4, -6e4, 1e-3
    found = [t.requires_grad_() for t in (q, k, v)]
    got = torch.autograd.grad(cute_attn.flash_attn_func(*found, preset="fp8").sum(), found)
    want = attention_backward(torch.ones_like(q), q.detach(), k.detach(), v.detach())
    assert errors(got, want)[2] < 0.05 and all(g.isfinite().all() for g in got)


def test_strides_do_not_matter():
    q = rand((2, 2, 64, 50)).permute(0, 3, 1, 2)  # channels before queries
    k = rand((2, 2, 48, 64), seed=1).transpose(1, 2)
    v = rand((1, 1, 1, 64), seed=2).expand(2, 48, 2, 64)
    dout = rand((1,)).expand(2, 50, 2, 64)
    found = []
    for inputs in ((q, k, v), [t.contiguous() for t in (q, k, v)]):
        inputs = [t.detach().requires_grad_() for t in inputs]
        out = cute_attn.flash_attn_func(*inputs, preset="fp8", causal=True)
        found.append([out, *torch.autograd.grad(out, inputs, dout)])
        assert all(t.is_contiguous() for t in found[-1])
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_autocast_and_saved_tensor_hooks(reentrant):
    q, k, v = leaves(1, 60, 60, 2, 64)
    call = lambda *t: cute_attn.flash_attn_func(*t, preset="fp8_hp", causal=True)
    want = torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v))
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    with torch.autocast("cpu", dtype=BF16), hooks:
        checkpoint(call, q, k, v, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(t.grad, w) for t, w in zip((q, k, v), want))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager(dynamic):
    torch._dynamo.reset()

    def f(q, k, v):
        out, lse, _ = cute_attn.flash_attn_func(
            q * 2, k, v, causal=True, return_attn_probs=True, preset="fp8"
        )
        return out * lse.mean().to(BF16) + cute_attn.flash_attn_func(q, k, v, preset="fp8_hp")

    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen in (20, 33):
        inputs = leaves(2, seqlen, seqlen, (4, 2), 32)
        got, want = compiled(*inputs), f(*inputs)
        grads = [torch.autograd.grad(y.sum(), inputs) for y in (got, want)]
        assert torch.equal(got, want) and all(torch.equal(a, b) for a, b in zip(*grads))


def test_first_use_inside_a_compiled_function():
    code = """
import torch, cute_attn
q = torch.randn(1, 8, 2, 16, dtype=torch.bfloat16, requires_grad=True)
f = lambda q: cute_attn.flash_attn_func(q, q, q, preset='fp8')
y = torch.compile(f, fullgraph=True, backend='aot_eager')(q)
assert torch.equal(y, f(q))
y.sum().backward()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    "message, dim, options",
    [
        ("preset is 'int8'", 32, {"preset": "int8"}),
        ("causal is 1", 32, {"preset": "fp8", "causal": 1}),
        ("softmax_scale is inf", 32, {"preset": "fp8", "softmax_scale": math.inf}),
        ("head_dim is 24", 24, {"preset": "fp8"}),
    ],
)
def test_compiled_wrong_calls_say_why(message, dim, options):
    torch._dynamo.reset()
    q = rand((1, 8, 2, dim))
    f = torch.compile(
        lambda q: cute_attn.flash_attn_func(q, q, q, **options), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match=message):
        f(q)


@pytest.mark.parametrize("lengths", [(20, 30), (30, 20), (0, 5), (5, 0)], ids=str)
def test_opcheck(lengths):
    importlib.import_module("cute_attn.fp8_autograd")  # registers the operator
    dense = qkv(2, *lengths, (4, 2), (16, 32))
    views = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in dense]
    for inputs in (dense, views):
        grad = [t.clone().requires_grad_() for t in inputs]
        for tensors, scale, preset in ((inputs, None, "fp8"), (grad, -0.3, "fp8_hp")):
            options = scale, True, False, preset
            torch.library.opcheck(torch.ops.cute_attn.fwd_fp8.default, (*tensors, *options))
        everything = [*inputs, *torch.ops.cute_attn.fwd_fp8(*inputs, *options)]
        if all(t.numel() for t in everything):
            storages = {t.untyped_storage().data_ptr() for t in everything}
            assert len(storages) == len(everything)


@pytest.mark.parametrize("grad", [False, True])
def test_fake_tensors(grad):
    with FakeTensorMode():
        q = torch.empty(2, 5, 4, 32, dtype=BF16, requires_grad=grad)
        k = torch.empty(2, 7, 2, 32, dtype=BF16)
        out, lse, _ = cute_attn.flash_attn_func(q, k, k, preset="fp8", return_attn_probs=True)
        assert out.shape == q.shape and out.dtype == BF16 and out.requires_grad == grad
        assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32


@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_empty_problems(sizes):
    inputs = leaves(*sizes, (4, 2), 32)
    cute_attn.flash_attn_func(*inputs, preset="fp8").sum().backward()
    assert all(t.grad.shape == t.shape and t.grad.count_nonzero() == 0 for t in inputs)


def test_what_is_refused():
    q, k, v = leaves(1, 8, 8, 2, 32)
    with pytest.raises(ValueError, match="preset is 'int8': allowed are 'fp8', 'fp8_hp'"):
        cute_attn.flash_attn_func(q, k, v, preset="int8")
    with pytest.raises(ValueError, match="preset is 'fp8' and q.dtype is torch.float8_e4m3fn"):
        cute_attn.flash_attn_func(q.detach().to(E4M3), k, v, preset="fp8")
    with pytest.raises(TypeError, match="q is a list"):
        cute_attn.flash_attn_func([1], k, v, preset="fp8")
    with pytest.raises(ValueError, match="head_dim is 24: FP8 allows"):
        cute_attn.flash_attn_func(*leaves(1, 8, 8, 2, 24), preset="fp8")
    with pytest.raises(TypeError, match="causal is 1"):
        cute_attn.flash_attn_func(q, k, v, causal=1, preset="fp8")
    with pytest.raises(TypeError, match="deterministic is 1"):
        cute_attn.flash_attn_func(q, k, v, deterministic=1, preset="fp8")
    with pytest.raises(ValueError, match="softmax_scale is nan"):
        cute_attn.flash_attn_func(q, k, v, softmax_scale=math.nan, preset="fp8")
    with pytest.raises(NotImplementedError, match="window_size"):
        cute_attn.flash_attn_func(q, k, v, window_size=(3, 3), preset="fp8")
    with pytest.raises(TypeError, match="q is a QuantizedQKV: a torch.Tensor is wanted"):
        pack = cute_attn.quantize_qkv(q, k, v)
        cute_attn.flash_attn_func(pack, k, v, preset="fp8")
    with pytest.raises(ValueError, match="q.device is meta"):
        cute_attn.flash_attn_func(*(t.to("meta") for t in (q, k, v)), preset="fp8")
    with pytest.raises(NotImplementedError, match="torch.func transforms"):
        torch.func.vmap(lambda t: cute_attn.flash_attn_func(t, t, t, preset="fp8"))(q[None])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q.detach(), q.detach())
        with pytest.raises(NotImplementedError, match="q carries a tangent"):
            cute_attn.flash_attn_func(dual, k, v, preset="fp8")
        with pytest.raises(NotImplementedError, match="q carries a tangent"):
            cute_attn.fwd(dual, k.detach(), v.detach(), preset="fp8")


class Calls(TorchDispatchMode):
    """The operators that were called, with their arguments."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.made[str(function)] = args
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("deterministic", [False, True])
def test_options_reach_both_operators(deterministic):
    inputs = leaves(1, 8, 8, 2, 32)
    with Calls() as calls:
        cute_attn.flash_attn_func(
            *inputs, softmax_scale=2, causal=True, deterministic=deterministic, preset="fp8_hp"
        ).sum().backward()
    options = 2.0, True, deterministic
    assert calls.made["cute_attn.fwd_fp8.default"][3:] == (*options, "fp8_hp")
    assert calls.made["cute_attn.bwd.default"][-3:] == options


def test_double_backward_is_refused():
    """Gradients with a graph of their own are right; those of them are not built."""
    q, k, v = leaves(1, 8, 8, 2, 32)
    out, lse, _ = cute_attn.flash_attn_func(q, k, v, return_attn_probs=True, preset="fp8")
    for outputs in ((out,), (lse,), (out, lse)):
        once = [torch.ones_like(t) for t in outputs]
        want = torch.autograd.grad(outputs, (q, k), once, retain_graph=True)
        got = torch.autograd.grad(outputs, (q, k), once, create_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want))
        for t in got:
            with pytest.raises(NotImplementedError, match="double backward is not built"):
                torch.autograd.grad(t.float().sum(), q, retain_graph=True)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gradients_on_a_gpu(dim, causal):
    """No further from fp64 than those of the CPU's casts."""
    inputs = qkv(2, 300, 400, (4, 2), dim)
    dout = rand(tuple(inputs[0].shape), BF16, seed=9)
    want = attention_backward(dout, *inputs, causal=causal)
    found = []
    for device in ("cpu", "cuda"):
        moved = [t.to(device).requires_grad_() for t in inputs]
        out = cute_attn.flash_attn_func(*moved, causal=causal, preset="fp8")
        got = torch.autograd.grad(out, moved, dout.to(device))
        found.append(errors([g.cpu() for g in got], want))
    assert all(gpu <= 1.2 * cpu + 1e-3 for cpu, gpu in zip(*found)), found
