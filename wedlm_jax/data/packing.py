"""Packing: examples into rows of one length, first-fit, nothing cut and nothing dropped.

The official code cuts the sample that overflows a row and loses its rest; here every token of every example lands in
exactly one row. Documents start on a multiple of `block_size`, so the blocks of a row are a reshape, and a document has
the same blocks wherever it lies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from wedlm_jax.data.examples import Example
from wedlm_jax.errors import UserError

Array = Any  # numpy here; the same fields hold jax arrays once the batch is on the devices


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """B rows of L tokens. Positions and segments are born here and travel with the tokens."""

    tokens: Array  # int32 [B, L]; the pad id where segment_ids is 0
    loss_mask: Array  # bool [B, L]
    positions: Array  # int32 [B, L]: 0, 1, ... in each document; 0 on padding
    segment_ids: Array  # int32 [B, L]: 1, 2, ... in each row; 0 on padding
    document_ids: Array  # int32 [B, L]: `Example.document_id`; 0 on padding

    @classmethod
    def joined(cls, parts: Sequence[PackedBatch]) -> PackedBatch:
        """The rows of all parts, in their order."""
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0])})

    def dealt(self, count: int) -> list[PackedBatch]:
        """Its rows to so many batches in turn: with first-fit the first ones hold the shorter documents."""
        return [PackedBatch(**{name: x[first::count] for name, x in vars(self).items()}) for first in range(count)]

    def first_rows(self, count: int) -> PackedBatch:
        return PackedBatch(**{name: x[:count] for name, x in vars(self).items()})


def first_fit(lengths: Iterable[int], *, num_rows: int, row_length: int, block_size: int) -> Iterator[tuple[int, int]]:
    """The (row, start) of each document in turn, in the first row that still holds it; ends at the first that fits none.

    Args:
      lengths: tokens of each document, 1 to `row_length`.
      num_rows: B.
      row_length: L, a multiple of `block_size`.
      block_size: J; starts are multiples of it.
    """
    used = [0] * num_rows
    for length in lengths:
        row = next((row for row in range(num_rows) if used[row] + length <= row_length), None)
        if row is None:
            return
        yield row, used[row]
        used[row] += -(-length // block_size) * block_size


def pack(
    examples: Iterable[Example], *, num_rows: int, row_length: int, block_size: int, pad_token_id: int
) -> tuple[PackedBatch, int]:
    """Packs the leading examples into one batch, until one fits none of its rows.

    The batch is closed there and that example opens the next one, so where a stream goes on is the place of that example
    (`pipeline.Place`).

    Returns:
      the batch [B, L] and how many examples it holds.

    Raises:
      UserError: an example is empty or longer than a row, or `row_length` is not a multiple of `block_size`.
    """
    if row_length % block_size:
        raise UserError(
            f"data.row_length={row_length} is not a multiple of block_size={block_size}; take blocks that divide it"
        )
    shape = (num_rows, row_length)
    batch = PackedBatch(
        tokens=np.full(shape, pad_token_id, np.int32),
        loss_mask=np.zeros(shape, bool),
        positions=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        document_ids=np.zeros(shape, np.int32),
    )
    segments = [0] * num_rows
    taken: list[Example] = []

    def lengths() -> Iterator[int]:
        for example in examples:
            _check_length(example, row_length)
            taken.append(example)
            yield len(example.tokens)

    count = 0
    for row, start in first_fit(lengths(), num_rows=num_rows, row_length=row_length, block_size=block_size):
        example = taken[count]
        count += 1
        segments[row] += 1
        place = row, slice(start, start + len(example.tokens))
        batch.tokens[place] = example.tokens
        batch.loss_mask[place] = example.loss_mask
        batch.positions[place] = np.arange(len(example.tokens))
        batch.segment_ids[place] = segments[row]
        batch.document_ids[place] = example.document_id
    return batch, count


def _check_length(example: Example, row_length: int) -> None:
    length = len(example.tokens)
    if length == 0:
        raise UserError(f"document {example.document_id} has no tokens; remove it")
    if length > row_length:
        raise UserError(
            f"document {example.document_id} has {length} tokens and a row holds data.row_length={row_length}; "
            "raise it or shorten the document (nothing is cut silently)"
        )
