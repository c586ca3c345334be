"""Which head dims and masks fwd and bwd take, by direction, dtype and architecture: README's table.

Their own checks are asked, on any machine, with tensors that hold nothing: those that raise for a
wrong call, and whether what the tuning tables pick for it fits the GPU and has a kernel.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from cute_attn import backward, fp8, launch
from cute_attn import compile as jit

# Compute capability -> what kernels are compiled for there, as compile.py names it
FAMILIES: dict[str, dict[str, str]] = {
    "Hopper": {"9.0": "sm90"},
    "Ampere, Ada": {"8.0": "sm80", "8.6": "sm80:sm_86", "8.7": "sm80:sm_87", "8.9": "sm80:sm_89"},
    'Hopper and newer with `arch="sm80"`': {
        "9.0": "sm80:sm_90a",
        "10.0": "sm80:sm_100a",
        "10.3": "sm80:sm_103a",
        "12.0": "sm80:sm_120a",
    },
    "CPU tensors": {"": "cpu"},
}
DIRECTIONS = ("forward", "backward", "deterministic backward")
INPUTS = ("bf16", "fp16")
PRESETS = {f'`preset="{name}"`': name for name in ("fp8", "fp8_hp")}
DTYPES = (*INPUTS, "e4m3", *PRESETS)
MASKS = {"full": False, "causal": True}
HEAD_DIMS = range(1, 321)  # asked for; more than a tile holds
KEYS = (128, 1 << 16)  # of one query: few, and so many that a forward picks another config


class Call(NamedTuple):
    """Of fwd or bwd."""

    direction: str
    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool
    target: str


class Cell(NamedTuple):
    """What is taken."""

    head_dims: tuple[int, ...]  # head_dim_v alike
    masks: tuple[str, ...]
    mixed: bool  # whether head_dim_v may be any other of them


# Asking


@cache
def accepts(call: Call) -> bool:
    """Whether the call would be answered. With a preset it has bf16 or fp16 tensors; its backward
    is that of fwd with the preset, in their dtype."""
    if call.dtype not in PRESETS:
        return _answers(call, "")
    forward = call._replace(direction="forward")
    if call.direction != "forward":
        after = (call._replace(dtype=dtype) for dtype in INPUTS)
        return accepts(forward) and all(map(accepts, after))
    return all(_answers(call._replace(dtype=dtype), PRESETS[call.dtype]) for dtype in INPUTS)


def _answers(call: Call, preset: str) -> bool:
    try:
        lengths = KEYS if call.direction == "forward" else KEYS[:1]
        return all(_fits(call, *_picked(call, preset, keys)) for keys in lengths)
    except (ValueError, TypeError, NotImplementedError):
        return False


def _picked(call: Call, preset: str, keys: int) -> tuple[Any, Any]:
    """(problem, config) that would run it; raises as it does."""
    head_dims, arch = (call.head_dim, call.head_dim_v), call.target.partition(":")[0]
    if call.direction == "forward" and (preset or call.dtype == "e4m3"):
        tensors = _tensors(call.dtype, head_dims, arch, keys)
        options = fp8.Options(call.causal, None, arch=arch)
        return fp8.choose(*tensors, fp8.NO_DESCALES, preset or None, options)[:2]
    problem = _problem(call.dtype, head_dims, call.causal, arch, keys)
    if call.direction == "forward":
        return problem, launch.choose_config(problem, None, call.target)
    in_turn = call.direction == "deterministic backward"
    return problem, backward.choose_config(problem, None, in_turn, call.target)


@cache  # of all GPUs of an arch, forward and backward
def _problem(dtype: str, head_dims: tuple[int, int], causal: bool, arch: str, keys: int) -> Any:
    foreign = arch != "cpu"  # no device is asked whether it runs arch
    tensors = _tensors(dtype, head_dims, arch, keys)
    return launch.make_plan(*tensors, causal, arch=arch, foreign=foreign).problem


def _tensors(dtype: str, head_dims: tuple[int, int], arch: str, keys: int) -> tuple[Any, Any, Any]:
    """Of one head and one query, on the meta device where a GPU's are meant."""
    import torch

    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
    device = "cpu" if arch == "cpu" else "meta"
    q, v = (torch.empty(1, 1, 1, d, dtype=names[dtype], device=device) for d in head_dims)
    return q, q.expand(1, keys, 1, head_dims[0]), v.expand(1, keys, 1, head_dims[1])


