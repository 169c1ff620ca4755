"""What a run starts with: the model of `init_from`, the tokenizer, and both in its workdir, from which alone it resumes."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import shutil
import time
from pathlib import Path

import jax
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from wedlm_jax.checkpoint import chosen_step, saved_steps
from wedlm_jax.config_tree import differences
from wedlm_jax.data.documents import with_chat_template, with_end_token
from wedlm_jax.data.sources import require_source
from wedlm_jax.data.tokenizer import load_tokenizer, save_tokenizer, vocabulary_rows
from wedlm_jax.data.tokenizer_training import make_tokenizer
from wedlm_jax.distributed import is_main, of_main
from wedlm_jax.errors import UserError, writing
from wedlm_jax.experiment import EXPERIMENT_FILE, Experiment, ModelConfig, ModelOverrides
from wedlm_jax.hf.adapter import is_adapter
from wedlm_jax.hf.tokenizer import (
    CHAT_TEMPLATES,
    GENERATION_FILE,
    TOKENIZER_FILES,
    choose_mask_token_id,
    copy_generation_config,
    copy_tokenizer_files,
    write_chat_template,
)
from wedlm_jax.hf.weights import resolve_dtype
from wedlm_jax.model.handle import Model
from wedlm_jax.model.parameters import params_of
from wedlm_jax.model.revision import revision
from wedlm_jax.model_file import TOKENIZER_FOLDER, Base, ModelFile
from wedlm_jax.pretrained import is_workdir, load, split_step

_START = ".start"  # a number of process 0, another at every start: who reads it has the same folder
_STALE_SECONDS = 60.0  # for which NFS may tell that a file is not there that another machine has written
_THEN = "or choose another --workdir"
_NOT_SHARED = "choose a --workdir that all processes share (NFS, or a bucket mounted with gcsfuse)"


def checked_workdir(named: Path) -> Path:
    """What `--workdir` names, with `~` written out.

    Raises:
      UserError: it is no folder, it names a step of another workdir, or another kind of model lies there.
    """
    if re.match(r"\w\w+:/", str(named)):
        raise UserError(f"--workdir {named}: no folder; mount the bucket (gcsfuse) and name a folder in it")
    folder, step = split_step(named)
    if step is not None:
        raise UserError(
            f"--workdir {named}: names a checkpoint of {folder} wherever a model is read; choose a name without @{step}"
        )
    if (Path(folder) / "config.json").is_file() or is_adapter(Path(folder)):
        raise UserError(f"--workdir {named}: a Hugging Face directory or an adapter lies there; name another folder")
    return Path(folder)


def is_begun(workdir: Path) -> bool:
    """Whether a checkpoint is there to go on from; all processes must ask.

    Raises:
      UserError: process 0 has another newest one.
    """
    newest = max(saved_steps(workdir), default=0)
    if newest != (expected := of_main(newest)):
        raise UserError(
            f"{workdir}: {_checkpoint(newest)} here, and for process 0 {_checkpoint(expected)}; {_NOT_SHARED}"
        )
    return newest > 0


def await_prepared(workdir: Path) -> None:
    """Waits until process 0 has prepared `workdir`; all processes must call it.

    Raises:
      UserError: to this process it is another folder, such as a copy on a disk of its own, or one that it cannot write.
    """
    if jax.process_count() == 1:
        return
    file, number = workdir / _START, secrets.randbits(31)
    if is_main():
        with writing(file, _THEN):
            file.write_text(str(number))
    number = of_main(number)
    if is_main():
        return
    end = time.monotonic() + _STALE_SECONDS
    while not _holds(file, number):
        if time.monotonic() > end:
            raise UserError(f"{workdir}: what process 0 has written is not here; {_NOT_SHARED}")
        time.sleep(0.2)


def _holds(file: Path, number: int) -> bool:
    """Whether it holds the number; opened as for writing, since every process writes its part of a checkpoint."""
    with writing(file, "for every process, or choose another --workdir"):
        try:
            with file.open("r+") as opened:
                return opened.read() == str(number)
        except FileNotFoundError:
            return False


def _checkpoint(step: int) -> str:
    return f"the newest checkpoint is of step {step}" if step else "there is no checkpoint"


def pinned(experiment: Experiment) -> Experiment:
    """The experiment with a step in `init_from`, the one that process 0 finds now: a workdir's newest or best step is another
    once it trains on. All processes must ask."""
    if experiment.init_from is None:
        return experiment
    place, step = split_step(experiment.init_from)
    if not is_workdir(Path(place)):
        return experiment
    return dataclasses.replace(experiment, init_from=f"{place}@{of_main(chosen_step(place, step))}")


def require_inputs(experiment: Experiment) -> None:
    """What can be told of data and tokenizer before a model is fetched, which takes minutes of a large one.

    Raises:
      UserError: a source is not there, or there is no tokenizer at tokenizer.path.
    """
    for part in experiment.data.parts:
        require_source(part)
    if experiment.tokenizer.path is not None and is_main():
        load_tokenizer(experiment.tokenizer.path)


def load_initial(experiment: Experiment, mesh: Mesh) -> tuple[Model | None, ModelConfig]:
    """The model of `init_from`, and the shape of the one that is trained; without `init_from` None and the experiment's own.

    The model is cut over `mesh`, in float32: so the optimizer has it, whatever it was stored as. The base of an adapter, which
    no optimizer has, comes in its `param_dtype`. The shape is that of the model with the experiment's dtype, remat and the like,
    and with its adapter.

    Raises:
      UserError: there is none, or its shape is not that of the experiment's model.
    """
    if experiment.init_from is None:
        assert isinstance(experiment.model, ModelConfig)  # Experiment.require_model sees to it
        return None, experiment.model
    path = experiment.init_from
    place = Path(split_step(path)[0])
    if not place.exists() and place.parent == Path("runs"):
        raise UserError(f"init_from={path} does not exist; python -m wedlm_jax.train --exp {place.name} makes it")
    dtype = None if experiment.adapter is None or experiment.model is None else experiment.model.param_dtype
    initial = load(path, dtype=dtype or "float32", mask_token_id=experiment.objective.mask_token_id, mesh=mesh)
    if not isinstance(experiment.model, ModelConfig):
        return initial, (experiment.model or ModelOverrides()).over(initial.config, resolve_dtype(None))
    shape, wanted = dataclasses.asdict(initial.config), dataclasses.asdict(experiment.model)
    compute = [field.name for field in dataclasses.fields(ModelOverrides)]
    if changed := differences(shape, wanted, compute):
        raise UserError(f"init_from={path} is another model than model ({'; '.join(changed)}); set model to None")
    return initial, experiment.model


def base_of(experiment: Experiment, initial: Model | None, model: ModelConfig) -> Base | None:
    """What an adapter is trained beside, None for a model that is trained itself; every process must ask.

    Args:
      initial, model: as `load_initial` gives them.

    Raises:
      UserError: an adapter without a model to start from.
    """
    if model.adapter is None:
        return None
    if initial is None:
        raise UserError(f"{experiment.name} trains an adapter; name the model that it is for as init_from")
    path = os.path.expanduser(str(experiment.init_from))
    if Path(split_step(path)[0]).exists():  # and no hub id
        path = os.path.abspath(path)
    return Base(path, revision(initial.config, params_of(initial.transformer)))


def refuse_long_rows(experiment: Experiment, model: ModelConfig) -> None:
    """Raises a `UserError` where the rows of the data are past the model's context."""
    if experiment.data.row_length > model.max_position_embeddings:
        raise UserError(
            f"data.row_length={experiment.data.row_length} is past the model's context, "
            f"max_position_embeddings={model.max_position_embeddings}; lower data.row_length"
        )


