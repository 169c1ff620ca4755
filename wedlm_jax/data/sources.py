"""The sources that a config names, opened."""

from __future__ import annotations

import bisect
import itertools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from wedlm_jax.data.config import DataConfig, SourceConfig
from wedlm_jax.data.decoded_files import lines_between_times, too_large
from wedlm_jax.data.examples import pieces_of_text
from wedlm_jax.data.files import find_files
from wedlm_jax.data.json_lines import COMPRESSED, ENDINGS, JsonLines, json_lines_beside_text
from wedlm_jax.data.quickstart_tasks import Problem, QuickstartProblems
from wedlm_jax.data.records import BadRecord, Completion, Raw, Record, Source, Text, Tokens
from wedlm_jax.data.split import Split
from wedlm_jax.data.stdlib_code import code_files
from wedlm_jax.data.tables import CSV_ENDINGS, CsvTable, HfTable, ParquetTable, TfdsTable
from wedlm_jax.data.token_arrays import TokenArray
from wedlm_jax.errors import UserError, reading

# The sources that are files, and how those of a folder end; None takes all.
_ENDINGS: Mapping[str, tuple[str, ...] | None] = {
    "chat": ENDINGS,
    "completions": ENDINGS,
    "text": None,
    "tokens": (".npy",),
    "parquet": (".parquet",),
    "csv": CSV_ENDINGS,
}
_EMPTY: Mapping[str, str] = {  # what is said where all files are; among others an empty one is none
    "text": "the text is empty",
    "tokens": "the array is empty",
    **dict.fromkeys(("chat", "completions"), "the file is empty; a record is one object on a line, or of one array"),
}
_SYNTAX = (".csv", ".tsv", ".json")  # how a plain text ends that may not be meant as one
_SECTION = 1 << 16  # bytes of a plain text that are a document, and what is left of their last line
_ROW_BYTES = 8  # or, of long rows, so many for each of its tokens, which are four bytes or less: it fills a row


def open_source(
    part: SourceConfig, config: DataConfig, split: Split, seed: int, tokenizer: PreTrainedTokenizerBase
) -> Source:
    """One part of `config.parts`.

    Raises:
      UserError: a file or a column is missing, a file is empty or not of its format, or is held out and trained on.
    """
    if part.source == "quickstart_tasks":
        return Problems(split, seed, config.num_problems)
    if part.source == "stdlib_code":
        return CodePieces(split, part.path, config.row_length, tokenizer)
    if part.held_out_path is not None and part.source in _ENDINGS:
        real = [{os.path.realpath(file): file for file in _files(part.of_split(one))} for one in ("train", "held_out")]
        if both := sorted(real[0].keys() & real[1].keys()):
            raise UserError(
                f"{real[0][both[0]]}: is of data.held_out_path={part.held_out_path} and of data.path={part.path}, so it would be "
                "trained on too; leave it out of either, as data.path='DIR/train*' does"
            )
    return open_path(part.of_split(split), config.row_length)


def open_path(part: SourceConfig, row_length: int) -> Source:
    """A source of the user's own data, what lies at `path`; errors as above."""
    path = str(part.path)
    sources: Sequence[Source]
    if part.source in _ENDINGS:
        sources = _open_files(_files(part), part, row_length)
    else:
        sources = [(TfdsTable if part.source == "tfds" else HfTable)(path, part)]
    lines = any(isinstance(source, JsonLines) for source in sources)
    if part.source == "text" and part.text_column is not None and not lines:
        raise UserError(
            f"{path}: no file is JSONL, so data.text_column={part.text_column} has no effect; remove it, or let names end in "
            ".jsonl"
        )
    # In a folder such a file may be meant so, as code with its package.json.
    if isinstance(sources[0], TextFile) and path.lower().endswith(_SYNTAX) and Path(path).expanduser().is_file():
        warnings.warn(
            f"{path} is learned as plain text, commas, quotes and brackets too; data.source=csv reads the columns of a table, "
            "and JSON is read as texts where it is objects with a text, one a line or all in one array",
            stacklevel=1,  # one place, so that it is told once, however often the file is opened
        )
    if not any(map(len, sources)):
        raise UserError(f"{path}: {_EMPTY.get(part.source, 'has no rows')}")
    return sources[0] if len(sources) == 1 else Joined(sources)


def _files(part: SourceConfig) -> list[Path]:
    return find_files(str(part.path), _ENDINGS[part.source])


def _open_files(files: list[Path], part: SourceConfig, row_length: int) -> list[Source]:
    """Most are looked through, and how far that is is told where it takes long."""
    tables = part.source in ("parquet", "csv")
    on_disk = too_large(file for file in files if tables or file.suffix.lower() in COMPRESSED)
    sources, tell = [], lines_between_times()
    for file in files:
        sources.append(_open_file(file, part, row_length, on_disk))
        len(sources[-1])  # looks through it
        tell(f"{part.path}: {len(sources):,} of {len(files):,} files are open")
    return sources


