"""From committed ids to text: whole characters, without the stop id, and never a piece of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from wedlm_jax.data.tokenizer import decoder_behind
from wedlm_jax.decode.config import DecodeConfig

Decode = Callable[[list[int]], str]  # the text of ids, by `decoder_behind` a prompt
HALF = "\N{REPLACEMENT CHARACTER}"  # what half of a character is decoded as


class Commit(NamedTuple):
    """Tokens that will not change any more, and the text that they complete."""

    ids: list[int]
    text: str | None  # None without a tokenizer


class Pieces:
    """Hands a growing row out as commits, which join to its ids and to its text."""

    def __init__(self, tokenizer: Any | None, config: DecodeConfig):
        self._behind: Decode | None = None if tokenizer is None else decoder_behind(tokenizer)
        self._config = config
        self._sent_ids, self._sent_text = 0, ""
        self._whole = (0, "")  # so many ids end with a whole character, and their text: a row only grows

    def up_to_stop(self, ids: list[int]) -> int | None:
        """`ids_up_to_stop` for what `next` gets after it. There is a tokenizer."""
        return ids_up_to_stop(self._decode, ids, self._config.stop, checked=self._sent_ids)

    def next(self, ids: list[int], finished: bool) -> Commit | None:
        """What is new in `ids`, all that the row has committed so far; None if that is nothing."""
        text = None
        if self._behind is not None:
            text = text_of(self._decode, ids, self._config, finished)
            if not finished:
                self._whole = self._whole if text.endswith(HALF) else (len(ids), text)
                text = _stable_prefix(text, self._config.stop)
        piece = None if text is None else text[len(self._sent_text) :]
        if len(ids) == self._sent_ids and not piece:
            return None
        commit = Commit(ids[self._sent_ids :], piece)
        self._sent_ids, self._sent_text = len(ids), text or ""
        return commit

    def _decode(self, ids: list[int]) -> str:
        """Of no fewer ids than were handed out. Those behind a whole character alone are decoded, however long the row is."""
        assert self._behind is not None
        count, text = self._whole
        return text + self._behind(ids[count:])


def text_of(decode: Decode, ids: list[int], config: DecodeConfig, finished: bool) -> str:
    """The text of `ids` without a final stop id, cut before the first stop string. `config.stop_ids` is resolved."""
    if finished and ids and ids[-1] in (config.stop_ids or ()):
        ids = ids[:-1]
    text = decode(ids)
    return text[: _first_stop(text, config.stop)]


def ids_up_to_stop(decode: Decode, ids: list[int], stop: Sequence[str], checked: int) -> int | None:
    """The fewest leading ids whose text holds a stop string, or None. The first `checked` are known to hold none."""
    # Half a character is no text yet: whether it is met would depend on how many tokens come at once.
    holds_stop = lambda count: _first_stop(_whole_characters(decode(ids[:count])), stop) is not None  # noqa: E731
    if not holds_stop(len(ids)):
        return None
    return next(filter(holds_stop, range(checked + 1, len(ids) + 1)))


def _first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the first stop string begins, or None."""
    places = [place for place in (text.find(s) for s in stop) if place >= 0]
    return min(places, default=None)


def _stable_prefix(text: str, stop: Sequence[str]) -> str:
    """The part of unfinished text that later tokens cannot change: no half character, no beginning of a stop string."""
    text = _whole_characters(text)
    held = max((k for s in stop for k in range(1, min(len(s), len(text) + 1)) if text.endswith(s[:k])), default=0)
    return text[: len(text) - held]


def _whole_characters(text: str) -> str:
    return text.rstrip(HALF)