def prepare_workdir(
    experiment: Experiment,
    initial: Model | None,
    model: ModelConfig,
    workdir: Path,
    base: Base | None = None,
    init_from: str | None = None,
) -> None:
    """Writes tokenizer, model.json and experiment.json, as the sole writer.

    Args:
      initial, model: as `load_initial` gives them.
      base: as `base_of` gives it.
      init_from: where `initial` was read, with its step.

    Raises:
      UserError: model, tokenizer and data do not fit each other, another training has begun there, or nothing can be written.
    """
    if saved_steps(workdir):
        raise UserError(
            f"{workdir}: another training has begun there meanwhile; choose another --workdir, or start again"
        )
    folder = workdir / TOKENIZER_FOLDER
    with writing(folder, _THEN):
        folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _find_tokenizer(experiment, initial, folder)
    if initial is not None:
        with writing(folder, _THEN):
            copy_generation_config(initial.files, folder)
    if (rows := vocabulary_rows(tokenizer)) > model.vocab_size:
        raise UserError(
            f"the tokenizer has token ids up to {rows - 1} and the model has vocab_size={model.vocab_size} rows; "
            "raise model.vocab_size, or name the model's own tokenizer as tokenizer.path"
        )
    mask_token_id = initial.mask_token_id if initial is not None else None
    if mask_token_id is None and model.needs_mask_token:
        mask_token_id = choose_mask_token_id(model, tokenizer, experiment.objective.mask_token_id)
    known = (initial.eos_token_ids if initial is not None else ()) or (tokenizer.eos_token_id,)
    # Decoding stops where the training data end a turn, too: a base model's configs may not name that token.
    learned = with_end_token(tokenizer, experiment.data.end_token).eos_token_id
    end_ids = tuple(dict.fromkeys(token for token in (*known, learned) if token is not None))
    with writing(workdir, _THEN):
        ModelFile(model, mask_token_id, end_ids, base, init_from).write(workdir)
        (workdir / EXPERIMENT_FILE).write_text(experiment.to_json())


def progress_of(init_from: str | None) -> str:
    """Which step of the run in a workdir it is, for all to see; nothing for a directory that does not say."""
    place, step = split_step(str(init_from))
    if not saved_steps(place) or not (Path(place) / EXPERIMENT_FILE).is_file():
        return ""
    step = step if isinstance(step, int) else chosen_step(place, step)  # a named one may be gone by now
    return f" (step {step} of {Experiment.load(place).train.steps})"


def _find_tokenizer(experiment: Experiment, initial: Model | None, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that tokenizer.path names, else the one of init_from, else one trained on the data; kept in `folder`."""
    if initial is None or experiment.tokenizer.path is not None:
        tokenizer = with_chat_template(make_tokenizer(experiment.tokenizer, experiment.data), experiment.data)
        with writing(folder, _THEN):
            _remove_earlier(folder)
            save_tokenizer(tokenizer, folder)
        return tokenizer
    if initial.tokenizer is None:
        raise UserError(f"init_from={experiment.init_from} has no tokenizer; name the folder of one as tokenizer.path")
    tokenizer = with_chat_template(initial.tokenizer, experiment.data)
    with writing(folder, _THEN):
        _remove_earlier(folder)
        copy_tokenizer_files(initial.files, initial.tokenizer, folder)
        if tokenizer is not initial.tokenizer:
            write_chat_template(tokenizer, folder)
    return tokenizer


def _remove_earlier(folder: Path) -> None:
    """What an earlier start left there, maybe of another model: a chat template of that would be taken for this one's."""
    for name in (*TOKENIZER_FILES, GENERATION_FILE):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / CHAT_TEMPLATES, ignore_errors=True)
