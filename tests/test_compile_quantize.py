"""Builds the kernels of quantize_qkv and transpose_v for sm_90a and looks at them; needs the DSL,
no GPU."""

from dataclasses import replace

import pytest
from builds import job_id, no_float_maxima, one_of_each

from cute_attn import compile as jit
from cute_attn.config import QuantizeConfig, TransposeConfig
from cute_attn.problem import Problem
from cute_attn.tools import inspect

pytestmark = pytest.mark.compile
slow = pytest.mark.slow

MEASURED = QuantizeConfig()
GIVEN = QuantizeConfig(k_shift="head", v_shift="head", balance="head")
ROPE = replace(MEASURED, rope="fp32", half=64)


def problem(dim, dim_v=None, dtype="bf16"):
    return Problem(dtype, dim, dim_v or dim)


FEW = [
    (problem(128), GIVEN),
    (problem(128), MEASURED),
    (problem(64), GIVEN),
    (problem(32), GIVEN),
    (problem(256), GIVEN),
    (problem(128), ROPE),
    (problem(128, dtype="fp16"), GIVEN),
    (problem(96, 80, "fp16"), replace(GIVEN, k_block=0, v_by_channel=True)),
    (problem(128), replace(MEASURED, keep_v=True)),
    (problem(64), replace(MEASURED, statistics=True)),
]
CLASSES = [(problem(d), c) for d in range(16, 257, 16) for c in (GIVEN, MEASURED)]
CLASSES += [(problem(d), replace(ROPE, half=d // 2)) for d in range(16, 257, 32)]
CLASSES += [(problem(d, d, "fp16"), replace(ROPE, half=8)) for d in (64, 128, 256)]
CLASSES += [(problem(d), replace(MEASURED, k_block=0)) for d in (48, 64, 112, 128, 256)]
CLASSES += [
    (problem(d, d, dtype), config)
    for d in (16, 32, 64, 96, 128)  # with half the registers of others
    for dtype, config in (
        ("fp16", GIVEN),
        ("bf16", QuantizeConfig(False, "none", "none", "none")),
        ("bf16", replace(GIVEN, k_shift="none", v_shift="none")),
        ("bf16", replace(GIVEN, hadamard=False)),
        ("bf16", replace(GIVEN, k_block=16, v_by_channel=True)),
        ("fp16", replace(MEASURED, v_by_channel=True)),
        ("bf16", replace(GIVEN, keep_v=True)),
        ("bf16", replace(GIVEN, tiles=8)),
        ("bf16", replace(GIVEN, k_shift="sequence", v_shift="sequence", balance="sequence")),
    )
]
CLASSES += [(problem(*dims), GIVEN) for dims in ((64, 128), (128, 64), (192, 128), (128, 256))]


def ids(job):
    changed = [f"{n}={v}" for n, v in vars(job[1]).items() if v != getattr(QuantizeConfig(), n)]
    return "-".join([job_id(job).removesuffix("-full"), *changed])


def wide(sass, opcode):
    """How often an instruction moves 16 bytes."""
    code = inspect.instructions(sass)
    return sum(i.opcode == opcode and ".128" in i.modifiers for i in code)


def has_products(problem, config):
    """Whether tensor cores transform q and K."""
    plain = config.hadamard and not config.rope and config.k_block != 0
    return plain and problem.dtype == "bf16" and problem.head_dim in (32, 64, 128)


def ctas_of_sm(problem, config):
    """(threads of one with rows of q or K, how many)"""
    if has_products(problem, config):
        return 256, {32: 4, 64: 3, 128: 2}[problem.head_dim]
    two = problem.head_dim in (16, 32, 64, 96, 128) and not config.rope and config.k_block
    return 512, 2 if two else 1


def check(problem, config):
    """No local memory; as many CTAs on an SM as the config counts on; 16 bytes at a time."""
    with no_float_maxima() as floats:
        built = inspect.build(problem, config)
    assert not floats
    code = inspect.sections(built.sass)
    # pairs of channels that no thread holds both of: addresses take the registers of wide rows
    apart = config.half % 32 != 0 and problem.head_dim > 96
    for used in built.kernels:
        assert used.frame <= (128 if apart else 0), used
    assert built.kernels[-1].name.startswith("cute_attn_"), "a profile would not name it"
    waits = [k.counts.get("ACQBULK", 0) for k in built.kernels]  # for the kernel before to end
    assert waits[1:] == [1] * (len(waits) - 1)
    assert waits[0] == (len(waits) == 1), "the first is ordered by its launch"
    return built, code


@pytest.mark.parametrize("job", FEW, ids=ids)
def test_builds(job):
    problem, config = job
    built, code = check(*job)
    count = 2 * config.measures
    count += 0 if config.statistics else 2 if config.k_block else 4
    assert len(built.kernels) == count
    if config.measures:
        assert wide(code[built.kernels[0].name], "LDG") >= 4
    if config.statistics:
        return
    v, rows = built.kernels[-2:] if config.measures else built.kernels[:-3:-1]
    vectors = -(-problem.head_dim // 32)  # 16 bytes of a thread
    assert wide(code[rows.name], "LDGSTS") >= 4 * vectors  # q, k, and of each the first row apart
    assert rows.counts["F2FP"] >= 2 * 4 * vectors
    if has_products(problem, config):
        groups = problem.head_dim // 16
        # of q and k, of q with the shift, and of the shift
        assert rows.counts["HMMA"] == 2 * 2 * groups + (groups + 2) * (config.k_shift != "none")
        assert rows.counts["SHFL"] < 32, "only of maxima, dots, and of the shift"
    else:  # channels 8 and 16 apart, of q and k, or half of those a quarter and half a row apart
        quarters = problem.head_dim in (32, 64, 128, 256) and not config.rope
        assert rows.counts["SHFL"] >= 2 * (8 if quarters else 16) * vectors
    if config.transposed:
        assert wide(code[v.name], "STG") >= 2 and v.counts["F2FP"] >= 16
    assert v.registers * 512 * 2 <= 65536
    threads, ctas = ctas_of_sm(problem, config)
    assert rows.registers * threads * ctas <= 65536
    assert (rows.smem + 1024) * ctas <= 228 * 1024


@slow
@pytest.mark.parametrize("job", one_of_each([j for j in CLASSES if j not in FEW], every=2), ids=ids)
def test_every_class(job):
    check(*job)


@pytest.mark.parametrize(
    "dim_v", [128, pytest.param(16, marks=slow), pytest.param(256, marks=slow)]
)
def test_transposing(dim_v):
    built = inspect.build(problem(16, dim_v), TransposeConfig())
    (used,) = built.kernels
    assert used.frame == 0 and not used.spills and used.registers * 1024 <= 65536
    assert wide(built.sass, "LDG") == 4 and wide(built.sass, "STG") == 4
    assert used.counts["PRMT"] >= 32 and not used.counts.get("FADD")


def test_what_a_launch_passes(tmp_path, monkeypatch):
    """quantize_launch.py passes 18 tensors, None where a config has no use for one, and three
    numbers; the sizes of a call make no other kernel."""
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path))
    call = Problem("bf16", 64, 64, False, False, 2, 300, 500, 4, 2)
    kernel = jit.get(call, replace(GIVEN, hadamard=False), "sm90")
    with pytest.raises(TypeError, match="Expects 21 parameters"):
        kernel()
