"""`load` and `save`: models by path, whether an HF directory, a hub id or a workdir of `wedlm_jax.train`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from wedlm_jax.errors import UserError
from wedlm_jax.hf.config import Arch, read_json, token_ids
from wedlm_jax.hf.export import save_hf
from wedlm_jax.hf.tokenizer import choose_mask_token_id, load_tokenizer
from wedlm_jax.hf.weights import is_hub_id, load_hf, resolve_dtype, stored_dtype, transformer_from
from wedlm_jax.model.config import DType
from wedlm_jax.model.handle import Model


def load(path: str | Path, dtype: Any = None, mask_token_id: int | None = None) -> Model:
    """Loads a model.

    Args:
      path: an HF directory (config.json and safetensors), a workdir of `wedlm_jax.train` (its newest checkpoint), or a hub
        id `owner/name`, which is fetched where no such local path exists.
      dtype: "float32", "bfloat16" or the jnp dtype, for parameters and compute; default bfloat16 on accelerators, float32 on CPU.
      mask_token_id: overrides the id that the directory declares.

    Raises:
      UserError: nothing is there, it is not complete, or it holds what is not implemented.
    """
    directory = Path(path)
    if is_workdir(directory):
        return _load_workdir(directory, resolve_dtype(dtype), mask_token_id)
    if directory.is_dir() and not (directory / "config.json").is_file():
        raise UserError(
            f"{path}: neither an HF directory (no config.json) nor a workdir with a model (no model.json); "
            f"python -m wedlm_jax.train --exp NAME --workdir {path} makes one"
        )
    if not directory.exists() and not is_hub_id(path):
        raise UserError(
            f"{path}: no such directory; python -m wedlm_jax.train --exp NAME --workdir {path} makes a workdir, "
            f"python -m wedlm_jax.convert --from WORKDIR --to {path} an HF directory"
        )
    return load_hf(path, dtype, mask_token_id)


def save(model: Model, path: str | Path, arch: Arch = "wedlm") -> None:
    """Writes an HF directory that PyTorch tools load: sharded safetensors, config.json, generation_config.json, tokenizer.

    Args:
      arch: the model type to declare. `qwen3` (qk norm) and `qwen2` (qkv bias) run the same forward pass, as an AR model.

    Raises:
      UserError: the weights do not fit `arch`, or `path` holds something that is not an earlier export of ours.
    """
    save_hf(model, path, arch)


def is_workdir(directory: Path) -> bool:
    return (directory / "model.json").is_file() and not (directory / "config.json").is_file()


def exact_dtype(path: str | Path) -> DType:
    """The dtype that holds the stored weights of a local directory without rounding."""
    directory = Path(path)
    if is_workdir(directory):
        return read_json(directory / "model.json")["config"]["param_dtype"]
    return stored_dtype(directory)


def _load_workdir(workdir: Path, dtype: DType, mask_token_id: int | None) -> Model:
    from wedlm_jax.checkpoint import load_params  # here, so that reading an HF directory does not import orbax

    declared = read_json(workdir / "model.json")
    config, params = load_params(workdir)
    config = dataclasses.replace(config, dtype=dtype, param_dtype=dtype)
    tokenizer = load_tokenizer(workdir / "tokenizer")
    if mask_token_id is not None:
        choose_mask_token_id(config, tokenizer, mask_token_id)
    else:
        mask_token_id = declared.get("mask_token_id")
    eos_token_ids = token_ids(declared.get("eos_token_ids"), "eos_token_ids", workdir / "model.json")
    cast = {name: jnp.asarray(value, dtype) for name, value in params.items()}
    return Model(
        transformer_from(config, cast), config, tokenizer, mask_token_id, eos_token_ids, workdir / "tokenizer"
    )
