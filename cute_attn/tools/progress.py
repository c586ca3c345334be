"""A progress bar on stderr: live on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable
from types import TracebackType

WIDTH, SECONDS_BETWEEN_LINES = 24, 15.0


class Progress:
    def __init__(self, total: float, label: str = "") -> None:
        self.total, self.label = max(total, 1e-9), label
        self.done, self.started = 0.0, time.monotonic()
        self.live = sys.stderr.isatty()
        self.shown = self.started
        self.note = ""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()

    def at(self, done: float, note: str = "") -> None:
        """Show that `done` of the total is done; done may be a fraction of a step."""
        self.done, self.note = done, note or self.note
        now = time.monotonic()
        if now - self.shown >= (0.1 if self.live else SECONDS_BETWEEN_LINES):
            self.shown = now
            end = "" if self.live else "\n"
            print(("\r\033[K" if self.live else "") + self.line(now), end=end, file=sys.stderr)
            sys.stderr.flush()

    def step(self, n: int) -> Callable[[float], None]:
        """Shows part of step n."""
        return lambda part: self.at(n + part)

    def line(self, now: float) -> str:
        part = min(self.done / self.total, 1.0)
        filled = int(part * WIDTH)
        spent = now - self.started
        left = f"{spent / part - spent:.0f} s left" if part > 0.02 else "..."
        bar = "#" * filled + "." * (WIDTH - filled)
        return f"{self.label} [{bar}] {part:4.0%}  {spent:.0f} s, {left}  {self.note}"

    def clear(self) -> None:
        """Before something else is printed."""
        if self.live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
