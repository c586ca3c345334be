"""FlashAttention-2 forward: a CTA's warps each own rows of Q; all of them read K and V.

for every KV block j, last to first:
    S  = Q K_j^T
    S  = -inf where masked
    m  = its row maximum, or a reference near it as long as that will do;  l, O scaled to it
    P  = exp(S - m);  l = l + rowsum P
    O  = O + P V_j
O = O / l;  LSE = m + log l

K and V of the next blocks arrive by cp.async meanwhile. One barrier a block says both that all
threads' copies of a block have landed and that nobody reads the slot any more that is filled next.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_attn.kernels.ampere import epilogue, load, ptx
from cute_attn.kernels.ampere.operands import Inputs, Rows, Tile
from cute_attn.kernels.ampere.products import STEP, accumulator, mma
from cute_attn.kernels.ampere.storage import Storage
from cute_attn.kernels.common import output, rare
from cute_attn.kernels.common.layout import acc_as_operand_a
from cute_attn.kernels.common.mask import first_full_block, keys_seen, kv_block_end, mask_scores
from cute_attn.kernels.common.schedule import Shape
from cute_attn.kernels.common.softmax_lazy import LazySoftmax


@dataclass(frozen=True)
class Worker:
    """A thread, with what it holds for one tile of queries."""

    cfg: object
    problem: object
    x: Inputs
    shape: Shape
    tile: Tile
    rows: Rows
    smem: Storage
    base: Int32  # address of shared memory
    k: load.Source
    v: load.Source
    at_q: Int32  # addresses of the rows that the thread names to ldmatrix, at step 0
    at_k: Int32
    at_v: Int32
    softmax: LazySoftmax
    rQ: cute.Tensor | None  # (8, m-tiles, steps) where Q is kept in registers
    acc_O: cute.Tensor  # ((2, 2, head_dim_v/8), m-tiles, 1) fp32
    cS: cute.Tensor  # (row, col) of every score this thread owns
    tidx: Int32

    @property
    def keys(self) -> int:
        """Of a block, that this warp reads."""
        return self.cfg.tile_n

    @property
    def cO(self) -> cute.Tensor:
        """(row, col) of O: rows, and columns modulo 8."""
        return self.cS

    @property
    def o_step(self) -> int:
        """The first column of acc_O over 16."""
        return 0

    # Loads

    @cute.jit
    def load_q(self):
        gQ = self.x.gQ[None, None, self.tile.head, self.tile.batch]
        q = load.source(gQ, self.smem.q, self.tidx)
        sure = self.problem.head_dim - 8
        load.load(q, self.smem.q, self.cfg.threads, sure, self.base, self.rows.first, False)

    @cute.jit
    def load_block(self, block: Int32, stage: Int32, whole: cutlass.Constexpr[bool]):
        """K and V of a block into a slot, as one group of copies; zeros below block 0, which cost
        less than a branch."""
        smem, threads, row = self.smem, self.cfg.threads, block * self.cfg.tile_n
        sure, sure_v = self.problem.head_dim - 8, self.problem.head_dim_v - 24
        to = self.base + smem.k_start + stage * smem.k.bytes
        load.load(self.k, smem.k, threads, sure, to, row, whole)
        to = self.base + smem.v_start + stage * smem.v.bytes
        load.load(self.v, smem.v, threads, sure_v, to, row, whole)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def arrive(self):
        """Until the oldest block that is under way is there for all threads."""
        cute.arch.cp_async_wait_group(self.cfg.kv_stages - 2)
        cute.arch.barrier()

    # Matrix products

    @cute.jit
    def fetch_q(self, to: cute.Tensor, k: cutlass.Constexpr[int]):
        """Step k of Q as A operands, (8, m-tiles)."""
        for m in cutlass.range_constexpr(self.cfg.m_tiles):
            down = m * self.cfg.row_warps * STEP * self.smem.q.pitch
            ptx.ldmatrix(to[None, m], self.smem.q.step(self.at_q, k) + down)

    @cute.jit
    def keep_q(self):
        """Q into registers, if that is where it is read from."""
        if const_expr(self.rQ is not None):
            self.arrive()
            for k in cutlass.range_constexpr(self.problem.head_dim // STEP):
                self.fetch_q(self.rQ[None, None, k], k)

    @property
    def narrower(self) -> int:
        """Keys that no row of the first m-tiles sees of a diagonal's last block, whose rows lie so
        much above those of the last; 0 if a block is too narrow for that."""
        rows = STEP * self.cfg.warps
        useful = self.problem.causal and self.cfg.m_tiles > 1 and self.cfg.tile_n >= rows
        return rows if useful else 0

    def sees(self, m: int, step: int, narrow: bool) -> bool:
        """Whether a row of m-tile m may see a key of the 16 from 16 * step on."""
        last = m == self.cfg.m_tiles - 1
        return last or not narrow or STEP * step < self.cfg.tile_n - self.narrower

    @cute.jit
    def scores(self, acc_S: cute.Tensor, stage: Int32, narrow: cutlass.Constexpr[bool]):
        """acc_S = Q K^T"""
        K, layout = self.at_k + stage * self.smem.k.bytes, self.smem.k
        dtype = self.x.gQ.element_type
        acc_S.fill(0.0)
        for k in cutlass.range_constexpr(self.problem.head_dim // STEP):
            if const_expr(self.rQ is None):
                A = cute.make_rmem_tensor((8, self.cfg.m_tiles), dtype)
                self.fetch_q(A, k)
            else:
                A = self.rQ[None, None, k]
            for n in cutlass.range_constexpr(self.keys // STEP):
                B = cute.make_rmem_tensor(8, dtype)
                ptx.ldmatrix(B, layout.step(K, k) + n * STEP * layout.pitch)
                for m in cutlass.range_constexpr(self.cfg.m_tiles):
                    for half in cutlass.range_constexpr(2 * self.sees(m, n, narrow)):
                        mma(acc_S, m, 2 * n + half, A[None, m], B, half)

    @cute.jit
    def add_values(
        self,
        acc_S: cute.Tensor,
        acc_O: cute.Tensor,
        stage: Int32,
        narrow: cutlass.Constexpr[bool],
    ):
        """O += P V. Scores become weights where they are used, 16 keys at a time, so that exp and
        matrix products overlap."""
        V, layout = self.at_v + stage * self.smem.v.bytes, self.smem.v
        S, dtype = acc_as_operand_a(acc_S), self.x.gV.element_type
        for k in cutlass.range_constexpr(self.keys // STEP):
            P = cute.make_rmem_tensor((8, self.cfg.m_tiles), dtype)
            for m in cutlass.range_constexpr(self.cfg.m_tiles):
                if const_expr(self.sees(m, k, narrow)):
                    scores = S[None, m, k]
                    self.softmax.weigh(scores, 2 * m)
                    P[None, m].store(scores.load().to(dtype))
            for n in cutlass.range_constexpr(self.problem.tile_dim_v // STEP):
                B = cute.make_rmem_tensor(8, dtype)
                ptx.ldmatrix(B, layout.step(V, n) + k * STEP * layout.pitch, transpose=True)
                for m in cutlass.range_constexpr(self.cfg.m_tiles):
                    for half in cutlass.range_constexpr(2 * self.sees(m, k, narrow)):
                        mma(acc_O, m, 2 * n + half, P[None, m], B, half)

    # The algorithm

    @cute.jit
    def begin(self):
        """The first blocks on their way, behind Q."""
        self.load_q()
        self.load_block(self.rows.end - 1, Int32(0), False)
        for i in cutlass.range_constexpr(1, self.cfg.kv_stages - 1):
            self.load_block(self.rows.end - 1 - i, Int32(i), True)
        self.softmax.reset()
        self.acc_O.fill(0.0)
        self.keep_q()

    @cute.jit
    def block(self, block: Int32, stage: Int32, masked: cutlass.Constexpr[bool]):
        """One KV block, as far as this warp's rows see it; the next block's stage."""
        self.arrive()
        if const_expr(masked and self.narrower):
            seen = keys_seen(self.problem, self.rows.last - self.narrower, self.shape)
            if seen <= (block + 1) * self.cfg.tile_n - self.narrower:
                self.attend(block, stage, masked, True)
            else:
                self.attend(block, stage, masked, False)
        elif const_expr(masked and self.problem.causal):
            if keys_seen(self.problem, self.rows.last, self.shape) > block * self.cfg.tile_n:
                self.attend(block, stage, masked, False)
            else:
                self.load_next(block, stage)
        else:
            self.attend(block, stage, masked, False)
        return stage + 1 if stage < self.cfg.kv_stages - 1 else Int32(0)

    @cute.jit
    def load_next(self, block: Int32, stage: Int32):
        """Into the slot of the block before, which nobody reads any more."""
        ahead = self.cfg.kv_stages - 1
        self.load_block(block - ahead, stage - 1 if stage > 0 else Int32(ahead), True)

    @cute.jit
    def attend(
        self,
        block: Int32,
        stage: Int32,
        masked: cutlass.Constexpr[bool],
        narrow: cutlass.Constexpr[bool],
    ):
        """S = Q K^T, softmax, O += P V. narrow: the last m-tile alone reads all keys."""
        acc_S = accumulator(self.cfg.m_tiles, self.keys)
        self.scores(acc_S, stage, narrow)
        self.load_next(block, stage)  # while the last products are on their way
        if const_expr(masked):
            self.mask(acc_S, block)
        self.softmax.look(acc_S, self.acc_O)
        self.add_values(acc_S, self.acc_O, stage, narrow)

    @cute.jit
    def mask(self, acc_S: cute.Tensor, block: Int32):
        """Where some row does not see some key of the block."""
        key = block * self.cfg.tile_n
        if keys_seen(self.problem, self.rows.first, self.shape) < key + self.cfg.tile_n:
            mask_scores(self.problem, acc_S, self.cS, self.rows.first, key, self.shape)

    @cute.jit
    def confine_nan(self):
        """When O has taken up all blocks that some of the rows see in part."""
        if const_expr(self.problem.causal):
            if rare.has_nan(self.acc_O) & (self.rows.first < self.shape.seqlen_q):
                rare.confine_nan(
                    self.problem, self.x, self, self.softmax, self.tile, self.tile.kv_head,
                    self.rows.first, self.rows.full * self.cfg.tile_n, None, self.shape,
                )  # fmt: skip

    @cute.jit
    def blocks(self):
        """All KV blocks of the tile, those on the diagonal or at the end of the keys first."""
        rows, stage = self.rows, Int32(0)
        for i in cutlass.range(rows.end - rows.full, unroll=1):
            stage = self.block(rows.end - 1 - i, stage, True)
        self.confine_nan()
        for i in cutlass.range(rows.full, unroll=1):
            stage = self.block(rows.full - 1 - i, stage, False)

    @cute.jit
    def end(self):
        """O and LSE leave."""
        cute.arch.cp_async_wait_group(0)
        norm, lse = self.softmax.finish()
        x, smem, O = self.x, self.smem, self.acc_O
        output.store_rows(x.lse, lse, self.cS, self.tile, self.rows.first, self.shape.seqlen_q)
        output.normalise(O, norm)
        if const_expr(smem.q.width != smem.o.width):  # else a warp's rows of O lie in those of Q
            cute.arch.barrier()
        epilogue.put(smem.o, self.base, O, self.cO, x.gO.element_type, self.o_step)
        cute.arch.barrier()
        gO = x.gO[None, None, self.tile.head, self.tile.batch]
        epilogue.store(smem.o, self.cfg.threads, self.base, gO, self.rows.first, self.tidx)


@cute.jit
def rows_of(cfg, problem, tile: Tile, shape: Shape) -> Rows:
    first = tile.m_block * cfg.tile_m
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    last = first + cfg.tile_m - STEP * (cfg.warps - warp) + STEP - 1
    end = kv_block_end(cfg, problem, first + cfg.tile_m, shape)
    full = cutlass.min(first_full_block(cfg, problem, first, shape), end - 1)
    return Rows(first, last, end, full)
