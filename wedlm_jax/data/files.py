"""The files that a path names, in a fixed order."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from wedlm_jax.errors import UserError, reason


def find_files(path: str, endings: tuple[str, ...] | None = None) -> list[Path]:
    """A file, or the files in a folder and below it, or those that a pattern (`code/**/*.py`) names; sorted.

    Args:
        path: `~` is the home directory.
        endings: of a folder only files with one of these are taken; None takes all. Hidden files and folders are left out.

    Raises:
        UserError: there is no such file, nothing to take, or a folder cannot be read.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if place.is_dir():
        found = sorted(
            file for file in _below(place) if endings is None or any(file.name.endswith(ending) for ending in endings)
        )
        if not found:
            kind = f"file that ends in {', '.join(endings)}" if endings else "file"
            raise UserError(f"{path}: the folder holds no {kind}")
        return found
    if glob.has_magic(path):
        found = sorted(Path(file) for file in glob.glob(str(place), recursive=True) if Path(file).is_file())
        if not found:
            raise UserError(f"{path}: no file fits the pattern")
        return found
    raise UserError(f"{path}: no such file or folder; set data.path")


def _below(folder: Path) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        raise UserError(f"{error.filename}: the folder cannot be read ({reason(error)})")

    seen = set()  # a folder that links lead to twice, or in a circle, is read once
    for parent, folders, names in os.walk(folder, onerror=unreadable, followlinks=True):
        if (place := os.path.realpath(parent)) in seen:
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent) / name for name in names if not name.startswith("."))
