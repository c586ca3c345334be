"""quantize_qkv, channel_statistics and transpose_v on a Hopper GPU against the CPU path.

Scales are equal, but for those of q and K that tensor cores transformed: their sums are rounded in
another order (kernels/hopper/quantize_products.py). A code may be the neighbour of the CPU's where
the quotient is next to the middle between two: the kernel multiplies by the scale's inverse. That
is one in a million values of sums (after the Hadamard transform, or less a mean), more where 16-bit
values are divided as they are, and where a shift is tens of times what it leaves.
"""

import math

import pytest
import torch
from fp8_oracle import E4M3, data
from helpers import BF16, FP16, qkv, rand, views

import cute_attn
from cute_attn import fp8_prepare, quantize
from cute_attn.config import ONE_TILE

pytestmark = pytest.mark.gpu
SUMS, PLAIN = 1e-4, 5e-3  # shares of codes that may be a neighbour
PRODUCTS = 1e-6  # relative, of scales where tensor cores add up
NAMES = ("q_descale", "k_descale", "v_descale")


def cpu(x):
    return x.cpu() if isinstance(x, torch.Tensor) else x


def code(x):
    """Codes as integers in the order of their values."""
    x = x.view(torch.uint8).int()
    return torch.where(x > 127, 128 - x, x)


def same_codes(got, want, share):
    got = cpu(got)
    assert got.shape == want.shape and got.dtype == want.dtype and got.is_contiguous()
    if got.dtype != E4M3:
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
        return
    a, b = got.float(), want.float()
    differ = ~((a == b) | (a.isnan() & b.isnan()))
    assert differ.sum() <= max(2, share * a.numel())
    if differ.any():
        assert (code(got) - code(want)).abs()[differ].max() == 1


def has_products(q, options):
    """Whether tensor cores transform q and K."""
    plain = options.get("hadamard_seed", 0) is not None and options.get("cos") is None
    plain = plain and options.get("k_block", 128) in ONE_TILE
    return plain and q.dtype == BF16 and q.shape[3] in (32, 64, 128)


def same_scales(got, want, bound):
    """bound: relative; 0: the same bits."""
    assert got.shape == want.shape
    assert torch.equal(got, want) or bound and torch.allclose(got, want, rtol=bound, atol=0.0)


def check(q, k, v, share=SUMS, **options):
    """The pack on the GPU; the CPU gets the shifts and the balance that the GPU measured."""
    pack = cute_attn.quantize_qkv(q, k, v, **options)
    again = cute_attn.quantize_qkv(q, k, v, **options)
    host = {name: cpu(value) for name, value in options.items()}
    tensors = [cpu(t) for t in (q, k, v)]
    own = cute_attn.quantize_qkv(*tensors, **host)
    for name in ("k_shift", "v_shift", "qk_balance"):
        got, want = cpu(getattr(pack, name)), getattr(own, name)
        assert (got is None) == (want is None)
        if got is None:
            continue
        assert got.shape == want.shape
        if name == "qk_balance":
            assert (got != want).sum() <= 0.01 * got.numel()
            assert torch.equal(got.log2(), got.log2().round())
        else:
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)
        if not (name == "qk_balance" and host.get(name) is not None):
            host[name] = got
    want = cute_attn.quantize_qkv(*tensors, **host)
    same_codes(pack.q, want.q, share)
    same_codes(pack.k, want.k, share)
    same_codes(quantize.values(pack), want.v, share)
    for name in NAMES:
        a, b = cpu(getattr(pack, name)), getattr(want, name)
        assert (a is None) == (b is None)
        if a is not None:
            of_sums = name != "v_descale" and has_products(q, options)
            same_scales(a, b, PRODUCTS if of_sums else 0.0)
    if want.q_dot_k_shift is not None:
        got, like = cpu(pack.q_dot_k_shift), want.q_dot_k_shift
        size = 1 + like.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
        torch.testing.assert_close(got, like, atol=1e-5 * size, rtol=1e-5, equal_nan=True)
    if pack.vt is not None:
        vt = fp8_prepare.transposed(quantize.values(pack))
        assert torch.equal(pack.vt.view(torch.uint8), vt.view(torch.uint8)), "zeros behind the end"
    same_bits(pack, again)
    return pack


