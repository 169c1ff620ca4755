"""What a run tells while it goes: every logged step to its writers and its progress bar, by the main process alone."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from wedlm_jax.distributed import is_main
from wedlm_jax.metrics.progress import ProgressBar
from wedlm_jax.metrics.throughput import Throughput
from wedlm_jax.metrics.writers import MetricsWriter, Numbers, fetch


class Report:
    """The metrics of a run.

    Args:
      workdir, name: of the run.
      config: of the run, as its tracker is to show it.
      start_step: of the checkpoint that it goes on from.
      total_steps: of the run.
      log_every: steps between two lines.
      devices: that it runs on.
      tensorboard, wandb: as `MetricsWriter` takes them.
    """

    def __init__(
        self,
        workdir: Path,
        name: str,
        config: Mapping[str, Any],
        *,
        start_step: int,
        total_steps: int,
        log_every: int,
        devices: int,
        tensorboard: bool,
        wandb: str | None,
    ):
        self._log_every, self._total = log_every, total_steps
        self._writer: MetricsWriter | None = None
        if is_main():
            self._writer = MetricsWriter(
                workdir, start_step=start_step, tensorboard=tensorboard, wandb=wandb, name=name, config=config
            )
        console = None if is_main() else Console(quiet=True)
        self._bar = ProgressBar(name, start_step=start_step, total_steps=total_steps, console=console)
        self.throughput = Throughput(devices)

    def step(self, step: int, metrics: Mapping[str, jax.Array], more: Numbers | None = None) -> dict[str, Any]:
        """Fetches the metrics of a step, which waits for it, and tells them where they are due.

        Args:
          more: numbers of this step that are on the host already; what validation measured is told in any case.

        Returns:
          the numbers.
        """
        numbers: dict[str, Any] = fetch(metrics) | dict(more or {})
        self.throughput.add(numbers["tokens"], numbers["useful_flops"])
        measured = any(name.startswith("validation_") for name in numbers)
        if step % self._log_every == 0 or step == self._total or measured:
            rates = self.throughput.take()
            if self._writer is not None:
                self._writer.write(step, numbers | rates)
            self._bar.show(
                step, numbers["loss"], rates.get("tokens_per_second"), rates.get("mfu"), numbers.get("epoch")
            )
        return numbers

    def validation(self, step: int, numbers: Numbers, samples: Sequence[Mapping[str, Any]]) -> None:
        """Shows what was measured on held-out data, and writes the completions."""
        losses = ", ".join(f"{name.removeprefix('validation_')} {_number(value)}" for name, value in numbers.items())
        self._bar.print(f"step {step}, held out: {losses}")
        for sample in samples:
            if self._writer is not None:
                self._writer.write_sample(step, sample)
            rate = f"{sample['decoder']}, {sample['tokens_per_forward']:.2f} tokens per forward"
            self._bar.print(f"  {sample['prompt'][-200:]!r} -> {sample['completion']!r} [{rate}]")

    def __enter__(self) -> Report:
        self._open = contextlib.ExitStack()
        if self._writer is not None:
            self._open.enter_context(self._writer)
        self._open.enter_context(self._bar)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.__exit__(*exception)


def _number(value: float | int | None) -> str:
    return "-" if value is None else f"{value:.3f}"
