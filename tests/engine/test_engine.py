"""The engine's own rules: rows and groups, the queue, cancellation, memory, and text. Models that recite compile fast."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import weakref

import jax
import pytest

from wedlm_jax import DecodeConfig, Engine, Model, generate, stream
from wedlm_jax.data.tokenizer import decoder_behind
from wedlm_jax.decode.generation import verification
from wedlm_jax.decode.loop import run_step, run_steps
from wedlm_jax.decode.stats import Stats
from wedlm_jax.engine import QueueFull, programs
from wedlm_jax.engine import rows as rows_module
from wedlm_jax.engine.memory import cache_bytes, cache_slots
from wedlm_jax.engine.rows import RowGroup
from wedlm_jax.errors import UserError
from wedlm_jax.model.parameters import params_of, transformer_from
from wedlm_jax.model.window_table import AUTO_WINDOWS, ON_CPU
from wedlm_jax.sharding import MeshConfig, make_mesh

from ..conftest import FULL
from ..decode.models import LOOPS, TINY, config_of, reciting_model, tiny_model
from ..decode.test_precision_and_mesh import EVEN, cut_over
from ..decode.test_stream import TEXT, reciter, settings, tokenizer
from .models import SIZES, engine, same, talk, talker


def joined(ticket) -> tuple[list[int], str]:
    commits = list(ticket)
    return [i for commit in commits for i in commit.ids], "".join(commit.text for commit in commits)


@pytest.mark.parametrize("loop", ["streaming_eager", "verified", "ar"])
def test_text_comes_in_whole_characters_and_joins_to_what_generate_returns(loop):
    model, config = reciter(TEXT, end=True, tail="never shown"), settings(loop)
    expected = generate(model, ["x"], config)[0]
    ticket = engine(model).submit("x", config)
    pieces = list(ticket)
    assert len(pieces) > 1 and not any("\N{REPLACEMENT CHARACTER}" in piece.text for piece in pieces)
    assert "".join(piece.text for piece in pieces) == expected.text == TEXT
    assert ticket.completion == expected


@pytest.mark.parametrize("leaves", [False, True])
def test_no_piece_is_lost_where_the_engine_runs_between_two_pieces(leaves):
    """By `run`, by steps or by a cancellation, in one loop over the ticket or in a loop for each piece."""
    served, config = engine(reciter("abcdefgh")), settings("ar", max_new_tokens=8)
    for meanwhile in (lambda t: served.run(), lambda t: served.step(), lambda t: served.step() and t.cancel()):
        ticket, pieces = served.submit("x", config), []
        for _ in range(8 if leaves else 1):
            for piece in ticket:
                pieces.append(piece)
                meanwhile(ticket)
                if leaves:
                    break
        assert [i for piece in pieces for i in piece.ids] == ticket.result().ids
        assert "".join(piece.text for piece in pieces) == ticket.result().text != ""


@pytest.mark.parametrize("steps", [2, 5])
def test_a_stop_string_ends_a_row_where_generate_ends_it_however_long_a_run_is(steps):
    """Its counters too: steps that a run took beyond the string are not counted."""
    model, config = reciter("so EN? ENDED and more"), settings("ar", stop=("END",))
    ticket = engine(model, steps=steps).submit("x", config)
    texts = [piece.text for piece in ticket]
    assert "".join(texts) == "so EN? " and not any(t.endswith(("E", "EN")) for t in texts)
    assert ticket.completion == generate(model, ["x"], config)[0]


def test_the_queue_is_bounded_and_says_so_or_waits():
    """Beside requests for which rows are free: none is for a second group while the first one fills as many."""
    served = engine(reciter("abcdefgh"), queue=2)
    tickets = [served.submit("x", settings("ar")) for _ in range(5)]
    with pytest.raises(QueueFull, match=r"the 6th: 5 requests wait already.*queue=2.*wait=True"):
        served.submit("x", settings("ar"), name="the 6th")
    assert served.waiting == 5 and not any(t.done for t in tickets)
    served.step()
    for config in (settings("ar"), settings("ar", stop_ids=tuple(range(200, 209)))):
        with pytest.raises(QueueFull, match="2 requests wait already"):
            served.submit("x", config)
    tickets += [served.submit("x", settings("ar"), wait=True) for _ in range(5)]
    assert served.waiting + served.running <= 5
    served.run()
    assert {t.completion.text for t in tickets} == {generate(served.model, ["x"], settings("ar"))[0].text}


def test_rows_are_handed_on_in_the_order_of_arrival():
    served = engine(reciter("abcdefgh"))
    tickets = [served.submit("x", settings("ar", max_new_tokens=8)) for _ in range(5)]
    served.step()
    assert [t.status for t in tickets] == ["running"] * 3 + ["waiting"] * 2
    tickets[1].cancel()
    served.step()
    assert [t.status for t in tickets] == ["running", "done", "running", "running", "waiting"]
    served.run()
    assert [t.completion.finish_reason for t in tickets] == ["length", "cancelled", "length", "length", "length"]


def test_a_step_looks_at_no_more_requests_than_it_starts_however_many_wait(monkeypatch):
    """One of each group that is full, and their settings never again."""
    served = engine(reciter("abcdefgh"))
    configs = [settings("ar", max_new_tokens=8, stop_ids=stop_ids) for stop_ids in (None, tuple(range(200, 209)))]
    tickets = [served.submit("x", config) for _ in range(10) for config in configs]
    served.step()
    looked, idle = [], RowGroup.idle.fget
    monkeypatch.setattr(RowGroup, "idle", property(lambda group: looked.append(group) or idle(group)))
    monkeypatch.setattr(DecodeConfig, "program", lambda *_: pytest.fail("the settings are known"))
    served.step()
    assert len(looked) == 2
    tickets[7].cancel()
    monkeypatch.undo()
    served.run()
    assert [t.completion.text for t in tickets] == ["" if i == 7 else "abcdefgh" for i in range(20)]


def test_what_the_chain_said_is_made_once_of_the_last_run(monkeypatch):
    """Of a cancelled request too. Each run's tokens alone are decoded: for stop strings, and for what is handed out."""
    made, looked, decode = [], [], tokenizer().decode
    monkeypatch.setattr(rows_module, "verification", lambda *a: made.append(a[-1]) or verification(*a))
    served, config = engine(reciter("abcdefgh")), settings("ar", max_new_tokens=8, stop=("never",))
    decoder_behind(tokenizer())  # how it decodes is found out once
    monkeypatch.setattr(served.model.tokenizer, "decode", lambda ids: looked.append(len(ids)) or decode(ids))
    whole = served.submit("x", config).result()
    assert made == [8] and looked == [2] * 8 + [8]  # the last is the completion's
    ticket = served.submit("x", config)
    served.step()
    ticket.cancel()
    assert made == [8, 2] and ticket.result().log_probs == whole.log_probs[:2] != []


