"""Code in files: of the Python standard library, real text that every machine has, or of another folder."""

from __future__ import annotations

import dataclasses
import sysconfig
from pathlib import Path

from wedlm_jax.data.split import Split, split_by_hash
from wedlm_jax.errors import UserError

HELD_OUT_SHARE = 0.05
# Tests repeat themselves, installed packages are not the library, and these modules are long tables rather than code.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
)


@dataclasses.dataclass(frozen=True)
class CodeFile:
    path: str  # relative to the folder, with forward slashes
    text: str


def split_of(path: str) -> Split:
    """By a hash of the relative path: the same file is held out on every machine and by every Python version."""
    return split_by_hash(path.encode(), HELD_OUT_SHARE)


def code_files(split: Split, folder: str | Path | None = None, field: str = "data.path") -> list[CodeFile]:
    """The `.py` files of one split, sorted by path.

    Args:
      split: "train" or "held_out".
      folder: another folder of code; None is the standard library of the running Python.
      field: the config field or flag that names the folder, for messages.

    Raises:
      UserError: the folder does not exist or holds no file of this split, or a file is not UTF-8.
    """
    root = Path(folder or sysconfig.get_path("stdlib")).expanduser()
    if not root.is_dir():
        raise UserError(f"{field}={root} is not a folder; name one with .py files")
    # Editors leave links that lead nowhere (.#file.py), and a folder may have such a name too.
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py") if path.is_file()}
    chosen = sorted(name for name in paths if SKIPPED_FOLDERS.isdisjoint(Path(name).parts) and split_of(name) == split)
    files = [CodeFile(name, _read(paths[name])) for name in chosen]
    files = [file for file in files if file.text]
    if not files:
        raise UserError(f"{root} holds no .py file of the {split} split; name a folder with more code as {field}")
    return files


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); convert it or move it out of the folder") from error
