"""Open-ended generation: what continuations are worth where no answer is right, and how fast they come by prompt entropy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from wedlm_jax.data.quickstart_tasks import Problem
from wedlm_jax.data.stdlib_code import CodeFile
from wedlm_jax.decode.prompts import Verbatim, encode_prompt
from wedlm_jax.decode.scores import score
from wedlm_jax.decode.stats import Completion
from wedlm_jax.errors import UserError
from wedlm_jax.evals.sweep import OnBatch, Row, Setting, setting_by_setting
from wedlm_jax.evals.tasks import Task, excerpt
from wedlm_jax.model.handle import Model

LEVELS = ("low", "medium", "high")  # thirds of the prompts by their mean entropy
REPEATED = 4  # n of the n-grams that count as repetition


@dataclasses.dataclass(frozen=True)
class Judged:
    """What the AR model says of one text behind one prompt."""

    prompt_entropy: float  # mean entropy in nats of the next-token distributions along the prompt
    nats: float  # summed cross-entropy of the text's tokens, given all before them
    feature: np.ndarray  # float32 [D]: the hidden state of the last token


@dataclasses.dataclass(frozen=True)
class TextMeasures:
    """One decoder's continuations of all prompts."""

    label: str
    tokens: int
    distinct: dict[int, float]  # distinct n-grams over all n-grams of all continuations, for n = 1, 2, 3
    repetition: float  # share of a continuation's 4-grams that it already held, mean over continuations
    perplexity: float  # of the tokens by AR of the same weights
    mauve: float | None  # against what the files go on with; None where it was not asked for
    tokens_per_forward: float
    tokens_per_second: float
    speedup_over_ar: float

    def in_words(self) -> str:
        """One line, for as long as there is no table."""
        speed = f"{self.tokens_per_forward:.2f} tokens per forward, {self.speedup_over_ar:.2f}x AR's speed"
        return f"{self.label}: AR perplexity {self.perplexity:.2f}, {speed}"


@dataclasses.dataclass(frozen=True)
class OpenEnded:
    """Everything that is measured by now."""

    entropies: list[float]  # of the prompts, in nats
    bounds: dict[str, tuple[float, float]]  # least and greatest of each level
    measures: list[TextMeasures]
    rows: list[Row]  # by decoder and level
    texts: list[dict[str, Any]]  # a prompt, its level, and the continuations by decoder


def code_prompts(files: Sequence[CodeFile], characters: int, limit: int, seed: int) -> list[tuple[str, str]]:
    """Excerpts of whole lines, in turns from every file that is long enough, each with what follows it there.

    Raises:
      UserError: no file is long enough.
    """
    random = np.random.default_rng(seed)
    texts = [file.text for file in files if len(file.text) > 4 * characters]
    if not texts:
        raise UserError(f"no held-out file holds {4 * characters} characters; lower --characters or name more code")
    order = random.permutation(len(texts))
    return [excerpt(texts[order[i % len(texts)]], characters, random) for i in range(limit)]


def judge(model: Model, prompt: Sequence[int], ids: Sequence[int]) -> Judged:
    """One AR forward over prompt and continuation.

    Raises:
      UserError: it does not fit in memory.
    """
    scores = score(model, [*prompt, *ids])
    behind = scores.log_probs[len(prompt) - 1 :]
    return Judged(float(scores.entropies[: len(prompt)].mean()), -float(behind.sum()), scores.hidden)


def distinct(texts: Sequence[Sequence[int]], n: int) -> float:
    """Distinct n-grams over all n-grams of all texts (Li et al., 2016); NaN where there are none."""
    grams = [gram for ids in texts for gram in _grams(ids, n)]
    return len(set(grams)) / len(grams) if grams else math.nan


def repetition(texts: Sequence[Sequence[int]], n: int = REPEATED) -> float:
    """The share of a text's n-grams that came earlier in it, mean over the texts that have any; NaN where none has."""
    shares = [1 - len(set(grams)) / len(grams) for ids in texts if (grams := _grams(ids, n))]
    return float(np.mean(shares)) if shares else math.nan


def _grams(ids: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]


def load_mauve() -> Callable[..., Any]:
    """`compute_mauve` of the package mauve-text (GPL-3.0, an optional extra).

    Raises:
      UserError: it is not installed.
    """
    try:
        from mauve import compute_mauve
    except ImportError as error:
        raise UserError(
            f"MAUVE needs the package mauve-text, which is not there ({error}); pip install mauve-text"
        ) from error
    return compute_mauve


