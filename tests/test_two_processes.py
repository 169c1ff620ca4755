"""Two real processes over loopback: what they learn is what one learns, and where one is killed, the other says so and ends."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.conftest import FULL
from tests.tiny_training import EXPERIMENT
from wedlm_jax.checkpoint import load_params, saved_steps
from wedlm_jax.lifeline import BAD_INPUT, TRY_AGAIN

RUNNER = Path(__file__).parent / "one_of_several.py"
STEPS, KILLED_AT = 6, 5  # saved every 2 steps; the save of step 4 waits until that of step 2 is done


only_full = pytest.mark.skipif(not FULL, reason="two processes more: launch/test.sh --full")


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


def start(
    folder: Path,
    workdir: str,
    index: int,
    count: int,
    port: int,
    die_at: int,
    overrides: Sequence[str],
    cwd: Path | None,
) -> subprocess.Popen:
    devices = f"--xla_force_host_platform_device_count={2 // count}"  # of a flag given twice the last counts
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {devices}",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(RUNNER.parents[1]),
        "WEDLM_COORDINATOR": f"127.0.0.1:{port}",
        "WEDLM_NUM_PROCESSES": str(count),
        "WEDLM_PROCESS_ID": str(index),
        "DIE_AT": str(die_at),
    }
    flags = ["--exp", str(folder / "tiny_pair.py"), "--workdir", str(folder / workdir)]
    fixed = [f"train.steps={STEPS}", "data.num_groups=2", "mesh.data=2", "train.tensorboard=false"]
    fixed += ["train.eval_every=6", "train.eval_batches=1", "train.eval_samples=0"]
    command = [sys.executable, str(RUNNER), *flags, *fixed, *overrides]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, cwd=cwd)


def run(
    folder: Path,
    workdirs: Sequence[str],
    *overrides: str,
    die_at: tuple[int, ...] = (0, 0),
    own: Sequence[Sequence[str]] = ((), ()),  # overrides of each process alone
    cwds: Sequence[Path | None] = (None, None),
) -> list[tuple[int, str]]:
    """Exit status and stderr of each process, as many as there are workdirs."""
    port, count = free_pair_of_ports(), len(workdirs)
    processes = [
        start(folder, workdir, index, count, port, die_at[index], [*overrides, *own[index]], cwds[index])
        for index, workdir in enumerate(workdirs)
    ]
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


def losses(workdir: Path) -> list[float]:
    """Of every step, and of the held-out rows."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line["loss"] for line in lines] + [lines[-1]["validation_ar_loss"], lines[-1]["validation_mlm_loss"]]


@pytest.fixture(scope="module")
def one(folder):
    """What a single process gives."""
    [(status, error)] = run(folder, ["one"])
    assert status == 0, error
    return folder / "one"


def assert_learned_the_same(workdir: Path, one: Path) -> None:
    np.testing.assert_allclose(losses(workdir), losses(one), rtol=2e-5)
    (_, expected), (_, params) = load_params(one), load_params(workdir)
    for name, value in jax.device_get(expected).items():
        np.testing.assert_allclose(params[name], value, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    "sizes", [("mesh.data=2", "mesh.tensor=1"), pytest.param(("mesh.data=1", "mesh.tensor=2"), marks=only_full)]
)
def test_one_of_two_is_killed_and_both_resume_to_what_one_process_gives(folder, one, sizes):
    """Where the tensor axis lies over them, both hold all rows; else each its own."""
    workdir = folder / sizes[1]
    (survivor, said), (killed, _) = run(folder, [sizes[1]] * 2, *sizes, die_at=(0, KILLED_AT))
    assert killed == -9
    assert survivor == TRY_AGAIN, said
    assert "error: process 1 of 2 is gone" in said and "so process 0 stops too; start all of them again" in said
    assert saved_steps(workdir) in ([2], [2, 4])

    for status, error in run(folder, [sizes[1]] * 2, *sizes):
        assert status == 0, error
    assert_learned_the_same(workdir, one)


@pytest.mark.parametrize("begun", [False, pytest.param(True, marks=only_full)])
def test_two_processes_that_do_not_share_a_workdir_are_told(folder, one, begun):
    """As with disks of their own, the usual slip on a pod slice: else each would keep half of every checkpoint. Also where both
    have a copy of the same run."""
    for place in ("here", "elsewhere") if begun else ():
        shutil.rmtree(folder / place, ignore_errors=True)
        shutil.copytree(one, folder / place)
    (here, _), (elsewhere, said) = run(folder, ["here", "elsewhere"])
    assert (here, elsewhere) == (BAD_INPUT, BAD_INPUT)
    assert "elsewhere: what process 0 has written is not here; choose a --workdir that all processes share" in said


def test_processes_with_other_settings_are_told_in_all_of_them(folder):
    """Another seed would train a wrong model, another number of steps would wait for ever."""
    told = "process 1 was started with other settings than process 0 (of 0 -> of 1: train.seed: 0 -> 7; train.steps: 6 -> 20)"
    for status, said in run(folder, ["unlike"] * 2, own=((), ("train.seed=7", "train.steps=20"))):
        assert status == BAD_INPUT
        assert f"error: {told}; start all of them with the same command" in said
    assert not (folder / "unlike").exists()


def test_processes_whose_data_differ_are_told_in_all_of_them(folder):
    """As where each has a copy on a disk of its own, and one of them is old."""
    disks = folder / "disk0", folder / "disk1"
    for disk, count in zip(disks, (120, 90), strict=True):
        disk.mkdir()
        (disk / "lines.jsonl").write_text("".join(json.dumps({"text": f"line {line}"}) + "\n" for line in range(count)))
    for status, said in run(folder, ["data"] * 2, "data.source=text", "data.path=lines.jsonl", cwds=disks):
        assert status == BAD_INPUT
        assert "error: lines.jsonl has 90 records for process 1 and 120 for process 0; give all" in said


