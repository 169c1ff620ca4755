"""A run that is told to end hears it once, and a second time ends as any process does."""

import math
import os
import pty
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from wedlm_jax import preemption
from wedlm_jax.preemption import Termination


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def number(request):
    return request.param


@pytest.fixture
def heard(number):
    """What comes to the handler from before."""
    heard = []
    before = signal.signal(number, lambda number, frame: heard.append(number))
    yield heard
    signal.signal(number, before)


def test_the_first_signal_is_noted_and_a_later_one_ends_the_process(number, heard, monkeypatch):
    before = signal.getsignal(number)
    monkeypatch.setattr(preemption, "ECHO_SECONDS", 0.0)
    with Termination() as termination:
        assert not termination.asked(1)
        os.kill(os.getpid(), number)
        assert termination.signal == number.name and termination.asked(2) and termination.asked(3)
        assert heard == []
        os.kill(os.getpid(), number)
        assert heard == [number] and signal.getsignal(number) is before
    assert signal.getsignal(number) is before


def test_a_signal_that_comes_twice_at_once_is_noted_as_one(number, heard):
    """As one of a group, and once more from the study that runs the training."""
    before = signal.getsignal(number)
    with Termination() as termination:
        os.kill(os.getpid(), number)
        time.sleep(0.05)
        os.kill(os.getpid(), number)
        assert heard == [] and termination.signal == number.name
    assert signal.getsignal(number) is before


def test_what_it_was_started_to_ignore_it_ignores():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with Termination() as termination:
            os.kill(os.getpid(), signal.SIGHUP)
            assert termination.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


# Prints on after the terminal is closed, as a training does before it saves. The terminal is its session's own, so it is the
# system that tells it, and once.
PRINTING = """
import fcntl, signal, sys, termios, time
from wedlm_jax.preemption import Termination

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # though the tests themselves be run by nohup
with Termination() as termination:
    print("started", flush=True)
    while termination.signal is None:
        time.sleep(0.01)
    for stream in (sys.stdout, sys.stderr):
        print("a line", file=stream, flush=True)
    open(sys.argv[1], "w").write(termination.signal)
"""


def test_a_run_whose_terminal_closes_can_still_print_and_save(tmp_path):
    terminal, end = pty.openpty()
    run = subprocess.Popen(
        [sys.executable, "-c", PRINTING, str(tmp_path / "saved")], stdin=end, stdout=end, stderr=end,
        cwd=Path(__file__).parents[1], start_new_session=True,
    )  # fmt: skip
    os.close(end)
    assert os.read(terminal, 100).startswith(b"started")
    os.close(terminal)
    assert run.wait(60) == 0 and (tmp_path / "saved").read_text() == "SIGHUP"


# Prints as a training does, the bar's lines and its own, after the reader of its output has died of the same Ctrl-C.
PIPED = """
import signal, sys, time
from wedlm_jax.metrics.progress import ProgressBar
from wedlm_jax.preemption import Termination
from wedlm_jax.train import say

signal.signal(signal.SIGINT, signal.default_int_handler)
with Termination() as termination, ProgressBar("a", start_step=0, total_steps=2) as bar:
    say("started")
    while sys.argv[2] == "told" and termination.signal is None:
        time.sleep(0.01)
    sys.stdin.read()  # until the test has closed the other end
    bar.print("a line")
    say("a line")
    open(sys.argv[1], "w").write("saved")
"""


@pytest.mark.parametrize("told", [True, False])
def test_a_run_that_is_told_to_end_saves_though_nobody_reads_it_any_more(tmp_path, told):
    run = subprocess.Popen(
        [sys.executable, "-c", PIPED, str(tmp_path / "saved"), "told" if told else "not told"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1], start_new_session=True,
    )  # fmt: skip
    assert run.stdout.readline() == b"started\n"
    if told:
        os.kill(run.pid, signal.SIGINT)
    run.stdout.close()
    run.stdin.close()
    assert (run.wait(60), (tmp_path / "saved").exists()) == ((0, True) if told else (1, False))


@pytest.mark.parametrize(("seconds", "steps"), [(0.01, 10), (1.2, 4), (30.0, 1)])
def test_several_processes_agree_every_few_seconds_or_steps_on_the_slowest_clock(seconds, steps, monkeypatch):
    """So that a run whose steps are slow hears it in the time that a cluster leaves it."""
    agreed, clock = [], [0.0]

    def all_gather(own):
        agreed.append(step)
        return np.stack([own, [step == 60, seconds if len(agreed) > 2 else math.inf]])

    monkeypatch.setattr(preemption, "all_gather", all_gather)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(preemption, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    termination = Termination()
    for step in range(21, 61):
        clock[0] += seconds / 2  # of this process
        assert termination.asked(step) == (step == 60 and step in agreed)
    assert agreed[:3] == [21, 22, 23]  # the first steps are compiled in their time
    assert set(np.diff(agreed[2:])) == {steps}


def test_several_processes_agree_before_what_takes_long(monkeypatch):
    told = [0.0]
    monkeypatch.setattr(preemption, "all_gather", lambda own: np.stack([own, [told[0], 0.01]]))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    termination = Termination()
    assert not any(termination.asked(step) for step in range(1, 4))
    told[0] = 1.0
    assert not termination.asked(4) and termination.asked(5, at_once=True)
    assert not termination.asked(5), "agreed already"


def test_in_another_thread_signals_are_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    asked = []

    def run():
        with Termination() as termination:
            asked.append(termination.asked(1))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert asked == [False] and signal.getsignal(signal.SIGTERM) is before
