"""Two real processes over loopback: one is killed, the other says so and ends, and both resume to what one process gives."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.tiny_training import EXPERIMENT
from wedlm_jax.checkpoint import load_params, saved_steps
from wedlm_jax.lifeline import TRY_AGAIN

RUNNER = Path(__file__).parent / "one_of_several.py"
STEPS, KILLED_AT = 6, 5  # saved every 2 steps; the save of step 4 waits until that of step 2 is done


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_processes")
    (folder / "tiny_pair.py").write_text(
        "import dataclasses\n"
        "from wedlm_jax.experiment import *\n"
        "def tiny_pair():\n"
        f"    return Experiment.from_json('''{EXPERIMENT.to_json()}''')\n"
    )
    return folder


def start(folder: Path, workdir: str, index: int, count: int, port: int, die_at: int = 0) -> subprocess.Popen:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // count}",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(RUNNER.parents[1]),
        "WEDLM_COORDINATOR": f"127.0.0.1:{port}",
        "WEDLM_NUM_PROCESSES": str(count),
        "WEDLM_PROCESS_ID": str(index),
        "DIE_AT": str(die_at),
    }
    flags = ["--exp", str(folder / "tiny_pair.py"), "--workdir", str(folder / workdir)]
    overrides = [f"train.steps={STEPS}", "data.num_groups=2", "mesh.data=2", "train.tensorboard=false"]
    command = [sys.executable, str(RUNNER), *flags, *overrides]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder: Path, workdir: str, count: int, die_at: tuple[int, ...] = (0, 0)) -> list[tuple[int, str]]:
    """Exit status and stderr of each process."""
    port = free_pair_of_ports()
    processes = [start(folder, workdir, index, count, port, die_at[index]) for index in range(count)]
    try:
        errors = [process.communicate(timeout=250)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


def free_pair_of_ports() -> int:
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port - 1))
            except OSError:
                continue
            return port
    raise AssertionError("no two free ports side by side")


def losses(workdir: Path) -> list[tuple[int, float]]:
    lines = (json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


def test_one_of_two_is_killed_and_both_resume_to_what_one_process_gives(folder):
    [(status, error)] = run(folder, "one", 1)
    assert status == 0, error
    (survivor, said), (killed, _) = run(folder, "two", 2, die_at=(0, KILLED_AT))
    assert killed == -9
    assert survivor == TRY_AGAIN, said
    assert "error: process 1 of 2 is gone" in said and "so process 0 stops too; start all of them again" in said
    assert saved_steps(folder / "two") in ([2], [2, 4])

    for status, error in run(folder, "two", 2):
        assert status == 0, error
    assert [step for step, _ in losses(folder / "two")] == list(range(1, STEPS + 1))
    np.testing.assert_allclose(losses(folder / "two"), losses(folder / "one"), rtol=2e-5)
    (_, expected), (_, params) = load_params(folder / "one"), load_params(folder / "two")
    for name, value in jax.device_get(expected).items():
        np.testing.assert_allclose(params[name], value, atol=1e-4, err_msg=name)
