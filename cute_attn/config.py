"""How it is computed: the tuning knobs of the Hopper kernels. Imports no torch."""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

from cute_attn.problem import Fp8Problem, Problem, round_up

SMEM_LIMIT = 232_448  # bytes of dynamic shared memory one CTA may have on sm_90
# The same by chips that the Ampere kernels are compiled for
AMPERE_SMEM_LIMITS = {"sm_80": 166_912, "sm_87": 166_912, "sm_86": 101_376, "sm_89": 101_376}
AMPERE_SMEM_LIMITS |= {"sm_90a": SMEM_LIMIT, "sm_100a": SMEM_LIMIT, "sm_103a": SMEM_LIMIT}
BARRIER_BYTES = 1024  # what the mbarriers and tickets may take, alignment included
REGISTERS = {1: (240, 56), 2: (240, 24), 3: (160, 32)}  # warpgroups -> (consumer, producer)
FILL = 132  # tiles that keep every SM of an H100 or H200 busy
PART_KEYS = 512  # keys of a part, on average at least
MAX_PARTS = 32  # one lane each in the kernel that merges them
PROMOTED = 128  # columns of V whose sums have registers twice, for Fp8Config.promote
TURN_WORDS = 64  # a cache line for each consumer warpgroup
SHARE_WORDS = 4  # to count the parts of a tile that CTAs share
TICKET_WORDS = 32  # a cache line, so that the next block's statistics begin with one
SCHEDULES = ("grid", "static", "dynamic")  # one tile per CTA; round-robin; tickets

AnyProblem = TypeVar("AnyProblem", bound=Problem)


def _limit_broken(smem: int, most: int, held: int, registers: int) -> str:
    if smem > most:
        return f"shared memory {smem} bytes > {most}"
    if held > registers:
        return f"accumulators need {held} registers per thread > {registers}"
    return ""


