"""A run that is told to end, or whose study is gone: it finishes its step, saves and says so, with an exit status of its own."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from types import FrameType
from typing import ClassVar

import jax
import numpy as np

from wedlm_jax.distributed import all_gather
from wedlm_jax.errors import forget_closed_output
from wedlm_jax.lifeline import TRY_AGAIN

EXIT_STATUS = TRY_AGAIN  # the same command goes on from the saved step
# With several processes: to agree costs a wait for the devices, and a cluster gives a run that it ends as little as 30 seconds.
STEPS_BETWEEN_AGREEMENTS = 10  # at most
SECONDS_BETWEEN_AGREEMENTS = 5.0  # or one step
ECHO_SECONDS = 1.0  # in which one that is told to end may hear it twice: as one of a group, and from what started it
STARTED_BY = "WEDLM_JAX_STARTED_BY"  # in the environment of a training: the id of the study that it ends with
_SECONDS_BETWEEN_LOOKS = 1.0


def end_with_study() -> None:
    """Tells this process to end once the study that started it, if one did, is gone without having told it (kill -9): started
    again, that would train in the same workdir beside this one."""
    if study := os.environ.pop(STARTED_BY, None):
        threading.Thread(target=_end_without, args=(int(study),), daemon=True, name="end with study").start()


def _end_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    if not Termination.told:  # else it is saving, and another signal would end that
        os.kill(os.getpid(), signal.SIGTERM)


def go_on_unread() -> bool:
    """Whether a run is to go on that finds a pipe broken: one told to end is, since `| tee log` dies of the same Ctrl-C and
    nothing would be saved. What it prints from there on goes nowhere."""
    if Termination.told:
        forget_closed_output()
    return Termination.told


class Termination:
    """Notes a SIGTERM, a SIGHUP (the terminal closes) or Ctrl-C instead of dying of it; another one, a second later or more, ends
    the process as ever. What the process was started to ignore (`nohup`) it ignores.

    Only while it is entered, and only in the main thread: signals go nowhere else.
    """

    told: ClassVar[bool] = False  # whether any of this process has noted one

    def __init__(self) -> None:
        self.signal: str | None = None  # the name of the first one that came to this process
        self._noted_at = 0.0
        self._before: dict[int, object] = {}
        self._agreed = (0, -math.inf)  # after which step the processes did so last, and when
        self._seconds = math.inf  # of a step before that
        self._agree_at = 0  # the same step in all processes

    def asked(self, step: int, *, at_once: bool = False) -> bool:
        """Whether the run is to end after this step: the same answer in all processes, which must all ask.

        Args:
          at_once: several processes agree now, since what comes next takes long; asked once a step.
        """
        told = self.signal is not None
        if jax.process_count() == 1:
            return told
        if step < self._agree_at and not at_once:
            return False
        # The seconds up to the agreement before this one: this one's are measured behind it, and differ between the processes.
        one_is_told, seconds = all_gather(np.asarray([told, self._seconds], np.float32)).max(axis=0)
        (before, since), now = self._agreed, time.monotonic()
        self._seconds, self._agreed = (now - since) / (step - before), (step, now)
        self._agree_at = step + int(np.clip(SECONDS_BETWEEN_AGREEMENTS / seconds, 1, STEPS_BETWEEN_AGREEMENTS))
        return bool(one_is_told)

    def __enter__(self) -> Termination:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            forget_closed_output()  # or the next line that is printed ends the run unsaved
        Termination.told = True
        if self.signal is None:
            self.signal, self._noted_at = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._noted_at >= ECHO_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}