def test_automatic_windows_have_rows_of_their_own_and_show_no_more_than_the_widest():
    """Whether the window is chosen anew is compiled in: in one group with a fixed window of that bucket it would be mistaken."""
    model = reciter(TEXT, end=True, tail="never shown")
    widest = model.window_table.widest(1)
    chosen = [settings("verified", window_size=window) for window in ("auto", widest, "auto")]
    served = engine(model)
    tickets = [served.submit("x", config) for config in chosen]
    shown = 0
    while served.step():
        shown = max(shown, len(tickets[0].window))
    assert [t.completion.text for t in tickets] == [TEXT] * 3
    assert len(served._groups) == 2 and {config.slots(model.window_table) for config in chosen} == {2 * widest}
    assert 0 < shown <= model.window_table.widest(SIZES["rows"]) < widest


def test_an_automatic_window_that_wrong_drafts_have_narrowed_is_shown_as_narrow_as_it_is():
    special = dict(vocab_size=len(tokenizer()), mask_token_id=tokenizer().mask_token_id, tokenizer=tokenizer())
    model = reciting_model(tokenizer().encode("abcdefghijklmnop"), drafts=tokenizer().encode("x" * 16), **special)
    model.window_table = ON_CPU
    served = engine(model)
    ticket = served.submit("x", settings("verified", window_size="auto", entropy_threshold=float("inf")))
    served.step()
    assert ON_CPU.widest(SIZES["rows"]) > AUTO_WINDOWS[0] == len(ticket.window)


