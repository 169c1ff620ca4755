"""What a study compares: arms of training stages, and the numbers that are read of each."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wedlm_jax.errors import UserError

_LONGEST_NAME = 200  # bytes; file systems take 255


@dataclasses.dataclass(frozen=True)
class Stage:
    """One training run. It starts from the stage before it, if there is one."""

    experiment: str  # as --exp names it
    overrides: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """Its part of the name of a folder, which names no checkpoint of another one as `runs/base@best` does, and is no
        pattern."""
        return re.sub(r"[/@*?\[\]\\]", "_", "+".join((self.experiment.replace(":", "."), *self.overrides)))


def folder_name(stages: Sequence[Stage]) -> str:
    """Of the folder of the last of these stages, each of which starts from the one before it; a name that file systems take."""
    name = "__".join(stage.slug for stage in stages)
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name.encode()[: _LONGEST_NAME - 9].decode(errors='ignore')}+{digest}"


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
    if not found:
        held = ", ".join(f"{row['task']} by {row['label']}" for row in rows) or "none"
        raise UserError(f"{source}: holds no row of {task} by {decoder!r} for {label} ({held}); name one of these")
    if found[0].get(name) is None:
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
        labels = {
            "measures": [m.label for m in self.measures],
            "curves": [c.label for c in self.curves],
            "seeds": self.seeds,
        }
        for what, given in labels.items():
            if twice := [each for each in given if list(given).count(each) > 1]:
                raise UserError(f"study {self.name}: {what} name {twice[0]!r} twice; name each once")

        folders: dict[str, Stage] = {}
        for stage in itertools.chain(*self.arms.values()):
            if folders.setdefault(stage.slug, stage) != stage:
                raise UserError(
                    f"study {self.name}: two different stages would share the folder {stage.slug}; spell one otherwise"
                )

    @property
    def trains(self) -> list[str]:
        """The experiments of its stages, each once."""
        return list(dict.fromkeys(stage.experiment for stages in self.arms.values() for stage in stages))

    @property
    def workdir(self) -> Path:
        return Path("runs") / self.name
