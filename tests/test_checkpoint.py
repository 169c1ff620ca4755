"""Checkpoints: what was saved comes back, whole, though training goes on meanwhile; damage and strangers are named."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from tests.tiny_training import MODEL, SETTINGS, fresh_state, one_device_mesh
from wedlm_jax.checkpoint import Checkpoints, ModelFile, differences, load_params, saved_steps
from wedlm_jax.errors import UserError
from wedlm_jax.sharding import MeshConfig, make_mesh
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
            checkpoints.save(state, step, {"next_example": 10 * step})
        state = add_one(state)  # its buffers are donated: the save must have taken its own copy
    ModelFile(MODEL, mask_token_id=3, eos_token_ids=(2, 0)).write(workdir)
    return workdir


def restore(workdir, abstract=ABSTRACT):
    with Checkpoints(workdir, keep=2) as checkpoints:
        return checkpoints.restore(abstract)


def copy_of(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def test_the_newest_checkpoint_comes_back_with_the_data_state(saved):
    state, data_state = restore(saved)
    assert all((np.asarray(x) == 3).all() for x in jax.tree.leaves(state))
    assert jax.tree.structure(state) == jax.tree.structure(fresh_state())
    assert data_state == {"next_example": 30}


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


def test_a_folder_that_is_no_workdir_says_so(tmp_path):
    with pytest.raises(UserError, match="it has no model.json"):
        load_params(tmp_path)


def test_a_broken_model_file_is_named(saved, tmp_path):
    workdir = copy_of(saved, tmp_path)
    (workdir / "model.json").write_text('{"config": ')
    with pytest.raises(UserError, match=r"model.json: cannot be read"):
        load_params(workdir)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax leaves its other reads unawaited
@pytest.mark.parametrize("item", ["params", "training"])
def test_a_damaged_checkpoint_is_named(saved, tmp_path, item):
    workdir = copy_of(saved, tmp_path)
    for file in (workdir / "checkpoints" / "3" / item).rglob("*"):
        if file.is_file() and file.stat().st_size > 200:
            file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match=r"checkpoints/3: the checkpoint cannot be read .* remove this folder"):
        restore(workdir)


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


def test_differences_name_the_fields():
    saved = {"a": {"b": 1, "c": [1, 2]}, "free": {"d": 0}, "model": None, "same": 1}
    current = {"a": {"b": 2, "c": [1, 2]}, "free": {"d": 9}, "model": {"x": 1}, "same": 1, "new": 5}
    assert differences(saved, current, free=("free",)) == ["a.b: 1 -> 2", "model: None -> {'x': 1}", "new: None -> 5"]
    assert differences(json.loads(json.dumps(saved)), saved) == []
