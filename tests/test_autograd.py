"""flash_attn's functions, torch.autograd, torch.compile and the registered operators."""

import inspect
import math
import subprocess
import sys

import pytest
import torch
from gradients import check
from helpers import ALL_DEVICES, BF16, DEVICES, FP16, close, qkv, rand
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cute_attn
from cute_attn import launch
from cute_attn.reference_backward import attention_backward

each_device = pytest.mark.parametrize("device", DEVICES)
every_kernel = pytest.mark.parametrize("device", ALL_DEVICES, indirect=True)
both_masks = pytest.mark.parametrize("causal", [False, True])
INF = math.inf
META = torch.zeros(2, 7, 2, 16, dtype=BF16, device="meta")


def leaves(*args, **options):
    return [t.requires_grad_() for t in qkv(*args, **options)]


def detached(*tensors):
    return [t.detach() for t in tensors]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))


# ---- gradients ----------------------------------------------------------------------------------


@every_kernel
@both_masks
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gradients_of_out_and_lse(device, causal, dtype):
    q, k, v = leaves(2, 130, 150, (4, 2), (64, 128), dtype=dtype, device=device)
    options = {"causal": causal, "softmax_scale": 0.1}
    out, lse, mask = cute_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    want = cute_attn.fwd(*detached(q, k, v), return_lse=True, **options)
    assert mask is None and equal((out, lse), want)
    dout = rand(tuple(out.shape), dtype, device, seed=9)
    dlse = rand(tuple(lse.shape), torch.float32, device, seed=8)
    inputs = detached(q, k, v)
    got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), retain_graph=True)
    check(got, dout, *inputs, dlse=dlse, **options)
    got = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    check(got, dout, *inputs, **options)
    got = torch.autograd.grad(lse, (q, k, v), dlse)
    check(got, torch.zeros_like(dout), *inputs, dlse=dlse, **options)


@each_device
@both_masks
def test_sum_backward_and_accumulation(device, causal):
    """.sum() gives a dout with all strides 0; a second backward adds up."""
    q, k, v = leaves(2, 70, 90, (4, 2), 64, device=device)
    for times in (1, 2):
        cute_attn.flash_attn_func(q, k, v, causal=causal).sum().backward()
        ones = torch.ones((), dtype=BF16, device=device).expand(2, 70, 4, 64)
        check([t.grad / times for t in (q, k, v)], ones, *detached(q, k, v), causal=causal)


@each_device
@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_input_alone_requires_grad(device, which):
    inputs = list(qkv(1, 20, 30, 2, 16, device=device))
    inputs[which].requires_grad_()
    out = cute_attn.flash_attn_func(*inputs, causal=True)
    dout = rand(tuple(out.shape), device=device, seed=9)
    out.backward(dout)
    want = attention_backward(dout, *detached(*inputs), causal=True)[which]
    close(inputs[which].grad, want, 2.0**-5 * (1 + want.abs()))  # values are test_backward's
    assert all(t.grad is None for i, t in enumerate(inputs) if i != which)


@every_kernel
def test_fa_141_a_loss_of_out_and_lse(device):
    q, k, v = leaves(1, 128, 128, 2, 64, device=device)
    out, lse, _ = cute_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    (out.float().sum() + lse.sum()).backward()
    grads = [t.grad for t in (q, k, v)]
    check(grads, torch.ones_like(out), *detached(q, k, v), dlse=torch.ones_like(lse))


