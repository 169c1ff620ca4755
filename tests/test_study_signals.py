"""What tells a study to end, or to pause, reaches its training, which saves first; and the training ends with its study."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from wedlm_jax.study import Measure, Stage, Study, run_study
from wedlm_jax.study.child_process import ENDING, handling

STUDY = Study("x", {"a": (Stage("b"),)}, (Measure("loss", "loss"),), seeds=(0,))
QUIET = Console(quiet=True)

# Stands for a training: told to end, it takes a while to save, and ends with the status that it is given.
STAND_IN = """
import pathlib, signal, sys, time

def save(number, frame):
    time.sleep(0.5)
    pathlib.Path("saved").write_text(signal.Signals(number).name)
    sys.exit(int(sys.argv[1]))

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, save)
pathlib.Path("started").touch()
time.sleep(30)
"""


@pytest.mark.parametrize(
    ("number", "ends_with", "status"),
    [
        (signal.SIGTERM, 75, 75),
        (signal.SIGINT, 75, 75),
        (signal.SIGTERM, 0, 75),
        (signal.SIGINT, 130, 130),
        (signal.SIGHUP, 129, 129),
    ],
)
def test_a_study_that_is_told_to_end_lets_its_training_save_and_ends_as_it_does(
    number, ends_with, status, tmp_path, monkeypatch
):
    """The signal comes to the study alone, there to any of its threads, and the study sends it on."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("wedlm_jax.study.run._training", lambda *stage: ("stand_in", str(ends_with)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def tell() -> None:
        started, limit = tmp_path / "started", time.monotonic() + 30
        while not started.is_file() and time.monotonic() < limit:
            time.sleep(0.01)
        signal.pthread_kill(threading.get_ident(), number)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {n: signal.signal(n, signal.default_int_handler) for n in numbers}
    teller = threading.Thread(target=tell)
    teller.start()
    try:
        with pytest.raises(SystemExit) as caught:
            run_study(STUDY, tmp_path, console=QUIET)
        assert {n: signal.getsignal(n) for n in before} == dict.fromkeys(before, signal.default_int_handler)
    finally:
        teller.join()
        for n, handler in before.items():
            signal.signal(n, handler)
    assert ((tmp_path / "saved").read_text(), caught.value.code) == (number.name, status)


# Stands for a training, and counts how often it is told to end while it saves.
COUNTING = """
import os, pathlib, signal, sys, time

told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
pathlib.Path("process").write_text(str(os.getpid()))
pathlib.Path("started").touch()
end = time.monotonic() + 30
while not told and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(1)
pathlib.Path("told").write_text(str(len(told)))
sys.exit(75)
"""

# Runs training.py as its training.
STUDY_ALONE = """
from pathlib import Path
from wedlm_jax import study

study.run._training = lambda *stage: ("training",)
arms = {"a": (study.Stage("b"),)}
study.run_study(study.Study("x", arms, (study.Measure("loss", "loss"),), (0,)), Path("."))
"""


def start_study(folder: Path, training: str, **group) -> subprocess.Popen:
    """A study in a process and session (unless `group` says otherwise) of its own, once its training, the text of a module, has
    written `started`."""
    (folder / "training.py").write_text(training)
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}  # no thread but the main one
    study = subprocess.Popen(
        [sys.executable, "-c", STUDY_ALONE], cwd=folder, env=environment, **group or dict(start_new_session=True)
    )
    wait_until((folder / "started").exists, or_else=lambda: study.poll() is not None)
    return study


def wait_until(reached, or_else=lambda: False) -> None:
    limit = time.monotonic() + 60
    while not reached() and not or_else() and time.monotonic() < limit:
        time.sleep(0.01)


