"""Tasks: prompts to complete, and whether a completion is right."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from wedlm_jax.data import quickstart_tasks
from wedlm_jax.data.quickstart_tasks import Problem
from wedlm_jax.data.stdlib_code import CodeFile
from wedlm_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Task:
    """Problems by number and seed, and how one is scored."""

    name: str
    problems: Callable[[int, int], list[Problem]]  # (limit, seed) -> distinct problems, all there are up to the limit
    score: Callable[[Problem, str], bool] | None  # (problem, completion text without end token); None: nothing to match


def task(name: str) -> Task:
    """A held-out task of the quickstart, scored by exact match of the answer.

    Raises:
      UserError: there is no such task.
    """
    if name not in quickstart_tasks.TASKS:
        raise UserError(f"task {name!r} does not exist; choose one of {', '.join(quickstart_tasks.TASKS)}")

    def problems(limit: int, seed: int) -> list[Problem]:
        return list(itertools.islice(quickstart_tasks.problems(name, "held_out", seed), limit))

    return Task(name, problems, quickstart_tasks.is_correct)


def text_continuation(files: list[CodeFile], characters: int) -> Task:
    """Prompts of whole lines from a random place of each held-out file, at least `characters` long, without an answer."""

    def problems(limit: int, seed: int) -> list[Problem]:
        long_enough = [file for file in files if len(file.text) > 4 * characters]
        random = np.random.default_rng(seed)
        chosen = random.permutation(len(long_enough))[:limit]
        return [Problem("held_out_text", excerpt(long_enough[i].text, characters, random)[0], "", "") for i in chosen]

    return Task("held_out_text", problems, None)


def text_pieces(files: list[CodeFile], characters: int) -> Task:
    """Prompts that share no line: the held-out files cut into pieces of whole lines, at least `characters` long; no answer."""

    def problems(limit: int, seed: int) -> list[Problem]:
        pieces = [piece for file in files for piece in _pieces(file.text, characters)]
        chosen = np.random.default_rng(seed).permutation(len(pieces))[:limit]
        return [Problem("held_out_text", pieces[i], "", "") for i in chosen]

    return Task("held_out_text", problems, None)


def _pieces(text: str, characters: int) -> Iterator[str]:
    """One behind the other; a rest that is shorter is left out."""
    start = 0
    while end := text.find("\n", start + characters - 1) + 1:
        yield text[start:end]
        start = end


def excerpt(text: str, characters: int, random: np.random.Generator) -> tuple[str, str]:
    """Whole lines from a random place in the first half of a text, at least `characters` long, and all that follows them."""
    start = text.find("\n", random.integers(len(text) // 2)) + 1
    end = text.find("\n", start + characters) + 1 or len(text)
    return text[start:end], text[end:]


def wilson_interval(successes: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson score interval of a share, 95 % for the default z: sound for few trials and at shares of 0 and 1.

    Args:
      successes: 0 to n.
      n: trials, at least 1.
    """
    share = successes / n
    scale = 1 + z * z / n
    middle = (share + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(middle - half, 0.0), min(middle + half, 1.0)