def mauve_score(features: np.ndarray, references: np.ndarray) -> float:
    """MAUVE (Pillutla et al., 2021) of continuations against references, both as features [n, D].

    The features are hidden states of the measured weights instead of GPT-2's, so nothing is fetched; scores compare decoders of
    one model, not models.
    """
    return float(load_mauve()(p_features=references, q_features=features, seed=0, verbose=False).mauve)


def by_level(entropies: Sequence[float]) -> dict[str, list[int]]:
    """The prompts' numbers in thirds by entropy, each in the order given; where there are few, a level may be empty."""
    ranked = np.argsort(entropies, kind="stable")
    thirds = np.array_split(ranked, len(LEVELS))
    return {level: sorted(int(i) for i in third) for level, third in zip(LEVELS, thirds, strict=True) if len(third)}


def measure(
    model: Model,
    settings: Sequence[Setting],
    prompts: Sequence[str],
    references: Sequence[str] | None,
    *,
    batch_size: int,
    on_batch: OnBatch = lambda setting, task, done: None,
    on_decoder: Callable[[OpenEnded], None] = lambda found: None,
) -> OpenEnded:
    """Every decoder on every prompt, level by level.

    Args:
      settings: AR first, which the others are set against.
      references: what human text goes on with, for MAUVE; None leaves it out.
      on_batch: as of `sweep`.
      on_decoder: told after every setting what there is by then.

    Raises:
      UserError: a prompt or a reference is empty, or does not fit in memory.
    """
    encoded = [encode_prompt(model, prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]
    entropies = [judge(model, ids, []).prompt_entropy for ids in encoded]
    of_references = None
    if references is not None:  # before any is decoded
        length = max(s.config.max_new_tokens for s in settings)
        named = ((f"what follows prompt {i}", Verbatim(text)) for i, text in enumerate(references))
        goes_on = [encode_prompt(model, text, name)[:length] for name, text in named]
        of_references = np.stack([judge(model, *pair).feature for pair in zip(encoded, goes_on, strict=True)])
    levels = by_level(entropies)
    problems = {level: [Problem(level, prompts[i], "", "") for i in members] for level, members in levels.items()}
    tasks = [(Task(level, lambda limit, seed, of=of: of[:limit], None), of) for level, of in problems.items()]  # type: ignore[misc]
    level_of = {i: level for level, members in levels.items() for i in members}
    texts: list[dict[str, Any]] = [{"prompt": prompt, "level": level_of[i]} for i, prompt in enumerate(prompts)]
    bounds = {level: (min(s), max(s)) for level, m in levels.items() if (s := [entropies[i] for i in m])}
    found = OpenEnded(entropies, bounds, [], [], texts)
    for setting, rows, by_task in setting_by_setting(model, settings, tasks, batch_size=batch_size, on_batch=on_batch):
        completions = _in_order(list(zip(levels.values(), by_task, strict=True)))
        measures = _measures(model, setting.label, encoded, completions, rows, of_references)
        ar = found.measures[0] if found.measures else measures
        speedup = measures.tokens_per_second / ar.tokens_per_second
        found.measures.append(dataclasses.replace(measures, speedup_over_ar=speedup))
        found.rows.extend(rows)
        for text, completion in zip(texts, completions, strict=True):
            text[setting.label] = completion.text
        on_decoder(found)
    return found


def _in_order(parts: Sequence[tuple[list[int], list[Completion]]]) -> list[Completion]:
    placed = {i: found for members, some in parts for i, found in zip(members, some, strict=True)}
    return [placed[i] for i in sorted(placed)]


def _measures(
    model: Model,
    label: str,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    rows: Sequence[Row],
    references: np.ndarray | None,
) -> TextMeasures:
    ids = [completion.ids for completion in completions]
    judged = [judge(model, prompt, text) for prompt, text in zip(prompts, ids, strict=True)]
    tokens, seconds = sum(map(len, ids)), sum(row.generated_tokens / row.tokens_per_second for row in rows)
    return TextMeasures(
        label=label,
        tokens=tokens,
        distinct={n: distinct(ids, n) for n in (1, 2, 3)},
        repetition=repetition(ids),
        perplexity=math.exp(sum(j.nats for j in judged) / tokens),
        mauve=None if references is None else mauve_score(np.stack([j.feature for j in judged]), references),
        tokens_per_forward=tokens / sum(c.stats.forwards for c in completions),
        tokens_per_second=tokens / seconds,
        speedup_over_ar=math.nan,  # for `measure` to set
    )
