"""What a model is about to see: packed rows with the learned tokens coloured, lengths, padding, what was skipped."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from wedlm_jax.data.documents import Documents
from wedlm_jax.data.examples import Example
from wedlm_jax.data.packing import PackedBatch, pack
from wedlm_jax.data.tokenizer import decoder_behind

LEARNED, PROMPT, PAD = "bold green", "dim", "red"
_BARS = 10  # of the histogram
_MARKED = "[[{}]]"  # what is learned, where there are no colours
_WIDTH = 40  # characters of its longest bar
_REASONS = 5  # bad records that are shown


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The leading documents of a stream, packed as in training."""

    batches: list[PackedBatch]
    lengths: list[int]  # tokens of every example
    skipped: list[str]  # place and reason of every bad record
    documents: int  # with examples in them
    seen: int  # of the stream, those of the other split and bad records included

    @property
    def padding(self) -> float:
        """Share of the places of all batches but the last, which the end of the reading left partly filled; where it is the only
        one, of its rows that were begun."""
        segments = np.concatenate([batch.segment_ids for batch in self.batches[:-1] or self.batches])
        return float((segments[segments.any(axis=1)] == 0).mean())

    @property
    def places(self) -> float:
        """Of rows that the documents take, padding among them, where others follow them."""
        return sum(self.lengths) / (1 - self.padding)

    @property
    def learned(self) -> float:
        """Share of the tokens (no padding) with a loss on them."""
        return sum(int(batch.loss_mask.sum()) for batch in self.batches) / sum(self.lengths)


def inspect(
    documents: Documents,
    count: int,
    *,
    num_groups: int = 1,
    together: int = 1,
    num_rows: int,
    row_length: int,
    block_size: int,
    pad_token_id: int,
) -> Inspection:
    """Reads the stream up to `count` documents of its split, or one epoch, and packs them.

    Args:
      num_groups, together: parts of a batch that are packed apart, and batches that are packed at once, as of `PackedBatches`.
      num_rows: of each of them.

    Raises:
      UserError: a bad record under `on_bad_record="error"`.
    """
    groups: list[list[Example]] = [[] for _ in range(num_groups)]
    skipped: list[str] = []
    found = seen = 0
    for index in range(documents.epoch):
        document = documents[index]
        seen += 1
        found += bool(document.examples)
        groups[index % num_groups] += document.examples
        skipped += [document.skipped] if document.skipped is not None else []
        if found == count:
            break
    shape = {"row_length": row_length, "block_size": block_size, "pad_token_id": pad_token_id}
    packed = [_packed(examples, together, {"num_rows": together * num_rows, **shape}) for examples in groups]
    full = max(min(map(len, packed)) - together, 0)
    batches = [PackedBatch.joined([parts[number] for parts in packed]) for number in range(full)]
    if rest := [part for parts in packed for part in parts[full:]]:
        batches.append(PackedBatch.joined(rest))
    return Inspection(batches, [len(one.tokens) for examples in groups for one in examples], skipped, found, seen)


def _packed(examples: Sequence[Example], together: int, shape: Mapping[str, int]) -> list[PackedBatch]:
    batches, done = [], 0
    while done < len(examples):
        batch, count = pack(itertools.islice(examples, done, None), **shape)
        batches += batch.dealt(together)
        done += count
    return batches


def show(console: Console, inspection: Inspection, tokenizer: PreTrainedTokenizerBase, samples: int) -> None:
    """Prints `samples` rows, then the numbers."""
    plain = console.color_system is None  # into a file or a pipe
    rows = ((batch, row) for batch in inspection.batches for row in range(len(batch.tokens)))
    for number, (batch, row) in enumerate(itertools.islice(rows, samples)):
        console.rule(f"row {number}")
        console.print(row_text(batch, row, tokenizer, plain), soft_wrap=True)
    console.rule("numbers")
    learned = _MARKED.format("learned") if plain else "learned"
    console.print(
        Text.assemble((learned, LEARNED), " ", ("prompt", PROMPT), " ", ("padding", PAD), "; | starts a document")
    )
    if inspection.lengths:
        console.print(histogram(inspection.lengths))
        full = len(inspection.batches) - 1
        where = f"{full} full batch{'es' if full > 1 else ''}" if full else "the rows begun; they fill no batch"
        console.print(f"padding: {inspection.padding:.1%} of the places of {where}")
        console.print(f"learned: {inspection.learned:.1%} of the tokens")
    console.print(
        f"documents: {inspection.documents} of {inspection.seen} records read; skipped records: {len(inspection.skipped)}"
    )
    for reason in inspection.skipped[:_REASONS]:
        console.print(f"  {reason}", soft_wrap=True, markup=False, highlight=False)


def epochs(inspection: Inspection, documents: Documents, places: int, steps: int) -> list[str]:
    """A line for each source: how many steps of so many `places`, batch size x row length, go through it once, and how often all
    `steps` do."""
    in_step = inspection.seen * places / inspection.places if inspection.lengths else 0.0  # documents of the stream
    lines = []
    for name, records, times in zip(documents.names, documents.records, documents.times_read(in_step), strict=True):
        if times:
            lines.append(
                f"epoch of {name}: {records:,} records, about {_rounded(1 / times)} steps; train.steps={steps} are about "
                f"{_rounded(steps * times)} epochs"
            )
    return lines


def _rounded(x: float) -> str:
    return f"{x:,.0f}" if x >= 10 else f"{x:.2g}"


def row_text(batch: PackedBatch, row: int, tokenizer: PreTrainedTokenizerBase, plain: bool = False) -> Text:
    """The text of a row: every run of tokens of one kind decoded and coloured; where it is `plain`, what is learned is marked."""
    text = Text()
    kinds = np.where(batch.segment_ids[row] == 0, 0, np.where(batch.loss_mask[row], 1, 2))
    edges = np.flatnonzero(np.diff(kinds) | np.diff(batch.segment_ids[row])) + 1
    decode_behind = decoder_behind(tokenizer)
    last_segment = 0
    for run in np.split(np.arange(len(kinds)), edges):
        kind, segment = kinds[run[0]], batch.segment_ids[row][run[0]]
        begins = segment not in (0, last_segment)
        if begins:
            text.append("|", PAD)
            last_segment = segment
        if kind == 0:
            text.append(f"[{len(run)} padding]", PAD)
        else:
            ids = batch.tokens[row][run].tolist()
            decoded = str(tokenizer.decode(ids)) if begins else decode_behind(ids)
            text.append(_MARKED.format(decoded) if plain and kind == 1 else decoded, LEARNED if kind == 1 else PROMPT)
    return text


def histogram(lengths: Sequence[int]) -> Table:
    """How many examples have how many tokens."""
    edges = np.unique(np.histogram_bin_edges(lengths, _BARS).astype(int))
    counts = collections.Counter(int(np.searchsorted(edges, length, "right")) for length in lengths)
    table = Table("tokens", "examples", "", title="lengths", title_justify="left", box=None)
    for place in range(1, len(edges) + 1):
        high = edges[place] - 1 if place < len(edges) else max(lengths)
        if counts[place]:
            bar = "#" * max(round(_WIDTH * counts[place] / max(counts.values())), 1)
            table.add_row(f"{edges[place - 1]}-{high}", str(counts[place]), bar)
    return table