FAILS = """
import os, time
from wedlm_jax.distributed import together
from wedlm_jax.errors import UserError, entry

@entry
def main():
    with together():
        time.sleep(2 * int(os.environ["WEDLM_PROCESS_ID"]))
        raise UserError("a file is missing")

main()
"""


def pair(program: str, *arguments: str, timeout: int = 120) -> list[tuple[int, str]]:
    """Exit status and stderr of a program in two processes of one device each."""
    place = {"WEDLM_COORDINATOR": f"127.0.0.1:{free_pair_of_ports()}", "WEDLM_NUM_PROCESSES": "2"}
    devices = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"}
    shared = os.environ | place | devices | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(RUNNER.parents[1])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env=shared | {"WEDLM_PROCESS_ID": str(index)}, stderr=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=timeout)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


def test_bad_input_is_the_status_of_both_though_one_comes_to_it_later():
    """The highest status is what a scheduler sees, and 75 it would start again."""
    (first, said_first), (second, said_second) = pair(FAILS)
    assert (first, second) == (BAD_INPUT, BAD_INPUT), said_first + said_second
    assert "error: a file is missing" in said_first
    assert "another of the 2 processes ended with bad input" in said_second


TOLD_TO_END = """
import os, signal, time
from wedlm_jax.distributed import together

with together():
    if os.environ["WEDLM_PROCESS_ID"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)
"""


def test_one_that_is_told_to_end_before_it_trains_ends_and_with_it_the_other():
    """Jax's own service for preemptions would swallow the signal."""
    (survivor, said), (told, _) = pair(TOLD_TO_END)
    assert (survivor, told) == (TRY_AGAIN, -signal.SIGTERM)
    assert "process 1 of 2 is gone" in said and "preemption" not in said


DISK_IS_FULL = """
import os, resource, signal, sys
from pathlib import Path
from tests.tiny_training import MODEL, SETTINGS
from wedlm_jax.checkpoint import Checkpoints
from wedlm_jax.distributed import together
from wedlm_jax.errors import entry
from wedlm_jax.sharding import MeshConfig, make_mesh
from wedlm_jax.train_state import from_seed

@entry
def main():
    workdir, full = sys.argv[1:]
    with together(), Checkpoints(Path(workdir), keep=2) as checkpoints:
        state = from_seed(MODEL, SETTINGS.optimizer, make_mesh(MeshConfig(data=1, fsdp=2)), 0)
        checkpoints.save(state, 1, {"next_example": [1]}, {"skipped_in_row": 0})
        checkpoints.wait()
        if os.environ["WEDLM_PROCESS_ID"] == full:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        checkpoints.save(state, 2, {"next_example": [2]}, {"skipped_in_row": 0})

main()
"""


@pytest.mark.parametrize("full", [1, pytest.param(0, marks=only_full)])
def test_where_one_cannot_write_its_part_of_a_checkpoint_both_end(tmp_path, full):
    """Left to itself orbax lets each wait for the other, for 20 minutes."""
    ends = pair(DISK_IS_FULL, str(tmp_path), str(full))
    (status, said), (other, told) = ends[full], ends[1 - full]
    assert (status, other) == (BAD_INPUT, BAD_INPUT), said + told
    assert "checkpoints/2: the checkpoint could not be written (" in said and "step 1 is kept; make room" in said
    assert "another of the 2 processes ended with bad input" in told
    assert saved_steps(tmp_path) == [1]


DAMAGED = """
import sys
from pathlib import Path
import jax
from tests.tiny_training import MODEL, SETTINGS
from wedlm_jax.checkpoint import Checkpoints
from wedlm_jax.distributed import any_process, is_main, together
from wedlm_jax.errors import entry
from wedlm_jax.sharding import MeshConfig, make_mesh
from wedlm_jax.train_state import abstract_state, from_seed

@entry
def main():
    with together():
        mesh = make_mesh(MeshConfig(data=1, fsdp=2))
        state = from_seed(MODEL, SETTINGS.optimizer, mesh, 0)
        with Checkpoints(Path(sys.argv[1]), keep=2) as checkpoints:
            for step in (1, 2):
                checkpoints.save(state, step, {"next_example": [step]}, {"skipped_in_row": 0})
        for file in Path(sys.argv[1]).glob("checkpoints/2/*/ocdbt.process_1/d/*") if is_main() else ():
            file.write_bytes(b"")
        any_process(False)
        with Checkpoints(Path(sys.argv[1]), keep=2) as checkpoints:
            step, state, data = checkpoints.restore(abstract_state(MODEL, SETTINGS.optimizer, mesh))
            assert (step, data) == (1, {"next_example": [1]})
            checkpoints.save(state, 2, data, {"skipped_in_row": 0})

main()
"""


def test_where_one_cannot_read_its_part_of_the_newest_checkpoint_both_take_the_one_before(tmp_path):
    """And save on; the one that could not read says why."""
    (status, said), (other, why) = pair(DAMAGED, str(tmp_path))
    assert (status, other) == (0, 0), said + why
    assert (
        "checkpoints/2: the checkpoint cannot be read (in another process, see its output); going on from step 1"
        in said
    )
    assert "checkpoints/2: the checkpoint cannot be read (" in why and "another process" not in why
    assert saved_steps(tmp_path) == [1, 2]