def _fits(call: Call, problem: Any, config: Any) -> bool:
    """Whether there is a kernel, and room for it. On the CPU configs have no effect."""
    if call.target == "cpu":
        return True
    chip = (jit.target(call.target),) if call.target.startswith("sm80") else ()
    parts = config.launches(problem) if call.direction == "forward" else (problem,)
    return bool(jit.builder(config, call.target)) and not any(
        config.infeasible(part, *chip) for part in parts
    )


# The table


@cache
def cell(direction: str, dtype: str, target: str) -> tuple[Cell, ...]:
    """One for all masks that take the same head dims; none where nothing is taken."""
    found: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for mask, causal in MASKS.items():

        def takes(d: int, dv: int, causal: bool = causal) -> bool:
            return accepts(Call(direction, dtype, d, dv, causal, target))

        dims = tuple(d for d in HEAD_DIMS if takes(d, d))
        mixed = all(takes(d, dv) for d in dims for dv in dims)
        if dims:
            found.setdefault((dims, mixed), []).append(mask)
    return tuple(Cell(dims, tuple(masks), mixed) for (dims, mixed), masks in found.items())


def shown(cells: Sequence[Cell]) -> str:
    def text(c: Cell) -> str:
        mixed = "" if c.mixed else ", not all with each other"
        return f"{', '.join(_progressions(c.head_dims))}{mixed}; {', '.join(c.masks)}"

    return " / ".join(map(text, cells)) or "no"


def _progressions(numbers: Sequence[int]) -> list[str]:
    """'8 to 256 in steps of 8' for what is evenly spaced, number after number for the rest."""
    texts, rest = [], list(numbers)
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 0
        n = 1
        while n < len(rest) and rest[n] - rest[n - 1] == step:
            n += 1
        if n < 3:
            n, text = 1, f"{rest[0]}"
        else:
            text = f"{rest[0]} to {rest[n - 1]}" + (f" in steps of {step}" if step > 1 else "")
        texts.append(text)
        del rest[:n]
    return texts


def columns() -> dict[str, str]:
    """Heading -> target. Capabilities of a family that take the same share a column."""
    found = {}
    for family, targets in FAMILIES.items():
        alike: dict[tuple[Any, ...], list[str]] = {}
        for capability, target in targets.items():
            alike.setdefault(tuple(_column(target)), []).append(capability)
        for capabilities in alike.values():
            names = ", ".join(capabilities)
            found[f"{family} ({names})" if names else family] = targets[capabilities[0]]
    return found


def _column(target: str) -> Iterable[str]:
    return (shown(cell(direction, dtype, target)) for direction in DIRECTIONS for dtype in DTYPES)


def rows(targets: Sequence[str]) -> list[list[str]]:
    """Direction, dtype and cells; what has the same cells shares a row."""
    of_direction: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for direction in DIRECTIONS:
        alike: dict[tuple[str, ...], list[str]] = {}
        for dtype in DTYPES:
            cells = tuple(shown(cell(direction, dtype, target)) for target in targets)
            alike.setdefault(cells, []).append(dtype)
        lines = tuple((", ".join(dtypes), *cells) for cells, dtypes in alike.items())
        of_direction.setdefault(lines, []).append(direction)
    return [
        [", ".join(directions), *line]
        for lines, directions in of_direction.items()
        for line in lines
    ]


def table() -> str:
    """In markdown."""
    targets = columns()
    head = ["direction", "dtype", *targets]
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows(list(targets.values())))]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n"
