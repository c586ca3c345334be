"""V as the FP8 kernel reads it, made from V as callers hold it."""

import torch
from torch import Tensor
from torch.nn.functional import pad

# kernels/common/v_layout.py, which says why; no DSL is needed to know it
GROUP, PAD = 32, 128
ORDER = tuple(16 * (p // 16) + 8 * (p % 4 // 2) + 2 * (p // 4 % 4) + p % 2 for p in range(GROUP))


def transpose_v(v: Tensor) -> Tensor:
    """(batch, seqlen_k, nheads_kv, head_dim_v) in e4m3 -> (batch, nheads_kv, head_dim_v, seqlen_k
    padded with zeros to a multiple of 128), the keys of every 32 in the order of the kernel."""
    batch, seqlen, heads, width = v.shape
    codes = v.view(torch.uint8).permute(0, 2, 3, 1)
    codes = pad(codes, (0, -seqlen % PAD)).unflatten(3, (-1, GROUP))
    return codes[..., list(ORDER)].flatten(3).view(v.dtype)
