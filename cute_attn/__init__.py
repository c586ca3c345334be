"""Attention kernels for Hopper in the CuTe Python DSL."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["BwdConfig", "Explanation", "FwdConfig", "Problem", "bwd", "explain", "flash_attn_func"]
__all__ += ["flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "fwd", "merge", "warmup"]
__all__ += ["QuantizedQKV", "channel_statistics", "quantize_qkv"]

if TYPE_CHECKING:
    from cute_attn.api import (
        Explanation,
        bwd,
        explain,
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        fwd,
        merge,
        warmup,
    )
    from cute_attn.config import BwdConfig, FwdConfig
    from cute_attn.problem import Problem
    from cute_attn.quantize import QuantizedQKV, channel_statistics, quantize_qkv
_HOMES = {"Problem": "problem", "BwdConfig": "config", "FwdConfig": "config"}
_HOMES |= dict.fromkeys(("QuantizedQKV", "channel_statistics", "quantize_qkv"), "quantize")


def __getattr__(name: str) -> Any:
    """Lazy, so that the import needs neither torch nor the DSL and takes no time."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(f"cute_attn.{_HOMES.get(name, 'api')}"), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
