"""flash_attn_func with an FP8 preset: its forward, its gradients, what it refuses."""

import math

import pytest
import torch
from fp8_oracle import E4M3, data
from helpers import BF16, FP16, qkv, rand
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import cute_attn
from cute_attn.reference_backward import attention_backward

# relative errors of dq, dk, dv against fp64: those simulated at seqlen 2048 and 10 to 15 %. A few
# rows with one large weight decide on fa3, so that its seeds differ by a third: three are pooled.
LIMITS = {
    "gauss": (0.009, 0.007, 0.006),
    "train": (0.015, 0.013, 0.012),
    "fa3": (0.09, 0.12, 0.11),
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


def test_one_input_with_gradients_and_expanded_dout():
    q, k, v = qkv(1, 40, 40, (2, 1), 32)
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    cute_attn.flash_attn_func(*whole, preset="fp8").sum().backward()
    for i in range(3):
        inputs = [q, k, v]
        inputs[i] = inputs[i].clone().requires_grad_()
        cute_attn.flash_attn_func(*inputs, preset="fp8").sum().backward()
        assert torch.equal(inputs[i].grad, whole[i].grad)


def test_checkpoint_gives_the_same_bits():
    q, k, v = leaves(1, 60, 60, 2, 64)
    call = lambda *t: cute_attn.flash_attn_func(*t, preset="fp8_hp", causal=True)
    want = torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v))
    again = checkpoint(call, q, k, v, use_reentrant=False).square().sum()
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(again, (q, k, v)), want))


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
    with pytest.raises(NotImplementedError, match="double backward"):
        out = cute_attn.flash_attn_func(q, k, v, preset="fp8")
        torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="preset is 'fp8': not built under"):
        torch.func.vmap(lambda t: cute_attn.flash_attn_func(t, t, t, preset="fp8"))(q[None])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q.detach(), q.detach())
        with pytest.raises(NotImplementedError, match="q carries a tangent"):
            cute_attn.flash_attn_func(dual, k, v, preset="fp8")
        with pytest.raises(NotImplementedError, match="q carries a tangent"):
            cute_attn.fwd(dual, k.detach(), v.detach(), preset="fp8")


def test_cuda_tensors_are_refused():
    with FakeTensorMode():
        q = torch.empty((1, 8, 2, 32), dtype=BF16, device="cuda:0")
        with pytest.raises(NotImplementedError, match="q.device is cuda:0: FP8 kernels are not"):
            cute_attn.flash_attn_func(q, q, q, preset="fp8")


@pytest.mark.gpu
def test_cuda_tensors_with_gradients_are_refused():
    q, k, v = leaves(1, 8, 8, 2, 32, device="cuda")
    with pytest.raises(NotImplementedError, match="q.device is cuda:0: FP8 kernels are not"):
        cute_attn.flash_attn_func(q, k, v, preset="fp8")
