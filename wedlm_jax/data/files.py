"""The files that a path names, in a fixed order; and how many of them are open at once."""

from __future__ import annotations

import collections
import functools
import glob
import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from wedlm_jax.errors import UserError, reason

# Files of data: a process may have 1,024 open in all where nobody has raised that, and a corpus has more shards.
_MOST_OPEN = 256


class Holder(Protocol):
    """What holds a file open between two reads."""

    def let_go(self) -> None: ...


_open: collections.deque[weakref.ref[Holder]] = collections.deque()


def note_open(holder: Holder) -> None:
    """To be called by what has just opened its file and will hold it: where too many do, the one that opened first lets go."""
    _open.append(weakref.ref(holder))
    if len(_open) > _MOST_OPEN and (first := _open.popleft()()) is not None:
        first.let_go()


def find_files(path: str, endings: tuple[str, ...] | None = None) -> list[Path]:
    """A file, or the files in a folder and below it, or those and the folders' that a pattern (`code/**/*.py`) names; sorted.

    Args:
      path: `~` is the home directory.
      endings: of a folder only files with one of these, in letters of either case, are taken; None takes all. Hidden files
        and folders are left out. A file that links lead to as well is taken once.

    Raises:
      UserError: there is no such file, nothing to take, or a folder cannot be read.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if place.is_dir():
        found = _each_once(_below(place, endings))
        if not found:
            others = f"; a pattern takes others, as '{path}/*'"
            kind = f"file that ends in {', '.join(endings)}{others}" if endings else "file"
            raise UserError(f"{path}: the folder holds no {kind}")
        return found
    if glob.has_magic(path):
        found = _fitting(str(place), endings)
        if not found:
            raise UserError(f"{path}: no file fits the pattern")
        return found
    raise UserError(f"{path}: no such file or folder; set data.path")


def _fitting(pattern: str, endings: tuple[str, ...] | None) -> list[Path]:
    found: list[Path] = []
    for place in map(Path, glob.glob(pattern, recursive=True)):
        found += _below(place, endings) if place.is_dir() else [place] if place.is_file() else []
    return _each_once(found)


def _each_once(files: Iterable[Path]) -> list[Path]:
    """Sorted. A file that comes several times, by itself and in folders or by links to it or its folder, is taken once, by the
    first of its names."""
    real = functools.cache(os.path.realpath)
    found: dict[str, Path] = {}
    for file in sorted(files):
        found.setdefault(real(file) if file.is_symlink() else os.path.join(real(file.parent), file.name), file)
    return list(found.values())


def _below(folder: Path, endings: tuple[str, ...] | None) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        raise UserError(f"{error.filename}: the folder cannot be read ({reason(error)})")

    seen = set()  # a folder that links lead to twice, or in a circle, is read once
    for parent, folders, names in os.walk(folder, onerror=unreadable, followlinks=True):
        if (place := os.path.realpath(parent)) in seen:
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if not name.startswith(".") and (endings is None or name.lower().endswith(endings)):
                yield Path(parent) / name
