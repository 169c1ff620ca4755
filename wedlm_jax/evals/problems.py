"""The problems of an evaluation: of its tasks, of a file of questions, and text to continue."""

from __future__ import annotations

from pathlib import Path

from wedlm_jax.data.config import DataConfig
from wedlm_jax.data.quickstart_tasks import Problem
from wedlm_jax.data.stdlib_code import code_files
from wedlm_jax.errors import UserError
from wedlm_jax.evals.config import EvaluationConfig
from wedlm_jax.evals.questions import EVERY, questions
from wedlm_jax.evals.tasks import Task, document_continuation, task, text_continuation
from wedlm_jax.model.handle import Model


def tasks_of(
    config: EvaluationConfig, data: DataConfig, model: Model, only: Task | None = None, limit: int | None = None
) -> list[tuple[Task, list[Problem]]]:
    """What an evaluation decodes, with its problems: its tasks, its questions and text to continue, or `only` one task.

    Raises:
      UserError: two tasks have one name, one has no problem to give, or its file or data cannot be read.
    """
    tasks = [(t, config.problems_per_task) for t in ([task(name) for name in config.tasks] if only is None else [only])]
    if config.questions is not None and only is None:
        path, flag = Path(config.questions).expanduser(), "evaluation.questions"
        tasks.append((questions(model, path, config.match, config.max_new_tokens, flag), EVERY))
    if config.text_prompts and only is None:
        tasks.append((continuation(config, data, model), config.text_prompts))
    names = [t.name for t, _ in tasks]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"evaluation: two tasks are named {twice[0]}; name each once in evaluation.tasks, and give the file of "
            "evaluation.questions a name of its own"
        )
    return [(t, draw(t, limit or most, config.seed)) for t, most in tasks]


def continuation(config: EvaluationConfig, data: DataConfig, model: Model) -> Task:
    """Held-out text to go on with: of whole files where the data are code, else behind the prompts of the documents."""
    if data.source == "stdlib_code":
        return text_continuation(code_files("held_out", data.path), config.text_prompt_characters)
    assert model.tokenizer is not None  # a workdir has one
    return document_continuation(data, model.tokenizer, model.config.max_position_embeddings - config.max_new_tokens)


def draw(of: Task, limit: int, seed: int) -> list[Problem]:
    if problems := of.problems(limit, seed):
        return problems
    raise UserError(
        f"task {of.name} has no held-out problem to give; lower evaluation.text_prompt_characters or add files"
    )
