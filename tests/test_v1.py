"""FlashAttention-1's schedule of the Ampere kernels: configs, the bench that compares, values on a
GPU. tests/test_compile_v1.py builds it."""

import math
from dataclasses import asdict, replace

import pytest

torch = pytest.importorskip("torch")

from ahead import v1_config, v1_tiles  # noqa: E402
from helpers import BF16, FP16, check, qkv, script  # noqa: E402
from standin import tensors  # noqa: E402

import cute_attn  # noqa: E402
from cute_attn import compile as jit  # noqa: E402
from cute_attn import tuning_sm80  # noqa: E402
from cute_attn.config import AMPERE_SMEM_LIMITS, AmpereConfig  # noqa: E402
from cute_attn.config_v1 import HEAD_DIMS, V1Config  # noqa: E402
from cute_attn.problem import Problem  # noqa: E402
from cute_attn.tools import bench, cases, measure, peers, peers_v1, records  # noqa: E402

UNDONE = list(peers_v1.UNDONE)
both_masks = pytest.mark.parametrize("causal", [False, True])


# configs


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"tile_m": 24}, "tile_m is 24"),
        ({"tile_n": 48}, "tile_n is 48: allowed are the multiples of 64"),
        ({"tile_n": 128, "warps": 8}, "warps is 8: allowed are 2, 4 with split_keys"),
        ({"tile_m": 32, "split_keys": False}, "tile_m is 32: allowed are the multiples of 64"),
        ({"q_in_regs": True}, "q_in_regs is True"),
    ],
)
def test_value_that_is_not_allowed(changes, error):
    with pytest.raises(ValueError, match=error):
        replace(V1Config(64, 64), **changes)


def test_value_of_the_wrong_type():
    with pytest.raises(TypeError, match="config.split_keys is 1: .*bool.* is wanted"):
        V1Config(64, 64, split_keys=1)


@pytest.mark.parametrize("chip", [c for c, limit in AMPERE_SMEM_LIMITS.items() if limit > 150_000])
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("name", UNDONE)
def test_what_is_timed_fits_the_chip(name, d, chip):
    assert v1_config(name, d, chip).infeasible(Problem("bf16", d, d, True), chip) == ""


def test_rows_have_the_tiles_of_the_kernel_they_are_compared_with():
    for name in ("divide", "walk"):
        tuned = tuning_sm80.pick(Problem("bf16", 128, 128), "sm_90a")
        config = v1_config(name, 128, "sm_90a")
        assert (config.tile_m, config.tile_n, config.ctas) == (tuned.tile_m, tuned.tile_n, 2)
        assert config.m_tiles == tuned.m_tiles
        assert config.smem_bytes(Problem("bf16", 128, 128)) == tuned.smem_bytes(
            Problem("bf16", 128, 128)
        )


