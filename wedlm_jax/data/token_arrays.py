"""Arrays of tokens made elsewhere: .npy files, memory-mapped."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from wedlm_jax.data.config import SourceConfig
from wedlm_jax.data.files import note_open
from wedlm_jax.data.records import Raw, Record, Tokens
from wedlm_jax.errors import UserError, reason


class TokenArray:
    """One file. The rows of an array [N, T] are documents; an array [T] is read in consecutive pieces of a row's length. An empty
    one, as a shard among others may be, has none."""

    def __init__(self, path: Path, config: SourceConfig, row_length: int):
        self._path, self._row_length = path, row_length
        self._end = config.document_end_id
        self._array: np.ndarray | None = None

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_array": None}

    def __len__(self) -> int:
        array = self._opened()
        if not array.size:
            return 0
        return len(array) if array.ndim == 2 else -(-len(array) // self._row_length)

    def where(self, index: int) -> str:
        unit = f"row {index}" if self._opened().ndim == 2 else f"tokens from {index * self._row_length}"
        return f"{self._path}: {unit}"

    def fetch(self, index: int) -> np.ndarray:
        array = self._opened()
        if array.ndim == 2:
            return np.asarray(array[index])
        return np.asarray(array[index * self._row_length : (index + 1) * self._row_length])

    def parse(self, index: int, raw: Raw) -> Record:
        return Tokens(raw, self._end)

    def let_go(self) -> None:
        self._array = None  # with its map, once no document is read from it

    def _opened(self) -> np.ndarray:
        array = self._array
        if array is None:
            try:
                array = np.load(self._path, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError, EOFError) as error:
                raise UserError(f"{self._path}: no array of tokens in .npy format ({reason(error)})") from None
            if not isinstance(array, np.ndarray) or array.dtype.kind not in "ui" or array.ndim not in (1, 2):
                kind = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
                raise UserError(f"{self._path}: holds {kind}; whole numbers are expected, as [T] or [N, T]")
            self._array = array
            note_open(self)
        return array
