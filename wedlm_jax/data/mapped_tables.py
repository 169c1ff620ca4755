"""Tables on disk: what is read of a file, decoded once into an Arrow file that is memory-mapped.

All processes of the machine share it, workers and later runs too, and memory holds only what is being read of it.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import itertools
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock
import pyarrow

from wedlm_jax.errors import UserError, reading, reason, writing

CACHE = "WEDLM_JAX_CACHE"  # in the environment: a folder in place of ~/.cache/wedlm_jax
SECONDS_BETWEEN_LINES = 10.0  # of what takes long to open
_FORMAT = 1  # of the files, which those of another one do not pass for
_ENDS = b"ends"  # key of metadata: where the batches end
_NOT_THERE = (OSError, ValueError, pyarrow.ArrowException)  # or damaged, or of no bytes


class Rows:
    """The rows of batches, by random access."""

    def __init__(self, ends: Sequence[int], batch: Callable[[int], Any]):
        """`ends`: of each batch, the number of rows up to its end."""
        self._ends, self._batch = ends, batch

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = bisect.bisect_right(self._ends, index)
        start = self._ends[number - 1] if number else 0
        return self._batch(number).slice(index - start, 1).to_pylist()[0]


def rows_in_memory(batches: Iterator[Any]) -> Rows:
    held = list(batches)
    return Rows([*itertools.accumulate(batch.num_rows for batch in held)], held.__getitem__)


def rows_on_disk(path: str, columns: Sequence[str], batches: Callable[[], Iterator[Any]]) -> Rows:
    """The rows of a table from its Arrow file, which is written where it is not there.

    Args:
      path: the table. One of another place, size or time of change is another one, with a file of its own.
      columns: what is read of it.
      batches: reads it.

    Raises:
      UserError: as `batches`; or the Arrow file cannot be written.
    """
    with reading(Path(path)):
        real, stat = os.path.realpath(path), os.stat(path)
    which = json.dumps([_FORMAT, real, stat.st_size, stat.st_mtime_ns, *columns])
    digest = hashlib.blake2b(which.encode(), digest_size=8).hexdigest()
    file = _folder() / f"{Path(path).name[:100]}-{digest}.arrow"
    with contextlib.suppress(*_NOT_THERE):
        return _mapped(file)
    with writing(file, f"or set {CACHE} to another folder"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(file.with_suffix(".lock")):
            with contextlib.suppress(*_NOT_THERE):
                return _mapped(file)  # another process has written it meanwhile
            _tell_folder(file.parent)
            _write(file, path, batches())
    with reading(file):
        return _mapped(file)


def _folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "wedlm_jax"
    return Path(os.environ.get(CACHE) or cache).expanduser() / "tables"


@functools.cache
def _tell_folder(folder: Path) -> None:
    print(f"large tables are decoded once to files in {folder} ({CACHE} names another place)", file=sys.stderr)


def _mapped(file: Path) -> Rows:
    with file.open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    # For a row its own pages are read from the disk; else the system reads megabytes ahead, and `pyarrow.memory_map` a batch.
    data.madvise(mmap.MADV_RANDOM)
    reader = pyarrow.ipc.open_file(data)
    _, metadata = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
    return Rows(json.loads(metadata[_ENDS]), reader.get_batch)


def _write(file: Path, path: str, batches: Iterator[Any]) -> None:
    """Whole or not at all; what a killed process left half written is written over."""
    unfinished = file.with_suffix(".unfinished")
    try:
        with unfinished.open("wb") as output:
            _write_batches(output, path, batches)
            output.flush()
            os.fsync(output.fileno())
        unfinished.replace(file)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: cannot be decoded to disk ({reason(error)}); write it with plain columns") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _write_batches(output: Any, path: str, batches: Iterator[Any]) -> None:
    """With an empty batch behind them that says where each of them ends, so that none need be looked at to find a row."""
    first = list(itertools.islice(batches, 1))
    schema = _without_dictionaries(first[0].schema if first else pyarrow.schema([]))
    ends: list[int] = []
    told = time.monotonic()
    with pyarrow.ipc.new_file(output, schema) as writer:
        for batch in itertools.chain(first, batches):
            writer.write_batch(batch.cast(schema))
            ends.append(batch.num_rows + (ends[-1] if ends else 0))
            if time.monotonic() - told >= SECONDS_BETWEEN_LINES:
                print(f"{path}: {ends[-1]:,} rows are decoded", file=sys.stderr, flush=True)
                told = time.monotonic()
        writer.write_batch(pyarrow.RecordBatch.from_pylist([], schema), custom_metadata={_ENDS: json.dumps(ends)})


def _without_dictionaries(schema: Any) -> Any:
    """Of categories, which a file of batches has to have alike in all of them, their values."""
    is_dictionary = pyarrow.types.is_dictionary
    return pyarrow.schema(
        [field.with_type(field.type.value_type) if is_dictionary(field.type) else field for field in schema]
    )
