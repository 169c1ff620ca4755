"""A run computes as few rows as pays, and nobody can tell from what it brings."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wedlm_jax import generate
from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.loop import Program
from wedlm_jax.engine.programs import exchange_rows, open_rows, run_rows
from wedlm_jax.engine.row_counts import LEAST_SECONDS, ROUNDING, RowCounts, row_counts
from wedlm_jax.model.window_table import ON_ACCELERATOR, ON_CPU, WindowTable

from ..conftest import FULL
from ..decode.models import LOOPS, config_of, tiny_model
from ..decode.test_stream import TEXT, reciter, settings
from .models import engine, same, talk, talker


@given(st.integers(1, 200), st.integers(1, 64), st.floats(0.0005, 0.5))
def test_rounding_up_to_a_number_of_rows_costs_little_or_is_to_less_than_double(rows, slots, a_slot):
    table = WindowTable.linear(a_slot)
    counts = row_counts(rows, slots, table)
    assert counts[-1] == rows and list(counts) == sorted(set(counts))
    for needed in range(1, rows + 1):
        count = min(c for c in counts if c >= needed)
        little = table.cost(count * slots) <= (1 + ROUNDING) * table.cost(needed * slots)
        assert little or count <= 2 * needed


@pytest.mark.parametrize(
    "rows, slots, table, expected",
    [
        (8, 32, ON_CPU, (1, 2, 4, 8)),
        (8, 1, ON_CPU, (2, 8)),
        (64, 1, ON_ACCELERATOR, (64,)),
        (64, 32, ON_ACCELERATOR, (3, 8, 16, 32, 64)),
        (1, 32, ON_CPU, (1,)),
    ],
)
def test_there_are_more_numbers_of_rows_the_dearer_a_slot(rows, slots, table, expected):
    assert row_counts(rows, slots, table) == expected


def test_fewer_rows_are_computed_once_they_would_have_saved_what_compiling_costs():
    counts = RowCounts(8, 32, ON_CPU)
    for seconds in (3.0, 0.1):  # what was compiled before, or came from the cache on disk, is no measure of it
        counts.compiled(seconds)
    saving = 1 - ON_CPU.cost(32) / ON_CPU.cost(8 * 32)
    runs = 0
    while counts.choose(1) == 8:
        counts.ran(1, 8, 0.1)
        runs += 1
    assert counts.choose(1) == 1 and runs == int(np.ceil(3.0 / (0.1 * saving)))
    assert counts.choose(2) == 8  # which did not come


def test_a_number_that_serves_all_that_come_is_preferred_to_each_of_them():
    counts = RowCounts(8, 32, ON_CPU)
    while counts.choose(1) == 8:
        for running in (1, 2, 3, 4):
            counts.ran(running, 8, 0.05)
    assert counts.choose(1) == counts.choose(4) == 4


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0.01, 0.5)), max_size=200))
def test_no_more_is_lost_to_rows_in_vain_between_two_programs_than_one_costs_and_a_run(load):
    counts, lost = RowCounts(8, 32, ON_CPU), 0.0
    for running, seconds in load:
        computed = counts.choose(running)
        assert computed >= running
        counts.ran(running, computed, seconds)
        # Between what was computed and the best for this load alone; others may have been served by the same program.
        best = min(c for c in (1, 2, 4, 8) if c >= running)
        lost += seconds * (1 - ON_CPU.cost(32 * best) / ON_CPU.cost(32 * computed))
    assert lost <= 3 * 3 * (LEAST_SECONDS + 0.5)  # three programs, and no more than three numbers gather before each


def test_where_rows_lie_on_several_devices_all_are_computed():
    counts = RowCounts(8, 32, ON_CPU, fixed=True)
    for _ in range(1000):
        counts.ran(1, 8, 10.0)
    assert counts.choose(1) == 8


@pytest.mark.parametrize("loop", LOOPS if FULL else ["verified"])
@pytest.mark.usefixtures("at_once")
def test_requests_get_what_they_would_alone_however_few_rows_are_computed(loop):
    """Rows change places as neighbours end, are cancelled and come, and every one keeps what its cache holds."""
    served = engine(rows=8)
    configs = [talk(loop, max_new_tokens=n, temperature=t) for n, t in ((2, 0.0), (20, 0.7), (5, 0.0), (11, 0.0))]
    prompts = [[k, 2 * k, 7] for k in range(1, 13)]
    tickets, computed = [], set()
    for number, prompt in enumerate(prompts):
        tickets.append(served.submit(prompt, configs[number % 4], row=number))
        for _ in range(2):
            served.step()
            computed.update(rows for group in served._groups.values() for rows in group._counts._used)
        if number == 6:
            tickets[5].cancel()
    served.run()
    assert len(computed) > 1
    alone = generate(talker(), prompts, [configs[k % 4] for k in range(12)])
    for number, (ticket, one) in enumerate(zip(tickets, alone, strict=True)):
        if ticket.completion.finish_reason == "cancelled":
            assert number == 5 and ticket.completion.ids == one.ids[: len(ticket.completion.ids)]
        else:
            assert same(ticket.completion, one)
    # What the rows hold goes with them.
    again = served.submit(prompts[9] + tickets[9].completion.ids[:4], configs[0])
    assert again.result() and again.reused_tokens >= 6


@pytest.mark.usefixtures("at_once")
def test_what_is_in_use_lies_first_and_what_is_left_out_is_not_computed():
    model = reciter("abcdefgh")
    model.window_table = ON_CPU
    served, config = engine(model, rows=8, steps=1), settings("ar", max_new_tokens=40)
    tickets = [served.submit([k], config) for k in range(1, 5)]
    served.step()
    (group,) = served._groups.values()
    for ticket in tickets[:3]:
        ticket.cancel()
    held = {tuple(row.tokens[:1]) for row in group.rows}
    for _ in range(3):  # until the program for two rows pays
        served.step()
    assert group.rows[0].ticket is tickets[3]
    assert {tuple(row.tokens[:1]) for row in group.rows} == held
    before = np.array(group._state.forwards)
    group.launch(1)
    assert group._run.rows == 2
    group.collect()
    assert (np.array(group._state.forwards) - before).tolist() == [1] + [0] * 7


@pytest.mark.usefixtures("at_once")
def test_an_automatic_window_goes_by_the_rows_that_are_computed():
    model = reciter(TEXT, end=True, tail="never shown")
    model.window_table = ON_ACCELERATOR
    served = engine(model, rows=20, steps=1)
    ticket = served.submit("x", settings("verified", window_size="auto", entropy_threshold=0.0, text_drafts=False))
    served._admit()
    (group,) = served._groups.values()
    widest = []
    while not ticket.done:
        served.step()
        widest.append(int(np.asarray(group._settings.window_size)[0]))
    few = min(group._counts._used)
    assert few < 20 and widest[0] == ON_ACCELERATOR.widest(20) < widest[-1] == ON_ACCELERATOR.widest(few)
    assert ticket.completion.text == TEXT


@pytest.mark.parametrize("loop", LOOPS if FULL else ["verified", "ar"])
def test_neither_a_run_of_few_rows_nor_an_exchange_copies_the_cache(loop):
    rows, slots, config = 8, 4096, config_of(loop)
    model = tiny_model()
    sizes = dict(rows=rows, context=64, slots=config.slots(model.window_table), cache_slots=slots)
    state = open_rows(model.weights, **sizes, holds_back=config.holds_back)
    own = RowSettings.from_configs([config] * rows, range(rows), model.window_table)
    cache = sum(x.nbytes for x in jax.tree.leaves(state.cache))
    halted = np.zeros(rows, bool)
    run = run_rows.lower(Program.of(config), model.weights, state, own, halted, rows=1, steps=2).compile()
    exchange = exchange_rows.lower(state, own, np.array([1, 2])).compile()
    for compiled in (run, exchange):
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= cache
        assert memory.temp_size_in_bytes <= 0.5 * cache  # two or three rows of eight
