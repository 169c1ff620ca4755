"""Three small tasks that a few million parameters learn in minutes: word problems, counting and copying.

Every problem is drawn from a seed. Whether a problem is held out is decided by a hash of its prompt alone, so no seed
and no number of draws can move a held-out problem into training. What is held out is the whole problem (the names, the
objects and the numbers together); a sum such as 7 + 5 may well occur in training with other names and objects.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from wedlm_jax.data.split import Split, split_by_hash

HELD_OUT_SHARE = 0.1
NAMES = ("Tom", "Anna", "Ben", "Mia", "Sam", "Lily", "Max", "Emma", "Leo", "Nora")
OBJECTS = ("apples", "pens", "books", "cards", "coins", "shells", "stamps", "balls", "cups", "eggs")
CONTAINERS = ("bags", "boxes", "jars")
WORDS = (
    "red", "blue", "green", "dog", "cat", "fox", "sun", "moon", "star", "tree", "leaf", "rain", "snow", "wind", "fire",
    "gold", "fish", "bird", "song", "door", "road", "ship", "lake", "hill",
)  # fmt: skip
_DRAWS_BEFORE_EXHAUSTED = 3_000


@dataclasses.dataclass(frozen=True)
class Problem:
    """A prompt and the completion that solves it.

    `prompt` is the exact text that precedes the completion, `solution` the exact completion (without end tokens), and
    `answer` what `extract_answer` must find in a completion for an exact match.
    """

    task: str
    prompt: str
    solution: str
    answer: str


def _word_problem(random: np.random.Generator) -> Problem:
    """One of seven templates, one or two steps; operands up to 15, results up to 42."""
    story, steps, answer = _TEMPLATES[random.integers(len(_TEMPLATES))](random)
    return Problem("word_problems", f"Q: {story} A:", f" {steps}\n#### {answer}", str(answer))


def _number(random: np.random.Generator, low: int, high: int) -> int:
    """Uniform in low..high, both included."""
    return int(random.integers(low, high + 1))


def _two_names(random: np.random.Generator) -> tuple[str, str]:
    first, second = random.choice(len(NAMES), size=2, replace=False)
    return NAMES[first], NAMES[second]


def _one_of(random: np.random.Generator, words: Sequence[str]) -> str:
    return words[int(random.integers(len(words)))]


def _buys(random: np.random.Generator) -> tuple[str, str, int]:
    name, thing = _one_of(random, NAMES), _one_of(random, OBJECTS)
    a, b = _number(random, 2, 12), _number(random, 2, 12)
    return (
        f"{name} has {a} {thing}. {name} buys {b} more. How many {thing} does {name} have now?",
        f"{name} has {a} {thing} and buys {b} more. {a} + {b} = {a + b}. {name} has {a + b} {thing} now.",
        a + b,
    )


def _gives(random: np.random.Generator) -> tuple[str, str, int]:
    (name, friend), thing = _two_names(random), _one_of(random, OBJECTS)
    a = _number(random, 3, 15)
    b = _number(random, 2, a - 1)
    return (
        f"{name} has {a} {thing}. {name} gives {b} to {friend}. How many {thing} does {name} have left?",
        f"{name} has {a} {thing} and gives {b} to {friend}. {a} - {b} = {a - b}. {name} has {a - b} {thing} left.",
        a - b,
    )


def _compares(random: np.random.Generator) -> tuple[str, str, int]:
    (name, friend), thing = _two_names(random), _one_of(random, OBJECTS)
    a, b = _number(random, 2, 12), _number(random, 2, 12)
    return (
        f"{name} has {a} {thing}. {friend} has {b} more than {name}. How many {thing} does {friend} have?",
        f"{name} has {a} {thing} and {friend} has {b} more. {a} + {b} = {a + b}. {friend} has {a + b} {thing}.",
        a + b,
    )


def _together(random: np.random.Generator) -> tuple[str, str, int]:
    (name, friend), thing = _two_names(random), _one_of(random, OBJECTS)
    a, b = _number(random, 2, 12), _number(random, 2, 12)
    return (
        f"{name} has {a} {thing} and {friend} has {b} {thing}. How many {thing} do they have together?",
        f"{name} has {a} {thing} and {friend} has {b}. {a} + {b} = {a + b}. They have {a + b} {thing} together.",
        a + b,
    )


def _packs(random: np.random.Generator) -> tuple[str, str, int]:
    name, thing, container = _one_of(random, NAMES), _one_of(random, OBJECTS), _one_of(random, CONTAINERS)
    a, b = _number(random, 2, 5), _number(random, 2, 6)
    return (
        f"{name} has {a} {container} with {b} {thing} in each. How many {thing} does {name} have?",
        f"{name} has {a} {container} with {b} {thing} each. {a} * {b} = {a * b}. {name} has {a * b} {thing}.",
        a * b,
    )


def _buys_and_loses(random: np.random.Generator) -> tuple[str, str, int]:
    name, thing = _one_of(random, NAMES), _one_of(random, OBJECTS)
    a, b = _number(random, 2, 12), _number(random, 2, 12)
    c = _number(random, 2, min(12, a + b - 1))
    return (
        f"{name} has {a} {thing}. {name} buys {b} more and loses {c}. How many {thing} does {name} have left?",
        f"{name} has {a} {thing} and buys {b} more. {a} + {b} = {a + b}. "
        f"{name} loses {c}. {a + b} - {c} = {a + b - c}. {name} has {a + b - c} {thing} left.",
        a + b - c,
    )


def _packs_and_buys(random: np.random.Generator) -> tuple[str, str, int]:
    name, thing, container = _one_of(random, NAMES), _one_of(random, OBJECTS), _one_of(random, CONTAINERS)
    a, b = _number(random, 2, 5), _number(random, 2, 6)
    c = _number(random, 2, 12)
    return (
        f"{name} has {a} {container} with {b} {thing} in each. {name} buys {c} more. "
        f"How many {thing} does {name} have now?",
        f"{name} has {a} {container} with {b} {thing} each. {a} * {b} = {a * b}. "
        f"{name} buys {c} more. {a * b} + {c} = {a * b + c}. {name} has {a * b + c} {thing} now.",
        a * b + c,
    )


_TEMPLATES: tuple[Callable[[np.random.Generator], tuple[str, str, int]], ...] = (
    _buys, _gives, _compares, _together, _packs, _buys_and_loses, _packs_and_buys,
)  # fmt: skip


def _counting(random: np.random.Generator) -> Problem:
    """12 to 20 numbers, one by one up to a round one."""
    name, thing = _one_of(random, NAMES), _one_of(random, OBJECTS)
    last = 10 * _number(random, 2, 6)
    first = last - _number(random, 11, 19)
    answer = ", ".join(map(str, range(first, last + 1))) + "."
    return Problem("counting", f"Q: {name} counts {thing} from {first} to {last}. A:", f" {answer}", answer)


def _copying(random: np.random.Generator) -> Problem:
    """3 to 8 different words in a random order; the short lists are learned first and teach the long ones."""
    text = ", ".join(random.permutation(WORDS)[: _number(random, 3, 8)]) + "."
    return Problem("copying", f"Q: Repeat: {text} A:", f" {text}", text)


_DRAW: dict[str, Callable[[np.random.Generator], Problem]] = {
    "word_problems": _word_problem,
    "counting": _counting,
    "copying": _copying,
}
TASKS: tuple[str, ...] = tuple(_DRAW)
MIXTURE = (0.42, 0.33, 0.25)  # share of the training problems, in the order of TASKS


def split_of(prompt: str) -> Split:
    """`held_out` for a tenth of all prompts, by a hash of the text: the same on every machine and for every seed."""
    return split_by_hash(prompt.encode(), HELD_OUT_SHARE)


def draw(task: str, split: Split, seed: int, index: int) -> Problem:
    """The problem number `index` of a seed and one of TASKS, by random access; two indices may give the same problem."""
    random = np.random.default_rng((seed, index, TASKS.index(task)))
    while True:
        problem = _DRAW[task](random)
        if split_of(problem.prompt) == split:
            return problem


def problems(task: str, split: Split, seed: int = 0) -> Iterator[Problem]:
    """Distinct problems in a fixed order. Copying and word problems do not end in practice; counting does."""
    seen: set[str] = set()
    index = last_new = 0
    while index - last_new < _DRAWS_BEFORE_EXHAUSTED:
        problem = draw(task, split, seed, index)
        index += 1
        if problem.prompt not in seen:
            seen.add(problem.prompt)
            last_new = index
            yield problem


def extract_answer(task: str, completion: str) -> str | None:
    """The final answer in a completion: the number after `####` for word problems (None without one), else all of it."""
    if task != "word_problems":
        return completion.strip()
    found = re.search(r"####\s*(-?\d+)\s*$", completion)
    return found.group(1) if found else None


def is_correct(problem: Problem, completion: str) -> bool:
    """Exact match of the extracted answer; `completion` is without end tokens."""
    return extract_answer(problem.task, completion) == problem.answer


class QuickstartProblems(Sequence[Problem]):
    """`length` training (or held-out) problems of all tasks in the proportions of MIXTURE, by random access."""

    def __init__(self, split: Split, seed: int, length: int):
        self._split, self._seed, self._length = split, seed, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Problem:  # type: ignore[override]
        if not 0 <= index < self._length:
            raise IndexError(index)
        task = np.random.default_rng((self._seed, index, len(TASKS))).choice(len(TASKS), p=MIXTURE)
        return draw(TASKS[task], self._split, self._seed, index)
