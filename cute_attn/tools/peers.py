"""Who is timed: this library and what it is compared with, each behind the same small interface.

Every implementation answers prepare(case, q, k, v) with a call that takes no arguments; it raises
Unavailable, or whatever the library raises, where it cannot serve the case.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from cute_attn.config import FwdConfig
from cute_attn.tools.cases import Case, config_for, parse_config

Call = Callable[[], Any]


class Unavailable(Exception):
    """The implementation is not installed or does not do what the case asks for."""


@dataclass(frozen=True)
class Implementation:
    label: str
    prepare: Callable[[Case, Any, Any, Any], Call]
    to_output: Callable[[Any], Any]  # what the call returned -> (batch, seqlen, heads, head_dim_v)
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered around the calls
    config: Callable[[Case], FwdConfig] | None = None  # of ours

    @property
    def ours(self) -> bool:
        return self.config is not None

    def config_record(self, case: Case) -> dict[str, Any] | None:
        return asdict(self.config(case)) if self.config else None


def ours(label: str = "ours", text: str = "") -> Implementation:
    """text: fields that replace those of the tuned config, as in --config."""

    def prepare(case: Case, q: Any, k: Any, v: Any) -> Call:
        import cute_attn

        # with no --config the call is what a user writes, the look-up of the config included
        config = config_for(case, text) if text not in ("", "pick") else None
        return lambda: cute_attn.fwd(q, k, v, causal=case.causal, config=config)

    return Implementation(label, prepare, _first, config=lambda case: config_for(case, text))


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _sdpa(label: str, backend: str | None) -> Implementation:
    def prepare(case: Case, q: Any, k: Any, v: Any) -> Call:
        import torch

        if case.causal and case.seqlen_q != case.seqlen_k:
            raise Unavailable("torch's is_causal is aligned top-left")
        call = torch.nn.functional.scaled_dot_product_attention
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        grouped = {"enable_gqa": True} if case.heads_q != case.heads_kv else {}
        return lambda: call(q, k, v, is_causal=case.causal, **grouped)

    def scope() -> AbstractContextManager[Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        scoped: AbstractContextManager[Any] = (
            sdpa_kernel(getattr(SDPBackend, backend)) if backend else nullcontext()
        )
        return scoped

    return Implementation(label, prepare, lambda out: out.transpose(1, 2), scope)


def _flash_attn(label: str, modules: tuple[str, ...]) -> Implementation:
    def prepare(case: Case, q: Any, k: Any, v: Any) -> Call:
        reasons = []
        for name in modules:
            try:
                call = import_module(name).flash_attn_func
            except Exception as error:  # a peer's import may fail in any way
                reasons.append(f"{name}: {error}")
                continue
            return lambda: call(q, k, v, causal=case.causal)
        raise Unavailable("; ".join(reasons))

    return Implementation(label, prepare, _first)


PEERS: dict[str, Implementation] = {
    "cudnn": _sdpa("cudnn", "CUDNN_ATTENTION"),
    "fa2": _sdpa("fa2", "FLASH_ATTENTION"),
    "fa3": _flash_attn("fa3", ("fa3_fwd_interface", "flash_attn_interface")),
    "fa4": _flash_attn("fa4", ("flash_attn.cute",)),
    "sdpa": _sdpa("sdpa", None),  # what torch picks by itself; the only one on a CPU
}
DEFAULT = {"cuda": ("ours", "cudnn", "fa2", "fa3", "fa4"), "cpu": ("ours", "sdpa")}


def chosen(names: list[str], configs: list[str]) -> list[Implementation]:
    """Implementations in the order asked for; several configs make ours#1, ours#2, ...

    Raises ValueError for an unknown name or field."""
    found = []
    for name in names:
        if name == "ours":
            several = len(configs) > 1
            for n, text in enumerate(configs or [""], 1):
                parse_config(text, FwdConfig())  # raises for a wrong key before anything runs
                found.append(ours(f"ours#{n}" if several else "ours", text))
        elif name in PEERS:
            found.append(PEERS[name])
        else:
            raise ValueError(f"--impl {name!r}: allowed are ours, {', '.join(PEERS)}")
    return found
