"""FP8 tensors and their factors -> one launch, on a GPU."""

import math

import torch
from torch import Tensor

from cute_attn import launch, tuning_fp8
from cute_attn.config import Fp8Config
from cute_attn.fp8_prepare import transpose_v
from cute_attn.problem import DTYPES, Fp8Problem
from cute_attn.quantize import E4M3, QuantizedQKV, shaped_as_v

FINE = 16  # keys that have a factor of their own where blocks of keys do not share one

_constants: dict[tuple[torch.device, float], Tensor] = {}


def attend(
    pack: QuantizedQKV,
    causal: bool,
    softmax_scale: float | None,
    out: Tensor | None,
    dtype: torch.dtype,
    config: Fp8Config | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a pack whose tensors and options are right, on its device."""
    device = pack.q.device
    launch.choose_arch(device, "sm90")
    with torch.no_grad(), torch.cuda.device(device):
        o = None if out is None else launch.storable(out)
        if o is None:
            width = shaped_as_v(pack).shape[3]
            o = torch.empty(*pack.q.shape[:3], width, dtype=dtype, device=device)
        batch, seqlen_q, heads_q, head_dim = pack.q.shape
        lse = torch.empty(batch, heads_q, seqlen_q, dtype=torch.float32, device=device)
        if lse.numel() == 0 or pack.k.shape[1] == 0:
            o.zero_(), lse.fill_(-math.inf)
        else:
            scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
            _launch(pack, causal, scale, o, lse, config)
        if out is not None and o.data_ptr() != out.data_ptr():
            out.copy_(o)
    return (o if out is None else out), lse


def _launch(
    pack: QuantizedQKV, causal: bool, scale: float, o: Tensor, lse: Tensor, given: Fp8Config | None
) -> None:
    problem = make_problem(pack, causal, scale < 0.0, o.dtype)
    config = choose_config(problem, given)
    q_factor, q_heads = _of_rows(pack)
    k_factor, shift, fine = _of_blocks(pack, config.tile_n)
    problem = problem.with_fine_k(fine)
    kernel = launch.compiled(problem, config, "sm90")
    q, k, v = (launch.loadable(t.detach()) for t in (pack.q, pack.k, operand_v(pack)))
    index = o.device.index
    launch._prepare_counters(index)
    captured = launch._capturing()
    counter = launch._capture_slot(index) if captured else launch._stream_counter(index)
    sms, size = launch.multiprocessors(o.device), max(abs(scale), launch.MIN_SCALE)
    of_v, dot = _of_channels(pack), pack.q_dot_k_shift
    if dot is None:
        dot = _constant(o.device, 0.0).expand(lse.shape)
    kernel(
        q, k, v, o, lse, counter, sms, size, q_heads, shift, q_factor, k_factor, *of_v, dot
    )  # fmt: skip


def operand_v(pack: QuantizedQKV) -> Tensor:
    """V as the kernel reads it."""
    if pack.v is None:
        assert pack.vt is not None
        return pack.vt
    return transpose_v(pack.v) if pack.v.dtype == E4M3 else pack.v


def make_problem(
    pack: QuantizedQKV, causal: bool, negative: bool, dtype: torch.dtype
) -> Fp8Problem:
    batch, seqlen_q, heads_q, head_dim = pack.q.shape
    v = shaped_as_v(pack)
    _, seqlen_k, heads_kv, head_dim_v = v.shape
    return Fp8Problem(
        DTYPES[str(dtype)],
        head_dim,
        head_dim_v,
        causal,
        negative,
        batch,
        seqlen_q,
        seqlen_k,
        heads_q,
        heads_kv,
        v_dtype=DTYPES.get(str(v.dtype), "e4m3"),
        channels=pack.v_descale is not None and pack.v_descale.dim() == 3,
        v_shift=pack.v_shift is not None,
    )


def choose_config(problem: Fp8Problem, config: Fp8Config | None) -> Fp8Config:
    if config is None:
        return tuning_fp8.pick(problem)
    reason = config.infeasible(problem)
    if reason:
        raise ValueError(f"config cannot serve this problem: {reason}")
    return config


# Factors of every shape that fwd allows, as the kernel reads them


def _of_rows(pack: QuantizedQKV) -> tuple[Tensor, int]:
    """(batch, groups of heads, seqlen_q), and the heads of a group."""
    descale, (batch, seqlen_q, heads_q, _) = pack.q_descale, pack.q.shape
    if descale is None:
        descale = _constant(pack.q.device, 1.0)
    if descale.dim() == 3:
        return descale, 1
    heads = pack.k.shape[2]
    if descale.dim() == 2:
        descale = descale.unsqueeze(2)
    return descale.expand(batch, heads, seqlen_q), heads_q // heads


def _of_blocks(pack: QuantizedQKV, tile_n: int) -> tuple[Tensor, int, bool]:
    """(batch, heads_kv, groups of keys), log2 of the KV blocks in a group, and whether a group is
    16 keys instead: where k_block and the kernel's blocks do not go into each other."""
    descale, (batch, seqlen_k, heads, _) = pack.k_descale, pack.k.shape
    blocks = -(-seqlen_k // tile_n)
    if descale is None:
        descale = _constant(pack.k.device, 1.0)
    if descale.dim() == 2:
        descale = descale.unsqueeze(2)
    if descale.dim() == 1 or descale.shape[2] == 1:
        return descale.expand(batch, heads, blocks), 0, False
    if pack.k_block % tile_n:
        of_16 = descale.repeat_interleave(pack.k_block // FINE, 2)
        return of_16[:, :, : -(-seqlen_k // FINE)], 0, True
    shared = pack.k_block // tile_n
    if shared & (shared - 1):
        return descale.repeat_interleave(shared, 2)[:, :, :blocks], 0, False
    return descale, shared.bit_length() - 1, False


def _of_channels(pack: QuantizedQKV) -> tuple[Tensor, Tensor]:
    """V's factors and its shift, (batch, heads_kv, head_dim_v)."""
    scale, shift, device = pack.v_descale, pack.v_shift, pack.k.device
    batch, _, heads, width = shaped_as_v(pack).shape
    if scale is None:
        scale = _constant(device, 1.0)
    scale = scale.unsqueeze(2) if scale.dim() == 2 else _in_pairs(scale)
    if shift is None:
        shift = _constant(device, 0.0)
    else:
        shift = _in_pairs(shift.float())
    shape = batch, heads, width
    return scale.expand(shape), shift.expand(shape)


def _in_pairs(x: Tensor) -> Tensor:
    """x with neighbours that can be loaded two at a time."""
    plain = x.stride(-1) == 1 and all(stride % 2 == 0 for stride in x.stride()[:-1])
    return x if x.dim() == 1 or (plain and x.data_ptr() % 8 == 0) else x.contiguous().clone()


def _constant(device: torch.device, value: float) -> Tensor:
    """(1,), kept: a call that gives no factors allocates none."""
    found = _constants.get((device, value))
    if found is None:
        found = _constants[device, value] = torch.full((1,), value, device=device)
    return found
