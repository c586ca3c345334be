"""What is timed of attention: the forward, the backward, or a step of both; and its check.

A pass has a name, as records say it: 'fwd', 'bwd', 'fwd_bwd', a step through autograd, and
'fwd_fp8' and 'fwd_fp8_hp', the forward with a preset on inputs that are quantised already.
"""

import math
import zlib
from collections.abc import Callable
from typing import Any

from cute_attn.tools import cases as c
from cute_attn.tools.cases import Case

NAMES = {
    "fwd": "forward",
    "bwd": "backward",
    "fwd_bwd": "forward + backward, host included",
    "fwd_fp8": "FP8 forward, inputs quantised beforehand",
    "fwd_fp8_hp": "FP8 forward with P and V in 16 bits, inputs quantised beforehand",
}
# in forwards: five matrix products against two
WORK = {"fwd": 1.0, "bwd": 2.5, "fwd_bwd": 3.5, "fwd_fp8": 1.0, "fwd_fp8_hp": 1.0}
TILE_ELEMENTS = 1 << 24  # of fp64 scores at a time: 128 MiB
HEADS = 3  # KV heads whose gradients are compared with fp64


def forward(which: str) -> bool:
    """Whether no gradients are taken."""
    return which not in ("bwd", "fwd_bwd")


def make_inputs(
    which: str, case: Case, data: str, device: str, slope: float = c.SLOPE
) -> tuple[Any, ...]:
    """q, k, v, and dout, which is N(0,1) on all data, where gradients are taken."""
    import torch

    q, k, v = c.make_inputs(case, data, device, slope)
    if forward(which):
        return q, k, v
    make = torch.Generator(device).manual_seed(zlib.crc32(f"{case.name} dout".encode()))
    shape = (case.batch, case.seqlen_q, case.heads_q, case.head_dim_v)
    return q, k, v, torch.randn(shape, generator=make, device=device).to(q.dtype)


def oracle(which: str, case: Case, inputs: tuple[Any, ...]) -> Callable[[Any], dict[str, Any]]:
    """fp64 on a sample, in bounded memory; the function gives a result's errors against it."""
    if forward(which):
        rows = c.sample_rows(case)
        q, k, v = inputs
        expected = c.attention_rows(q, k, v, rows, causal=case.causal)
        return lambda out: c.errors(out, rows, expected)
    heads = sample_heads(case)
    wanted = [attention_gradients(inputs, b, kv, causal=case.causal) for b, kv in heads]
    return lambda gradients: gradient_errors(gradients, heads, wanted)


def sample_heads(case: Case, most: int = HEADS) -> list[tuple[int, int]]:
    """(batch, KV head), the first and the last among them."""
    last, count = case.batch * case.heads_kv - 1, min(most, case.batch * case.heads_kv)
    places = [round(n * last / max(count - 1, 1)) for n in range(count)]
    return [divmod(place, case.heads_kv) for place in places]


def attention_gradients(
    inputs: tuple[Any, ...], batch: int, kv: int, *, causal: bool
) -> tuple[Any, Any, Any]:
    """fp64 gradients of one KV head and the query heads of its group, a block of rows at a time:
    dq (seqlen_q, group, head_dim), dk (seqlen_k, head_dim), dv (seqlen_k, head_dim_v)."""
    import torch

    q, k, v, dout = inputs
    group, (seqlen_q, seqlen_k) = q.shape[2] // k.shape[2], (q.shape[1], k.shape[1])
    K, V = k[batch, :, kv].double(), v[batch, :, kv].double()
    dQ = torch.empty(seqlen_q, group, q.shape[3], dtype=torch.float64, device=q.device)
    dK, dV = torch.zeros_like(K), torch.zeros_like(V)
    scale, keys = q.shape[3] ** -0.5, torch.arange(seqlen_k, device=q.device)
    block = max(1, TILE_ELEMENTS // seqlen_k)
    for g in range(group):
        for start in range(0, seqlen_q, block):
            rows = slice(start, min(start + block, seqlen_q))
            Q, dO = (t[batch, rows, kv * group + g].double() for t in (q, dout))
            S = (Q @ K.T).mul_(scale)
            if causal:
                last = torch.arange(rows.start, rows.stop, device=q.device) + seqlen_k - seqlen_q
                S.masked_fill_(keys > last[:, None], -math.inf)
            P = torch.softmax(S, -1)
            if causal and seqlen_q > seqlen_k:  # rows that see no key
                P.nan_to_num_(0.0)
            dP = dO @ V.T
            dS = P * (dP - (P * dP).sum(-1, keepdim=True))
            dQ[rows, g] = scale * (dS @ K)
            dK += scale * (dS.T @ Q)
            dV += P.T @ dO
    return dQ, dK, dV


def gradient_errors(
    gradients: tuple[Any, Any, Any], heads: list[tuple[int, int]], wanted: list[tuple[Any, ...]]
) -> dict[str, Any]:
    """As cases.errors; rel_error is the largest of dq's, dk's and dv's, which rel_errors has."""
    import torch

    dq, dk, dv = gradients
    group = dq.shape[2] // dk.shape[2]
    relative, largest = {}, 0.0
    for name, t, column in (("dq", dq, 0), ("dk", dk, 1), ("dv", dv, 2)):
        squares = norms = 0.0
        for (b, kv), want in zip(heads, wanted, strict=True):
            head = t[b, :, kv * group : (kv + 1) * group] if name == "dq" else t[b, :, kv]
            difference = head.double() - want[column]
            squares += difference.square().sum().item()
            norms += want[column].square().sum().item()
            largest = max(largest, difference.abs().max().item())
        relative[name] = math.sqrt(squares / (norms or 1.0))
    finite = all(bool(torch.isfinite(t).all().item()) for t in gradients)
    worst = math.nan if any(map(math.isnan, relative.values())) else max(relative.values())
    return {"rel_error": worst, "max_error": largest, "finite": finite, "rel_errors": relative}
