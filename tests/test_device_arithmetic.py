"""Tile order, masks' block ranges, walks, turns, the backward's statistics: the device functions
themselves, run on the CPU."""

import itertools
import math
import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass.cute")

from host_arithmetic import (  # noqa: E402
    ALL,
    compile_arithmetic,
    compile_backward_arithmetic,
    compile_scores,
    compile_statistics,
    compile_walk,
)

from cute_attn.config import BwdConfig, FwdConfig  # noqa: E402
from cute_attn.problem import Problem  # noqa: E402

pytestmark = pytest.mark.compile

CONFIGS = [
    FwdConfig(128, 128),
    FwdConfig(192, 96, l2_mb=1),
    FwdConfig(64, 64, l2_mb=1, pingpong=False),
]


def sized(*shape):
    """A tensor of any shape in a few bytes."""
    return torch.zeros(shape[3], dtype=torch.bfloat16).expand(shape)


class Compiled:
    """What the device functions say of a shape."""

    def __init__(self, config, causal):
        self.config, self.causal = config, causal
        self.function = compile_arithmetic(Problem("bf16", 64, 64, causal), config)

    def __call__(
        self, batch, seqlen_q, seqlen_k, heads_q, heads_kv, beyond=3, rows=None, d=1, parts=1
    ):
        blocks = -(-seqlen_q // self.config.tile_m)
        tiles = torch.full((blocks * heads_q * batch * parts + beyond, 6), -7, dtype=torch.int32)
        count = blocks * self.config.tile_m if rows is None else rows
        rows = torch.full((count, 3), -7, dtype=torch.int32)
        k = sized(batch, seqlen_k, heads_kv, d)
        part_lse = torch.zeros(1, 1, 1, parts)
        self.function(sized(batch, seqlen_q, heads_q, d), k, k, tiles, rows, part_lse)
        return tiles[: len(tiles) - beyond].tolist(), tiles[len(tiles) - beyond :], rows.tolist()


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda c: f"{c.tile_m}x{c.tile_n}")
def config(request):
    return request.param


@pytest.fixture(scope="module", params=[False, True], ids=["full", "causal"])
def compiled(config, request):
    return Compiled(config, request.param)


def visible(row, seqlen_q, seqlen_k, causal):
    return [j for j in range(seqlen_k) if not causal or j <= row + seqlen_k - seqlen_q]


def shapes(count, longest):
    pick = random.Random(1)
    for _ in range(count):
        yield pick.randint(1, longest), pick.randint(1, longest)


