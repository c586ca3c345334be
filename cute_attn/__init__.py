"""Attention kernels for Hopper in the CuTe Python DSL."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["BwdConfig", "Explanation", "FwdConfig", "Problem", "bwd", "explain", "flash_attn_func"]
__all__ += ["flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "fwd", "merge", "warmup"]
__all__ += ["ChannelStatistics", "QuantizedQKV", "channel_statistics", "quantize_qkv"]

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
    from cute_attn.quantize import (
        ChannelStatistics,
        QuantizedQKV,
        channel_statistics,
        quantize_qkv,
    )
_HOMES = {"Problem": "cute_attn.problem", "FwdConfig": "cute_attn.config"}
_HOMES["BwdConfig"] = "cute_attn.config"
_HOMES |= dict.fromkeys(__all__[-4:], "cute_attn.quantize")


def __getattr__(name: str) -> Any:
    """Lazy, so that the import needs neither torch nor the DSL and takes no time."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES.get(name, "cute_attn.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
