"""Hopper backward attention by recomputation (FlashAttention-2, algorithm 2). A tile is a block of
128 keys of one KV head; CTAs are persistent over tiles: a producer warp, one that announces dS, two
consumer warpgroups of 64 keys each.

row_statistics -> the main kernel (bwd_tickets.py, bwd_walk.py, bwd_load.py, bwd_mainloop.py,
                  bwd_turns.py)
               -> finish_dq

The last two begin before the kernel ahead of them ends (programmatic dependent launch), and wait
for its end before they touch what it wrote. The first does not: what came before the call, another
one with the same scratch memory too, has ended when it begins.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from cute_attn.config import BwdConfig
from cute_attn.kernels.common import bwd_rows, bwd_walk
from cute_attn.kernels.common.bwd_walk import Shape
from cute_attn.kernels.hopper import bwd_load, bwd_mainloop, bwd_tickets, bwd_turns
from cute_attn.kernels.hopper.bwd_operands import Inputs, Mmas, Smem
from cute_attn.kernels.hopper.fwd import DTYPES, LOG2_E, LSE, ROWS, reordered
from cute_attn.kernels.hopper.gemm import STEP
from cute_attn.kernels.hopper.operands import TmaOperand
from cute_attn.kernels.hopper.storage import tile_layout
from cute_attn.problem import Problem

REGISTERS = 240, 24  # consumer, producer


@dataclass(frozen=True)
class Layout:
    """What follows from a problem and a config."""

    problem: Problem
    cfg: BwdConfig

    @property
    def stages(self) -> int:
        return self.cfg.stages

    @property
    def persistent(self) -> bool:
        """Whether CTAs draw tickets for tiles, else each has one."""
        return True

    @property
    def shares(self) -> bool:
        """Whether CTAs may share tiles."""
        return self.cfg.shares(self.problem)

    @property
    def ds_slots(self) -> int:
        return self.cfg.slots(self.problem)

    @property
    def warpgroups(self) -> int:
        return self.cfg.warpgroups

    @property
    def deterministic(self) -> bool:
        return self.cfg.deterministic

    @property
    def width(self) -> int:
        return self.cfg.width(self.problem)

    @property
    def width_v(self) -> int:
        return self.cfg.width_v(self.problem)

    @property
    def tile_m(self) -> int:
        return self.cfg.tile_m(self.problem)

    @property
    def tile_n(self) -> int:
        return 64 * self.warpgroups

    @property
    def key_tiles(self) -> int:
        """Tiles of 64 keys in shared memory."""
        return self.warpgroups

    @property
    def ds_tiles(self) -> int:
        """Tiles of (64 keys, tile_m) in a slot of dS, each from a warpgroup of its own."""
        return self.key_tiles

    @property
    def shared_tiles(self) -> int:
        """Such tiles through which warpgroups pass numbers to each other."""
        return self.ds_slots * self.ds_tiles

    @property
    def key_parts(self) -> int:
        """Into how many parts warpgroups split columns of K whatever the swizzle is."""
        return 1

    @property
    def dq_by_rows(self) -> bool:
        """Whether warpgroups share dQ of a block by rows, else by columns."""
        return self.tile_m == 128

    @property
    def early_dv(self) -> bool:
        """Whether dV += P^T dO runs beside dS, at the price of registers."""
        return self.tile_m == 64

    @property
    def late_ds(self) -> bool:
        """Whether dS goes to shared memory after dK is issued, which needs it in registers only;
        else before dQ of the block before, whose accumulators leave the assembler no registers."""
        return self.tile_m == 64

    @property
    def folded(self) -> bool:
        """Whether statistics come to S and dP by a product, else they are added in registers."""
        return True

    @property
    def from_scores(self) -> bool:
        """Whether LSE in bits is that of a score, not folded: see bwd_rows.score."""
        return False

    @property
    def statistics(self) -> int:
        """Words in which LSE and D of a block's rows lie."""
        return self.cfg.statistics(self.problem)

    @property
    def ticket_word(self) -> int:
        return self.cfg.ticket_word(self.problem)

    @property
    def chained(self) -> bool:
        """Whether kernels begin before the one ahead of them ends."""
        return True

    @property
    def dq_vectors(self) -> bool:
        """Whether a thread's four numbers of dQ lie next to each other, else its warp's do."""
        return True

    @property
    def dq_width(self) -> int:
        return self.width if self.dq_by_rows else self.width // 2

    @property
    def threads(self) -> int:
        return 128 * (1 + self.warpgroups)


