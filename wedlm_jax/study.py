"""Study: experiments side by side, each with several training seeds, as one command (an ablation, a scaling curve).

A study is a function `NAME() -> Study` in `experiments/NAME.py`; `python -m wedlm_jax.train --exp NAME` runs it. Every run
is a command that one could type, printed before it runs; what is finished is kept, so a stopped study goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from wedlm_jax.errors import UserError
from wedlm_jax.preemption import EXIT_STATUS, STARTED_BY
from wedlm_jax.results import save_figure, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path("evaluation") / "results.json"  # in a workdir, written by wedlm_jax.evaluate
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # the last three are a terminal's


@dataclasses.dataclass(frozen=True)
class Stage:
    """One training run. It starts from the stage before it, if there is one."""

    experiment: str  # as --exp names it
    overrides: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """A folder name that tells stages apart, and names no checkpoint of another folder as `runs/base@best` does."""
        return "+".join((self.experiment.replace(":", "."), *self.overrides)).replace("/", "_").replace("@", "_")


@dataclasses.dataclass(frozen=True)
class Measure:
    """One number of an evaluation's results.json, and one panel of the plot."""

    label: str
    field: str  # of the row of `task` and `decoder`, or of the results themselves where there is no task
    task: str | None = None
    decoder: str | None = None  # the row's label
    minus: str | None = None  # the label of another row of `task`, whose number is subtracted
    threshold: float | None = None  # drawn as a line through the panel

    def __post_init__(self) -> None:
        if self.minus is not None and (self.task is None or self.decoder is None):
            raise UserError(f"measure {self.label}: minus={self.minus} names a row of a task; set task and decoder")

    def read(self, results: Mapping[str, Any], source: Path) -> float:
        """The number.

        Raises:
          UserError: `results`, from the file `source`, does not hold it.
        """
        number = self._of(self.decoder, results, source)
        return number if self.minus is None else number - self._of(self.minus, results, source)

    def _of(self, decoder: str | None, results: Mapping[str, Any], source: Path) -> float:
        return float(_field(self.field, self.task, decoder, results, source, self.label))


@dataclasses.dataclass(frozen=True)
class Curve:
    """A list of numbers of an evaluation's results.json, and one panel of the plot: a line for each arm, the mean of seeds."""

    label: str
    field: str  # of the row of `task` and `decoder`
    task: str
    decoder: str  # the row's label
    x_label: str  # the places of the numbers in the list, from 1 on

    def read(self, results: Mapping[str, Any], source: Path) -> list[float]:
        """The numbers.

        Raises:
          UserError: `results`, from the file `source`, does not hold them.
        """
        return [float(number) for number in _field(self.field, self.task, self.decoder, results, source, self.label)]

    def mean(self, seeds: list[list[float]]) -> list[float]:
        """The mean at each place; a seed whose list is shorter counts as 0 there."""
        places = itertools.zip_longest(*seeds, fillvalue=0.0)
        return [statistics.fmean(numbers) for numbers in places]


def _field(
    name: str, task: str | None, decoder: str | None, results: Mapping[str, Any], source: Path, label: str
) -> Any:
    """A field of the row of `task` and `decoder`, or of the results themselves where there is no task."""
    rows = [results] if task is None else results["rows"]
    found = [row for row in rows if task is None or (row["task"], row["label"]) == (task, decoder)]
    if not found or found[0].get(name) is None:
        raise UserError(f"{source}: holds no {label}; remove it, and the study evaluates again")
    return found[0][name]


