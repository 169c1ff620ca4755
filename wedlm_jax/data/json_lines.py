"""JSON records by random access, a line each or in one array: an index of their offsets, made at the first use; plain, gzip or
zstd."""

from __future__ import annotations

import collections
import functools
import gzip
import itertools
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow

from wedlm_jax.data.columns import read_record
from wedlm_jax.data.config import SourceConfig
from wedlm_jax.data.decoded_files import lines_between_times, open_decoded
from wedlm_jax.data.files import note_open
from wedlm_jax.data.json_array import begins_array, elements
from wedlm_jax.data.records import BadRecord, Raw, Record
from wedlm_jax.errors import UserError, reading, reason, shown

COMPRESSED = (".gz", ".zst")
_COMPRESSIONS = ("", *COMPRESSED)
ENDINGS = tuple(kind + compression for kind in (".jsonl", ".ndjson") for compression in _COMPRESSIONS)
_JSON = tuple(f".json{compression}" for compression in _COMPRESSIONS)
_CHUNK = 1 << 24  # bytes of a file that are looked through at once


def json_lines_beside_text(path: Path, config: SourceConfig, on_disk: bool) -> JsonLines | None:
    """A file of a folder of texts, where it holds records: by its name, or, as many corpora have it, a .json whose first line, or
    first element, is an object with a text. Other JSON, such as a package.json, is text as code is."""
    lines, name = JsonLines(path, config, on_disk), path.name.lower()
    return lines if name.endswith(ENDINGS) or (name.endswith(_JSON) and lines.begins_with_text) else None


