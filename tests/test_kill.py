"""A run that is killed with -9 at any moment, or told to end, ends as if it had not been: bit for bit, data and metrics too."""

import json
import os
import random
import shutil
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from tests.conftest import FULL
from tests.kill_server import KILLED
from tests.tiny_training import one_device_mesh
from wedlm_jax.checkpoint import Checkpoints, saved_steps
from wedlm_jax.metrics.throughput import TIME_FIELDS
from wedlm_jax.metrics.writers import read_metrics
from wedlm_jax.preemption import EXIT_STATUS
from wedlm_jax.train_state import abstract_state


class Trainer:
    """Starts runs of KILLED, each in a process of its own."""

    def __init__(self, folder):
        environment = {
            **os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_COMPILATION_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }  # fmt: skip
        self._told = (folder / "stderr").open("a")
        self._read = (folder / "stderr").open()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kill_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._told, env=environment, text=True,
        )  # fmt: skip

    def __call__(self, workdir, *, devices: int = 1, at=None, after=None) -> int:
        order = {"workdir": str(workdir), "devices": devices, "at": at, "after": after}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())["status"]

    def said(self) -> str:
        """What the runs have printed since the last call."""
        return self._read.read()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    trainer = Trainer(tmp_path_factory.mktemp("server"))
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def uninterrupted(train, tmp_path_factory):
    """The workdir of a run that nothing happened to."""
    workdir = tmp_path_factory.mktemp("uninterrupted")
    assert train(workdir) == 0, train.said()
    return workdir


def state_and_data(workdir):
    model, optimizer = KILLED.model, KILLED.optimizer
    with Checkpoints(workdir, keep=2) as checkpoints:
        return checkpoints.restore(abstract_state(model, optimizer, one_device_mesh()))


def lines(workdir) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in TIME_FIELDS} for line in read_metrics(workdir)]


def assert_same_end(workdir, expected) -> None:
    """Parameters, optimizer, order of the data and metrics, one line a step."""
    (step, state, data), (_, expected_state, expected_data) = state_and_data(workdir), state_and_data(expected)
    assert step == KILLED.train.steps and data == expected_data
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    for name, ours, theirs in zip(names, jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    assert lines(workdir) == lines(expected)
    assert [line["step"] for line in lines(workdir)] == list(range(1, KILLED.train.steps + 1))


def test_killed_in_a_step_in_a_save_and_after_one(train, uninterrupted, tmp_path):
    assert train(tmp_path, at=("in step", 3)) == -9
    assert saved_steps(tmp_path) in ([], [2])  # the files of step 2 are written while step 3 runs
    assert train(tmp_path, at=("in save", 4)) == -9
    assert saved_steps(tmp_path) == [2] and len(list((tmp_path / "checkpoints").iterdir())) > 1
    assert train(tmp_path, at=("after save", 6)) == -9
    assert saved_steps(tmp_path) == [4, 6]
    assert train(tmp_path) == 0, train.said()
    assert_same_end(tmp_path, uninterrupted)
    # Nothing half written is left.
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["6", "8"]


@pytest.mark.skipif(not FULL, reason="twenty kills: launch/test.sh --full")
def test_killed_twenty_times_at_random_moments(train, uninterrupted, tmp_path):
    begin = time.perf_counter()
    assert train(tmp_path / "timed") == 0, train.said()  # with everything compiled, as in the runs below
    seconds = time.perf_counter() - begin
    tmp_path = tmp_path / "killed"
    tmp_path.mkdir()
    moments = random.Random(0)
    kills = 0
    while kills < 20:
        status = train(tmp_path, after=moments.uniform(0, seconds))
        assert status in (-9, 0), train.said()
        kills += status == -9
        if status == 0 and kills < 20:  # it came to its end before the signal: begin again, the kills still count
            assert_same_end(tmp_path, uninterrupted)
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()
    assert train(tmp_path) == 0
    assert_same_end(tmp_path, uninterrupted)


def test_told_to_end_it_finishes_its_step_saves_and_says_so(train, uninterrupted, tmp_path):
    train.said()
    assert train(tmp_path, at=("terminated", 3)) == EXIT_STATUS == 75
    (step,) = set(saved_steps(tmp_path)) - {2}  # the signal came while step 3 was reported, during step 4 or at its end
    assert step in (3, 4)
    told = f"told to end by SIGTERM; step {step} of 8 is saved in {tmp_path}, and the same command goes on from there"
    assert told in train.said()
    assert train(tmp_path) == 0
    assert_same_end(tmp_path, uninterrupted)


def test_a_torn_checkpoint_costs_only_the_steps_since_the_one_before(train, uninterrupted, tmp_path):
    workdir = shutil.copytree(uninterrupted, tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints" / "8" / "params" / "d")
    train.said()
    assert train(workdir) == 0
    assert "checkpoints/8: the checkpoint cannot be read" in train.said()
    assert_same_end(workdir, uninterrupted)


def test_from_one_device_to_eight(train, uninterrupted, tmp_path):
    assert train(tmp_path, at=("after save", 4)) == -9
    assert train(tmp_path, devices=8) == 0, train.said()
    (_, state, data), (_, expected, expected_data) = state_and_data(tmp_path), state_and_data(uninterrupted)
    assert data == expected_data
    for name, value in expected.params.items():
        np.testing.assert_allclose(state.params[name], value, atol=1e-5, err_msg=name)
    for ours, theirs in zip(lines(tmp_path), lines(uninterrupted), strict=True):
        assert ours.keys() == theirs.keys()
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-5)
        assert ours["tokens"] == theirs["tokens"]
