"""Shared memory of the backward. Tiles are laid out as those of the forward (storage.py)."""

from dataclasses import dataclass

from cute_attn.kernels.ampere.storage import TileLayout


@dataclass(frozen=True)
class Storage:
    """Bytes from the start of dynamic shared memory. dK and dV leave through K's and V's place."""

    k: TileLayout  # (tile_n, width)
    v: TileLayout
    q: TileLayout  # (tile_m, width), q_stages of them
    do: TileLayout
    weights: TileLayout  # (tile_n, tile_m), of P^T and of dS^T
    q_stages: int
    do_stages: int
    passed_on: bool  # P goes to other warps
    split_barrier: bool

    @property
    def v_start(self) -> int:
        return self.k.bytes

    @property
    def q_start(self) -> int:
        return self.v_start + self.v.bytes

    @property
    def do_start(self) -> int:
        return self.q_start + self.q_stages * self.q.bytes

    @property
    def ds_start(self) -> int:
        return self.do_start + self.do_stages * self.do.bytes

    @property
    def p_start(self) -> int:
        return self.ds_start + self.weights.bytes

    @property
    def statistics_start(self) -> int:
        return self.p_start + (self.weights.bytes if self.passed_on else 0)

    @property
    def statistics_bytes(self) -> int:
        """LSE and D of a block's queries, fp32."""
        return 8 * self.q.rows

    @property
    def barrier_start(self) -> int:
        return self.statistics_start + self.q_stages * self.statistics_bytes

    @property
    def bytes(self) -> int:
        return self.barrier_start + (16 if self.split_barrier else 0)


def make_storage(cfg) -> Storage:
    return Storage(
        TileLayout(cfg.tile_n, cfg.width),
        TileLayout(cfg.tile_n, cfg.width_v),
        TileLayout(cfg.tile_m, cfg.width),
        TileLayout(cfg.tile_m, cfg.width_v),
        TileLayout(cfg.tile_n, cfg.tile_m),
        cfg.q_stages,
        cfg.do_stages,
        cfg.column_warps > 1,
        cfg.split_barrier,
    )
