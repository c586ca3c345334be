"""FwdConfig and BwdConfig: what they refuse, and why one cannot serve a problem."""

from dataclasses import replace

import pytest

from cute_attn import tuning, tuning_bwd, tuning_fp8
from cute_attn.config import SMEM_LIMIT, BwdConfig, Fp8Config, FwdConfig
from cute_attn.problem import Fp8Problem, Problem


@pytest.mark.parametrize(
    "field, value",
    [
        ("tile_m", 96),
        ("tile_n", 100),
        ("tile_n", 272),
        ("kv_stages", 0),
        ("v_stages", 9),
        ("q_slots", 1),
        ("q_slots", 17),
        ("schedule", "random"),
        ("l2_mb", 0),
    ],
)
def test_value_that_is_not_allowed(field, value):
    with pytest.raises(ValueError, match=f"config.{field} is {value!r}.*allowed"):
        FwdConfig(**{field: value})


@pytest.mark.parametrize("field, value", [("tile_m", 128.0), ("pingpong", 1), ("schedule", None)])
def test_value_of_the_wrong_type(field, value):
    with pytest.raises(TypeError, match=f"config.{field} is {value!r}.*wanted"):
        FwdConfig(**{field: value})


@pytest.mark.parametrize("tile_m, q_slots", [(128, 3), (192, 4), (192, 5)])
def test_slots_that_serve_one_warpgroup_after_another_need_turns_or_the_token(tile_m, q_slots):
    """Without either a warpgroup could read a slot before its own Q is there."""
    config = FwdConfig(tile_m, 64, q_slots=q_slots)
    assert config.ordered and not config.queries_in_turn
    assert replace(config, pingpong=False).queries_in_turn
    assert not replace(config, pingpong=False, q_slots=0).queries_in_turn
    assert not replace(config, pingpong=False, q_slots=tile_m // 64).queries_in_turn


def test_sums_in_fp32_need_registers():
    """And late weights more, which lie beside the scores."""
    exact, late = Fp8Config(promote=4), Fp8Config(exact_max=False, promote=4)
    fit = [[d for d in (64, 96, 128, 256) if not c.infeasible(Fp8Problem("bf16", d, d))] for c in (
        exact, late, replace(late, tile_n=96), replace(exact, tile_m=192, tile_n=96)
    )]  # fmt: skip
    assert fit == [[64, 96, 128], [64, 96], [64, 96, 128], [64]]
    with pytest.raises(ValueError, match="config.promote is 3: allowed are 0, 1, 2, 4, 8$"):
        Fp8Config(promote=3)


def test_raw_fp8_v_takes_sums_in_fp32_where_there_are_many_keys():
    """By what every row of a call has in common: neither batch, queries nor heads."""
    for d in range(16, 257, 16):
        for dv in (16, d, 144, 256):
            raw = Fp8Problem("bf16", d, dv, causal=True)
            for sizes in ({}, {"batch": 70, "seqlen_q": 1 << 20, "heads_q": 8, "heads_kv": 2}):
                few, many = (tuning_fp8.pick(replace(raw, seqlen_k=n, **sizes)) for n in (512, 513))
                assert (few, many) == tuning_fp8.all_of(raw) and not few.promote
                assert 512 == tuning_fp8.LOSSLESS == many.promote * many.tile_n
                assert not any(map(many.infeasible, many.launches(raw)))
    for other in ({"v_shift": True}, {"v_dtype": "bf16"}):
        problem = replace(raw, seqlen_k=1 << 20, **other)
        assert tuning_fp8.all_of(problem) == (tuning_fp8.pick(problem),)
        assert not tuning_fp8.pick(problem).promote


def test_default_slots_follow_the_tile():
    assert replace(FwdConfig(128, 128), tile_m=192).q_ring == 6
    assert replace(FwdConfig(192, 128), tile_m=64).q_ring == 2


def test_limits():
    wide = Problem("bf16", 256, 256)
    assert str(SMEM_LIMIT) in FwdConfig(128, 128).infeasible(wide)
    assert "registers" in FwdConfig(192, 64, 1, q_slots=3).infeasible(wide)
    assert FwdConfig(128, 64, q_slots=3).infeasible(wide) == ""


@pytest.mark.parametrize(
    "field, value, allowed",
    [
        ("stages", 1, "2 to 8"),
        ("stages", 9, "2 to 8"),
        ("ds_slots", 2, "3 to 8"),
        ("ds_slots", 9, "3 to 8"),
        ("warpgroups", 1, "2"),
        ("warpgroups", 3, "2"),
    ],
)
def test_value_that_the_backward_does_not_allow(field, value, allowed):
    """What would race or hang, not be slow."""
    with pytest.raises(ValueError, match=f"config.{field} is {value}: allowed are {allowed}$"):
        BwdConfig(**{field: value})
    with pytest.raises(ValueError, match=f"config.{field}"):
        replace(BwdConfig(), **{field: value})


@pytest.mark.parametrize(
    "field, value", [("stages", 2.0), ("ds_slots", True), ("warpgroups", "2"), ("deterministic", 1)]
)
def test_value_of_the_wrong_type_in_the_backward(field, value):
    with pytest.raises(TypeError, match=f"config.{field} is {value!r}.*wanted"):
        BwdConfig(**{field: value})


def test_every_config_of_the_backward_that_a_sweep_tries_is_allowed():
    for dims in ((64, 64), (128, 128), (192, 128), (256, 256)):
        assert len(list(tuning_bwd.candidates(Problem("bf16", *dims)))) >= 2


def test_tiles_of_the_backward():
    """Above 128 columns a multiple of 64; a deeper ring where it fits."""
    problems = [Problem("bf16", *dims) for dims in ((40, 72), (136, 40), (192, 128), (256, 256))]
    config, deep = BwdConfig(), BwdConfig(stages=3)
    assert [config.width(p) for p in problems] == [64, 192, 192, 256]
    assert [config.width_v(p) for p in problems] == [128, 64, 128, 256]
    assert [config.wide(p) for p in problems] == [False, True, True, True]
    assert not any(map(config.infeasible, problems))
    assert deep.infeasible(problems[2]) == "" and str(SMEM_LIMIT) in deep.infeasible(problems[3])


def test_slots_of_ds_take_shared_memory():
    """Up to 64 columns, with 128 queries a block, nothing is left for more than the default. With
    128 columns of dK and of dV these take four."""
    dims = ((64, 64), (64, 128), (128, 128), (192, 128), (256, 256))
    configs = [BwdConfig(stages, ds_slots) for stages in (2, 3) for ds_slots in (3, 4)]
    fit = [[not c.infeasible(Problem("bf16", *d)) for c in configs] for d in dims]
    assert fit == [[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert [configs[0].slots(Problem("bf16", *d)) for d in dims[:3]] == [3, 3, 4]


def test_scratch_of_the_backward():
    """The rows' statistics come first and in vectors of 16 bytes, so do the next block's."""
    for d in (64, 128, 256):
        problem, fixed = Problem("bf16", d, d), BwdConfig(deterministic=True)
        statistics, words = fixed.statistics(problem), fixed.block_words(problem)
        tickets = 0 if fixed.wide(problem) else 32
        assert BwdConfig().block_words(problem) == statistics + tickets == words - 64
        assert fixed.ticket_word(problem) == words - tickets
        assert words * 4 % 128 == statistics * 4 % 128 == 0, "counters share no cache line"


def test_tiles_that_ctas_share():
    """Those left over after full rounds, if parts of them end earlier; with a causal mask those of
    the last KV heads, if they are long."""
    config = BwdConfig()

    def shared(d=128, causal=False, config=config, **sizes):
        sizes = {"batch": 1, "seqlen_q": 4096, "seqlen_k": 4096, "heads_q": 4} | sizes
        sizes["heads_kv"] = sizes.get("heads_kv", sizes["heads_q"])
        problem = Problem("bf16", d, d, causal, **sizes)
        found = tuning_bwd.tiles_of(problem, config, 132)
        blocks = -(-problem.seqlen_k // config.tile(problem)[1])
        assert found.whole + found.shared == blocks * problem.batch * problem.heads_kv
        return found.whole, found.parts

    assert shared(heads_q=66) == (66 * 32, 1)  # 16 rounds
    assert shared(heads_q=64) == (15 * 132, 3)  # and 68 tiles
    assert shared(d=64, heads_q=64) == (2048, 1)
    assert shared(heads_q=16, batch=8) == (31 * 132, 8)  # and 4
    assert shared() == (128, 1)  # 128 of 132 are at work
    assert shared(seqlen_k=1024) == (0, 4)  # 32 tiles, 128 parts
    assert shared(seqlen_q=100, heads_q=64) == (2048, 1)  # two blocks
    assert shared(heads_q=64, causal=True) == (2048, 1)
    assert shared(heads_q=64, heads_kv=8, causal=True) == (128, 4)  # of 256
    assert shared(heads_q=32, heads_kv=1, causal=True) == (0, 8)
    assert shared(heads_q=512, heads_kv=64, causal=True) == (2048, 1)
    assert shared(heads_q=64, config=BwdConfig(deterministic=True)) == (2048, 1)
    assert shared(d=256, heads_q=8)[1] == 1


def test_parts_of_the_keys():
    """By lengths and heads alone; parts have 512 keys on average, and together fill 132 SMs."""
    config = FwdConfig(128, 128, split_kv=True)

    def parts(**sizes):
        return config.parts(Problem("bf16", 128, 128, **sizes))

    assert parts(batch=1, seqlen_q=100, seqlen_k=4096, heads_q=16) == 8
    assert parts(batch=99, seqlen_q=100, seqlen_k=4096, heads_q=16) == 8
    assert parts(seqlen_q=129, seqlen_k=4096, heads_q=16) == 4
    assert parts(seqlen_q=1, seqlen_k=4224, heads_q=8) == 7  # 33 blocks: 8 parts leave one empty
    assert parts(seqlen_q=1, seqlen_k=1023, heads_q=1) == parts() == 1
    assert parts(seqlen_q=1, seqlen_k=10**6, heads_q=1) == 32
    assert FwdConfig().parts(Problem("bf16", 128, 128, seqlen_q=1, seqlen_k=10**6, heads_q=1)) == 1


def test_keys_are_split_only_where_it_pays():
    def split(seqlen_q, seqlen_k, heads_q, batch=1):
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": heads_q, "batch": batch}
        return {tuning.pick(Problem("bf16", d, d, **sizes)).split_kv for d in (64, 128, 192, 256)}

    assert split(100, 4096, 16) == split(1, 2048, 32) == split(1, 2048, 32, 64) == {True}
    assert split(1024, 1024, 8) == split(16384, 16384, 8) == split(1, 2047, 4) == {False}
    assert split(1, 65536, 64) == split(4096, 4096, 4) == {False}
