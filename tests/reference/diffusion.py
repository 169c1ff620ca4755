"""The training method of the paper (section 4) on plain lists, one document and one token at a time.

Shares no code with the package. A document is a list of tokens and a list of flags, True where a token is to be learned.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction


@dataclasses.dataclass
class Document:
    """One packed document. `mask_ratios` has one gamma a block, `masked` one flag a token."""

    tokens: list[int]
    learned: list[bool]
    masked: list[bool]
    mask_ratios: list[float]


@dataclasses.dataclass
class Row:
    """One physical row of one of the two streams."""

    token: int
    position: int
    masked: bool
    mask_ratio: float
    target: int | None  # None: nothing to predict


def reordered(masked: list[bool], padding: list[bool] | None = None) -> list[int]:
    """Eq. 5: the slots that are observed, ascending, then the masks, ascending; then padding, which no equation knows."""
    padding = padding or [False] * len(masked)
    slots = range(len(masked))
    observed = [i for i in slots if not masked[i] and not padding[i]]
    return observed + [i for i in slots if masked[i] and not padding[i]] + [i for i in slots if padding[i]]


def round_half_even(x: Fraction) -> int:
    floor = math.floor(x)
    if x - floor == Fraction(1, 2):
        return floor if floor % 2 == 0 else floor + 1
    return math.floor(x + Fraction(1, 2))


def masked_candidates(scores: list[float], candidates: list[bool], mask_ratio: float) -> list[bool]:
    """round(gamma * candidates) of the candidates, those of the lowest scores, the earlier one of equal scores."""
    eligible = sorted((score, i) for i, score in enumerate(scores) if candidates[i])
    count = round_half_even(Fraction(mask_ratio) * len(eligible))
    chosen = {i for _, i in eligible[:count]}
    return [i in chosen for i in range(len(scores))]


def blocks(length: int, block_size: int) -> list[list[int]]:
    """The positions of each of the K = ceil(length / block_size) blocks of a document."""
    positions = list(range(length))
    return [positions[start : start + block_size] for start in range(0, length, block_size)]


def memory_stream(document: Document) -> list[Row]:
    """The clean copy, each token with its next one as target where that one is to be learned."""
    rows = []
    for position, token in enumerate(document.tokens):
        following = position + 1
        has_label = following < len(document.tokens) and document.learned[following]
        rows.append(Row(token, position, False, 0.0, document.tokens[following] if has_label else None))
    return rows


def prediction_stream(document: Document, *, block_size: int, mask_token_id: int) -> list[Row]:
    """Eq. 8: the copy that is masked and reordered block by block; a mask predicts the token of its own place."""
    rows = []
    for block, ratio in zip(blocks(len(document.tokens), block_size), document.mask_ratios, strict=True):
        for i in reordered([document.masked[position] for position in block]):
            position = block[i]
            token, masked = document.tokens[position], document.masked[position]
            rows.append(Row(mask_token_id if masked else token, position, masked, ratio, token if masked else None))
    return rows


def sees(query: int, key: int, length: int, *, block_size: int, in_block: str) -> bool:
    """Eq. 9 for one document of `length` tokens, rows 0 .. length - 1 its memory copy, the next `length` its prediction copy."""
    if query < length:
        return key <= query  # the memory copy is an ordinary causal language model
    place = query - length
    block = place // block_size
    if key < length:
        return key < block * block_size
    other = key - length
    return other // block_size == block and (in_block == "bidirectional" or other <= place)


def mlm_loss(
    losses: list[list[float]], streams: list[list[Row]], documents: list[Document], normalization: str
) -> float:
    """Eq. 10: sum over masks of loss / gamma; divided by the sum of the 1 / gamma, or by the number of tokens to be learned."""
    total, weights = 0.0, 0.0
    for of_document, rows in zip(losses, streams, strict=True):
        for loss, row in zip(of_document, rows, strict=True):
            if row.masked:
                weight = 1 / (row.mask_ratio + 1e-8)  # Eq. 10 has 1 / gamma; the official code keeps it finite so
                total += weight * loss
                weights += weight
    if normalization == "tokens":
        weights = float(sum(sum(document.learned) for document in documents))
    return total / weights if weights else 0.0


def ar_loss(losses: list[list[float]], streams: list[list[Row]]) -> float:
    """Mean loss of the memory rows that have a target."""
    counted = [
        loss
        for of_document, rows in zip(losses, streams, strict=True)
        for loss, row in zip(of_document, rows, strict=True)
        if row.target is not None
    ]
    return sum(counted) / len(counted) if counted else 0.0
