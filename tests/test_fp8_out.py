"""fwd's out in e4m3 on the CPU: values, amax, wrong calls."""

import pytest
import torch
from fp8_oracle import E4M3, relative
from helpers import BF16, qkv

import cute_attn
from cute_attn.quantize import QuantizedQKV, saturate
from cute_attn.reference_fp8 import attention_fp8


@pytest.mark.parametrize("kind", ["e4m3", "fp8", "fp8_hp", "pack"])
def test_out_in_e4m3(kind):
    """Rounded once, from fp32: out_dtype=float32 is what the CPU path has before."""
    q, k, v = qkv(2, 50, 70, (4, 2), (64, 48))
    args, options = (q, k, v), {"preset": kind}
    pack = cute_attn.quantize_qkv(q, k, v, preset=kind if kind == "fp8_hp" else "fp8")
    if kind == "e4m3":
        args, options = [t.to(E4M3) for t in (q, k, v)], {}
        pack = QuantizedQKV(*args, *[None] * 3, 128, "fp8", BF16, *[None] * 5)
    elif kind == "pack":
        args, options = (pack,), {}
    O, lse = attention_fp8(pack, causal=True, out_dtype=torch.float32)
    for scale in (None, torch.tensor(100.0), torch.tensor([1e4])):
        out, stats, amax = cute_attn.fwd(
            *args, **options, causal=True, out_dtype=E4M3, o_scale=scale, return_lse=True,
            return_amax=True,
        )  # fmt: skip
        assert torch.equal(stats, lse) and amax.shape == (1,) and amax.item() == O.abs().max()
        scaled = O if scale is None else O * scale
        assert out.dtype == E4M3 and torch.equal(out.float(), saturate(scaled).float())
        assert (out.float().abs().max() == 448) == (scaled.abs().max() > 432)
    given = torch.empty(2, 4, 50, 48, dtype=E4M3).transpose(1, 2)
    pair = cute_attn.fwd(*args, **options, causal=True, o_scale=scale, out=given, return_amax=1)
    assert pair[0] is given and torch.equal(given.float(), out.float()) and pair[1] == amax
    # delayed scaling: this call's amax for the next
    out = cute_attn.fwd(*args, **options, causal=True, out_dtype=E4M3, o_scale=448 / amax)
    assert relative(out.float() * amax / 448, O) < 0.03 and out.float().abs().max() == 448


def test_what_is_not_finite_in_out_in_e4m3():
    q, k, v = (t.to(E4M3) for t in qkv(1, 8, 4, 1, 32))
    v.view(torch.uint8)[0, 3, 0, 7] = 0x7F  # only the last four rows see that key
    out, amax = cute_attn.fwd(q, k, v, causal=True, out_dtype=E4M3, return_amax=True)
    O = cute_attn.fwd(q, k, v, causal=True).float()
    assert torch.equal(out.float().isnan(), O.isnan()) and O.isnan().sum() == 1
    assert not out.float()[0, :4].any()  # rows that see no key
    assert amax.item() == pytest.approx(O.nan_to_num(0.0).abs().max().item(), rel=2**-8)


Q, K, V = qkv(1, 8, 12, (4, 2), 32)
B = {"q": Q, "k": K, "v": V}
P = {**B, "preset": "fp8"}
E = {"q": Q.to(E4M3), "k": K.to(E4M3), "v": V.to(E4M3)}
R = {**E, "out_dtype": E4M3}
ONE, TWO = torch.ones(1), torch.ones(2)
WRONG = [
    (ValueError, "o_scale is given and q.dtype is torch.bfloat16", {**B, "o_scale": ONE}),
    (ValueError, "return_amax is given and q.dtype is torch.bf", {**B, "return_amax": True}),
    (ValueError, "o_scale is given and out is in torch.bfloat16", {**E, "o_scale": ONE}),
    (ValueError, "return_amax is given and out is in torch.bf", {**P, "return_amax": True}),
    (TypeError, "o_scale is a float", {**E, "out_dtype": E4M3, "o_scale": 2.0}),
    (TypeError, "o_scale.dtype is torch.float64", {**R, "o_scale": ONE.double()}),
    (ValueError, r"o_scale.shape is \(2,\): allowed are \(\) and \(1,\)", {**R, "o_scale": TWO}),
    (ValueError, "o_scale.device is meta", {**R, "o_scale": ONE.to("meta")}),
    (NotImplementedError, "o_scale requires grad", {**R, "o_scale": TWO[:1].requires_grad_()}),
]  # fmt: skip


@pytest.mark.parametrize("error, message, arguments", WRONG)
def test_wrong_calls(error, message, arguments):
    with pytest.raises(error, match=message):
        cute_attn.fwd(**arguments)
