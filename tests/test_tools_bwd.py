"""The tools, explain and warmup for the backward, without a GPU: as test_tools.py, test_api.py."""

import math
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from helpers import ROOT, script  # noqa: E402
from standin import BF16, tensors  # noqa: E402

import cute_attn  # noqa: E402
from cute_attn import backward, launch, tuning_bwd  # noqa: E402
from cute_attn import compile as jit  # noqa: E402
from cute_attn.__main__ import main as run  # noqa: E402
from cute_attn.config import BwdConfig, FwdConfig  # noqa: E402
from cute_attn.problem import Problem  # noqa: E402
from cute_attn.reference_backward import attention_backward  # noqa: E402
from cute_attn.tools import bench, cases, demo, inspect, measure, passes, peers, records, tune  # noqa: E402
from cute_attn.tools.cases import Case  # noqa: E402
from cute_attn.tools.compile import Built, backward_jobs  # noqa: E402

# explain and warmup


def test_explain():
    q, k, v = tensors(2, 300, 500, 4, 2, 128, 128)
    e = cute_attn.explain(q, k, v, causal=True, arch="sm90", backward=True, dlse=None)
    m, n = e.tile
    assert e.problem == Problem("bf16", 128, 128, True, False, 2, 300, 500, 4, 2)
    assert e.config == tuning_bwd.pick(e.problem) and e.tiles == -(-500 // n) * 2 * 2
    assert e.grid == (e.tiles if e.config.wide(e.problem) else min(e.tiles, 132))
    blocks, a_block = -(-300 // m), 2 * max(m, 128) + 32 + 128 * m  # and the ticket counter
    assert e.scratch_bytes == 4 * (2 * 4 * blocks * a_block + 4) and e.parts == 1
    assert e.smem_bytes == e.config.smem_bytes(e.problem)
    assert e.kernel == "cute_attn_bwd_sm90_bf16_d128_dv128_causal" and "cute_attn" in str(e)
    for part in ("backward of", "seqlen 300 x 500", f"{e.scratch_bytes} bytes", "sm90", "compiled"):
        assert part in str(e)
    longer = tensors(2, 600, 5, 4, 2, 128, 128)
    longer = cute_attn.explain(*longer, causal=True, arch="sm90", backward=True)
    assert longer.scratch_bytes <= 2.2 * e.scratch_bytes, "scratch grows with seqlen_q alone"


def test_explain_shared_tiles():
    """Of 2,048 tiles 68 are left after 15 rounds of 132 CTAs: thirds of them take two thirds of a
    round."""
    e = cute_attn.explain(
        *(torch.empty(1, 16384, 16, 128, dtype=torch.bfloat16, device="meta") for _ in range(3)),
        arch="sm90",
        backward=True,
    )
    assert (e.tiles, e.grid, e.parts) == (2048, 132, 3) and "in 3 parts" in str(e)
    assert e.scratch_bytes < 1.2 * 4 * 16384 * 16 * 128


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_explain_deterministic(dim):
    """A kernel of its own, with its name, and room for the turns: two cache lines a block."""
    options = {"arch": "sm90", "backward": True}
    q, k, v = tensors(2, 300, 70, 4, 2, dim, dim)
    plain = cute_attn.explain(q, k, v, **options)
    shared = 4 * 4 * (4 + (plain.parts - 1) * 128 * 2 * dim) - 16 if plain.parts > 1 else 0
    e = cute_attn.explain(q, k, v, deterministic=True, **options)
    assert e.config == replace(plain.config, deterministic=True) and not plain.config.deterministic
    assert e.kernel == f"{plain.kernel}_deterministic" and "a fixed order" in str(e)
    assert "no fixed order" in str(plain) and e.tile == plain.tile
    assert (e.tiles, e.grid * plain.parts) == (plain.tiles, plain.grid) and e.parts == 1
    added = e.scratch_bytes - plain.scratch_bytes + shared
    assert added == 2 * 4 * -(-300 // e.tile[0]) * 2 * 128
    deep = BwdConfig(stages=3)
    for config, asked in ((replace(deep, deterministic=True), False), (deep, True)):
        found = cute_attn.explain(
            *tensors(d=64, dv=128), config=config, deterministic=asked, **options
        )
        assert found.config == BwdConfig(stages=3, deterministic=True)
    assert "block-wise" in str(cute_attn.explain(q, k, v, backward=True, deterministic=True))


def test_explain_elsewhere():
    q, k, v = tensors()
    assert "block-wise gradients in torch" in str(cute_attn.explain(q, k, v, backward=True))
    empty = cute_attn.explain(q, k[:, :0], v[:, :0], backward=True, arch="sm90")
    assert "nothing" in str(empty) and empty.grid == 0
    meta = cute_attn.explain(*(t.to("meta") for t in (q, k, v)), arch="sm90", backward=True)
    assert meta.arch == "sm90" and not meta.copies
    moved = torch.cat([q.new_zeros(1), q.flatten()])[1:].view(q.shape)
    assert cute_attn.explain(moved, k, v, arch="sm90", backward=True).copies == ("q",)
    for message, error, options in (
        ("unexpected argument 'windows'", TypeError, {"windows": 1}),
        ("unexpected argument 'out'", TypeError, {"out": q}),
        ("softcap is not built", NotImplementedError, {"softcap": 1.0}),
        ("a BwdConfig is wanted", TypeError, {"config": FwdConfig()}),
        ("softmax_scale", ValueError, {"softmax_scale": math.inf}),
        ("deterministic is 1", TypeError, {"deterministic": 1}),
    ):
        with pytest.raises(error, match=message):
            cute_attn.explain(q, k, v, backward=True, **options)


@pytest.mark.parametrize(
    "shape", [(2, 300, 70, 4, 2, 64, 64), (1, 65, 64, 2, 1, 40, 96), (1, 3, 9, 1, 1, 256, 136)]
)
def test_what_is_explained_reaches_the_kernel(stand_in, shape):
    q, k, v = tensors(*shape)
    out, lse = cute_attn.fwd(q, k, v, causal=True, return_lse=True)
    got = cute_attn.bwd(out, q, k, v, out, lse, causal=True, softmax_scale=-0.3)
    want = attention_backward(out, q, k, v, causal=True, softmax_scale=-0.3)
    assert all(g.shape == w.shape and g.isfinite().all() for g, w in zip(got, want))
    e = cute_attn.explain(q, k, v, causal=True, softmax_scale=-0.3, backward=True)
    assert stand_in.built[-1] == (e.problem.static(), e.config, "sm90")
    assert 4 * sum(map(math.prod, stand_in.scratch[-1])) == e.scratch_bytes
    assert e.compiled == "in memory"


def test_gradients_of_the_stand_in_are_right(stand_in):
    q, k, v = tensors(2, 130, 130, 4, 2, 64, 64)
    out, lse = cute_attn.fwd(q, k, v, return_lse=True)
    dout = torch.randn(out.shape).to(BF16)
    got = cute_attn.bwd(dout, q, k, v, out, lse)
    for g, w in zip(got, attention_backward(dout, q, k, v)):
        torch.testing.assert_close(g.double(), w, atol=2e-2, rtol=2e-2)


def test_config_reaches_the_kernel(stand_in):
    q, k, v = tensors(d=128, dv=128)
    out, lse = cute_attn.fwd(q, k, v, return_lse=True)
    usable = tune.sort_out(Problem("bf16", 128, 128), 0, backward=True)[0]
    other = next(config for config in usable if config != BwdConfig())
    cute_attn.bwd(out, q, k, v, out, lse, config=other)
    assert stand_in.built[-1][1] == other
    for options in ({"deterministic": True}, {"config": BwdConfig(deterministic=True)}):
        cute_attn.bwd(out, q, k, v, out, lse, **options)
        assert stand_in.built[-1][1] == BwdConfig(deterministic=True)
    cute_attn.bwd(out, q, k, v, out, lse, config=other, deterministic=True)
    assert stand_in.built[-1][1] == replace(other, deterministic=True)
    stand_in.capturing = True
    cute_attn.bwd(out, q, k, v, out, lse, config=other)
    with pytest.raises(RuntimeError, match="warm up first"):
        cute_attn.bwd(out, q, k, v, out, lse)


def test_warmup_errors():
    with pytest.raises(ValueError, match="config cannot serve this problem: shared memory"):
        cute_attn.warmup(256, arch="sm90", backward=True, config=BwdConfig(stages=8))
    with pytest.raises(TypeError, match="a BwdConfig is wanted"):
        cute_attn.warmup(64, arch="sm90", backward=True, config=FwdConfig())
    with pytest.raises(TypeError, match="a FwdConfig is wanted"):
        cute_attn.warmup(64, arch="sm90", config=BwdConfig())
    cute_attn.warmup(64, arch="cpu", backward=True)
    cute_attn.warmup(256, arch="cpu", backward=True)


@pytest.mark.compile
def test_warmup_for_a_named_arch(monkeypatch, tmp_path):
    monkeypatch.setitem(jit.BUILDERS, "sm90", "host_kernel:compile_fwd")
    monkeypatch.setitem(jit.BACKWARD_BUILDERS, "sm90", "host_kernel:compile_fwd")
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "runs_here", lambda arch: False)
    jit.forget()
    before = jit.count()
    cute_attn.warmup(64, causal=True, arch="sm90", backward=True)
    assert jit.count() == before + 3, "two of the forward, one of the backward"
    options = {"causal": True, "arch": "sm90", "backward": True}
    e = cute_attn.explain(*tensors(d=64, dv=64), **options)
    assert e.compiled == "in memory"
    jit.forget()
    assert cute_attn.explain(*tensors(d=64, dv=64), **options).compiled == "on disk"
    cute_attn.warmup(64, config=BwdConfig(), **options)
    cute_attn.warmup(64, softmax_scale=-1.0, config=BwdConfig(), **options)
    assert jit.count() == before + 3, "P takes a scale of either sign"
    jit.forget()


def test_warmup_launches_on_its_gpu(stand_in, monkeypatch):
    """The driver loads a kernel at its first launch, which may not be in a graph."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch, "runs_here", lambda arch: True)
    cute_attn.warmup(64, 96, causal=True, arch="sm90", backward=True)
    cute_attn.warmup(64, 96, causal=True, arch="sm90", backward=True, deterministic=True)
    assert [len(operands) for operands in stand_in.launches] == [4, 4, 5] * 2
    q, k, v = tensors(d=64, dv=96)
    stand_in.capturing = True
    out, lse = cute_attn.fwd(q, k, v, causal=True, return_lse=True)
    for fixed in (False, True):
        cute_attn.bwd(out, q, k, v, out, lse, causal=True, deterministic=fixed)


# cases, the oracle, peers


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(65, 65), (40, 130), (130, 40)])
def test_sampled_gradients_are_the_dense_ones(monkeypatch, causal, seqlen_q, seqlen_k):
    monkeypatch.setattr(passes, "TILE_ELEMENTS", 16 * seqlen_k)  # several blocks of rows
    case = Case(2, 6, 2, seqlen_q, seqlen_k, 32, 64, causal)
    inputs = passes.make_inputs("bwd", case, "normal", "cpu")
    dense = attention_backward(inputs[3], *inputs[:3], causal=causal)
    errors = passes.oracle("bwd", case, inputs)
    found = errors(dense)
    assert found["rel_error"] < 1e-12 and found["max_error"] < 1e-12 and found["finite"]
    for n, name in enumerate(("dq", "dk", "dv")):
        wrong = [t.clone() for t in dense]
        wrong[n][-1, -1, -1] += 1.0  # in the last head
        found = errors(wrong)
        assert found["rel_errors"][name] == found["rel_error"] > 1e-3
        wrong[n][0, 0, 0, 0] = torch.nan
        assert not errors(wrong)["finite"]


def test_sampled_heads():
    assert passes.sample_heads(Case(1, 2, 1, 8, 8, 8, 8)) == [(0, 0)]
    assert passes.sample_heads(Case(4, 8, 8, 8, 8, 8, 8)) == [(0, 0), (2, 0), (3, 7)]


def test_cases_of_the_backward():
    (gqa,) = cases.CASES["gqa"]
    assert (gqa.batch, gqa.heads_q, gqa.heads_kv, gqa.seqlen_q, gqa.causal) == (
        2,
        32,
        4,
        8192,
        True,
    )
    assert {c.seqlen_q for c in cases.CASES["step"]} == {1024}
    assert passes.WORK["bwd"] + passes.WORK["fwd"] == passes.WORK["fwd_bwd"]


def test_parse_config():
    base, name = BwdConfig(), fields(BwdConfig)[0].name
    changed = cases.parse_config(f"{name}=3", base)
    assert getattr(changed, name) == 3 and cases.parse_config("pick", base) == base
    with pytest.raises(ValueError, match="--config"):
        cases.parse_config("exact_max=1", base)


def test_steps_take_the_wall_clock_of_many_calls():
    timer, calls = measure.Timer("cpu"), []
    (times,) = timer.rounds([lambda: calls.append(1)], [nullcontext], 3, 0.0, steps=7)
    assert len(calls) == 21 and len(times) == 3 and all(0 < t < 1 for t in times)


def test_gpu_waits_before_and_after_a_row_of_steps():
    log = []
    timer = measure.Timer("cpu")
    timer.gpu = True
    timer.torch = SimpleNamespace(cuda=SimpleNamespace(synchronize=lambda: log.append("wait")))
    timer.rounds([lambda: log.append("step")], [nullcontext], 1, 1.0, steps=2)
    assert log == ["wait", "step", "step", "wait"]


def test_a_recorded_graph_gives_gradients_again_and_again():
    case = Case(1, 4, 4, 40, 40, 16, 16, True)
    inputs = passes.make_inputs("bwd", case, "normal", "cpu")
    want = attention_backward(inputs[3], *inputs[:3], causal=True)
    for which in ("bwd", "fwd_bwd"):
        for impl in peers.chosen(["ours", "sdpa"], [], which):
            with impl.scope(), torch.no_grad():
                call = impl.prepare(case, *inputs)
                for got in (impl.to_output(call()), impl.to_output(call())):
                    for g, w in zip(got, want, strict=True):
                        torch.testing.assert_close(g.double(), w, atol=3e-2, rtol=3e-2)
    assert not any(t.requires_grad for t in inputs)


def test_peers_of_the_backward():
    case = Case(1, 1, 1, 8, 8, 8, 8)
    inputs = passes.make_inputs("bwd", case, "normal", "cpu")
    with pytest.raises(peers.Unavailable, match="no backward"):
        peers.PEERS_OF["bwd"]["fa3"].prepare(case, *inputs)
    assert "fa3" not in peers.default("cuda", "bwd") and "fa3" in peers.default("cuda")
    assert all(impls.keys() == peers.PEERS.keys() for impls in peers.PEERS_OF.values())


def test_flash_attention_4_is_called_as_it_wants(monkeypatch):
    case = Case(1, 2, 1, 8, 16, 32, 32, True)
    inputs = passes.make_inputs("bwd", case, "normal", "cpu")

    saved = []

    def forward(q, k, v, *, causal, return_lse):
        saved[:] = cute_attn.fwd(q, k, v, causal=causal, return_lse=return_lse)
        return (*saved, None, None, None)

    def backward(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0):
        assert (softmax_scale, causal, lse.shape) == (None, True, (1, 2, 8))
        assert out is saved[0] and lse is saved[1], "of its own forward"
        return cute_attn.bwd(dout, q, k, v, out, lse, causal=causal)

    interface = SimpleNamespace(_flash_attn_bwd=backward, _flash_attn_fwd=forward)
    monkeypatch.setattr(peers, "import_module", lambda name: interface)
    impl = peers.PEERS_OF["bwd"]["fa4"]
    errors = passes.oracle("bwd", case, inputs)
    assert errors(impl.to_output(impl.prepare(case, *inputs)()))["rel_error"] < 1e-2


def test_a_peer_that_is_wrong_is_pointed_at():
    """Its time counts as a peer's, against us, and whoever reads the row must know."""
    found = [
        {"impl": impl, "ours": impl == "ours", "rel_error": error, "finite": True, "tflops": 99.0}
        | {"case": "d64", "data": "normal", "p50_ms": 1.0}
        for impl, error in (("ours", 2e-3), ("fa2", 5e-3), ("fa4", 0.4))
    ]
    shown = bench.row(found)
    assert "fa4 WRONG 4e-01" in shown and "fa2" not in shown and "ours" not in shown
    assert "WRONG" not in bench.row([{"error": "x", "impl": "fa4", "ours": False} | {
        "case": "d64", "data": "normal"}])  # fmt: skip


# the commands


@pytest.mark.parametrize("which", ["bwd", "fwd_bwd"])
def test_bench_on_cpu(tmp_path, capsys, which, monkeypatch):
    monkeypatch.setattr(measure, "STEPS", 2)
    out = tmp_path / "records.jsonl"
    arguments = ["--backward" if which == "bwd" else "--fwd-bwd", "--device", "cpu"]
    arguments += ["--cases", "smoke", "--impl", "ours,sdpa,fa3", "--rounds", "3", "--seconds", "0"]
    assert run(["bench", *arguments, "--out", str(out)]) == 0
    found = records.read([out])
    assert len(found) == 6 and {records.pass_of(r) for r in found} == {which}
    ours = [r for r in found if r["impl"] == "ours"]
    for r in ours:
        assert r["rel_error"] < 2e-2 and r["finite"] and set(r["rel_errors"]) == {"dq", "dk", "dv"}
        case = Case(**r["problem"])
        flops = passes.WORK[which] * case.flops()
        assert r["tflops"] == pytest.approx(flops / r["p50_ms"] * 1e-9)
        assert r["source"] == records.source_digest("bwd") != records.source_digest()
    config = ours[0]["config"]
    assert set(config if which == "bwd" else config["bwd"]) == {f.name for f in fields(BwdConfig)}
    assert ours[1]["best_peer"] == "sdpa"
    assert "fa3 did not run" in capsys.readouterr().out


def test_bench_of_the_backward_with_configs(tmp_path, capsys):
    out = tmp_path / "records.jsonl"
    name = fields(BwdConfig)[0].name
    assert run(["bench", "--backward", "--device", "cpu", "--shape", "b=1,hq=1,sq=64,d=64",
                "--impl", "ours", "--rounds", "1", "--config", "pick", "--config", f"{name}=3",
                "--out", str(out)]) == 0  # fmt: skip
    assert [r["config"][name] for r in records.read([out])] == [getattr(BwdConfig(), name), 3]
    for wrong in (["--backward", "--fwd-bwd"], ["--backward", "--config", "tile_n=96"],
                  ["--fwd-bwd", "--config", "pick"], ["--fwd-bwd", "--host"]):  # fmt: skip
        with pytest.raises(SystemExit):
            run(["bench", "--device", "cpu", *wrong])


def test_host_time_of_the_backward(tmp_path):
    out = tmp_path / "host.jsonl"
    assert run(["bench", "--backward", "--device", "cpu", "--cases", "host", "--impl", "ours",
                "--no-check", "--rounds", "1", "--out", str(out)]) == 0  # fmt: skip
    (record,) = records.read([out])
    assert record["p50_us"] > 0 and record["pass"] == "bwd"


def test_digest_of_the_forward_does_not_know_the_backward(monkeypatch, tmp_path):
    """Records of the forward stay what they are whatever the backward becomes."""
    before = records.source_digest(), records.source_digest("bwd")
    for path in (
        "cute_attn/tuning.py",
        "cute_attn/tuning_bwd.py",
        *map(str, ROOT.glob("kernels/**/*.py")),
    ):
        place = tmp_path / Path(path).relative_to(ROOT if Path(path).is_absolute() else ".")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((ROOT / path).read_bytes())
    monkeypatch.setattr(records, "ROOT", tmp_path)
    assert (records.source_digest(), records.source_digest("bwd")) == before
    for changed in ("cute_attn/tuning_bwd.py", "kernels/hopper/bwd.py"):
        with open(tmp_path / changed, "a") as file:
            file.write("#")
    assert records.source_digest() == before[0] and records.source_digest("bwd") != before[1]


def test_tune_sorts_out_and_ranks():
    problem = Problem("bf16", 128, 128)
    good, bad = tune.sort_out(problem, 0, backward=True)
    assert good[0] == tuning_bwd.pick(problem) and len(good) > 1 and len(set(good)) == len(good)
    assert all(why for _, why in bad)
    for config in good:
        assert eval(tune.config_source(config)) == config
    built = [Built((problem, config), 1.0) for config in good[:2]]
    case = Case(1, 1, 1, 64, 64, 128, 128)
    lines = tune.table(tune.ranked(built, [[2.0], [1.0]]), [case])
    assert lines[1].endswith(tune.config_source(good[1])) and len(lines) == 3
    with pytest.raises(SystemExit):
        run(["tune", "--backward", "--write", "--shape", "b=1,hq=1,sq=128,d=64"])


def test_tune_drops_what_is_wrong(monkeypatch):
    case = Case(1, 2, 1, 70, 90, 32, 32, True)
    make, args = passes.make_inputs, SimpleNamespace(backward=True, data="normal", slope=10.0)
    monkeypatch.setattr(passes, "make_inputs", lambda w, c, d, device, s: make(w, c, d, "cpu", s))
    item = tune.Item(case, args)
    assert item.wrong(BwdConfig()) == ""
    assert "a BwdConfig is wanted" in item.wrong(FwdConfig())
    monkeypatch.setattr(cute_attn, "bwd", lambda dout, q, k, v, *_, **__: (q, k, v))
    assert item.wrong(BwdConfig()).startswith("wrong: relative error")


@pytest.mark.compile
def test_tune_without_a_gpu_ranks_nothing_but_compiles(capsys, tmp_path, monkeypatch):
    if demo.kernels_run_here():
        pytest.skip("this machine has the GPU")
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path))
    assert run(["tune", "--backward", "--shape", "b=1,hq=1,sq=128,d=64", "--limit", "1",
                "--jobs", "1"]) == 0  # fmt: skip
    shown = capsys.readouterr().out
    assert "not timed: no Hopper GPU here" in shown and "BwdConfig()" in shown


