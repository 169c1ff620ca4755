"""Results on disk: a file is there whole, and one that cannot be written leaves the one before it as it was."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wedlm_jax.errors import writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

CHARACTERS_PER_INCH = 10  # of a title's type


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Around what writes `path`, to the partial file that is yielded: it takes the place of `path` at the end, or of the file
    that a link leads to. Where `path` is no file, but a device or a pipe, it is itself what is yielded.

    Raises:
      UserError: it cannot be written.
    """
    with writing(path):
        # Asked before links are followed: where `/dev/stdout` leads has no path if it is a pipe.
        if path.exists() and not path.is_file():
            yield path
            return
        target = path.resolve() if path.is_symlink() else path
        # It ends as `path` does: a picture's format is read from that.
        partial = target.with_name(f".partial.{os.getpid()}.{path.name}")
        try:
            yield partial
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it, where they are not there yet.

    Raises:
      UserError: it cannot be written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


def write_json(path: Path, results: Any) -> None:
    """Dicts, lists, numbers and text as a JSON file, with null where a number is NaN or infinite: JSON has neither.

    Raises:
      UserError: it cannot be written.
    """
    with replacing(path) as partial:
        text = json.dumps(finite(results), indent=2, ensure_ascii=False, allow_nan=False)
        partial.write_text(text + "\n", encoding="utf-8")


def write_results(folder: Path, name: str, results: Any) -> None:
    """The JSON file `name` of a folder, as by `write_json`. The picture of that name, of the results before, goes until that of
    these is drawn: what is interrupted leaves no two of different runs side by side.

    Raises:
      UserError: the file cannot be written, and both are as they were; or the picture cannot be removed.
    """
    write_json(folder / f"{name}.json", results)
    with writing(folder):
        (folder / f"{name}.png").unlink(missing_ok=True)


def digest_of_file(file: Path) -> str | None:
    """SHA-256 of what it holds, which tells whether what results were made from is still the same; None where it is gone."""
    if not file.is_file():
        return None
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def tell_written(console: Console, *paths: Path) -> None:
    """The last words of a command, in one line however long: a path that is broken in two nobody can paste."""
    console.print("\nwrote " + " and ".join(map(str, paths)), soft_wrap=True, markup=False, highlight=False)


def save_figure(path: Path, figure: Figure) -> None:
    """Without the version of matplotlib, so that the same picture is the same file.

    Raises:
      UserError: it cannot be written.
    """
    with replacing(path) as partial:
        figure.savefig(partial, metadata={"Software": None})


def finite(value: Any) -> Any:
    """Dicts, lists, numbers and text as `write_json` writes them."""
    if isinstance(value, dict):
        return {key: finite(of) for key, of in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(of) for of in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def put_title(figure: Figure, title: str) -> None:
    """Above all panels, in as many lines as the width of the figure asks for. It is no TeX, whatever it holds."""
    lines = textwrap.fill(title, int(CHARACTERS_PER_INCH * figure.get_figwidth()))
    figure.suptitle(lines, fontsize=12, parse_math=False)
