"""What is benchmarked: shapes, input data and the rows of an fp64 oracle to check against."""

import math
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from cute_attn import tuning, tuning_bwd, tuning_bwd_sm80, tuning_sm80
from cute_attn.config import AmpereBwdConfig, AmpereConfig, BwdConfig, Fp8Config, FwdConfig
from cute_attn.problem import DTYPES, Problem

AnyConfig = TypeVar("AnyConfig", FwdConfig, AmpereConfig, Fp8Config, BwdConfig, AmpereBwdConfig)
TOKENS, WIDTH = 16384, 2048  # of the standard cells: batch * seqlen and heads * head_dim
DATA = ("normal", "ramp", "x30", "outliers")
SLOPE = 10.0  # binades the scores of a ramp rise by over 128 keys
SHAPE_KEYS = {
    "b": "batch",
    "hq": "heads_q",
    "hk": "heads_kv",
    "sq": "seqlen_q",
    "sk": "seqlen_k",
    "d": "head_dim",
    "dv": "head_dim_v",
    "causal": "causal",
    "dtype": "dtype",
}


@dataclass(frozen=True)
class Case:
    """One shape. q is (batch, seqlen_q, heads_q, head_dim) and so on, as in Problem."""

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        dv = f"v{self.head_dim_v}" if self.head_dim_v != self.head_dim else ""
        heads = f"h{self.heads_q}" + (f"k{self.heads_kv}" if self.heads_kv != self.heads_q else "")
        length = f"s{self.seqlen_q}" + (
            f"x{self.seqlen_k}" if self.seqlen_k != self.seqlen_q else ""
        )
        mask = "causal" if self.causal else "full"
        dtype = "" if self.dtype == "bf16" else f"-{self.dtype}"
        return f"d{self.head_dim}{dv}-{length}-{mask}-b{self.batch}{heads}{dtype}"

    def problem(self) -> Problem:
        return Problem(**asdict(self))

    def flops(self) -> float:
        """Of the two matrix products: halved where causal and square, else by the mask's area."""
        sq, sk = self.seqlen_q, self.seqlen_k
        pairs = float(sq * sk)
        if self.causal:
            pairs = sq * (sk - sq / 2) if sk >= sq else sk * sk / 2
        return 2.0 * self.batch * self.heads_q * pairs * (self.head_dim + self.head_dim_v)


def standard(head_dim: int, seqlen: int, causal: bool, dtype: str = "bf16") -> Case:
    """A cell of the usual grid: 16384 tokens, heads = 2048 / head_dim."""
    batch, heads = TOKENS // seqlen, WIDTH // head_dim
    return Case(batch, heads, heads, seqlen, seqlen, head_dim, head_dim, causal, dtype)


def grid(lengths: Iterable[int]) -> tuple[Case, ...]:
    lengths = tuple(lengths)
    return tuple(
        standard(d, s, causal) for d in (64, 128, 256) for causal in (False, True) for s in lengths
    )


CASES: dict[str, tuple[Case, ...]] = {
    "main18": grid((1024, 4096, 16384)),
    "ramp": grid((1024, 4096, 16384)),  # the same cells on data of that name
    "tuning": grid((2048, 8192)),
    "extra": (
        Case(8, 24, 24, 4608, 4608, 128, 128),
        Case(32, 16, 16, 512, 512, 64, 64),
        Case(1, 32, 8, 32768, 32768, 128, 128, True),
        Case(1, 16, 16, 100, 4096, 128, 128),
        Case(4, 16, 16, 4096, 4096, 192, 128, True),
        Case(4, 16, 16, 4096, 4096, 96, 96),
        Case(4, 16, 16, 4096, 4096, 96, 96, True),
        Case(4, 16, 16, 4096, 4096, 80, 80),
        Case(4, 16, 16, 4096, 4096, 80, 80, True),
        standard(64, 4096, False, "fp16"),
        standard(128, 4096, True, "fp16"),
        standard(256, 4096, False, "fp16"),
    ),
    "gqa": (Case(2, 32, 4, 8192, 8192, 128, 128, True),),  # 8 query heads a KV head
    "step": grid((1024,)),  # for bench --fwd-bwd: where the host's part of a step is largest
    # Few tiles: 8 heads, or a row of tiles each, for 132 multiprocessors; then one large batch
    "v1v2": tuple(
        Case(batch, heads, heads, seqlen, seqlen, d, d, causal)
        for batch, heads, lengths in ((1, 8, (2048, 4096, 8192, 16384)), (16, 16, (2048,)))
        for d in (64, 128)
        for causal in (False, True)
        for seqlen in lengths
    ),
    "host": (Case(1, 8, 8, 128, 128, 64, 64),),
    "smoke": (Case(1, 2, 1, 200, 333, 64, 64, True), Case(2, 4, 2, 256, 256, 128, 128)),
}


