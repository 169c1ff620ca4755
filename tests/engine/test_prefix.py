"""Prefix reuse: what a row holds already is not prefilled again, and the output does not show it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wedlm_jax import generate
from wedlm_jax.decode.generation import make_request
from wedlm_jax.engine import Engine, in_order
from wedlm_jax.engine import rows as rows_module
from wedlm_jax.engine.prefix import LEFT_BEHIND, choose_row, longest_prefix, shared_length

from .models import engine, same, talk, talker

TOKENS = st.lists(st.integers(0, 2), max_size=8)
SYSTEM = list(range(40, 60))


def equals_alone(tickets, prompts, config) -> bool:
    """Whether each of `tickets` came out as the single run of its prompt."""
    expected = [generate(talker(), [prompt], config)[0] for prompt in prompts]
    return all(same(ticket.result(), one) for ticket, one in zip(tickets, expected, strict=True))


@pytest.fixture
def prefilled(monkeypatch):
    """How many tokens each prefill was given, padding included."""
    seen: list[int] = []
    true_prefill = rows_module.prefill_behind

    def counting(*arguments, chunk, **options):
        seen.append(chunk)
        return true_prefill(*arguments, chunk=chunk, **options)

    monkeypatch.setattr(rows_module, "prefill_behind", counting)
    return seen


@pytest.mark.parametrize("loop", ["streaming_eager", "verified", "blockwise"])
def test_a_follow_up_turn_goes_on_in_its_row(loop, prefilled):
    """All that is committed is used again: the prompt, and the answer up to the last token or block, which may not be cached."""
    served, config = engine(), talk(loop, max_new_tokens=9)
    first = served.submit(SYSTEM, config).result()
    follow_up = [*SYSTEM, *first.ids, 7, 8]
    ticket = served.submit(follow_up, config)
    assert equals_alone([ticket], [follow_up], config)
    uncached = {"streaming_eager": 0, "verified": 1, "blockwise": 1}[loop]  # of blocks of 4 the third holds one token
    assert ticket.reused_tokens == len(SYSTEM) + 9 - uncached
    assert prefilled == [32, 32]
    (group,) = served._groups.values()
    assert sum(len(row.tokens) > 0 for row in group.rows) == 1


def test_requests_in_order_prefill_what_they_share_once(prefilled):
    config, shared = talk("verified", max_new_tokens=5), list(range(40, 90))
    prompts = [[*shared, i, i] for i in range(5)]
    requests = [make_request(talker(), prompt, config, row=0, name="prompt") for prompt in prompts]
    alone = [generate(talker(), [prompt], config)[0] for prompt in prompts]
    assert all(same(*pair) for pair in zip(in_order(talker(), requests, rows=2), alone, strict=True))
    assert prefilled == [64, 32, 32, 32, 32]


@pytest.mark.parametrize(("lengths", "context"), [((3, 9), 32), ((30, 9), 64), ((60, 100), 125)])
def test_requests_in_order_have_rows_of_few_lengths_and_none_beyond_the_model(lengths, context, monkeypatch):
    class Opened(Exception):
        pass

    def opens(self, *arguments, context, **options):
        raise Opened(context)

    monkeypatch.setattr(Engine, "__init__", opens)
    model = dataclasses.replace(talker(), config=dataclasses.replace(talker().config, max_position_embeddings=125))
    config = talk("verified", max_new_tokens=20)
    requests = [make_request(model, [1] * length, config, row=0, name="prompt") for length in lengths]
    with pytest.raises(Opened, match=f"^{context}$"):
        list(in_order(model, requests, rows=2))


def test_a_shared_beginning_is_copied_from_a_row_idle_or_running(prefilled):
    served, config = engine(), talk("streaming_eager", max_new_tokens=9)
    prompts = [[*SYSTEM, i] for i in range(3)]
    tickets = [served.submit(prompt, config) for prompt in prompts]
    served.step()
    assert [t.reused_tokens for t in tickets] == [0, len(SYSTEM), len(SYSTEM)]
    assert equals_alone(tickets, prompts, config)
    late = served.submit([*SYSTEM, 9, 9], config)
    assert equals_alone([late], [[*SYSTEM, 9, 9]], config) and late.reused_tokens == len(SYSTEM)
    assert prefilled == [32] * 4


def test_a_prefix_goes_from_one_decoder_to_another():
    served, prompt = engine(), [*SYSTEM, 3]
    served.submit(prompt, talk("blockwise", max_new_tokens=5)).result()
    for loop in ("streaming_eager", "verified"):
        ticket = served.submit(prompt, talk(loop))
        assert equals_alone([ticket], [prompt], talk(loop))
        assert ticket.reused_tokens == len(prompt) - (loop == "verified")


def test_nothing_is_prefilled_where_a_row_holds_the_whole_prompt(prefilled):
    served, config = engine(), talk("streaming_eager")
    tickets = [served.submit(SYSTEM, config), served.submit(SYSTEM, config), served.submit(SYSTEM[:5], config)]
    assert equals_alone(tickets, [SYSTEM, SYSTEM, SYSTEM[:5]], config)
    assert [t.reused_tokens for t in tickets] == [0, 20, 5] and len(prefilled) == 1


def test_a_long_prompt_is_prefilled_in_pieces(monkeypatch, prefilled):
    monkeypatch.setattr(rows_module, "CHUNK", 8)
    served, config = engine(), talk("verified")
    assert equals_alone([served.submit(SYSTEM, config)], [SYSTEM], config)
    assert len(prefilled) == 3  # 19 tokens: the last of the prompt waits for the first forward


def test_a_cancelled_row_lends_what_it_had():
    served, config = engine(), talk("streaming_eager")
    first = served.submit(SYSTEM, config)
    while not first.ids:
        served.step()
    first.cancel()
    prompt = [*SYSTEM, *first.ids, 5]
    ticket = served.submit(prompt, config)
    assert equals_alone([ticket], [prompt], config)
    assert ticket.reused_tokens >= len(SYSTEM) + len(first.ids)


@given(TOKENS, TOKENS)
def test_the_shared_length_is_that_of_the_longest_common_beginning(left, right):
    expected = max(n for n in range(9) if left[:n] == right[:n] and n <= min(len(left), len(right)))
    assert shared_length(left, right) == expected


@given(TOKENS, st.lists(TOKENS, min_size=1, max_size=4))
def test_the_longest_prefix_is_found(prompt, cached):
    row, length = longest_prefix(prompt, cached)
    assert length == shared_length(prompt, cached[row]) == max(shared_length(prompt, tokens) for tokens in cached)


def test_a_row_is_chosen_by_what_it_holds_and_then_by_when_it_was_used():
    talk_of_one, other = list(range(30)), list(range(100, 140))
    cached, used = [talk_of_one, other, []], [2, 1, 0]
    assert choose_row([*talk_of_one, 99], [0, 1, 2], cached, used) == 0  # its own conversation
    assert choose_row([*talk_of_one, 99], [1, 2], cached, used) == 2  # that row is taken: an empty one before another's
    first, second = talk_of_one, [*talk_of_one, *other]
    assert choose_row([*second, 8], [0, 1], [first, second], [1, 2]) == 1  # of two that it continues the longer one
    assert choose_row([5, 6], [0, 1], cached, used) == 1  # nothing shared: the one that rested longest
    assert choose_row(talk_of_one[: 30 - LEFT_BEHIND], [0, 1, 2], cached, used) == 0
    assert choose_row(talk_of_one[: 29 - LEFT_BEHIND], [0, 1, 2], cached, used) == 2  # too much of it would be lost