def test_a_cancelled_request_keeps_what_it_had_and_its_neighbours_notice_nothing():
    served, config = engine(reciter("abcdefgh")), settings("ar", max_new_tokens=8)
    first, second = served.submit("x", config), served.submit("x", config)
    third = served.submit("x", config)
    served.step()
    for _ in range(2):  # the second time there is nothing to cancel
        first.cancel()
    assert (first.completion.text, first.completion.finish_reason, first.completion.stats.forwards) == (
        "ab",
        "cancelled",
        2,
    )
    assert joined(first) == (tokenizer().encode("ab"), "ab")
    third.cancel()
    assert joined(second)[1] == second.result().text == "abcdefgh"
    waiting = served.submit("x", config)
    waiting.cancel()
    assert (waiting.completion.ids, waiting.completion.text, joined(waiting)) == ([], "", ([], ""))
    assert served.waiting == served.running == 0


@pytest.mark.parametrize(
    "loop", ["streaming_fallback", "ar", "verified", *(["streaming_eager", "lookup"] if FULL else [])]
)
def test_a_request_that_is_cancelled_before_it_runs_has_the_fields_of_its_decoder(loop):
    served, config = engine(), talk(loop)
    early = served.submit([1], config)
    early.cancel()
    whole = served.submit([2], config).result()
    assert early.ids == []
    for name in ("log_probs", "acceptance"):
        assert getattr(early.completion, name) == (None if getattr(whole, name) is None else [])


def test_the_window_shows_what_is_filled_and_what_is_not():
    """Behind the committed tokens: filled slots with their tokens, masks as None, never past max_new_tokens."""
    served = engine(talker())
    windows, loops = [], ("streaming_eager", "verified", "lookup", "blockwise")
    for loop, prompt in itertools.product(loops, ([1, 2, 3], [7], [5, 9])):
        ticket, seen = served.submit(prompt, talk(loop, max_new_tokens=13, fill_rule="each", distance_penalty=0.0)), []
        while served.step():
            seen.append((len(ticket.ids), list(ticket.window)))
        assert ticket.window == []
        for (count, window), (later, _) in itertools.pairwise(seen):
            assert len(window) <= min(4, 13 - count)
            for token, final in zip(window[: later - count], ticket.completion.ids[count:], strict=False):
                assert loop in ("verified", "lookup") or token in (None, final)  # drafts alone may be rejected
            assert loop != "lookup" or None not in window  # it has no masks
            windows.append(window)
    assert any(None in w[:place] for w in windows for place, token in enumerate(w) if token is not None)  # out of order


def test_memory_is_stated_before_it_is_taken(caplog):
    config = talk("streaming_eager")
    served = engine()
    assert served.cache_bytes == 0
    slots = cache_slots(SIZES["context"], config.slots(talker().window_table))
    stated = served.bytes_for(config)
    assert stated == cache_bytes(talker().config, SIZES["rows"], slots) == 2 * 2 * 3 * slots * 2 * 6 * 4
    with caplog.at_level(logging.INFO, logger="wedlm_jax.engine"):
        served.submit([1], config)
        assert not caplog.records
        served.step()
    assert f"{stated:,} bytes" in caplog.text and f"{SIZES['rows']} rows of {slots} slots" in caplog.text
    (group,) = served._groups.values()
    assert served.cache_bytes == stated == sum(x.nbytes for x in jax.tree.leaves(group._state.cache))


@pytest.mark.parametrize("rows", [4, 3])
def test_over_a_mesh_the_memory_of_all_devices_together_is_stated(rows):
    """Rows that the data axis does not divide are held by each of its parts."""
    served = Engine(
        cut_over(tiny_model(0, EVEN), make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))), rows=rows, context=64
    )
    served.submit([1], config_of("ar"))
    served._admit()
    (group,) = served._groups.values()
    parts = [part.data.nbytes for x in jax.tree.leaves(group._state.cache) for part in x.addressable_shards]
    assert served.cache_bytes == sum(parts)


def test_a_cache_beyond_the_limit_is_refused_naming_what_to_lower():
    config = talk("streaming_eager")
    size = engine().bytes_for(config)
    served = engine(cache_limit=size - 1)
    with pytest.raises(
        UserError, match=rf"{size:,} bytes .*cache_limit={size - 1}: lower rows, context or window_size"
    ):
        served.submit([1], config)
    with pytest.raises(UserError, match="block_size"):
        served.submit([1], talk("blockwise"))
    with pytest.raises(UserError, match="lower rows or context, or raise cache_limit"):
        engine(cache_limit=1).submit([1], talk("ar"))
    assert served.waiting == 0