def find_cases(names: Iterable[str]) -> list[tuple[Case, str]]:
    """(case, data) for names of sets or single cases; data is '' where the name does not fix it.

    Raises ValueError for an unknown name."""
    every = {c.name: c for cases in CASES.values() for c in cases}
    found: list[tuple[Case, str]] = []
    for name in names:
        if name in CASES:
            found += [(c, "ramp" if name == "ramp" else "") for c in CASES[name]]
        elif name in every:
            found.append((every[name], ""))
        else:
            raise ValueError(f"no case {name!r}: {', '.join(CASES)}, or a name that --list shows")
    return found


def parse_shape(text: str) -> Case:
    """'b=2,hq=16,sq=4096,d=128,causal=1' -> Case; hk, sk and dv default to hq, sq and d."""
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in SHAPE_KEYS or not value:
            raise ValueError(
                f"--shape {part!r}: wanted is KEY=VALUE, KEY one of {list(SHAPE_KEYS)}"
            )
        values[key] = value if key == "dtype" else int(value)
    missing = [key for key in ("b", "hq", "sq", "d") if key not in values]
    if missing:
        raise ValueError(f"--shape {text!r}: {', '.join(missing)} missing")
    for key, default in (("hk", "hq"), ("sk", "sq"), ("dv", "d")):
        values.setdefault(key, values[default])
    values["causal"] = bool(values.get("causal", 0))
    if values.get("dtype", "bf16") not in DTYPES.values():
        raise ValueError(f"--shape dtype={values['dtype']}: allowed are {list(DTYPES.values())}")
    case = Case(**{SHAPE_KEYS[key]: value for key, value in values.items()})
    case.problem()  # raises for head dims
    if min(case.batch, case.seqlen_q, case.seqlen_k, case.heads_kv) < 1:
        raise ValueError(f"--shape {text!r}: sizes start at 1 here")
    if case.heads_q % case.heads_kv:
        raise ValueError(f"--shape {text!r}: hq must be a multiple of hk")
    return case


def parse_config(text: str, base: AnyConfig) -> AnyConfig:
    """'tile_n=96,schedule=static' -> base with these fields replaced; '' or 'pick' -> base."""
    if text in ("", "pick"):
        return base
    kinds = {f.name: f.type for f in fields(base)}
    changes: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in kinds or not value:
            raise ValueError(f"--config {part!r}: wanted is KEY=VALUE, KEY one of {list(kinds)}")
        if kinds[key] is bool:
            if value.lower() not in ("0", "1", "true", "false"):
                raise ValueError(f"--config {part!r}: 0 or 1 is wanted")
            changes[key] = value.lower() in ("1", "true")
        else:
            kind: Any = kinds[key]
            changes[key] = kind(value)
    if "tile_m" in changes and "q_slots" in kinds:
        changes.setdefault("q_slots", 0)  # its default follows tile_m
    return replace(base, **changes)


def config_for(case: Case, text: str = "", target: str = "") -> FwdConfig | AmpereConfig:
    """target: '' or a chip that the Ampere kernels are compiled for."""
    if target:
        return parse_config(text, tuning_sm80.pick(case.problem(), target))
    return parse_config(text, tuning.pick(case.problem()))


def bwd_config_for(case: Case, text: str = "", target: str = "") -> BwdConfig | AmpereBwdConfig:
    """target: as config_for's."""
    if target:
        return parse_config(text, tuning_bwd_sm80.pick(case.problem(), target))
    return parse_config(text, tuning_bwd.pick(case.problem()))