def test_a_training_is_told_once_to_end_where_the_whole_group_of_the_study_is(tmp_path):
    """As `timeout` does it, or Ctrl-C in a terminal."""
    study = start_study(tmp_path, COUNTING)
    os.kill(study.pid, signal.SIGSTOP)  # so that what it sends on does not come together with what the group is sent
    os.killpg(study.pid, signal.SIGTERM)
    time.sleep(0.3)
    os.kill(study.pid, signal.SIGCONT)
    assert study.wait(60) == 75 and (tmp_path / "told").read_text() == "1"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_training_stops_and_goes_on_with_its_study(tmp_path):
    """Ctrl-Z and `fg`."""
    study = start_study(tmp_path, COUNTING, process_group=0)
    processes = (study.pid, int((tmp_path / "process").read_text()))
    os.kill(study.pid, signal.SIGTSTP)
    wait_until(lambda: stopped(*processes) == [True, True])
    assert stopped(*processes) == [True, True]
    os.kill(study.pid, signal.SIGCONT)
    wait_until(lambda: stopped(*processes) == [False, False])
    assert stopped(*processes) == [False, False]
    study.terminate()
    assert study.wait(60) == 75


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_study_that_no_shell_could_let_go_on_is_not_stopped(tmp_path):
    """`ssh -t host python ...`: the group of a session's first process has no shell beside it."""
    study = start_study(tmp_path, COUNTING)
    os.kill(study.pid, signal.SIGTSTP)
    time.sleep(0.5)
    assert stopped(study.pid, int((tmp_path / "process").read_text())) == [False, False]
    study.terminate()
    assert study.wait(60) == 75


def stopped(*processes: int) -> list[bool]:
    """As the third field of /proc/ID/stat tells it, behind the name."""
    return [Path(f"/proc/{i}/stat").read_text().rpartition(")")[2].split()[0] == "T" for i in processes]


# Stands for a training of the real command: waits until it is told to end.
WAITING = """
import pathlib, sys, time
from wedlm_jax import train
from wedlm_jax.preemption import Termination

def waits(experiment, workdir):
    with Termination() as termination:
        pathlib.Path("started").touch()
        end = time.monotonic() + 30
        while termination.signal is None and time.monotonic() < end:
            time.sleep(0.01)
    pathlib.Path("told").write_text(str(termination.signal))
    return False

train.train = waits
sys.argv = ["train", "--exp", "quickstart_base"]
train.main()
"""


def test_a_training_is_told_to_end_when_its_study_is_killed(tmp_path):
    """Started again, the study would train in the same workdir."""
    study = start_study(tmp_path, WAITING)
    study.kill()
    study.wait()
    told = tmp_path / "told"
    wait_until(lambda: told.exists() and told.read_text() != "")
    assert told.read_text() == "SIGTERM"


# Stands for an evaluation of the real command.
EVALUATING = """
import os, pathlib, sys, time
from wedlm_jax import evaluate

def decodes(args, name):
    pathlib.Path("process").write_text(str(os.getpid()))
    pathlib.Path("started").touch()
    time.sleep(30)

evaluate.plan_experiment = decodes
sys.argv = ["evaluate", "--exp", "quickstart_base"]
evaluate.main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_evaluation_ends_with_its_study(tmp_path):
    """Else it holds the device beside the next one."""
    study = start_study(tmp_path, EVALUATING)
    evaluation = Path("/proc", (tmp_path / "process").read_text(), "cmdline")
    study.kill()
    study.wait()
    wait_until(lambda: not evaluation.exists() or not evaluation.read_text())
    assert not evaluation.exists() or not evaluation.read_text(), "ended, or ended and not yet asked for its status"


def test_a_training_that_saves_is_left_to_it_when_its_study_is_killed(tmp_path):
    """Told by the study, which an impatient user then kills: to look counts as no second signal."""
    saving = WAITING.replace('    pathlib.Path("told")', '        time.sleep(3)\n    pathlib.Path("told")')
    study = start_study(tmp_path, saving)
    study.terminate()
    time.sleep(1.5)
    study.kill()
    study.wait()
    told = tmp_path / "told"
    wait_until(lambda: told.exists() and told.read_text() != "")
    assert told.read_text() == "SIGTERM"


def test_what_a_study_was_started_to_ignore_it_ignores():
    """`nohup`: the signals of a terminal that closes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handling(dict.fromkeys(ENDING, lambda number, frame: None)):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)
