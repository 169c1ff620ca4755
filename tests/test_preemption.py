"""A run that is told to end hears it once, and a second time ends as any process does."""

import os
import signal
import threading

import pytest

from wedlm_jax.preemption import Termination


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_noted_and_the_second_ends_the_process(number):
    before = signal.getsignal(number)
    with Termination() as termination:
        assert not termination.asked(1)
        os.kill(os.getpid(), number)
        assert termination.signal == number.name and termination.asked(2) and termination.asked(3)
        assert signal.getsignal(number) is before
    assert signal.getsignal(number) is before


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
