"""The progress of a run, for people: a bar with ETA on a terminal, a line now and then in a log file."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from wedlm_jax.preemption import go_on_unread

SECONDS_BETWEEN_LINES = 10.0  # of the progress where there is no terminal


class _Console(Console):
    def on_broken_pipe(self) -> None:
        if not go_on_unread():
            super().on_broken_pipe()


class ProgressBar:
    """A bar with loss, tokens/s, MFU and ETA on a terminal; elsewhere (a log file) a plain line every few seconds."""

    def __init__(self, name: str, *, start_step: int, total_steps: int, console: Console | None = None):
        self._console = console or _Console()
        self._name, self._total = name, total_steps
        self._first: tuple[int, float] | None = None  # the first step shown and when, which the ETA counts from
        self._last_line = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TextColumn("{task.fields[eta]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(name, total=total_steps, completed=start_step, shown="compiling", eta="-:--")

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def show(
        self,
        step: int,
        loss: float | None,
        tokens_per_second: float | None,
        mfu: float | None = None,
        epoch: float | None = None,
    ) -> None:
        """Moves the bar; a loss that is None was not finite."""
        now = time.perf_counter()
        self._first = self._first or (step, now)
        eta = self._eta(step, now)
        parts = ["loss not finite" if loss is None else f"loss {loss:.4f}"]
        parts += [f"epoch {epoch:.2f}"] if epoch is not None else []
        parts += [f"{tokens_per_second:,.0f} tokens/s"] if tokens_per_second else []
        parts += [f"MFU {100 * mfu:.1f} %"] if mfu is not None else []
        shown = " · ".join(parts)
        self._bar.update(self._task, completed=step, shown=shown, eta=eta)
        due = now - self._last_line >= SECONDS_BETWEEN_LINES or step == self._total
        if due and not self._console.is_terminal:
            self._last_line = now
            self.print(f"{self._name} {step}/{self._total} · {shown} · ETA {eta}")

    def print(self, line: str) -> None:
        """A line above the bar."""
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _eta(self, step: int, now: float) -> str:
        first, since = self._first or (step, now)
        if step == first:
            return "-:--"
        left = round((now - since) / (step - first) * (self._total - step))
        return (
            f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}" if left >= 3600 else f"{left // 60}:{left % 60:02d}"
        )
