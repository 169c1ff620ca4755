"""A sweep: the same problems through several decoders and settings, one row of the results table for each."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from scipy.stats import binomtest

from wedlm_jax.data.quickstart_tasks import Problem
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.generation import decode_batch, make_request
from wedlm_jax.decode.prompts import encode_prompt
from wedlm_jax.decode.stats import Completion
from wedlm_jax.evals.config import EvaluationConfig
from wedlm_jax.evals.tasks import Task
from wedlm_jax.model.handle import Model

ADAPTED, BASE = "adapted", "base"
_WARM_UP = 4  # batches of a shape


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a row of the table stands for."""

    label: str
    weights: str  # a key of the models that the sweep is given
    config: DecodeConfig


OnBatch = Callable[[Setting, Task, Sequence[tuple[Problem, Completion]]], None]


@dataclasses.dataclass(frozen=True)
class Row:
    """One task under one setting. Ratios are of totals over all problems."""

    task: str
    label: str
    weights: str
    settings: dict[str, Any]  # the DecodeConfig as the model resolves it; infinity as "inf"
    n: int
    batch_size: int
    correct: int | None  # exact matches; this and the next three are None for a task without answers
    accuracy: float | None
    low: float | None  # 95 % Wilson interval
    high: float | None
    generated_tokens: int
    tokens_per_forward: float
    p_cache: float
    tokens_per_second: float  # of the generate calls alone, compiled before, over all rows of the batches
    speedup_over_ar: float | None  # tokens per second over those of AR decoding of the same weights, where that was run
    equal_to_ar: int | None  # problems whose tokens are those of AR decoding of the same weights
    unfinished: int  # completions cut by max_new_tokens
    # Share of the forwards that accepted the draft 1, 2, ... slots ahead: with the AR token of each forward they add up to tokens
    # per forward, but for a last forward that ends with a draft, and for what a stop string cuts off. None where no drafts are
    # held against AR.
    accepted: list[float] | None = None
    # Problems that are right here and wrong by AR of the same weights, and the other way round; of AR itself, beside AR of the
    # base. None where there are no answers, or nothing to set it beside.
    gained: int | None = None
    lost: int | None = None


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one setting made of one task's problems."""

    config: DecodeConfig  # with what the model decides: stop ids, the mask id, calibrated thresholds
    completions: list[Completion]
    tokens_per_second: float  # of all rows decoded, those that fill up the last batch too


def settings_of(config: EvaluationConfig, *, with_base: bool) -> list[Setting]:
    """The rows of the results table: AR before adaptation (where there is a base), and every decoder after it; with `in_place`
    those that fill masks once more without reordering."""
    rows = [Setting("AR, base", BASE, config.autoregressive)] if with_base else []
    rows.append(Setting("AR, adapted" if with_base else "AR", ADAPTED, config.autoregressive))
    rows.append(Setting(f"block-wise, J={config.block_size}", ADAPTED, config.blockwise))
    rows += [Setting(f"streaming, tau={c.entropy_threshold:g}", ADAPTED, c) for c in config.streaming]
    rows.append(Setting("lookup", ADAPTED, config.lookup))
    rows += [Setting(f"verified, W={c.window_size}", ADAPTED, c) for c in config.verified_at]
    rows.append(Setting("verified", ADAPTED, config.verified))
    with_masks = [row for row in rows if row.config.uses_masks] if config.in_place else []
    in_place = [dataclasses.replace(row.config, reorder=False) for row in with_masks]
    # Short, so that the table fits 80 columns: "in place, J=16", "in place, tau=0.4", "in place, verified".
    labels = [f"in place, {row.label.split(', ')[-1]}" for row in with_masks]
    return rows + [Setting(label, ADAPTED, config) for label, config in zip(labels, in_place, strict=True)]


def generate_rows(
    model: Model, prompts: Sequence[list[int]], config: DecodeConfig, first_row: int = 0, trace: bool = False
) -> list[Completion]:
    """`generate`, in a batch of just these prompts, with rows numbered from `first_row` on: noise depends on the row, so no two
    calls of a run may share one."""
    requests = [
        make_request(model, prompt, config, row=row, name=f"prompt {row}")
        for row, prompt in enumerate(prompts, first_row)
    ]
    return decode_batch(model, requests, trace)


