"""Text: what `stream` hands out joins to what `generate` returns, whole characters, and never a piece of a stop string."""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest

from wedlm_jax import Commit, DecodeConfig, Engine, Model, generate, stream
from wedlm_jax.data.tokenizer import IM_END, MASK, decoder_behind, train_tokenizer
from wedlm_jax.decode import generation
from wedlm_jax.decode.generation import completion
from wedlm_jax.decode.prompts import encode_prompt
from wedlm_jax.decode.stats import Stats
from wedlm_jax.decode.text import Pieces
from wedlm_jax.errors import UserError

from ..data.tiny import sentencepiece
from .models import config_of, reciting_model, tiny_model

TEXT = "é世🙂 ok\n"  # characters of 2, 3 and 4 bytes
LOOPS = ("streaming_eager", "verified", "blockwise", "ar")


@functools.cache
def tokenizer():
    """Bytes alone: most characters of TEXT take two to four tokens."""
    return train_tokenizer(["x"], 260)


def reciter(text: str, *, end: bool = False, tail: str = "") -> Model:
    """Recites `text`, then perhaps the end-of-turn token, then `tail`, and then zeros."""
    ids = tokenizer().encode(text) + [tokenizer().eos_token_id] * end + tokenizer().encode(tail)
    special = dict(mask_token_id=tokenizer().mask_token_id, tokenizer=tokenizer(), eos=[tokenizer().eos_token_id])
    return reciting_model(ids, vocab_size=len(tokenizer()), **special)


def joined(pieces) -> list[int]:
    return [token for piece in pieces for token in piece.ids]


def settings(loop: str, **fields) -> DecodeConfig:
    return config_of(loop, **{"stop_ids": None, "max_new_tokens": 16, "entropy_threshold": 0.3, **fields})


def test_the_tokenizer_splits_characters():
    assert len(tokenizer().encode("世")) == 3
    assert (tokenizer().eos_token, tokenizer().mask_token) == (IM_END, MASK)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_pieces_join_to_the_ids_and_the_text_of_generate(loop):
    model, config = reciter(TEXT, end=True, tail="never shown"), settings(loop)
    whole = generate(model, ["x"], config)[0]
    pieces = list(stream(model, "x", config))
    assert len(pieces) > 2
    assert joined(pieces) == whole.ids == [*tokenizer().encode(TEXT), tokenizer().eos_token_id]
    assert "".join(piece.text for piece in pieces) == whole.text == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in piece.text for piece in pieces)
    assert whole.finish_reason == "stop"


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 9])
def test_a_character_cut_by_the_limit_is_shown_alike_by_both(limit):
    model, config = reciter(TEXT), settings("ar", max_new_tokens=limit)
    whole = generate(model, ["x"], config)[0]
    assert "".join(piece.text for piece in stream(model, "x", config)) == whole.text
    assert (len(whole.ids), whole.finish_reason) == (limit, "length")


@pytest.mark.parametrize("stop, text", [((), "    🙂世 a"), (("世",), "    🙂"), (("    ",), "")])
def test_the_text_of_sentencepiece_has_its_first_space_and_grows_character_by_character(stop, text):
    """However many tokens come at once. Its own decoding drops that space, and half of 世 would hide 🙂 again."""
    ids = sentencepiece().encode("tee    🙂世 a")[4:]
    config = settings("ar", stop=stop)
    for step in (1, 2, 5, len(ids)):
        pieces, texts = Pieces(sentencepiece(), config), []
        for come in (ids[:count] for count in range(step, len(ids) + step, step)):
            kept = pieces.up_to_stop(come) if stop else None
            commit = pieces.next(come if kept is None else come[:kept], finished=kept is not None or come == ids)
            texts += [commit.text] if commit else []
            if kept is not None:
                break
        assert "".join(texts) == text
        assert kept == {(): None, ("世",): 8, ("    ",): 1}[stop]
    reader = Model(None, None, sentencepiece())  # type: ignore[arg-type]
    assert completion(reader, config, ids[:kept], "length", Stats(0, 0, 0)).text == text


@pytest.mark.parametrize("spoken", [sentencepiece, tokenizer], ids=["sentencepiece", "bytes"])
def test_of_a_long_row_what_follows_a_whole_character_alone_is_decoded(spoken):
    """However long it is: each run would else decode it all anew. Bytes at random are halves of characters, and broken ones."""
    rng, pieces, decoded, texts = random.Random(0), Pieces(spoken(), settings("ar")), [], []
    behind = decoder_behind(spoken())
    pieces._behind = lambda ids: decoded.append(len(ids)) or behind(ids)
    ids = [*rng.choices(range(3, len(spoken())), k=300), *spoken().encode("a tree 世🙂 " * 20)]
    count = 0
    while count < len(ids):
        count = min(count + rng.randrange(1, 6), len(ids))
        commit = pieces.next(ids[:count], finished=count == len(ids))
        texts.append(commit.text if commit else "")
    assert "".join(texts) == behind(ids)
    assert sum(decoded) < 4 * len(ids)


