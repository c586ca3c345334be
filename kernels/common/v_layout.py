"""Where the keys of V lie in the forward kernel's FP8 operand: vt (batch, nheads_kv, head_dim_v,
padded keys) in e4m3, keys next to each other, since FP8 matrix products read K-major operands only.

Within every GROUP keys, position 16h + 4t + j (h < 2, t < 4, j < 4) holds key
16h + 8(j >> 1) + 2t + (j & 1). Thread t of a quad has the scores of keys 2t, 2t + 1, 2t + 8 and
2t + 9 of every 16 in its accumulators, and as operand A of an FP8 product it takes positions 4t to
4t + 3 of every 16: the scores become that operand where they are, without shuffles. A sum over keys
does not ask for their order.

The functions take Python integers and the DSL's alike. cute_attn/fp8_prepare.py does the same with
torch; a test holds the two together.
"""

GROUP = 32
PADDING = 128  # vt's last dimension is a multiple of it; zeros stand behind the last key


def key_at(position):
    """The key that stands at a position; both count from any multiple of GROUP."""
    t, j = position // 4 % 4, position % 4
    return position // 16 * 16 + 8 * (j // 2) + 2 * t + j % 2


def position_of(key):
    """key_at the other way round."""
    upper, t, odd = key // 8 % 2, key // 2 % 4, key % 2
    return key // 16 * 16 + 4 * t + 2 * upper + odd


ORDER = tuple(key_at(position) for position in range(GROUP))