@dataclasses.dataclass(frozen=True)
class Study:
    """What is compared: every arm is trained with every seed, its last stage is evaluated."""

    name: str
    arms: Mapping[str, tuple[Stage, ...]]  # by label, in the order of the plot
    measures: tuple[Measure, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    curves: tuple[Curve, ...] = ()

    def __post_init__(self) -> None:
        if not self.arms or not self.measures or not self.seeds or not all(self.arms.values()):
            raise UserError(f"study {self.name}: needs arms of at least one stage, measures and seeds")

    @property
    def workdir(self) -> Path:
        return Path("runs") / self.name


def run_study(
    study: Study,
    workdir: Path,
    run: Callable[[list[str]], None] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains and evaluates what is missing; prints a table; writes results.json and results.png.

    Args:
      study: what to compare.
      workdir: runs lie in workdir/SEED/STAGES; arms whose first stages are the same share them.
      run: runs one command, given as its arguments after `python -m`; a child process if not given.
      console: where the table goes.

    Returns:
      {"name", "seeds", "arms": {arm: {measure: [a value for each seed]}}}, and {"curves": {arm: {curve: [a list for each seed]}}}
      where the study has curves.
    """
    console = console or Console()
    run = run or _child_process
    values: dict[str, dict[str, list[float]]] = {arm: {m.label: [] for m in study.measures} for arm in study.arms}
    curves: dict[str, dict[str, list[list[float]]]] = {arm: {c.label: [] for c in study.curves} for arm in study.arms}
    trained: set[Path] = set()
    for seed in study.seeds:
        for arm, stages in study.arms.items():
            console.rule(f"{study.name}: {arm}, seed {seed}")
            chain: list[str] = []
            before: Path | None = None
            for stage in stages:
                chain.append(stage.slug)
                folder = workdir / str(seed) / "__".join(chain)
                if folder not in trained:
                    run([*_training(stage, folder, before, seed)])
                    trained.add(folder)
                before = folder
            source = folder / RESULTS
            if not source.is_file():
                run(["wedlm_jax.evaluate", "--exp", stages[-1].experiment, "--workdir", str(folder)])
            results = _read(source)
            for measure in study.measures:
                values[arm][measure.label].append(measure.read(results, source))
            for curve in study.curves:
                curves[arm][curve.label].append(curve.read(results, source))
    summary: dict[str, Any] = {"name": study.name, "seeds": list(study.seeds), "arms": values}
    if study.curves:
        summary["curves"] = curves
    write_json(workdir / "results.json", summary)
    save_figure(workdir / "results.png", _plot(study, values, curves))
    console.print(_table(study, values))
    console.print(f"wrote {workdir / 'results.json'} and {workdir / 'results.png'}")
    return summary


def _read(source: Path) -> dict[str, Any]:
    try:
        return json.loads(source.read_text(encoding="utf-8"))
    except ValueError as error:  # cut off, or not UTF-8
        raise UserError(f"{source}: is not JSON ({error}); remove it, and the study evaluates again") from error


def _training(stage: Stage, folder: Path, before: Path | None, seed: int) -> Iterator[str]:
    yield from ("wedlm_jax.train", "--exp", stage.experiment, "--workdir", str(folder))
    yield from stage.overrides
    yield f"train.seed={seed}"
    if before is not None:
        yield f"init_from={before}"


def _child_process(arguments: list[str]) -> None:
    """Runs one command, in a process group of its own: what tells the study to end comes to it from this process alone, and so
    once, also where all of the study's group is told (Ctrl-C, `timeout`). This process outlives it, so that a training can save
    first; the study then ends too, with the status of the command."""
    print("$ python -m", *arguments, flush=True)
    told: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)
        if child is not None:
            child.send_signal(number)

    def pause(number: int, frame: FrameType | None) -> None:
        """Ctrl-Z, which the system sends to the study's group alone: its training stops, and goes on, with it."""
        if child is not None:
            child.send_signal(signal.SIGSTOP)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # stops until `fg` or `bg`, but not where no shell could say that
        signal.signal(signal.SIGTSTP, pause)
        if child is not None:
            child.send_signal(signal.SIGCONT)

    with _handling(dict.fromkeys(_ENDING, note) | {signal.SIGTSTP: pause}):
        # Without the terminal's input: a group in the background that reads it is stopped.
        command = [sys.executable, "-m", *arguments]
        environment = {**os.environ, STARTED_BY: str(os.getpid())}
        child = subprocess.Popen(command, process_group=0, stdin=subprocess.DEVNULL, env=environment)
        for number in tuple(told):  # while it was being started
            child.send_signal(number)
        # Not `wait`: a signal that the system gives to another thread would be noted when that returns.
        while (code := child.poll()) is None:
            time.sleep(0.1)
    if code == EXIT_STATUS or (told and code == 0):
        sys.exit(EXIT_STATUS)
    for number in told:
        if code in (-number, 128 + number):
            sys.exit(128 + number)  # as shells have it
    if code:
        raise UserError(f"python -m {' '.join(arguments)} ended with {code}; mend what it says and run the study again")


@contextlib.contextmanager
def _handling(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Signals go to `handlers`, but for what the study was started to ignore (`nohup`); in another thread than the main one they
    are left alone."""
    main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in handlers if main and signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handlers[number]) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _table(study: Study, values: Mapping[str, Mapping[str, list[float]]]) -> Table:
    table = Table(title=f"{study.name}: mean of the training seeds (n = {len(study.seeds)}), and their range")
    table.add_column("arm")
    for measure in study.measures:
        table.add_column(measure.label, justify="right")
    for arm, by_measure in values.items():
        cells = [by_measure[measure.label] for measure in study.measures]
        table.add_row(arm, *map(_mean_and_range, cells))
    return table


def _mean_and_range(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def _plot(
    study: Study,
    values: Mapping[str, Mapping[str, list[float]]],
    curves: Mapping[str, Mapping[str, list[list[float]]]],
) -> Figure:
    """A panel for each measure, a line for each arm: every seed is a dot, their mean a bar, a threshold a dashed line; then a
    panel for each curve, in the colours of the arms."""
    from matplotlib import colormaps  # here, because every experiment imports this module and none of them draws
    from matplotlib.figure import Figure

    arms = list(values)
    colours = dict(zip(arms, colormaps["turbo"]([(i + 0.5) / len(arms) for i in range(len(arms))]), strict=True))
    colour = {arm: colours[arm] if study.curves else "#4e79a7" for arm in arms}
    count = len(study.measures)
    widths = [3.0] * count + [5.0] * len(study.curves)
    figure = Figure((2 + sum(widths), (3.0 if study.curves else 1.2) + 0.42 * len(arms)), dpi=110)
    (panels,) = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)
    for axes, measure in zip(panels[:count], study.measures, strict=True):
        for place, arm in enumerate(arms):
            seeds = values[arm][measure.label]
            axes.plot(seeds, [place] * len(seeds), "o", color=colour[arm], alpha=0.7)
            axes.plot([statistics.fmean(seeds)], [place], "|", color="#d1603d", markersize=18, markeredgewidth=2.5)
        if measure.threshold is not None:
            axes.axvline(measure.threshold, linestyle="--", color="#6b6b6b")
        axes.set_xlabel(measure.label)
        axes.grid(axis="x", color="#e4e4e4")
        axes.set_yticks(range(len(arms)), arms if axes is panels[0] else [""] * len(arms))
        axes.set_ylim(len(arms) - 0.5, -0.5)
    for axes, curve in zip(panels[count:], study.curves, strict=True):
        for arm in arms:
            mean = curve.mean(curves[arm][curve.label])
            axes.plot(range(1, len(mean) + 1), mean, ".-", color=colour[arm], label=arm)
        axes.set(xlabel=curve.x_label, title=curve.label)
        axes.grid(color="#e4e4e4")
        axes.legend(fontsize="x-small")
    figure.suptitle(f"{study.name}: a dot for each training seed (n = {len(study.seeds)}), the bar is their mean")
    figure.tight_layout()
    return figure
