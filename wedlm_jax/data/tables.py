"""Tables by random access: parquet and CSV files, prepared tfds datasets, and datasets of the Hugging Face library."""

from __future__ import annotations

import abc
import contextlib
import csv
import io
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow

from wedlm_jax.data.columns import read_record, table_columns
from wedlm_jax.data.config import SourceConfig
from wedlm_jax.data.files import note_open
from wedlm_jax.data.mapped_tables import Rows, rows_in_memory, rows_on_disk
from wedlm_jax.data.records import Raw, Record
from wedlm_jax.errors import UserError, reason

CSV_ENDINGS = tuple(kind + compression for kind in (".csv", ".tsv") for compression in ("", ".gz", ".zst"))
_CSV_BLOCK = 1 << 24  # bytes that are parsed at once; no row is longer
_PARQUET_BATCH = 256  # rows that are decoded at once, and a row may be a whole book
_PARQUET_BUFFER = 1 << 16  # bytes that are read at once; else a group of rows is, and a file may be one group


class Table(abc.ABC):
    """Rows of named columns. A subclass opens them; a worker process opens them again, unless it says otherwise."""

    def __init__(self, path: str, config: SourceConfig):
        self._path, self._config = path, config
        self._rows: Any = None
        self._columns: list[str] = []

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_rows": None}

    def __len__(self) -> int:
        return len(self._opened())

    def where(self, index: int) -> str:
        return f"{self._path}: row {index}"

    def fetch(self, index: int) -> dict[str, Any]:
        row = self._opened()[index]
        return {column: row[column] for column in self._columns}

    def parse(self, index: int, raw: Raw) -> Record:
        return read_record({column: _stated(value) for column, value in raw.items()}, self._config)

    @abc.abstractmethod
    def open(self) -> Any:
        """Rows with a length and random access; sets `_columns`."""

    def _opened(self) -> Any:
        rows = self._rows  # held until a row is read: another thread may let go of them, and open others
        if rows is None:
            rows = self._rows = self.open()
        return rows

    def _choose(self, names: list[str]) -> None:
        self._columns = table_columns(self._config, names, self._path)


