"""Whole models to Hugging Face directories, for every tool that reads `wedlm`, `qwen3`, `qwen2` or `llama`."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from wedlm_jax.errors import UserError, reason
from wedlm_jax.hf.config import Arch, default_arch, read_json, require_fit, to_hf, write_hf_json
from wedlm_jax.hf.shards import INDEX_FILE, TensorToWrite, write_tensors
from wedlm_jax.hf.tokenizer import CHAT_TEMPLATES, GENERATION_FILE, TOKENIZER_FILES, copy_tokenizer_files
from wedlm_jax.hf.weight_map import EMBEDDING, Row, rows
from wedlm_jax.model.handle import CALIBRATION_FILE, WINDOWS_FILE, Model
from wedlm_jax.model.merging import merged
from wedlm_jax.model.parameters import params_of, transformer_from
from wedlm_jax.sole_writer import locked

EXPORTER = "wedlm_jax"  # the `exported_by` of our config.json: such a directory may be replaced by a new export
MAX_SHARD_SIZE = 5 * 10**9


def save_hf(model: Model, path: str | Path, arch: Arch | None = None, max_shard_size: int = MAX_SHARD_SIZE) -> None:
    """Writes an HF directory: config.json, safetensors, generation_config.json, tokenizer files.

    The directory appears whole or not at all. An earlier export of ours is replaced, anything else is left alone. An
    adapter of all rows is merged into the weights. `arch` None is `arch_of` the model.

    Raises:
      UserError: the weights do not fit `arch`, `path` is taken, or the model has an adapter of mask rows.
    """
    config, params = merged(model.config, params_of(model.transformer))
    model = dataclasses.replace(model, config=config, transformer=transformer_from(config, params))
    arch = arch_of(model) if arch is None else arch
    require_fit(config, arch)
    target = Path(path).resolve()  # a link stays one
    require_exportable(target)
    with whole_directory(target) as staging:
        write_tensors(staging, _tensors_to_write(model), max_shard_size)
        copy_tokenizer_files(model.files, model.tokenizer, staging)
        write_hf_json(staging / "config.json", _export_config(model, arch))
        write_hf_json(staging / GENERATION_FILE, _export_generation_config(model))


def arch_of(model: Model) -> Arch:
    """The model type that an export declares where nobody says: that of the HF directory that the model was read from; of a
    training or an adapter wedlm, or llama where it has neither bias nor norm."""
    return default_arch(model.config, _source_json(model, "config.json").get("model_type"))


@contextlib.contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """A folder to write into. At the end it takes the place of `target`; where anything went wrong, nothing is left of it, and a
    system that does not write raises a `UserError`. What a process that is killed leaves is removed by the next one."""
    own = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    staging, replaced, lock = _beside(own)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        with lock.open("w") as file:
            locked(file.fileno())  # until this process ends, however it does
            try:
                staging.mkdir()
                yield staging
                if target.exists():
                    target.rename(replaced)
                staging.rename(target)
            finally:
                _put_back_and_remove(own, target)
    except OSError as error:
        raise UserError(f"{target}: writing failed ({reason(error)}); nothing is left of it") from None


def _remove_leftovers(target: Path) -> None:
    for lock in target.parent.glob(f".{glob.escape(target.name)}.{'[0-9a-f]' * 8}.lock"):
        with contextlib.suppress(OSError), lock.open("r+") as file:  # of another user, or its process has just ended
            if locked(file.fileno()):
                _put_back_and_remove(lock.with_suffix(""), target)


def _put_back_and_remove(written: Path, target: Path) -> None:
    """All that `whole_directory` made beside `target`; the earlier one is put back where nothing has taken its place."""
    staging, replaced, lock = _beside(written)
    if replaced.exists() and not target.exists():
        replaced.rename(target)
    shutil.rmtree(staging, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)
    lock.unlink(missing_ok=True)


def _beside(written: Path) -> tuple[Path, ...]:
    return tuple(written.with_name(f"{written.name}.{what}") for what in ("partial", "replaced", "lock"))


def _tensors_to_write(model: Model) -> list[TensorToWrite]:
    params, config = params_of(model.transformer), model.config
    layer_of = jax.jit(lambda stacked, i: jax.lax.dynamic_index_in_dim(stacked, i, keepdims=False))

    def tensor(row: Row, name: str, layer: int) -> TensorToWrite:
        array = params[row.ours]

        def load() -> np.ndarray:
            return row.to_hf(np.asarray(layer_of(array, layer) if row.stacked else array), config)

        return TensorToWrite(name, row.hf_shape(config), np.dtype(array.dtype), load)

    by_layer = [(layer, row, name) for row in rows(config) for layer, name in enumerate(row.names(config))]
    # One layer after another, between the embedding and the head, so that a shard holds whole layers.
    by_layer.sort(key=lambda entry: (entry[1] is not EMBEDDING, not entry[1].stacked, entry[0]))
    return [tensor(row, name, layer) for layer, row, name in by_layer]


def _export_config(model: Model, arch: Arch) -> dict[str, Any]:
    source = _source_json(model, "config.json")
    special = {
        name: source.get(name, getattr(model.tokenizer, name, None)) for name in ("bos_token_id", "pad_token_id")
    }
    special["eos_token_id"] = _eos(model, source)
    raw = to_hf(model.config, arch, mask_token_id=model.mask_token_id, special_ids=special)
    return dict(sorted(raw.items())) | {"exported_by": EXPORTER}


def _export_generation_config(model: Model) -> dict[str, Any]:
    kept = _source_json(model, GENERATION_FILE)
    eos, pad = _eos(model, kept, complete=True), getattr(model.tokenizer, "pad_token_id", None)
    special = {"pad_token_id": kept.get("pad_token_id", pad), "eos_token_id": eos}
    kept.pop("eos_token_id", None)  # of a model that no id ends any more, the source's would
    return kept | {name: value for name, value in special.items() if value is not None}


def _eos(model: Model, source: dict[str, Any], complete: bool = False) -> int | list[int] | None:
    """The source's own form of the field while it says the same; else the model's ids, a lone one as a number."""
    stored, ids = source.get("eos_token_id"), model.eos_token_ids
    stored_ids = stored if isinstance(stored, list) else [stored]
    if stored is not None and (set(stored_ids) == set(ids) if complete else set(stored_ids) <= set(ids)):
        return stored
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def _source_json(model: Model, name: str) -> dict[str, Any]:
    file = None if model.files is None else model.files / name
    return read_json(file) if file is not None and file.is_file() else {}


def require_exportable(target: Path) -> None:
    """As `require_free`, of a directory of `save_hf`."""
    require_free(target, _is_written, _is_export, "an export of wedlm_jax")


def require_free(target: Path, is_written: Callable[[str], bool], is_ours: Callable[[Path], bool], what: str) -> None:
    """Refuses a directory that may not be replaced.

    Args:
      is_written: whether we write a file of that name there.
      is_ours, what: whether a directory that is not empty is one of ours, and what it then is.

    Raises:
      UserError: it is a file, a mount point or the current folder, holds a file of another, or is not ours.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise UserError(f"{target}: is a file; name a directory")
    if os.path.ismount(target):
        raise UserError(f"{target}: is a mount point, which cannot be replaced whole; name a folder inside it")
    if target.samefile(os.curdir):  # whoever is in it would be left in the old one, in which nothing is
        raise UserError(f"{target}: is the current folder, which cannot be replaced whole; name a folder inside it")
    names = sorted(entry.name for entry in target.iterdir())
    foreign = [name for name in names if not is_written(name)]
    if foreign or (names and not is_ours(target)):
        why = f"holds {foreign[0]}" if foreign else f"is not {what}"
        raise UserError(f"{target}: not empty and {why}, so it is not replaced; choose another directory or remove it")


def _is_written(name: str) -> bool:
    written = {
        "config.json", GENERATION_FILE, INDEX_FILE, CALIBRATION_FILE, WINDOWS_FILE, CHAT_TEMPLATES, *TOKENIZER_FILES
    }  # fmt: skip
    return name in written or re.fullmatch(r"model.*\.safetensors", name) is not None


def _is_export(directory: Path) -> bool:
    file = directory / "config.json"
    return file.is_file() and read_json(file).get("exported_by") == EXPORTER
