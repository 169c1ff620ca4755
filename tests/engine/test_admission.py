"""Requests that come together are prefilled together, and neither their output nor what rows hold shows it."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import pytest

from wedlm_jax import Model, generate
from wedlm_jax.engine import rows as rows_module
from wedlm_jax.model.parameters import params_of, transformer_from

from ..conftest import FULL
from .models import engine, same, talk, talker

SYSTEM = list(range(40, 60))


@pytest.fixture
def prefilled(monkeypatch):
    """Of each prefill, how many rows it ran and with how many cache slots."""
    seen: list[tuple[int, int]] = []
    true_prefill = rows_module.prefill_behind

    def counting(weights, cache, prompt, *arguments, **options):
        seen.append((len(prompt), cache.k.shape[3]))
        return true_prefill(weights, cache, prompt, *arguments, **options)

    monkeypatch.setattr(rows_module, "prefill_behind", counting)
    return seen


def are_as_alone(tickets, model=None) -> bool:
    alone = [generate(model or talker(), [ticket.request.prompt], ticket.request.config)[0] for ticket in tickets]
    return all(same(ticket.result(), one) for ticket, one in zip(tickets, alone, strict=True))


@pytest.mark.parametrize("loop", ["streaming_eager", "verified", *(["lookup"] if FULL else [])])
def test_requests_that_come_together_are_prefilled_together(loop, prefilled):
    served = engine(rows=6, context=128)
    tickets = [served.submit([i, *range(i)], talk(loop, temperature=0.3 * i, seed=i)) for i in range(1, 7)]
    served.step()
    assert [rows for rows, _ in prefilled] == [4, 1, 1]
    assert are_as_alone(tickets)
    (group,) = served._groups.values()
    assert [row.tokens[: len(t.request.prompt) - 1].tolist() for row, t in zip(group.rows, tickets, strict=True)] == [
        t.request.prompt[:-1] for t in tickets
    ]


def test_what_is_prefilled_together_has_about_one_length_and_takes_no_more_memory_than_a_quarter_of_the_rows(prefilled):
    served, config = engine(rows=8, context=128), talk("streaming_eager", max_new_tokens=9)
    lengths = [40, 90, 50, 45, 7, 100, 9, 60]
    tickets = [served.submit([i] * length, config) for i, length in enumerate(lengths)]
    served.step()
    (group,) = served._groups.values()
    assert sorted(rows for rows, _ in prefilled) == [1, 1, 1, 1, 4]
    assert group.slots < max(rows * slots for rows, slots in prefilled) <= 2 * group.slots
    assert are_as_alone(tickets)


@pytest.mark.parametrize("loop", ["ar", "verified"] if FULL else ["verified"])
def test_prompts_that_nearly_fill_the_context_are_prefilled_together_in_no_more_slots_than_a_row_has(loop, prefilled):
    """A row has 192 slots or less, and the next length that programs are compiled for would be 256."""
    model = dataclasses.replace(talker(), config=dataclasses.replace(talker().config, max_position_embeddings=256))
    served, config = engine(model, rows=24, context=170), talk(loop, max_new_tokens=9)
    tickets = [served.submit([i] * 160, config) for i in range(4)]
    served.step()
    (group,) = served._groups.values()
    assert prefilled == [(4, group.slots)]
    assert are_as_alone(tickets, model)


def test_prompts_of_several_pieces_are_prefilled_each_alone(monkeypatch):
    """Masks ride behind the last piece: behind a shorter prompt beside a longer one nothing would be drafted."""
    together: list[int] = []
    monkeypatch.setattr(rows_module.RowGroup, "admit", lambda group, arrivals: together.append(len(arrivals)))
    served, config = engine(rows=24), talk("verified", max_new_tokens=9)
    for piece in (32, 8):
        monkeypatch.setattr(rows_module, "CHUNK", piece)
        for i, length in enumerate((17, 21, 26, 31)):
            served.submit([i] * length, config)
        served._admit()
    assert together == [4, 1, 1, 1, 1]


def test_requests_that_begin_like_rows_which_they_are_given_are_prefilled_together_too(prefilled):
    """Few tokens alike: what each could take over lies in a row that the one before it has been given."""
    served, config = engine(rows=4, context=128), talk("verified", max_new_tokens=9)
    for first in (10, 20):
        prefilled.clear()
        tickets = [served.submit([1, 2, 3, first + i], config) for i in range(4)]
        served.step()
        assert [rows for rows, _ in prefilled] == [4]
        assert are_as_alone(tickets)


def test_a_shared_beginning_is_worth_waiting_for(prefilled):
    """Of five prompts with one beginning the first is prefilled, and the rest of the others together."""
    served, config = engine(rows=5, context=128), talk("verified", max_new_tokens=9)
    tickets = [served.submit([*SYSTEM, i], config) for i in range(5)]
    served.step()
    assert [rows for rows, _ in prefilled] == [1, 4]
    assert [ticket.reused_tokens for ticket in tickets] == [0] + [len(SYSTEM)] * 4
    assert are_as_alone(tickets)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3), 2)), ids=str)
def test_a_row_is_not_overwritten_while_others_are_to_be_started_from_it(order):
    """Two of a stranger and two follow-ups, for the two rows that hold what is followed. Log-probabilities would tell."""
    served, config = engine(rows=2, context=128), talk("verified", max_new_tokens=9)
    answers = [served.submit(prompt, config).result().ids for prompt in (SYSTEM, [7, *SYSTEM])]
    prompts = [[9] * 18, [*SYSTEM, *answers[0], 8], [7, *SYSTEM, *answers[1], 6]]
    assert are_as_alone([served.submit(prompts[i], config) for i in order])


def test_a_row_that_another_is_started_from_is_not_given_away_before():
    """The last stranger gets the row whose beginning the second request takes, and would start with the first one, before it."""
    served, config = engine(rows=3, context=128), talk("verified", max_new_tokens=9)
    for held in ([1], [2], [*SYSTEM, *SYSTEM, *SYSTEM]):
        served.submit(held, config).result()
    branch = [*SYSTEM, *range(100, 140)]
    tickets = [served.submit(prompt, config) for prompt in ([9] * 18, branch, [8] * 18)]
    assert are_as_alone(tickets)
    assert [ticket.reused_tokens for ticket in tickets] == [0, len(SYSTEM), 0]


def test_a_request_that_is_put_back_keeps_its_place_in_the_queue():
    """The second one waits for the start of the first, and not behind those who came later."""
    served, config = engine(rows=3, context=128), talk("verified", max_new_tokens=9)
    for held in ([1], [2], [*SYSTEM, *SYSTEM, *SYSTEM]):
        served.submit(held, config).result()
    prompts = [9] * 18, [*SYSTEM, *range(100, 140)], [8] * 18, [7] * 18
    tickets = [served.submit(prompt, config) for prompt in prompts]
    served.step()
    assert [ticket.status for ticket in tickets] == ["running"] * 3 + ["waiting"]


@functools.cache
def poisoned() -> Model:
    """Of what follows its token 9 all activations are NaN."""
    params = params_of(talker().transformer)
    poison = params["embed.embedding"].at[9].set(jnp.nan)
    return dataclasses.replace(
        talker(), transformer=transformer_from(talker().config, params | {"embed.embedding": poison})
    )


@pytest.mark.parametrize(
    ("loop", "together"), itertools.product(("ar", "verified"), (1, 4)) if FULL else [("ar", 4), ("verified", 1)]
)
def test_a_request_whose_activations_are_nan_leaves_nothing_in_its_row(loop, together):
    """Behind its cursor a row's slots have no weight, but zero times a NaN is a NaN."""
    served, config = engine(poisoned(), rows=together), talk(loop, max_new_tokens=8)
    tickets = [served.submit([4, 5, 6, *[9] * 45], config) for _ in range(together)]
    served.run()
    assert all(ticket.result().log_probs == [None] * 8 for ticket in tickets)
    tickets = [served.submit([1, 2, i], config) for i in range(together)]
    served.run()
    assert are_as_alone(tickets)


def test_what_the_window_left_behind_a_row_is_cleared_too():
    """A row that ends at slot 64, as many as the next prompts are prefilled in, and NaNs in the window that stood there."""
    served, config = engine(poisoned(), rows=4, context=128), talk("verified", max_new_tokens=8)
    for ticket in [served.submit([4, 5, 6, *[9] * 54], config) for _ in range(4)]:
        ticket.result()
    (group,) = served._groups.values()
    assert group._state.length.tolist() == [64] * 4
    tickets = [served.submit([1, 2, i], config) for i in range(4)]
    served.run()
    assert are_as_alone(tickets)