@each_device
@both_masks
@pytest.mark.parametrize("batch, seqlen_q, seqlen_k", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_empty_sizes(device, causal, batch, seqlen_q, seqlen_k):
    inputs = leaves(batch, seqlen_q, seqlen_k, (4, 2), 64, device=device)
    out, lse, _ = cute_attn.flash_attn_func(*inputs, causal=causal, return_attn_probs=True)
    (out.sum() + lse.exp().sum()).backward()
    assert all(t.grad.shape == t.shape and (t.grad == 0).all() for t in inputs)


@each_device
def test_merge_of_parts_has_the_gradients_of_the_whole(device):
    """dlse and dout through cute_attn.merge; one half of the keys is hidden from some rows."""
    inputs = leaves(1, 40, 40, 2, 64, device=device)
    q, k, v = inputs
    parts = [
        cute_attn.flash_attn_func(q[:, i], k[:, j], v[:, j], causal=causal, return_attn_probs=True)
        for i, j, causal in (
            (slice(0, 40), slice(0, 20), False),
            (slice(0, 40), slice(20, 40), True),
        )
    ]
    (out_a, lse_a, _), (out_b, lse_b, _) = parts
    out, _ = cute_attn.merge(out_a, lse_a, out_b, lse_b)
    dout = rand(tuple(out.shape), device=device, seed=9)
    got = torch.autograd.grad(out, inputs, dout)
    qd, kd, vd = (t.detach().double().requires_grad_() for t in inputs)
    S = (qd.transpose(1, 2) @ kd.permute(0, 2, 3, 1)) * 64**-0.5
    seen = torch.ones(40, 40, dtype=torch.bool, device=device).tril(0)
    seen[:, :20] = True
    P = S.masked_fill(~seen, -INF).softmax(-1)
    want = torch.autograd.grad(
        (P @ vd.transpose(1, 2)).transpose(1, 2), (qd, kd, vd), dout.double()
    )
    for g, w in zip(got, want):  # out, its parts and their gradients are rounded, 2^-8 each
        close(g, w, 2.0**-5 * w.abs().max().expand(w.shape))


# ---- the functions ------------------------------------------------------------------------------


def test_signatures_are_flash_attn_2s():
    common = (
        "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "alibi_slopes=None, deterministic=False, return_attn_probs=False"
    )
    functions = {"func": "q, k, v", "qkvpacked_func": "qkv", "kvpacked_func": "q, kv"}
    for name, tensors in functions.items():
        parameters = inspect.signature(getattr(cute_attn, f"flash_attn_{name}")).parameters
        theirs = {n: p for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY}
        shown = (n if p.default is p.empty else f"{n}={p.default}" for n, p in theirs.items())
        assert ", ".join(shown) == f"{tensors}, {common}"
        assert parameters.keys() - theirs.keys() == ({"preset"} if name == "func" else set())


@each_device
@both_masks
def test_packed_functions_take_views(device, causal, monkeypatch):
    qkv_ = rand((2, 70, 3, 4, 64), device=device).requires_grad_()
    q, k, v = (t.clone().requires_grad_() for t in detached(*qkv_.unbind(2)))
    kv = torch.stack((k, v), 2).detach()[:, :, :, :2].requires_grad_()
    seen = []
    forward = launch.forward

    def spy(*args, **options):
        seen.extend(t.data_ptr() for t in args[:3])
        return forward(*args, **options)

    monkeypatch.setattr(launch, "forward", spy)
    options = {"causal": causal, "softmax_scale": 0.2, "return_attn_probs": True}
    out, lse, _ = cute_attn.flash_attn_qkvpacked_func(qkv_, **options)
    assert seen == [qkv_[:, :, i].data_ptr() for i in range(3)]
    want, want_lse, _ = cute_attn.flash_attn_func(q, k, v, **options)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    dout = rand(tuple(out.shape), device=device, seed=9)
    (got,) = torch.autograd.grad((out, lse), qkv_, (dout, torch.ones_like(lse)))
    parts = torch.autograd.grad((want, want_lse), (q, k, v), (dout, torch.ones_like(lse)))
    assert equal(got.unbind(2), parts)
    del seen[:]
    out = cute_attn.flash_attn_kvpacked_func(q, kv, causal=causal)
    assert seen[1:] == [kv[:, :, i].data_ptr() for i in range(2)]
    got_q, got_kv = torch.autograd.grad(out, (q, kv), dout)
    check((got_q, *(t.contiguous() for t in got_kv.unbind(2))), dout,
          *detached(q, *kv.unbind(2)), causal=causal)  # fmt: skip


def no_dispatcher(*_):
    raise AssertionError("the dispatcher was asked")


class Watcher(TorchDispatchMode):
    """Lists the operators that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@both_masks
def test_the_short_way_and_the_operator_give_the_same(monkeypatch, causal):
    """The dispatcher costs more than a small kernel, but who watches operators must see them."""
    q, k, v = leaves(2, 70, 90, (4, 2), 64)
    out, lse, _ = cute_attn.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    dout, dlse = rand(tuple(out.shape), seed=1), rand(tuple(lse.shape), seed=2).float()
    watcher = Watcher()
    with watcher:
        watched = cute_attn.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
        want = torch.autograd.grad(watched[:2], (q, k, v), (dout, dlse))
    names = [name for name in watcher.seen if name.startswith("cute_attn")]
    assert names == ["cute_attn.fwd.default", "cute_attn.bwd.default"]
    for name in ("fwd", "bwd"):
        monkeypatch.setattr(torch.ops.cute_attn, name, no_dispatcher)
    got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    assert equal((out, lse), watched[:2]) and equal(got, want)
    cute_attn.flash_attn_func(q, k, v, causal=causal).sum().backward()
    assert all(t.grad is not None for t in (q, k, v))


def test_without_gradients_it_is_fwd(monkeypatch):
    """The same bits and no dispatcher."""
    q, k, v = qkv(2, 70, 90, (4, 2), 64)
    grad = [t.clone().requires_grad_() for t in (q, k, v)]
    want = cute_attn.fwd(q, k, v, causal=True, return_lse=True)
    monkeypatch.setattr(torch.ops.cute_attn, "fwd", no_dispatcher)
    assert torch.equal(cute_attn.flash_attn_func(q, k, v, causal=True), want[0])
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            got = cute_attn.flash_attn_func(*grad, causal=True, return_attn_probs=True)
            assert equal(got[:2], want) and got[2] is None
    with Watcher(), pytest.raises(AssertionError, match="dispatcher"):
        cute_attn.flash_attn_func(*grad)


@both_masks
def test_without_gradients_lse_is_not_computed_for_nobody(stand_in, causal, monkeypatch):
    asked = []
    forward = launch.forward

    def spy(*args, return_lse=False, **options):
        asked.append(return_lse)
        return forward(*args, return_lse=return_lse, **options)

    monkeypatch.setattr(launch, "forward", spy)
    q, k, v = qkv(2, 5, 7, 2, 16)
    cute_attn.flash_attn_func(q, k, v, causal=causal)
    cute_attn.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    assert asked == [False, True] and len(stand_in.launches) == 2


def test_arguments_that_change_nothing():
    q, k, v = leaves(2, 20, 20, 2, 16)
    want = cute_attn.flash_attn_func(q, k, v)
    for options in (
        {"deterministic": True},
        {"window_size": (-1, -1), "softcap": 0.0, "dropout_p": 0, "alibi_slopes": None},
        {"window_size": (None, None)},
        {"softmax_scale": 0.25},
    ):
        out = cute_attn.flash_attn_func(q, k, v, **options)
        assert torch.equal(out, want)
        grads = (torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True) for o in (out, want))
        assert equal(*grads)


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "error, message, change",
    [
        (NotImplementedError, "dropout_p is 0.1", {"dropout_p": 0.1}),
        (ValueError, "dropout_p is 1.5", {"dropout_p": 1.5}),
        (ValueError, "dropout_p is nan", {"dropout_p": math.nan}),
        (TypeError, "dropout_p is 'x'", {"dropout_p": "x"}),
        (TypeError, "dropout_p is None", {"dropout_p": None}),
        (NotImplementedError, "window_size", {"window_size": (3, 0)}),
        (NotImplementedError, "window_size", {"window_size": (-1, 5)}),
        (ValueError, "a pair", {"window_size": 3}),
        (TypeError, "bounds are int", {"window_size": (0.5, 1)}),
        (NotImplementedError, "softcap", {"softcap": 30.0}),
        (NotImplementedError, "alibi_slopes", {"alibi_slopes": torch.ones(4)}),
        (TypeError, "causal is 1", {"causal": 1}),
        (TypeError, "deterministic is 1", {"deterministic": 1}),
        (TypeError, "softmax_scale is 'x'", {"softmax_scale": "x"}),
        (TypeError, "softmax_scale is tensor", {"softmax_scale": torch.tensor(0.1)}),
        (ValueError, "softmax_scale is inf", {"softmax_scale": INF}),
        (TypeError, "q is a list", {"q": [1.0]}),
        (TypeError, "k is a NoneType", {"k": None}),
        (TypeError, "q.dtype is torch.float32", {"q": torch.zeros(2, 5, 4, 16)}),
        (TypeError, "v.dtype is torch.float16", {"v": torch.zeros(2, 7, 2, 16).half()}),
        (ValueError, "nheads_q is 3 .* is 2", {"q": torch.zeros(2, 5, 3, 16, dtype=BF16)}),
        (ValueError, "k.shape is", {"k": torch.zeros(2, 7, 2, 24, dtype=BF16)}),
        *((ValueError, f"{name}.device is meta", {name: META}) for name in "kv"),
        (ValueError, "head_dim_v is 20", {"v": torch.zeros(2, 7, 2, 20, dtype=BF16)}),
    ],
)  # fmt: skip
def test_wrong_calls(error, message, change, grad):
    arguments = dict(zip("qkv", leaves(2, 5, 7, (4, 2), 16) if grad else qkv(2, 5, 7, (4, 2), 16)))
    with pytest.raises(error, match=message):
        cute_attn.flash_attn_func(**(arguments | change))


def test_wrong_packed_shapes():
    x = torch.zeros(2, 5, 4, 3, 16, dtype=BF16)
    with pytest.raises(ValueError, match=r"qkv.shape is .*: \(batch, seqlen, 3, nheads, head_dim"):
        cute_attn.flash_attn_qkvpacked_func(x)
    with pytest.raises(ValueError, match=r"kv.shape is .*: \(batch, seqlen, 2, nheads, head_dim"):
        cute_attn.flash_attn_kvpacked_func(x[:, :, 0], x)
    with pytest.raises(ValueError, match="kv.shape is"):
        cute_attn.flash_attn_kvpacked_func(x[:, :, 0], x[:, :, 0])
    with pytest.raises(TypeError, match="qkv is a list"):
        cute_attn.flash_attn_qkvpacked_func([x])
    with pytest.raises(NotImplementedError, match="dropout_p"):
        cute_attn.flash_attn_qkvpacked_func(x[:, :, :3], 0.1)


@pytest.mark.parametrize("grad", [False, True])
def test_devices_that_nothing_runs(grad):
    q, k, v = (t.to("meta").requires_grad_(grad) for t in qkv(2, 5, 7, 2, 16))
    with pytest.raises(ValueError, match="q.device is meta"):
        cute_attn.flash_attn_func(q, k, v)


def test_fwd_names_the_differentiable_call():
    with pytest.raises(NotImplementedError, match="fwd records no gradients: call flash_attn_func"):
        cute_attn.fwd(*leaves(1, 4, 4, 1, 16))


def test_double_backward_is_refused():
    q, k, v = leaves(1, 8, 8, 2, 16)
    out, lse, _ = cute_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    for output in (out, lse):
        for grad in torch.autograd.grad(output.sum(), (q, k, v), create_graph=True):
            if grad.grad_fn is not None:
                with pytest.raises(NotImplementedError, match="double backward is not built"):
                    torch.autograd.grad(grad.float().sum(), q, retain_graph=True)


def test_transforms_and_tangents_are_refused():
    q, k, v = qkv(1, 8, 8, 2, 16)

    def loss(x):
        return cute_attn.flash_attn_func(x, k, v).float().sum()

    with pytest.raises(NotImplementedError, match="torch.func transforms"):
        torch.func.grad(loss)(q)
    with pytest.raises(NotImplementedError, match="torch.func transforms"):
        torch.func.vmap(loss)(q[None])
    with pytest.raises(NotImplementedError, match="torch.func transforms"):
        torch.func.jvp(loss, (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        for other in (k, k.clone().requires_grad_()):
            with pytest.raises(NotImplementedError, match="q carries a tangent"):
                cute_attn.flash_attn_func(dual, other, v)
            with pytest.raises(NotImplementedError):
                torch.ops.cute_attn.fwd(dual, other, v, None, False, False)


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_reaches_the_backward_kernel(stand_in, deterministic):
    q, k, v = leaves(1, 8, 8, 2, 16)
    out = cute_attn.flash_attn_func(q, k, v, deterministic=deterministic)
    out.sum().backward()
    assert stand_in.built[-1][1].deterministic == deterministic and len(stand_in.built) == 2


# ---- operators ----------------------------------------------------------------------------------


def test_import_registers_nothing_before_it_is_used():
    code = """
import sys, cute_attn
assert 'torch' not in sys.modules
import torch
assert not hasattr(torch.ops.cute_attn, 'fwd')
cute_attn.flash_attn_func
torch.ops.cute_attn.fwd, torch.ops.cute_attn.bwd
assert 'cutlass' not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    names = {"bwd", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func"}
    assert names <= set(dir(cute_attn))


def sample(device, seqlen_q=20, seqlen_k=30):
    q, k, v = qkv(2, seqlen_q, seqlen_k, (4, 2), (16, 24), device=device)
    views = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    return (q, k, v), views


@each_device
@both_masks
@pytest.mark.parametrize("lengths", [(20, 30), (30, 20), (0, 5)], ids=str)
def test_opcheck(device, causal, lengths):
    for inputs in sample(device, *lengths):
        grad = [t.clone().requires_grad_() for t in inputs]
        fwd, bwd = torch.ops.cute_attn.fwd.default, torch.ops.cute_attn.bwd.default
        torch.library.opcheck(fwd, (*inputs, None, causal, False))
        torch.library.opcheck(fwd, (*grad, -0.3, causal, True))
        out, lse = fwd(*inputs, None, causal, False)
        dout = torch.ones((), dtype=BF16, device=device).expand(out.shape)
        for dlse in (None, torch.ones_like(lse)):
            torch.library.opcheck(bwd, (dout, *inputs, out, lse, dlse, 0.3, causal, False))


@each_device
def test_outputs_are_fresh(device):
    inputs, _ = sample(device)
    out, lse = torch.ops.cute_attn.fwd(*inputs, None, True, False)
    dq, dk, dv = torch.ops.cute_attn.bwd(out, *inputs, out, lse, lse, None, True, False)
    everything = [*inputs, out, lse, dq, dk, dv]
    assert len({t.untyped_storage().data_ptr() for t in everything}) == len(everything)


class Block(torch.nn.Module):
    """Attention as models write it: packed projection, heads as transposed views."""

    def __init__(self, device, heads=4, dim=16):
        super().__init__()
        torch.manual_seed(0)
        options = {"dtype": BF16, "device": device}
        self.heads, self.dim = heads, dim
        self.qkv = torch.nn.Linear(heads * dim, 3 * heads * dim, **options)
        self.proj = torch.nn.Linear(heads * dim, heads * dim, **options)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, self.dim))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).contiguous().transpose(2, 3).unbind(0)
        scale = q.shape[-1] ** -0.5
        out, lse, _ = cute_attn.flash_attn_func(
            q, k, v, softmax_scale=scale, causal=True, return_attn_probs=True
        )
        packed = cute_attn.flash_attn_qkvpacked_func(qkv)
        kv = cute_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:, :2], deterministic=True)
        return self.proj((out + packed + kv).flatten(2)) * lse.mean().to(x.dtype)


