"""Shared memory: where the elements of a tile lie, and where the tiles lie.

A tile's rows are cut into panels of 64 columns (128 bytes; 32 or 16 columns where 64 do not divide
the width), one panel behind the other. Within a panel the 16-byte chunks of a row are permuted by
an XOR with bits of its row number, so that the same chunk of 8 neighbouring rows, which ldmatrix
reads at once, lies in 8 different groups of banks.
"""

from dataclasses import dataclass

from cutlass import Int32

CHUNK = 8  # elements of 16 bytes


@dataclass(frozen=True)
class TileLayout:
    rows: int
    width: int

    @property
    def panel(self) -> int:
        """Columns of a panel."""
        return next(n for n in (64, 32, 16) if self.width % n == 0)

    @property
    def pitch(self) -> int:
        """Bytes of a row in a panel."""
        return 2 * self.panel

    @property
    def panel_bytes(self) -> int:
        return self.rows * self.pitch

    @property
    def bytes(self) -> int:
        return 2 * self.rows * self.width

    def at(self, row: Int32, chunk: Int32) -> Int32:
        """Byte offset of a chunk of the first panel. Rows 16 further on are 16 pitches away."""
        chunks = self.panel // CHUNK
        return row * self.pitch + ((chunk ^ (row % 8 // (8 // chunks))) * 16)

    def step(self, offset: Int32, k: int) -> Int32:
        """offset, of chunk 0 or 1 of any row, moved 2 k chunks (16 k columns) to the right."""
        a_panel = self.panel // 16
        return (offset ^ (32 * (k % a_panel))) + k // a_panel * self.panel_bytes


@dataclass(frozen=True)
class Storage:
    """Bytes from the start of dynamic shared memory: Q, through which O leaves, and the rings."""

    q: TileLayout
    k: TileLayout
    v: TileLayout
    o: TileLayout
    stages: int

    @property
    def k_start(self) -> int:
        return max(self.q.bytes, self.o.bytes)

    @property
    def v_start(self) -> int:
        return self.k_start + self.stages * self.k.bytes

    @property
    def bytes(self) -> int:
        return self.v_start + self.stages * self.v.bytes


def make_storage(cfg, problem) -> Storage:
    d, dv = problem.tile_dim, problem.tile_dim_v
    return Storage(
        TileLayout(cfg.tile_m, d),
        TileLayout(cfg.tile_n, d),
        TileLayout(cfg.tile_n, dv),
        TileLayout(cfg.tile_m, dv),
        cfg.kv_stages,
    )
