"""What a source gives: a text, a prompt and its completion, a conversation, or tokens; and what a bad record raises."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from wedlm_jax.errors import UserError


class BadRecord(UserError):
    """One record that cannot be learned. The stream adds the place; `data.on_bad_record` says whether it is skipped."""


class UnfitTokenizer(UserError):
    """The tokenizer lacks what records of this kind need, whichever they are: none is skipped for it."""


@dataclasses.dataclass(frozen=True)
class Text:
    text: str
    ends: bool = True  # False of a section that another one of the same file follows


@dataclasses.dataclass(frozen=True)
class Completion:
    prompt: str
    completion: str


@dataclasses.dataclass(frozen=True)
class Chat:
    messages: list[dict[str, Any]]  # each with `role` and `content`
    tools: list[Any] | None = None  # descriptions of functions, for the chat template
    variables: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the chat template


@dataclasses.dataclass(frozen=True)
class Tokens:
    tokens: np.ndarray  # integers [T]
    document_end_id: int | None = None  # documents are cut after it


@dataclasses.dataclass(frozen=True)
class DecodedReply:
    """A prompt and what a decoder wrote after it, as the tokens that they were."""

    prompt_ids: list[int]
    ids: list[int]  # with the stop id
    stopped: bool  # by a stop id, and not by its length


Record = Text | Completion | Chat | Tokens | DecodedReply
Raw = Any  # as read, before anything is parsed: bytes of a line or file, a dict of columns, an array


class Source(Protocol):
    """Documents by random access, in a fixed order. It can be pickled for a worker process, which opens files anew."""

    def __len__(self) -> int: ...

    def where(self, index: int) -> str:
        """The place of a record for messages: `file:line`."""
        ...

    def fetch(self, index: int) -> Raw:
        """The record as it is stored; its hash decides the split, of most sources."""
        ...

    def parse(self, index: int, raw: Raw) -> Record:
        """What `fetch` gave, understood. Raises `BadRecord` (a reason without the place) where it is not as it should be."""
        ...


def plain(value: Any) -> Any:
    """A value of a record with lists and str for what tables give, numpy arrays and bytes; every str can be encoded.

    Raises:
      BadRecord: one that cannot.
    """
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadRecord(f"holds half a character ({value[error.start]!a}), which is no text") from None
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise BadRecord(f"not UTF-8 (byte {error.start})") from None
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, Mapping):
        return {plain(key): plain(one) for key, one in value.items()}
    return value
