"""Bugs of backwards that users of other attention libraries reported, with their inputs: none may
come back. As test_public_reports.py, which has the forward's.

Names are the repositories' issue numbers: FA Dao-AILab/flash-attention, CF cudnn-frontend, PT
pytorch. Elsewhere: a loss of out and LSE (FA 141), second derivatives and torch.func (FA 1672,
PT 165517) and opcheck in test_autograd.py; equal bits beside other work (FA 1596) in
test_backward_deterministic.py; use of freed memory also in scripts/sanitize.py.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gradients import check, run
from helpers import ALL_DEVICES, BF16, FP16, close, qkv, rand, sweep_causal

import cute_attn

each_device = pytest.mark.parametrize("device", ALL_DEVICES, indirect=True)
both_masks = pytest.mark.parametrize("causal", [False, True])
ROOT = str(Path(__file__).resolve().parents[1])


def ones(shape, dtype, device):
    """What .sum().backward() makes of dout: one number, all strides 0."""
    return torch.ones((), dtype=dtype, device=device).expand(shape)


def leaves(*args, **options):
    return [t.requires_grad_() for t in qkv(*args, **options)]


def through_autograd(inputs, dout=None, **options):
    """Gradients of out, or of out.sum(), checked against the oracle."""
    out = cute_attn.flash_attn_func(*inputs, **options)
    shape, dtype, device = out.shape, out.dtype, out.device
    dout = ones(shape, dtype, device) if dout is None else dout
    got = torch.autograd.grad(out, inputs, dout)
    check(got, dout, *(t.detach() for t in inputs), **options)
    return got


# ---- numerics -----------------------------------------------------------------------------------


@each_device
def test_cf_160_outlier_channel(device):
    q, k = (rand((1, 2, 1, 8), device=device, seed=i) for i in range(2))
    q[0, :, 0, 4] = torch.tensor([2.4844, -4.25])
    k[0, :, 0, 4] = torch.tensor([70.0, 70.5])
    run(q, k, rand((1, 2, 1, 8), device=device, seed=2), rand((1, 2, 1, 8), device=device) * 1e-8)


@each_device
def test_fa_443_more_queries_than_keys(device):
    """Three sequences with cu_q = [0, 76, 110, 256] and a key each, one call a sequence; head_dim
    64 for 32, a class that other tests compile."""
    for seqlen_q in (76, 110 - 76, 256 - 110):
        q, k, v = (3 * t for t in qkv(1, seqlen_q, 1, 1, 64, dtype=FP16, device=device))
        dq, _, dv = run(q, k, v, ones(q.shape, FP16, device), causal=True)
        assert (dq[:, :-1] == 0).all() and torch.equal(dv, torch.ones_like(dv))


@each_device
def test_fa_334_one_query_one_key(device):
    q, k, v = (3 * rand((1, 1, 1, 16), FP16, device, seed=i) for i in range(3))
    dout = torch.ones_like(q)
    dq, dk, dv = run(q, k, v, dout)
    close(dq, torch.zeros_like(dq), 2.0**-10 * 16 * 30)  # D is off by the rounding of out only
    assert torch.equal(dv, dout) and dk.isfinite().all()


@each_device
def test_fa_1052_three_sigma(device):
    inputs = [3 * t for t in qkv(1, 1024, 1024, 1, 128, dtype=FP16, device=device)]
    run(*inputs, causal=True)


@each_device
def test_fa_41_constant_huge_activations(device):
    """An LSE of 5.7e6 is off by up to a quarter in fp32, and P = e^(S - LSE) by e^0.25."""
    x = torch.full((2, 512, 4, 32), 1000.0, dtype=BF16, device=device)
    run(x, x, x)
    *_, dv = run(x, x, x, torch.ones_like(x))
    assert ((dv > math.exp(-0.26)) & (dv < math.exp(0.26))).all()


@each_device
def test_fa_1461_zero_and_negative_scale_with_a_mask(device):
    q, k, v = qkv(1, 130, 130, 2, 64, device=device)
    dq, dk, _ = run(q, k, v, causal=True, softmax_scale=0.0)
    assert (dq == 0).all() and (dk == 0).all()
    run(q, k, v, causal=True, softmax_scale=-1.0)


@each_device
@both_masks
def test_fa_141_a_loss_of_lse_alone(device, causal):
    q, k, v = leaves(1, 128, 128, 2, 64, device=device)
    _, lse, _ = cute_attn.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    got = torch.autograd.grad(lse.sum(), (q, k, v), allow_unused=True)
    inputs = [t.detach() for t in (q, k, v)]
    zeros = torch.zeros_like(inputs[0])
    check(got, zeros, *inputs, causal=causal, dlse=torch.ones_like(lse))
    assert (got[0] != 0).any() and (got[2] == 0).all()


# ---- masks, lengths and heads -------------------------------------------------------------------


@each_device
def test_triton_7216_the_backward_sees_the_mask(device):
    """V and dO are one-hot, so that dV spells P: no key gets anything from a query before it."""
    n = 128
    q, k, _ = qkv(1, n, n, 1, 128, dtype=FP16, device=device)
    eye = torch.eye(n, dtype=FP16, device=device).view(1, n, 1, n)
    *_, dv = run(q, k, eye, eye, causal=True)
    assert (dv[0, :, 0].tril(-1) == 0).all() and (dv[0, :, 0].triu() > 0).any()


@each_device
@pytest.mark.parametrize("dim", [64, 128])
def test_flaggems_898_first_rows_of_later_heads(device, dim):
    for heads in (4, (4, 2)):
        run(*qkv(1, 100, 100, heads, dim, device=device))


@each_device
@pytest.mark.parametrize("seqlen", [130, 257, 512])
def test_fa_1915_causal(device, seqlen):
    for dtype in (BF16, FP16):
        run(*qkv(1, seqlen, seqlen, 4, 128, dtype=dtype, device=device), causal=True)


@each_device
@both_masks
@pytest.mark.parametrize("seqlen", [1, 63, 65, 127, 129, 250])
def test_tilelang_2567_unaligned_lengths_return(device, causal, seqlen):
    inputs = leaves(1, seqlen, seqlen, 1, 128, dtype=FP16, device=device)
    through_autograd(inputs, causal=causal)


@each_device
def test_pt_138529_one_query_many_keys_and_an_expanded_dout(device):
    q, k, v = qkv(1, 1, 65536 if device == "cuda" else 4096, 16, 64, device=device)
    run(q, k, v, torch.ones((), dtype=BF16, device=device).expand(1, 1, 16, 64))


@each_device
def test_fa_2260_many_short_rows(device):
    q, k, v = qkv(8300 if device == "cuda" else 500, 1, 1, 16, 128, device=device)
    run(q, k, v, torch.ones((), dtype=BF16, device=device).expand(q.shape))


@pytest.mark.gpu
def test_fa_1500_so_many_sequences_that_offsets_pass_2_31():
    """In dq's accumulator, which holds 128 rows a sequence; 15000 were reported."""
    batch = 17000
    assert batch * 16 * 128 * 64 > 2**31
    q, k, v = (torch.randn(batch, 64, 16, 64, dtype=BF16, device="cuda") for _ in range(3))
    out, lse = cute_attn.fwd(q, k, v, return_lse=True)
    dout = torch.randn_like(out)
    got = cute_attn.bwd(dout, q, k, v, out, lse)
    assert all(t.isfinite().all() for t in got)
    for b in (0, batch // 2, batch - 1):
        here = slice(b, b + 1)
        check([t[here] for t in got], dout[here], q[here], k[here], v[here])


# ---- head dims ----------------------------------------------------------------------------------


@each_device
@both_masks
def test_fa_2087_v_narrower_than_k(device, causal):
    """192 and 128, .sum().backward(); 16 heads for 128."""
    n, heads = (1024, 16) if device == "cuda" else (200, 2)
    through_autograd(leaves(1, n, n, heads, (192, 128), device=device), causal=causal)


@each_device
def test_fa_2482_tail_rows_of_dq_on_both_calls(device):
    """dq's accumulator was zeroed narrower than it was added up."""
    for _ in range(2):
        for d in (136, 144, 152, 160, 168, 176):
            run(*qkv(1, 130, 130, 2, (d, 128), device=device))


@each_device
def test_fa_1290_odd_head_dims_use_every_column(device):
    """Scores come from the last column of q and k alone; every column of dq, dk and dv is right."""
    for d in (8, 40, 72, 80, 96, 104, 160, 192, 256):
        q, k, v = qkv(1, 129, 129, 1, d, device=device)
        q[..., :-1], k[..., :-1] = 0, 0
        dq, dk, dv = run(q, k, v, causal=sweep_causal(BF16, d))
        assert (dq[..., :-1] == 0).all() and (dk[..., :-1] == 0).all()
        assert all((t[..., -1] != 0).any() for t in (dq, dk, dv))


@each_device
def test_fa_28_head_dim_60_is_a_clear_error(device):
    for dims, words in ((60, "head_dim is 60"), ((64, 60), "head_dim_v is 60"), (264, "256")):
        q, k, v = qkv(1, 16, 16, 1, dims, device=device)
        lse = torch.zeros(1, 1, 16, device=device)
        with pytest.raises(ValueError, match=words):
            cute_attn.bwd(v, q, k, v, v, lse)
        with pytest.raises(ValueError, match=words):
            cute_attn.flash_attn_func(q.requires_grad_(), k, v)


# ---- strides ------------------------------------------------------------------------------------


@each_device
def test_fa_2189_keys_and_values_expanded_over_the_heads(device):
    """Gradients have the expanded shape; autograd adds them up for what was expanded."""
    n = 2048 if device == "cuda" else 256
    q = rand((1, n, 4, 128), device=device).requires_grad_()
    k, v = (rand((1, n, 1, 128), device=device, seed=i).requires_grad_() for i in (1, 2))
    wide = [t.expand(1, n, 4, 128) for t in (k, v)]
    through_autograd([q, *wide], causal=True)
    out = cute_attn.flash_attn_func(q, *wide, causal=True)
    assert [g.shape for g in torch.autograd.grad(out.sum(), (k, v))] == [k.shape, v.shape]


@each_device
def test_fa_355_dout_that_is_not_contiguous(device):
    """Bit for bit: 32 keys are one block, so that nothing is added up in another order."""
    q, k, v = qkv(2, 32, 32, (4, 1), 128, dtype=FP16, device=device)
    dout = rand((2, 4, 32, 128), FP16, device).transpose(1, 2)
    got, want = run(q, k, v, dout), run(q, k, v, dout.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@each_device
@both_masks
def test_xformers_282_sum_backward(device, causal):
    for heads, dim in (((4, 2), 64), (2, 128)):
        through_autograd(leaves(2, 130, 150, heads, dim, device=device), causal=causal)


def restrided(t, stride):
    """With that stride where the size is 1."""
    strides = [stride if n == 1 else s for n, s in zip(t.shape, t.stride())]
    return t.as_strided(t.shape, strides)


@each_device
@both_masks
def test_cl_3031_sizes_of_one_with_any_stride(device, causal):
    for shape in ((1, 1, 1, 64), (4, 1, 1, 64), (1, 40, 1, 64), (1, 1, 3, 64)):
        q, k, v, dout = (rand(shape, device=device, seed=i) for i in range(4))
        out, lse = cute_attn.fwd(q, k, v, causal=causal, return_lse=True)
        clean = [dout, q, k, v, out, lse]
        want = run(q, k, v, dout, causal=causal)
        for stride in (0, 1, 7, 2**33):
            got = cute_attn.bwd(*(restrided(t, stride) for t in clean), causal=causal)
            assert all(torch.equal(a, b) for a, b in zip(got, want)), (shape, stride)
        moved = [t.transpose(0, 2).contiguous().transpose(0, 2) for t in clean]
        got = cute_attn.bwd(*moved, causal=causal)
        assert all(torch.equal(a, b) for a, b in zip(got, want)), shape


# ---- determinism --------------------------------------------------------------------------------


def repeated(q, k, v, causal=False):
    """Many runs of bwd give the same bits, which are right."""
    out, lse = cute_attn.fwd(q, k, v, causal=causal, return_lse=True)
    dout = rand(tuple(out.shape), q.dtype, q.device, seed=9)
    options = {"causal": causal, "deterministic": True}
    first = cute_attn.bwd(dout, q, k, v, out, lse, **options)
    check(first, dout, q, k, v, causal=causal)
    for _ in range(50 if q.is_cuda else 3):
        got = cute_attn.bwd(dout, q, k, v, out, lse, **options)
        assert all(torch.equal(a, b) for a, b in zip(got, first))


@each_device
@pytest.mark.parametrize("seqlen, heads", [(1024, 12), (512, 8)])
def test_fa_2244_deterministic_repeats(device, seqlen, heads):
    seqlen = seqlen if device == "cuda" else 130
    repeated(*qkv(2, seqlen, seqlen, heads, 64, dtype=FP16, device=device))


@each_device
@pytest.mark.parametrize("dim, causal", [(128, False), (64, True)])
def test_fa_2510_deterministic_repeats_with_grouped_heads(device, dim, causal):
    seqlen = 1024 if device == "cuda" else 130
    repeated(*qkv(2, seqlen, seqlen, (16, 2), dim, device=device), causal=causal)


UNCACHED = """
import json, torch, cute_attn
torch.manual_seed(0)
q, k, v, dout = (torch.randn(2, 300, 8, 64, device="cuda").bfloat16() for _ in range(4))
out, lse = cute_attn.fwd(q, k, v, causal=True, return_lse=True)
sums = []
for _ in range(20):
    got = cute_attn.bwd(dout, q, k, v, out, lse, causal=True, deterministic=True)
    junk = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 20, 1 << 12)]
    del junk
    sums.append([t.double().sum().item() for t in got])
print(json.dumps(sums))
"""


@pytest.mark.gpu
def test_fa_2063_deterministic_without_a_caching_allocator():
    """Memory that is freed while a kernel still uses it goes back to the driver at once. Under
    compute-sanitizer: scripts/sanitize.py."""
    name, sums = "PYTORCH_NO_CUDA_MEMORY_CACHING", []
    plain = {key: value for key, value in os.environ.items() if key != name}
    plain["PYTHONPATH"] = os.pathsep.join([ROOT, plain.get("PYTHONPATH", "")])
    for environment in (plain, plain | {name: "1"}):
        done = subprocess.run(
            [sys.executable, "-c", UNCACHED],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        sums += json.loads(done.stdout.splitlines()[-1])
    assert all(s == sums[0] for s in sums) and all(map(math.isfinite, sums[0]))


# ---- what is refused ----------------------------------------------------------------------------


@each_device
def test_fa_1251_dropout_is_refused(device):
    q, k, v = leaves(1, 16, 16, 2, 64, device=device)
    with pytest.raises(NotImplementedError, match="dropout_p is 0.1"):
        cute_attn.flash_attn_func(q, k, v, dropout_p=0.1)


@each_device
@pytest.mark.parametrize(
    "name, value", [("softcap", 10.0), ("cu_seqlens_q", [0, 7, 16]), ("window_size", (64, 0))]
)
def test_fa_2466_what_is_not_built_is_named(device, name, value):
    """Softcap (FA 2466), varlen (torchtitan 3893) and windows (FBGEMM 4982) hung or were wrong in
    backwards elsewhere: none is dropped in silence."""
    q, k, v = qkv(1, 16, 16, 2, 64, device=device)
    out, lse = cute_attn.fwd(q, k, v, causal=True, return_lse=True)
    if isinstance(value, list):
        value = torch.tensor(value, dtype=torch.int32, device=device)
    with pytest.raises(NotImplementedError, match=name):
        cute_attn.bwd(out, q, k, v, out, lse, causal=True, **{name: value})


# ---- torch.compile, streams and graphs ----------------------------------------------------------


def f(q, k, v):
    return cute_attn.flash_attn_func(q, k, v, causal=True)


def compiled_equals_eager(compiled, *args, **options):
    """Values, sizes and strides, of out and gradients."""
    inputs = leaves(*args, **options)
    q = inputs[0].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    inputs[0] = q
    outs = compiled(*inputs), f(*inputs)
    dout = rand(tuple(outs[0].shape), device=q.device, seed=9)
    got, want = ([out, *torch.autograd.grad(out, inputs, dout)] for out in outs)
    assert torch.equal(got[0], want[0]), "the forward's bits do not depend on who calls it"
    check(got[1:], dout, *(t.detach() for t in inputs), causal=True)
    for g, w in zip(got, want):
        assert g.shape == w.shape and g.stride() == w.stride()


@each_device
def test_fa_2013_compiled_without_graph_breaks(device):
    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    n, heads = (4096, 16) if device == "cuda" else (300, 2)
    compiled_equals_eager(compiled, 1, n, n, heads, 128, device=device)


@each_device
def test_comfyui_15044_strides_are_those_that_were_promised(device):
    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for n in (128, 196, 256, 257):
        compiled_equals_eager(compiled, 1, n, n, (4, 2), 64, device=device)


@each_device
def test_vllm_omni_7220_dynamic_shapes(device):
    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (100, 300):
        compiled_equals_eager(compiled, 1, n, n, (4, 2), 64, device=device)


def producer(seed):
    """q, k, v and dout of another kind each time."""
    q, k, v = qkv(1, 300, 300, (4, 2), 64, device="cuda", seed=seed)
    return [q, k, v, rand(tuple(q.shape), device="cuda", seed=10 * seed + 9)]


@pytest.mark.gpu
@both_masks
def test_helion_2817_a_captured_graph_follows_its_inputs(causal):
    """Warm-up in eager mode, then the capture, then other inputs in the same memory."""
    static = producer(1)
    q, k, v, dout = static

    def step():
        out, lse = cute_attn.fwd(q, k, v, causal=causal, return_lse=True)
        return cute_attn.bwd(dout, q, k, v, out, lse, causal=causal)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for seed in (2, 3, 4):
        for t, new in zip(static, producer(seed)):
            t.copy_(new)
        for t in got:
            t.fill_(math.nan)
        graph.replay()
        check(got, dout, q, k, v, causal=causal)


@pytest.mark.gpu
def test_helion_2817_a_side_stream_with_a_slow_producer():
    """Each call runs behind what its own stream holds, warm or cold."""
    old, new = producer(1), producer(2)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for _ in range(3):
        q, k, v, dout = (t.clone() for t in old)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)  # 50 ms
            for t, now in zip((q, k, v, dout), new):
                t.copy_(now)
            out, lse = cute_attn.fwd(q, k, v, return_lse=True)
            got = cute_attn.bwd(dout, q, k, v, out, lse)
        side.synchronize()
        check(got, new[3], *new[:3])


@pytest.mark.gpu
def test_fa_1957_a_stream_of_the_users():
    inputs = leaves(2, 130, 150, (4, 2), 64, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        through_autograd(inputs, causal=True)
    stream.synchronize()
