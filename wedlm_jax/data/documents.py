"""The endless stream of documents by random access: order and mixture (grain), split, and examples with their loss masks."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
from transformers import PreTrainedTokenizerBase

from wedlm_jax.data.chat import from_messages, up_to_each_turn
from wedlm_jax.data.chat_template import with_defaults
from wedlm_jax.data.config import DataConfig
from wedlm_jax.data.examples import (
    Example,
    check_mask,
    end_token_id,
    from_completion,
    from_tokens,
    label_completion,
    pieces_of_text,
)
from wedlm_jax.data.records import BadRecord, Chat, Completion, DecodedReply, Record, Source, Text
from wedlm_jax.data.sources import open_source
from wedlm_jax.data.split import Split, content_of, split_by_hash
from wedlm_jax.data.tokenizer import vocabulary_rows
from wedlm_jax.errors import UserError

_PIECES_APART = 1_000_003  # between the ids of two pieces of one document, so that a batch does not hold one id twice


@dataclasses.dataclass(frozen=True)
class Document:
    """One element of the stream. No examples: it belongs to the other split, or it was a bad record."""

    examples: tuple[Example, ...] = ()  # the consecutive pieces of a long text, each turn of a conversation, else one
    skipped: str | None = None  # the place and the reason
    part: int = 0  # of the mixture


class Documents:
    """`documents[i]` for every i >= 0. It can be pickled for a worker process.

    Every part of a mixture has its own shuffle, and every epoch of it an order of its own. Document i belongs to group i modulo
    `num_groups`, and every group mixes the parts on its own, so its rows have the shares of the mixture too.

    Raises:
      UserError: a source cannot be opened, a `document_end_id` is no token, nothing is held out where `split` asks for that; on
        access, a bad record under `on_bad_record="error"`.
    """

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, split: Split):
        self._config, self.split, self._seed = config, split, seed
        self._tokenizer = with_end_token(with_chat_template(tokenizer, config), config.end_token)
        self._check_document_ends()
        if split == "held_out" and not config.share_held_out and not any(part.splits_itself for part in config.parts):
            raise UserError("the held-out split holds no document; raise data.held_out_share")
        self._sources = [open_source(part, config, split, seed, self._tokenizer) for part in config.parts]
        # Whether each source holds documents of this split and of no other.
        self._alone = [part.splits_itself for part in config.parts]
        self.records = [len(source) for source in self._sources]
        self.names = [str(part.of_split(split).path or part.source) for part in config.parts]
        self.share_is_fixed = config.share_is_fixed
        self.epoch = sum(self.records)  # documents, of both splits where a source has both

    @functools.cached_property
    def _rows(self) -> int:
        """Rows that a table of the tokenizer's ids needs; counted only where a source brings ids of its own."""
        return vocabulary_rows(self._tokenizer)

    def _check_document_ends(self) -> None:
        for number, part in enumerate(self._config.parts):
            end = part.document_end_id
            if end is not None and not 0 <= end < self._rows:
                name = f"data.mixture[{number}]" if self._config.source == "mixture" else "data"
                raise UserError(
                    f"{name}.document_end_id={end} is none of the tokenizer's tokens, 0 to {self._rows - 1}; name the one that "
                    "ends a document there, or leave it out"
                )

    def require_records(self, saved: Sequence[int]) -> None:
        """Raises a `UserError` where a source had another number of records in a run that is to go on: with another number all
        of them come in another order, some again and some never."""
        for name, before, now in zip(self.names, saved, self.records, strict=True):
            if now != before:
                raise UserError(
                    f"{name} had {before:,} records when the checkpoint was saved and has {now:,} now, which "
                    "changes the order of all; put it back as it was, or start again in another --workdir with "
                    "init_from=WORKDIR, the one of this run"
                )

    def fingerprints(self) -> list[tuple[str, int, str]]:
        """Of each source its name, the number of its records and a hash of its first, middle and last one."""

        def digest(source: Source) -> str:
            places = sorted({0, len(source) // 2, len(source) - 1}) if len(source) else []
            return hashlib.sha256(b"".join(content_of(source.fetch(place)) for place in places)).hexdigest()

        return [(name, len(source), digest(source)) for name, source in zip(self.names, self._sources, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_mix", "_orders")}

    @functools.cached_property
    def _mix(self) -> grain.MapDataset:
        """Element k: which part a group draws from in its turn k, and how often it has drawn from that part before."""
        turns = [
            grain.MapDataset.range(sys.maxsize).map(functools.partial(_pair, number))
            for number in range(len(self._sources))
        ]
        return grain.MapDataset.mix(turns, self._weights)

    @property
    def _weights(self) -> Sequence[float]:
        """By which the parts take turns. In every turn of a source that splits itself there is a document of this split, in those
        of another only as often as its documents are of it: beside such a one the former is given that many fewer."""
        alone, weights = self._alone, self._config.weights
        if len(set(alone)) == 1:
            return weights
        share = self._config.share_held_out if self.split == "held_out" else 1 - self._config.share_held_out
        return [weight * share if itself else weight for weight, itself in zip(weights, alone, strict=True)]

    @functools.cached_property
    def _orders(self) -> list[grain.MapDataset]:
        """Of each source, its indices in the endless order in which they come."""
        return [
            grain.MapDataset.range(len(source))
            .seed(self._seed if number == 0 else _seed_of_part(self._seed, number))
            .shuffle()
            .repeat()
            for number, source in enumerate(self._sources)
        ]

    def times_read(self, count: float) -> list[float]:
        """How often the first `count` documents of the stream, those of the other split among them, go through each source."""
        of_source = [count * weight / sum(self._weights) for weight in self._weights]
        return [turns / records for turns, records in zip(of_source, self.records, strict=True)]

    def _place(self, index: int) -> tuple[int, int]:
        """Of document `index`: which source, and the index in it."""
        turn, group = divmod(index, self._config.num_groups)
        number, drawn = self._mix[turn]
        # The groups share out each part's order as they share out the documents, so a record still comes once an epoch.
        return number, self._orders[number][drawn * self._config.num_groups + group]

    def hold_examples(self, part: int | None) -> bool:
        """Whether a part, or where that is None any, has an example at all: read in the order of its records, up to the first."""
        parts = range(len(self._sources)) if part is None else (part,)
        return any(self._read(number, place, 0).examples for number in parts for place in range(self.records[number]))

    def __getitem__(self, index: int) -> Document:
        return self._read(*self._place(index), index)

    def _read(self, number: int, place: int, index: int) -> Document:
        source = self._sources[number]
        raw = source.fetch(place)
        if not self._alone[number] and split_by_hash(content_of(raw), self._config.share_held_out) != self.split:
            return Document(part=number)
        try:
            return Document(self._examples(source.parse(place, raw), index), part=number)
        except BadRecord as error:
            message = f"{source.where(place)}: {error}"
            if self._config.on_bad_record == "skip":
                return Document(skipped=message, part=number)
            raise BadRecord(f"{message} (data.on_bad_record=skip leaves such records out and counts them)") from None

    def _examples(self, record: Record, index: int) -> tuple[Example, ...]:
        config, tokenizer = self._config, self._tokenizer
        if isinstance(record, Chat):
            turns, parts = config.loss_on_turns, [record.messages]
            if turns == "each":
                turns, parts = "last", up_to_each_turn(record.messages)
            examples = (
                from_messages(
                    part, tokenizer, tools=record.tools, variables=record.variables, document_id=_id(index, number),
                    num_end_tokens=config.num_end_tokens, loss_on_turns=turns,
                )
                for number, part in enumerate(parts)
            )  # fmt: skip
            return tuple(self._whole(check_mask(example)) for example in examples)
        if isinstance(record, Completion):
            example = from_completion(
                record.prompt, record.completion, tokenizer,
                num_end_tokens=config.num_end_tokens, document_id=_id(index),
            )  # fmt: skip
            return (self._whole(check_mask(example)),)
        if isinstance(record, DecodedReply):
            tokens = [*record.prompt_ids, *record.ids]
            _check_tokens(np.array(tokens), self._rows)
            example = label_completion(
                tokens, len(record.prompt_ids), document_id=_id(index), end_token_id=end_token_id(tokenizer),
                num_end_tokens=config.num_end_tokens if record.stopped else 0,
            )  # fmt: skip
            return (self._whole(example),)
        if isinstance(record, Text):
            if not record.text:
                raise BadRecord("the text is empty")
            pieces = pieces_of_text(record.text, tokenizer, config.row_length, ends=record.ends)
        else:
            _check_tokens(record.tokens, self._rows)
            ends = () if record.document_end_id is None else np.flatnonzero(record.tokens == record.document_end_id) + 1
            documents = [part.astype(np.int32) for part in np.split(record.tokens, ends) if len(part)]
            pieces = [
                d[start : start + config.row_length] for d in documents for start in range(0, len(d), config.row_length)
            ]
        return tuple(from_tokens(piece, _id(index, number)) for number, piece in enumerate(pieces))

    def _whole(self, example: Example) -> Example:
        if len(example.tokens) > self._config.row_length:
            raise BadRecord(
                f"{len(example.tokens)} tokens, and a row holds data.row_length={self._config.row_length}; shorten the "
                "record (a conversation is not cut), or start a new run with longer rows"
            )
        return example


def _pair(number: int, drawn: int) -> tuple[int, int]:
    return number, drawn


def _seed_of_part(seed: int, number: int) -> int:
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])


def _id(index: int, piece: int = 0) -> int:
    return (index + piece * _PIECES_APART) % 2**31


def _check_tokens(tokens: np.ndarray, rows: int) -> None:
    wrong = np.flatnonzero((tokens < 0) | (tokens >= rows))
    if len(wrong):
        raise BadRecord(
            f"token {tokens[wrong[0]]} at place {wrong[0]} is none of the tokenizer's, 0 to {rows - 1}; it was made with "
            "another tokenizer, name that one as tokenizer.path"
        )


def with_chat_template(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> PreTrainedTokenizerBase:
    """A tokenizer whose chat template has `chat_template_kwargs` as defaults; the given one where that is None."""
    return with_defaults(tokenizer, config.chat_template_variables, "data.chat_template_kwargs")


def with_end_token(tokenizer: PreTrainedTokenizerBase, end_token: str | None) -> PreTrainedTokenizerBase:
    """A tokenizer whose eos token is `end_token`; the given one where that is None.

    Raises:
      UserError: the tokenizer has no such token.
    """
    if end_token is None:
        return tokenizer
    if end_token not in tokenizer.get_vocab():
        raise UserError(f"data.end_token={end_token!r} is no token of the tokenizer; name one that it has")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = end_token
    return tokenizer