def sweep(
    models: Mapping[str, Model],
    settings: Sequence[Setting],
    tasks: Sequence[tuple[Task, list[Problem]]],
    *,
    batch_size: int,
    on_batch: OnBatch = lambda setting, task, done: None,
    on_task: Callable[[list[Row]], None] = lambda rows: None,
) -> tuple[list[Row], dict[tuple[str, str], list[Completion]]]:
    """Decodes every task's problems under every setting.

    Args:
      models: by the names that the settings use.
      settings: the rows wanted.
      tasks: each with its problems.
      batch_size: prompts a call; the last batch of a task is filled up with a repeated prompt that is not counted. Rows are
        numbered over the problems of all tasks, the same for every setting.
      on_batch: told after every timed batch which problems of the task it held, each with its completion.
      on_task: told after every task the rows so far.

    Returns:
      the rows, task by task in the order of the settings, and the completions by (task name, setting label).

    Raises:
      UserError: a setting does not go with its model, or a problem leaves no room for its completion in the model's context.
    """
    _check(models, settings, tasks)
    clock = _WarmClock(batch_size)

    def measure(task: Task, problems: list[Problem], setting: Setting, first_row: int) -> Measurement:
        model = models[setting.weights]
        return clock.measure(model, problems, setting.config, first_row, lambda done: on_batch(setting, task, done))

    rows: list[Row] = []
    completions: dict[tuple[str, str], list[Completion]] = {}
    first_row = 0
    for task, problems in tasks:
        measured = {setting: measure(task, problems, setting, first_row) for setting in settings}
        first_row += len(problems)
        autoregressive = {s.weights: m for s, m in measured.items() if s.config.decoder == "ar"}
        base = autoregressive.get(BASE)
        for setting, measurement in measured.items():
            reference = autoregressive.get(setting.weights)
            rows.append(_row(task, problems, setting, measurement, reference, base, batch_size))
            completions[task.name, setting.label] = measurement.completions
        on_task(rows)
    return rows, completions


class OfSetting(NamedTuple):
    """What one setting made of all tasks."""

    setting: Setting
    rows: list[Row]  # one a task
    completions: list[list[Completion]]  # of each task


def setting_by_setting(
    model: Model,
    settings: Sequence[Setting],
    tasks: Sequence[tuple[Task, list[Problem]]],
    *,
    batch_size: int,
    on_batch: OnBatch = lambda setting, task, done: None,
) -> Iterator[OfSetting]:
    """`sweep` in the other order, each setting as soon as it is measured, so that it can be shown and saved at once.

    Args:
      settings: of one model; AR first, which the others are set against. The others are as of `sweep`.
    """
    assert settings[0].config.decoder == "ar"
    _check({setting.weights: model for setting in settings}, settings, tasks)
    clock, of_ar = _WarmClock(batch_size), list[Measurement]()
    for setting in settings:
        measured, first_row = list[Measurement](), 0
        for task, problems in tasks:
            on_done = functools.partial(on_batch, setting, task)
            measured.append(clock.measure(model, problems, setting.config, first_row, on_done))
            first_row += len(problems)
        of_ar = of_ar or measured
        rows = [
            _row(task, problems, setting, ours, ar, None, batch_size)
            for (task, problems), ours, ar in zip(tasks, measured, of_ar, strict=True)
        ]
        yield OfSetting(setting, rows, [m.completions for m in measured])


def _check(
    models: Mapping[str, Model], settings: Sequence[Setting], tasks: Sequence[tuple[Task, list[Problem]]]
) -> None:
    """Raises a `UserError`, before the first forward, where one would be raised by a batch that comes after hours of others."""
    named = [(f"{of.name}, problem {i}", p.prompt) for of, problems in tasks for i, p in enumerate(problems, 1)]
    longest: dict[str, tuple[str, Sequence[int]]] = {}
    for weights in dict.fromkeys(setting.weights for setting in settings):
        encoded = ((name, encode_prompt(models[weights], prompt, name)) for name, prompt in named)
        longest[weights] = max(encoded, key=lambda one: len(one[1]), default=("prompt", [0]))
    for setting in settings:
        name, prompt = longest[setting.weights]
        make_request(models[setting.weights], prompt, setting.config, row=0, name=name)


