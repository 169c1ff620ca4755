"""`load` and `save`: models by path, whether an HF directory, a hub id or a workdir of `wedlm_jax.train`; and adapters."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh

from wedlm_jax.data.chat_template import with_defaults
from wedlm_jax.decode.calibration import fingerprint, read_calibration, write_calibration
from wedlm_jax.decode.generation import require_model
from wedlm_jax.decode.measured_windows import read_measured_windows, write_measured_windows
from wedlm_jax.errors import UserError, shown
from wedlm_jax.hf.adapter import adapter_in, is_adapter, with_adapter, with_tokenizer_in, write_adapter
from wedlm_jax.hf.config import Arch, from_hf, read_json
from wedlm_jax.hf.export import save_hf
from wedlm_jax.hf.hub import fetch_description, is_hub_id
from wedlm_jax.hf.tokenizer import choose_mask_token_id, tokenizer_in
from wedlm_jax.hf.weights import fastest_dtype, load_hf, resolve_dtype, stored_dtype
from wedlm_jax.model.adapter import AdapterConfig, split_adapter
from wedlm_jax.model.config import DType, ModelConfig
from wedlm_jax.model.handle import CALIBRATION_FILE, WINDOWS_FILE, Model
from wedlm_jax.model.int8 import in_int8, on_host
from wedlm_jax.model.merging import plain
from wedlm_jax.model.parameters import params_of, transformer_from
from wedlm_jax.model_file import TOKENIZER_FOLDER, Base, ModelFile
from wedlm_jax.model_path import is_workdir, local_target, locate, locate_adapter, split_step
from wedlm_jax.ops.attention import asked_when_loaded
from wedlm_jax.sharding import MeshConfig, mesh_of_first

if TYPE_CHECKING:  # at run time, reading an HF directory imports no orbax
    from wedlm_jax.checkpoint import Step

MeshFlag = Annotated[
    MeshConfig,
    tyro.conf.arg(
        help="Devices to decode over, the first that are there: tensor and fsdp cut the model up, data and fsdp the prompts."
    ),
]


def load(
    path: str | Path,
    dtype: Any = None,
    mask_token_id: int | None = None,
    mesh: Mesh | MeshConfig | None = None,
    adapter: str | Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    matmul_precision: Literal["default", "high", "highest"] | None = None,
) -> Model:
    """Loads a model.

    Args:
      path: an HF directory (config.json and safetensors), a workdir of `wedlm_jax.train` (its newest checkpoint; `WORKDIR@500`
        and `WORKDIR@best` name another), or a hub id `owner/name`, which is fetched where no such local path exists.
      dtype: "float32", "bfloat16" or the jnp dtype, for parameters and compute; the default is `fastest_dtype`, bfloat16 on
        most accelerators and float32 on CPUs. "int8": that default, but the layers' kernels, which are most of a model,
        rounded (`model.int8`).
      mask_token_id: overrides the id that the directory declares.
      mesh: the devices that the parameters are cut over (sharding.py), each reading its part alone; sizes take the first ones;
        None: the first device.
      adapter: a directory of `save_adapter`, or of PEFT, or a workdir that trained one, that goes beside these weights. Its
        special ids, its tokenizer with the chat template (of PEFT neither) and what was measured of it take the place of theirs.
      chat_template_kwargs: variables of the chat template, such as `{"enable_thinking": False}` of Qwen3's, for every
        conversation that is a prompt of this model. `save` writes the template as it was stored.
      matmul_precision: of float32, which "highest" makes float32 on accelerators too; None: as it was trained.

    Raises:
      UserError: nothing is there, it is not complete, or it holds what is not implemented; the adapter is of another base; the
        chat template does not read a variable.
    """
    if isinstance(mesh, MeshConfig):
        mesh = mesh_of_first(mesh)
    if not (mesh is None or isinstance(mesh, Mesh)):
        raise UserError(f"mesh={shown(mesh)} is no mesh; write wedlm_jax.MeshConfig(tensor=4) or a jax.sharding.Mesh")
    if dtype in ("int8", jnp.int8):
        computed = fastest_dtype(jax.devices()[0])
        # As stored, where that takes half of the host's memory; an adapter beside it may be finer.
        held = computed if adapter is not None or computed == "bfloat16" else exact_dtype(locate(path))
        with on_host():
            exact = load(
                path, held, mask_token_id, adapter=adapter, chat_template_kwargs=chat_template_kwargs,
                matmul_precision=matmul_precision,
            )  # fmt: skip
        return in_int8(exact, mesh, computed, frees=True)
    directory = locate(path)
    if is_workdir(directory):
        model = _load_workdir(directory, split_step(path)[1], resolve_dtype(dtype), mask_token_id, mesh)
    else:
        model = load_hf(directory, dtype, mask_token_id, mesh)
        if adapter is None and is_adapter(directory):
            warnings.warn(
                f"{path}: holds an adapter too, which is left out; --adapter {directory} adds it", stacklevel=2
            )
    if adapter is not None:
        base, beside = model, locate_adapter(adapter)
        if is_workdir(beside):
            model = _with_adapter_of(beside, split_step(adapter)[1], model, str(path))
        else:
            model = with_adapter(model, beside)
        if mask_token_id is not None:
            model = dataclasses.replace(model, mask_token_id=base.mask_token_id)
        directory = beside
    measured = {
        "calibration": _of_these_weights(directory / CALIBRATION_FILE, read_calibration(directory), model),
        "measured_windows": _of_these_weights(directory / WINDOWS_FILE, read_measured_windows(directory), model),
    }
    model = dataclasses.replace(model, source=model.source or str(path), **measured)
    if matmul_precision is not None:
        config = dataclasses.replace(model.config, matmul_precision=matmul_precision)
        transformer = transformer_from(config, params_of(model.transformer))
        model = dataclasses.replace(model, config=config, transformer=transformer)
    return model if chat_template_kwargs is None else _with_template(model, chat_template_kwargs)


def save(model: Model, path: str | Path, arch: Arch | None = None) -> None:
    """Writes an HF directory: safetensors, config.json, generation_config.json, tokenizer; and decoding.json and windows.json,
    where the model was calibrated. An adapter of all rows is merged into the weights. Tokenizer files are those that the model
    was loaded with, whatever `model.tokenizer` has become; where `model.files` is None they are written from it.

    Args:
      path: where; `~` is the home directory, as for `load`.
      arch: the model type to declare. `qwen3` (qk norm), `qwen2` (qkv bias) and `llama` (neither) run the same forward pass in
        every tool that has them, stock transformers among them. `wedlm` is the official engine's name, which reads it beside
        Tencent's own code. None: as the HF directory that the model was read from has it; of a training or an adapter `wedlm`,
        or `llama` where that is the only one that fits.

    Raises:
      UserError: the weights do not fit `arch`, `path` names nothing or holds something that is not an earlier export of ours, or
        the model has an adapter of mask rows, which is saved by `save_adapter`.
    """
    require_model(model)
    directory = local_target(path)
    save_hf(model, directory, arch)
    if model.calibration is not None:
        write_calibration(directory, model.calibration, plain(model))
    if model.measured_windows is not None:
        write_measured_windows(directory, model.measured_windows, plain(model))


def save_adapter(model: Model, path: str | Path, base: str | None = None) -> None:
    """Writes the adapter of a model alone: safetensors, a JSON that names its base and the revision of its weights, and the
    tokenizer; where it works on all rows, PEFT's adapter_config.json beside them. `load(base, adapter=path)` gives the model
    again.

    Args:
      base: the name by which others find the base; the one that `load` was given if it is None.

    Raises:
      UserError: the model has no adapter, or `path` names nothing or holds something that is not an earlier adapter of ours.
    """
    require_model(model)
    directory = local_target(path)
    write_adapter(model, directory, model.source if base is None else base)
    if model.calibration is not None:
        write_calibration(directory, model.calibration, model)
    if model.measured_windows is not None:
        write_measured_windows(directory, model.measured_windows, model)


def config_of(path: str | Path) -> ModelConfig:
    """The shape of a model that `load` reads, with float32 parameters; no weights are read or fetched.

    Raises:
      UserError: as of `load`.
    """
    place = split_step(path)[0]
    fetched = is_hub_id(place) and not Path(place).exists()
    directory = fetch_description(str(place)) if fetched else locate(path)
    if is_workdir(directory):
        return dataclasses.replace(ModelFile.read(directory).config, param_dtype="float32")
    return from_hf(read_json(directory / "config.json"), directory / "config.json")


def adapter_of(path: str | Path) -> AdapterConfig | None:
    """What the adapter is that `load` would put beside a model; its weights are not read.

    Raises:
      UserError: as of `load`.
    """
    directory = locate_adapter(path)
    return ModelFile.read(directory).config.adapter if is_workdir(directory) else adapter_in(directory)


def exact_dtype(directory: Path) -> DType:
    """The dtype that holds the stored weights without rounding."""
    if not is_workdir(directory):
        return stored_dtype(directory)
    return ModelFile.read(directory).config.param_dtype


def _of_these_weights(file: Path, found: Any, model: Model) -> Any:
    """What was `found` in a file, unless it was measured on other weights than the model has: then a warning."""
    if found is None or found.weights == fingerprint(model):
        return found
    warnings.warn(
        f"{file} was measured on other weights than these (another step, trained on since, or replaced), so it is not used; "
        "measure again with python -m wedlm_jax.calibrate",
        stacklevel=3,
    )
    return None


def _with_template(model: Model, variables: Mapping[str, Any]) -> Model:
    if not isinstance(variables, Mapping):
        raise UserError(f'chat_template_kwargs={shown(variables)}: must be a dict, as {{"enable_thinking": False}}')
    if model.tokenizer is None:
        raise UserError("chat_template_kwargs: this model has no tokenizer, and so no chat template; leave it out")
    return dataclasses.replace(model, tokenizer=with_defaults(model.tokenizer, variables, "chat_template_kwargs"))


def _load_workdir(workdir: Path, step: Step, dtype: DType, mask_token_id: int | None, mesh: Mesh | None) -> Model:
    from wedlm_jax.checkpoint import load_params  # here, so that reading an HF directory imports no orbax

    declared = ModelFile.read(workdir)
    # The parameters of an adapter stay as they were trained.
    config, params = load_params(workdir, step, mesh, dtype if declared.base is None else None)
    config = dataclasses.replace(config, dtype=dtype, param_dtype=dtype, attention=asked_when_loaded(config.attention))
    files = workdir / TOKENIZER_FOLDER
    tokenizer = tokenizer_in(files)
    mask_token_id = (
        declared.mask_token_id if mask_token_id is None else choose_mask_token_id(config, tokenizer, mask_token_id)
    )
    if declared.base is not None:
        params = base_params(workdir, dtype, mesh) | params
    transformer = transformer_from(config, params)
    model = Model(transformer, config, tokenizer, mask_token_id, declared.eos_token_ids, files)
    return model if declared.base is None else dataclasses.replace(model, source=declared.named_base)


def _with_adapter_of(workdir: Path, step: Step, model: Model, name: str) -> Model:
    """The model with the adapter that a workdir trained; `name` is what the model was loaded as."""
    from wedlm_jax.checkpoint import load_params

    declared = ModelFile.read(workdir)
    if declared.base is None:
        raise UserError(f"{workdir}: a whole model and no adapter; load it as the model itself")
    if model.config.adapter is not None:
        raise UserError(f"{workdir}: the model has an adapter already; load its base and one of them")
    params = params_of(model.transformer)
    dataclasses.replace(declared.base, path=name).check(model.config, params)
    config = dataclasses.replace(model.config, adapter=declared.config.adapter)
    transformer = transformer_from(config, params | load_params(workdir, step, model.mesh)[1])
    ids = declared.mask_token_id, declared.eos_token_ids
    model = dataclasses.replace(
        model, transformer=transformer, config=config, mask_token_id=ids[0], eos_token_ids=ids[1]
    )
    return with_tokenizer_in(workdir / TOKENIZER_FOLDER, model)


def base_params(workdir: Path, dtype: Any, mesh: Mesh | None) -> dict[str, jax.Array]:
    """The parameters of the model that the adapter of `workdir` was trained beside.

    Raises:
      UserError: it is not there, or it is another model by now.
    """
    base = _found_base(workdir)
    model = load(base.path, dtype, mesh=mesh)
    params, _ = split_adapter(params_of(model.transformer))
    base.check(model.config, params)
    return params


def _found_base(workdir: Path) -> Base:
    """The base where it was, else where it was named: from the current folder, or from one above the workdir, with which it may
    have been moved. Another model in one of these places has another revision."""
    declared = ModelFile.read(workdir)
    assert declared.base is not None
    path, named = declared.base.path, str(declared.named_base)
    places = [path, named, *(str(folder / named) for folder in workdir.resolve().parents)]
    found = next((place for place in places if Path(split_step(place)[0]).exists()), None)
    if found is None and not is_hub_id(path):
        raise UserError(
            f"{workdir}: an adapter beside {path}, which is not there; bring it back, or name the base: "
            f"--model BASE --adapter {workdir}"
        )
    return dataclasses.replace(declared.base, path=found or path)
