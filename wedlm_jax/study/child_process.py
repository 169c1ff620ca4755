"""A command of a study as a child process. Signals that the study gets are passed on to it: a training saves before both end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

from wedlm_jax.errors import UserError
from wedlm_jax.preemption import EXIT_STATUS, STARTED_BY

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # the last three are a terminal's


def run_command(arguments: list[str]) -> None:
    """Runs one command, in a process group of its own: what tells the study to end comes to it from this process alone, and so
    once, also where all of the study's group is told (Ctrl-C, `timeout`). This process outlives it, so that a training can save
    first; the study then ends too, with the status of the command.

    Args:
      arguments: those after `python -m`.

    Raises:
      UserError: the command failed.
      SystemExit: a signal ended it, or it is to be started again.
    """
    print("$ python -m", *arguments, flush=True)
    told: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)
        if child is not None:
            child.send_signal(number)

    def pause(number: int, frame: FrameType | None) -> None:
        """Ctrl-Z, which the system sends to the study's group alone: its training stops, and goes on, with it."""
        if child is not None:
            child.send_signal(signal.SIGSTOP)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # stops until `fg` or `bg`, but not where no shell could say that
        signal.signal(signal.SIGTSTP, pause)
        if child is not None:
            child.send_signal(signal.SIGCONT)

    with handling(dict.fromkeys(ENDING, note) | {signal.SIGTSTP: pause}):
        # Without the terminal's input: a group in the background that reads it is stopped.
        command = [sys.executable, "-m", *arguments]
        environment = {**os.environ, STARTED_BY: str(os.getpid())}
        child = subprocess.Popen(command, process_group=0, stdin=subprocess.DEVNULL, env=environment)
        for number in tuple(told):  # while it was being started
            child.send_signal(number)
        # Not `wait`: a signal that the system gives to another thread would be noted when that returns.
        while (code := child.poll()) is None:
            time.sleep(0.1)
    if code == EXIT_STATUS or (told and code == 0):
        sys.exit(EXIT_STATUS)
    for number in told:
        if code in (-number, 128 + number):
            sys.exit(128 + number)  # as shells have it
    if code:
        raise UserError(f"python -m {' '.join(arguments)} ended with {code}; mend what it says and run the study again")


@contextlib.contextmanager
def handling(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Signals go to `handlers`, but for what the study was started to ignore (`nohup`); in another thread than the main one they
    are left alone."""
    main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in handlers if main and signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handlers[number]) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