def same_bits(pack, again):
    for name in ("q", "k", "v", "vt", *NAMES, "q_dot_k_shift", "k_shift", "v_shift", "qk_balance"):
        a, b = getattr(pack, name), getattr(again, name)
        if a is not None:
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


def vectors(heads, dim, dim_v, batch=None, device="cuda"):
    lead = () if batch is None else (batch,)
    shift, shift_v, balance = (
        rand((*lead, heads, width), torch.float32, device, seed)
        for seed, width in enumerate((dim, dim_v, dim))
    )
    return {"k_shift": shift, "v_shift": shift_v, "qk_balance": balance.exp()}


def angles(seqlen, half, dtype=torch.float32):
    turn = torch.arange(seqlen + 3.0)[:, None] * 1e4 ** (-torch.arange(half) / half)
    return {"cos": turn.cos().to("cuda", dtype), "sin": turn.sin().to("cuda", dtype)}


@pytest.mark.parametrize(
    "dims", [(32, 32), (64, 64), (128, 128), (256, 256), (96, 80), (192, 128), (16, 48)]
)
def test_given_vectors(dims):
    tensors = qkv(2, 300, 517, (4, 2), dims, device="cuda")
    check(*tensors, **vectors(2, *dims))


@pytest.mark.parametrize("kind", ["gauss", "fa3", "qkbias", "kzero", "vbias"])
def test_measured(kind):
    check(*(t.cuda() for t in data(kind, 1000, 128)))


@pytest.mark.parametrize("dims", [(240, 32), (64, 256)])
def test_measured_other_head_dims(dims):
    check(*qkv(3, 140, 260, (6, 2), dims, device="cuda", dtype=FP16))


@pytest.mark.parametrize("seqlen", [1, 127, 128, 129, 255, 4096])
def test_lengths(seqlen):
    check(*qkv(1, seqlen, seqlen, (4, 2), 128, device="cuda"), **vectors(2, 128, 128))
    check(*qkv(1, 5, seqlen, (4, 2), 128, device="cuda"))


@pytest.mark.parametrize("dim", [64, 128])
def test_ctas_that_take_several_tiles(dim):
    """65 tiles of a head, four a CTA; and with measured statistics, chunks of more rows."""
    tensors = qkv(1, 8300, 8300, (32, 8), dim, device="cuda")
    check(*tensors, **vectors(8, dim, dim))
    check(*tensors)


@pytest.mark.parametrize("dim", [64, 128])
def test_keys_next_to_a_wide_shift(dim):
    """Tens of times what it leaves; and all that they are, where nothing is left but roundings."""
    q, k, v = qkv(1, 40, 300, (4, 2), dim, device="cuda")
    given = vectors(2, dim, dim)
    given["k_shift"] *= 20
    check(q, (k + given["k_shift"]).to(BF16), v, 1e-3, **given)
    k = (k[:, :1] * 50).expand_as(k)
    pack = check(q, k, v)
    assert (pack.k.float() == 0).all() and (pack.k_descale == 1).all()


@pytest.mark.parametrize("dim_v", [64, 128, 192])
def test_given_vectors_and_channels_of_v(dim_v):
    tensors = qkv(2, 50, 1100, (4, 2), (64, dim_v), device="cuda")
    for _ in range(2):
        check(*tensors, **vectors(2, 64, dim_v), v_scales="channel")
        tensors[2][0, 700, 1, 3], tensors[2][1, 1, 0, 7] = math.inf, math.nan


@pytest.mark.parametrize("half, dtype", [(64, torch.float32), (16, BF16), (5, torch.float32)])
def test_rope(half, dtype):
    tensors = qkv(2, 300, 300, (4, 2), 128, device="cuda")
    check(*tensors, **angles(300, half, dtype))
    check(*tensors, **angles(300, half, dtype), **vectors(2, 128, 128, batch=2))


