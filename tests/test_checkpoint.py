"""Checkpoints: what was saved comes back, whole, though training goes on meanwhile; damage and strangers are named."""

import asyncio
import dataclasses
import errno
import gc
import os
import shutil
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from tests.bad_input import cut, forbidden, full_disk
from tests.tiny_training import EXPERIMENT, MODEL, SETTINGS, fresh_state, one_device_mesh
from wedlm_jax import checkpoint as checkpoint_module
from wedlm_jax.checkpoint import Checkpoints, chosen_step, load_params, refuse_unfit_path, saved_steps
from wedlm_jax.errors import UserError
from wedlm_jax.kept_checkpoints import steps_to_keep
from wedlm_jax.model_file import ModelFile
from wedlm_jax.sharding import MeshConfig, make_mesh
from wedlm_jax.train import train
from wedlm_jax.train_state import abstract_state

ABSTRACT = abstract_state(MODEL, SETTINGS.optimizer, one_device_mesh())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A workdir with the checkpoints 2 and 3 of a state whose arrays all hold the step, overwritten while it was saved."""
    workdir = tmp_path_factory.mktemp("run")
    add_one = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = jax.tree.map(lambda x: x * 0, fresh_state())
    with Checkpoints(workdir, keep=2) as checkpoints:
        for step in (1, 2, 3):
            state = add_one(state)
            checkpoints.save(state, step, {"next_example": [10 * step]}, {"skipped_in_row": 0})
        state = add_one(state)  # its buffers are donated: the save must have taken its own copy
    ModelFile(MODEL, mask_token_id=3, eos_token_ids=(2, 0)).write(workdir)
    return workdir


def restore(workdir, abstract=ABSTRACT):
    with Checkpoints(workdir, keep=2) as checkpoints:
        _, state, data_state = checkpoints.restore(abstract)
        return state, data_state


def copy_of(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def test_the_newest_checkpoint_comes_back_with_the_data_state(saved):
    state, data_state = restore(saved)
    assert all((np.asarray(x) == 3).all() for x in jax.tree.leaves(state))
    assert jax.tree.structure(state) == jax.tree.structure(fresh_state())
    assert data_state == {"next_example": [30]}


def test_only_the_last_ones_are_kept(saved):
    assert saved_steps(saved) == [2, 3]


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_a_checkpoint_is_restored_onto_another_mesh(saved):
    abstract = abstract_state(MODEL, SETTINGS.optimizer, make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))
    state, _ = restore(saved, abstract)
    assert state.params["embed.embedding"].addressable_shards[0].data.shape == (160, 8)
    assert all((np.asarray(x) == 3).all() for x in jax.tree.leaves(state))


@pytest.mark.parametrize("step", [None, 2])
def test_load_params_reads_config_and_parameters(saved, step):
    config, params = load_params(saved, step)
    assert config == MODEL
    assert {name: x.shape for name, x in params.items()} == {name: x.shape for name, x in ABSTRACT.params.items()}
    assert all((np.asarray(x) == (step or 3)).all() for x in params.values())


def test_the_model_file_comes_back(saved):
    assert ModelFile.read(saved) == ModelFile(MODEL, 3, (2, 0))


def test_a_step_that_is_not_there_is_named_with_those_that_are(saved):
    with pytest.raises(UserError, match="holds no checkpoint of step 1; it holds 2, 3"):
        load_params(saved, 1)


def test_a_workdir_without_checkpoint_says_so(saved, tmp_path):
    workdir = copy_of(saved, tmp_path)
    shutil.rmtree(workdir / "checkpoints")
    assert saved_steps(workdir) == []
    with pytest.raises(UserError, match="holds no checkpoint yet"):
        load_params(workdir)


def test_a_checkpoint_that_was_renamed_is_none(saved, tmp_path):
    workdir = copy_of(saved, tmp_path)
    for step in (2, 3):
        (workdir / "checkpoints" / str(step)).rename(workdir / "checkpoints" / f"old_{step}")
    assert saved_steps(workdir) == []
    with pytest.raises(UserError, match="checkpoints: the checkpoints that were there are gone; remove .* to start"):
        restore(workdir)


def test_a_folder_that_is_no_workdir_says_so(tmp_path):
    with pytest.raises(UserError, match="it has no model.json"):
        load_params(tmp_path)


def test_a_broken_model_file_is_named(saved, tmp_path):
    workdir = copy_of(saved, tmp_path)
    (workdir / "model.json").write_text('{"config": ')
    with pytest.raises(UserError, match=r"model.json: cannot be read"):
        load_params(workdir)


def test_a_model_file_that_may_not_be_read_is_not_said_to_be_missing(tmp_path):
    (tmp_path / "model.json").mkdir()  # what root is refused too
    with pytest.raises(UserError, match=r"model.json: cannot be read \(Is a directory\)"):
        load_params(tmp_path)


# Orbax leaves other reads unawaited.
damaged = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@damaged
@pytest.mark.parametrize("damage", ["params", "training", "data", "metrics"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_it_is_used(saved, tmp_path, capsys, damage):
    """Nothing is moved or deleted meanwhile; without its metrics alone a checkpoint is whole."""
    workdir = copy_of(saved, tmp_path)
    newest = workdir / "checkpoints" / "3"
    if damage in ("params", "training"):
        cut(newest / damage)
    else:
        shutil.rmtree(newest / damage)
    state, data_state = restore(workdir)
    told = capsys.readouterr().err
    if damage == "metrics":
        assert (int(state.step), told) == (3, "")
        return
    assert (int(state.step), data_state) == (2, {"next_example": [20]})
    assert told.count("\n") == 1
    assert "warning: " in told and "checkpoints/3: the checkpoint cannot be read" in told and "from step 2" in told
    assert saved_steps(workdir) == [2, 3]


@pytest.mark.parametrize("left", [b"", b'{"skipped_in_row": 0', b"[]", b"\xff"])
def test_a_checkpoint_whose_metrics_are_damaged_is_whole(saved, tmp_path, left):
    """As where the power failed: neither training nor what loads a model could open the folder."""
    workdir = copy_of(saved, tmp_path)
    (workdir / "checkpoints" / "3" / "metrics" / "metrics").write_bytes(left)
    with Checkpoints(workdir, keep=2) as checkpoints:
        checkpoints.wait()
    assert chosen_step(workdir, None) == 3
    assert load_params(workdir)[0] == MODEL


@damaged
def test_the_step_of_a_damaged_checkpoint_is_saved_again(saved, tmp_path, capsys):
    """Steps before it as well; the damaged one is neither counted among those that are kept nor deleted before."""
    workdir = copy_of(saved, tmp_path)
    shutil.copytree(workdir / "checkpoints" / "3", workdir / "checkpoints" / "5")
    cut(workdir / "checkpoints" / "5" / "params")
    with Checkpoints(workdir, keep=1) as checkpoints:
        step, state, data_state = checkpoints.restore(ABSTRACT)
        assert step == 3
        checkpoints.save(state, 4, data_state, {"skipped_in_row": 0})
        checkpoints.wait()
        assert saved_steps(workdir) == [4, 5]
        checkpoints.save(state, 5, data_state, {"skipped_in_row": 0})
    assert saved_steps(workdir) == [5]
    capsys.readouterr()
    state, _ = restore(workdir)
    assert int(state.step) == 3 and capsys.readouterr().err == ""  # what was saved as step 5 is the state of step 3


def test_reads_that_failed_behind_the_first_one_print_nothing(saved, monkeypatch, caplog):
    """Asyncio logs a traceback for each, when the garbage collector comes to it."""
    read = Checkpoints._read

    async def fail():
        raise OSError("cut off")

    async def leave_one_behind():
        left = [asyncio.create_task(fail())]
        left.append(left)
        await asyncio.sleep(0)

    def read_or_fail(self, step, abstract):
        if step == 3:
            asyncio.run(leave_one_behind())
            raise OSError("cut off")
        return read(self, step, abstract)

    monkeypatch.setattr(Checkpoints, "_read", read_or_fail)
    state, _ = restore(saved)
    gc.collect()
    assert int(state.step) == 2
    assert not [record for record in caplog.records if record.name == "asyncio"]


LOAD_ALONE = """
import sys
from wedlm_jax.checkpoint import load_params
from wedlm_jax.errors import UserError
try:
    load_params(sys.argv[1])