def test_groups_take_turns_where_the_limit_leaves_room_for_one():
    """An idle group gives its cache up; a group that always has work cannot keep another one out."""
    model = reciter("abcdefghijkl")
    served = engine(model, cache_limit=engine(model).bytes_for(settings("ar")))
    by_turns = [served.submit("x", settings(loop, max_new_tokens=6)) for loop in ("ar", "verified")]
    later = [served.submit("x", settings("ar", max_new_tokens=6)) for _ in range(5)]
    while served.step():
        assert len(served._groups) == 1
        assert by_turns[1].done or not later[-1].done
    assert {t.completion.text for t in [*by_turns, *later]} == {"abcdef"}


def test_of_idle_groups_the_one_that_was_used_longest_ago_gives_its_cache_up():
    model = reciter("abcdefgh")
    first, second, third = settings("ar"), settings("ar", stop_ids=tuple(range(200, 209))), settings("verified")
    served = engine(model, cache_limit=2 * engine(model).bytes_for(first))
    for config in (first, second, first, third):
        served.submit("x", config).result()
    assert list(served._groups) == [served._key(first), served._key(third)]


def test_where_a_new_cache_does_not_fit_in_memory_idle_ones_are_closed_before_a_request_fails(monkeypatch):
    """The device has room for one. A group that runs is not closed."""
    opened: list[weakref.ref] = []

    def room_for_one(*args):
        if any(group() is not None for group in opened):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        group = RowGroup(*args)
        opened.append(weakref.ref(group))
        return group

    monkeypatch.setattr("wedlm_jax.engine.engine.RowGroup", room_for_one)
    model = reciter("abcdefgh")
    served = engine(model)
    texts = [served.submit("x", settings(loop)).result().text for loop in ("ar", "verified", "ar")]
    assert texts == [generate(model, ["x"], settings("ar"))[0].text] * 3 and len(opened) == 3
    running = served.submit("x", settings("ar"))
    served.step()
    with pytest.raises(UserError, match="out of memory"):
        served.submit("x", settings("verified")).result()
    assert running.result().text == texts[0]


def test_a_cache_that_is_found_not_to_fit_after_its_program_has_returned_closes_idle_ones_too(monkeypatch):
    class Late:
        def block_until_ready(self):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    def room_for_one(*args, **sizes):
        state = open_rows(*args, **sizes)
        return dataclasses.replace(state, finish=Late()) if served._groups else state

    open_rows = rows_module.open_rows
    monkeypatch.setattr(rows_module, "open_rows", room_for_one)
    served = engine(reciter("abcdefgh"))
    texts = [served.submit("x", settings(loop)).result().text for loop in ("ar", "verified")]
    assert texts[0] == texts[1] and len(served._groups) == 1


@pytest.mark.parametrize("program", ["prefill_behind", "run_rows"])
def test_where_a_start_or_a_run_does_not_fit_in_memory_idle_groups_are_closed_and_it_starts_over(monkeypatch, program):
    """But what has handed out tokens is told: they are gone with the cache."""
    served, true_program = engine(reciter("abcdefgh")), getattr(rows_module, program)
    text = served.submit("x", settings("ar")).result().text
    old = served.submit("x", settings("verified"))
    served.step()
    assert old.ids and len(served._groups) == 2

    def room_for_one(*args, **kwargs):
        if len(served._groups) > 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return true_program(*args, **kwargs)

    monkeypatch.setattr(rows_module, program, room_for_one)
    new = [served.submit("x", settings("verified")) for _ in range(4)]
    assert [ticket.result().text for ticket in new] == [text] * 4 and len(served._groups) == 1
    with pytest.raises(UserError, match="out of memory"):
        old.result()


def test_a_request_that_starts_over_shows_nothing_of_the_row_that_it_had():
    ticket = engine(reciter("abcdefgh")).submit("x", settings("ar"))
    ticket.update([], [1], Stats(0, 2, 9), dict, None)
    ticket.start_over()
    assert (ticket.window, ticket.stats, ticket.status) == ([], Stats(0, 0, 0), "waiting")