class BackwardSm90:
    layout = Layout
    main = bwd_mainloop

    def __init__(self, problem: Problem, config: BwdConfig):
        self.problem = problem.static()
        self.cfg = self.layout(self.problem, config)
        self.dtype = DTYPES[problem.dtype]
        self.name = config.kernel_name(self.problem)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mdLSE: cute.Tensor,
        mdQ: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        stats: cute.Tensor,
        partial_dq: cute.Tensor,
        shares: cute.Tensor,
        sms: Int32,
        whole: Int32,
        parts: Int32,
        softmax_scale: Float32,
        score_scale: Float32,
        stream: cuda.CUstream,
    ):
        """mQ, mdQ (batch, seqlen_q, heads_q, head_dim), mO, mdO (batch, seqlen_q, heads_q,
        head_dim_v), mK, mdK, mV, mdV likewise with seqlen_k and heads_kv; mLSE, mdLSE (batch,
        heads_q, seqlen_q). stats (batch, heads_q, blocks, block_words) and partial_dq (batch,
        heads_q, blocks, tile_m * width) are fp32 scratch. So is shares, for tiles from number
        `whole` on, each of which `parts` CTAs share (bwd_parts.py): SHARE_WORDS for each, then dK
        and dV of parts. sms: multiprocessors, and so many CTAs where they are persistent.
        score_scale is softmax_scale, or some tiny scale where that is 0."""
        cfg = self.cfg
        mQ, mK, mV, mO, mdO, mdQ, mdK, mdV = [
            reordered(t, ROWS) for t in (mQ, mK, mV, mO, mdO, mdQ, mdK, mdV)
        ]
        mLSE, mdLSE = reordered(mLSE, LSE), reordered(mdLSE, LSE)
        stats, dq = [reordered(t, [3, 2, 1, 0]) for t in (stats, partial_dq)]
        mmas = self.mmas()
        shape = bwd_walk.shape_of(cfg, mQ, mK, dq.shape[1], sms, whole, parts)
        blocks = shape.m_blocks * mQ.shape[2] * mQ.shape[3]
        scale_log2 = score_scale * LOG2_E
        rows = mO, mdO, mLSE, mdLSE, stats, dq, shares
        bwd_rows.row_statistics(cfg, *rows, scale_log2, shape.shared).launch(
            grid=(blocks * bwd_rows.statistics_ctas(cfg), 1, 1),
            block=(bwd_rows.THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,  # else the assembler saves registers and waits row by row
        )
        x = Inputs(
            *self.operands(mQ, mK, mV, mdO, mdK, mdV),
            tile_layout(self.dtype, (64, cfg.tile_m), cfg.shared_tiles),
            stats,
            dq,
            shares,
        )
        tiles = shape.n_blocks * shape.heads
        if const_expr(cfg.shares):
            tiles = whole + shape.shared * parts
        grid = cutlass.min(tiles, sms) if const_expr(cfg.persistent) else tiles
        self.kernel(x, mmas, shape, softmax_scale, scale_log2).launch(
            grid=(grid, 1, 1),
            block=(cfg.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )
        bwd_rows.finish_dq(cfg, dq, mdQ, softmax_scale).launch(
            grid=(blocks * bwd_rows.finishing_ctas(cfg), 1, 1),
            block=(bwd_rows.THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    def mmas(self) -> Mmas:
        cfg, dtype = self.cfg, self.dtype
        K, MN, RMEM = OperandMajorMode.K, OperandMajorMode.MN, warpgroup.OperandSource.RMEM
        make, one = hopper.make_trivial_tiled_mma, (1, 1, 1)
        return Mmas(
            make(dtype, dtype, K, K, Float32, one, (64, cfg.tile_m)),
            make(dtype, dtype, K, MN, Float32, one, (64, cfg.width_v), RMEM),
            make(dtype, dtype, K, MN, Float32, one, (64, cfg.width), RMEM),
            make(dtype, dtype, MN, MN, Float32, one, (64, cfg.dq_width)),
            self.statistics_mma(),
        )

    def statistics_mma(self) -> cute.TiledMma:
        """In bf16, whose exponents are those of fp32, whatever the inputs are."""
        K, shape = OperandMajorMode.K, (64, self.cfg.tile_m)
        return hopper.make_trivial_tiled_mma(BFloat16, BFloat16, K, K, Float32, (1, 1, 1), shape)

    def operands(self, mQ, mK, mV, mdO, mdK, mdV) -> tuple[TmaOperand, ...]:
        cfg, d, dv = self.cfg, self.cfg.width, self.cfg.width_v
        get = cpasync.CopyBulkTensorTileG2SOp()
        return (
            self.operand(get, mQ, (cfg.tile_m, d), cfg.stages),
            self.operand(get, mK, (64, d), cfg.key_tiles, cfg.key_parts),
            self.operand(get, mV, (64, dv), cfg.key_tiles),
            self.operand(get, mdO, (cfg.tile_m, dv), cfg.stages),
            *self.outputs(mdK, mdV),
        )

    def outputs(self, mdK, mdV) -> list[TmaOperand]:
        """In pieces of 64 columns, which fit dS's memory."""
        put, pieces = (
            cpasync.CopyBulkTensorTileS2GOp(),
            self.cfg.shared_tiles * self.cfg.tile_m // 64,
        )
        return [self.operand(put, t, (64, 64), pieces) for t in (mdK, mdV)]

    def operand(self, op, tensor, tile, stages, parts=1) -> TmaOperand:
        layout = tile_layout(self.dtype, tile, stages, columns=tile[1] // parts)
        one_tile = cute.select(layout, mode=[0, 1])
        atom, coords = cpasync.make_tiled_tma_atom(op, tensor, one_tile, tile)
        return TmaOperand(atom, coords, layout)

    @cute.kernel
    def kernel(self, x: Inputs, mmas: Mmas, shape: Shape, softmax_scale, scale_log2: Float32):
        cute.arch.griddepcontrol_launch_dependents()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = cutlass.memory.SmemAllocator().allocate(self.storage(x))
        smem = smem_tensors(self.cfg, shared, x)
        pipes = make_pipelines(self.cfg, self.dtype, shared, x)
        tile = self.only_tile(shape)
        if warp < 4:
            cute.arch.setmaxregister_decrease(REGISTERS[1])
            if warp == 0:
                self.load(x, smem, pipes, shape, tile)
            elif warp == 3:
                self.announce(smem, pipes, shape, tile)
            elif const_expr(self.cfg.deterministic):
                self.keep_order(x, smem, pipes, shape, tile, warp - 1)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[0])
            c = self.main.Consumer(self.cfg, self.problem, x, smem, mmas, pipes, shape, scale_log2)
            self.consume(c, warp // 4 - 1, tile, softmax_scale)

    def only_tile(self, shape: Shape):
        """None: a CTA draws tiles."""

    @cute.jit
    def load(self, x: Inputs, smem: Smem, pipes, shape: Shape, tile: None):
        bwd_load.load(self.cfg, self.problem.causal, x, smem, pipes, shape)

    @cute.jit
    def announce(self, smem: Smem, pipes, shape: Shape, tile: None):
        bwd_mainloop.announce(self.cfg, smem, pipes, shape)

    @cute.jit
    def keep_order(self, x: Inputs, smem: Smem, pipes, shape: Shape, tile: None, wg: Int32):
        causal, tickets = self.problem.causal, pipes.tickets
        bwd_turns.keep_order(self.cfg, causal, x, smem, tickets, shape, wg)

    @cute.jit
    def consume(self, c, wg: Int32, tile: None, softmax_scale: Float32):
        c = c.of_warpgroup(wg)
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        rings = c.first_slots()
        c.fill_operands()
        cute.arch.griddepcontrol_wait()  # dQ's zeros
        tile = bwd_tickets.receive(c.smem, c.pipes.tickets, at)
        while tile.n_block >= 0:
            c.pipes.k.consumer_wait(at)
            c.pipes.v.consumer_wait(at)
            c.wait_until_sent()
            rings = c.tile(tile, at, rings)
            c.finish(tile, softmax_scale, bwd_tickets.share_of(c.smem, at))
            at.advance()
            tile = bwd_tickets.receive(c.smem, c.pipes.tickets, at)
        c.wait_until_sent()

    def storage(self, x: Inputs):
        cfg, dtype = self.cfg, self.dtype

        def tile(layout):
            return cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout)], 1024]

        def ring(stages):
            return cute.struct.MemRange[cutlass.Int64, 2 * stages]

        def numbers(layout):
            kind = BFloat16 if cfg.folded else Float32
            return cute.struct.Align[cute.struct.MemRange[kind, cute.cosize(layout)], 128]

        @cute.struct
        class Storage:
            k_full: ring(1)
            v_full: ring(1)
            q_full: ring(cfg.stages)
            do_full: ring(cfg.stages)
            ds_full: ring(cfg.ds_slots)
            ticket_full: ring(1)
            tickets: cute.struct.MemRange[Int32, 8]
            statistics: numbers(statistics_layout(cfg))
            ones: numbers(ones_layout(cfg))
            k: tile(x.k.layout)
            v: tile(x.v.layout)
            q: tile(x.q.layout)
            do: tile(x.do.layout)
            ds: tile(x.ds)

        return Storage


@dataclass(frozen=True)
class Pipelines:
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    q: pipeline.PipelineTmaAsync
    do: pipeline.PipelineTmaAsync
    ds: pipeline.PipelineAsync  # only its full barriers: nobody waits for a free slot
    tickets: pipeline.PipelineAsync | None


def make_pipelines(cfg: Layout, dtype, storage, x: Inputs) -> Pipelines:
    """One producer thread, but of dS; every consumer warp releases a slot."""

    def group(n):
        return pipeline.CooperativeGroup(pipeline.Agent.Thread, n)

    def ring(barriers, stages, size):
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers.data_ptr(),
            num_stages=stages,
            producer_group=group(1),
            consumer_group=group(4 * cfg.warpgroups),
            tx_count=size,
            defer_sync=True,
        )

    def size(layout):
        return cute.size_in_bytes(dtype, cute.select(layout, mode=[0, 1]))

    def handshake(barriers, stages, writers, readers):
        return pipeline.PipelineAsync.create(
            barrier_storage=barriers.data_ptr(),
            num_stages=stages,
            producer_group=group(writers),
            consumer_group=group(readers),
            defer_sync=True,
        )

    tickets = None
    if cfg.persistent:
        readers = bwd_tickets.readers(cfg)
        tickets = handshake(storage.ticket_full, 1, 32, readers)
    pipes = Pipelines(
        ring(storage.k_full, 1, cfg.key_tiles * size(x.k.layout)),
        ring(storage.v_full, 1, cfg.key_tiles * size(x.v.layout)),
        ring(storage.q_full, cfg.stages, size(x.q.layout) + 4 * cfg.statistics),
        ring(storage.do_full, cfg.stages, size(x.do.layout)),
        handshake(storage.ds_full, cfg.ds_slots, cfg.ds_tiles, 1),
        tickets,
    )
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    return pipes


def one_step(rows: int, stages: int):
    """Of operands, without swizzle: eight columns of all rows lie after one another."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_INTER, BFloat16)
    return cute.tile_to_shape(atom, (rows, STEP, stages), order=(0, 1, 2)).outer


def statistics_layout(cfg: Layout):
    if cfg.folded:
        return one_step(cfg.tile_m, cfg.stages)
    return cute.make_layout((cfg.tile_m, 2, cfg.stages))


def ones_layout(cfg: Layout):
    return one_step(64, 2) if cfg.folded else cute.make_layout(1)


def smem_tensors(cfg: Layout, storage, x: Inputs) -> Smem:
    def view(field, layout):
        return field.get_tensor(layout.outer, swizzle=layout.inner)

    return Smem(
        view(storage.q, x.q.layout),
        view(storage.k, x.k.layout),
        view(storage.v, x.v.layout),
        view(storage.do, x.do.layout),
        view(storage.ds, x.ds),
        storage.statistics.get_tensor(statistics_layout(cfg)),
        storage.ones.get_tensor(ones_layout(cfg)),
        storage.tickets.get_tensor(cute.make_layout(8)),
        view(storage.ds, x.dk.layout) if cfg.persistent else None,
    )


def kernel_of(problem: Problem, config: BwdConfig) -> BackwardSm90:
    from cute_attn.kernels.hopper.bwd_wide import BackwardWideSm90  # which builds on this module

    return (BackwardWideSm90 if config.wide(problem) else BackwardSm90)(problem, config)


def compile_bwd(problem: Problem, config: BwdConfig, options: str = ""):
    """Compile for the target in CUTE_DSL_ARCH; needs no GPU and no torch."""
    kernel = kernel_of(problem, config)
    b, sq, sk, hq, hk, d, dv, blocks, words = (cute.sym_int32() for _ in range(9))

    def tensor(s, h, width):
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return cute.runtime.make_fake_tensor(
            kernel.dtype, (b, s, h, width), (*strides, 1), assumed_align=16
        )

    def of_rows():
        strides = tuple(cute.sym_int64() for _ in range(3))
        return cute.runtime.make_fake_tensor(Float32, (b, hq, sq), strides, assumed_align=4)

    def scratch(*shape):
        return cute.runtime.make_fake_compact_tensor(
            Float32, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=16
        )

    q, dq, o, do = tensor(sq, hq, d), tensor(sq, hq, d), tensor(sq, hq, dv), tensor(sq, hq, dv)
    k, dk, v, dvalue = tensor(sk, hk, d), tensor(sk, hk, d), tensor(sk, hk, dv), tensor(sk, hk, dv)
    block = kernel.cfg.tile_m * kernel.cfg.width
    for part in (kernel.kernel, kernel.__call__):
        part.set_name_prefix(kernel.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        kernel, q, k, v, o, do, of_rows(), of_rows(), dq, dk, dvalue,
        scratch(b, hq, blocks, config.block_words(problem)), scratch(b, hq, blocks, block),
        scratch(words), Int32(1), Int32(1), Int32(1), Float32(1.0), Float32(1.0), stream,
        options=f"--enable-tvm-ffi {options}",
    )  # fmt: skip
