"""What a run that goes on is held to: the experiment, and the data, that its workdir began with."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from wedlm_jax.config_tree import differences
from wedlm_jax.data.config import DataConfig
from wedlm_jax.data.pipeline import PackedBatches
from wedlm_jax.distributed import is_main
from wedlm_jax.errors import UserError
from wedlm_jax.experiment import EXPERIMENT_FILE, FREE_TO_CHANGE, Experiment, ModelOverrides
from wedlm_jax.pretrained import split_step
from wedlm_jax.results import replacing

DIGESTS = "digests"  # in a checkpoint, beside the place in the data: as `digests_of` gives them


def refuse_another_experiment(experiment: Experiment, workdir: Path) -> None:
    """Raises a `UserError` that names the fields in which the run in `workdir` differs; where its data lie is for
    `refuse_other_data`."""
    saved = Experiment.load(workdir)
    if changed := differences(_with_places(saved), _with_places(experiment), FREE_TO_CHANGE):
        raise UserError(
            f"{workdir} holds a run of another experiment ({'; '.join(changed)}); "
            f"choose another --workdir, where model.path={workdir} goes on from its weights with a fresh optimizer and schedule, "
            f"or remove {workdir} to start again"
        )
    compares = experiment.train.best_metric is not None and saved.train.eval_every
    if compares and (changed := differences(_measured_of(saved), _measured_of(experiment))):
        raise UserError(
            f"{workdir}: {'; '.join(changed)}, but train.best_metric={experiment.train.best_metric} compares the losses that are "
            "there with those to come; leave it as it was, or set train.best_metric=none"
        )


def _measured_of(experiment: Experiment) -> dict[str, Any]:
    """What decides of which documents held-out losses are, of the fields that may be others where a run goes on."""
    places = [_place(part.held_out_path) for part in (experiment.data, *experiment.data.mixture)]
    return {"train.eval_batches": experiment.train.eval_batches, "data.held_out_path": ", ".join(filter(None, places))}


def _with_places(experiment: Experiment) -> dict[str, Any]:
    """The experiment as a tree, with one spelling of its paths, and without those of data that are read again; that held-out
    documents lie apart stays, since then no others are held out. The prompts of self-generated text are not read again, so their
    path says which they are."""
    tree = experiment.to_dict()
    tree["model"] = tree["model"] or dataclasses.asdict(ModelOverrides())  # what none says, for one that now says more
    if (initial := tree["init_from"]) is not None and Path(split_step(initial)[0]).exists():  # and no name on a hub
        tree["init_from"] = _place(initial)
    tree["tokenizer"]["path"] = _place(tree["tokenizer"]["path"])
    for part in (tree["data"], *tree["data"]["mixture"]):
        part["path"], part["held_out_path"] = _place(part["path"]), part["held_out_path"] and "a place of its own"
        if experiment.data.self_generated is None:
            del part["path"]
    return tree


def _place(path: str | None) -> str | None:
    """One spelling of the paths of a file; a name on a hub stays one, too."""
    return None if path is None else os.path.abspath(os.path.expanduser(path))


def digests_of(data: DataConfig, stream: PackedBatches) -> list[str]:
    """A hash of the first, middle and last record of each source, by which a resumed run tells its data from others. Nothing for
    self-generated text, which is held to what was written."""
    return [digest for _, _, digest in stream.fingerprints()] if data.self_generated is None else []


def refuse_other_data(experiment: Experiment, workdir: Path, digests: list[str], saved: list[str] | None) -> None:
    """Refuses other data in another place than the run in `workdir` had. In the same place a line tells of them: a bad record may
    have been mended.

    Args:
      digests: as `digests_of` gives them.
      saved: those of the checkpoint; None in one of an earlier version.

    Raises:
      UserError: they lie in another place and are others, or nobody can say.
    """
    before, now = Experiment.load(workdir).data.parts, experiment.data.parts
    for number, digest in enumerate(digests):
        if saved is not None and saved[number] == digest:
            continue
        path, other = before[number].path, now[number].path
        if _place(path) != _place(other):
            raise UserError(
                f"{workdir} holds a run of other data (data.path: {path} -> {other}); choose another --workdir, or name the "
                "same data"
            )
        if saved is not None and is_main():
            print(
                f"warning: {other or now[number].source}: the first, middle or last record is another than when the checkpoint "
                "was saved; the run goes on with what is there now",
                file=sys.stderr,
            )


def note_experiment(experiment: Experiment, workdir: Path) -> None:
    """Writes what a resumed run may change into its experiment.json, which an evaluation reads."""
    if Experiment.load(workdir).to_dict() != experiment.to_dict():
        with replacing(workdir / EXPERIMENT_FILE) as partial:
            partial.write_text(experiment.to_json())