def test_bytes_that_are_no_character_do_not_hold_the_text_back():
    broken = tokenizer().encode("世")[:2] + tokenizer().encode("after")
    special = dict(mask_token_id=tokenizer().mask_token_id, tokenizer=tokenizer())
    model = reciting_model(broken, vocab_size=len(tokenizer()), **special)
    config = settings("ar", max_new_tokens=len(broken))
    texts = [piece.text for piece in stream(model, "x", config)]
    assert "".join(texts) == generate(model, ["x"], config)[0].text == "\N{REPLACEMENT CHARACTER}after"


@pytest.mark.parametrize("loop", LOOPS)
def test_a_stop_string_ends_the_row_and_is_dropped(loop):
    """The fewest tokens whose text holds it are kept, so every decoder gives the same ids."""
    model, config = reciter("go to END of it"), settings(loop, stop=("END", "of"))
    whole = generate(model, ["x"], config)[0]
    assert (whole.text, whole.finish_reason) == ("go to ", "stop")
    assert tokenizer().decode(whole.ids) == "go to END"
    assert whole.stats.generated_tokens == len(whole.ids)
    [traced] = generate(model, ["x"], config, trace=True)
    assert (traced.ids, sum(step["emitted"] for step in traced.trace)) == (whole.ids, len(whole.ids))
    pieces = list(stream(model, "x", config))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert joined(pieces) == whole.ids


@pytest.mark.parametrize("loop", LOOPS)
def test_the_beginning_of_a_stop_string_is_held_back_and_released(loop):
    """What might become END waits, and comes out when it does not."""
    model, config = reciter("so EN? ENDED"), settings(loop, stop=("END",))
    texts = [piece.text for piece in stream(model, "x", config)]
    assert "".join(texts) == "so EN? "
    seen = ""
    for text in texts[:-1]:
        seen += text
        assert not seen.endswith(("E", "EN"))


def test_a_stop_string_that_never_comes_holds_nothing_back_at_the_end():
    model, config = reciter("so EN"), settings("ar", stop=("END",), max_new_tokens=5)
    pieces = list(stream(model, "x", config))
    assert "".join(piece.text for piece in pieces) == generate(model, ["x"], config)[0].text == "so EN"


@pytest.mark.parametrize("loop", LOOPS)
def test_a_stop_string_before_a_stop_id_wins_even_in_one_commit(loop):
    model, config = reciter("ab!", end=True), settings(loop, stop=("b",), window_size=4, block_size=4)
    completion = generate(model, ["x"], config)[0]
    assert (tokenizer().decode(completion.ids), completion.text, completion.finish_reason) == ("ab", "a", "stop")


def test_half_a_character_is_no_stop_string():
    """Whether it is met would depend on how many tokens come at once: AR would stop where others run on."""
    model = reciter("a漢b☃c", end=True)
    for loop in LOOPS:
        [completion] = generate(model, ["x"], settings(loop, stop=("\N{REPLACEMENT CHARACTER}",)))
        assert completion.text == "a漢b☃c"