def test_what_was_to_start_from_a_row_of_a_group_that_is_given_up_starts_without_it(monkeypatch):
    """Both get a row in one step; the first start fails after its group's cache was given away."""
    served, beginning, fill = engine(rows=2), list(range(40, 60)), rows_module.fill_rows
    verified, ar = talk("verified", max_new_tokens=9), talk("ar", max_new_tokens=9)
    for prompt, config in ((beginning, verified), ([1, 2], ar)):
        served.submit(prompt, config).result()
    fails, follows = served.submit([9] * 5, verified), served.submit([*beginning, 3], ar)

    def runs_out(*args, **kwargs):
        monkeypatch.undo()
        fill(*args, **kwargs)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(rows_module, "fill_rows", runs_out)
    assert same(follows.result(), generate(talker(), [[*beginning, 3]], ar)[0]) and follows.reused_tokens == 0
    with pytest.raises(UserError, match="out of memory"):
        fails.result()


def test_the_token_that_is_held_back_is_in_no_row_before_the_first_forward():
    """A prompt of 32 tokens and one more: behind them no slot is written."""
    served, config = engine(rows=2), talk("ar", max_new_tokens=9)
    prompts = [list(range(33)), [*range(33), 3, 4]]
    tickets = [served.submit(prompt, config) for prompt in prompts]
    served.step()
    assert [ticket.reused_tokens for ticket in tickets] == [0, 32]
    alone = [generate(talker(), [prompt], config)[0] for prompt in prompts]
    assert all(same(ticket.result(), one) for ticket, one in zip(tickets, alone, strict=True))


def test_where_the_device_runs_out_of_memory_every_request_of_the_group_is_told(monkeypatch):
    model = reciter("abcdefgh")
    served = engine(model)
    hit, spared = [served.submit("x", settings("ar")) for _ in range(4)], served.submit("x", settings("verified"))

    def runs_out(program, *args, **kwargs):
        if program.decoder == "ar":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return programs.run_rows(program, *args, **kwargs)

    monkeypatch.setattr("wedlm_jax.engine.rows.run_rows", runs_out)
    held = sum(served.bytes_for(ticket.request.config) for ticket in (hit[0], spared))
    served.run()
    for ticket in hit[:3]:
        with pytest.raises(
            UserError, match=rf"out of memory with caches of {held:,} bytes .* lower rows \(--batch-size\) or context"
        ):
            ticket.result()
    for ticket in hit:
        with pytest.raises(UserError, match=r"out of memory .* lower rows \(--batch-size\) or context"):
            ticket.result()
        with pytest.raises(UserError, match="out of memory"):
            list(ticket)
    assert spared.result().text == generate(model, ["x"], settings("verified"))[0].text
    monkeypatch.undo()
    assert served.submit("x", settings("ar")).result().text == spared.result().text


