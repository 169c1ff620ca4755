"""The stream of packed batches: documents -> groups -> rows, endless, deterministic, restartable at any batch."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from wedlm_jax.data.config import DataConfig
from wedlm_jax.data.documents import Document, Documents
from wedlm_jax.data.examples import Example
from wedlm_jax.data.packing import PackedBatch, pack
from wedlm_jax.data.reading import Reader
from wedlm_jax.data.split import Split
from wedlm_jax.data.tokenizer import padding_id
from wedlm_jax.errors import UserError

State = dict[str, list[int]]  # one int for every group
MANY_BAD = 1000  # in a row, of which a line tells
RECORDS = "records"  # beside them: the number of records of each source
FIRST_SKIPPED = "first_skipped"  # and where a bad record was left out: place and reason of the first

_NO_DOCUMENT: Mapping[Split, str] = {
    "train": "the training split holds no document",
    "held_out": "the held-out split holds no document",
}
_OTHER_SHARE: Mapping[Split, str] = {
    "train": "lower data.held_out_share, in another workdir",
    "held_out": "raise data.held_out_share",
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the batches of a group that are packed together start in the stream of documents, and which of them comes next."""

    next_example: int  # index of the document
    next_piece: int = 0  # the first of its pieces that is not in a batch yet
    skipped_records: int = 0  # bad records of this group before it
    handed_out: int = 0  # of these batches


