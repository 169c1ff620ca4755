"""Adapters as directories of their own: megabytes beside a base of gigabytes.

  adapter_model.safetensors  the pairs, under PEFT's names and in its layout; with rows="mask" also the mask embedding
  adapter.json               what it is, and the revision of the base that it was trained on
  adapter_config.json        with rows="all": PEFT's own description, so that PEFT reads the directory too
  tokenizer files            as it was trained with, the chat template among them, and generation_config.json

A directory of PEFT has no adapter.json; its base is checked by the shapes alone, and keeps its own tokenizer.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from wedlm_jax.config_tree import from_json
from wedlm_jax.errors import UserError
from wedlm_jax.hf import peft
from wedlm_jax.hf.config import read_json, write_hf_json
from wedlm_jax.hf.export import require_free, whole_directory
from wedlm_jax.hf.shards import (
    DTYPES,
    StoredTensors,
    TensorToWrite,
    mismatches,
    names_on_one_line,
    require_contents,
    write_file,
)
from wedlm_jax.hf.tokenizer import (
    CHAT_TEMPLATES,
    GENERATION_FILE,
    TOKENIZER_FILES,
    copy_generation_config,
    copy_tokenizer_files,
    tokenizer_in,
)
from wedlm_jax.hf.weight_map import Row, adapter_rows
from wedlm_jax.model.adapter import TARGETS, AdapterConfig, Rows, Target
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.handle import CALIBRATION_FILE, WINDOWS_FILE, Model
from wedlm_jax.model.int8 import require_unrounded
from wedlm_jax.model.parameters import param_axes, params_of, transformer_from
from wedlm_jax.model.revision import revision
from wedlm_jax.sharding import param_shardings

ADAPTER_FILE, WEIGHTS_FILE = "adapter.json", "adapter_model.safetensors"


@dataclasses.dataclass(frozen=True)
class AdapterFile:
    """`adapter.json`. No field has a default: one that is missing is an error."""

    base: str | None  # the name by which the base was loaded, for people and for PEFT
    base_revision: str  # model.revision.revision
    rank: int
    alpha: float
    targets: tuple[Target, ...]
    rows: Rows
    dtype: str  # of the stored tensors
    mask_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def adapter(self) -> AdapterConfig:
        return AdapterConfig(self.rank, self.alpha, self.targets, self.rows)


def is_adapter(directory: Path) -> bool:
    """Whether it looks like an adapter, of ours or of PEFT."""
    return any((directory / name).is_file() for name in (ADAPTER_FILE, WEIGHTS_FILE, peft.PEFT_FILE))


def is_adapter_alone(directory: Path) -> bool:
    """Whether it holds an adapter and no whole model: trainers write the config.json of the base beside one of PEFT."""
    weights = [*directory.glob("*.safetensors"), *directory.glob("pytorch_model*")]
    return is_adapter(directory) and all(file.name == WEIGHTS_FILE for file in weights)


def write_adapter(model: Model, path: str | Path, base: str | None) -> None:
    """Writes the directory, whole or not at all; an earlier adapter of ours is replaced, anything else is left alone.

    Raises:
      UserError: the model has no adapter, its weights were rounded to int8, or `path` is taken.
    """
    config, target = model.config, Path(path).resolve()
    if config.adapter is None:
        raise UserError("the model has no adapter to save; wedlm_jax.save writes a whole model")
    require_unrounded(config)
    written = {
        ADAPTER_FILE, WEIGHTS_FILE, peft.PEFT_FILE, CALIBRATION_FILE, WINDOWS_FILE,
        CHAT_TEMPLATES, GENERATION_FILE, *TOKENIZER_FILES,
    }  # fmt: skip
    require_free(
        target, written.__contains__, lambda directory: (directory / ADAPTER_FILE).is_file(), "an adapter of wedlm_jax"
    )
    params = params_of(model.transformer)
    (dtype,) = {params[row.ours].dtype.name for row in adapter_rows(config)}
    described = AdapterFile(
        base=base,
        base_revision=revision(config, params),
        **vars(config.adapter),
        dtype=dtype,
        mask_token_id=model.mask_token_id,
        eos_token_ids=model.eos_token_ids,
    )
    with whole_directory(target) as staging:
        write_file(
            staging / WEIGHTS_FILE, [t for row in adapter_rows(config) for t in _stored(row, config, params[row.ours])]
        )
        write_hf_json(staging / ADAPTER_FILE, dataclasses.asdict(described))
        if config.adapter.rows == "all":
            write_hf_json(staging / peft.PEFT_FILE, peft.to_peft(config.adapter, base))
        copy_tokenizer_files(model.files, model.tokenizer, staging)
        copy_generation_config(model.files, staging)


def with_adapter(model: Model, directory: Path) -> Model:
    """The model with the adapter of a directory, its pairs in float32 and cut over the mesh as their kernels are, and with the
    special ids and the tokenizer of `adapter.json`'s directory.

    Raises:
      UserError: it is not complete or damaged, it was trained on another base, or it is of PEFT and not implemented.
    """
    config, params = model.config, params_of(model.transformer)
    if config.adapter is not None:
        raise UserError(f"{directory}: the model has an adapter already; load its base and one of them")
    require_contents(directory)
    described = _describe(directory)
    if isinstance(described, AdapterFile):
        if (found := revision(config, params)) != described.base_revision:
            raise UserError(
                f"{directory}: trained on {described.base or 'a base'} of revision {described.base_revision}, but this base is "
                f"of revision {found}, so its weights differ; load the adapter on the base that it was trained on"
            )
        for token in (described.mask_token_id, *described.eos_token_ids):
            if token is not None and not 0 <= token < config.vocab_size:
                raise UserError(
                    f"{directory / ADAPTER_FILE}: token id {token} is not in the vocabulary [0, {config.vocab_size})"
                )
        model = dataclasses.replace(model, mask_token_id=described.mask_token_id, eos_token_ids=described.eos_token_ids)
        model = with_tokenizer_in(directory, model)
        adapter, dtype = described.adapter, described.dtype
    else:
        adapter, dtype = described, None
    config = dataclasses.replace(config, adapter=adapter)
    own = _read(directory, config, dtype)
    if model.mesh is None:
        placed = {name: jnp.asarray(x) for name, x in own.items()}
    else:
        shardings = param_shardings(model.mesh, param_axes(config), own)
        placed = {
            name: jax.make_array_from_callback(x.shape, shardings[name], x.__getitem__) for name, x in own.items()
        }
    return dataclasses.replace(model, transformer=transformer_from(config, params | placed), config=config)


def with_tokenizer_in(directory: Path, model: Model) -> Model:
    """The model with the tokenizer of a directory, and with its files for exports; as it is where that has none, as earlier
    adapters have not."""
    tokenizer = tokenizer_in(directory)
    return model if tokenizer is None else dataclasses.replace(model, tokenizer=tokenizer, files=directory)


def adapter_in(directory: Path) -> AdapterConfig:
    """What the adapter of a directory is, as its files describe it. Raises as `with_adapter`."""
    described = _describe(directory)
    return described.adapter if isinstance(described, AdapterFile) else described


def _describe(directory: Path) -> AdapterFile | AdapterConfig:
    """What adapter.json says, or, where there is none, PEFT's file; where both are there they must agree."""
    ours, theirs = directory / ADAPTER_FILE, directory / peft.PEFT_FILE
    of_peft = peft.from_peft(read_json(theirs), theirs, _tensors(directory).shapes) if theirs.is_file() else None
    if not ours.is_file():
        if of_peft is None:
            raise UserError(
                f"{directory}: no {ADAPTER_FILE} and no {peft.PEFT_FILE}, so it is no adapter; copy the whole directory"
            )
        return of_peft
    described = from_json(AdapterFile, json.dumps(read_json(ours)), str(ours))
    try:
        adapter = described.adapter
    except UserError as error:
        raise UserError(f"{ours}: {str(error).removeprefix('adapter.')}") from None
    if of_peft is not None and of_peft != dataclasses.replace(
        adapter, targets=tuple(target for target in TARGETS if target in adapter.targets)
    ):
        raise UserError(
            f"{directory}: {ADAPTER_FILE} and {peft.PEFT_FILE} describe two adapters; remove the one that is not this one's"
        )
    return described


