"""Metrics: one JSON line a logged step, and a progress bar with tokens/s and ETA."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from wedlm_jax.errors import UserError

FILE = "metrics.jsonl"
SECONDS_BETWEEN_LINES = 10.0  # of the progress where there is no terminal


class MetricsWriter:
    """Appends to `metrics.jsonl`. A resumed run first drops the lines after its checkpoint: it will write them again."""

    def __init__(self, workdir: Path, *, start_step: int):
        self._path = workdir / FILE
        kept = [line for line in self._lines() if json.loads(line)["step"] <= start_step]
        self._path.write_text("".join(f"{line}\n" for line in kept))
        self._file = self._path.open("a", buffering=1)

    def write(self, step: int, metrics: Mapping[str, float | int]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def _lines(self) -> list[str]:
        """The complete lines; a killed run may have left half a line at the end."""
        if not self._path.is_file():
            return []
        *lines, _ = self._path.read_text().split("\n")
        return lines


def read_metrics(workdir: str | Path) -> list[dict[str, Any]]:
    """The logged steps of a workdir, in order."""
    path = Path(workdir) / FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; python -m wedlm_jax.train writes it")
    return [json.loads(line) for line in path.read_text().splitlines()]


def fetch(metrics: Mapping[str, jax.Array]) -> dict[str, float | int]:
    """Device scalars as Python numbers. Waits for the step that made them, so ask for it after the next was dispatched."""
    return {name: value.item() for name, value in sorted(jax.device_get(dict(metrics)).items())}


class Throughput:
    """Tokens per second between two logged steps. The first step only starts the clock: it was compiled in its own time."""

    def __init__(self) -> None:
        self._tokens = 0
        self._since: float | None = None

    def add(self, tokens: int) -> None:
        if self._since is None:
            self._since = time.perf_counter()
        else:
            self._tokens += tokens

    def take(self) -> float | None:
        """The rate since the last call; None before there is one."""
        now = time.perf_counter()
        if not self._tokens or self._since is None:
            return None
        rate = self._tokens / (now - self._since)
        self._tokens, self._since = 0, now
        return rate


class ProgressBar:
    """A bar with loss, tokens/s and ETA on a terminal; elsewhere (a log file) a plain line every few seconds."""

    def __init__(self, name: str, *, start_step: int, total_steps: int, console: Console | None = None):
        self._console = console or Console()
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

    def show(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        now = time.perf_counter()
        self._first = self._first or (step, now)
        eta = self._eta(step, now)
        shown = f"loss {loss:.4f}" + (f" · {tokens_per_second:,.0f} tokens/s" if tokens_per_second else "")
        self._bar.update(self._task, completed=step, shown=shown, eta=eta)
        due = now - self._last_line >= SECONDS_BETWEEN_LINES or step == self._total
        if due and not self._console.is_terminal:
            self._last_line = now
            line = f"{self._name} {step}/{self._total} · {shown} · ETA {eta}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def _eta(self, step: int, now: float) -> str:
        first, since = self._first or (step, now)
        if step == first:
            return "-:--"
        left = round((now - since) / (step - first) * (self._total - step))
        return (
            f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}" if left >= 3600 else f"{left // 60}:{left % 60:02d}"
        )