def step(block, f, x):
    """(result, gradients of x and of the parameters)."""
    x = x.clone().requires_grad_()
    block.zero_grad()
    y = f(x)
    y.float().square().mean().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in block.parameters())]


@each_device
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_block_equals_eager(device, dynamic):
    """aot_eager runs torch's own kernels in the same order: bit for bit."""
    torch._dynamo.reset()
    block = Block(device)
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen in (20, 33, 128):
        x = rand((2, seqlen, 64), device=device)
        assert equal(step(block, compiled, x), step(block, block, x))
        with torch.no_grad():
            assert torch.equal(compiled(x), block(x))


@each_device
def test_compiled_by_inductor(device):
    """The default back end, which fuses and keeps fp32 between operations: bf16 roundings apart."""
    torch._dynamo.reset()

    def f(q, k, v):
        return cute_attn.flash_attn_func(q * 2, k, v.transpose(1, 2), causal=True).float() * 3

    q, k, v = leaves(2, 20, 20, (4, 2), 16, device=device)
    v = v.detach().transpose(1, 2).contiguous().requires_grad_()
    compiled = torch.compile(f, fullgraph=True, dynamic=True)
    got, want = compiled(q, k, v), f(q, k, v)
    assert torch.equal(got, want)  # doubling is exact
    grads = [torch.autograd.grad(y.sum(), (q, k, v)) for y in (got, want)]
    assert equal(*grads)


