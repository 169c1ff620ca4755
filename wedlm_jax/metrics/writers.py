"""Where metrics go: one JSON line a logged step always, TensorBoard and Weights & Biases beside it.

A number that is not finite is written as `null`, which every reader of JSON takes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from wedlm_jax.errors import UserError, reason, writing
from wedlm_jax.results import replacing

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
WANDB_FILE = "wandb_id"  # of the run at Weights & Biases that the workdir is

_KEPT = "and start the same command again; the checkpoints are kept"

Numbers = Mapping[str, float | int | None]


class StepLines:
    """A JSONL file of a run, an object with its `step` a line. A resumed run first drops the lines after its checkpoint:
    it will write them again."""

    def __init__(self, path: Path, *, start_step: int):
        self._path = path
        with writing(path, _KEPT):
            lines = _lines(path) if path.is_file() else []
        kept = "".join(f"{line}\n" for line, record in _records(path, lines) if record["step"] <= start_step)
        # At once or not at all: a run that is killed here has its lines still.
        partial = path.with_name(f".{path.name}.partial")
        with writing(path, _KEPT):
            partial.write_text(kept, encoding="utf-8")
            os.replace(partial, path)
            self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """On disk when it returns."""
        with writing(self._path, _KEPT):
            self._file.write(json.dumps({"step": step, **record}, ensure_ascii=False, allow_nan=False) + "\n")

    def close(self) -> None:
        with writing(self._path, _KEPT):
            self._file.close()


class EventFile:
    """TensorBoard's file of a run. It is written here and not by a `SummaryWriter`, whose thread dies of a full disk: its queue
    is then never emptied, and the run waits for it for ever."""

    def __init__(self, folder: Path, *, start_step: int):
        from tensorboardX import summary  # here, because its import takes a second
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._folder, self._summary, self._event = folder, summary, Event
        with writing(folder, _KEPT):
            folder.mkdir(exist_ok=True)
            self._file = EventsWriter(str(folder / "events"))
        # TensorBoard then hides what was written of later steps: they will be written again.
        self._add(start_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, numbers: Mapping[str, float | int]) -> None:
        """On disk when it returns."""
        for name, value in numbers.items():
            self._add(step, summary=self._summary.scalar(name, value))
        self._flush()

    def write_text(self, step: int, name: str, text: str) -> None:
        """On disk when it returns."""
        self._add(step, summary=self._summary.text(name, text))
        self._flush()

    def close(self) -> None:
        with writing(self._folder, _KEPT):
            self._file.close()

    def _add(self, step: int, **what: Any) -> None:
        with writing(self._folder, _KEPT):
            self._file.write_event(self._event(step=step, wall_time=time.time(), **what))

    def _flush(self) -> None:
        with writing(self._folder, _KEPT):
            self._file.flush()


class MetricsWriter:
    """The metrics of a run, by step: `metrics.jsonl`, and what else is asked for.

    Args:
      workdir: of the run.
      start_step: of the checkpoint that it goes on from; later lines are dropped.
      tensorboard: also write event files.
      wandb: also send to this project of Weights & Biases.
      name: of the run there.
      config: of the run there.

    Raises:
      UserError: a file cannot be written, or `wandb` is asked for and not installed or not to be reached.
    """

    def __init__(
        self,
        workdir: Path,
        *,
        start_step: int,
        tensorboard: bool = False,
        wandb: str | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        self._lines = StepLines(workdir / METRICS_FILE, start_step=start_step)
        self._samples = StepLines(workdir / SAMPLES_FILE, start_step=start_step)
        self._tensorboard = EventFile(workdir / TENSORBOARD_FOLDER, start_step=start_step) if tensorboard else None
        self._wandb = None if wandb is None else _wandb(wandb, name, workdir, config)

    def write(self, step: int, metrics: Numbers) -> None:
        self._lines.write(step, metrics)
        numbers = {key: value for key, value in metrics.items() if value is not None}
        if self._tensorboard is not None:
            self._tensorboard.write(step, numbers)
        self._send("log", numbers, step=step)

    def write_sample(self, step: int, sample: Mapping[str, Any]) -> None:
        """A completion, to `samples.jsonl` and TensorBoard's text."""
        self._samples.write(step, sample)
        if self._tensorboard is not None:
            self._tensorboard.write_text(step, f"sample {sample['number']}", str(sample["completion"]))

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: Any) -> None:
        closing = contextlib.ExitStack()  # each is closed, the last first, whatever a full disk does to another
        closing.push(self._finish)
        for sink in (self._tensorboard, self._samples, self._lines):
            if sink is not None:
                closing.callback(sink.close)
        closing.__exit__(*exception)

    def _finish(self, kind: object, *exception: object) -> None:
        """The run at Weights & Biases, as failed where it ends by an error."""
        self._send("finish", exit_code=0 if kind is None else 1)

    def _send(self, what: str, *arguments: Any, **named: Any) -> None:
        """To Weights & Biases, if asked for; where its process or the network is gone, the training goes on without."""
        if self._wandb is None:
            return
        try:
            getattr(self._wandb, what)(*arguments, **named)
        except Exception as error:  # its own, those of pipes and of HTTP
            told = f"warning: Weights & Biases is told no more ({reason(error)}); {METRICS_FILE} has all"
            print(told, file=sys.stderr, flush=True)
            self._wandb = None


