"""What a path of a model names: an HF directory, a hub id, a workdir of `wedlm_jax.train`, one of its checkpoints, an adapter."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from wedlm_jax.errors import UserError
from wedlm_jax.hf.adapter import is_adapter, is_adapter_alone
from wedlm_jax.hf.hub import how_to_fetch, is_hub_id
from wedlm_jax.hf.weights import local_directory
from wedlm_jax.model_file import MODEL_FILE

if TYPE_CHECKING:  # at run time, reading an HF directory imports no orbax
    from wedlm_jax.checkpoint import Step

_WITH_STEP = re.compile(r"(.+)@(\d+|best)")


def locate(path: str | Path) -> Path:
    """The local directory that `path` names; hub ids are fetched. A `UserError` says what would make a missing one."""
    named, path = path, split_step(path)[0]
    directory = Path(path)
    _refuse_other_ways_to_name_a_step(directory)
    if not directory.exists() and not is_hub_id(path):
        raise UserError(
            f"{path}: no such directory{_if_of_the_hub(path)}; python -m wedlm_jax.train --exp NAME --workdir {path} makes a "
            f"workdir, python -m wedlm_jax.convert --from WORKDIR --to {path} an HF directory"
        )
    _require_steps(named, directory)
    directory = local_directory(path)
    if is_adapter_alone(directory):
        raise UserError(
            f"{path}: an adapter and no model; load its base and name it beside that: --model BASE --adapter {path}"
        )
    if not is_workdir(directory) and not (directory / "config.json").is_file():
        raise UserError(
            f"{path}: neither an HF directory (no config.json) nor a workdir with a model (no model.json); "
            f"python -m wedlm_jax.train --exp NAME --workdir {path} makes one"
        )
    return directory


def locate_adapter(path: str | Path) -> Path:
    """The local directory of an adapter. A `UserError` says what else is there."""
    directory = Path(split_step(path)[0])
    if not directory.is_dir():
        what = "is a file; name the directory that holds it" if directory.exists() else "no such directory"
        fetched = f", and of the hub fetched by {command}" if (command := how_to_fetch(path)) else ""
        raise UserError(f"{path}: {what}; an adapter is written by wedlm_jax.save_adapter or by PEFT{fetched}")
    if not is_adapter(directory) and (directory / "config.json").is_file():
        raise UserError(f"{path}: a whole model and no adapter; load it as the model itself")
    _require_steps(path, directory)
    return directory


def split_step(path: str | Path) -> tuple[str | Path, Step]:
    """The directory that `path` names, and the checkpoint: `runs/sft@500` or `runs/sft@best`, None where it names no other.

    `~` is the home directory, which no shell writes out behind an equals sign.

    Raises:
      UserError: no path.
    """
    if not isinstance(path, (str, Path)) or not str(path):
        raise UserError(f"path={path!r}: name a directory, or a hub id")
    path = type(path)(os.path.expanduser(path))
    named = _WITH_STEP.fullmatch(str(path))
    if named is None or Path(path).exists():
        return path, None
    return type(path)(named[1]), "best" if named[2] == "best" else int(named[2])


def local_target(path: str | Path) -> Path:
    """The local directory that `path` names, to write; `~` is the home directory. A `UserError` where it names none."""
    if not isinstance(path, (str, Path)) or not str(path):
        raise UserError(f"path={path!r}: name a directory")
    return Path(os.path.expanduser(path))


def is_workdir(directory: Path) -> bool:
    return (directory / MODEL_FILE).is_file() and not (directory / "config.json").is_file()


def _if_of_the_hub(path: str | Path) -> str:
    """Why what may be meant as a hub id is not taken for one, and what fetches it."""
    if not (command := how_to_fetch(path)):
        return ""
    owner, _, name = str(path).partition("/")
    why = f"with @{name.partition('@')[2]}" if "@" in name else f"beside a folder {owner}"
    return f", and no hub id {why} (of the hub {command} fetches it)"


def _refuse_other_ways_to_name_a_step(path: Path) -> None:
    """Raises a `UserError` for the folder of a checkpoint, and for a word behind the @ of a workdir."""
    workdir, step = (path.parent.parent, path.name) if path.parent.name == "checkpoints" else (path, "")
    if not step and not path.exists() and "@" in path.name:
        name, _, step = path.name.rpartition("@")
        workdir = path.with_name(name) if name else path
    if step and is_workdir(workdir):
        from wedlm_jax.checkpoint import saved_steps

        held = ", ".join(f"{workdir}@{n}" for n in saved_steps(workdir)) or "none yet"
        raise UserError(f"{path}: names no checkpoint; those of {workdir} are {held}, and {workdir} is the newest")


def _require_steps(path: str | Path, directory: Path) -> None:
    """Raises a `UserError` where `path` names a checkpoint and `directory` is not of the kind that holds several."""
    if (step := split_step(path)[1]) is not None and not is_workdir(directory):
        raise UserError(f"{path}: {directory} is no workdir of wedlm_jax.train and has no steps; leave out @{step}")