except UserError as error:
    print(f"error: {error}", file=sys.stderr)
"""


def test_of_a_damaged_checkpoint_one_line_is_told_with_the_one_before_it(saved, tmp_path):
    """In a process of its own: threads that read on find the event loop closed, and would tell so on its stderr."""
    workdir = copy_of(saved, tmp_path)
    shutil.rmtree(workdir / "checkpoints" / "3" / "params" / "d")
    told = subprocess.run(
        [sys.executable, "-c", LOAD_ALONE, workdir], capture_output=True, text=True, timeout=100, check=True
    ).stderr
    assert told.count("\n") == 1, told
    assert "checkpoints/3: the checkpoint cannot be read" in told and f"take {workdir}@2, or go on with its" in told


@damaged
def test_where_no_checkpoint_can_be_read_nothing_starts_anew(saved, tmp_path):
    workdir = copy_of(saved, tmp_path)
    for step in ("2", "3"):
        shutil.rmtree(workdir / "checkpoints" / step / "training")
    with pytest.raises(
        UserError, match=r"checkpoints/3: the checkpoint cannot be read .* remove .*checkpoints to start"
    ):
        restore(workdir)
    assert saved_steps(workdir) == [2, 3]


@pytest.mark.parametrize("read", [restore, load_params])
def test_a_checkpoint_that_a_device_has_no_room_for_is_not_said_to_be_damaged(saved, monkeypatch, read):
    """Else a busy GPU costs the steps since the one before, or is told as a reason to remove them all."""

    def refused(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    for reader in (checkpoint_module.ocp.CompositeCheckpointHandler, checkpoint_module.ocp.CheckpointManager):
        monkeypatch.setattr(reader, "restore", refused)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
        read(saved)


@pytest.mark.parametrize("read", [restore, load_params])
@pytest.mark.parametrize("closed", ["3", "3/params", "3/params/_METADATA"])
def test_a_checkpoint_that_may_not_be_read_is_not_said_to_be_damaged(saved, tmp_path, monkeypatch, read, closed):
    """As of a container that ran as root: training went back to the one before it, and at this step could not save."""
    workdir = copy_of(saved, tmp_path)

    def refused(*_, **__):
        raise FileNotFoundError("Individual parameter subdirectory not found")  # as orbax says it of some

    for reader in (checkpoint_module.ocp.CompositeCheckpointHandler, checkpoint_module.ocp.CheckpointManager):
        monkeypatch.setattr(reader, "restore", refused)
    with (
        forbidden(workdir / "checkpoints" / closed),
        pytest.raises(
            UserError, match=rf"checkpoints/{closed}: permission denied; allow reading it, and all of .*points"
        ),
    ):
        read(workdir)


@pytest.mark.parametrize(
    ("metrics", "last", "kept"),
    [
        ({1: {}, 2: {}, 3: {}}, 2, {2, 3}),
        ({1: {"loss": 0.5}, 2: {"loss": 0.1}, 3: {"loss": 0.4}, 4: {}}, 1, {2, 4}),
        ({1: {"loss": 0.1}, 2: {"loss": 0.1}, 3: {"loss": float("nan")}}, 1, {1, 3}),
        ({1: {"skipped_in_row": 0}, 2: {"skipped_in_row": 2}, 3: {"skipped_in_row": 4}}, 1, {1, 3}),
        ({1: {"skipped_in_row": 0}, 2: {"skipped_in_row": 2}, 3: {"skipped_in_row": 0}}, 1, {3}),
    ],
)
def test_the_best_and_the_last_finite_checkpoint_outlive_the_newest_ones(metrics, last, kept):
    assert steps_to_keep(metrics, last=last, best_metric="loss") == kept


@pytest.mark.parametrize(
    ("of", "best"), [(("4", "4", "4"), 1), (("4", "9", "9"), 2), (("4", "9", "4"), 1), ((None, None, "9"), 1)]
)
def test_the_best_checkpoint_is_the_best_of_those_measured_as_the_newest_is(of, best):
    """Losses of other held-out batches, or of before the masks, tell nothing beside its own; earlier versions did not say."""
    metrics = {step: {"loss": 0.1 * step, **({"measured_of": said} if said else {})} for step, said in enumerate(of, 1)}
    assert steps_to_keep(metrics, last=1, best_metric="loss") == {best, 3}


def test_the_best_checkpoint_is_not_deleted_by_newer_ones(tmp_path):
    state = fresh_state()
    for steps in ([1, 2, 3], [4, 5]):  # a resumed run knows it too
        with Checkpoints(tmp_path, keep=1, best_metric="validation_ar_loss") as checkpoints:
            for step in steps:
                checkpoints.save(state, step, {"next_example": [0]}, {"validation_ar_loss": abs(step - 2.0)})
    assert saved_steps(tmp_path) == [2, 5]


def test_a_disk_that_is_full_is_told_and_the_earlier_checkpoint_is_kept(tmp_path):
    """No file may grow past 2 kB, as a stand-in: the system refuses the write while orbax is at it."""
    state = fresh_state()
    with pytest.raises(UserError) as error, Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(state, 1, {"next_example": [1]}, {"skipped_in_row": 0})
        checkpoints.wait()
        with full_disk(2000):
            checkpoints.save(state, 2, {"next_example": [2]}, {"skipped_in_row": 0})
            checkpoints.wait()
    message = str(error.value)
    assert "checkpoints/2: the checkpoint could not be written" in message and "step 1 is kept; make room" in message
    assert "\n" not in message
    assert saved_steps(tmp_path) == [1]
    _, data_state = restore(tmp_path)
    assert data_state == {"next_example": [1]}


def test_an_old_checkpoint_that_cannot_be_removed_is_told_and_the_new_one_counts(tmp_path, monkeypatch, capfd):
    """As on NFS, where another process still reads it."""
    state = fresh_state()

    def busy(deleter, steps):
        if steps:
            raise OSError(errno.EBUSY, "Device or resource busy")

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        monkeypatch.setattr(type(checkpoints._manager._checkpoint_deleter), "delete_steps", busy)
        for step in (1, 2, 3):
            checkpoints.save(state, step, {"next_example": [step]}, {"skipped_in_row": 0})
    assert 3 in saved_steps(tmp_path)
    assert capfd.readouterr().err.count("an old checkpoint stays, Device or resource busy") == 2
    assert restore(tmp_path)[1] == {"next_example": [3]}


def test_a_process_that_can_make_no_folder_for_a_checkpoint_ends_at_once(tmp_path):
    """Behind the error, too: orbax's threads, for which it would wait, would wait for their folder."""
    program = f"""
from pathlib import Path
import pytest
from tests.bad_input import forbidden
from tests.tiny_training import fresh_state
from wedlm_jax.checkpoint import Checkpoints
from wedlm_jax.errors import UserError

workdir, state = Path({str(tmp_path)!r}), fresh_state()
told = "checkpoints/1: the checkpoint could not be written .*; allow writing there, then"
with pytest.raises(UserError, match=told), Checkpoints(workdir, keep=1) as checkpoints:
    with forbidden(workdir / "checkpoints", 0o500):
        checkpoints.save(state, 1, {{"next_example": [1]}}, {{"skipped_in_row": 0}})
        checkpoints.wait()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_what_tensorstore_tells_nobody_is_not_printed(tmp_path, monkeypatch):
    """Of a disk that is full, a traceback for each file that it had not written yet."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    hook = sys.unraisablehook
    closed, other = (
        types.SimpleNamespace(exc_value=RuntimeError(text)) for text in ("Event loop is closed", "another")
    )
    with Checkpoints(tmp_path, keep=1):
        sys.unraisablehook(closed)
        sys.unraisablehook(other)
    assert told == [other] and sys.unraisablehook is hook


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="checkpoints: permission denied; nothing can be saved"):
        Checkpoints(tmp_path, keep=1)