def test_every_tile_once_and_none_beyond(compiled):
    pick = random.Random(0)
    for _ in range(60):
        heads_kv, ratio, batch = pick.randint(1, 5), pick.randint(1, 6), pick.randint(1, 4)
        seqlen_q, seqlen_k = pick.randint(1, 1500), pick.choice((1, 100, 5000, 60000))
        heads_q = heads_kv * ratio
        # wide heads: fewer of them share the L2, in groups that leave a tail
        tiles, beyond, _ = compiled(batch, seqlen_q, seqlen_k, heads_q, heads_kv, rows=1, d=64)
        blocks = -(-seqlen_q // compiled.config.tile_m)
        want = {(m, h, b) for m in range(blocks) for h in range(heads_q) for b in range(batch)}
        assert len(tiles) == len(want) and {tuple(t[:3]) for t in tiles} == want
        assert (beyond[:, 3] == 0).all()


def test_longest_first_within_a_head(compiled):
    tiles, _, _ = compiled(2, 1000, 1000, 6, 2)
    for head in range(6):
        ends = [end for _, h, b, end, *_ in tiles if (h, b) == (head, 1)]
        assert ends == sorted(ends, reverse=True) and (len(set(ends)) > 1) == compiled.causal


def test_head_group_beyond_32_bits():
    """So much L2 that 2^25 KV heads would fit, each with 64 query heads."""
    compiled = Compiled(FwdConfig(l2_mb=1024), causal=True)
    tiles, _, _ = compiled(1, 200, 1, 64, 1, d=8)
    assert {tuple(t[:2]) for t in tiles} == {(m, h) for m in range(2) for h in range(64)}


def test_blocks_cover_what_rows_see(compiled):
    """The last block holds the last visible key of 64 rows; below the first full block every key
    is visible to all of them, and each has then seen a key above it."""
    n = compiled.config.tile_n
    for seqlen_q, seqlen_k in [*shapes(40, 300), (1, 1), (64, 64), (300, 1), (1, 300), (65, 128)]:
        _, _, rows = compiled(1, seqlen_q, seqlen_k, 1, 1)
        for first in range(0, seqlen_q, 64):
            group = range(first, min(first + 64, seqlen_q))
            sees = [visible(r, seqlen_q, seqlen_k, compiled.causal) for r in group]
            for row, keys in zip(group, sees):
                assert max(rows[row][0], 0) == len(keys)
            _, end, full = rows[first]
            last = max(keys[-1] if keys else 0 for keys in sees)
            assert last < end * n and (end - 1) * n <= max(last, 0) + 64
            full = min(full, end - 1)
            assert all(len(keys) > full * n for keys in sees) or full == 0


def test_tiles_end_where_their_last_rows_do(compiled):
    tile_m = compiled.config.tile_m
    for seqlen_q, seqlen_k in shapes(40, 700):
        tiles, _, rows = compiled(1, seqlen_q, seqlen_k, 1, 1)
        for m_block, _, _, end, *_ in tiles:
            assert end == rows[(m_block + 1) * tile_m - 64][1] >= 1


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_parts_cover_the_keys(causal):
    """Every tile once for each part; a part holds a block at least, and each block that the tile
    reads lies in exactly one part."""
    config = FwdConfig(128, 64, split_kv=True)
    compiled, plain = Compiled(config, causal), Compiled(FwdConfig(128, 64), causal)
    pick = random.Random(2)
    for _ in range(60):
        shape = pick.randint(1, 3), pick.randint(1, 300), pick.randint(1, 9000)
        heads_kv, parts = pick.randint(1, 3), pick.randint(1, 32)
        heads = heads_kv * pick.randint(1, 3), heads_kv
        whole, _, _ = plain(*shape, *heads, rows=1)
        tiles, beyond, _ = compiled(*shape, *heads, rows=1, parts=parts)
        found = {}
        for m, h, b, end, part, begin in tiles:
            assert end > begin >= 0
            found.setdefault((m, h, b), []).append((part, begin, end))
        assert set(found) == {tuple(t[:3]) for t in whole} and (beyond[:, 3] == 0).all()
        for m, h, b, end, *_ in whole:
            pieces = sorted(found[m, h, b])
            assert [p for p, _, _ in pieces] == list(range(parts))
            read = [i for _, begin, stop in pieces for i in range(begin, stop) if i < end]
            assert read == list(range(end))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_part_of_dq_has_its_turn(dim, causal):
    """With tiles one after another, in the order of their tickets, each finds its turn at every
    block of queries that it visits: none ever waits for one that is drawn later. Past the last
    ticket there is no tile."""
    problem, config = Problem("bf16", dim, dim, causal), BwdConfig(deterministic=True)
    function = compile_backward_arithmetic(problem, config)
    rows, pick = config.tile_m(problem), random.Random(3)
    keys = 64 if config.wide(problem) else 128
    shapes = [(300, 1), (1, 300), (65, 64), (700, 300)]
    shapes += [(pick.randint(1, 2000), pick.randint(1, 2000)) for _ in range(20)]
    for seqlen_q, seqlen_k in [*shapes, (9000, 9000)]:  # of the last few heads at a time
        batch, heads = pick.randint(1, 3), pick.randint(1, 4)
        m_blocks, n_blocks = -(-seqlen_q // rows), -(-seqlen_k // keys)
        group = pick.choice((1, 1, 3))
        tiles = torch.full((n_blocks * heads * batch + 3, 4), -7, dtype=torch.int32)
        turns = torch.full((len(tiles), m_blocks), -7, dtype=torch.int32)
        q, k = sized(batch, seqlen_q, heads * group, dim), sized(batch, seqlen_k, heads, dim)
        function(q, k, tiles, turns)
        assert (tiles[-3:, 0] == -1).all()
        tiles = tiles[:-3]
        added = torch.zeros(batch, heads, m_blocks, dtype=torch.int32)
        for (n, head, b, begin), turn in zip(tiles.tolist(), turns, strict=False):
            assert 0 <= begin < m_blocks and n < n_blocks
            assert (added[b, head, begin:] == turn[begin:]).all()
            added[b, head, begin:] += 1
        seen = [len(visible(min((m + 1) * rows, seqlen_q) - 1, seqlen_q, seqlen_k, causal))
                for m in range(m_blocks)]  # fmt: skip
        assert (added >= torch.tensor([-(-count // keys) for count in seen])).all()
        assert len(set(map(tuple, tiles[:, :3].tolist()))) == len(tiles)


def test_tiles_are_taken_longest_first():
    """Of as many heads as the L2 cache holds, or as make two tiles or nearly so for each of the 8
    multiprocessors."""
    function = compile_backward_arithmetic(Problem("bf16", 128, 128, True), BwdConfig())
    shapes = [(1024, 8, 3, 3), (1024, 8, 6, 3), (2048, 8, 3, 1), (1024, 32, 6, 2), (512, 32, 8, 4)]
    for seqlen, q_per_kv, heads, together in shapes:
        q, k = sized(1, seqlen, q_per_kv * heads, 128), sized(1, seqlen, heads, 128)
        n_blocks = seqlen // 128
        tiles = torch.zeros(n_blocks * heads, 4, dtype=torch.int32)
        function(q, k, tiles, torch.zeros(len(tiles), seqlen // 64, dtype=torch.int32))
        for i, group in enumerate(tiles.split(n_blocks * together)):
            begins = group[:, 3].tolist()
            assert begins == sorted(begins)
            assert set(group[:, 1].tolist()) == set(range(i * together, (i + 1) * together))


def walk(function, q, k, index, whole=ALL, parts=1):
    """(n_block, kv_head, share), visits."""
    tile, room = torch.zeros(1, 4, dtype=torch.int32), 5 * q.shape[2] // k.shape[2]
    visits = torch.full((room, 4), -7, dtype=torch.int32)
    function(q, k, tile, visits, index, whole, parts)
    n, head, _, share = tile[0].tolist()
    return (n, head, share), visits[visits[:, 0] != -7].tolist()


def test_a_tile_visits_its_blocks_once():
    """All heads of a block after one another, and from the last block on where heads share keys,
    and what was before a block is what it follows. Where CTAs share a tile, its parts after one
    another make the same walk."""
    for causal, deterministic in itertools.product((False, True), repeat=2):
        problem, config = Problem("bf16", 128, 128, causal), BwdConfig(deterministic=deterministic)
        function = compile_walk(problem, config)
        for heads, group in ((2, 1), (1, 3), (2, 4)):
            q, k = sized(1, 300, heads * group, 128), sized(1, 200, heads, 128)
            for index in range(2 * heads):
                (n, head, share), got = walk(function, q, k, index)
                assert n == (1 - index // heads if deterministic and group == 1 else index // heads)
                begin = max(128 * n + 100, 0) // 64 if causal else 0
                blocks = range(begin, 5)
                if group > 1:
                    blocks = reversed(blocks)
                want = [(head * group + g, m) for m in blocks for g in range(group)]
                assert [(h, m) for h, m, _, _ in got] == want and share < 0
                assert [(h, m) for _, _, h, m in got[1:]] == want[:-1]
                if deterministic or index == 0:
                    continue
                parts = min(3, len(want))
                pieces = []
                for part in range(parts):
                    number = (index - 1) * parts + part
                    coordinates, got = walk(function, q, k, 1 + number, 1, parts)
                    assert coordinates == (n, head, number) and got
                    pieces += got
                assert [(h, m) for h, m, _, _ in pieces] == want


FAR = 2.0**120


class Started:
    """What the kernels around a product of ones and statistics make of rows (n, 2) with what S and
    dP start from, n a multiple of tile_m."""

    def __init__(self, dim, rows, stages=2):
        problem, config = Problem("bf16", dim, dim, False), BwdConfig(stages=stages)
        self.tile_m, self.words = config.tile_m(problem), config.statistics(problem)
        self.blocks = len(rows) // self.tile_m
        self.scratch = torch.full((self.blocks, config.block_words(problem)), math.nan)
        size = 16 * self.tile_m * stages, 16 * 64 * 2
        self.statistics, ones = (torch.full((n,), math.nan, dtype=torch.bfloat16) for n in size)
        self.places = torch.zeros(self.tile_m, 16, stages, dtype=torch.int32)
        of_ones = torch.zeros(64, 16, 2, dtype=torch.int32)
        function = compile_statistics(problem, config)
        function(rows, self.scratch, self.statistics, ones, self.places, of_ones)
        self.ones = ones[of_ones].double()  # (64, 16, 2)

    def parts(self):
        """(n, 8), as rows of the operand begin."""
        return self.scratch[:, : self.words].reshape(-1).view(torch.bfloat16).view(-1, 8)

    def operand(self, block, stage):
        """(tile_m, 16), after the load of a block."""
        memory, begin = self.statistics.clone(), self.places[0, 0, stage]
        loaded = self.scratch[block, : self.words].view(torch.bfloat16)
        memory[begin : begin + len(loaded)] = loaded
        return memory[self.places[:, :, stage]].double()


def full_precision(n, low=-90, high=119):
    """n numbers of both signs with 24 random bits."""
    random_bits = torch.Generator().manual_seed(4)
    mantissa = torch.randint(2**23, 2**24, (n,), generator=random_bits).double()
    exponent = torch.randint(low, high + 1, (n,), generator=random_bits)
    sign = torch.randint(0, 2, (n,), generator=random_bits) * 2 - 1
    return (sign * torch.ldexp(mantissa, exponent - 23)).float()


def test_lse_in_the_thousands_is_the_score_that_it_is_of():
    """In a row with one large score S, LSE is S * scale_log2 as fp32 and LN_2 round it, and S - LSE
    must not be much further off, or fp16 rounds the key's P to 1 - 2^-11. Rows without a key stay
    infinite."""
    function = compile_scores()
    lse = full_precision(4096, low=-20, high=14)
    far = torch.tensor([math.inf, -math.inf, 0.0])
    for dim, sign in itertools.product((16, 40, 64, 96, 128), (1, -1)):
        scale_log2 = torch.tensor(sign * dim**-0.5) * torch.tensor(math.log2(math.e))
        got = torch.cat([lse, far])[:, None].contiguous()
        function(got, scale_log2.item())
        want = lse.double() / math.log(2) / scale_log2.double()
        ulp = torch.ldexp(torch.ones(len(want)), want.float().frexp().exponent - 24).double()
        assert ((got[:-3, 0].double() - want).abs() <= 0.5001 * ulp).all()
        assert torch.equal(got[-3:, 0], far * sign)
        S = torch.linspace(1e4, 6e4, 4096)
        back = ((S * scale_log2).double() * math.log(2)).float()[:, None].contiguous()
        function(back, scale_log2.item())
        off = (S.double() - back[:, 0].double()) * scale_log2.double() * math.log(2)
        assert (off.abs() <= 1.6 * 2.0**-24 * (S.double() * scale_log2.double()).abs()).all()


@pytest.mark.parametrize("dim", [64, 128])
def test_statistics_lose_no_bit(dim):
    """Three bf16 numbers hold the 24 bits, the nearest ones first: the product's sum, which rounds
    once at most, begins with the largest."""
    rows = full_precision(4096).view(-1, 2)
    edges = torch.tensor([0.0, 1.0, 255.5, 1 + 2**-23, 2 - 2**-23, 2**-90, FAR, FAR * (1 - 2**-24)])
    rows[:8] = torch.stack([edges, -edges.flip(0)], 1)
    parts = Started(dim, rows).parts()
    of_both = parts[:, :6].double().view(-1, 2, 3)
    assert torch.equal(of_both.sum(2), rows.double())
    assert torch.equal(of_both[:, :, 0], rows.bfloat16().double())
    assert (of_both[:, :, 1:].abs() <= of_both[:, :, :2].abs() * 2.0**-8).all()
    assert (parts[:, 6:] == 0).all()


def test_statistics_that_are_far_off_stay_finite():
    """An infinity, or what bf16 rounds to one, would be NaN in the row's other statistic; rows that
    see no key begin from one. NaN stays NaN."""
    beyond = [math.inf, 3.4e38, 2 * FAR, FAR * (1 + 2**-23)]
    values = torch.tensor([*beyond, *(-x for x in beyond), math.nan, FAR, 1e-38, 0.0] * 16)
    want = values.clamp(-FAR, FAR).double()
    of_S, of_dP = Started(128, torch.stack([values, values.flip(0)], 1)).parts()[:, :6].split(3, 1)
    for got, wanted in ((of_S, want), (of_dP, want.flip(0))):
        nan = wanted.isnan()
        assert (got[~nan].isfinite().all()) and got[nan].isnan().any(1).all() and nan.any()
        off = (got.double().sum(1) - wanted)[~nan]
        assert (off.abs() <= 2.0**-126).all(), "what is less than normal may be taken as 0"
        assert (off[wanted[~nan].abs() > 1] == 0).all()


@pytest.mark.parametrize("dim, stages", [(64, 2), (128, 3)])
def test_products_pick_their_statistics(dim, stages):
    """In every slot, over what was in shared memory: the loads fill half of the columns."""
    rows = full_precision(2 * 128 * stages, low=-20, high=20).view(-1, 2)
    started = Started(dim, rows, stages)
    blocks = rows.double().view(started.blocks, started.tile_m, 2)
    for stage in range(stages):
        block = stage % started.blocks
        operand = started.operand(block, stage)
        for which in range(2):
            got = started.ones[:, :, which] @ operand.T  # (64 keys, tile_m)
            assert torch.equal(got, blocks[block, :, which].expand(64, -1))


def test_statistics_of_wide_heads_are_added():
    rows = torch.cat([full_precision(254), torch.tensor([math.inf, -math.inf])]).view(-1, 2)
    started = Started(256, rows)
    assert torch.equal(started.scratch, rows.view(2, 64, 2).transpose(1, 2).reshape(2, 128))