class _WarmClock:
    """Times generate calls of fixed size. The first batches of a model and a shape are run once untimed, so that it is compiled,
    so that the model's weights are laid out for it, and so that the widths that its forwards take turns in have been used: a
    program is slow where it comes by the first time."""

    def __init__(self, batch_size: int):
        self._batch_size = batch_size
        self._warmed_up: collections.Counter[tuple] = collections.Counter()

    def measure(
        self,
        model: Model,
        problems: list[Problem],
        config: DecodeConfig,
        first_row: int,
        on_batch: Callable[[Sequence[tuple[Problem, Completion]]], None],
    ) -> Measurement:
        completions: list[Completion] = []
        seconds, timed_tokens = 0.0, 0
        for start in range(0, len(problems), self._batch_size):
            asked = problems[start : start + self._batch_size]
            prompts = [encode_prompt(model, problem.prompt) for problem in asked]
            filled_up = prompts + [prompts[-1]] * (self._batch_size - len(prompts))
            width = (max(map(len, prompts)) - 1).bit_length()  # `generate` pads prompts to powers of two, no finer
            shape = (id(model), config.program(model.window_table), config.max_new_tokens, width)
            if self._warmed_up[shape] < _WARM_UP:
                generate_rows(model, filled_up, config, first_row + start)
                self._warmed_up[shape] += 1
            begun = time.perf_counter()
            batch = generate_rows(model, filled_up, config, first_row + start)
            seconds += time.perf_counter() - begun
            timed_tokens += sum(c.stats.generated_tokens for c in batch)
            completions += batch[: len(asked)]
            on_batch([*zip(asked, batch, strict=False)])  # without what filled the batch up
        return Measurement(resolved(model, config), completions, timed_tokens / seconds)


def _row(
    task: Task,
    problems: list[Problem],
    setting: Setting,
    measured: Measurement,
    ar: Measurement | None,
    base: Measurement | None,
    batch_size: int,
) -> Row:
    completions, n = measured.completions, len(problems)
    correct = gained = lost = None
    if task.score is not None:
        right = _right(task.score, problems, measured)
        correct = sum(right)
        beside = base if measured is ar else ar
        if beside is not None and beside is not measured:
            others = _right(task.score, problems, beside)
            gained, lost = (
                sum(a and not b for a, b in zip(*two, strict=True)) for two in ((right, others), (others, right))
            )
    low, high = (None, None) if correct is None else binomtest(correct, n).proportion_ci(method="wilson")
    equal = None if ar is None else sum(c.ids == a.ids for c, a in zip(completions, ar.completions, strict=True))
    stats = [completion.stats for completion in completions]
    generated = sum(s.generated_tokens for s in stats)
    return Row(
        task=task.name,
        label=setting.label,
        weights=setting.weights,
        settings=settings_as_json(measured.config),
        n=n,
        batch_size=batch_size,
        correct=correct,
        accuracy=None if correct is None else correct / n,
        low=low,
        high=high,
        generated_tokens=generated,
        tokens_per_forward=generated / sum(s.forwards for s in stats),
        p_cache=generated / sum(s.tokens_processed for s in stats),
        tokens_per_second=measured.tokens_per_second,
        speedup_over_ar=None if ar is None else measured.tokens_per_second / ar.tokens_per_second,
        equal_to_ar=equal,
        unfinished=sum(c.finish_reason == "length" for c in completions),
        accepted=_accepted(completions),
        gained=gained,
        lost=lost,
    )


def _right(score: Callable[[Problem, str], bool], problems: list[Problem], measured: Measurement) -> list[bool]:
    return [score(problem, c.text or "") for problem, c in zip(problems, measured.completions, strict=True)]


def _accepted(completions: Sequence[Completion]) -> list[float] | None:
    by_prompt = [c.acceptance for c in completions if c.acceptance is not None]
    if not by_prompt:
        return None
    slots = itertools.zip_longest(*by_prompt, fillvalue=(0, 0))
    forwards = sum(c.stats.forwards for c in completions)
    return [sum(agreed for _, agreed in slot) / forwards for slot in slots]


def resolved(model: Model, config: DecodeConfig) -> DecodeConfig:
    """The settings with what the model decides of them, its calibration too, and tau and lambda as numbers."""
    config = make_request(model, [0], config, row=0, name="prompt").config
    tau = None if config.entropy_threshold is None else config.tau
    return dataclasses.replace(config, entropy_threshold=tau, distance_penalty=config.penalty)


def settings_as_json(config: DecodeConfig) -> dict[str, Any]:
    """JSON knows no infinity."""
    settings = dataclasses.asdict(config)
    return {k: "inf" if isinstance(v, float) and math.isinf(v) else v for k, v in settings.items()}
