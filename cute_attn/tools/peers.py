"""Who is timed: this library and what it is compared with, each behind the same small interface.

Every implementation answers prepare(case, q, k, v) with a call that takes no arguments, and with
prepare(case, q, k, v, dout) one whose call gives gradients; it raises Unavailable, or whatever the
library raises, where it cannot serve the case. Passes are named as in passes.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from cute_attn.config import AmpereBwdConfig, AmpereConfig, BwdConfig, FwdConfig
from cute_attn.tools.cases import Case, bwd_config_for, config_for, parse_config

Call = Callable[[], Any]
Forward = Callable[..., Any]


class Unavailable(Exception):
    """The implementation is not installed or does not do what the case asks for."""


@dataclass(frozen=True)
class Implementation:
    label: str
    prepare: Callable[..., Call]
    # what the call returned -> out (batch, seqlen, heads, head_dim_v), or dq, dk and dv
    to_output: Callable[[Any], Any]
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered around both
    config: Callable[[Case], dict[str, Any]] | None = None  # of ours, as records hold it

    @property
    def ours(self) -> bool:
        return self.config is not None

    def config_record(self, case: Case) -> dict[str, Any] | None:
        return self.config(case) if self.config else None


def ours(label: str = "ours", text: str = "", arch: str = "") -> Implementation:
    """text: fields that replace those of the tuned config, as in --config."""

    def config_of(case: Case) -> FwdConfig | AmpereConfig:
        return config_for(case, text, ampere_chip() if arch == "sm80" else "")

    def prepare(case: Case, q: Any, k: Any, v: Any) -> Call:
        import cute_attn

        # with no --config the call is what a user writes, the look-up of the config included
        config = config_of(case) if text not in ("", "pick") else None
        return lambda: cute_attn.fwd(q, k, v, causal=case.causal, config=config, arch=arch or None)

    return Implementation(label, prepare, _first, config=lambda case: asdict(config_of(case)))


def ampere_chip() -> str:
    """What the Ampere kernels are compiled for on the current device."""
    import torch

    from cute_attn import compile, launch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return compile.target(launch.compile_target(device, "sm80"))


def ours_backward(label: str = "ours", text: str = "", arch: str = "") -> Implementation:
    def config_of(case: Case) -> BwdConfig | AmpereBwdConfig:
        return bwd_config_for(case, text, ampere_chip() if arch == "sm80" else "")

    def prepare(case: Case, q: Any, k: Any, v: Any, dout: Any) -> Call:
        import cute_attn

        config = config_of(case) if text not in ("", "pick") else None
        options: dict[str, Any] = {"causal": case.causal, "arch": arch or None}
        out, lse = cute_attn.fwd(q, k, v, return_lse=True, **options)
        return lambda: cute_attn.bwd(dout, q, k, v, out, lse, config=config, **options)

    return Implementation(label, prepare, _same, config=lambda case: asdict(config_of(case)))


def ours_step(label: str = "ours") -> Implementation:
    """What a training step calls: it takes no config."""

    def prepare(case: Case, q: Any, k: Any, v: Any, dout: Any) -> Call:
        import cute_attn

        def forward(q: Any, k: Any, v: Any) -> Any:
            return cute_attn.flash_attn_func(q, k, v, causal=case.causal)

        return through_autograd("fwd_bwd", forward, (q, k, v), dout)

    def config(case: Case) -> dict[str, Any]:
        return {"fwd": asdict(config_for(case)), "bwd": asdict(bwd_config_for(case))}

    return Implementation(label, prepare, _same, config=config)


def through_autograd(which: str, forward: Forward, inputs: tuple[Any, ...], dout: Any) -> Call:
    """The backward of a graph that is recorded once, or, for 'fwd_bwd', both in every call."""
    import torch

    leaves = [t.detach().requires_grad_() for t in inputs]
    if which == "bwd":
        with torch.enable_grad():
            out = forward(*leaves)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def step() -> Any:
        with torch.enable_grad():
            out = forward(*leaves)
        return torch.autograd.grad(out, leaves, dout)

    return step


def _same(result: Any) -> Any:
    return result


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _sdpa(label: str, backend: str | None, which: str = "fwd") -> Implementation:
    def prepare(case: Case, *inputs: Any) -> Call:
        import torch

        if case.causal and case.seqlen_q != case.seqlen_k:
            raise Unavailable("torch's is_causal is aligned top-left")
        call = torch.nn.functional.scaled_dot_product_attention
        q, k, v, *douts = (t.transpose(1, 2) for t in inputs)
        grouped = {"enable_gqa": True} if case.heads_q != case.heads_kv else {}

        def forward(*qkv: Any) -> Any:
            return call(*qkv, is_causal=case.causal, **grouped)

        if douts:
            return through_autograd(which, forward, (q, k, v), *douts)
        return lambda: forward(q, k, v)

    def scope() -> AbstractContextManager[Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        scoped: AbstractContextManager[Any] = (
            sdpa_kernel(getattr(SDPBackend, backend)) if backend else nullcontext()
        )
        return scoped

    def to_output(result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(t.transpose(1, 2) for t in result)
        return result.transpose(1, 2)

    return Implementation(label, prepare, to_output, scope)


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


def _flash_attn_4_backward() -> Implementation:
    def prepare(case: Case, q: Any, k: Any, v: Any, dout: Any) -> Call:
        interface = import_module("flash_attn.cute.interface")
        out, lse, *_ = interface._flash_attn_fwd(q, k, v, causal=case.causal, return_lse=True)
        call = interface._flash_attn_bwd  # what its autograd function calls, without autograd
        return lambda: call(q, k, v, out, dout, lse, causal=case.causal)

    return Implementation("fa4", prepare, lambda result: tuple(result[:3]))


def _flash_attn_4_step() -> Implementation:
    def prepare(case: Case, q: Any, k: Any, v: Any, dout: Any) -> Call:
        call = import_module("flash_attn.cute").flash_attn_func

        def forward(*leaves: Any) -> Any:
            return _first(call(*leaves, causal=case.causal))

        return through_autograd("fwd_bwd", forward, (q, k, v), dout)

    return Implementation("fa4", prepare, _same)


def _without_backward(label: str, why: str) -> Implementation:
    def prepare(case: Case, *inputs: Any) -> Call:
        raise Unavailable(why)

    return Implementation(label, prepare, _same)


PEERS: dict[str, Implementation] = {
    "cudnn": _sdpa("cudnn", "CUDNN_ATTENTION"),
    "fa2": _sdpa("fa2", "FLASH_ATTENTION"),
    "fa3": _flash_attn("fa3", ("fa3_fwd_interface", "flash_attn_interface")),
    "fa4": _flash_attn("fa4", ("flash_attn.cute",)),
    "sdpa": _sdpa("sdpa", None),  # what torch picks by itself; the only one on a CPU
}


def _with_gradients(which: str, fa4: Implementation) -> dict[str, Implementation]:
    return {
        "cudnn": _sdpa("cudnn", "CUDNN_ATTENTION", which),
        "fa2": _sdpa("fa2", "FLASH_ATTENTION", which),
        "fa3": _without_backward("fa3", "the wheel fa3-fwd has no backward"),
        "fa4": fa4,
        "sdpa": _sdpa("sdpa", None, which),
    }


PEERS_OF = {
    "fwd": PEERS,
    "bwd": _with_gradients("bwd", _flash_attn_4_backward()),
    "fwd_bwd": _with_gradients("fwd_bwd", _flash_attn_4_step()),
}


def default(device: str, which: str = "fwd") -> tuple[str, ...]:
    if device == "cpu":
        return "ours", "sdpa"
    every = ("ours", "cudnn", "fa2", "fa3", "fa4")
    return every if which == "fwd" else tuple(name for name in every if name != "fa3")


def chosen(
    names: list[str], configs: list[str], which: str = "fwd", arch: str = ""
) -> list[Implementation]:
    """Implementations in the order asked for; several configs make ours#1, ours#2, ...

    Raises ValueError for an unknown name or field."""
    if configs and which == "fwd_bwd":
        raise ValueError("--config with --fwd-bwd: flash_attn_func takes none")
    found = []
    for name in names:
        if name == "ours" and which == "fwd_bwd":
            found.append(ours_step())
        elif name == "ours":
            for n, text in enumerate(configs or [""], 1):
                label = f"ours#{n}" if len(configs) > 1 else "ours"
                kind: Any = {
                    ("fwd", True): AmpereConfig,
                    ("fwd", False): FwdConfig,
                    ("bwd", True): AmpereBwdConfig,
                    ("bwd", False): BwdConfig,
                }[which, arch == "sm80"]
                parse_config(text, kind())  # raises for a wrong key before anything runs
                found.append((ours if which == "fwd" else ours_backward)(label, text, arch))
        elif name in PEERS_OF[which]:
            found.append(PEERS_OF[which][name])
        else:
            raise ValueError(f"--impl {name!r}: allowed are ours, {', '.join(PEERS)}")
    return found