def _stated(value: Any) -> Any:
    """Without the nulls that a table writes into an object for the keys of other rows' objects, such as other functions'
    arguments."""
    if isinstance(value, Mapping):
        return {key: _stated(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_stated(one) for one in value]
    return value


class ArrowTable(Table):
    """A file that pyarrow decodes batch by batch: the columns that are read are held in memory, or mapped from disk."""

    def __init__(self, path: str, config: SourceConfig, on_disk: bool):
        super().__init__(path, config)
        self._on_disk = on_disk

    def open(self) -> Rows:
        if not self._columns:
            if not (names := self._names()):
                return rows_in_memory(iter(()))
            self._choose(names)
        if not self._on_disk:
            return rows_in_memory(self._batches())
        note_open(self)
        return rows_on_disk(self._path, self._columns, self._batches)

    def let_go(self) -> None:
        self._rows = None  # with its map, once no row is read from it

    @abc.abstractmethod
    def _names(self) -> list[str]:
        """Of the columns that there are; none of an empty file."""

    @abc.abstractmethod
    def _batches(self) -> Iterator[Any]:
        """All rows, of the columns that are read."""


class ParquetTable(ArrowTable):
    """One parquet file; a part that Spark wrote may have no rows."""

    def _names(self) -> list[str]:
        with self._file() as file:
            return file.schema_arrow.names

    def _batches(self) -> Iterator[Any]:
        with self._file() as file:
            for group in range(file.num_row_groups):
                yield from file.iter_batches(_PARQUET_BATCH, row_groups=[group], columns=self._columns)

    @contextlib.contextmanager
    def _file(self) -> Iterator[Any]:
        import pyarrow.parquet

        with (
            _decoding(self._path, "parquet", "write it again"),
            pyarrow.parquet.ParquetFile(self._path, buffer_size=_PARQUET_BUFFER) as file,
        ):
            yield file


class CsvTable(ArrowTable):
    """One .csv file, or .tsv with tabs between the columns, which its first row names; an empty one has no rows. Every value is
    text, one of digits or of nothing too, and may hold line ends."""

    def _names(self) -> list[str]:
        with self._decoding(), pyarrow.input_stream(self._path) as file:
            if Path(self._path).suffix.lower() in (".gz", ".zst") and not os.path.getsize(self._path):
                raise OSError("it holds nothing at all")  # not what compressing nothing gives
            text = io.TextIOWrapper(file, "utf-8-sig", newline="")
            return next(filter(None, csv.reader(text, delimiter=self._delimiter)), [])

    def _batches(self) -> Iterator[Any]:
        import pyarrow.csv

        options = {
            "read_options": pyarrow.csv.ReadOptions(block_size=_CSV_BLOCK),
            "parse_options": pyarrow.csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
            "convert_options": pyarrow.csv.ConvertOptions(
                include_columns=self._columns, column_types=dict.fromkeys(self._columns, pyarrow.string())
            ),
        }
        with self._decoding(), pyarrow.csv.open_csv(self._path, **options) as file:
            yield from file

    @property
    def _delimiter(self) -> str:
        return "\t" if ".tsv" in Path(self._path).name.lower() else ","

    def _decoding(self) -> contextlib.AbstractContextManager[None]:
        return _decoding(self._path, "CSV", "mend it")


@contextlib.contextmanager
def _decoding(path: str, kind: str, mend: str) -> Iterator[None]:
    try:
        yield
    except (pyarrow.ArrowException, csv.Error, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: cannot be read as {kind} ({reason(error)}); {mend}") from None


class TfdsTable(Table):
    """A dataset of tensorflow_datasets that was prepared as array_record, which needs no TensorFlow; downloads nothing."""

    def open(self) -> Any:
        import tensorflow_datasets as tfds

        split = self._config.dataset_split or "train"
        try:
            folder = Path(self._path).expanduser()
            builder = tfds.builder_from_directory(folder) if folder.is_dir() else tfds.builder(self._path)
        except Exception as error:  # of many modules, those of the dataset's own code among them
            raise UserError(
                f"data.path={self._path}: no dataset of tfds, nor the directory of a prepared one ({reason(error)})"
            ) from None
        if split not in builder.info.splits and not re.search(r"[\[+]", split):
            known = ", ".join(builder.info.splits) or "none, for it is not prepared"
            raise UserError(
                f"{self._path}: no split {split!r}; there are {known}. `tfds build {self._path} "
                "--file_format=array_record` prepares a dataset, data.dataset_split chooses"
            )
        self._choose(list(builder.info.features or ()))
        try:
            return builder.as_data_source(split)
        except Exception as error:  # a format without random access and a lost file are of several types
            raise UserError(
                f"{self._path}: no random access ({reason(error)}); prepare it with --file_format=array_record"
            ) from None


class HfTable(Table):
    """A dataset of the `datasets` package: a hub id (fetched once) or a local folder; memory-mapped. Runs no code of it."""

    def __getstate__(self) -> dict:
        return self.__dict__  # a worker maps the same files; to open it anew would ask the hub, once for each

    def open(self) -> Any:
        try:
            import datasets
        except ImportError:
            raise UserError("data.source=hf_dataset needs the package datasets: pip install datasets") from None
        split = self._config.dataset_split or "train"
        folder = Path(self._path).expanduser()
        one, several = ((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
        if one and not several and self._config.dataset_split is not None:
            raise UserError(f"data.path={self._path}: is one dataset without splits; leave out data.dataset_split")
        if (one or several) and self._config.subset is not None:
            raise UserError(f"data.path={self._path}: was saved by itself and has no subsets; leave out data.subset")
        try:
            if one or several:
                rows = datasets.load_from_disk(str(folder))
            else:
                name = str(folder) if folder.exists() else self._path
                rows = datasets.load_dataset(name, self._config.subset, split=split)
        except Exception as error:  # of the library, the network, or the formats below it
            raise UserError(
                f"data.path={self._path}, data.dataset_split={split}: cannot be loaded ({reason(error)})"
            ) from None
        if isinstance(rows, datasets.DatasetDict):
            if split not in rows:
                raise UserError(
                    f"data.path={self._path}: no split {split!r}; name one as data.dataset_split: {', '.join(rows)}"
                )
            rows = rows[split]
        self._choose(rows.column_names)
        # One is saved with the format that its maker last read it in: as tensors or frames, or without some columns.
        return rows.with_format(None).select_columns(self._columns)