@dataclass(frozen=True)
class FwdConfig:
    tile_m: int = 128  # query rows per CTA, 64 per consumer warpgroup
    tile_n: int = 128  # keys per KV block
    kv_stages: int = 2  # depth of the K ring
    v_stages: int = 0  # depth of the V ring, 0: as K
    q_slots: int = 0  # depth of the Q ring in 64-row slots, 0: two tiles; O leaves through them
    overlap: bool = True  # S of the next block beside O += P V of this one
    pingpong: bool = True  # warpgroups issue their matrix products in turn
    schedule: str = "dynamic"  # one of SCHEDULES
    exact_max: bool = False  # take the row maximum in every block, as FlashAttention-2 does
    split_kv: bool = False  # parts of the keys on CTAs of their own, merged by a second kernel
    l2_mb: int = 32  # causal: megabytes of K and V of the heads worked on together

    def __post_init__(self) -> None:
        _check_types(self)
        for name, allowed in (
            ("tile_m", (64, 128, 192)),
            ("tile_n", range(16, 257, 16)),
            ("kv_stages", range(1, 9)),
            ("v_stages", range(9)),
            ("schedule", SCHEDULES),
            ("l2_mb", range(1, 1025)),
        ):
            _check_allowed(self, name, allowed)
        if not self.warpgroups <= self.q_ring <= 16:
            raise ValueError(
                f"config.q_slots is {self.q_slots}: allowed are 0 and {self.warpgroups} "
                "(tile_m / 64) to 16"
            )

    @property
    def warpgroups(self) -> int:
        return self.tile_m // 64

    @property
    def ordered(self) -> bool:
        """Whether a token passes between warpgroups; one alone has nobody to wait for."""
        return self.pingpong and self.warpgroups > 1

    @property
    def queries_in_turn(self) -> bool:
        """Whether warpgroups without a token must wait for Q in turn: a slot serves one after the
        other then, and who came early would take Q of the one before for its own."""
        return not self.pingpong and self.q_ring % self.warpgroups != 0

    @property
    def q_ring(self) -> int:
        return self.q_slots or 2 * self.warpgroups

    @property
    def v_ring(self) -> int:
        return self.v_stages or self.kv_stages

    @property
    def halves(self) -> bool:
        """Whether half a block is a block too (its 16-bit products take 16 keys a step)."""
        return self.tile_n % 32 == 0

    @property
    def qk_widths(self) -> tuple[int, int]:
        """Keys of the score product of a block, and of the half block at the diagonal's edge."""
        return self.tile_n, self.tile_n // 2 if self.halves else self.tile_n

    @property
    def threads(self) -> int:
        return 128 * (1 + self.warpgroups)

    @property
    def registers(self) -> tuple[int, int]:
        """(consumer, producer) registers per thread after setmaxnreg."""
        return REGISTERS[self.warpgroups]

    def parts(self, problem: Problem) -> int:
        """Into how many parts the keys are split: as many as fill the GPU with one sequence, of
        PART_KEYS on average or more, and of whole blocks. What else is in the batch does not
        matter, so that it cannot change a row's bits."""
        if not self.split_kv or problem.seqlen_k == 0:
            return 1
        tiles = problem.heads_q * -(-problem.seqlen_q // self.tile_m)
        most = max(1, min(problem.seqlen_k // PART_KEYS, FILL // max(tiles, 1), MAX_PARTS))
        blocks = -(-problem.seqlen_k // self.tile_n)
        return -(-blocks // -(-blocks // most))  # parts of equal length: the last may be empty

    def launches(self, problem: AnyProblem) -> tuple[AnyProblem, ...]:
        """What one call takes, one after the other, the widest first."""
        return (problem,)

    def smem_bytes(self, problem: Problem, itemsize: int = 2) -> int:
        q = self.q_ring * 64 * max(problem.tile_dim, problem.tile_dim_v)
        k = self.kv_stages * self.tile_n * problem.tile_dim
        v = self.v_ring * self.tile_n * problem.tile_dim_v
        return (q + k + v) * itemsize + BARRIER_BYTES

    def accumulator_registers(self, problem: Problem) -> int:
        """Registers per thread that S (fp32), P (16 bit) and O (fp32) hold at once."""
        return self.tile_n // 2 + self.tile_n // 4 + problem.tile_dim_v // 2

    def infeasible(self, problem: Problem) -> str:
        """Why this config cannot serve the problem, naming the limit; '' if it can."""
        held = self.accumulator_registers(problem)
        return _limit_broken(self.smem_bytes(problem), SMEM_LIMIT, held, self.registers[0] - 24)


@dataclass(frozen=True)
class Fp8Config(FwdConfig):
    """The knobs of the Hopper FP8 forward kernel. Without promote, e4m3 V that has a mean loses it
    over long sequences: sums of the tensor core are short of bits."""

    exact_max: bool = True  # False: weights are taken against a maximum found before
    promote: int = 0  # blocks whose P V the tensor core adds up before fp32 takes over, 0: all

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_allowed(self, "tile_n", range(32, 257, 32))
        _check_allowed(self, "promote", (0, 1, 2, 4, 8))
        _check_allowed(self, "split_kv", (False,))

    def smem_bytes(self, problem: Problem, itemsize: int = 1) -> int:
        assert isinstance(problem, Fp8Problem)
        q = self.q_ring * 64 * max(problem.tile_dim, 2 * problem.tile_dim_v)
        k = self.kv_stages * self.tile_n * problem.tile_dim
        v = self.v_ring * self.tile_n * problem.tile_dim_v * problem.itemsize_v
        # 4 bytes of factors a query, 40 of notes a warp of 16: the tiles behind begin at 1024s
        rows = round_up(13 * self.tile_m // 2, 1024) * self.few_registers(problem.tile_dim_v)
        return q + k + v + rows + BARRIER_BYTES

    def few_registers(self, tile_dim_v: int) -> bool:
        """Whether O, S, P and the next P leave too few for the rows' factors: they lie in shared
        memory then."""
        return tile_dim_v > 192 and not self.exact_max

    def accumulator_registers(self, problem: Problem) -> int:
        assert isinstance(problem, Fp8Problem)
        weights = self.tile_n // (8 if problem.v_dtype == "e4m3" else 4)
        held = self.tile_n // 2 + weights + problem.tile_dim_v // 2
        if self.promote:  # and then there is no room for late weights beside the scores
            held += problem.tile_dim_v // 2
            if not self.exact_max:  # in every block ptxas takes more
                held += self.tile_n // 4 * (2 if self.promote == 1 else 1)
        return held

    def launches(self, problem: AnyProblem) -> tuple[AnyProblem, ...]:
        """With promote, PROMOTED columns of V and the rest."""
        if not self.promote or problem.head_dim_v <= PROMOTED:
            return (problem,)
        rest = problem.head_dim_v - PROMOTED
        return replace(problem, head_dim_v=PROMOTED), replace(problem, head_dim_v=rest)


@dataclass(frozen=True)
class AmpereConfig:
    """The knobs of the Ampere forward kernel."""

    tile_m: int = 128  # query rows per CTA
    tile_n: int = 64  # keys per KV block
    warps: int = 4  # of a CTA; each has 16 rows in every 16 * warps
    kv_stages: int = 2  # blocks of K and V in shared memory
    q_in_regs: bool = False  # read Q from shared memory once, not in every block
    ctas: int = 1  # that an SM is to hold: fewer registers a thread
    exact_max: bool = False  # take the row maximum in every block, as FlashAttention-2 does
    l2_mb: int = 32  # causal: megabytes of K and V of the heads worked on together

    split_kv: ClassVar[bool] = False
    schedule: ClassVar[str] = "grid"

    def __post_init__(self) -> None:
        _check_types(self)
        for name, allowed in (
            ("tile_m", range(16, 257, 16)),
            ("tile_n", range(16, 257, 16)),
            ("warps", (2, 4, 8)),
            ("kv_stages", range(2, 9)),
            ("ctas", range(1, 9)),
            ("l2_mb", range(1, 1025)),
        ):
            _check_allowed(self, name, allowed)
        if self.tile_m % (16 * self.row_warps):
            rows = f"allowed are the multiples of {16 * self.row_warps} (16 rows a warp)"
            raise ValueError(f"config.tile_m is {self.tile_m}: {rows}")

    @property
    def row_warps(self) -> int:
        """Among which the rows are divided."""
        return self.warps

    @property
    def m_tiles(self) -> int:
        """Of 16 rows, that a warp has."""
        return self.tile_m // (16 * self.row_warps)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def registers(self) -> tuple[int, int]:
        """At most, per thread; no other threads load."""
        each = min(255, 65536 // (self.threads * self.ctas) // 8 * 8)
        return each, each

    def parts(self, problem: Problem) -> int:  # as of FwdConfig, and launches
        return 1

    def launches(self, problem: AnyProblem) -> tuple[AnyProblem, ...]:
        return (problem,)

    def smem_bytes(self, problem: Problem, itemsize: int = 2) -> int:
        d, dv = problem.tile_dim, problem.tile_dim_v
        ring = self.kv_stages * self.tile_n * (d + dv)
        return (self.tile_m * max(d, dv) + ring) * itemsize

    def accumulator_registers(self, problem: Problem) -> int:
        """Registers per thread that S and O (fp32), and Q where it stays, hold at once."""
        q = problem.static().head_dim // 4 if self.q_in_regs else 0
        return self.m_tiles * (self.tile_n // 2 + problem.tile_dim_v // 2 + q)

    def infeasible(self, problem: Problem, target: str = "sm_80") -> str:
        """Why this config cannot serve the problem there, naming the limit; '' if it can."""
        held, most = self.accumulator_registers(problem), ampere_smem_limit(target)
        return _limit_broken(self.smem_bytes(problem), most, held, self.registers[0] - 24)


@dataclass(frozen=True)
class AmpereBwdConfig:
    """The knobs of the Ampere backward kernel."""

    tile_m: int = 64  # queries of a block
    tile_n: int = 128  # keys per CTA
    key_warps: int = 4  # that share the keys: each has 16 in every 16 * key_warps
    column_warps: int = 2  # that share queries of the same keys' S, and columns of their dV and dK
    step_m: int = 32  # queries that a warp has S and dP of at a time
    q_stages: int = 2  # blocks of Q in shared memory
    do_stages: int = 2  # of dO
    ctas: int = 1  # that an SM is to hold: fewer registers a thread
    # For compute capability 9.0 on:
    vector_adds: bool = False  # dq has four numbers added at a time
    split_barrier: bool = False  # warps use their own P and dS before they wait for the others'
    deterministic: bool = False  # dq is added up in a fixed order

    def __post_init__(self) -> None:
        _check_types(self)
        for name, allowed in (
            ("tile_m", (32, 64, 128)),
            ("tile_n", range(16, 257, 16)),
            ("key_warps", (1, 2, 4, 8)),
            ("column_warps", (1, 2, 4)),
            ("step_m", (16, 32, 64, 128)),
            ("q_stages", (1, 2)),
            ("do_stages", (1, 2)),
            ("ctas", range(1, 9)),
        ):
            _check_allowed(self, name, allowed)
        keys, queries = 16 * self.key_warps, self.step_m * self.column_warps
        if self.tile_n % keys:
            allowed_keys = f"allowed are the multiples of {keys} (16 keys a warp)"
            raise ValueError(f"config.tile_n is {self.tile_n}: {allowed_keys}")
        if self.tile_m % queries:
            raise ValueError(f"config.step_m is {self.step_m}: {queries} do not divide tile_m")

    @property
    def warps(self) -> int:
        return self.key_warps * self.column_warps

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def key_tiles(self) -> int:
        """Of 16 keys, that a warp has."""
        return self.tile_n // (16 * self.key_warps)

    @property
    def registers(self) -> int:
        """At most, per thread."""
        return min(255, 65536 // (self.threads * self.ctas) // 8 * 8)

    def kernel_name(self, problem: Problem, arch: str = "sm80") -> str:
        """As profilers show the main kernel."""
        return backward_name(problem, arch, self.deterministic)

    def tile(self, problem: Problem) -> tuple[int, int]:
        """Queries and keys of a block."""
        return self.tile_m, self.tile_n

    def grid(self, problem: Problem, tiles: int, sms: int) -> int:
        """CTAs for so many tiles."""
        return tiles

    def width(self, problem: Problem) -> int:
        """Columns of a Q or K tile: each warp has 16 of dK in turn, and of dQ's rows or columns."""
        least = 16 * max(2, self.column_warps, 16 * self.warps // self.tile_m)
        return round_up(problem.tile_dim, least)

    def width_v(self, problem: Problem) -> int:
        return round_up(problem.tile_dim_v, max(32, 16 * self.column_warps))

    def dq_warps(self, problem: Problem) -> tuple[int, int]:
        """Among how many warps rows, and columns, of a block's dQ are divided, so that they read
        the least."""
        tiles, steps = self.tile_m // 16, self.width(problem) // 16
        ways = [(n, self.warps // n) for n in (1, 2, 4, 8) if self.warps % n == 0]
        even = [(m, n) for m, n in ways if tiles % m == 0 and steps % n == 0]
        return min(even, key=lambda way: tiles // way[0] + steps // way[1])

    @property
    def statistics(self) -> int:
        """Words of a block's rows in scratch memory: LSE and D."""
        return 2 * self.tile_m

    @property
    def ticket_word(self) -> int:
        """Where in a block's scratch the tickets' counter may be: behind the turns."""
        return self.statistics + (TURN_WORDS if self.deterministic else 0)

    def block_words(self, problem: Problem) -> int:
        """Of the scratch for statistics; whose turn it is to add to dq, and tickets, take more."""
        return self.ticket_word + (TICKET_WORDS if self.deterministic else 0)

    def smem_bytes(self, problem: Problem, itemsize: int = 2) -> int:
        d, dv = self.width(problem), self.width_v(problem)
        rings = self.tile_m * (self.q_stages * d + self.do_stages * dv)
        shared = self.tile_n * self.tile_m * (1 if self.column_warps == 1 else 2)  # dS, P
        others = 4 * self.q_stages * self.statistics + 16 * self.split_barrier
        return (self.tile_n * (d + dv) + rings + shared) * itemsize + others

    def accumulator_registers(self, problem: Problem) -> int:
        """Registers per thread that dK, dV, S and dP hold at once."""
        columns = (self.width(problem) + self.width_v(problem)) // self.column_warps
        return self.key_tiles * (columns // 2 + self.step_m)

    def infeasible(self, problem: Problem, target: str = "sm_80") -> str:
        """Why this config cannot serve the problem there, naming the limit; '' if it can."""
        held, most = self.accumulator_registers(problem), ampere_smem_limit(target)
        broken = _limit_broken(self.smem_bytes(problem), most, held, self.registers - 40)
        old = int(target.removeprefix("sm_").rstrip("af")) < 90
        for name in ("vector_adds", "split_barrier") if old else ():
            if not broken and getattr(self, name):
                return f"{name} is for compute capability 9.0 on, not for {target}"
        return broken


def backward_name(problem: Problem, arch: str, deterministic: bool) -> str:
    p, mask = problem.static(), "causal" if problem.causal else "full"
    order = "_deterministic" if deterministic else ""
    return f"cute_attn_bwd_{arch}_{p.dtype}_d{p.head_dim}_dv{p.head_dim_v}_{mask}{order}"


def ampere_smem_limit(target: str) -> int:
    """Bytes of dynamic shared memory that a CTA may have; of a chip not known, the least."""
    return AMPERE_SMEM_LIMITS.get(target, min(AMPERE_SMEM_LIMITS.values()))


@dataclass(frozen=True)
class BwdConfig:
    """The knobs of the Hopper backward kernel; tiles follow from the head dims."""

    stages: int = 2  # depth of the Q and dO rings
    # A warpgroup may write dS two blocks past the one that the other still reads; more slots than
    # these where dK and dV, which leave through them, take more.
    ds_slots: int = 3
    warpgroups: int = 2  # of 64 keys each; above 128 columns, one for dV and one for dK of 64 keys
    deterministic: bool = False  # dq is added up in a fixed order

    def __post_init__(self) -> None:
        _check_types(self)
        # One stage or two slots would be overwritten while they are read; two warpgroups are what
        # the kernels divide dQ, registers and the wide kernel's products by.
        _check_allowed(self, "stages", range(2, 9))
        _check_allowed(self, "ds_slots", range(3, 9))
        _check_allowed(self, "warpgroups", (2,))

    def kernel_name(self, problem: Problem, arch: str = "sm90") -> str:
        """As profilers show the main kernel."""
        return backward_name(problem, arch, self.deterministic)

    def wide(self, problem: Problem) -> bool:
        """Whether the kernel for head dims above 128 is wanted."""
        return max(problem.tile_dim, problem.tile_dim_v) > 128

    def width(self, problem: Problem) -> int:
        """Columns of a Q or K tile."""
        return max(64, round_up(problem.tile_dim, 64))

    def width_v(self, problem: Problem) -> int:
        return max(64, round_up(problem.tile_dim_v, 64))

    def tile_m(self, problem: Problem) -> int:
        """Queries of a block: S and dP take the registers that dK and dV leave."""
        return 128 if self.width(problem) == self.width_v(problem) == 64 else 64

    def tile(self, problem: Problem) -> tuple[int, int]:
        """Queries and keys of a block."""
        return self.tile_m(problem), 64 if self.wide(problem) else 64 * self.warpgroups

    def grid(self, problem: Problem, tiles: int, sms: int) -> int:
        """CTAs for so many tiles."""
        return tiles if self.wide(problem) else min(tiles, sms)

    def statistics(self, problem: Problem) -> int:
        """Words of a block in which LSE and D of its rows lie: two a row, or the 16 bytes that an
        operand takes."""
        return self.tile_m(problem) * (2 if self.wide(problem) else 4)

    def shares(self, problem: Problem) -> bool:
        """Whether CTAs may share tiles: not where dq is added up in turn, nor in the wide kernel,
        whose CTAs have a tile each. With blocks of 128 queries it has cost more than it saved."""
        return not self.deterministic and not self.wide(problem) and self.tile_m(problem) == 64

    def slots(self, problem: Problem) -> int:
        """Depth of the dS ring: what dK and dV take, which leave through it, is the least."""
        columns = self.width(problem) + self.width_v(problem)
        return max(self.ds_slots, -(-columns // self.tile_m(problem)))

    def ticket_word(self, problem: Problem) -> int:
        """Where in a block's scratch the tickets' counter may be: behind the turns."""
        return self.statistics(problem) + (TURN_WORDS if self.deterministic else 0)

    def block_words(self, problem: Problem) -> int:
        """Of the scratch for statistics; whose turn it is to add to dq needs two cache lines. The
        wide kernel draws no tickets."""
        return self.ticket_word(problem) + (0 if self.wide(problem) else TICKET_WORDS)

    def smem_bytes(self, problem: Problem, itemsize: int = 2) -> int:
        (rows, keys), wide = self.tile(problem), self.wide(problem)
        # P in fp32 and dS, or dS alone
        shared = 2 + self.stages if wide else self.slots(problem) * self.warpgroups
        columns = self.width(problem) + self.width_v(problem)
        tiles = (keys + self.stages * rows) * columns + shared * 64 * rows
        statistics = 4 * self.stages * self.statistics(problem)
        if not wide:
            statistics += statistics + 2 * 64 * 32  # as many zeros, and ones
        return tiles * itemsize + statistics + BARRIER_BYTES

    def infeasible(self, problem: Problem) -> str:
        """Why this config cannot serve the problem, naming the limit; '' if it can."""
        smem = self.smem_bytes(problem)
        if smem > SMEM_LIMIT:
            return f"shared memory {smem} bytes > {SMEM_LIMIT}"
        return ""


# Statistics of a channel that quantisation may need: how many values are finite, their sum, the sum
# of their squares, the smallest, the largest, and what sums are taken about.
COUNT, SUM, SQUARES, LOW, HIGH, PIVOT = "count", "sum", "squares", "low", "high", "pivot"
SOURCES = ("none", "head", "sequence", "measured")  # (nheads_kv, d) given; (batch, nheads_kv, d)
ONE_TILE = (16, 32, 64, 128)  # keys of a scale that the tile which casts them measures


class QuantizeSizes(NamedTuple):
    """Of a call."""

    batch: Any
    heads_q: Any
    heads_kv: Any
    head_dim: Any
    head_dim_v: Any
    q_chunks: Any  # of a sequence, for statistics
    k_chunks: Any
    groups: Any  # of 8 keys


@dataclass(frozen=True)
class QuantizeConfig:
    """What one quantize_qkv kernel does; see cute_attn.quantize."""

    hadamard: bool = True
    k_shift: str = "measured"  # one of SOURCES
    v_shift: str = "measured"
    balance: str = "measured"
    rope: str = ""  # dtype of cos and sin
    half: int = 0  # pairs of channels that they turn
    k_block: int = 128  # of ONE_TILE; 0: scales of other blocks, measured by a pass of their own
    v_by_channel: bool = False  # a scale each
    keep_v: bool = False  # in its dtype
    statistics: bool = False  # measure shifts and balance of the whole batch, and do nothing else
    tiles: int = 4  # of 128 rows that a CTA takes one after another, at most

    def __post_init__(self) -> None:
        _check_types(self)
        for name in ("k_shift", "v_shift", "balance"):
            _check_allowed(self, name, SOURCES)
        _check_allowed(self, "k_block", (0, *ONE_TILE))
        _check_allowed(self, "tiles", range(2, 65))

    @property
    def scaled(self) -> bool:
        """Whether channels of q and K have factors: balance, signs."""
        return self.hadamard or self.balance != "none"

    @property
    def transposed(self) -> bool:
        """Whether V becomes vt."""
        return not (self.keep_v or self.statistics)

    @property
    def q_kinds(self) -> tuple[str, ...]:
        """Statistics of q, in the order of their planes."""
        return (COUNT, SQUARES) if self.balance == "measured" else ()

    @property
    def k_kinds(self) -> tuple[str, ...]:
        mean = (COUNT, SUM, PIVOT) if self.k_shift == "measured" else ()
        return tuple(dict.fromkeys((*mean, *self.q_kinds)))

    @property
    def v_kinds(self) -> tuple[str, ...]:
        mean = (COUNT, SUM) if self.v_shift == "measured" else ()
        return (*mean, LOW, HIGH) if self.transposed else mean

    @property
    def direct(self) -> bool:
        """Whether nothing is to be known ahead of the cast but the largest values of V."""
        return "measured" not in (self.k_shift, self.v_shift, self.balance)

    @property
    def measures(self) -> bool:
        """Whether a pass over what is to be cast comes first."""
        return not self.direct and bool(self.q_kinds or self.k_kinds or self.v_kinds)

    def scratch_shapes(self, s: "QuantizeSizes") -> tuple[tuple[Any, ...] | None, ...]:
        """Of measured factors (q's, then K's), of partial statistics of q, k and v, of the largest
        v of every chunk, of the largest |k| of every 8 keys: fp32, one after another; None is
        nothing. Sizes are integers of the host or of the compiler."""
        factors = None
        if self.balance == "measured" and not self.statistics:
            factors = (2, s.batch, s.heads_kv, s.head_dim)

        def parts(kinds: tuple[str, ...], chunks: Any, heads: Any, width: Any) -> Any:
            return (len(kinds), s.batch * chunks, heads, width) if kinds else None

        return (
            factors,
            parts(self.q_kinds, s.q_chunks, s.heads_q, s.head_dim),
            parts(self.k_kinds, s.k_chunks, s.heads_kv, s.head_dim),
            None if self.direct else parts(self.v_kinds, s.k_chunks, s.heads_kv, s.head_dim_v),
            (s.batch, s.heads_kv, s.k_chunks, s.head_dim_v if self.v_by_channel else 1)
            if self.direct and self.transposed
            else None,
            None if self.k_block or self.statistics else (s.batch, s.heads_kv, s.groups),
        )


@dataclass(frozen=True)
class TransposeConfig:
    """V in e4m3 to what the forward kernel reads: nothing to choose."""


def _check_types(config: object) -> None:
    for f in fields(config):  # type: ignore[arg-type]
        value = getattr(config, f.name)
        if type(value) is not f.type:
            raise TypeError(f"config.{f.name} is {value!r}: {f.type} is wanted")


def _check_allowed(config: object, name: str, allowed: "range | tuple[object, ...]") -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise ValueError(f"config.{name} is {value!r}: allowed are {_listed(allowed)}")


def _listed(allowed: "range | tuple[object, ...]") -> str:
    if isinstance(allowed, range) and len(allowed) > 4:
        step = f" in steps of {allowed.step}" if allowed.step > 1 else ""
        return f"{allowed[0]} to {allowed[-1]}{step}"
    return ", ".join(repr(a) for a in allowed)