def test_first_use_inside_a_compiled_function():
    code = """
import torch, cute_attn
q = torch.randn(1, 8, 2, 16, dtype=torch.bfloat16, requires_grad=True)
f = lambda q: cute_attn.flash_attn_func(q, q, q)
y = torch.compile(f, fullgraph=True, backend='aot_eager')(q)
assert torch.equal(y, f(q))
y.sum().backward()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "message, options",
    [
        ("dropout_p", {"dropout_p": 0.1}),
        ("window_size", {"window_size": (3, 3)}),
        ("causal is", {"causal": 1}),
        ("softmax_scale is inf", {"softmax_scale": INF}),
    ],
)
def test_compiled_wrong_calls_say_why(message, options):
    torch._dynamo.reset()
    q, k, v = qkv(1, 8, 8, 2, 16)
    f = torch.compile(
        lambda q: cute_attn.flash_attn_func(q, k, v, **options), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match=message):
        f(q)


def test_export_and_fake_tensors():
    x = rand((2, 20, 64))
    block = Block("cpu")
    exported = torch.export.export(block, (x,))
    assert torch.equal(exported.module()(x), block(x))
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(2, 5, 4, 16, dtype=BF16)
        out, lse, _ = cute_attn.flash_attn_func(q, q, q, return_attn_probs=True)
        assert out.shape == (2, 5, 4, 16) and out.dtype == BF16
        assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32


@each_device
@pytest.mark.parametrize("compiled", [False, True])
def test_activation_checkpointing(device, compiled):
    torch._dynamo.reset()
    block = Block(device)
    x = rand((2, 33, 64), device=device)

    def f(x):
        return checkpoint(block, x, use_reentrant=False)

    g = torch.compile(f, fullgraph=True, backend="aot_eager") if compiled else f
    assert equal(step(block, g, x), step(block, block, x))


@each_device
def test_autocast_and_saved_tensor_hooks(device):
    inputs = leaves(2, 33, 33, 2, 16, device=device)
    want = torch.autograd.grad(cute_attn.flash_attn_func(*inputs).sum(), inputs)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    with torch.autocast(device, dtype=BF16), hooks:
        out = cute_attn.flash_attn_func(*inputs)
    assert equal(torch.autograd.grad(out.sum(), inputs), want)
