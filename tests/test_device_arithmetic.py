"""Tile order, masks' block ranges, turns: the device functions themselves, run on the CPU."""

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass.cute")

from host_arithmetic import compile_arithmetic, compile_backward_arithmetic  # noqa: E402

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
    """With CTAs one after another, in the order in which they start, each finds its turn at every
    block of queries that it visits: none ever waits for one that starts later."""
    problem, config = Problem("bf16", dim, dim, causal), BwdConfig(deterministic=True)
    function = compile_backward_arithmetic(problem, config)
    rows, pick = config.tile_m(problem), random.Random(3)
    keys = 64 if config.wide(problem) else 128
    shapes = [(300, 1), (1, 300), (65, 64), (700, 300)]
    shapes += [(pick.randint(1, 2000), pick.randint(1, 2000)) for _ in range(20)]
    for seqlen_q, seqlen_k in [*shapes, (9000, 9000)]:  # of the last few heads at a time
        batch, heads = pick.randint(1, 3), pick.randint(1, 4)
        m_blocks, n_blocks = -(-seqlen_q // rows), -(-seqlen_k // keys)
        tiles = torch.full((n_blocks * heads * batch, 4), -7, dtype=torch.int32)
        last = torch.full((1, m_blocks), -7, dtype=torch.int32)
        q, k = (sized(batch, s, heads, dim) for s in (seqlen_q, seqlen_k))
        function(q, k, tiles, last)
        added = torch.zeros(batch, heads, m_blocks, dtype=torch.int32)
        for n, head, b, begin in tiles.tolist():
            assert 0 <= begin < m_blocks
            assert (added[b, head, begin:] == last[0, begin:] - n).all()
            added[b, head, begin:] += 1
        seen = [len(visible(min((m + 1) * rows, seqlen_q) - 1, seqlen_q, seqlen_k, causal))
                for m in range(m_blocks)]  # fmt: skip
        assert (added >= torch.tensor([-(-count // keys) for count in seen])).all()
        assert len(set(map(tuple, tiles[:, :3].tolist()))) == len(tiles)
