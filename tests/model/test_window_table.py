"""By what widths and windows are chosen: what was measured, else presumed by platform and, on a CPU, by size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model.tiny import tiny_model
from wedlm_jax.model import window_table
from wedlm_jax.model.window_table import (
    ACCEPTED,
    AUTO_WINDOWS,
    FED,
    ON_ACCELERATOR,
    ON_CPU,
    ON_CPU_FROM_CACHE,
    WindowTable,
)


@pytest.mark.parametrize(
    ("platform", "cache", "table"),
    [
        ("cpu", 2**25, ON_CPU_FROM_CACHE),
        ("cpu", 2**10, ON_CPU),
        ("tpu", 2**25, ON_ACCELERATOR),
        ("gpu", 2**10, ON_ACCELERATOR),
    ],
)
def test_what_was_not_measured_follows_from_platform_and_size(platform, cache, table, monkeypatch):
    monkeypatch.setattr(window_table, "target_platform", lambda: platform)
    monkeypatch.setattr(window_table, "PROCESSOR_CACHE", cache)
    assert window_table.presumed_table(tiny_model().transformer) == table


def test_costs_lie_on_lines_between_what_was_measured_and_on_the_last_one_behind():
    table = WindowTable(((1, 1.0), (8, 1.0), (16, 3.0), (32, 4.0)))
    assert [table.cost(slots) for slots in (1, 5, 8, 12, 16, 24, 32, 64)] == [1.0, 1.0, 1.0, 2.0, 3.0, 3.5, 4.0, 6.0]


@given(rows=st.integers(1, 256), a_slot=st.floats(0, 1))
def test_the_widest_window_accepts_most_for_its_cost(rows, a_slot):
    table = WindowTable.linear(a_slot)
    gains = [of / (1 + a_slot * rows * fed) for of, fed in zip(ACCEPTED, FED, strict=True)]
    assert table.gains(rows) == pytest.approx(gains)
    assert gains[AUTO_WINDOWS.index(table.widest(rows))] == pytest.approx(max(gains))
    assert table.widest(rows + 1) <= table.widest(rows) >= WindowTable.linear(2 * a_slot).widest(rows)


def test_a_window_is_worth_what_was_measured_of_it():
    """Acceptance and a step in the cost, either of which a formula would not know."""
    costs = ((1, 1.0), (16, 1.1), (17, 5.0), (64, 6.0))
    assert WindowTable(costs).widest(1) == 8 and WindowTable(((1, 1.0), (64, 1.1))).widest(1) == 32
    assert WindowTable(((1, 1.0), (64, 1.1)), accepted=(3.0, 2.9, 2.9, 2.9)).widest(1) == 4


def test_more_rows_never_get_a_wider_window_than_one_because_one_program_holds_them():
    """Where the first slots are dear and further ones free, eight rows alone would gain most by the widest window."""
    table = WindowTable(((1, 1.0), (8, 9.0), (64, 30.0), (65, 30.0)))
    gains = table.gains(8)
    assert gains.index(max(gains)) == len(AUTO_WINDOWS) - 1 and table.widest(1) == table.widest(8) == 8
