"""Tables on disk: what is read of a file, decoded once into an Arrow file that is memory-mapped."""

from __future__ import annotations

import bisect
import itertools
import json
import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow

from wedlm_jax.data.decoded_files import lines_between_times, open_decoded
from wedlm_jax.errors import UserError, reason

_ENDS = b"ends"  # key of metadata: where the batches end


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
      path: the table.
      columns: what is read of it.
      batches: reads it.

    Raises:
      UserError: as `batches`; or the Arrow file cannot be written.
    """

    def write(output: BinaryIO) -> None:
        try:
            _write_batches(output, path, batches())
        except pyarrow.ArrowException as error:
            raise UserError(
                f"{path}: cannot be decoded to disk ({reason(error)}); write it with plain columns"
            ) from None

    return open_decoded(path, columns, ".arrow", write=write, open_file=_mapped)


def _mapped(file: Path) -> Rows:
    with file.open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    # For a row its own pages are read from the disk; else the system reads megabytes ahead, and `pyarrow.memory_map` a batch.
    data.madvise(mmap.MADV_RANDOM)
    reader = pyarrow.ipc.open_file(data)
    _, metadata = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
    return Rows(json.loads(metadata[_ENDS]), reader.get_batch)


def _write_batches(output: BinaryIO, path: str, batches: Iterator[Any]) -> None:
    """With an empty batch behind them that says where each of them ends, so that none need be looked at to find a row."""
    first = list(itertools.islice(batches, 1))
    schema = _without_dictionaries(first[0].schema if first else pyarrow.schema([]))
    ends: list[int] = []
    tell = lines_between_times()
    with pyarrow.ipc.new_file(output, schema) as writer:
        for batch in itertools.chain(first, batches):
            writer.write_batch(batch.cast(schema))
            ends.append(batch.num_rows + (ends[-1] if ends else 0))
            tell(f"{path}: {ends[-1]:,} rows are decoded")
        writer.write_batch(pyarrow.RecordBatch.from_pylist([], schema), custom_metadata={_ENDS: json.dumps(ends)})


def _without_dictionaries(schema: Any) -> Any:
    """Of categories, which a file of batches has to have alike in all of them, their values."""
    is_dictionary = pyarrow.types.is_dictionary
    return pyarrow.schema(
        [field.with_type(field.type.value_type) if is_dictionary(field.type) else field for field in schema]
    )
