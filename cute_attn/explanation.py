"""explain's answer about a forward: what would run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cute_attn import compile as jit
from cute_attn import launch
from cute_attn.config import AmpereConfig, FwdConfig
from cute_attn.config_v1 import V1Config
from cute_attn.problem import Fp8Problem, Problem

if TYPE_CHECKING:
    import torch

    from cute_attn.config import QuantizeConfig

_DEFAULT_SMS = 132  # an H100 or H200, where there is no device to ask
_STATES = ("not compiled", "on disk", "in memory")  # what they begin with


@dataclass(frozen=True)
class Explanation:
    """What fwd would run; print it."""

    problem: Problem
    config: FwdConfig | AmpereConfig
    arch: str
    smem_bytes: int  # shared memory per CTA
    registers: tuple[int, int]  # per thread, (consumer, producer); alike where all do both
    threads: int  # per CTA
    parts: int  # of the keys, each on a CTA of its own and merged by a second kernel; 1: not split
    tiles: int  # of tile_m query rows and a part of the keys
    grid: int  # CTAs
    copies: tuple[str, ...]  # inputs that are copied because the hardware cannot load them
    compiled: str  # 'in memory', 'on disk' or 'not compiled'
    quantise: "QuantizeConfig | None" = None  # of a preset: what a kernel before it does
    launches: int = 1  # one after the other, for columns of V each

    def __str__(self) -> str:
        p, c = self.problem, self.config
        dtypes = f"e4m3, v {p.v_dtype}, out {p.dtype}" if isinstance(p, Fp8Problem) else p.dtype
        lines = [
            f"problem    {dtypes}{' causal' if p.causal else ''}, batch {p.batch}, "
            f"seqlen {p.seqlen_q} x {p.seqlen_k}, heads {p.heads_q} over {p.heads_kv}, "
            f"head_dim {p.head_dim}, head_dim_v {p.head_dim_v}",
            f"arch       {self.arch}",
            f"config     {c}",
        ]
        if not self.tiles:
            lines.append("runs       nothing: out is 0 and LSE -inf")
        elif self.arch == "cpu":
            lines.append(f"runs       block-wise attention in torch, {self.tiles} query tiles")
        else:
            lines += [
                f"smem       {self.smem_bytes} bytes per CTA",
                f"registers  {self.registers[0]} consumer, {self.registers[1]} producer"
                if self.arch == "sm90"
                else f"registers  at most {self.registers[0]}",
                f"grid       {self.grid} CTAs of {self.threads} threads, {self.tiles} query tiles"
                + (f", keys in {self.parts} parts" if self.parts > 1 else "")
                + (f", {self.launches} times" if self.launches > 1 else ""),
                f"copies     {', '.join(self.copies) or 'none'}",
                f"compiled   {self.compiled}",
            ]
            if self.quantise is not None:
                lines.append(f"before     {self.quantise}")
        return "\n".join(lines)


def explained(
    p: Problem,
    c: FwdConfig | AmpereConfig,
    target: str,
    device: "torch.device",
    copies: tuple[str, ...],
    quantise: "QuantizeConfig | None" = None,
) -> Explanation:
    """What fwd runs with c on p, compiled for target. device: of the tensors; copies: of them,
    before the launch."""
    parts, launches = c.parts(p), c.launches(p)
    empty = 0 in (p.batch, p.seqlen_q, p.seqlen_k, p.heads_q)
    tiles = 0 if empty else -(-p.seqlen_q // c.tile_m) * p.heads_q * p.batch * parts
    rows_walked = isinstance(c, V1Config) and c.walk_rows
    ctas = min(tiles, p.heads_q * p.batch) if rows_walked else tiles
    persistent, arch = c.schedule != "grid", target.partition(":")[0]
    states = ["not compiled" if arch == "cpu" else jit.state(each, c, target) for each in launches]
    return Explanation(
        p,
        c,
        arch,
        c.smem_bytes(launches[0]),
        c.registers,
        c.threads,
        parts,
        tiles,
        min(tiles, launch.multiprocessors(device) or _DEFAULT_SMS) if persistent else ctas,
        copies,
        min(states, key=lambda state: _STATES.index(state[:12])),
        quantise,
        len(launches),
    )
