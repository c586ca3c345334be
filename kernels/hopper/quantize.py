"""q, k and v in 16 bits -> e4m3, in the launches of one call (cute_attn.quantize has the steps and
what they leave as it is):

measure  (quantize_stats.py)    what must be known of whole sequences before anything is cast
combine  (quantize_combine.py)  vectors and scales of heads from it
cast_v   (quantize_v.py)        V
cast     (quantize_rows.py)     q and K; quantize_products.py where tensor cores transform them

With shifts and balance given all but V's scales is known, so that q and K are cast at once:

cast     (as above, quantize_tops.py)  q and K, and the largest values of V
cast_v   (quantize_v.py)               V

Where scales of K belong to blocks that no tile of 128 keys holds, a pass over K before the cast
measures them. Each launch begins before the one ahead of it ends, and waits for its end before it
reads what that wrote; the first does not. All others wait, if only at their end: who waits for one
of them waits for all that went before.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_attn.config import HIGH, LOW, QuantizeConfig, QuantizeSizes
from cute_attn.kernels.hopper import (
    quantize_balance,
    quantize_products,
    quantize_rows,
    quantize_slots,
    quantize_tops,
    quantize_v,
)
from cute_attn.kernels.hopper import quantize_combine as combining
from cute_attn.kernels.hopper import quantize_stats as stats
from cute_attn.kernels.hopper.fwd import DTYPES, LSE, ROWS, reordered
from cute_attn.kernels.hopper.quantize_operands import (
    PARTS,
    TOPS,
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
# percent of an SM's memory as shared; left out, the compiler would ask a GPU. One for all launches:
# an SM that has to divide it anew runs nothing meanwhile, and two launches not side by side
CARVEOUT = 100
SLOTS = 264  # CTAs of rows that a large GPU holds: a call has twice as many, or one tile each


class QuantizeSm90:
    def __init__(self, problem: Problem, config: QuantizeConfig):
        self.cfg, self.layout = config, Layout(problem, config)
        self.dtype = DTYPES[problem.dtype]
        self.rows = quantize_products if self.layout.products else quantize_rows
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
        factors, *parts, tops, maxima = carved(scratch, self.cfg.scratch_shapes(sizes))
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
            maybe(dots, LSE),
            maybe(tops, TOPS),
            maybe(maxima, LSE),
            *(maybe(t, PARTS) for t in parts),
        )
        rows = sum(cute.ceil_div(t.shape[0], quantize_rows.ROWS) * heads_of(t) for t in (x.q, x.k))
        tiles = cutlass.max(cutlass.min(Int32(rows) // (2 * SLOTS), self.cfg.tiles), 1)
        self.launch_all(x, Sizes(q_rows, k_rows, k_block, tiles), stream)

    @cute.jit
    def launch_all(self, x: Tensors, sizes: Sizes, stream: cuda.CUstream):
        cfg = self.cfg
        if const_expr(cfg.measures):
            self.measure(x, sizes).launch(
                grid=(sum(self.chunks(x)), 1, 1), block=(stats.THREADS, 1, 1), stream=stream
            )
            heads = Int32(x.k.shape[2]) if const_expr(cfg.statistics) else heads_of(x.k)
            self.combine(x).launch(
                grid=(heads, len(self.combined), 1),
                block=(combining.THREADS, 1, 1),
                stream=stream,
                min_blocks_per_mp=1,  # else the assembler spills to fit two
                use_pdl=True,
            )
        if const_expr(not cfg.statistics):
            if const_expr(cfg.k_block == 0):
                self.launch_key_scales(x, sizes, stream)
            if const_expr(not cfg.direct):
                self.launch_v(x, stream)
            self.cast(x, sizes).launch(
                grid=(sum(self.tiles(x, sizes)), 1, 1),
                block=(self.layout.threads, 1, 1),
                stream=stream,
                min_blocks_per_mp=self.layout.block_min,
                preferred_smem_carveout=CARVEOUT,
                use_pdl=cfg.measures or cfg.k_block == 0,
            )
            if const_expr(cfg.direct):
                self.launch_v(x, stream)

    @cute.jit
    def launch_v(self, x: Tensors, stream: cuda.CUstream):
        if const_expr(x.out_v is not None):
            self.cast_v(x).launch(
                grid=(self.v_tiles(x), 1, 1),
                block=(quantize_v.THREADS, 1, 1),
                stream=stream,
                # three strips are three chunks of a warp, which 64 registers do not hold
                min_blocks_per_mp=1 if self.layout.v_plan.strips == 3 else 2,
                preferred_smem_carveout=CARVEOUT,
                use_pdl=True,
            )

    @cute.jit
    def launch_key_scales(self, x: Tensors, sizes: Sizes, stream: cuda.CUstream):
        cfg, blocks = self.cfg, cute.size(x.k_scale)
        self.measure_keys(x, sizes).launch(
            grid=(self.tiles(x, sizes)[1], 1, 1),
            block=(quantize_rows.THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.layout.block_min,
            preferred_smem_carveout=CARVEOUT,
            use_pdl=cfg.measures,
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

    def tiles(self, x: Tensors, sizes: Sizes) -> list[Int32]:
        """CTAs with rows of q and of k, and those that look for V's largest values."""
        rows = quantize_rows.ROWS * sizes.tiles
        of_rows = [Int32(cute.ceil_div(t.shape[0], rows) * heads_of(t)) for t in (x.q, x.k)]
        return [*of_rows, Int32(0 if x.tops is None else x.tops.shape[1] * heads_of(x.v))]

    def v_tiles(self, x: Tensors) -> Int32:
        return Int32(self.v_blocks(x) * heads_of(x.v))

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

    @property
    def combined(self) -> list[str]:
        """What has CTAs of its own."""
        cfg = self.cfg
        both = ("qk", cfg.q_kinds or cfg.k_kinds), ("v", cfg.v_kinds)
        return [name for name, kinds in both if kinds]

    @cute.kernel
    def combine(self, x: Tensors):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        heads, (index, part, _) = Int32(x.k.shape[2]), cute.arch.block_idx()
        batch = index // heads
        head = index - batch * heads
        kinds = max(len(kinds) for kinds in (self.cfg.q_kinds, self.cfg.k_kinds, self.cfg.v_kinds))
        stage = shared_words(kinds * combining.THREADS, Float32)
        for n in cutlass.range_constexpr(len(self.combined)):
            if part == n:
                if const_expr(self.combined[n] == "qk"):
                    self.combine_qk(x, stage, head, batch)
                else:
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
            of_k = self.moments(cfg.k_kinds, x, x.k_parts, batch, head, 1, stage)
        if const_expr(cfg.k_shift == "measured"):
            if tidx < self.layout.dim:
                of_head(x.k_shift, head, batch)[tidx] = of_k.mean
        if const_expr(cfg.balance == "measured"):
            first = head * group
            of_q = self.moments(cfg.q_kinds, x, x.q_parts, batch, first, group, stage).square
            if tidx < self.layout.dim:
                self.write_factors(x, of_k.square, of_q, head, batch)

    def moments(self, kinds, x: Tensors, parts, batch: Int32, first: Int32, heads, stage):
        of_heads = self.parts(parts, x, batch, first)
        return combining.moments(kinds, combining.totals(kinds, of_heads, heads, stage))

    @cute.jit
    def write_factors(self, x: Tensors, of_k: Float32, of_q: Float32, head: Int32, batch: Int32):
        channel = cute.arch.thread_idx()[0]
        power = quantize_balance.balance_of(of_k, of_q)
        of_head(x.balance, head, batch)[channel] = power
        if const_expr(not self.cfg.statistics):
            sign = x.signs[channel] if const_expr(self.cfg.hadamard) else Float32(1.0)
            for i, factor in enumerate((sign * power, sign / power)):
                of_head(x.factors[i], head, batch)[channel] = factor

    @cute.jit
    def combine_v(self, x: Tensors, stage: cute.Tensor, head: Int32, batch: Int32):
        cfg, tidx, width = self.cfg, cute.arch.thread_idx()[0], x.v.shape[1]
        kinds, shift = cfg.v_kinds, Float32(0.0)
        totals = combining.totals(kinds, self.parts(x.v_parts, x, batch, head), 1, stage)
        at = combining.channel_of(width)
        if const_expr(cfg.v_shift == "measured"):
            shift = combining.moments(kinds, totals).mean
            if tidx < width:
                of_head(x.v_shift, head, batch)[tidx] = shift
        elif const_expr(cfg.v_shift != "none"):
            shift = of_head(x.v_shift, head, batch)[at]
        if const_expr(cfg.transposed):
            low, high = (totals[kinds.index(kind)] for kind in (LOW, HIGH))
            top = combining.largest_distance(low, high, shift)
            if const_expr(cfg.v_by_channel):
                if tidx < width:
                    x.v_scale[tidx, head, batch] = quantize_rows.scale_of(top)
            else:
                top = combining.largest_of_cta(top, stage)
                if tidx == 0:
                    x.v_scale[0, head, batch] = quantize_rows.scale_of(top)

    @cute.kernel
    def measure_keys(self, x: Tensors, sizes: Sizes):
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.cfg.measures):
            cute.arch.griddepcontrol_wait()
        stage = self.rows_stage(shared_words(self.rows_words(), Int32))
        head, batch, tiles = self.rows_of(x.k, cute.arch.block_idx()[0], sizes)
        of_k = self.head(x, x.k, head, head, batch)
        quantize_rows.measure_keys(self.layout, of_k, stage, tiles, x.maxima[None, head, batch])

    @cute.kernel
    def cast(self, x: Tensors, sizes: Sizes):
        """V's largest values come last: cast_v finds V in the L2 cache."""
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.cfg.measures or self.cfg.k_block == 0):
            cute.arch.griddepcontrol_wait()
        of_q, of_k, _ = self.tiles(x, sizes)
        index, words = cute.arch.block_idx()[0], shared_words(self.rows_words(), Int32)
        if index < of_k:
            head, batch, tiles = self.rows_of(x.k, index, sizes)
            of_rows, stage = self.head(x, x.k, head, head, batch), self.rows_stage(words)
            self.rows.quantise_keys(self.layout, of_rows, stage, tiles, sizes.k_block)
        elif index < of_k + of_q:
            head, batch, tiles = self.rows_of(x.q, index - of_k, sizes)
            of_kv = head // (x.q.shape[2] // x.k.shape[2])
            of_rows, stage = self.head(x, x.q, head, of_kv, batch), self.rows_stage(words)
            dots = x.dots[None, head, batch] if const_expr(x.dots is not None) else None
            self.rows.quantise_queries(self.layout, of_rows, dots, stage, tiles)
        else:
            if const_expr(x.tops is not None):
                self.measure_tops(x, words, index - of_q - of_k, sizes.k_rows)

    @cute.kernel
    def cast_v(self, x: Tensors):
        """From V's end, which the L2 cache may still hold."""
        cute.arch.griddepcontrol_launch_dependents()
        cfg = self.cfg
        if const_expr(cfg.measures):
            cute.arch.griddepcontrol_wait()
        tile = self.v_tiles(x) - 1 - cute.arch.block_idx()[0]
        tile, head, batch = place(tile, Int32(self.v_blocks(x)), x.v.shape[2])
        v, out = x.v[None, None, head, batch], x.out_v[None, None, head, batch]
        shift = None if const_expr(x.v_shift is None) else of_head(x.v_shift, head, batch)
        if const_expr(cfg.transposed):
            plan = self.layout.v_plan
            stage = shared_words(self.stage_words(), Int32)
            read = quantize_v.read_tile(plan, v, shift, tile)
            if const_expr(not cfg.measures):  # V is on its way meanwhile
                cute.arch.griddepcontrol_wait()
            of_v = quantize_v.Values(v, out, self.scale_of_v(x, tile, head, batch))
            quantize_v.transpose_tile(plan, of_v, read, stage, tile)
        else:
            quantize_v.shift_tile(self.layout, v, shift, out, tile)
            if const_expr(not cfg.measures):
                cute.arch.griddepcontrol_wait()

    @cute.jit
    def scale_of_v(self, x: Tensors, tile: Int32, head: Int32, batch: Int32):
        """Of channels, in shared memory, or one."""
        tidx, scale = cute.arch.thread_idx()[0], x.v_scale[None, head, batch]
        if const_expr(self.cfg.v_by_channel):
            return self.scales_of_v(x, tile, head, batch)
        elif const_expr(x.tops is None):
            return scale[0]
        else:
            largest = quantize_tops.largest_of(x.tops[None, None, head, batch])
            if tile == 0 and tidx == 0:
                scale[0] = quantize_rows.scale_of(largest)
            return quantize_rows.scale_of(largest)

    @cute.jit
    def scales_of_v(self, x: Tensors, tile: Int32, head: Int32, batch: Int32):
        tidx, width = cute.arch.thread_idx()[0], x.v.shape[1]
        scales = shared_words(quantize_v.THREADS, Float32)
        if const_expr(x.tops is None):
            if tidx < width:
                scales[tidx] = x.v_scale[tidx, head, batch]
            cute.arch.barrier()
        else:
            of_head = x.tops[None, None, head, batch]
            quantize_tops.scales_of(of_head, scales, self.layout.v_plan.channels)
            if tile == 0 and tidx < width:
                x.v_scale[tidx, head, batch] = scales[tidx]
        return scales

    # Shared memory of a CTA

    def stage_words(self) -> int:
        p = self.layout.v_plan
        return p.channels * p.words if self.cfg.transposed else 0

    def rows_words(self) -> int:
        if self.layout.products:
            words = quantize_products.stage_words(self.layout)
        else:
            raw = quantize_slots.words(self.layout) // 2
            words = raw + 2 * (self.layout.dim + quantize_rows.WARPS)
        return max(words, self.tops_words() if self.cfg.v_by_channel else 0)

    def tops_words(self) -> int:
        return self.layout.threads * quantize_tops.VECTOR

    def rows_stage(self, words: cute.Tensor) -> quantize_rows.Stage | quantize_products.Stage:
        if self.layout.products:
            return quantize_products.stage_of(self.layout, words, self.dtype)
        d, warps = self.layout.dim, quantize_rows.WARPS
        raw = quantize_slots.words(self.layout)
        table = cute.recast_ptr(words.iterator + raw // 2, dtype=Float32)
        return quantize_rows.Stage(
            cute.make_tensor(cute.recast_ptr(words.iterator, dtype=self.dtype), raw),
            cute.make_tensor(table, cute.make_layout((2, d), stride=(d, 1))),
            cute.make_tensor(table + 2 * d, cute.make_layout((warps, 2))),
        )

    # What a CTA works on

    @cute.jit
    def rows_of(self, t: cute.Tensor, index: Int32, sizes: Sizes):
        """(head, batch, (first tile, tiles)) of q or K."""
        tiles = cute.ceil_div(t.shape[0], quantize_rows.ROWS)
        group, head, batch = place(index, cute.ceil_div(tiles, sizes.tiles), t.shape[2])
        first = group * sizes.tiles
        return head, batch, (first, cutlass.min(sizes.tiles, tiles - first))

    def head(self, x: Tensors, t, head: Int32, kv_head: Int32, batch: Int32):
        keys = t is x.k
        out, scale = (x.k8, x.k_scale) if keys else (x.q8, x.q_scale)
        shift, given, balance = (
            None if t is None else of_head(t, kv_head, batch)
            for t in (x.k_shift, x.given, x.balance if keys else None)
        )
        measured = None if x.factors is None else of_head(x.factors[int(keys)], kv_head, batch)
        return quantize_rows.Head(
            t[None, None, head, batch],
            x.cos,
            x.sin,
            shift,
            quantize_rows.Factors(measured, given, x.signs, balance),
            out[None, None, head, batch],
            scale[None, head, batch],
        )

    @cute.jit
    def measure_tops(self, x: Tensors, words: cute.Tensor, index: Int32, rows: Int32):
        chunk, head, batch = place(index, x.tops.shape[1], x.v.shape[2])
        first = chunk * rows
        quantize_tops.measure_chunk(
            quantize_tops.Shape(
                self.layout.problem.dtype,
                self.layout.threads,
                self.layout.lanes_v,
                self.layout.v_ahead,
                self.cfg.v_by_channel,
            ),
            x.v[None, None, head, batch],
            None if const_expr(x.v_shift is None) else of_head(x.v_shift, head, batch),
            x.tops[None, chunk, head, batch],
            cute.make_tensor(cute.recast_ptr(words.iterator, dtype=Float32), self.tops_words()),
            (first, cutlass.min(first + rows, x.v.shape[0])),
        )


def heads_of(t: cute.Tensor):
    """Of all batches."""
    return t.shape[2] * t.shape[3]


# Compiling


def compile_quantize(problem: Problem, config: QuantizeConfig, options: str = ""):
    """Compile for the target in CUTE_DSL_ARCH; needs no GPU and no torch."""
    kernel = QuantizeSm90(problem, config)
    for part in (
        kernel.measure,
        kernel.combine,
        kernel.measure_keys,
        kernel.cast,
        kernel.cast_v,
        kernel.__call__,
    ):
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