@pytest.mark.parametrize("k_block", [16, 64, 48, 256, "head"])
def test_blocks_of_keys_and_channels_of_v(k_block):
    check(*qkv(2, 50, 517, (4, 2), 64, device="cuda"), k_block=k_block, v_scales="channel")


def test_high_precision_preset():
    tensors = qkv(2, 100, 300, (4, 2), (64, 96), device="cuda")
    check(*tensors, preset="fp8_hp")
    pack = check(*tensors, preset="fp8_hp", v_shift=False, k_shift=False)
    assert pack.v is tensors[2]


def test_nothing_but_the_cast():
    tensors = qkv(2, 100, 300, (4, 2), 64, device="cuda")
    check(*tensors, PLAIN, hadamard_seed=None, k_shift=False, v_shift=False)
    check(
        *tensors,
        PLAIN,
        hadamard_seed=None,
        v_shift=False,
        qk_balance=vectors(2, 64, 64)["qk_balance"],
    )


@pytest.mark.parametrize("dim", [64, 128])
def test_nan_infinities_zeros_and_extremes(dim):
    q, k, v = qkv(1, 200, 300, (4, 2), dim, device="cuda")
    k[0, 3, 0, 5], v[0, 4, 1, 6], q[0, 7, 1, 0] = math.nan, math.nan, math.nan
    k[0, 200, 0, 1], v[0, 9, 0, 2], q[0, 9, 0, 9] = math.inf, -math.inf, math.inf
    k[0, 201, 0, 1:3], q[0, 10, 0, 3:5] = math.inf, -math.inf
    plain = {"hadamard_seed": None, "k_shift": False, "v_shift": False}
    for options in ({}, plain, vectors(2, dim, dim)):
        check(q, k, v, PLAIN, **options)
    q, k, v = qkv(1, 200, 300, (4, 2), dim, device="cuda")
    pack = check(q * 0, k * 0, v * 0)
    assert all((getattr(pack, name) == 1).all() for name in NAMES)
    for size in (1e-37, 1e-30, 1e30):
        pack = cute_attn.quantize_qkv(q * size, k * size, v * size)
        assert all(t.float().isfinite().all() for t in (pack.q, pack.k, pack.vt))


@pytest.mark.parametrize("name", sorted(views("cpu")))
def test_strides(name):
    q, k, v = views("cuda")[name]
    want = cute_attn.quantize_qkv(q.contiguous(), k.contiguous(), v.contiguous())
    same_bits(cute_attn.quantize_qkv(q, k, v), want)


def test_statistics():
    tensors = [t.cuda() for t in data("qkbias", 700, 64)]
    tensors = [torch.cat((t, 2 * t)) for t in tensors]
    got = quantize.channel_statistics(*tensors)
    want = quantize.channel_statistics(*(t.cpu() for t in tensors))
    for a, b in zip(got[:2], want[:2]):
        torch.testing.assert_close(a.cpu(), b, atol=1e-4, rtol=1e-5)
    assert torch.equal(got.qk_balance.cpu(), want.qk_balance)
    assert all(torch.equal(a, b) for a, b in zip(got, quantize.channel_statistics(*tensors)))


def test_graphs_and_streams():
    tensors = qkv(2, 300, 300, (4, 2), 64, device="cuda")
    want = cute_attn.quantize_qkv(*tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pack = cute_attn.quantize_qkv(*tensors)
    for _ in range(3):
        pack.q.view(torch.uint8).zero_(), pack.vt.view(torch.uint8).zero_()
        graph.replay()
    torch.cuda.synchronize()
    same_bits(pack, want)


@pytest.mark.parametrize("dim_v", [16, 128, 256])
def test_transpose_v(dim_v):
    v = torch.randint(0, 256, (2, 517, 3, dim_v), dtype=torch.uint8, device="cuda").view(E4M3)
    for x in (v, v[:, ::2], v[:, :, :1].expand(2, 517, 3, dim_v)):
        got, want = fp8_prepare.transpose_v(x), fp8_prepare.transposed(x)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