def test_keys_of_a_block_are_those_that_fit():
    for d, chip, keys in ((64, "sm_80", 128), (128, "sm_80", 64), (128, "sm_90a", 128)):
        config = v1_config("v1", d, chip)
        assert (config.tile_m, config.tile_n, config.warp_keys) == (32, keys, keys // 4)


def test_every_warp_has_all_rows():
    config, problem = V1Config(32, 64), Problem("bf16", 128, 128)
    assert config.m_tiles == 2 and config.warp_keys == 16 and config.warp_columns(problem) == 32
    assert config.exchange_bytes(problem) == 4 * 4 * 32 * (128 + 2)
    assert config.accumulator_registers(problem) == 2 * (16 + 128 + 32) // 2
    assert "accumulators need" in V1Config(64, 64).infeasible(problem, "sm_90a")
    assert "shared memory" in V1Config(64, 128).infeasible(Problem("bf16", 64, 64), "sm_86")


@pytest.mark.parametrize(
    "problem, error",
    [
        (Problem("bf16", 96, 96), "head_dim is 96: allowed are 64 and 128"),
        (Problem("bf16", 64, 32), "head_dim_v is 32: allowed are 64 and 128"),
        (Problem("bf16", 64, 64, negative_scale=True), "softmax_scale is negative"),
    ],
)
def test_what_the_schedule_lacks(problem, error):
    assert error in V1Config(64, 64).infeasible(problem, "sm_90a")


def test_a_call_says_what_the_schedule_lacks(ampere):
    q, k, v = tensors(d=64, dv=64)
    with pytest.raises(ValueError, match="cannot serve this problem: head_dim is 32"):
        cute_attn.fwd(*tensors(d=32, dv=32), config=V1Config(64, 64))
    with pytest.raises(ValueError, match="cannot serve this problem: softmax_scale is negative"):
        cute_attn.fwd(q, k, v, softmax_scale=-1.0, config=V1Config(64, 64))
    cute_attn.fwd(q, k, v, config=V1Config(64, 64))
    assert ampere.built[-1][1] == V1Config(64, 64)


def test_a_schedule_has_a_kernel_of_its_own():
    """The three may all be False, and a key tells it from the main kernel all the same."""
    plain = V1Config(divide_always=False, split_keys=False, walk_rows=False)
    assert plain != AmpereConfig() and repr(plain) != repr(AmpereConfig())
    assert jit.builder(plain, "sm80") == "cute_attn.kernels.ampere.v1:compile_v1"
    assert jit.builder(AmpereConfig(), "sm80").endswith("fwd:compile_fwd")
    assert jit.builder(plain, "sm90") == ""


def test_explain_counts_a_cta_a_head(ampere):
    q, k, v = tensors(2, 300, 500, 8, 2, 64, 64)
    for walk, grid in ((True, 2 * 8), (False, 2 * 8 * 5)):
        e = cute_attn.explain(q, k, v, config=V1Config(64, 64, walk_rows=walk))
        assert e.tiles == 2 * 8 * 5 and e.grid == grid


# the bench and its table


def implementations(*argv):
    args = bench.parser().parse_args(argv)
    return bench.implementations_of(args, "cuda"), args


def test_cases():
    found = cases.CASES["v1v2"]
    assert {c.head_dim for c in found} == set(HEAD_DIMS) and {c.causal for c in found} == {0, 1}
    few = [c for c in found if c.batch == 1]
    assert {c.seqlen_q for c in few} == {2048, 4096, 8192, 16384}
    assert all(c.heads_q * c.batch < 16 for c in few), "far fewer than multiprocessors"
    assert any(c.heads_q * c.batch > 200 for c in found)


@pytest.mark.parametrize("option", ["--case", "--cases"])
def test_the_case_alone_says_what_is_timed(option):
    found, args = implementations(option, "v1v2")
    assert [i.label for i in found] == ["v2", "divide", "split", "walk", "v1"]
    assert args.arch == "sm80" and all(i.ours for i in found)
    case = cases.CASES["v1v2"][0]
    flags = [[c.get(f) for f in peers_v1.UNDONE["v1"]] for c in (i.config(case) for i in found)]
    none, one, two, three, every = flags
    assert none == [None] * 3 and every == [True] * 3
    assert [one, two, three] == [[n == i for n in range(3)] for i in range(3)]


def test_what_else_can_be_timed():
    argv = ["--arch", "sm80", "--impl", "split,v2,ours"]
    found, _ = implementations(*argv, "--config", "kv_stages=3", "--config", "pick")
    assert [i.label for i in found] == ["split#1", "split#2", "v2", "ours#1", "ours#2"]
    case = cases.parse_shape("b=1,hq=8,sq=1024,d=64")
    assert [i.config_record(case)["kv_stages"] for i in found[:2]] == [3, 2]
    found, _ = implementations("--cases", "v1v2", "--impl", "ours", "--arch", "sm80")
    assert [i.label for i in found] == ["ours"]
    found, _ = implementations("--cases", "v1v2,smoke")
    assert "v1" not in [i.label for i in found]


def test_what_a_cell_records(ampere):
    found, args = implementations("--case", "v1v2")
    case = cases.parse_shape("b=1,hq=2,sq=70,d=64,causal=1")
    inputs = cases.make_inputs(case, device="cpu")
    got, calls = bench.prepared(found, case, inputs, measure.Timer("cpu"))
    assert len(calls) == 5 and not any("error" in r for r in got)
    assert all(r["rel_error"] < 0.01 for r in got), "the stand-in is exact"
    built = [config for _, config, arch in ampere.built]
    assert [type(c).__name__ for c in built] == ["AmpereConfig"] + 4 * ["V1Config"]
    assert [r["config"] for r in got] == [asdict(c) for c in built]


@pytest.mark.parametrize(
    "argv, error",
    [
        (["--impl", "v1"], "v1: they are forwards with --arch sm80"),
        (["--impl", "v1", "--arch", "sm80", "--backward"], "they are forwards"),
        (["--cases", "v1v2", "--arch", "sm90"], "they are forwards with --arch sm80"),
        (["--impl", "v1", "--arch", "sm80", "--config", "pingpong=1"], "pingpong"),
    ],
)
def test_what_cannot_be_timed(argv, error):
    with pytest.raises(ValueError, match=error):
        implementations(*argv)


def test_it_is_timed_on_a_gpu_only(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--case", "v1v2", "--device", "cpu"])
    assert "timed on a GPU only" in capsys.readouterr().err


def fake_records():
    """v2 takes 1 ms, a change undone 1.1, 1.5 and 2 ms, all of them 4 ms; in the large batch the
    third brings nothing."""
    found = []
    for case in cases.CASES["v1v2"]:
        times = {"v2": 1.0, "divide": 1.1, "split": 1.5, "walk": 2.0, "v1": 4.0}
        if case.batch > 1:
            times["walk"] = 1.0
        for impl, ms in times.items():
            r = {
                "case": case.name,
                "data": "normal",
                "run": "a",
                "command": "bench x",
                "arch": "sm80",
            }
            r |= {"impl": impl, "ours": True, "p50_ms": ms, "tflops": case.flops() / ms * 1e-9}
            r |= {"gpu": "NVIDIA H200", "driver": "1.2", "time": "2026-01-02T03:04:05Z"}
            found.append(r | {"versions": {"torch": "2"}})
    return found


def test_report():
    report = script("report")
    found = fake_records()
    assert {records.pass_of(r) for r in found} == {"fwd_sm80"}
    text = report.table_of("v1v2", found)
    lines = text.splitlines()
    assert "| cell | v2, TFLOP/s | divide | split | walk | v1 |" in lines
    assert len([line for line in lines if line.startswith("| d")]) == len(cases.CASES["v1v2"])
    assert "| d64-s2048-full-b1h8 | 9 | 1.10× | 1.50× | 2.00× | 4.00× |" in lines
    assert "| geometric mean, batch 1 | | 1.10× | 1.50× | 2.00× | 4.00× |" in lines
    assert "| geometric mean, batch 16 | | 1.10× | 1.50× | 1.00× | 4.00× |" in lines
    assert report.table_of("v1v2", []) == report.NOTHING


# values, on a GPU


@pytest.mark.gpu
@pytest.mark.sm80
@both_masks
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("name", UNDONE)
def test_values(name, d, causal):
    config = v1_config(name, d, peers.ampere_chip())
    for dtype in (BF16, FP16):
        for lengths in ((1, 1), (40, 70), (70, 40), (130, 130), (257, 300), (1, 500), (1000, 1000)):
            q, k, v = qkv(2, *lengths, (4, 2), d, dtype=dtype, device="cuda")
            check_call(q, k, v, causal, config)
    for kind in ("x30", "outliers"):
        check_call(*qkv(1, 200, 333, (4, 2), d, device="cuda", kind=kind), causal, config)


def check_call(q, k, v, causal, config):
    options = {"causal": causal, "config": config, "arch": "sm80", "return_lse": True}
    out, lse = cute_attn.fwd(q, k, v, **options)
    check(out, lse, q, k, v, causal=causal)
    again = cute_attn.fwd(q, k, v, **options)
    for x, y in ((out, again[0]), (lse, again[1])):
        assert torch.equal(x.nan_to_num(nan=7.0), y.nan_to_num(nan=7.0))


@pytest.mark.gpu
@pytest.mark.sm80
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("name", UNDONE)
def test_a_nan_reaches_the_rows_that_see_it(name, d):
    q, k, v = qkv(1, 150, 150, (4, 2), d, device="cuda")
    v[0, 40, 0, 3], v[0, 90, 0, d - 4], v[0, 149, 1, d - 1] = math.nan, math.inf, math.nan
    check_call(q, k, v, True, v1_config(name, d, peers.ampere_chip()))


@pytest.mark.gpu
@pytest.mark.sm80
@both_masks
@pytest.mark.parametrize("name", UNDONE)
def test_other_tiles(name, causal):
    for config in v1_tiles(name):
        check_call(*qkv(1, 150, 333, (4, 2), 64, device="cuda"), causal, config)