def make_inputs(
    case: Case, data: str = "normal", device: str = "cuda", slope: float = SLOPE
) -> tuple[Any, Any, Any]:
    """q, k, v in the case's dtype; the same numbers in every process that asks for them."""
    import torch

    if data not in DATA:
        raise ValueError(f"data {data!r}: allowed are {', '.join(DATA)}")
    dtype = {name: getattr(torch, full.removeprefix("torch.")) for full, name in DTYPES.items()}
    make = torch.Generator(device).manual_seed(zlib.crc32(f"{case.name} {data}".encode()))

    def draw(seqlen: int, heads: int, width: int) -> torch.Tensor:
        shape = (case.batch, seqlen, heads, width)
        x = torch.randn(shape, generator=make, device=device)
        if data == "outliers":  # N(0, 1) + N(0, 100) * Bernoulli(0.001)
            hit = torch.rand(shape, generator=make, device=device) < 0.001
            x += 10.0 * hit * torch.randn(shape, generator=make, device=device)
        return (x * 30.0 if data == "x30" else x).to(dtype[case.dtype])

    q = draw(case.seqlen_q, case.heads_q, case.head_dim)
    k = draw(case.seqlen_k, case.heads_kv, case.head_dim)
    v = draw(case.seqlen_k, case.heads_kv, case.head_dim_v)
    if data == "ramp":
        _add_ramp(q, k, slope)
    return q, k, v


def _add_ramp(q: Any, k: Any, slope: float) -> None:
    """Make every row's scores rise by slope binades over 128 keys towards the first key, which is
    the order a kernel visits them in: the running maximum moves in every block.

    The climb lies in two channels, rounded and rest, because one 16-bit number would be off by
    binades where the climb has reached a thousand of them. The other channels of q are made
    small, so that noise does not undo the step from one block to the next.
    """
    import torch

    constant, seqlen_k = 16.0, k.shape[1]
    per_key = slope / 128 * math.log(2.0) * math.sqrt(q.shape[-1]) / constant
    keys = torch.arange(seqlen_k, dtype=torch.float64, device=k.device)
    climb = (per_key * (seqlen_k - 1 - keys))[None, :, None]
    rounded = climb.to(k.dtype)
    q.mul_(0.125)
    q[..., :2] = constant
    k[..., 0] = rounded
    k[..., 1] = (climb - rounded.double()).to(k.dtype)


def sample_rows(case: Case, most: int = 256) -> Any:
    """Evenly spaced query rows, first and last among them."""
    import torch

    rows = torch.linspace(0, case.seqlen_q - 1, min(case.seqlen_q, most), dtype=torch.float64)
    return rows.round().long().unique()


def attention_rows(q: Any, k: Any, v: Any, rows: Any, *, causal: bool, dtype: Any = None) -> Any:
    """Attention of some query rows only, by the formula, in dtype (default fp64).

    Returns (batch, len(rows), heads_q, head_dim_v). Rows with no key are 0."""
    import torch

    dtype = dtype or torch.float64
    (batch, seqlen_q, heads, d), (_, seqlen_k, heads_kv, dv) = q.shape, v.shape
    rows = rows.to(q.device)
    seen = rows[:, None] + seqlen_k - seqlen_q >= torch.arange(seqlen_k, device=q.device)
    out = torch.empty(batch, len(rows), heads, dv, dtype=dtype, device=q.device)
    for b in range(batch):
        for h in range(heads):
            kv = h * heads_kv // heads
            scores = q[b, rows, h].to(dtype) @ k[b, :, kv].to(dtype).T * d**-0.5
            if causal:
                scores = scores.masked_fill(~seen, -math.inf)
            weights = torch.softmax(scores, -1)
            if causal and seqlen_q > seqlen_k:
                weights = torch.where(seen.any(-1, keepdim=True), weights, 0.0)
            out[b, :, h] = weights @ v[b, :, kv].to(dtype)
    return out


def errors(out: Any, rows: Any, expected: Any) -> dict[str, float | bool]:
    """Frobenius error relative to the oracle, largest absolute error, and whether all of out is
    finite (not only the sampled rows)."""
    import torch

    difference = out[:, rows.to(out.device)].to(expected.dtype) - expected
    norm = expected.norm().item() or 1.0
    return {
        "rel_error": difference.norm().item() / norm,
        "max_error": difference.abs().max().item(),
        "finite": bool(torch.isfinite(out).all().item()),
    }
