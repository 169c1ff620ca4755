"""Checkpoints (orbax): parameters, optimizer, step and the state of the data iterator, written whole or not at all.

A workdir holds
  experiment.json   what is trained, for the refusal to resume another run into it
  model.json        {"config", "mask_token_id", "eos_token_ids"}: what `wedlm_jax.load` needs beside the parameters
  tokenizer/        tokenizer.json, tokenizer_config.json
  checkpoints/STEP/ params, training (the rest of TrainState), data
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import pydantic

from wedlm_jax.errors import UserError
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.parameters import init_params
from wedlm_jax.train_state import TrainState

MODEL_FILE = "model.json"
_FOLDER = "checkpoints"
_ITEMS = ("params", "training", "data")

logging.getLogger("absl").setLevel(logging.ERROR)  # orbax tells every save in ten lines


class Checkpoints:
    """The checkpoints of one workdir. Saving copies the state and goes on; the files are written behind the loop's back."""

    def __init__(self, workdir: Path, *, keep: int):
        self._folder = workdir.absolute() / _FOLDER
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_names=_ITEMS)

    def save(self, state: TrainState, step: int, data_state: Mapping[str, Any]) -> None:
        """Saves the state after `step` batches, with the data iterator as it stands before the next one is drawn."""
        training = {name: value for name, value in _as_dict(state).items() if name != "params"}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                training=ocp.args.StandardSave(training),
                data=ocp.args.JsonSave(dict(data_state)),
            ),
        )

    @property
    def newest(self) -> int | None:
        return self._manager.latest_step()

    def restore(self, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The newest checkpoint, placed as `abstract` says, and the data iterator's state.

        Raises:
          UserError: the checkpoint is damaged or of another model.
        """
        training = {name: value for name, value in _as_dict(abstract).items() if name != "params"}
        args = ocp.args.Composite(
            params=ocp.args.StandardRestore(abstract.params),
            training=ocp.args.StandardRestore(training),
            data=ocp.args.JsonRestore(),
        )
        step = self.newest
        try:
            restored = self._manager.restore(step, args=args)
        except Exception as error:  # orbax and tensorstore raise many types for files that are not there or cut off
            raise _damaged(self._folder / str(step), error) from error
        return TrainState(params=restored["params"], **restored["training"]), restored["data"]

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        """Waits for what is still being written, also where a run is stopped; raises what went wrong there."""
        self._manager.wait_until_finished()
        self._manager.close()


@dataclasses.dataclass(frozen=True)
class ModelFile:
    """`model.json` of a workdir."""

    config: ModelConfig
    mask_token_id: int
    eos_token_ids: tuple[int, ...]

    def write(self, workdir: Path) -> None:
        (workdir / MODEL_FILE).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, workdir: Path) -> ModelFile:
        path = workdir / MODEL_FILE
        try:
            return pydantic.TypeAdapter(cls).validate_json(path.read_text())
        except OSError:
            raise UserError(f"{workdir} is no workdir of wedlm_jax.train: it has no {MODEL_FILE}") from None
        except ValueError as error:
            raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]})") from None


def load_params(workdir: str | Path, step: int | None = None) -> tuple[ModelConfig, dict[str, jax.Array]]:
    """The model config and the parameters by path of a workdir's checkpoint, on the first device.

    Args:
      workdir: where `wedlm_jax.train` ran.
      step: of the checkpoint; the newest where it is None.

    Raises:
      UserError: there is no checkpoint, not this one, or it is damaged.
    """
    workdir = Path(workdir)
    config = ModelFile.read(workdir).config
    steps = saved_steps(workdir)
    if not steps:
        raise UserError(f"{workdir} holds no checkpoint yet; go on with its python -m wedlm_jax.train")
    if step is not None and step not in steps:
        raise UserError(f"{workdir} holds no checkpoint of step {step}; it holds {', '.join(map(str, steps))}")
    step = steps[-1] if step is None else step
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(lambda: init_params(config, 0)),
    )
    folder = workdir.absolute() / _FOLDER
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(folder, options=options, item_names=_ITEMS) as manager:
        try:
            restored = manager.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(abstract)))
        except Exception as error:  # as above
            raise _damaged(folder / str(step), error) from error
    return config, restored["params"]


def saved_steps(workdir: str | Path) -> list[int]:
    """The steps of a workdir's complete checkpoints, ascending."""
    folder = Path(workdir).absolute() / _FOLDER
    return sorted(ocp.utils.checkpoint_steps(folder)) if folder.is_dir() else []


def differences(saved: Mapping[str, Any], current: Mapping[str, Any], free: Sequence[str] = ()) -> list[str]:
    """The fields in which two trees of dicts differ, as "name: saved -> current"; `free` names fields and sections to skip."""

    def walk(saved: Any, current: Any, name: str) -> list[str]:
        if name in free or saved == current:
            return []
        if isinstance(saved, Mapping) and isinstance(current, Mapping):
            prefix = f"{name}." if name else ""
            names = sorted(saved.keys() | current.keys())
            return [line for key in names for line in walk(saved.get(key), current.get(key), prefix + key)]
        return [f"{name}: {saved} -> {current}"]

    return walk(saved, current, "")


def _as_dict(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def _damaged(path: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:200]
    return UserError(
        f"{path}: the checkpoint cannot be read ({type(error).__name__}: {reason}); "
        "remove this folder to go on from the one before it"
    )
