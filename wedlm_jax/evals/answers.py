"""Every completion of an evaluation as a line of JSON, written as it comes: to see which are wrong, and how."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from wedlm_jax.data.quickstart_tasks import Problem
from wedlm_jax.decode.stats import Completion
from wedlm_jax.errors import writing
from wedlm_jax.evals.sweep import OnBatch, Setting
from wedlm_jax.evals.tasks import Task

NAME = "completions.jsonl"


@contextlib.contextmanager
def kept_in(folder: Path | None) -> Iterator[OnBatch]:
    """The file is begun anew. What is interrupted leaves the lines so far.

    Args:
      folder: where it goes; None keeps nothing.

    Yields:
      what a batch that is done is told to, as `on_batch` of a sweep.

    Raises:
      UserError: it cannot be written.
    """
    if folder is None:
        yield lambda setting, task, done: None
        return
    path = folder / NAME
    with writing(path):
        file = path.open("w", encoding="utf-8")

    def on_batch(setting: Setting, task: Task, done: Sequence[tuple[Problem, Completion]]) -> None:
        lines = [_line(setting, task, problem, completion.text or "") for problem, completion in done]
        with writing(path):
            file.write("".join(lines))
            file.flush()

    with contextlib.closing(file):
        yield on_batch


def _line(setting: Setting, task: Task, problem: Problem, said: str) -> str:
    answer, right = (None, None) if task.score is None else (problem.answer, task.score(problem, said))
    of = {"task": task.name, "decoder": setting.label, "right": right, "answer": answer}
    return json.dumps({**of, "completion": said, "prompt": problem.prompt}, ensure_ascii=False) + "\n"
