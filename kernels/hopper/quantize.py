"""q, k and v in 16 bits -> e4m3, in two or three launches of one call (cute_attn.quantize has the
steps and what they leave as it is):

measure  (quantize_stats.py)    what must be known of whole sequences: with shifts and balance
                                given, the largest values of V alone
combine  (quantize_combine.py)  vectors and scales of heads from it
cast     (quantize_rows.py, quantize_v.py)  one pass over q, k and v

Where scales of K belong to blocks that no tile of 128 keys holds, a pass over K before the last one
measures them. Each launch begins before the one ahead of it ends, and waits for its end before it
reads what that wrote; the first does not.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_attn.config import QuantizeConfig, QuantizeSizes
from cute_attn.kernels.hopper import quantize_combine as combining
from cute_attn.kernels.hopper import quantize_rows, quantize_v
from cute_attn.kernels.hopper import quantize_stats as stats
from cute_attn.kernels.hopper.fwd import DTYPES, LSE, ROWS, reordered
from cute_attn.kernels.hopper.quantize_operands import (
    PARTS,
    TRANSPOSED,
    Layout,
    Sizes,
    Tensors,
    backwards,
    carved,
    compact,
    heads_only,
    maybe,
    of_head,
    per_tensor,
    place,
    shared_words,
)
from cute_attn.problem import Problem

RANGES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": Float32}
CARVEOUT = 50  # percent of an SM's memory as shared; left out, the compiler would ask a GPU


class QuantizeSm90:
    def __init__(self, problem: Problem, config: QuantizeConfig):
        self.cfg, self.layout = config, Layout(problem, config)
        self.dtype = DTYPES[problem.dtype]
        self.name = (
            f"cute_attn_quantize_sm90_{problem.dtype}_d{problem.head_dim}_dv{problem.head_dim_v}"
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        k_shift: cute.Tensor,
        v_shift: cute.Tensor,
        given: cute.Tensor,
        balance: cute.Tensor,
        signs: cute.Tensor,
        q8: cute.Tensor,
        k8: cute.Tensor,
        out_v: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        dots: cute.Tensor,
        scratch: cute.Tensor,
        q_rows: Int32,
        k_rows: Int32,
        k_block: Int32,
        stream: cuda.CUstream,
    ):
        """Tensors as torch has them: q (batch, seqlen_q, heads_q, head_dim), q_scale (batch,
        heads_q, seqlen_q), shifts and balance ([batch,] heads_kv, width), vt (batch, heads_kv,
        head_dim_v, padded keys), v_scale (batch, heads_kv[, head_dim_v]). scratch: fp32 of
        config.scratch_shapes. q_rows, k_rows: of a chunk."""
        sizes = QuantizeSizes(
            *(q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3]),
            *(cute.ceil_div(t.shape[1], rows) for t, rows in ((q, q_rows), (k, k_rows))),
            cute.ceil_div(k.shape[1], quantize_rows.WARP_ROWS),
        )
        factors, *parts, maxima = carved(scratch, self.cfg.scratch_shapes(sizes))
        x = Tensors(
            *(reordered(t, ROWS) for t in (q, k, v)),
            cos,
            sin,
            *(backwards(t) for t in (k_shift, v_shift, given, balance)),
            signs,
            per_tensor(factors),
            *(maybe(t, ROWS) for t in (q8, k8)),
            maybe(out_v, TRANSPOSED if self.cfg.transposed else ROWS),
            *(maybe(t, LSE) for t in (q_scale, k_scale)),
            maybe(v_scale, LSE) if self.cfg.v_by_channel else heads_only(v_scale),
            *(maybe(t, LSE) for t in (dots, maxima)),
            *(maybe(t, PARTS) for t in parts),
        )
        self.launch_all(x, Sizes(q_rows, k_rows, k_block), stream)

    @cute.jit
    def launch_all(self, x: Tensors, sizes: Sizes, stream: cuda.CUstream):
        cfg = self.cfg
        heads = Int32(x.k.shape[2] * x.k.shape[3])
        if const_expr(cfg.measures):
            grid = sum(self.chunks(x))
            self.measure(x, sizes).launch(
                grid=(grid, 1, 1), block=(stats.THREADS, 1, 1), stream=stream
            )
        if const_expr(cfg.measures or cfg.scaled):
            grid = Int32(x.k.shape[2]) if const_expr(cfg.statistics) else heads
            self.combine(x).launch(
                grid=(grid, 1, 1),
                block=(combining.THREADS, 1, 1),
                stream=stream,
                min_blocks_per_mp=1,  # else the assembler spills to fit two
                use_pdl=cfg.measures,
            )
        if const_expr(not cfg.statistics):
            if const_expr(cfg.k_block == 0):
                self.launch_key_scales(x, sizes, stream)
            self.cast(x, sizes).launch(
                grid=(sum(self.tiles(x)), 1, 1),
                block=(quantize_rows.THREADS, 1, 1),
                stream=stream,
                min_blocks_per_mp=self.layout.block_min,
                preferred_smem_carveout=CARVEOUT,
                use_pdl=cfg.measures or cfg.scaled,
            )

    @cute.jit
    def launch_key_scales(self, x: Tensors, sizes: Sizes, stream: cuda.CUstream):
        cfg, blocks = self.cfg, cute.size(x.k_scale)
        self.measure_keys(x).launch(
            grid=(self.tiles(x)[1], 1, 1),
            block=(quantize_rows.THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.layout.block_min,
            preferred_smem_carveout=CARVEOUT,
            use_pdl=cfg.measures or cfg.scaled,
        )
        groups = sizes.k_block // quantize_rows.WARP_ROWS
        combining.scale_blocks(x.maxima, x.k_scale, groups).launch(
            grid=(cute.ceil_div(blocks, combining.WARPS), 1, 1),
            block=(combining.THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    # CTAs of q, k and v

    def chunks(self, x: Tensors) -> list[Int32]:
        return [
            Int32(parts.shape[1] * parts.shape[3]) if parts is not None else Int32(0)
            for parts in (x.q_parts, x.k_parts, x.v_parts)
        ]

    def tiles(self, x: Tensors) -> list[Int32]:
        rows = quantize_rows.ROWS * self.cfg.tiles
        of_rows = [
            Int32(cute.ceil_div(t.shape[0], rows) * t.shape[2] * t.shape[3]) for t in (x.q, x.k)
        ]
        return [*of_rows, Int32(self.v_blocks(x) * x.v.shape[2] * x.v.shape[3])]

    def v_blocks(self, x: Tensors):
        if x.out_v is None:
            return 0
        if self.cfg.transposed:
            return cute.ceil_div(x.out_v.shape[1], self.layout.v_plan.keys)
        return cute.ceil_div(x.v.shape[0], self.layout.shift_keys)

    # Launches

    @cute.kernel
    def measure(self, x: Tensors, sizes: Sizes):
        """V comes last: the last pass finds the most of it in the L2 cache when it begins there."""
        cute.arch.griddepcontrol_launch_dependents()
        cfg, index = self.cfg, cute.arch.block_idx()[0]
        stage = shared_words(stats.THREADS * stats.VECTOR, Float32)
        of_q, of_k, _ = self.chunks(x)
        if index < of_q:
            if const_expr(len(cfg.q_kinds) > 0):
                self.measure_part(cfg.q_kinds, x, x.q, x.q_parts, stage, index, sizes.q_rows)
        elif index < of_q + of_k:
            if const_expr(len(cfg.k_kinds) > 0):
                at = index - of_q
                self.measure_part(cfg.k_kinds, x, x.k, x.k_parts, stage, at, sizes.k_rows)
        else:
            if const_expr(len(cfg.v_kinds) > 0):
                at = index - of_q - of_k
                self.measure_part(cfg.v_kinds, x, x.v, x.v_parts, stage, at, sizes.k_rows)

    @cute.jit
    def measure_part(
        self,
        kinds: cutlass.Constexpr,
        x: Tensors,
        t: cute.Tensor,
        parts: cute.Tensor,
        stage: cute.Tensor,
        index: Int32,
        rows: Int32,
    ):
        all_chunks, heads = parts.shape[1], parts.shape[3]
        head, chunk = index % heads, index // heads
        chunks = all_chunks // t.shape[3]
        batch = chunk // chunks
        of_v = const_expr(t is x.v)
        rope = const_expr(self.layout.rope and not of_v)
        m = stats.Measured(
            t[None, None, head, batch],
            x.cos if rope else None,
            x.sin if rope else None,
            self.pivot(x, head, batch) if const_expr(t is x.k) else None,
            parts[None, chunk, None, head],
        )
        lanes = stats.lanes_of(self.layout.problem.tile_dim_v if of_v else self.layout.dim)
        shape = stats.Shape(kinds, lanes, self.layout.half if rope else 0)
        stats.measure_chunk(shape, m, stage, (chunk - batch * chunks) * rows, rows)

    def pivot(self, x: Tensors, head: Int32, batch: Int32):
        """What sums of K are taken about: its shift where that is known, else the first key of the
        batch, or of all of them."""
        if self.cfg.k_shift == "none":
            return None
        if self.cfg.k_shift == "measured":
            return x.k[None, None, head, 0 if self.cfg.statistics else batch]
        return of_head(x.k_shift, head, batch)

    @cute.kernel
    def combine(self, x: Tensors):
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.cfg.measures):
            cute.arch.griddepcontrol_wait()
        index, heads = cute.arch.block_idx()[0], Int32(x.k.shape[2])
        batch = index // heads
        head = index - batch * heads
        stage = shared_words(combining.THREADS, Float32)
        self.combine_qk(x, stage, head, batch)
        if const_expr(len(self.cfg.v_kinds) > 0):
            self.combine_v(x, stage, head, batch)

    @cute.jit
    def parts(self, t: cute.Tensor, x: Tensors, batch: Int32, first_head: Int32):
        chunks = t.shape[1]
        if const_expr(not self.cfg.statistics):
            chunks = chunks // x.k.shape[3]
        return combining.Parts(t, batch * chunks, Int32(chunks), first_head)

    @cute.jit
    def combine_qk(self, x: Tensors, stage: cute.Tensor, head: Int32, batch: Int32):
        cfg, tidx, group = self.cfg, cute.arch.thread_idx()[0], Int32(x.q.shape[2] // x.k.shape[2])
        of_k, of_q = combining.Moments(Float32(0.0), Float32(0.0)), Float32(0.0)
        if const_expr(len(cfg.k_kinds) > 0):
            parts = self.parts(x.k_parts, x, batch, head)
            of_k = combining.moments(cfg.k_kinds, parts, Int32(1), stage)
        if const_expr(cfg.k_shift == "measured"):
            if tidx < self.layout.dim:
                of_head(x.k_shift, head, batch)[tidx] = of_k.mean
        if const_expr(len(cfg.q_kinds) > 0):
            parts = self.parts(x.q_parts, x, batch, head * group)
            of_q = combining.moments(cfg.q_kinds, parts, group, stage).square
        if const_expr(cfg.scaled):
            if tidx < self.layout.dim:
                self.write_factors(x, of_k.square, of_q, head, batch)

    @cute.jit
    def write_factors(self, x: Tensors, of_k: Float32, of_q: Float32, head: Int32, batch: Int32):
        """A batch writes what others share: all write the same."""
        channel = cute.arch.thread_idx()[0]
        if const_expr(self.cfg.balance == "measured"):
            power = combining.balance_of(of_k, of_q)
        else:
            power = combining.power_of_two(of_head(x.given, head, batch)[channel])
        of_head(x.balance, head, batch)[channel] = power
        if const_expr(not self.cfg.statistics):
            sign = x.signs[channel] if const_expr(self.cfg.hadamard) else Float32(1.0)
            for i, factor in enumerate((sign * power, sign / power)):
                self.factor(x, i, head, batch)[channel] = factor

    def factor(self, x: Tensors, which: int, head: Int32, batch: Int32):
        return of_head(x.factors[which], head, batch) if self.cfg.scaled else None

    @cute.jit
    def combine_v(self, x: Tensors, stage: cute.Tensor, head: Int32, batch: Int32):
        cfg, tidx, width = self.cfg, cute.arch.thread_idx()[0], x.v.shape[1]
        parts, shift = self.parts(x.v_parts, x, batch, head), Float32(0.0)
        at = combining.channel_of(width)
        if const_expr(cfg.v_shift == "measured"):
            shift = combining.moments(cfg.v_kinds, parts, Int32(1), stage).mean
            if tidx < width:
                of_head(x.v_shift, head, batch)[tidx] = shift
        elif const_expr(cfg.v_shift != "none"):
            shift = of_head(x.v_shift, head, batch)[at]
        if const_expr(cfg.transposed):
            top = combining.largest_distance(cfg.v_kinds, parts, shift, stage)
            if const_expr(cfg.v_by_channel):
                if tidx < width:
                    x.v_scale[tidx, head, batch] = quantize_rows.scale_of(top)
            else:
                top = combining.largest_of_cta(top, stage)
                if tidx == 0:
                    x.v_scale[0, head, batch] = quantize_rows.scale_of(top)

    @cute.kernel
    def measure_keys(self, x: Tensors):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        blocks = cute.ceil_div(x.k.shape[0], quantize_rows.ROWS * self.cfg.tiles)
        group, head, batch = place(cute.arch.block_idx()[0], blocks, x.k.shape[2])
        quantize_rows.measure_keys(
            self.layout,
            self.head(x, x.k, head, head, batch),
            self.table(shared_words(2 * self.layout.dim, Float32)),
            x.maxima[None, head, batch],
            group * self.cfg.tiles,
        )

    @cute.kernel
    def cast(self, x: Tensors, sizes: Sizes):
        """V comes first and from its end, which the L2 cache may still hold."""
        cute.arch.griddepcontrol_wait()
        index = cute.arch.block_idx()[0]
        of_q, of_k, of_v = self.tiles(x)
        rows_words = 2 * (self.layout.dim + quantize_rows.WARPS)
        stage = shared_words(max(self.stage_words(), rows_words), Int32)
        if index < of_v:
            if const_expr(x.out_v is not None):
                self.cast_v(x, stage, of_v - 1 - index)
        elif index < of_v + of_k:
            self.cast_keys(x, stage, index - of_v, sizes.k_block)
        else:
            self.cast_queries(x, stage, index - of_v - of_k)

    def stage_words(self) -> int:
        p = self.layout.v_plan
        return p.channels * p.words if self.cfg.transposed else 0

    @cute.jit
    def cast_keys(self, x: Tensors, stage: cute.Tensor, index: Int32, block: Int32):
        blocks = cute.ceil_div(x.k.shape[0], quantize_rows.ROWS * self.cfg.tiles)
        group, head, batch = place(index, blocks, x.k.shape[2])
        table = self.table(stage)
        maxima = cute.make_tensor(
            table.iterator + cute.size(table), cute.make_layout((quantize_rows.WARPS, 2))
        )
        of_k, first = self.head(x, x.k, head, head, batch), group * self.cfg.tiles
        quantize_rows.quantise_keys(self.layout, of_k, table, maxima, first, block)

    def table(self, stage: cute.Tensor):
        shape = cute.make_layout((2, self.layout.dim), stride=(self.layout.dim, 1))
        return cute.make_tensor(cute.recast_ptr(stage.iterator, dtype=Float32), shape)

    @cute.jit
    def cast_queries(self, x: Tensors, stage: cute.Tensor, index: Int32):
        blocks = cute.ceil_div(x.q.shape[0], quantize_rows.ROWS * self.cfg.tiles)
        group, head, batch = place(index, blocks, x.q.shape[2])
        kv_head = head // (x.q.shape[2] // x.k.shape[2])
        dots = x.dots[None, head, batch] if const_expr(x.dots is not None) else None
        of_q = self.head(x, x.q, head, kv_head, batch)
        first = group * self.cfg.tiles
        quantize_rows.quantise_queries(self.layout, of_q, dots, self.table(stage), first)

    def head(self, x: Tensors, t, head: Int32, kv_head: Int32, batch: Int32):
        keys = t is x.k
        out, scale = (x.k8, x.k_scale) if keys else (x.q8, x.q_scale)
        return quantize_rows.Head(
            t[None, None, head, batch],
            x.cos,
            x.sin,
            None if x.k_shift is None else of_head(x.k_shift, kv_head, batch),
            self.factor(x, int(keys), kv_head, batch),
            out[None, None, head, batch],
            scale[None, head, batch],
        )

    @cute.jit
    def cast_v(self, x: Tensors, stage: cute.Tensor, index: Int32):
        tile, head, batch = place(index, Int32(self.v_blocks(x)), x.v.shape[2])
        v, out = x.v[None, None, head, batch], x.out_v[None, None, head, batch]
        shift = None if const_expr(x.v_shift is None) else of_head(x.v_shift, head, batch)
        if const_expr(self.cfg.transposed):
            of_v = quantize_v.Values(v, out, shift, x.v_scale[None, head, batch])
            quantize_v.transpose_tile(self.layout.v_plan, of_v, stage, tile)
        else:
            quantize_v.shift_tile(self.layout, v, shift, out, tile)


# Compiling


def compile_quantize(problem: Problem, config: QuantizeConfig, options: str = ""):
    """Compile for the target in CUTE_DSL_ARCH; needs no GPU and no torch."""
    kernel = QuantizeSm90(problem, config)
    for part in (kernel.measure, kernel.combine, kernel.measure_keys, kernel.cast, kernel.__call__):
        part.set_name_prefix(kernel.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        kernel, *fake_tensors(kernel, problem.head_dim), Int32(1), Int32(1), Int32(1), stream,
        options=f"--enable-tvm-ffi {options}",
    )  # fmt: skip


def fake_tensors(kernel: QuantizeSm90, d: int) -> list:
    """What __call__ takes, in its order; None as in Tensors."""
    cfg, whole = kernel.cfg, not kernel.cfg.statistics
    b, sq, sk, hq, hk, dv, padded, blocks = (cute.sym_int32() for _ in range(8))

    def tensor(s, h, width):
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return cute.runtime.make_fake_tensor(
            kernel.dtype, (b, s, h, width), (*strides, 1), assumed_align=16
        )

    def angles():
        size = RANGES[cfg.rope].width // 8
        align = 16 if cfg.half % 8 == 0 else size
        row = cute.sym_int64(divisibility=align // size)
        return cute.runtime.make_fake_tensor(
            RANGES[cfg.rope], (cute.sym_int32(), cfg.half), (row, 1), assumed_align=align
        )

    def of_heads(source, width):
        if source == "none":
            return None
        one = source == "head" or not whole
        return compact(Float32, *(() if one else (b,)), hk, width)

    e4m3 = cutlass.Float8E4M3FN
    balance = of_heads(cfg.balance, d)
    given = None if cfg.balance == "measured" else balance
    out_v = None
    if cfg.transposed:
        out_v = compact(e4m3, b, hk, dv, padded)
    elif whole and cfg.v_shift != "none":
        out_v = compact(kernel.dtype, b, sk, hk, dv)
    return [
        tensor(sq, hq, d),
        tensor(sk, hk, d),
        tensor(sk, hk, dv),
        *((angles(), angles()) if cfg.rope else (None, None)),
        of_heads(cfg.k_shift, d),
        of_heads(cfg.v_shift, dv),
        given,
        balance,
        compact(Float32, d) if cfg.hadamard and whole else None,
        *((compact(e4m3, b, sq, hq, d), compact(e4m3, b, sk, hk, d)) if whole else (None, None)),
        out_v,
        compact(Float32, b, hq, sq) if whole else None,
        compact(Float32, b, hk, blocks) if whole else None,
        compact(Float32, b, hk, *((dv,) if cfg.v_by_channel else ())) if cfg.transposed else None,
        compact(Float32, b, hq, sq) if whole and cfg.k_shift != "none" else None,
        compact(Float32, cute.sym_int32()),
    ]