def test_table_of_the_backward():
    jobs = backward_jobs()
    assert len(jobs) == 4 * len(tuning_bwd.BACKWARD)
    for problem, config in jobs:
        assert not config.infeasible(problem) and tuning_bwd.pick(problem) == config


@pytest.mark.compile
def test_compile_and_explain_name_the_same_kernel(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path))
    assert run(["compile", "--backward", "--shape", "b=1,hq=1,sq=1,d=40,dv=72", "--jobs", "1"]) == 0
    assert "registers" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.o")
    used = inspect.main_kernel(inspect.resources(inspect.cubin_of_object(path.read_bytes())))
    jit.forget()
    e = cute_attn.explain(*tensors(d=40, dv=72), arch="sm90", backward=True)
    assert used.name.startswith(e.kernel)
    assert e.compiled == "on disk"


@pytest.mark.compile
def test_dump(tmp_path, capsys):
    dump = script("dump")
    shape = ["--backward", "--shape", "b=1,hq=1,sq=1,d=64"]
    assert dump.main([*shape, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "row_statistics" in shown and "REDG" in shown and "#1 loop 1" in shown
    assert all(path.name.startswith("cute_attn_bwd") for path in tmp_path.iterdir())


def test_profile_prints_its_command(capsys):
    assert script("profile").main(["--print", "--backward"]) == 0
    command = capsys.readouterr().out
    assert "regex:cute_attn_bwd" in command and command.rstrip().endswith("--backward")


TWO_KERNELS = """
\t.section\t.text.small_0,"ax",@progbits
.text.small_0:
        /*0000*/                   FADD R3, R3, R4 ;
.text.cute_attn_bwd_1:
.L_x_1:
        /*0000*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24 ;
        /*0010*/               @P1 BRA `(.L_x_1) ;
        /*0020*/                   EXIT ;
"""


def test_kernels_of_a_disassembly_are_told_apart(monkeypatch):
    numbers = {"cute_attn_bwd_1": {"registers": 168, "frame": 0}, "small_0": {"registers": 32}}
    numbers["$__internal_0_$__div"] = {"frame": 0}  # a subroutine is no kernel
    monkeypatch.setattr(inspect, "elf_numbers", lambda cubin: numbers)
    small, main = inspect.resources(b"", TWO_KERNELS)
    assert small.name == "small_0" and small.counts == {"FADD": 1, "TOTAL": 1}
    assert main.counts["HGMMA"] == 1 and len(main.loops) == 1 and main.loops[0]["TOTAL"] == 2
    assert inspect.main_kernel([small, main]) is main
    assert inspect.main_kernel(inspect.resources(b"")).name == "cute_attn_bwd_1"


# report


def fake_records(which, rate):
    found = []
    for case in (*cases.CASES["main18"], *cases.CASES["gqa"]):
        for impl, ms in (("ours", 1.0), ("fa4", 1.1)):
            r = {"impl": impl, "ours": impl == "ours", "p50_ms": ms, "ratio": 1.1 / ms}
            r |= {"case": case.name, "data": "normal", "run": which, "command": f"bench {which}"}
            r |= {"tflops": rate / ms, "gpu": "NVIDIA H200", "driver": "1", "versions": {}}
            r |= {"time": "2026-01-02T03:04:05Z", "source": f"code of {which}"}
            found.append(r | ({} if which == "fwd" else {"pass": which}))
    return found


def test_report_keeps_the_passes_apart():
    report = script("report")
    found = [
        *fake_records("fwd", 700.0),
        *fake_records("bwd", 500.0),
        *fake_records("fwd_bwd", 550.0),
    ]
    assert report.newest(found) == found, "other code of another pass overtakes nothing"
    for name, rate in (("main", 700), ("bwd_main", 500), ("fwd_bwd", 550), ("bwd_gqa", 500)):
        text = report.table_of(name, found)
        others = {"bench fwd", "bench bwd", "bench fwd_bwd"} - {f"bench {report.TABLES[name][0]}"}
        assert f"| {rate} |" in text and not any(f"`{other}`" in text for other in others)
    assert f"| {550} |" not in report.table_of("compact", found)
    assert "500 · 1.10×" in report.table_of("bwd_compact", found)
    for name in ("bwd_main", "bwd_compact", "fwd_bwd"):
        assert report.table_of(name, fake_records("fwd", 700.0)) == report.NOTHING


def test_every_marker_has_a_table():
    report = script("report")
    names = [
        m[1] for place in report.PLACES for m in report.MARKERS.findall((ROOT / place).read_text())
    ]
    assert {"bwd_main", "bwd_gqa", "bwd_compact", "fwd_bwd", "main", "compact"} <= set(names)
    assert set(names) <= set(report.TABLES) and len(names) == len(set(names))


def test_plot_of_the_backward(tmp_path):
    pytest.importorskip("matplotlib")
    report = script("report")
    found = fake_records("bwd", 500.0)
    narrow = [r for r in found if not r["case"].startswith("d256")]
    report.plot(narrow, tmp_path / "x.svg", "bwd")
    assert (tmp_path / "x.svg").stat().st_size > 10000
    with pytest.raises(SystemExit, match="no records of the forward"):
        report.plot(found, tmp_path / "y.svg")


def test_public_names():
    assert {"BwdConfig", "bwd"} <= set(dir(cute_attn)) and cute_attn.BwdConfig is BwdConfig
    assert backward.choose_config(Problem("bf16", 64, 64), None) == BwdConfig()