class PackedBatches(Iterator[PackedBatch]):
    """An endless iterator over this process's rows of the batches; the next ones are packed while the last ones are used.

    Document i of the stream belongs to group i modulo the number of groups, and every group fills rows of its own, those of
    `together` batches at once. So a batch is the same however many processes share the groups.

    Raises:
      UserError: on `next`, a bad record, or a split without documents; in training, a part of a mixture without any.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        groups: Sequence[int],
        num_groups: int,
        rows_per_group: int,
        row_length: int,
        block_size: int,
        pad_token_id: int,
        together: int = 1,
        num_workers: int = 0,
    ):
        self._reader, self._documents = Reader(documents, num_workers, len(groups)), documents
        self._groups, self._num_groups = groups, num_groups
        self._pack = {
            "num_rows": together * rows_per_group, "row_length": row_length, "block_size": block_size,
            "pad_token_id": pad_token_id,
        }  # fmt: skip
        self._together = together
        self._places = [Place(group) for group in groups]  # of the batch that comes next
        self._left: collections.deque[PackedBatch] = collections.deque()  # packed from there, and not handed out
        self._following = self._places  # behind what was packed from there
        self._pending: list[_Pending] | None = None
        self._skipped: list[str] = []  # place and reason of the first bad record
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "wedlm_jax.data")
        self._ahead: concurrent.futures.Future[tuple[list[PackedBatch], list[Place]]] | None = None

    def __next__(self) -> PackedBatch:
        if not self._left:
            ahead = self._ahead or self._thread.submit(self._make)
            self._ahead = None
            try:
                packed, self._following = ahead.result()
            except BaseException:
                self._pending = None  # begin again at the places; a bad record is told again
                raise
            self._left.extend(packed[self._places[0].handed_out :])
            self._ahead = self._thread.submit(self._make)
        batch = self._left.popleft()
        self._places = [dataclasses.replace(p, handed_out=p.handed_out + 1) for p in self._places]
        if not self._left:
            self._places = self._following
        return batch

    @property
    def skipped_records(self) -> int:
        """Bad records that were left out of the batches handed out so far, of this process's groups; 0 under "error"."""
        return self._so_far([p.skipped_records for p in self._places], [p.skipped_records for p in self._following])

    @property
    def first_skipped(self) -> str | None:
        """Place and reason of the first bad record that was left out, of this process's groups or as a state has it."""
        return next(iter(self._skipped), None)

    @property
    def records_read(self) -> int:
        """Records that this process's groups read for the batches handed out so far; those of the other split are among them."""
        here, behind = ([p.next_example // self._num_groups for p in ps] for ps in (self._places, self._following))
        return self._so_far(here, behind)

    def _so_far(self, here: Sequence[int], behind: Sequence[int]) -> int:
        """A sum over the groups: of what is packed together each batch has its share."""
        return sum(here) + (sum(behind) - sum(here)) * self._places[0].handed_out // self._together

    @property
    def epochs(self) -> list[float]:
        """How often each source was read, where the groups of other processes are as far as this one's."""
        return self._documents.times_read(self.records_read * self._num_groups / len(self._groups))

    @property
    def names(self) -> list[str]:
        """Of each source, for messages."""
        return self._documents.names

    @property
    def records(self) -> list[int]:
        """The number of records of each source, the same in all processes."""
        return self._documents.records

    def fingerprints(self) -> list[tuple[str, int, str]]:
        """By which two processes tell whether their sources are the same (`Documents.fingerprints`)."""
        return self._documents.fingerprints()

    def get_state(self) -> State:
        """JSON-able, a list with an int for every group of this process: joined over the processes, `set_state` takes it.

        Taken after batch n, it makes `set_state` go on with batch n + 1, whatever was read ahead.
        """
        return {
            field.name: [getattr(place, field.name) for place in self._places] for field in dataclasses.fields(Place)
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on at a state of all groups, in the order of the processes. With `RECORDS` in it, the sources are held to that; of
        `FIRST_SKIPPED` it goes on telling.

        Raises:
          UserError: the state is of another number of groups or of records, of an earlier version or damaged.
        """
        names = [field.name for field in dataclasses.fields(Place)]
        if isinstance(state, dict) and isinstance(firsts := state.get(names[0]), list):
            state = {"handed_out": [0] * len(firsts), **state}  # which earlier versions did not write
        # `get_state` does not give them.
        records = state.get(RECORDS, self.records) if isinstance(state, dict) else None
        lists = [records, *(state.get(name) for name in names)] if isinstance(state, dict) else [None]
        good = all(isinstance(one, list) and all(type(x) is int and x >= 0 for x in one) for one in lists)
        good = good and all(x < self._together for x in state["handed_out"]) and len({*state["handed_out"]}) <= 1
        if not good or records is None or len(records) != len(self.records):
            raise UserError(
                "the saved place in the data is of an earlier version or damaged (data, in the newest of checkpoints); "
                "remove that checkpoint or start a new run"
            )
        if any(len(state[name]) != self._num_groups for name in names):
            raise UserError(
                f"the saved place in the data is of {len(state[names[0]])} groups, and data.num_groups={self._num_groups}"
            )
        self._documents.require_records(records)
        if self._ahead is not None:
            concurrent.futures.wait([self._ahead])
        self._ahead = self._pending = None
        self._left.clear()
        self._skipped[:] = [state[FIRST_SKIPPED]] if state.get(FIRST_SKIPPED) else []
        self._places = [Place(*(state[name][group] for name in names)) for group in self._groups]
        self._following = self._places

    def _make(self) -> tuple[list[PackedBatch], list[Place]]:
        if self._pending is None:
            self._pending = [
                _Pending(_examples(self._reader, self._documents, place, self._num_groups, self._skipped))
                for place in self._places
            ]
        parts = []
        for pending in self._pending:
            batch, count = pack(pending, **self._pack)
            pending.take(count)
            parts.append(batch.dealt(self._together))
        places = [pending.place for pending in self._pending]
        return [PackedBatch.joined(of_groups) for of_groups in zip(*parts, strict=True)], places


class _Pending:
    """The examples of a group that are read and in no batch yet; iteration reads on behind them."""

    def __init__(self, examples: Iterator[tuple[Place, Example]]):
        self._examples = examples
        self._read: collections.deque[tuple[Place, Example]] = collections.deque()

    def __iter__(self) -> Iterator[Example]:
        yield from [example for _, example in self._read]
        for entry in self._examples:
            self._read.append(entry)
            yield entry[1]

    def take(self, count: int) -> None:
        for _ in range(count):
            self._read.popleft()

    @property
    def place(self) -> Place:
        """The place of the first example that is left: one that does not fit a batch closes it."""
        return self._read[0][0]


def _examples(
    reader: Reader, documents: Documents, start: Place, step: int, first_skipped: list[str]
) -> Iterator[tuple[Place, Example]]:
    """Every piece of the documents from `start` on, each with its own place; `first_skipped` is given the first bad record. A
    part of a mixture without any ends the training too, and is told of the held-out split."""
    skipped, split = start.skipped_records, documents.split
    index, first = start.next_example, start.next_piece
    whole, parts = _Drought(documents.epoch), [_Drought(records) for records in documents.records]
    for document in reader.read(index, step):
        if document.skipped is not None:
            skipped += 1
            if not first_skipped:
                first_skipped.append(document.skipped)
        for piece, example in enumerate(document.examples[first:], first):
            yield Place(index, piece, skipped), example
        if whole.see_bad(document) == MANY_BAD and index % step == 0:
            # Where all records are bad, it may take hours until that is known.
            print(f"warning: {MANY_BAD:,} bad records in a row, the last: {document.skipped}", file=sys.stderr)
        for drought, part in ((whole, None), (parts[document.part], document.part)):
            if not drought.see(document):
                continue
            # So few that this group, whose records are others in each epoch, met none.
            if documents.hold_examples(part):
                drought.end()
                continue
            name = None if part is None else documents.names[part]
            why = "; give it more records" if documents.share_is_fixed else f"; {_OTHER_SHARE[split]}"
            if drought.reason:
                why = f" but bad records, the last: {drought.reason}"
            message = f"{_NO_DOCUMENT[split]}{f' of {name}' if name else ''}{why}"
            if split == "train" or drought is whole:
                raise UserError(message)
            if index % step == 0:  # one group speaks for all
                print(f"warning: {message}", file=sys.stderr)
        index, first = index + step, 0


class _Drought:
    """Documents in a row without an example."""

    def __init__(self, records: int):
        self._longest = 3 * records + 100  # after so many there may be none
        self._length = self._bad = 0
        self.reason: str | None = None  # why the last bad record was skipped

    def see(self, document: Document) -> bool:
        """Counts one more, and says whether they have just become too many."""
        if document.examples:
            self.end()
        else:
            self._length, self.reason = self._length + 1, document.skipped or self.reason
        return self._length == self._longest + 1

    def see_bad(self, document: Document) -> int:
        """How many bad ones came since there was an example, up to this one; 0 where this one is not."""
        self._bad = 0 if document.examples else self._bad + (document.skipped is not None)
        return self._bad if document.skipped is not None else 0

    def end(self) -> None:
        self._length, self.reason = 0, None


def require_groups(config: DataConfig, batch_size: int, process_count: int) -> None:
    """Raises a `UserError` where rows, groups and the processes that feed a batch cannot be shared out."""
    if config.num_groups % process_count:
        raise UserError(
            f"data.num_groups={config.num_groups} is not a multiple of the {process_count} processes that feed a batch; "
            f"set data.num_groups={process_count}, or a multiple that divides train.batch_size={batch_size}; a run that has "
            "begun keeps its groups, so start that in fewer processes, or go on from its weights in another --workdir"
        )
    if batch_size % config.num_groups:
        raise UserError(
            f"a batch of {batch_size} rows cannot be split into data.num_groups={config.num_groups} groups; make it a divisor"
        )


def batches(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    batch_size: int,
    seed: int,
    split: Split = "train",
    process_index: int = 0,
    process_count: int = 1,
) -> PackedBatches:
    """The endless stream of packed batches: this process's [batch_size / process_count, config.row_length] of each.

    Every epoch has an order of its own, and every document, or piece of one, an id of its own, so the same text is
    corrupted anew in each epoch.

    Args:
      config: the data section of an experiment.
      tokenizer: its end token closes turns, completions and texts, unless the config names another.
      block_size: documents start on multiples of it.
      batch_size: rows of a batch, over all processes.
      seed: of the drawn problems and of the order.
      split: "train" or "held_out".
      process_index: which of the processes this is.
      process_count: how many share a batch.

    Raises:
      UserError: a source is missing or not of its format, or rows, groups and processes cannot be shared out.
    """
    require_groups(config, batch_size, process_count)
    own = config.num_groups // process_count
    return PackedBatches(
        Documents(config, tokenizer, seed, split),
        groups=range(process_index * own, (process_index + 1) * own), num_groups=config.num_groups,
        rows_per_group=batch_size // config.num_groups, row_length=config.row_length, block_size=block_size,
        pad_token_id=padding_id(tokenizer), num_workers=config.num_workers,
        together=config.pack_together if split == "train" else 1,  # of held-out documents few rows are wanted
    )  # fmt: skip
