"""How calls are timed: interleaved, in rotating order, one event pair a call.

On a GPU the time is the device's: CUDA events around one call, with 1 GiB fills in front that
evict the L2 cache and keep the queue ahead of the GPU, so that host time does not count. Where the
GPU was there before the last launch was queued it may have counted: Timer.late says how often.
Without a GPU it is the wall clock's. Steps, whose host time counts, take the wall clock's
everywhere.
"""

import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

FILL_BYTES = 1 << 30
FILLS = 1  # 0.3 ms on an H200, above the host time of a forward
FILLS_BACKWARD = 4  # several launches, some through autograd or with tens of arguments in Python
HOST_CALLS = 200  # a sample of host time; below the depth of the launch queue
STEPS = 20  # timed in a row: the wait for the last one's end is a small part of them
Call = Callable[[], Any]
Scope = Callable[[], AbstractContextManager[Any]]


def order(n: int, turn: int) -> list[int]:
    """Position in a round biases clocks and heat: rotate, and go backwards every other cycle, so
    that everyone has every place and every neighbour."""
    rotated = [(i + turn) % n for i in range(n)]
    return rotated[::-1] if turn // n % 2 else rotated


def quantile(values: Sequence[float], q: float) -> float:
    """Linear between order statistics."""
    ranked = sorted(values)
    place = q * (len(ranked) - 1)
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


class Timer:
    """Device time on device 'cuda', wall clock on 'cpu'."""

    def __init__(self, device: str) -> None:
        import torch

        self.torch, self.gpu = torch, device == "cuda"
        self.fills = FILLS
        self.late: list[int] = []  # of the last rounds, for each call
        if self.gpu:
            self.filler = torch.empty(FILL_BYTES, dtype=torch.uint8, device=device)

    def synchronize(self) -> None:
        if self.gpu:
            self.torch.cuda.synchronize()

    def rounds(
        self,
        calls: Sequence[Call],
        scopes: Sequence[Scope],
        most: int,
        seconds: float,
        tick: Callable[[float], None] = lambda part: None,
        steps: int = 0,
    ) -> list[list[float]]:
        """Milliseconds of every call: `most` rounds, or fewer when `seconds` are over, three at
        least. tick is told the part that is done. With steps each is the mean of so many calls in
        a row by the wall clock, from an idle GPU to an idle GPU."""
        times: list[list[float]] = [[] for _ in calls]
        self.late = [0] * len(calls)
        if not calls:
            return times
        started = time.monotonic()
        for turn in range(most):
            places = order(len(calls), turn)
            if steps:
                taken = [self._in_a_row(calls[i], scopes[i], steps) for i in places]
            else:
                taken = self._round(calls, scopes, places)
            for i, ms in zip(places, taken, strict=True):
                times[i].append(ms)
            spent = time.monotonic() - started
            tick(max((turn + 1) / most, min(spent / max(seconds, 1e-9), 1.0)))
            if spent > seconds and turn >= 2:
                break
        return times

    def _round(
        self, calls: Sequence[Call], scopes: Sequence[Scope], places: Sequence[int]
    ) -> list[float]:
        if not self.gpu:
            return [self._wall(calls[i], scopes[i]) for i in places]
        pairs = []
        for i in places:
            start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
            with scopes[i]():
                for _ in range(self.fills):
                    self.filler.zero_()
                start.record()
                calls[i]()
                end.record()
                self.late[i] += start.query()
            pairs.append((start, end))
        self.torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def _in_a_row(self, call: Call, scope: Scope, steps: int) -> float:
        with scope():
            self.synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                call()
            self.synchronize()
            return (time.perf_counter() - start) / steps * 1e3

    def _wall(self, call: Call, scope: Scope) -> float:
        with scope():
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3

    def host(
        self,
        calls: Sequence[Call],
        scopes: Sequence[Scope],
        samples: int = 20,
        in_a_row: int = HOST_CALLS,
    ) -> list[list[float]]:
        """Microseconds of host time a warm call takes: samples of that many calls in a row with
        no synchronisation among them."""
        times: list[list[float]] = [[] for _ in calls]
        for turn in range(samples if calls else 0):
            for i in order(len(calls), turn):
                call = calls[i]
                with scopes[i]():
                    self.synchronize()
                    start = time.perf_counter()
                    for _ in range(in_a_row):
                        call()
                    times[i].append((time.perf_counter() - start) / in_a_row * 1e6)
                self.synchronize()
        return times


class Clocks:
    """SM clock, power and temperature, sampled by nvidia-smi beside the measurement."""

    QUERY = "clocks.sm,power.draw,temperature.gpu"
    NAMES = ("sm_mhz", "watts", "celsius")

    def __init__(self, device: str) -> None:
        self.samples: list[tuple[float, list[float]]] = []
        self.process: subprocess.Popen[str] | None = None
        if device != "cuda":
            return
        command = ["nvidia-smi", f"--query-gpu={self.QUERY}", "--format=csv,noheader,nounits"]
        try:
            import torch

            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            self.process = subprocess.Popen(
                [*command, f"--id=GPU-{uuid}", "--loop-ms=100"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except (OSError, AttributeError):
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            try:
                self.samples.append((time.monotonic(), [float(x) for x in line.split(",")]))
            except ValueError:
                continue

    def since(self, start: float) -> dict[str, float]:
        """Medians of the samples taken since then; empty without nvidia-smi."""
        taken = [values for at, values in self.samples if at >= start]
        return {
            name: quantile([values[i] for values in taken], 0.5)
            for i, name in enumerate(self.NAMES)
            if taken
        }

    def close(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