def _open_file(file: Path, part: SourceConfig, row_length: int, on_disk: bool) -> Source:
    if part.source in ("chat", "completions"):
        return JsonLines(file, part, on_disk)
    if part.source == "tokens":
        return TokenArray(file, part, row_length)
    if part.source == "parquet":
        return ParquetTable(str(file), part, on_disk)
    if part.source == "csv":
        return CsvTable(str(file), part, on_disk)
    lines = json_lines_beside_text(file, part, on_disk)
    return TextFile(file, row_length) if lines is None else lines


class Joined:
    """Several sources as one, in their order."""

    def __init__(self, sources: Sequence[Source]):
        self._sources = sources
        self._ends = list(itertools.accumulate(len(source) for source in sources))

    def __len__(self) -> int:
        return self._ends[-1]

    def where(self, index: int) -> str:
        source, place = self._find(index)
        return source.where(place)

    def fetch(self, index: int) -> Raw:
        source, place = self._find(index)
        return source.fetch(place)

    def parse(self, index: int, raw: Raw) -> Record:
        source, place = self._find(index)
        return source.parse(place, raw)

    def _find(self, index: int) -> tuple[Source, int]:
        number = bisect.bisect_right(self._ends, index)
        return self._sources[number], index - (self._ends[number - 1] if number else 0)


class TextFile:
    """One file of plain text or code. A long one is many documents, sections that end at line ends: so its parts are shuffled,
    shared out to the groups and held out as files are, and tokenized one at a time. An empty one is none."""

    def __init__(self, path: Path, row_length: int):
        self._path, self._section = path, max(_SECTION, _ROW_BYTES * row_length)
        self._ends: list[int] | None = None  # bytes up to the end of each section

    def __len__(self) -> int:
        return len(self._index())

    def where(self, index: int) -> str:
        return str(self._path)

    def fetch(self, index: int) -> bytes:
        start = self._start(index)
        # A buffer of its own size: a network disk's may be megabytes, of which a section would take one and leave the rest.
        with reading(self._path), self._path.open("rb", buffering=self._section) as file:
            file.seek(start)
            return file.read(self._index()[index] - start)

    def parse(self, index: int, raw: Raw) -> Record:
        if (zero := raw.find(0)) >= 0:  # as in UTF-16, most sections of which would pass for UTF-8
            raise BadRecord(
                f"not text (byte {self._start(index) + zero} is 0; of a folder a pattern takes some, as data.path='DIR/**/*.md')"
            )
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise BadRecord(f"not UTF-8 (byte {self._start(index) + error.start})") from None
        # Editors on Windows mark a file as UTF-8 by a character that is none of its text.
        return Text(text.removeprefix("\ufeff") if index == 0 else text, ends=index + 1 == len(self))

    def _start(self, index: int) -> int:
        return self._index()[index - 1] if index else 0

    def _index(self) -> list[int]:
        if self._ends is None:
            with reading(self._path):
                size = self._path.stat().st_size
                self._ends = [size] if 0 < size <= self._section else list(self._cut(size))
        return self._ends

    def _cut(self, size: int) -> Iterator[int]:
        end = 0
        # So much is read of each section, to find the end of a line.
        with self._path.open("rb", buffering=1 << 12) as file:
            while end < size:
                file.seek(end + self._section - 1)
                part = file.readline(self._section)
                while part and not part.endswith(b"\n"):  # no character of UTF-8 goes over a line end
                    part = file.readline(self._section)
                end = min(file.tell(), size)
                yield end


class Problems:
    """The quickstart tasks, drawn from the seed."""

    def __init__(self, split: Split, seed: int, length: int):
        self._problems = QuickstartProblems(split, seed, length)

    def __len__(self) -> int:
        return len(self._problems)

    def where(self, index: int) -> str:
        return f"problem {index}"

    def fetch(self, index: int) -> Problem:
        return self._problems[index]

    def parse(self, index: int, raw: Raw) -> Record:
        return Completion(raw.prompt, raw.solution)


class CodePieces:
    """Files of code, all of them tokenized at the start, in pieces of a row's length."""

    def __init__(self, split: Split, folder: str | None, row_length: int, tokenizer: PreTrainedTokenizerBase):
        self._pieces: list[np.ndarray] = []
        self._files: list[str] = []
        for file in code_files(split, folder):
            pieces = pieces_of_text(file.text, tokenizer, row_length)
            self._pieces += pieces
            self._files += [file.path] * len(pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def where(self, index: int) -> str:
        return self._files[index]

    def fetch(self, index: int) -> np.ndarray:
        return self._pieces[index]

    def parse(self, index: int, raw: Raw) -> Record:
        return Tokens(raw)


def require_source(part: SourceConfig) -> None:
    """What can be told of a source at once: its files are looked for and not read, a dataset is opened.

    Raises:
      UserError: there is no such file, none of its kind, or no such dataset, or it misses a column or the package to read it.
    """
    for of_split in {part, part.of_split("held_out")}:
        if part.source in _ENDINGS:
            _files(of_split)
        elif part.source in ("tfds", "hf_dataset"):
            open_path(of_split, row_length=1)