def _tensors(directory: Path) -> StoredTensors:
    if not (directory / WEIGHTS_FILE).is_file():
        pickled = (
            " (adapter_model.bin is pickled, never read here)" if (directory / "adapter_model.bin").is_file() else ""
        )
        raise UserError(f"{directory}: no {WEIGHTS_FILE}{pickled}; copy or save the adapter again")
    return StoredTensors(directory, WEIGHTS_FILE)


def _read(directory: Path, config: ModelConfig, dtype: str | None) -> dict[str, np.ndarray]:
    """The parameters of the adapter by path, stacked over layers, in float32."""
    assert config.adapter is not None
    tensors = _tensors(directory)
    table = list(adapter_rows(config))
    needed = {name: row.hf_shape(config) for row in table for name in row.names(config)}
    ranks = {shape[0] for name, shape in tensors.shapes.items() if name.endswith("lora_A.weight")}
    if len(ranks) == 1 and ranks != {config.adapter.rank}:
        raise UserError(
            f"{directory}: rank={config.adapter.rank}, but the pairs of {WEIGHTS_FILE} have rank {ranks.pop()}"
        )
    if problems := mismatches(tensors.shapes, needed, most=2):
        raise UserError(f"{directory}: the tensors do not fit this adapter on this base: {problems}")
    if dtype is not None and (stored := {str(DTYPES.get(d, d)) for d in tensors.dtypes.values()}) != {dtype}:
        raise UserError(
            f"{directory}: {ADAPTER_FILE} says dtype={dtype}, {WEIGHTS_FILE} holds {', '.join(sorted(stored))}"
        )
    params = {}
    for row in table:
        parts = [row.from_hf(tensors.read(name), config).astype(np.float32) for name in row.names(config)]
        if not_finite := [
            name for name, part in zip(row.names(config), parts, strict=True) if not np.isfinite(part).all()
        ]:
            raise UserError(
                f"{directory}: NaN or infinity among the weights of {names_on_one_line(not_finite)}; copy or train them again"
            )
        params[row.ours] = np.stack(parts) if row.stacked else parts[0]
    return params


def _stored(row: Row, config: ModelConfig, array: jax.Array) -> list[TensorToWrite]:
    held = np.asarray(array)
    layers = held if row.stacked else held[None]
    return [
        TensorToWrite(name, row.hf_shape(config), held.dtype, lambda part=part: row.to_hf(part, config))  # type: ignore[misc]
        for name, part in zip(row.names(config), layers, strict=True)
    ]
