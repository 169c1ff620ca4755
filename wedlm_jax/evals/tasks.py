"""Tasks: prompts to complete, and whether a completion is right."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np
from transformers import PreTrainedTokenizerBase

from wedlm_jax.data import quickstart_tasks
from wedlm_jax.data.config import DataConfig
from wedlm_jax.data.documents import Documents
from wedlm_jax.data.quickstart_tasks import Problem
from wedlm_jax.data.stdlib_code import CodeFile
from wedlm_jax.data.tokenizer import encode_with_control_tokens, start_of_text
from wedlm_jax.decode.prompts import Verbatim
from wedlm_jax.errors import UserError

PLAIN_TEXT_PROMPT = 0.25  # the share of a document that is its prompt where everything is learned


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


def document_continuation(data: DataConfig, tokenizer: PreTrainedTokenizerBase, longest: int) -> Task:
    """The prompts of the held-out documents that `data` names, in an order drawn from the seed, without an answer.

    Args:
      data: of the experiment; one epoch of it is looked through.
      tokenizer: of the model.
      longest: tokens of a prompt at most; others are passed over.

    Raises:
      UserError: by `problems`, where the data cannot be read or no held-out prompt is short enough.
    """

    def problems(limit: int, seed: int) -> list[Problem]:
        documents, start = Documents(data, tokenizer, seed, "held_out"), start_of_text(tokenizer)
        found: dict[str, None] = {}
        for index in range(documents.epoch):
            for example in documents[index].examples[:1]:
                ids = prompt_of(example.tokens, example.loss_mask)
                begins = tuple(ids[: len(start)]) == start  # else a chat template wrote it
                # A cut through plain text may leave the first bytes of a character.
                text = str(tokenizer.decode(ids[len(start) :] if begins else ids)).rstrip("\ufffd")
                again = encode_with_control_tokens(tokenizer, text)
                if 0 < len(again) <= longest - (len(start) if begins else 0):
                    found[text if begins else Verbatim(text)] = None
            if len(found) == limit:
                break
        if not found:
            raise UserError(
                f"evaluation.text_prompts={limit}: data.source={data.source} holds out no prompt of 1 to {longest} tokens; "
                "set it to 0, or add documents"
            )
        return [Problem("held_out_text", prompt, "", "") for prompt in found]

    return Task("held_out_text", problems, None)


def prompt_of(tokens: np.ndarray, learned: np.ndarray) -> list[int]:
    """The prompt of a document: what comes before its first learned token, of plain text a quarter."""
    return tokens[: int(np.argmax(learned)) or int(PLAIN_TEXT_PROMPT * len(tokens))].tolist()


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