@pytest.mark.parametrize("name", ["a[1]", "a*", "a?", "a\\b"])
def test_a_workdir_that_is_a_pattern_to_orbax_is_refused(tmp_path, name):
    """In the first and last of them nothing that was saved could be read, though the run ended well."""
    with pytest.raises(UserError, match="no checkpoint there could be read, since orbax takes"):
        train(EXPERIMENT, tmp_path / name / "run")
    assert not list(tmp_path.iterdir())


def test_a_workdir_with_letters_that_others_read_in_another_encoding_is_refused(tmp_path, monkeypatch):
    """With LANG=en_US, as the locale of latin-1 is called: the tokenizer is written in Rust, arrays in C++."""
    refuse_unfit_path(tmp_path / "Z\u00fcrich")
    monkeypatch.setattr(checkpoint_module.sys, "getfilesystemencoding", lambda: "iso8859-1")
    refuse_unfit_path(tmp_path / "Zurich")
    with pytest.raises(
        UserError, match="Z\u00fcrich: nothing can be saved there, .* iso8859-1 here, .* set PYTHONUTF8=1"
    ):
        refuse_unfit_path(tmp_path / "Z\u00fcrich")


def test_a_workdir_below_a_file_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="checkpoints: not a directory; nothing can be saved"):
        Checkpoints(tmp_path / "file", keep=1)


def test_a_checkpoint_that_was_not_finished_is_no_checkpoint(saved, tmp_path):
    workdir = copy_of(saved, tmp_path)
    (workdir / "checkpoints" / "3").rename(workdir / "checkpoints" / "3.orbax-checkpoint-tmp-1")
    assert saved_steps(workdir) == [2]
    state, _ = restore(workdir)
    assert state.step == 2


def test_the_checkpoint_of_another_model_is_named(saved):
    other = dataclasses.replace(MODEL, hidden_size=32)
    with pytest.raises(UserError, match="checkpoints/3: the checkpoint cannot be read"):
        restore(saved, abstract_state(other, SETTINGS.optimizer, one_device_mesh()))
