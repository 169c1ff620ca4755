"""The stream of packed batches: source -> shuffle -> example -> pack, endless, deterministic, restartable at any batch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import grain
import numpy as np
from transformers import PreTrainedTokenizerBase

from wedlm_jax.data.examples import Example, from_completion, from_tokens
from wedlm_jax.data.packing import PackedBatch, pack
from wedlm_jax.data.quickstart_tasks import Problem, QuickstartProblems, Split
from wedlm_jax.data.stdlib_code import code_files
from wedlm_jax.data.tokenizer import TokenizerConfig, encode_text, load_tokenizer, train_tokenizer
from wedlm_jax.errors import UserError

_TOKENIZER_PROBLEMS = 4_000  # enough for every word and number of the quickstart tasks


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where examples come from and how they fill rows."""

    source: Literal["quickstart_tasks", "stdlib_code"] = "quickstart_tasks"
    path: str | None = None  # stdlib_code: a folder of .py files; None is the standard library of this Python
    row_length: int = 256  # L: tokens of a packed row; stdlib_code cuts files into documents of this length
    num_problems: int = 100_000  # quickstart_tasks: problems drawn before they come again in another order
    num_end_tokens: int = 8  # end-of-turn targets of a completion, the turn's own included

    def __post_init__(self) -> None:
        for field in ("row_length", "num_problems", "num_end_tokens"):
            if getattr(self, field) < 1:
                raise UserError(f"data.{field}={getattr(self, field)} must be at least 1")
        if self.path is not None and self.source == "quickstart_tasks":
            raise UserError("data.path is set, but data.source=quickstart_tasks makes its problems itself; remove one")


def make_tokenizer(config: TokenizerConfig, data: DataConfig) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that `config.path` names, else trains one on the training split. The seed of a run has no part."""
    if config.path is not None:
        return load_tokenizer(config.path)
    if data.source == "stdlib_code":
        return train_tokenizer((file.text for file in code_files("train", data.path)), config.vocab_size)
    problems = QuickstartProblems("train", seed=0, length=_TOKENIZER_PROBLEMS)
    return train_tokenizer((problem.prompt + problem.solution for problem in problems), config.vocab_size)


class PackedBatches(Iterator[PackedBatch]):
    """An endless iterator whose state is the index of the next example in the shuffled, repeated stream."""

    def __init__(
        self, examples: grain.MapDataset, *, batch_size: int, row_length: int, block_size: int, pad_token_id: int
    ):
        self._examples = examples
        self._pack = {
            "num_rows": batch_size, "row_length": row_length, "block_size": block_size, "pad_token_id": pad_token_id,
        }  # fmt: skip
        self._next_example = 0

    def __next__(self) -> PackedBatch:
        upcoming = (self._examples[index] for index in itertools.count(self._next_example))
        batch, count = pack(upcoming, **self._pack)
        self._next_example += count
        return batch

    def get_state(self) -> dict[str, int]:
        """JSON-able; taken after batch n, it makes `set_state` go on with batch n + 1."""
        return {"next_example": self._next_example}

    def set_state(self, state: dict[str, int]) -> None:
        self._next_example = int(state["next_example"])


def batches(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    batch_size: int,
    seed: int,
    split: Split = "train",
) -> PackedBatches:
    """The endless stream of packed batches [batch_size, config.row_length].

    Every epoch has an order of its own, and every example an id of its own (its index in the endless stream), so the same
    text is corrupted anew in each epoch.

    Args:
        config: the data section of an experiment.
        tokenizer: its end token closes completions and files.
        block_size: documents start on multiples of it.
        batch_size: rows of a batch.
        seed: of the drawn problems and of the order.
        split: "train" or "held_out".
    """
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return PackedBatches(
        examples(config, tokenizer, seed, split),
        batch_size=batch_size, row_length=config.row_length, block_size=block_size, pad_token_id=pad or 0,
    )  # fmt: skip


def examples(config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, split: Split) -> grain.MapDataset:
    """The endless stream of `Example`, by random access: `examples(...)[i].document_id == i`."""

    def to_example(index: int, record: Any) -> Example:
        if isinstance(record, Problem):
            return from_completion(
                record.prompt, record.solution, tokenizer, num_end_tokens=config.num_end_tokens, document_id=index
            )
        return from_tokens(record, index)

    source = _source(config, tokenizer, seed, split)
    return grain.MapDataset.source(source).seed(seed).shuffle().repeat().map_with_index(to_example)


def _source(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, split: Split
) -> Sequence[Problem] | Sequence[np.ndarray]:
    if config.source == "quickstart_tasks":
        return QuickstartProblems(split, seed, config.num_problems)
    documents: list[np.ndarray] = []
    for file in code_files(split, config.path):
        tokens = np.array([*encode_text(tokenizer, file.text), tokenizer.eos_token_id], np.int32)
        documents.extend(
            tokens[start : start + config.row_length] for start in range(0, len(tokens), config.row_length)
        )
    return documents
