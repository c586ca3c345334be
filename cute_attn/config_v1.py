"""The Ampere forward with what FlashAttention-2 changed undone, to measure what the changes bring.

The kernels are kernels/ampere/v1*.py; docs/flash_attention_2.md explains the changes.
"""

from dataclasses import dataclass

from cute_attn.config import AmpereConfig
from cute_attn.problem import Problem

HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class V1Config(AmpereConfig):
    """FlashAttention-1's schedule; each of the three may be what FlashAttention-2 has instead. All
    False would be AmpereConfig's kernel."""

    divide_always: bool = True  # O is rescaled and divided in every KV block; else divided once
    split_keys: bool = True  # a CTA's warps divide a block's keys; else the rows
    walk_rows: bool = True  # a CTA has all rows of a head; else one tile of them

    @property
    def row_warps(self) -> int:
        return 1 if self.split_keys else self.warps

    @property
    def warp_keys(self) -> int:
        """Of a block, that a warp reads."""
        return self.tile_n // self.warps if self.split_keys else self.tile_n

    def warp_columns(self, problem: Problem) -> int:
        """Of O, that a warp keeps."""
        return problem.tile_dim_v // self.warps if self.split_keys else problem.tile_dim_v

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split_keys and self.tile_n % (16 * self.warps):
            keys = f"allowed are the multiples of {16 * self.warps} (16 keys a warp)"
            raise ValueError(f"config.tile_n is {self.tile_n}: {keys}")
        if self.split_keys and self.warps == 8:  # a warp keeps 16 columns of O at least
            raise ValueError("config.warps is 8: allowed are 2, 4 with split_keys")
        if self.q_in_regs:
            raise ValueError("config.q_in_regs is True: allowed is False in a V1Config")

    def exchange_bytes(self, problem: Problem) -> int:
        """Of shared memory, in which warps tell each other maxima, sums and parts of O, in fp32."""
        rows = self.tile_m * self.warps * (2 + problem.tile_dim_v)
        return 4 * rows if self.split_keys else 0

    def smem_bytes(self, problem: Problem, itemsize: int = 2) -> int:
        return super().smem_bytes(problem, itemsize) + self.exchange_bytes(problem)

    def accumulator_registers(self, problem: Problem) -> int:
        """Registers per thread that S, a block's P V and what a warp keeps of O hold at once."""
        held = self.warp_keys + problem.tile_dim_v
        if self.split_keys:
            held += self.warp_columns(problem)
        return self.m_tiles * held // 2

    def infeasible(self, problem: Problem, target: str = "sm_80") -> str:
        """Why this config cannot serve the problem there; '' if it can."""
        for name in ("head_dim", "head_dim_v"):
            if getattr(problem, name) not in HEAD_DIMS:
                return f"{name} is {getattr(problem, name)}: allowed are 64 and 128 in a V1Config"
        if problem.negative_scale:
            return "softmax_scale is negative: allowed is 0 or more in a V1Config"
        return super().infeasible(problem, target)