class JsonLines:
    """The non-empty lines of one file, or, where it begins with a bracket, the elements of the array that it is. An empty one,
    as a shard among others may be, has none.

    Of a plain file only the offsets are held, 16 bytes a record; an array is read as a whole to find them. A compressed file has
    no random access, so it is decompressed: `on_disk` once for all processes, else in the memory of each that reads it.
    """

    def __init__(self, path: Path, config: SourceConfig, on_disk: bool):
        self._path, self._config, self._on_disk = path, config, on_disk
        self._offsets: np.ndarray | None = None  # int64: where the pieces of the file begin, and its last one ends
        self._records: np.ndarray | None = None  # int64: the pieces that are records, and no empty lines or commas
        self._file: BinaryIO | None = None
        self._decompressed: bytes | None = None

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_file": None, "_decompressed": None}

    def __len__(self) -> int:
        return len(self._index()[1])

    def where(self, index: int) -> str:
        if self._is_array:
            return f"{self._path}: record {index}"
        return f"{self._path}:{self._index()[1][index] + 1}"

    def fetch(self, index: int) -> bytes:
        offsets, records = self._index()
        start, end = (int(offset) for offset in offsets[records[index] : records[index] + 2])
        if (data := self._data()) is not None:
            return data[start:end].strip()
        with reading(self._path):
            file = self._opened()  # held until it is read: another thread may let go of it, and open others
            return os.pread(file.fileno(), end - start, start).strip()

    def _opened(self) -> BinaryIO:
        file = self._file
        if file is None:
            file = self._file = self._open()
            note_open(self)
        return file

    def _open(self) -> BinaryIO:
        if not self._is_compressed:
            return self._path.open("rb")
        return open_decoded(
            str(self._path), (), ".json", write=self._decompress_to, open_file=lambda file: file.open("rb")
        )

    def let_go(self) -> None:
        self._file = None  # closed once nobody reads it

    @property
    def begins_with_text(self) -> bool:
        """Whether the first record is an object that has the column of text; one that the config names may be missing."""
        try:
            fields = json.loads(self._first_element() if self._is_array else self.fetch(0))
        except (ValueError, IndexError, RecursionError):  # an empty file, too
            return False
        return isinstance(fields, dict) and (self._config.text_column is not None or "text" in fields)

    def _first_element(self) -> bytes:
        """Read without those behind it: where one of these is broken, the array is still one of records."""
        start, end = next(elements(data := b"".join(self._chunks()), self._path), (0, 0))
        return data[start:end]

    def parse(self, index: int, raw: Raw) -> Record:
        try:
            fields = json.loads(raw, object_pairs_hook=unrepeated)
        except BadRecord:
            raise
        except UnicodeDecodeError as error:
            raise BadRecord(f"not UTF-8 (byte {error.start} of the {'record' if self._is_array else 'line'})") from None
        except (ValueError, RecursionError) as error:  # a number of too many digits is a bare ValueError
            what = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else reason(error)
            raise BadRecord(f"broken JSON ({what}){self._hint()}") from None
        if not isinstance(fields, dict):
            raise BadRecord(f"a JSON object is expected, with keys, and this is {type(fields).__name__}{self._hint()}")
        try:
            return read_record(fields, self._config)
        except BadRecord as error:
            raise BadRecord(f"{error}{self._hint_of_key(fields)}") from None

    def _hint_of_key(self, fields: dict[str, Any]) -> str:
        """For the one object of a file that has the array of all records under a key: objects, and neither messages nor tools."""
        for key, value in fields.items() if len(self) == 1 else ():
            first = value[0] if isinstance(value, list) and value else None
            if isinstance(first, dict) and not {"role", "from", "type"} & first.keys():
                return f"; where {shown(key)} holds the records, `jq .{key}` writes them as the array that is read"
        return ""

    def _hint(self) -> str:
        """For a bad line of a file that is no JSONL: text, or objects over several lines."""
        name = self._path.name.lower()
        if any(ending in name for ending in (".csv", ".tsv")):
            return "; a table in CSV is data.source=csv"
        if "json" not in name:
            return "; plain text is data.source=text"
        if self._is_array or self.fetch(0) != b"{":
            return ""
        return "; records are one object a line, or one array; `jq -c .` writes each object in a line, `jq .KEY` the array in one"

    @functools.cached_property
    def _is_array(self) -> bool:
        with reading(self._path):
            return begins_array(next(self._chunks(), b""))

    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        if self._offsets is None or self._records is None:
            with reading(self._path):
                chunks = self._chunks()
                first = next(chunks, b"")
                self._is_array = begins_array(first)  # so that no file is opened twice
                if self._is_array:
                    self._offsets = np.array([*elements(b"".join((first, *chunks)), self._path)], np.int64).reshape(-1)
                    self._records = np.arange(0, len(self._offsets), 2)
                else:
                    self._offsets, self._records = _line_offsets(itertools.chain((first,), chunks))
        return self._offsets, self._records

    def _chunks(self) -> Iterator[bytes]:
        if (data := self._data()) is not None:
            yield data
            return
        with self._open() as file:
            while chunk := file.read(_CHUNK):
                yield chunk

    def _data(self) -> bytes | None:
        """All of a compressed file that is held in memory; None of what is read from disk."""
        if self._decompressed is None and self._is_compressed and not self._on_disk:
            self._decompressed = b"".join(self._decompress())
        return self._decompressed

    @property
    def _is_compressed(self) -> bool:
        return self._path.suffix.lower() in COMPRESSED

    def _decompress_to(self, output: BinaryIO) -> None:
        size, tell = 0, lines_between_times()
        for chunk in self._decompress():
            size += output.write(chunk)
            tell(f"{self._path}: {size / 1e6:,.0f} MB are decompressed")

    def _decompress(self) -> Iterator[bytes]:
        """Of a compressed file, chunk by chunk."""
        try:
            if not self._path.stat().st_size:
                raise EOFError("it holds nothing at all")
            gz = self._path.suffix.lower() == ".gz"
            with gzip.open(self._path) if gz else pyarrow.input_stream(str(self._path), "zstd") as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(
                f"{self._path}: cannot be decompressed, it is cut off or damaged ({reason(error)}); write it again"
            ) from None


def unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for `json.loads(..., object_pairs_hook=unrepeated)`, which by itself keeps the last of two values.

    Raises:
      BadRecord: a key is there twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        ((key, _),) = collections.Counter(key for key, _ in pairs).most_common(1)
        raise BadRecord(f"the key {shown(key)} is there twice; take one out")
    return found


def _line_offsets(chunks: Iterator[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Where each line starts, with the end of the file last, and the numbers (from 0) of the lines that are not empty."""
    ends, empty, size, before = [np.zeros(1, np.int64)], [np.zeros(0, bool)], 0, b"\n\n"
    for chunk in chunks:
        window = np.frombuffer(before + chunk, np.uint8)
        found = np.flatnonzero(window[2:] == ord("\n"))
        one, two = window[found + 1], window[found]  # the bytes before the line end
        empty.append((one == ord("\n")) | ((one == ord("\r")) & (two == ord("\n"))))
        ends.append(found + size + 1)
        size += len(chunk)
        before = (before + chunk)[-2:]
    if before[-1:] != b"\n":  # the last line has no line end
        ends.append(np.array([size]))
        empty.append(np.zeros(1, bool))
    return np.concatenate(ends).astype(np.int64), np.flatnonzero(~np.concatenate(empty))
