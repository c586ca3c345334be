"""V in e4m3 as the forward kernel reads it: vt, keys next to each other, in the order that
kernels/common/v_layout.py explains. quantize_qkv makes it in its own pass; transpose_v is for e4m3
tensors that come from elsewhere, in FlashAttention-3's layout.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_attn import compile as jit
from cute_attn import launch
from cute_attn.config import TransposeConfig
from cute_attn.problem import Problem, round_up

E4M3 = torch.float8_e4m3fn
PADDING = 128  # vt's keys are a multiple of it
_GROUP = (2, 2, 4, 2)  # of 32 keys, as (half, upper, thread, odd); positions: thread before upper


@dataclass(slots=True)
class Plan:
    problem: Problem
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    index: int  # of the device; -1: torch's operations
    direct: bool  # v can be read as it is, if its base is aligned
    kernel: jit.Kernel | None = None


_plans: dict[tuple[object, ...], Plan] = {}


def transpose_v(v: Tensor) -> Tensor:
    """vt (batch, nheads_kv, head_dim_v, keys) of v (batch, seqlen_k, nheads_kv, head_dim_v), both
    float8_e4m3fn, contiguous, the codes as they are; keys are padded with zeros to a multiple of
    128.

    head_dim_v is a multiple of 16 up to 256. On a Hopper GPU one kernel reads v once; it is copied
    before where it does not start at a multiple of 16 bytes, its last stride is not 1 or another
    one is no multiple of 16. CPU tensors take torch's operations.
    """
    key = (v.shape, v.stride(), v.dtype, v.device)
    plan = _plans.get(key)
    if plan is None:
        plan = make_plan(v)
        if len(_plans) >= launch.MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    if plan.index < 0:
        return transposed(v)
    if launch._current_device() == plan.index:
        return launch_transpose(plan, v)
    with torch.cuda.device(plan.index):
        return launch_transpose(plan, v)


def make_plan(v: Tensor) -> Plan:
    """Check the call; nothing is compiled yet."""
    if v.dtype != E4M3:
        raise TypeError(f"v.dtype is {v.dtype}: {E4M3} is wanted")
    if v.dim() != 4 or v.shape[3] % 16 or not 16 <= v.shape[3] <= 256:
        raise ValueError(
            f"v.shape is {tuple(v.shape)}: (batch, seqlen_k, nheads_kv, head_dim_v) is wanted, "
            "head_dim_v a multiple of 16 up to 256"
        )
    shape = vt_shape(v)
    problem = Problem("bf16", 16, v.shape[3]).static()  # of e4m3 only head_dim_v matters
    empty = v.device.type == "cpu" or 0 in shape
    native = launch.choose_hopper(v.device, None, "FP8")
    index = -1 if empty or native == "cpu" else v.device.index or 0
    direct = v.stride(3) == 1 and all(s % 16 == 0 and s >= 0 for s in v.stride()[:3])
    return Plan(problem, shape, launch._contiguous_stride(shape), index, direct)


def launch_transpose(plan: Plan, v: Tensor) -> Tensor:
    """v's device is current here."""
    if plan.index < 0:
        return transposed(v)
    if plan.kernel is None:
        plan.kernel = launch.compiled(plan.problem, TransposeConfig(), "sm90")
    vt: Tensor = launch._empty(plan.shape, plan.stride, E4M3)
    plan.kernel(v if plan.direct and not v.data_ptr() & 15 else _loadable(v), vt)
    return vt


def _loadable(v: Tensor) -> Tensor:
    v = launch._plain_unit_dims(v)
    direct = v.stride(3) == 1 and all(s % 16 == 0 and s >= 0 for s in v.stride()[:3])
    return v if direct and v.data_ptr() % 16 == 0 else launch._copy(v)


def vt_shape(v: Tensor) -> tuple[int, ...]:
    """Of v's (batch, seqlen_k, nheads_kv, head_dim_v)."""
    batch, seqlen, heads, dim = v.shape
    return batch, heads, dim, round_up(seqlen, PADDING)


# In torch


def transposed(v: Tensor) -> Tensor:
    """As transpose_v, on any device and whatever the dtype is."""
    batch, heads, dim, padded = vt_shape(v)
    codes = v.view(torch.uint8) if v.dtype == E4M3 else v
    rows = codes.new_zeros(batch, padded, heads, dim)
    rows[:, : v.shape[1]] = codes
    groups = rows.unflatten(1, (padded // 32, *_GROUP))  # (b, n, half, upper, thread, odd, h, d)
    vt = groups.permute(0, 6, 7, 1, 2, 4, 3, 5).reshape(batch, heads, dim, padded)
    return vt.view(v.dtype)


def restored(vt: Tensor, seqlen: int) -> Tensor:
    """The other way round: (batch, seqlen, nheads_kv, head_dim_v), contiguous."""
    codes = vt.view(torch.uint8) if vt.dtype == E4M3 else vt
    half, upper, thread, odd = _GROUP
    groups = codes.unflatten(3, (vt.shape[3] // 32, half, thread, upper, odd))
    rows = groups.permute(0, 3, 4, 6, 5, 7, 1, 2).flatten(1, 5)
    return rows[:, :seqlen].contiguous().view(vt.dtype)
