"""A sweep whose settings come one by one, so that what is measured can be shown and saved at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from wedlm_jax.data.quickstart_tasks import Problem
from wedlm_jax.decode.stats import Completion
from wedlm_jax.evals.sweep import ADAPTED, Row, Setting, sweep
from wedlm_jax.evals.tasks import Task
from wedlm_jax.model.handle import Model


class Measured(NamedTuple):
    """One setting."""

    setting: Setting
    rows: list[Row]  # one a task
    completions: list[list[Completion]]  # of each task


def one_by_one(
    model: Model,
    settings: Sequence[Setting],
    tasks: Sequence[tuple[Task, list[Problem]]],
    *,
    batch_size: int,
    on_batch: Callable[[Setting, Task, int], None],
) -> Iterator[Measured]:
    """What `sweep` makes of every setting. Each is a sweep of its own, which runs a batch of every shape once more untimed.

    Args:
      settings: of the adapted weights; AR first, which the others are set against.
    """
    assert settings[0].config.decoder == "ar"
    ar: Measured | None = None
    for setting in settings:
        rows, found = sweep({ADAPTED: model}, [setting], tasks, batch_size=batch_size, on_batch=on_batch)
        measured = Measured(setting, rows, [found[task.name, setting.label] for task, _ in tasks])
        ar = ar or measured
        yield measured._replace(rows=[_beside(ar, i, measured) for i in range(len(tasks))])


def _beside(ar: Measured, task: int, measured: Measured) -> Row:
    row, pairs = measured.rows[task], zip(measured.completions[task], ar.completions[task], strict=True)
    return dataclasses.replace(
        row,
        speedup_over_ar=row.tokens_per_second / ar.rows[task].tokens_per_second,
        equal_to_ar=sum(one.ids == other.ids for one, other in pairs),
    )
