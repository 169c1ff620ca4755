"""Threads share an engine: each gets what it would get alone, and one that steps and steps does not keep the others out."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest

from wedlm_jax import generate
from wedlm_jax.engine import QueueFull
from wedlm_jax.engine.turns import Turns

from .models import engine, same, talk, talker


def test_every_thread_gets_the_completion_of_its_request():
    prompts = [[5, 6, 7 + i] for i in range(12)]
    config = talk("verified", max_new_tokens=10)
    shared = engine()

    def ask(prompt):
        ticket = shared.submit(prompt, config)
        if prompt[-1] % 5 == 0:
            ticket.cancel()
        elif prompt[-1] % 2:
            list(ticket)
        return ticket.result()

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(ask, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer.finish_reason != "cancelled":
            assert same(answer, generate(talker(), [prompt], config)[0])
    assert sum(answer.finish_reason == "cancelled" for answer in answers) <= 3
    assert (shared.waiting, shared.running) == (0, 0)


def test_the_last_piece_is_not_lost_where_another_thread_brings_it_between_two_looks():
    served = engine()
    ticket = served.submit([5, 6, 7], talk("verified", max_new_tokens=10))

    class Looked(deque):
        """Another thread ends the request once this one has found no piece."""

        def __bool__(self) -> bool:
            found = len(self) > 0
            if not found:
                served.run()
            return found

    ticket._commits = Looked()
    assert [i for commit in ticket for i in commit.ids] == ticket.result().ids


def test_no_piece_is_lost_where_another_thread_brings_it_while_they_are_taken():
    served = engine()
    ticket = served.submit([5, 6, 7], talk("verified", max_new_tokens=10))

    class Read(deque):
        """Another thread ends the request once this one has read all pieces."""

        def __iter__(self):
            yield from [self[i] for i in range(len(self))]
            served.run()

    ticket._commits, taken = Read(), []
    while not ticket.done:
        taken += ticket.take()
        served.step()
    assert [i for commit in [*taken, *ticket.take()] for i in commit.ids] == ticket.result().ids


def test_a_step_is_had_by_all_that_wait_to_take_one_and_who_submits_waits_for_none(monkeypatch):
    served, taken, begun, goes_on = engine(), [], threading.Event(), threading.Event()

    def step():
        taken.append(threading.get_ident())
        begun.set()
        assert goes_on.wait(10)

    asking = threading.Semaphore(0)

    def ask():
        asking.release()
        served.step()

    monkeypatch.setattr(served, "_step", step)
    threads = [threading.Thread(target=ask) for _ in range(6)]
    threads[0].start()
    assert begun.wait(10)
    for thread in threads[1:]:
        thread.start()
    ticket = served.submit([5, 6, 7], talk("ar"))
    assert (ticket.status, served.waiting) == ("waiting", 1)
    for _ in threads:
        assert asking.acquire(timeout=10)
    time.sleep(0.2)  # between their saying so and their waiting
    goes_on.set()
    for thread in threads:
        thread.join(10)
    assert len(taken) == 1


def test_a_request_on_its_way_to_a_row_keeps_its_place_from_another_threads(monkeypatch):
    """As while the cache of its group is taken, which may take long."""
    served = engine(queue=2)
    tickets = [served.submit([5, 6, 7], talk("ar")) for _ in range(served.capacity)]

    class Enough(Exception):
        pass

    def open_group(*_):
        with pytest.raises(QueueFull):
            served.submit([5, 6, 7], talk("ar"))
        raise Enough

    monkeypatch.setattr(served, "_open", open_group)
    with pytest.raises(Enough):
        served.step()
    assert len(tickets) == served.waiting == served.capacity


def test_rows_that_change_places_are_each_met_once_by_another_thread(monkeypatch):
    served = engine()
    for length in (1, 2, 9):
        served.submit([5, 6, 7], talk("ar", max_new_tokens=length))
    served.step()
    [group] = served._groups.values()
    assert [row.ticket is not None for row in group.rows] == [False, False, True]
    met = []

    class Seen(list):
        def __setitem__(self, place, row):
            super().__setitem__(place, row)
            met.append(served.running)

    monkeypatch.setattr(group, "rows", Seen(group.rows))
    group._move_below(1)
    assert {*met, served.running} == {1} and group.rows[0].ticket is not None


def test_the_memory_that_is_held_can_be_asked_for_while_another_thread_opens_a_group(monkeypatch):
    served = engine()
    served.submit([5], talk("ar", max_new_tokens=1)).result()
    ((key, group),) = served._groups.items()

    def size(slots: int) -> int:
        served._groups[(*key, "of another thread")] = group
        return 7

    monkeypatch.setattr(served, "_bytes", size)
    assert served.cache_bytes == 7


def test_who_waits_has_the_next_turn():
    turns, taken, stop = Turns(), 0, threading.Event()
    waited: list[int] = []  # turns of the other thread

    def step_and_step():
        nonlocal taken
        while not stop.is_set():
            with turns:
                taken += 1
                time.sleep(0.002)

    thread = threading.Thread(target=step_and_step)
    thread.start()
    try:
        for _ in range(20):
            before = taken
            with turns, turns:  # a thread that has it may take it again
                waited.append(taken - before)
    finally:
        stop.set()
        thread.join()
    # Not of every one: the system may hold this thread up before it asks for its turn.
    assert sorted(waited)[10] <= 2


def test_a_thread_that_has_the_turn_takes_it_again_though_another_waits():
    turns, again = Turns(), threading.Event()

    def holds_it():
        with turns:
            waits.start()
            time.sleep(0.05)
            with turns:
                again.set()

    def waits_for_it():
        with turns:
            pass

    holder, waits = (threading.Thread(target=f, daemon=True) for f in (holds_it, waits_for_it))
    holder.start()
    assert again.wait(10)
    waits.join(10)
    assert not waits.is_alive()
