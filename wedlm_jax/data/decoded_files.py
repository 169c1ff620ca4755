"""Files of data that are decoded once, to files of their own in the user's cache.

All processes of the machine share these, workers and later runs too, and memory holds only what is being read of them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, TypeVar

import filelock
import pyarrow

from wedlm_jax.errors import reading, writing

CACHE = "WEDLM_JAX_CACHE"  # in the environment: a folder in place of ~/.cache/wedlm_jax
# Bytes of the files of a source that are held decoded in memory, which takes several times as much, in each worker process too,
# and once more for held-out documents.
_HELD = 1 << 26
_FORMAT = 1  # of the files, which those of another one do not pass for
_NOT_THERE = (OSError, ValueError, pyarrow.ArrowException)  # or damaged, or of no bytes
_SECONDS_BETWEEN_LINES = 10.0
_Opened = TypeVar("_Opened")


def too_large(files: Iterable[Path]) -> bool:
    """Whether so many files are kept on disk, decoded, and not in memory."""
    size = 0
    for file in files:
        with reading(file):
            size += file.stat().st_size
    return size > _HELD


def open_decoded(
    path: str,
    what: Iterable[str],
    ending: str,
    *,
    write: Callable[[BinaryIO], None],
    open_file: Callable[[Path], _Opened],
) -> _Opened:
    """What is decoded of a file, from a file of its own, which is written where it is not there.

    Args:
      path: the file. One of another place, size or time of change is another one.
      what: is decoded of it.
      ending: of the name of what is written.
      write: decodes it.
      open_file: opens what was written; an error says that it is not there, or damaged.

    Raises:
      UserError: as `write`; or the decoded file cannot be written.
    """
    with reading(Path(path)):
        real, stat = os.path.realpath(path), os.stat(path)
    which = json.dumps([_FORMAT, real, stat.st_size, stat.st_mtime_ns, *what])
    digest = hashlib.blake2b(which.encode(), digest_size=8).hexdigest()
    named = Path(path).name[:50]  # which may be 200 bytes, of 255 that a name has
    file = _folder() / f"{named}-{digest}{ending}"
    with contextlib.suppress(*_NOT_THERE):
        return open_file(file)
    with writing(file, f"or set {CACHE} to another folder"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(file.with_suffix(".lock")):
            with contextlib.suppress(*_NOT_THERE):
                return open_file(file)  # another process has written it meanwhile
            _tell_folder(file.parent)
            _write(file, write)
    with reading(file):
        return open_file(file)


def _folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "wedlm_jax"
    return Path(os.environ.get(CACHE) or cache).expanduser() / "decoded"


@functools.cache
def _tell_folder(folder: Path) -> None:
    print(f"large data is decoded once to files in {folder} ({CACHE} names another place)", file=sys.stderr)


def _write(file: Path, write: Callable[[BinaryIO], None]) -> None:
    """Whole or not at all; what a killed process left half written is written over."""
    unfinished = file.with_suffix(".unfinished")
    try:
        with unfinished.open("wb") as output:
            write(output)
            output.flush()
            os.fsync(output.fileno())
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def lines_between_times() -> Callable[[str], None]:
    """Tells how far it is with what takes long: prints the lines that it is given, where none was for ten seconds."""
    told = time.monotonic()

    def tell(line: str) -> None:
        nonlocal told
        if time.monotonic() - told >= _SECONDS_BETWEEN_LINES:
            print(line, file=sys.stderr, flush=True)
            told = time.monotonic()

    return tell
