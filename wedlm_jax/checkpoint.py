"""Checkpoints (orbax): parameters, optimizer, step and the state of the data iterator, written whole or not at all.

What a run goes on from, in its workdir:
  experiment.json   what is trained, for the refusal to resume another run into it
  model.json        the fields of ModelFile (model_file.py): what `wedlm_jax.load` needs beside the parameters
  tokenizer/        tokenizer.json, tokenizer_config.json
  checkpoints/STEP/ params, training (the rest of TrainState), data, metrics
  .training         by which a second training finds that one is at work here
  .start            by which several processes find that it is one folder to all of them
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from wedlm_jax.damaged_checkpoint import read_or_say_why, unless_loop_is_closed, unreadable
from wedlm_jax.distributed import any_process, is_main
from wedlm_jax.errors import UserError, reason, room_for
from wedlm_jax.kept_checkpoints import BEST_METRIC, Kept, best_of, metrics_of
from wedlm_jax.model.adapter import split_adapter
from wedlm_jax.model.config import DType, ModelConfig
from wedlm_jax.model.parameters import param_axes, param_shapes
from wedlm_jax.model_file import ModelFile
from wedlm_jax.sharding import param_shardings
from wedlm_jax.train_state import TrainState

_FOLDER = "checkpoints"
_ITEMS = ("params", "training", "data")
_SECONDS_BETWEEN_LOOKS = 0.02  # while a checkpoint is being written

Step = int | Literal["best"] | None  # of a checkpoint; None: the newest

# Orbax tells every save in ten lines, and a failed one in a hundred.
logging.getLogger("absl").setLevel(logging.CRITICAL)


class Checkpoints:
    """The checkpoints of one workdir. Saving copies the state and goes on; the files are written behind the loop's back.

    Kept are the newest ones, the last one that was saved while updates were finite, and the one with the lowest
    `best_metric`. A checkpoint that could not be read is neither counted nor deleted until its step is saved again.
    """

    def __init__(self, workdir: Path, *, keep: int, best_metric: str | None = None):
        self._folder = workdir.absolute() / _FOLDER
        self._best_metric = best_metric
        self._unreadable: set[int] = set()
        self._saving: int | None = None
        options = ocp.CheckpointManagerOptions(
            preservation_policy=Kept(keep, best_metric, self._unreadable),
            best_fn=lambda metrics: 0.0,  # nobody asks; without it orbax keeps no metrics beside a checkpoint
            enable_async_checkpointing=True,
            cleanup_tmp_directories=True,  # what a killed run left half written
        )
        try:
            self._manager = _Manager(self._folder, options=options, item_names=_ITEMS)
        except OSError as error:
            raise UserError(f"{self._folder}: {reason(error).lower()}; nothing can be saved") from error

    def save(
        self, state: TrainState, step: int, data_state: Mapping[str, Any], metrics: Mapping[str, float | str | None]
    ) -> None:
        """Saves the state after `step` batches, with the data iterator as it stands before the next one is drawn.

        Args:
          metrics: by which checkpoints are kept: `skipped_in_row`, what the validation of this very step measured, and of what.

        Raises:
          UserError: this checkpoint, or the one before it, could not be written; the others are kept.
        """
        args = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            training=ocp.args.StandardSave(_training(state)),
            data=ocp.args.JsonSave(dict(data_state)),
        )
        self.wait()
        self._saving = step
        try:
            if step in self._unreadable:
                self._manager.delete(step)
                self._unreadable.discard(step)
            if is_main():
                # Where no folder can be made, orbax's threads wait for theirs for minutes, and the process ends only behind them.
                with tempfile.TemporaryDirectory(suffix=".orbax-checkpoint-tmp", dir=self._folder):
                    pass
            # Forced: without it nothing is saved before the step of an unreadable checkpoint.
            self._manager.save(step, args=args, metrics={**metrics, BEST_METRIC: self._best_metric}, force=True)
        except Exception as error:
            self._manager.failure = error
            raise self._not_written(error) from error

    def wait(self) -> None:
        """Returns when what is being saved is on disk.

        Raises:
          UserError: it could not be written.
        """
        while self._manager.failure is None and self._manager.is_saving_in_progress():
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        self.require_written()
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # of the file system, through orbax and tensorstore
            raise self._not_written(error) from error

    def require_written(self) -> None:
        """Waits for nothing.

        Raises:
          UserError: it is known by now that what was being saved could not be written.
        """
        if self._manager.failure is not None:
            raise self._not_written(self._manager.failure) from self._manager.failure

    def restore(
        self, abstract: TrainState, frozen: Mapping[str, jax.Array] | None = None
    ) -> tuple[int, TrainState, dict[str, Any]]:
        """The newest checkpoint that can be read: its step, the state placed as `abstract` says, the data iterator's state.

        `frozen` is the base of an adapter, which no checkpoint holds: it never changes, and is read where it came from.

        A newer one that cannot be read is told in a line on stderr.

        Raises:
          UserError: there are none, or none can be read: they are damaged or of another model.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        failures: list[UserError] = []
        told: list[UserError] = []  # of them, by this process: only the one that could not read its part knows why
        for step in steps:
            folder = self._folder / str(step)
            restored, failure = read_or_say_why(folder, functools.partial(self._read, step, abstract))
            if any_process(failure is not None):  # then nobody goes on from here
                failures.append(failure or unreadable(folder, "in another process, see its output"))
                if failure is not None or is_main():
                    told.append(failures[-1])
                continue
            self._unreadable.update(newer for newer in steps if newer > step)
            for failed in told:
                print(f"warning: {failed}; going on from step {step}", file=sys.stderr)
            state = TrainState(params=restored["params"], **restored["training"], frozen=dict(frozen or {}))
            return step, state, restored["data"]
        why = failures[0] if failures else f"{self._folder}: the checkpoints that were there are gone"
        raise UserError(f"{why}; remove {self._folder} to start from the beginning")

    def _read(self, step: int, abstract: TrainState) -> Any:
        args = ocp.args.Composite(
            params=ocp.args.StandardRestore(abstract.params),
            training=ocp.args.StandardRestore(_training(abstract)),
            data=ocp.args.JsonRestore(),
        )
        # Not by the manager: that waits for the other processes behind a restore, and who could not read its part never comes.
        folder = self._folder / str(step)
        if not ocp.utils.is_checkpoint_finalized(folder):  # a folder that is not there is none either
            raise FileNotFoundError(f"{folder} is not complete")
        items = {name: ocp.StandardCheckpointHandler() for name in ("params", "training")}
        with contextlib.closing(ocp.CompositeCheckpointHandler(**items, data=ocp.JsonCheckpointHandler())) as handler:
            return handler.restore(folder, args=args)

    def _not_written(self, error: Exception) -> UserError:
        others = [step for step in saved_steps(self._folder.parent) if step != self._saving]
        kept = f"the checkpoint of step {others[-1]} is kept" if others else "there is no earlier one"
        return UserError(
            f"{self._folder / str(self._saving)}: the checkpoint could not be written ({type(error).__name__}: {reason(error)}); "
            f"{kept}; {room_for(error)}, then start the same command again"
        )

    def __enter__(self) -> Checkpoints:
        self._unraisablehook = sys.unraisablehook
        sys.unraisablehook = functools.partial(unless_loop_is_closed, self._unraisablehook)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Waits for what is still being written, also where a run is stopped; raises what went wrong there."""
        try:
            if kind is None:
                self.wait()
                sys.unraisablehook = self._unraisablehook  # where something failed, it has more to tell
        finally:
            # Behind a failure several processes would wait for each other.
            if self._manager.failure is None or jax.process_count() == 1:
                with contextlib.suppress(Exception):  # told above, or the run ends by another error
                    self._manager.close()


class _Manager(ocp.CheckpointManager):
    """Notes why a save failed as soon as it has: behind one orbax waits for the other processes, and these wait for this one."""

    failure: Exception | None = None

    def metrics(self, step: int) -> dict[str, Any] | None:
        return metrics_of(Path(self.directory) / str(step))  # orbax ends in a traceback where they are damaged

    def _wait_for_checkpointers(self) -> None:
        try:
            super()._wait_for_checkpointers()
        except Exception as error:  # of the file system, through orbax and tensorstore
            self.failure = error
            raise

    def _finalize(self, step: int, steps_to_remove: list[int]) -> None:
        super()._finalize(step, [])
        try:
            self._checkpoint_deleter.delete_steps(steps_to_remove)
        except OSError as error:  # as on NFS, while another process reads one: the new checkpoint is whole all the same
            print(f"warning: {self.directory}: an old checkpoint stays, {reason(error)}", file=sys.stderr, flush=True)


def refuse_unfit_path(workdir: Path) -> None:
    """Raises a `UserError` where the path of a workdir is not what orbax takes it for: a pattern, by which it finds what it joins
    into a checkpoint, so that nobody could read that; or letters in another encoding than the UTF-8 that C++ and Rust read."""
    path, encoding = str(workdir.absolute()), sys.getfilesystemencoding()
    if found := sorted(set("*?[\\").intersection(path)):
        raise UserError(
            f"{path}: no checkpoint there could be read, since orbax takes {' and '.join(found)} in a path for a pattern; choose "
            "another --workdir"
        )
    if not path.isascii() and encoding != "utf-8":
        raise UserError(
            f"{path}: nothing can be saved there, since Python takes names of files for {encoding} here, and others for UTF-8; "
            "set PYTHONUTF8=1, or choose another --workdir"
        )


def load_params(
    workdir: str | Path, step: Step = None, mesh: Mesh | None = None, dtype: DType | None = None
) -> tuple[ModelConfig, dict[str, jax.Array]]:
    """The model config and the parameters by path of a workdir's checkpoint, cut over `mesh` or on the first device: those
    that were trained, which are an adapter's alone where the config has one.

    Args:
      workdir: where `wedlm_jax.train` ran.
      step: of the checkpoint, as for `chosen_step`.
      dtype: in which they are read, one by one; None: as they were trained.

    Raises:
      UserError: there is no checkpoint, not this one, or it is damaged.
    """
    workdir = Path(workdir)
    config = ModelFile.read(workdir).config
    step = chosen_step(workdir, step)
    shapes = param_shapes(config)
    if config.adapter is not None:
        shapes = split_adapter(shapes)[1]
    shardings: Mapping[str, jax.sharding.Sharding]
    if mesh is None:
        [device] = jnp.zeros(()).devices()  # the one on which arrays are made here
        shardings = dict.fromkeys(shapes, jax.sharding.SingleDeviceSharding(device))
    else:
        shardings = param_shardings(mesh, param_axes(config), shapes)
    abstract = {
        name: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=shardings[name]) for name, x in shapes.items()
    }
    folder = workdir.absolute() / _FOLDER
    options = ocp.CheckpointManagerOptions(read_only=True)
    args = ocp.args.Composite(params=ocp.args.StandardRestore(abstract))
    with _Manager(folder, options=options, item_names=_ITEMS) as manager:
        restored, failure = read_or_say_why(folder / str(step), functools.partial(manager.restore, step, args=args))
    if failure is not None:
        others = [f"{workdir}@{other}" for other in saved_steps(workdir) if other != step]
        earlier = f"take {others[-1]}, or " if others else ""
        raise UserError(f"{failure}; {earlier}go on with its python -m wedlm_jax.train, which mends it")
    return config, restored["params"]


def chosen_step(workdir: str | Path, step: Step) -> int:
    """The step of the checkpoint that `step` names; the newest where it is None, and then a line on stderr says so if another one
    was kept as the best.

    Raises:
      UserError: there is none.
    """
    steps = saved_steps(workdir)
    if not steps:
        raise UserError(f"{workdir} holds no checkpoint yet; go on with its python -m wedlm_jax.train")
    asked, step = step, steps[-1] if step is None else _best_step(workdir) if step == "best" else step
    if step is None:
        raise UserError(
            f"{workdir} keeps no best checkpoint (train.best_metric); it holds {', '.join(map(str, steps))}"
        )
    if step not in steps:
        raise UserError(f"{workdir} holds no checkpoint of step {step}; it holds {', '.join(map(str, steps))}")
    if asked is None and is_main() and (best := _best_step(workdir)) not in (None, step):
        print(f"note: {workdir}: step {step}, the newest, is loaded; the best one is {workdir}@{best}", file=sys.stderr)
    return step


def _best_step(workdir: str | Path) -> int | None:
    """The checkpoint with the lowest `best_metric` of those that are there; None where the run keeps none for that."""
    folder = Path(workdir) / _FOLDER
    found = {step: metrics_of(folder / str(step)) for step in saved_steps(workdir)}
    metrics = {step: of_step for step, of_step in found.items() if of_step is not None}
    return best_of(metrics, metrics[max(metrics)].get(BEST_METRIC)) if metrics else None


def saved_steps(workdir: str | Path) -> list[int]:
    """The steps of a workdir's complete checkpoints, ascending. Folders of other names, such as old_500, are none."""
    folder = Path(workdir).absolute() / _FOLDER
    found = ocp.utils.checkpoint_steps_paths(folder) if folder.is_dir() else []
    return sorted(int(path.name) for path in found if path.name.isdigit())


def _training(state: TrainState) -> dict[str, Any]:
    return {name: of_state for name, of_state in vars(state).items() if name not in ("params", "frozen")}