def read_metrics(workdir: str | Path) -> list[dict[str, Any]]:
    """The logged steps of a workdir, in order; None stands for a number that was not finite.

    Raises:
      UserError: there is no such file, or a line of it is no JSON object with its step and numbers.
    """
    path = Path(workdir) / METRICS_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; python -m wedlm_jax.train writes it")
    records = [record for _, record in _records(path, _lines(path))]
    for line, record in enumerate(records, 1):
        for name, value in record.items():
            if value is not None and not isinstance(value, int | float):
                raise UserError(f"{path}:{line}: {name} is {json.dumps(value)[:40]}, no number; remove the line")
    return records


def _lines(path: Path) -> list[bytes]:
    """The complete lines; a killed run may have left half a line at the end."""
    *lines, _ = path.read_bytes().split(b"\n")
    return lines


def _records(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line with what it says."""
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode()
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: no JSON ({error}); remove the line") from None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise UserError(f"{path}:{number}: no JSON object with its step; remove the line")
        yield text, record


def fetch(metrics: Mapping[str, jax.Array]) -> dict[str, float | int | None]:
    """Device scalars as Python numbers, None for one that is not finite.

    Waits for the step that made them, so ask for it after the next was dispatched.
    """
    numbers = {name: value.item() for name, value in sorted(jax.device_get(dict(metrics)).items())}
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def require_wandb(project: str) -> Any:
    """The package; a `UserError` says how to get it. Asked for before a model is loaded for a run that needs it."""
    try:
        import wandb
    except ImportError:
        raise UserError(
            f"train.wandb={project} needs the package wandb: pip install wandb, or set train.wandb=none"
        ) from None
    return wandb


def _wandb(project: str, name: str | None, workdir: Path, config: Mapping[str, Any] | None) -> Any:
    wandb = require_wandb(project)
    run_id = _wandb_id(workdir)
    try:
        return wandb.init(
            project=project, name=name, id=run_id, resume="allow", dir=str(workdir), config=dict(config or {})
        )
    except Exception as error:  # of several types: no key, no network, no such entity
        raise UserError(
            f"train.wandb={project}: {reason(error)}; run wandb login, or set WANDB_MODE=offline or train.wandb=none"
        ) from error


def _wandb_id(workdir: Path) -> str:
    """One workdir is one run there, also after it was resumed or moved; one that is begun again is another run."""
    file = workdir / WANDB_FILE
    if not file.is_file():
        # Earlier versions named a run after its workdir's path; the package keeps a folder for each time that it went on.
        earlier = hashlib.sha256(str(workdir.absolute()).encode()).hexdigest()[:16]
        known = any((workdir / "wandb").glob(f"*run-*-{earlier}"))
        with replacing(file) as partial:
            partial.write_text(f"{earlier if known else secrets.token_hex(8)}\n")
    return file.read_text().strip()
