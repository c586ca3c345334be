"""README's table of what is supported is what the checks say, and calls do as it says."""

import re
from itertools import product

import pytest

torch = pytest.importorskip("torch")

from helpers import ROOT  # noqa: E402

import cute_attn  # noqa: E402
from cute_attn import config, launch  # noqa: E402
from cute_attn.tools import support  # noqa: E402

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
# The last three nothing takes, (24, 40) and (8, 16) 16-bit tensors alone.
DIMS = [(16, 16), (64, 128), (256, 256), (24, 40), (8, 16), (12, 12), (264, 264), (64, 0)]
REFUSALS = re.compile(
    r"head_dim(_v)? is \d+: allowed are the multiples of 8 from 8 to 256"
    r"|head_dim(_v)? is \d+: FP8 allows the multiples of 16 from 16 to 256"
    r"|arch='sm80': FP8 is not built for it"
    r"|q.dtype is torch.float8_e4m3fn: of FP8 tensors fwd alone is built"
)


def outcome(call, *arguments):
    """'' or what a user is told."""
    try:
        call(*arguments)
    except (ValueError, NotImplementedError) as error:
        assert REFUSALS.search(str(error)), error
        return str(error)
    return ""


def explained(direction, dtype, dims, causal, arch):
    """Of GPUs, whose calls nothing here can run."""
    options = {"causal": causal, "arch": arch}
    preset = support.PRESETS.get(dtype)
    q, v = (
        torch.empty(2, 5, 2, n, dtype=TYPES.get(dtype, TYPES["fp16"]), device="meta") for n in dims
    )
    if preset or direction == "forward":
        cute_attn.explain(q, q, v, preset=preset, **options)
    if direction != "forward":
        in_turn = direction == "deterministic backward"
        cute_attn.explain(q, q, v, backward=True, deterministic=in_turn, **options)


def computed(direction, dtype, dims, causal):
    """On CPU tensors."""
    kind, preset = TYPES.get(dtype, TYPES["fp16"]), support.PRESETS.get(dtype)
    q, v = (torch.ones(1, 3, 1, n).to(kind) for n in dims)
    in_turn = direction == "deterministic backward"
    if direction == "forward":
        out, lse = cute_attn.fwd(q, q, v, causal=causal, preset=preset, return_lse=True)
        assert out.isfinite().all() and lse.isfinite().all()
    elif preset:
        leaves = [t.clone().requires_grad_() for t in (q, q, v)]
        options = {"causal": causal, "deterministic": in_turn, "preset": preset}
        cute_attn.flash_attn_func(*leaves, **options).float().sum().backward()
        assert all(t.grad.isfinite().all() for t in leaves)
    else:
        cute_attn.bwd(v, q, q, v, v, torch.zeros(1, 1, 3), causal=causal, deterministic=in_turn)


CALLS = list(product(support.DIRECTIONS, support.DTYPES, DIMS, support.MASKS.values()))


@pytest.mark.parametrize("arch", ["sm90", "sm80"], ids=["hopper", "ampere"])  # sm80 is a marker
def test_calls_of_a_gpu_are_checked_as_the_table_says(arch):
    for direction, dtype, dims, causal in CALLS:
        said = outcome(explained, direction, dtype, dims, causal, arch)
        accepted = support.accepts(support.Call(direction, dtype, *dims, causal, arch))
        assert accepted == (not said), (direction, dtype, dims, causal, said)


def test_cpu_tensors_are_computed_as_the_table_says():
    for direction, dtype, dims, causal in CALLS:
        said = outcome(computed, direction, dtype, dims, causal)
        accepted = support.accepts(support.Call(direction, dtype, *dims, causal, "cpu"))
        assert accepted == (not said), (direction, dtype, dims, causal, said)


def test_gpus_are_what_launches_are_compiled_for(monkeypatch):
    device = torch.device("cuda", 0)
    for family, targets in support.FAMILIES.items():
        for capability, target in targets.items():
            if capability:
                arch = "sm80" if "sm80" in family else None
                found = tuple(map(int, capability.split(".")))
                monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d, f=found: f)
                chosen = launch.choose_arch(device, arch)
                assert launch.compile_target(device, chosen) == target


def test_readme_has_the_table():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    here = re.search(r"<!-- report:support -->\n(.*?)<!-- /report -->", text, re.S)
    assert here[1] == support.table(), "python scripts/report.py writes it"


# the table follows the checks


@pytest.fixture
def few(monkeypatch):
    """Some head dims, asked anew."""
    caches = (support.accepts, support.cell, support._problem)
    monkeypatch.setattr(support, "HEAD_DIMS", (8, 24, 40, 64, 96, 128, 256, 257))
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_a_chip_with_less_room_gets_a_column_of_its_own(few, monkeypatch):
    assert "Ampere, Ada (8.0, 8.6, 8.7, 8.9)" in support.columns()
    support.cell.cache_clear(), support.accepts.cache_clear()
    monkeypatch.setitem(config.AMPERE_SMEM_LIMITS, "sm_86", 90_000)
    found = support.columns()
    assert found["Ampere, Ada (8.6)"] == "sm80:sm_86" and "Ampere, Ada (8.0, 8.7, 8.9)" in found
    (cell,) = support.cell("forward", "bf16", "sm80:sm_86")
    assert 256 not in cell.head_dims and 8 in cell.head_dims


def test_cells_that_differ_are_told_apart(few, monkeypatch):
    def accepts(call):
        fits = call.head_dim_v == call.head_dim or call.dtype == "fp16"
        return fits and call.head_dim % 8 == 0 and not (call.causal and call.head_dim > 100)

    monkeypatch.setattr(support, "accepts", accepts)
    head_dims = "8 to 40 in steps of 16, 64 to 128 in steps of 32, 256"
    (row, other, *_) = support.rows(["sm90"])
    assert row[:2] == ["forward, backward, deterministic backward", "bf16, e4m3, " + PRESET_NAMES]
    causal = "8 to 40 in steps of 16, 64, 96"
    assert other[2] == f"{head_dims}; full / {causal}; causal"
    mixed = ", not all with each other"
    assert row[2] == f"{head_dims}{mixed}; full / {causal}{mixed}; causal"


PRESET_NAMES = ", ".join(support.PRESETS)


def test_what_has_no_kernel_is_not_supported(few, monkeypatch):
    call = support.Call("forward", "bf16", 64, 64, False, "sm90")
    assert support.accepts(call)
    support.accepts.cache_clear()
    monkeypatch.setattr(support.jit, "builder", lambda config, arch: "")
    assert not support.accepts(call) and support.accepts(call._replace(target="cpu"))
