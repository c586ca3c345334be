"""cute_attn.bwd(deterministic=True): the same bits every time, and right."""

import pytest
import torch
from gradients import check
from helpers import ALL_DEVICES, BF16, GPU_DEVICES, close, qkv, rand

import cute_attn

each_device = pytest.mark.parametrize("device", ALL_DEVICES, indirect=True)
each_gpu = pytest.mark.parametrize("device", GPU_DEVICES, indirect=True)
both_masks = pytest.mark.parametrize("causal", [False, True])
each_dim = pytest.mark.parametrize("dims", [64, 128, (192, 128), 256], ids=str)


def both_orders(dout, q, k, v, causal):
    """The deterministic gradients, checked against the oracle and the default's, and a function
    that computes them again. dq is added up in another order, dk and dv only where heads share a
    KV head; and the default's dk and dv are repeatable, too."""
    out, lse = cute_attn.fwd(q, k, v, causal=causal, return_lse=True)

    def again(deterministic=True):
        options = {"causal": causal, "deterministic": deterministic}
        return cute_attn.bwd(dout, q, k, v, out, lse, **options)

    _, dk, dv = got = again()
    check(got, dout, q, k, v, causal=causal)
    _, *others = other = again(False)
    assert all(torch.equal(a, b) for a, b in zip(again(False)[1:], others))
    if q.shape[2] == k.shape[2]:
        assert all(torch.equal(a, b) for a, b in zip((dk, dv), others))
    unit = torch.finfo(dk.dtype).eps
    for one, two in zip(got, other):
        close(one, two, unit * two.double().abs() + 2.0**-16 * two.double().abs().max())
    return got, again


@each_device
@both_masks
@each_dim
def test_deterministic_repeats_are_equal_bit_for_bit(device, causal, dims):
    """On a GPU 200 times, more CTAs than run at once, and beside products on another stream, which
    start and end at any time (FA 1596)."""
    gpu = device == "cuda"
    shape = (2, 1500, 1400, (16, 8)) if gpu else (2, 200, 200, (4, 2))
    q, k, v = qkv(*shape, dims, device=device)
    dout = rand((*q.shape[:3], v.shape[3]), device=device, seed=9)
    first, again = both_orders(dout, q, k, v, causal)
    beside = torch.cuda.Stream() if gpu else None
    for i in range(200 if gpu else 3):
        if gpu:
            with torch.cuda.stream(beside):
                size = 512 * (1 + i % 8)
                a = torch.ones(size, size, dtype=BF16, device=device)
                a @ a
        assert all(torch.equal(a, b) for a, b in zip(again(), first)), i


@each_gpu
@both_masks
@each_dim
def test_deterministic_lengths(device, causal, dims):
    """Rows and whole blocks of rows that see no key, one query, one key, ends within a block, and
    as many CTAs of one head as run at once."""
    for seqlen_q, seqlen_k in ((700, 130), (130, 700), (300, 1), (1, 300), (257, 255), (65, 8400)):
        q, k, v = qkv(1, seqlen_q, seqlen_k, (2, 1), dims, device=device)
        dout = rand((*q.shape[:3], v.shape[3]), device=device, seed=9)
        first, again = both_orders(dout, q, k, v, causal)
        assert all(torch.equal(a, b) for _ in range(5) for a, b in zip(again(), first))


@each_gpu
@both_masks
def test_deterministic_on_two_streams_at_once(device, causal):
    """Two launches whose CTAs share the GPU: each waits for its own."""
    q, k, v = qkv(2, 2000, 2000, (8, 4), 128, device=device)
    dout = rand(tuple(q.shape), device=device, seed=9)
    first, again = both_orders(dout, q, k, v, causal)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    for i in range(50):
        with torch.cuda.stream(streams[i % 2]):
            found.append(again())
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for got in found for a, b in zip(got, first))


@both_masks
def test_deterministic_is_another_kernel(stand_in, causal):
    """Empty problems run none."""
    q, k, v = qkv(2, 5, 7, (4, 2), 16)
    both_orders(torch.ones_like(q), q, k, v, causal)
    assert [config.deterministic for _, config, _ in stand_in.built[-2:]] == [True, False]
    launches = len(stand_in.launches)
    q, k, v = qkv(2, 0, 7, 2, 16)
    out, lse = cute_attn.fwd(q, k, v, return_lse=True)
    got = cute_attn.bwd(out, q, k, v, out, lse, deterministic=True)
    assert [t.shape for t in got] == [q.shape, k.shape, v.shape]
    assert len(stand_in.launches) == launches
