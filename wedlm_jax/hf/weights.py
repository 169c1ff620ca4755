"""Whole models from Hugging Face directories and hub ids; `export.py` is the way back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from wedlm_jax.errors import UserError
from wedlm_jax.hf.config import from_hf, read_json
from wedlm_jax.hf.hub import fetch_model, is_hub_id
from wedlm_jax.hf.sharded import read_sharded, same_tensors
from wedlm_jax.hf.shards import StoredTensors, mismatches, names_on_one_line, require_contents
from wedlm_jax.hf.tokenizer import resolve_eos_token_ids, resolve_mask_token_id, tokenizer_in
from wedlm_jax.hf.turning import copy_turned
from wedlm_jax.hf.weight_map import EMBEDDING, HEAD, rows
from wedlm_jax.model.config import DType, ModelConfig
from wedlm_jax.model.handle import Model
from wedlm_jax.model.parameters import transformer_from

AMPERE = 8  # of NVIDIA's compute capability
DERIVED_BUFFER = re.compile(r".*\.rotary_emb\.inv_freq")  # old checkpoints store it; it follows from rope_theta


def load_hf(path: str | Path, dtype: Any = None, mask_token_id: int | None = None, mesh: Mesh | None = None) -> Model:
    """Loads an HF directory, or a hub id `owner/name` where no such local path exists.

    Args:
      path: directory with config.json, safetensors (one file, or shards and an index) and perhaps tokenizer files.
      dtype: "float32", "bfloat16" or the jnp dtype, for parameters and compute; the default is `fastest_dtype`.
      mask_token_id: overrides config.json and tokenizer.
      mesh: where the parameters are cut over; each device's part is read straight from the files.

    Raises:
      UserError: the directory is not complete, holds what is not implemented, or weights that are not finite; all tensor
        mismatches in one message.
    """
    directory = local_directory(path)
    file = directory / "config.json"
    raw = read_json(file)
    config = from_hf(raw, file, resolve_dtype(dtype))
    tokenizer = tokenizer_in(directory)
    mask_token_id = resolve_mask_token_id(config, raw, file, tokenizer, mask_token_id)
    eos_token_ids = resolve_eos_token_ids(config, raw, directory, tokenizer)
    transformer = transformer_from(config, read_params(directory, config, mesh=mesh))
    return Model(transformer, config, tokenizer, mask_token_id, eos_token_ids, directory)


def resolve_dtype(dtype: Any) -> DType:
    """Its name; of None what the device computes fastest in. Raises `UserError` where it is neither float32 nor bfloat16."""
    if dtype is None:
        return fastest_dtype(jax.devices()[0])
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in ("float32", "bfloat16"):
        raise UserError(f"dtype={name} is not implemented; choose float32, bfloat16 or, for decoding, int8")
    return name


def fastest_dtype(device: jax.Device) -> DType:
    """What a model is computed in where nothing is asked for: bfloat16 on TPUs, and on GPUs from Ampere on. Older ones (Colab's
    T4) and CPUs multiply in float32 alone; such a GPU would write each matrix anew in float32 in every forward."""
    if device.platform == "cpu":
        return "float32"
    generation = str(getattr(device, "compute_capability", "")).partition(".")[0]  # of NVIDIA's GPUs "7.5" and the like
    return "float32" if generation.isdigit() and int(generation) < AMPERE else "bfloat16"


def local_directory(path: str | Path) -> Path:
    """The directory itself, or the downloaded snapshot of a hub id; a `UserError` where files are only pointed at."""
    directory = Path(path)
    if directory.is_dir():
        require_contents(directory)
        return directory
    if directory.exists():
        raise UserError(f"{path}: is a file; name the directory that holds config.json")
    if not is_hub_id(path):
        raise UserError(f"{path}: no such directory; name one that holds config.json, a workdir or a hub id")
    return fetch_model(str(path))


def read_params(directory: Path, config: ModelConfig, mesh: Mesh | None) -> dict[str, jax.Array]:
    """Our parameters by path ("layers.mlp.up_proj.kernel"); one at a time on the host, then on the device; all are finite."""
    tensors = StoredTensors(directory)
    _require_match(tensors, config)
    if config.tie_word_embeddings and HEAD.hf in tensors.shapes:
        _require_same_head(tensors)
    params = _read_whole(tensors, config) if mesh is None else read_sharded(tensors, config, mesh)
    _require_finite(params, tensors, config)
    return params


def _read_whole(tensors: StoredTensors, config: ModelConfig) -> dict[str, jax.Array]:
    dtype = jnp.dtype(config.param_dtype)
    params = {}
    for row in rows(config):
        names = row.names(config)
        stacked = np.empty((len(names), *row.our_shape(config)), dtype)
        for part, name in zip(stacked, names, strict=True):
            copy_turned(part, row.from_hf(tensors.read(name), config))
        params[row.ours] = jnp.asarray(stacked if row.stacked else stacked[0])
    return params


@jax.jit
def _are_finite(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.isfinite(x).all() for name, x in params.items()}


def _require_finite(params: dict[str, jax.Array], tensors: StoredTensors, config: ModelConfig) -> None:
    """One NaN makes every logit NaN, of which decoding takes token 0: an answer that is empty or nonsense, without a word."""
    finite = jax.device_get(_are_finite(params))
    if not_finite := [name for row in rows(config) if not finite[row.ours] for name in row.names(config)]:
        raise UserError(
            f"{tensors.directory}: NaN or infinity among the weights of {names_on_one_line(not_finite)}; copy or convert them "
            "again, or take an earlier checkpoint"
        )


def stored_dtype(directory: Path) -> DType:
    """The dtype that holds every stored tensor exactly: bfloat16 where all are, else float32."""
    return "bfloat16" if set(StoredTensors(directory).dtypes.values()) == {"BF16"} else "float32"


def _require_match(tensors: StoredTensors, config: ModelConfig) -> None:
    needed = {name: row.hf_shape(config) for row in rows(config) for name in row.names(config)}
    allowed = {HEAD.hf: HEAD.hf_shape(config)} | needed
    held = {name: shape for name, shape in tensors.shapes.items() if not DERIVED_BUFFER.fullmatch(name)}
    if problems := mismatches(held, needed, allowed if config.tie_word_embeddings else needed):
        raise UserError(f"{tensors.directory}: the tensors do not fit config.json: {problems}")


def _require_same_head(tensors: StoredTensors) -> None:
    if not same_tensors(tensors, HEAD.hf, EMBEDDING.hf):
        raise UserError(
            f"{tensors.directory}: config.json ties the head to the embedding, but {HEAD.hf} and {EMBEDDING.hf} differ; "
            "set tie_word_embeddings to false or remove the head"
        )
