"""What is computed: shapes, dtypes and features of one attention call. Imports no torch."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}
FP8_DTYPE = "torch.float8_e4m3fn"  # of fwd alone, in cute_attn/fp8.py
MAX_HEAD_DIM = 256
INT32_MAX = 2**31 - 1


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


@dataclass(frozen=True)
class Problem:
    """One attention call, or with static() the class of calls that one compiled kernel serves.

    q is (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim),
    v (batch, seqlen_k, heads_kv, head_dim_v).
    """

    dtype: str  # a value of DTYPES
    head_dim: int
    head_dim_v: int
    causal: bool = False
    negative_scale: bool = False  # softmax_scale < 0: the kernel negates the scores first
    batch: int = 0  # the five below are run-time values: 0 in a compile key
    seqlen_q: int = 0
    seqlen_k: int = 0
    heads_q: int = 0
    heads_kv: int = 0

    dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPES.values())

    def __post_init__(self) -> None:
        if self.dtype not in self.dtypes:
            raise ValueError(f"dtype {self.dtype!r}: allowed are {sorted(self.dtypes)}")
        if type(self.causal) is not bool:
            raise TypeError(f"causal is {self.causal!r}: a bool is wanted")
        for name in ("head_dim", "head_dim_v"):
            d = getattr(self, name)
            if type(d) is not int:
                raise TypeError(f"{name} is {d!r}: an int is wanted")
            if d % 8 or not 8 <= d <= MAX_HEAD_DIM:
                raise ValueError(
                    f"{name} is {d}: allowed are the multiples of 8 from 8 to {MAX_HEAD_DIM}"
                )

    def static(self) -> "Problem":
        """The part a compiled kernel depends on: head dims rounded up to what a tile holds."""
        return replace(
            self,
            head_dim=round_up(self.head_dim, 16),
            head_dim_v=round_up(self.head_dim_v, 32) if self.head_dim_v > 16 else 16,
            batch=0,
            seqlen_q=0,
            seqlen_k=0,
            heads_q=0,
            heads_kv=0,
        )

    @property
    def tile_dim(self) -> int:
        """Width of a Q or K tile in shared memory; columns past head_dim are filled with zeros."""
        return round_up(self.head_dim, 32) if self.head_dim > 16 else 16

    @property
    def tile_dim_v(self) -> int:
        """Width of a V or O tile in shared memory."""
        return round_up(self.head_dim_v, 32) if self.head_dim_v > 16 else 16

    @classmethod
    def from_tensors(
        cls, q: Any, k: Any, v: Any, *, causal: bool = False, negative_scale: bool = False
    ) -> "Problem":
        """Check three torch tensors against each other.

        Raises TypeError for dtypes and ValueError for shapes and devices; each names the argument,
        its value and what is allowed. Nothing is launched or allocated here.
        """
        _check_dtypes(q, k, v)
        _check_devices(q, k, v)
        _check_ranks(q, k, v)
        batch, seqlen_q, heads_q, head_dim = q.shape
        _, seqlen_k, heads_kv, head_dim_v = v.shape
        _check_agreement(q, k, v)
        if heads_kv == 0 or heads_q % heads_kv:
            raise ValueError(
                f"nheads_q is {heads_q} and nheads_kv is {heads_kv}: "
                "nheads_q must be a multiple of nheads_kv"
            )
        return cls(
            DTYPES[str(q.dtype)],
            head_dim,
            head_dim_v,
            causal,
            negative_scale,
            batch,
            seqlen_q,
            seqlen_k,
            heads_q,
            heads_kv,
        )


@dataclass(frozen=True)
class Fp8Problem(Problem):
    """The same with q and k in e4m3; dtype is out's."""

    v_dtype: str = "e4m3"  # or a value of DTYPES; P's too
    fine_k: bool = False  # k_descale is of every 16 keys, not of whole KV blocks
    channels: bool = False  # v_descale is of every channel, not of whole heads
    v_shift: bool = False  # a vector was taken off V, to be added to out

    dtypes: ClassVar[tuple[str, ...]] = (*DTYPES.values(), "e4m3")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.v_dtype not in self.dtypes:
            raise ValueError(f"v_dtype {self.v_dtype!r}: allowed are {sorted(self.dtypes)}")

    def with_fine_k(self, fine: bool) -> "Fp8Problem":
        return replace(self, fine_k=fine)

    def static(self) -> "Fp8Problem":
        return replace(super().static(), head_dim=self.tile_dim)  # type: ignore[return-value]

    @property
    def tile_dim(self) -> int:
        return round_up(self.head_dim, 32)

    @property
    def raw_v(self) -> bool:
        """Whether V is in e4m3 with the mean that it had."""
        return self.v_dtype == "e4m3" and not self.v_shift

    @property
    def itemsize_v(self) -> int:
        return 1 if self.v_dtype == "e4m3" else 2


def _check_dtypes(q: Any, k: Any, v: Any) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not hasattr(t, "dtype") or not hasattr(t, "stride"):
            raise TypeError(f"{name} is a {type(t).__name__}: a torch.Tensor is wanted")
    if str(q.dtype) == FP8_DTYPE:
        raise NotImplementedError(
            f"q.dtype is {q.dtype}: of FP8 tensors fwd alone is built; flash_attn_func(..., "
            "preset='fp8') on bf16 or fp16 tensors has gradients"
        )
    if str(q.dtype) not in DTYPES:
        raise TypeError(
            f"q.dtype is {q.dtype}: allowed are {', '.join(DTYPES)}, in fwd also {FP8_DTYPE}"
        )
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise TypeError(f"{name}.dtype is {t.dtype}: it must be q.dtype, {q.dtype}")


def _check_devices(q: Any, k: Any, v: Any) -> None:
    for name, t in (("k", k), ("v", v)):
        if t.device != q.device:
            raise ValueError(f"{name}.device is {t.device}: it must be q.device, {q.device}")


def _check_ranks(q: Any, k: Any, v: Any) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if len(t.shape) != 4:
            raise ValueError(
                f"{name}.shape is {tuple(t.shape)}: (batch, seqlen, nheads, head_dim) is wanted"
            )
        if max(t.shape) > INT32_MAX:
            raise ValueError(f"{name}.shape is {tuple(t.shape)}: every size must be below 2**31")


def _check_agreement(q: Any, k: Any, v: Any) -> None:
    """k goes with q in batch and head_dim, v with k in batch, seqlen and heads."""
    for name, t, i, what, want in (
        ("k", k, 0, "q's batch", q.shape[0]),
        ("k", k, 3, "q's head_dim", q.shape[3]),
        ("v", v, 0, "q's batch", q.shape[0]),
        ("v", v, 1, "k's seqlen", k.shape[1]),
        ("v", v, 2, "k's nheads", k.shape[2]),
    ):
        if t.shape[i] != want:
            raise ValueError(
                f"{name}.shape is {tuple(t.shape)}: dimension {i} must be {what}, {want}"
            )