@pytest.mark.parametrize("loop", LOOPS)
def test_looking_for_stop_strings_after_every_eighth_forward_changes_nothing(loop, monkeypatch):
    """Rows are set back to the step that completed the string: a trace, which looks after every forward, counts the same."""
    runs = []
    run_steps = generation.run_steps
    monkeypatch.setattr(generation, "run_steps", lambda *a, **k: runs.append(k["steps"]) or run_steps(*a, **k))
    model = reciter("go to END of it, and on.", end=True)
    configs = [settings(loop, stop=stop, max_new_tokens=32) for stop in (("END",), ("of", "to"), (".",))]
    at_once, stepwise = (generate(model, ["x"] * 3, configs, trace=trace) for trace in (False, True))
    assert [c.text for c in at_once] == ["go to ", "go ", "go to END of it, and on"]
    assert [dataclasses.replace(c, trace=None) for c in stepwise] == at_once
    assert [c.acceptance for c in stepwise] == [c.acceptance for c in at_once]
    assert 1 <= len(runs) <= -(-max(c.stats.forwards for c in at_once) // 8) and set(runs) == {8}


@pytest.mark.parametrize("loop", ["verified", "lookup"])
def test_drafts_behind_a_stop_string_count_as_little_as_behind_the_last_token(loop):
    model = reciter("abcabcabcabcabc, ended", end=True)
    by_limit = generate(model, ["x"] * 3, [settings(loop, max_new_tokens=limit) for limit in (3, 10, 18)])
    configs = [settings(loop, stop=(stop,), max_new_tokens=32) for stop in ("c", "abcabcabca", ", e")]
    engine = Engine(model, rows=3, context=64, steps=3)
    tickets = [engine.submit("x", config) for config in configs]
    for ended in (generate(model, ["x"] * 3, configs, trace=trace) for trace in (False, True)):
        assert [c.ids for c in ended] == [c.ids for c in by_limit]
        assert [c.acceptance for c in ended] == [c.acceptance for c in by_limit]
    assert [ticket.result().acceptance for ticket in tickets] == [c.acceptance for c in by_limit]
    assert any(c.stats.forwards < len(c.ids) for c in by_limit)


def test_after_a_forward_each_running_text_is_looked_at_once_and_a_finished_one_no_more(monkeypatch):
    """But for the new tokens of the one that completes a stop string."""
    model, looked, decode = reciter("ab. and so on", end=True), [], tokenizer().decode
    decoder_behind(tokenizer())  # how it decodes is found out once
    monkeypatch.setattr(model.tokenizer, "decode", lambda ids, **options: looked.append(len(ids)) or decode(ids))
    generate(model, ["x"] * 2, [settings("ar", stop=(stop,)) for stop in (".", "o")], trace=True)
    steps = [[1, 1], [2, 2], [3, 3, 3], *([n] for n in range(4, 10)), [10, 10]]
    assert looked[:-2] == [count for step in steps for count in step]  # the last two are the completions'


def test_a_row_without_stop_strings_runs_on_beside_one_with_them():
    model = reciter("abcdef", end=True)
    configs = [settings("ar", stop=("c",)), settings("ar"), settings("ar", stop=("zz",))]
    assert [c.text for c in generate(model, ["x"] * 3, configs)] == ["ab", "abcdef", "abcdef"]


@pytest.mark.parametrize("loop", LOOPS)
def test_finish_reason_and_the_stop_id(loop):
    """A stop id is part of the ids and not of the text; at the very limit it still counts as a stop."""
    model, end = reciter("abc", end=True, tail="def"), tokenizer().eos_token_id
    for limit, ids, text, reason in (
        (3, "abc", "abc", "length"),
        (4, "abc", "abc", "stop"),
        (9, "abc", "abc", "stop"),
    ):
        completion = generate(model, ["x"], settings(loop, max_new_tokens=limit))[0]
        assert completion.ids == tokenizer().encode(ids) + [end] * (reason == "stop")
        assert (completion.text, completion.finish_reason) == (text, reason)
    free = generate(model, ["x"], settings(loop, stop_ids=(), max_new_tokens=7))[0]
    assert (free.text, free.finish_reason) == (f"abc{IM_END}def", "length")
    other = generate(model, ["x"], settings(loop, stop_ids=tuple(tokenizer().encode("b"))))[0]
    assert (other.text, other.finish_reason) == ("a", "stop")


def test_messages_go_through_the_chat_template():
    ids = encode_prompt(reciter(""), [{"role": "user", "content": "hey"}])
    assert tokenizer().decode(ids) == f"<|im_start|>user\nhey{IM_END}\n<|im_start|>assistant\n"


def test_what_is_wrong_with_a_request_is_said_before_its_first_piece_is_asked_for():
    """As by `generate` and `Engine.submit`."""
    for prompt, config, message in (
        ("text", DecodeConfig(), "prompt: this model has no tokenizer"),
        ([1], DecodeConfig(max_new_tokens=10**6), "prompt: 1 prompt tokens . max_new_tokens=1000000 exceed"),
    ):
        with pytest.raises(UserError, match=message):
            stream(tiny_model(), prompt, config)


def test_without_a_tokenizer_ids_come_and_text_is_none():
    config = dataclasses.replace(config_of("streaming_eager"), max_new_tokens=5)
    pieces = list(stream(tiny_model(), [1, 2], config))
    assert joined(pieces) == generate(tiny_model(), [[1, 2]], config)[0].ids
    assert {type(piece) for piece in pieces} == {Commit} and {piece.text for piece in pieces} == {None}
    with pytest.raises(UserError, match="stop strings need a tokenizer"):
        generate(tiny_model(), [[1, 2]], dataclasses.replace(config, stop=("a",)))
