"""The FP8 pass of the bench: what peers are given, errors, records. No GPU: peers are stand-ins."""

import sys
from types import SimpleNamespace

import pytest
import torch

from cute_attn.config import Fp8Config
from cute_attn.tools import bench, passes, peers_fp8, records
from cute_attn.tools.cases import Case

CASE = Case(2, 4, 2, 48, 80, 64, 32)
SQUARE = Case(1, 2, 2, 64, 64, 64, 64, causal=True)
FP8_ERROR = 0.1  # relative, of one factor a head or a tensor on N(0,1)


def inputs_of(case):
    return passes.make_inputs("fwd_fp8", case, "normal", "cpu")


def error(case, implementation):
    inputs = inputs_of(case)
    call = implementation.prepare(case, *inputs)
    found = passes.oracle("fwd_fp8", case, inputs)(implementation.to_output(call()))
    assert found["finite"]
    return found["rel_error"]


def attention(q, k, v, causal):
    """(batch, seqlen, heads, width) in fp64."""
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    if causal:
        scores += torch.full(scores.shape[2:], -torch.inf).triu(1)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


@pytest.mark.parametrize("preset", ["fp8", "fp8_hp"])
def test_ours_is_quantised_beforehand_and_close(preset, monkeypatch):
    import cute_attn

    implementation = peers_fp8.ours(preset)
    inputs = inputs_of(CASE)
    call = implementation.prepare(CASE, *inputs)
    monkeypatch.setattr(cute_attn, "quantize_qkv", None)  # not part of the call
    found = passes.oracle("fwd_fp8", CASE, inputs)(implementation.to_output(call()))
    assert 1e-3 < found["rel_error"] < FP8_ERROR
    assert implementation.config_record(CASE)["tile_n"] >= 32


def test_peers_in_16_bits_and_with_quantising():
    assert error(CASE, peers_fp8.peers("fp8")["bf16"]) < 0.01
    assert 1e-3 < error(CASE, peers_fp8.peers("fp8")["quantise+ours"]) < FP8_ERROR


def fake_fa3(q, k, v, causal, q_descale, k_descale, v_descale):
    assert {t.dtype for t in (q, k, v)} == {torch.float8_e4m3fn}
    for factor in (q_descale, k_descale, v_descale):
        assert factor.shape == (CASE.batch, CASE.heads_kv) and factor.dtype == torch.float32
    group = q.shape[2] // k.shape[2]
    q_factor = q_descale.repeat_interleave(group, 1)
    q, k, v = (
        t.double() * f[:, None, :, None] for t, f in ((q, q_factor), (k, k_descale), (v, v_descale))
    )
    return attention(q, k, v, causal).bfloat16()


def test_fa3_gets_a_factor_for_each_kv_head(monkeypatch):
    module = SimpleNamespace(flash_attn_func=fake_fa3)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    assert 1e-3 < error(CASE, peers_fp8.peers("fp8")["fa3"]) < FP8_ERROR


class FakeTensor:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(value):
            self.calls.append((name, value))
            return self

        return call


class FakeGraph:
    """Of cuDNN's front end: computes what the operation is documented to."""

    def __init__(self, **kwargs):
        self.types = kwargs

    def tensor(self, dim, stride, data_type):
        assert len(dim) == len(stride) == 4
        return FakeTensor()

    def sdpa_fp8(self, **kwargs):
        self.operands = kwargs
        self.results = [FakeTensor() for _ in range(4)]
        return self.results

    def execute(self, buffers, workspace, handle):
        got = {n: buffers[t] for n, t in self.operands.items() if isinstance(t, FakeTensor)}
        q, k, v = (got[n].double() * got[f"descale_{n}"].double() for n in "qkv")
        assert got["scale_s"] * got["descale_s"] == 1
        assert self.operands["attn_scale"] == q.shape[3] ** -0.5
        o = attention(*(t.transpose(1, 2) for t in (q, k, v)), self.operands["use_causal_mask"])
        out = buffers[self.results[0]]
        out.copy_((o.transpose(1, 2) * got["scale_o"].double()).to(out.dtype))

    def get_workspace_size(self):
        return 16

    def __getattr__(self, name):  # validate, build_plans, ...
        return lambda *args: None


def fake_cudnn():
    types = SimpleNamespace(FP8_E4M3="e4m3", FLOAT="fp32")
    return SimpleNamespace(
        data_type=types,
        heur_mode=SimpleNamespace(A=0, FALLBACK=1),
        pygraph=FakeGraph,
        create_handle=lambda: 0,
        set_stream=lambda handle, stream: None,
    )


def test_cudnn_gets_a_factor_for_each_tensor(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", fake_cudnn())
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    assert 1e-3 < error(SQUARE, peers_fp8.peers("fp8")["cudnn"]) < FP8_ERROR
    with pytest.raises(peers_fp8.Unavailable, match="top-left"):
        peers_fp8.peers("fp8")["cudnn"].prepare(
            Case(1, 1, 1, 8, 16, 64, 64, causal=True), *inputs_of(SQUARE)
        )


def arguments(*words):
    return bench.parser().parse_args([*words])


def test_what_is_timed_by_default():
    args = arguments("--fp8")
    assert bench.pass_of(args) == "fwd_fp8"
    assert [i.label for i in bench.implementations_of(args, "cuda")] == ["ours", "cudnn", "fa3"]
    args = arguments("--fp8", "fp8_hp", "--config", "tile_n=96", "--config", "pick")
    assert bench.pass_of(args) == "fwd_fp8_hp"
    found = bench.implementations_of(args, "cuda")
    assert [i.label for i in found] == ["ours#1", "ours#2", "bf16"]
    assert found[0].config_record(CASE)["tile_n"] == 96


def test_wrong_calls():
    with pytest.raises(ValueError, match="fa4.*allowed with fp8 are ours, bf16"):
        bench.implementations_of(arguments("--fp8", "--impl", "fa4"), "cuda")
    with pytest.raises(ValueError, match="tile_k"):
        bench.implementations_of(arguments("--fp8", "--config", "tile_k=1"), "cuda")
    with pytest.raises(ValueError, match="on a GPU only"):
        bench.implementations_of(arguments("--fp8"), "cpu")
    with pytest.raises(SystemExit):
        arguments("--fp8", "--backward")
    with pytest.raises(SystemExit):
        arguments("--fp8", "fp4")


def test_config_follows_the_preset():
    hp = peers_fp8.config_for(Case(1, 8, 8, 64, 64, 256, 256), "fp8_hp")
    assert isinstance(hp, Fp8Config)
    for case in (CASE, Case(1, 8, 8, 4096, 4096, 128, 128)):  # of packs
        assert not peers_fp8.config_for(case, "fp8").promote
    assert hp != peers_fp8.config_for(Case(1, 8, 8, 64, 64, 256, 256), "fp8")


def test_sources_of_the_passes_differ():
    names = ("fwd", "bwd", "fwd_fp8")
    assert len({records.source_digest(which) for which in names}) == 3
    assert records.source_digest("fwd_fp8") == records.source_digest("fwd_fp8_hp")
