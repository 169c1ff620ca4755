"""Questions of your own: a JSONL file of prompts, each with its answer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from wedlm_jax.data.quickstart_tasks import Problem
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.generation import make_request
from wedlm_jax.decode.prompt_file import prompts_of, read_objects
from wedlm_jax.decode.prompts import prompt_text
from wedlm_jax.errors import UserError
from wedlm_jax.evals.scoring import ANSWER, EXPECTED, Match, behind_thinking
from wedlm_jax.evals.tasks import Task, task
from wedlm_jax.flags import refuse_beside
from wedlm_jax.model.handle import Model

_NO_ANSWER: dict[Match, str] = {
    "number": "has no number, or several; write #### before the one that counts, or take --match text",
    "choice": "names no letter A to J; write one, or take --match text",
    "formula": "is empty or several lines; write a formula alone, or in \\boxed{...}",
    "text": "is empty; write one",
}
EVERY = sys.maxsize  # as a limit
_OF_A_TASK = 100  # problems, where no flag says how many

QuestionsFlag = Annotated[
    Path | None,
    tyro.conf.arg(
        metavar="FILE.jsonl",
        help='Instead of a task, your questions: {"prompt": str, "answer": str} or {"messages": [...], "answer": str} a line.',
    ),
]
MatchFlag = Annotated[
    Match,
    tyro.conf.arg(
        help="With --questions, what has to equal that of the answer: the number (behind ####, else the last one), the choice "
        "(a letter A to J that is named, as in 'the answer is C', begins the text or stands alone last), the formula "
        "(LaTeX in the last \\boxed{...}, else in dollars behind 'answer is'), or the whole text."
    ),
]


def questions(model: Model, path: Path, match: Match, max_new_tokens: int, flag: str = "--questions") -> Task:
    """A task of the questions of a file, `{"prompt": ..., "answer": ...}` or `{"messages": [...], "answer": ...}` a line.

    Args:
      model: whose chat template writes messages, and whose context has to hold every question and its completion.
      path: the file; the task is named after it. Its problems come in the order of the lines, whatever the seed.
      match: what of a completion has to equal the same of the answer (`evals/scoring.py`).
      max_new_tokens: of a completion.
      flag: that named the file, for errors.

    Raises:
      UserError: naming file and line, where one cannot be read, asked or scored.
    """
    answer_in = ANSWER[match]
    problems = []
    for name, record in read_objects(path, flag, '{"prompt": "Are there 5 or 6?", "answer": "5"}'):
        if not isinstance(answer := record.get("answer"), str):
            raise UserError(f'{name}: answer must be a string; write {{"prompt": ..., "answer": "18"}}')
        ((_, asked),) = prompts_of([(name, record)])
        prompt = prompt_text(model, asked, name)
        make_request(model, prompt, DecodeConfig(decoder="ar", max_new_tokens=max_new_tokens), row=0, name=name)
        if (expected := EXPECTED[match](answer)) is None:
            raise UserError(f"{name}: the answer {answer!r:.80} {_NO_ANSWER[match]}")
        problems.append(Problem(path.stem, prompt, answer, expected))

    def score(problem: Problem, completion: str) -> bool:
        begun = problem.prompt.rstrip().endswith("<think>")
        return answer_in(behind_thinking(completion, begun)) == problem.answer

    return Task(path.stem, lambda limit, seed: problems[:limit], score)


def scored_by(flags: Any) -> dict[str, str]:
    """What a file of results says of the questions that were asked and of what counted in an answer; nothing for a task."""
    return {} if flags.questions is None else {"questions": str(flags.questions), "match": flags.match}


def refuse_both(flags: Any, tasks: str) -> None:
    """Refuses the flag that has no effect: `match` without `questions`, or with them `tasks`, the name of the command's field.

    Raises:
      UserError: names the flag.
    """
    refuse_beside(
        flags, {"match": "it with --questions"} if flags.questions is None else {tasks: "it without --questions"}
    )


def asked(flags: Any, names: Sequence[str], model: Model) -> list[tuple[Task, list[Problem]]]:
    """The tasks of these names with their problems, or in their place the questions that the flags of a command name.

    Args:
      flags: with `questions`, `match`, `limit` and `decode`.
      names: of tasks.
      model: as of `questions`.

    Raises:
      UserError: as `questions`, or there is no task of a name.
    """
    if flags.questions is None:
        return [(of, of.problems(flags.limit or _OF_A_TASK, 0)) for of in map(task, names)]
    of = questions(model, flags.questions, flags.match, flags.decode.max_new_tokens)
    return [(of, of.problems(flags.limit or EVERY, 0))]