def test_another_error_is_not_swallowed(monkeypatch):
    served = engine(reciter("ab"))
    served.submit("x", settings("ar"))

    def breaks(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    monkeypatch.setattr("wedlm_jax.engine.rows.run_rows", breaks)
    with pytest.raises(jax.errors.JaxRuntimeError, match="broken"):
        served.step()


@pytest.mark.parametrize(
    "sizes, complaint",
    [
        (dict(rows=0), "rows=0"),
        (dict(rows=1.5), "rows=1.5: must be an integer"),
        (dict(steps="2"), "steps='2': must be an integer"),
        (dict(cache_limit=-5), "cache_limit=-5: must be a number of bytes"),
        (dict(cache_limit="1G"), "cache_limit='1G': must be a number of bytes"),
        (dict(steps=0), "steps=0"),
        (dict(queue=0), "queue=0"),
        (dict(context=0), "context=0"),
        (dict(context=TINY.max_position_embeddings + 1), "context=65: the model's is 64"),
    ],
)
def test_sizes_out_of_range_are_refused(sizes, complaint):
    with pytest.raises(UserError, match=complaint):
        Engine(tiny_model(), **sizes)


def test_a_request_that_does_not_fit_is_refused_when_it_is_submitted():
    served = engine(reciter("ab"))
    with pytest.raises(UserError, match=r"prompt: 60 prompt tokens \+ max_new_tokens=5 exceed the engine's context=64"):
        served.submit([1] * 60, DecodeConfig("ar", max_new_tokens=5))
    with pytest.raises(UserError, match="line 7 is empty"):
        served.submit([], name="line 7")
    for row in (2**31, "a", None):
        with pytest.raises(UserError, match=f"row={row!r}: must "):
            served.submit([1], DecodeConfig("ar", max_new_tokens=5), row=row)
    assert served.waiting == 0


def test_copies_draw_what_the_copies_of_one_generate_call_draw():
    config = talk("verified", temperature=1.2, seed=4)
    served = engine()
    tickets = [served.submit([1, 2, 3], config, row=k) for k in range(3)]
    together = generate(talker(), [[1, 2, 3]], config, n=3)
    assert all(same(ticket.result(), one) for ticket, one in zip(tickets, together, strict=True))
    assert len({tuple(t.completion.ids) for t in tickets}) == 3


def committed(model: Model) -> Model:
    """As `load` gives one: its arrays are committed to their device, of which jit makes other programs."""
    params = jax.device_put(params_of(model.transformer), jax.devices()[0])
    return dataclasses.replace(model, transformer=transformer_from(model.config, params))


def test_a_second_request_of_a_loaded_model_compiles_nothing(caplog):
    served = engine(committed(talker()), context=60)
    served.submit([1] * 5, talk("verified", max_new_tokens=9))
    served.run()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        served.submit([2] * 5, talk("verified", max_new_tokens=9))
        served.run()
        assert not [r.message for r in caplog.records if "Compiling" in r.message]


def test_stop_strings_compile_the_steps_of_a_loaded_model_once():
    """The host reads and changes the state between them."""
    model, config = committed(talker()), talk("verified", max_new_tokens=40, stop=("never said",))
    before = run_steps._cache_size(), run_step._cache_size()
    generate(model, [[1] * 5], config)
    for _ in stream(model, [1] * 5, config):
        pass
    assert (run_steps._cache_size(), run_step._cache_size()) == (before[0] + 1, before[1] + 1)


def test_a_second_wave_of_requests_compiles_nothing():
    served = engine()

    def wave(first: int) -> None:
        for loop in ("streaming_eager", "verified"):
            for length in (2, 5, 30):
                served.submit([first] * length, talk(loop, temperature=0.5 * first, max_new_tokens=9))
        served.run()

    def compiled() -> list[int]:
        made = (programs.open_rows, programs.take_rows, programs.prefill_behind, programs.fill_rows, programs.run_rows)
        return [program._cache_size() for program in made]

    wave(1)
    before = compiled()
    wave(2)
    assert compiled() == before


def test_greedy_requests_run_the_loop_without_draws_while_nothing_beside_them_is_drawn():
    served = engine(steps=11)  # as no other test has it

    def loops_compiled_for(*temperatures: float) -> int:
        before = programs.run_rows._cache_size()
        for temperature in temperatures:
            served.submit([1, 2, 3], talk("ar", temperature=temperature, max_new_tokens=7))
        served.run()
        return programs.run_rows._cache_size() - before

    assert [loops_compiled_for(*wave) for wave in [(0.0,), (0.0, 0.9), (0.9,), (0.0, 0.0)]] == [1, 1, 0, 0]


@pytest.mark.parametrize("loop", LOOPS if FULL else ["verified"])
def test_rows_are_served_on_several_devices_as_on_one(loop):
    """Rows are cut over the data axis, heads and vocabulary over the tensor axis."""
    whole, config = tiny_model(0, EVEN), config_of(loop, temperature=0.7)
    cut = cut_over(whole, make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4]))
    prompts = [[1, 2, 3], [1, 2, 3, 4], [6], [1, 2, 3, 5, 5]]
    served = Engine(cut, rows=2, context=64, steps=2)
    tickets = [served.submit(prompt, config) for prompt in prompts]
    served.run()
    alone = [generate(whole, [prompt], config)[0] for prompt in prompts]
    assert all(same(ticket.completion, one) for ticket, one in zip(tickets, alone, strict=True))
    assert tickets[3].reused_tokens == 3  # the first two have run by then
    (group,) = served._groups.values()
    assert group._state.cache.k.sharding.shard_shape(group._state.cache.k.shape)[1:3] == (1, 1)
