"""The device path with CPU tensors: a Python stand-in for the kernel.

It insists on what the real one requires of its operands, and computes with the reference.
"""

import contextlib
import math

import torch

import cute_attn
from cute_attn import backward, launch, reference, reference_backward
from cute_attn import compile as jit
from cute_attn.config import AmpereBwdConfig, BwdConfig

BF16 = torch.bfloat16


def tensors(batch=2, seqlen_q=5, seqlen_k=7, heads_q=4, heads_kv=2, d=16, dv=16, dtype=BF16):
    torch.manual_seed(0)
    return (
        torch.randn(batch, seqlen_q, heads_q, d).to(dtype),
        torch.randn(batch, seqlen_k, heads_kv, d).to(dtype),
        torch.randn(batch, seqlen_k, heads_kv, dv).to(dtype),
    )


def check_operand(t):
    assert t.data_ptr() % 16 == 0 and t.stride(3) == 1
    assert all(stride % 8 == 0 and stride >= 0 for stride in t.stride()[:3])


class Device:
    """What the stand-in saw."""

    def __init__(self):
        self.built, self.launches, self.counters = [], [], []
        self.scratch = []  # shapes, of each backward
        self.parts = 1  # of the keys, in the last launch
        self.capturing, self.stream, self.fail = False, 7, False
        self.fake_result = None  # instead of the reference, which copies

    def build(self, problem, config, arch):
        self.built.append((problem.static(), config, arch))
        if isinstance(config, BwdConfig | AmpereBwdConfig):
            return self.build_backward(problem, config)

        def kernel(q, k, v, o, lse, counter, sms, scale, *parts):
            if self.fail:
                raise RuntimeError("launch failed")
            for t in (q, k, v, o):
                check_operand(t)
            assert lse.is_contiguous() or lse.untyped_storage().nbytes() == 4
            assert lse.dtype == torch.float32
            assert len(parts) == (2 if config.split_kv else 0)
            self.parts = parts[0].shape[0] if parts else 1
            for part, shape in zip(parts, ((*o.shape,), (*lse.shape,))):
                leading = (self.parts,) if len(shape) == 4 else (2, self.parts)
                assert part.shape == (*leading, *shape)
                assert part.is_contiguous() and part.dtype == torch.float32
            assert counter.shape == (1,) and counter.item() == 0 and sms == 132
            assert type(scale) is float and scale > 0
            if self.fake_result is not None:
                o.copy_(self.fake_result)
                return
            scale = -scale if problem.negative_scale else scale
            result = reference.attention_blockwise(
                q, k, v, causal=problem.causal, softmax_scale=scale
            )
            o.copy_(result[0])
            if lse.is_contiguous():
                lse.copy_(result[1])
            self.launches.append((q, k, v, o))
            self.counters.append(counter.data_ptr())

        return kernel

    def build_backward(self, problem, config):
        def kernel(q, k, v, o, do, lse, dlse, *rest):
            dq, dk, dv, stats, parts, *shares, scale, score_scale = rest
            sms = shares.pop(-1 if len(shares) == 1 else 1)
            for t in (q, k, v, o, do, dq, dk, dv):
                check_operand(t)
            for t in (lse, dlse, stats, parts):
                assert t.dtype == torch.float32
            assert dlse.shape == lse.shape and stats.is_contiguous() and parts.is_contiguous()
            rows, _ = config.tile(problem)
            blocks = *lse.shape[:2], -(-lse.shape[2] // rows)
            assert stats.shape == (*blocks, config.block_words(problem))
            assert parts.shape == (*blocks, rows * config.width(problem))
            assert sms == 132 and (len(shares) == 3) == isinstance(config, BwdConfig)
            assert type(scale) is float and score_scale == scale != 0.0
            options = {"causal": problem.causal, "softmax_scale": scale, "dlse": dlse}
            got = reference_backward.attention_backward_blockwise(do, q, k, v, o, lse, **options)
            for t, values in zip((dq, dk, dv), got):
                t.copy_(values)
            self.launches.append((q, k, v, o, do))
            self.scratch.append([tuple(t.shape) for t in (stats, parts, *shares[:1])])

        return kernel


def install(monkeypatch):
    """Make CPU tensors take the device path; see the fixture stand_in."""
    fake, memory = Device(), {}

    def get(problem, config, arch):
        key = (problem.static(), config, arch)
        if key not in memory:
            memory[key] = fake.build(*key)
        return memory[key]

    def prepare(index):
        launch._idle_counters.setdefault(index, torch.zeros(1, dtype=torch.int32))
        launch._slots.setdefault(index, torch.zeros(8, 4, dtype=torch.int32))

    zeros = torch.zeros
    monkeypatch.setattr(launch, "_native_arch", lambda device: "sm90")
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "_current_device", lambda: 0)
    monkeypatch.setattr(launch, "_raw_stream", lambda index: fake.stream)
    monkeypatch.setattr(launch, "_capturing", lambda: fake.capturing)
    monkeypatch.setattr(launch, "_prepare_counters", prepare)
    monkeypatch.setattr(launch, "CAPTURE_SLOTS", 8)
    monkeypatch.setattr(
        launch, "_empty", lambda *a: torch.empty_strided(*a[:2], dtype=a[2]).fill_(math.nan)
    )
    monkeypatch.setattr(
        torch, "zeros", lambda *a, **k: zeros(*a, **{n: k[n] for n in k if n != "device"})
    )
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(jit, "get", get)
    monkeypatch.setattr(jit, "in_memory", lambda p, c, a: memory.get((p.static(), c, a)))
    for name in ("_plans", "_counters", "_idle_counters", "_slots", "_slots_used"):
        monkeypatch.setattr(launch, name, {})
    for name in ("_plans", "_zeros"):
        monkeypatch.setattr(backward, name, {})
    return fake


def check(q, k, v, **keywords):
    """fwd against the reference on contiguous copies."""
    out, lse = cute_attn.fwd(q, k, v, return_lse=True, **keywords)
    keywords.pop("out", None)
    want, want_lse = reference.attention(
        *(t.detach().contiguous().clone() for t in (q, k, v)), **keywords
    )
    torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=1e-3)
    return out, lse
