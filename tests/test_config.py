"""FwdConfig: what it refuses, and why a config cannot serve a problem."""

from dataclasses import replace

import pytest

from cute_attn.config import SMEM_LIMIT, FwdConfig
from cute_attn.problem import Problem


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
def test_slots_that_serve_warpgroups_in_turn_need_the_token(tile_m, q_slots):
    """Without it a warpgroup could read a slot before its own Q is there."""
    config = FwdConfig(tile_m, 64, q_slots=q_slots)
    with pytest.raises(ValueError, match="q_slots is .* without pingpong"):
        replace(config, pingpong=False)


def test_default_slots_follow_the_tile():
    assert replace(FwdConfig(128, 128), tile_m=192).q_ring == 6
    assert replace(FwdConfig(192, 128), tile_m=64).q_ring == 2


def test_limits():
    wide = Problem("bf16", 256, 256)
    assert str(SMEM_LIMIT) in FwdConfig(128, 128).infeasible(wide)
    assert "registers" in FwdConfig(192, 64, 1, q_slots=3).infeasible(wide)
    assert FwdConfig(128, 64, q_slots=3).infeasible(wide) == ""
