"""The server answers what `generate` would, whole and in streams, to many at once; it refuses in JSON; who leaves is let go."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wedlm_jax import Engine, generate
from wedlm_jax.data import chat
from wedlm_jax.decode.scores import Scores
from wedlm_jax.errors import UserError
from wedlm_jax.serve import answer as answer_words
from wedlm_jax.serve import service
from wedlm_jax.serve.answer import Answer
from wedlm_jax.serve.asked import read_asked
from wedlm_jax.serve.http import Handler, Server
from wedlm_jax.sharding import MeshConfig, make_mesh

from ..decode.models import tiny_model
from ..decode.test_precision_and_mesh import EVEN, cut_over
from .client import CHAT, COMPLETIONS, DEFAULTS, JSON, ask, chatty, connect, events, look, serving


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


# LangChain looks for "prompt is too long", and LiteLLM for OpenAI's words.
NO_MORE = "where this model's maximum context length is 96 tokens"


def alone(prompt, n: int = 1, **changes):
    return generate(chatty(), [prompt], dataclasses.replace(DEFAULTS, **changes), n)


def test_text_is_completed_as_by_generate(server):
    status, answer = ask(server, COMPLETIONS, {"model": "tiny", "prompt": "Tom has 3", "seed": 0})
    (expected,) = alone("Tom has 3")
    (choice,) = answer["choices"]
    assert (status, answer["object"], answer["model"], answer["seed"]) == (200, "text_completion", "tiny", 0)
    assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
    assert choice["stats"] == expected.stats.as_dict()
    prompt, completed = len(chatty().tokenizer.encode("Tom has 3")), len(expected.ids)
    counted = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert list(counted.values()) == [prompt, completed, prompt + completed]


def test_messages_are_answered_as_by_generate(server):
    messages = [{"role": "user", "content": "Tom?"}]
    (expected,) = alone(messages, decoder="ar", max_new_tokens=5)
    asked = {"messages": messages, "decoder": "ar", "max_tokens": 5, "logprobs": True, "return_token_ids": True}
    status, answer = ask(server, CHAT, asked)
    (choice,) = answer["choices"]
    assert (status, answer["object"]) == (200, "chat.completion")
    assert choice["message"] == {"role": "assistant", "content": expected.text}
    assert choice["token_ids"] == expected.ids
    said = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    np.testing.assert_allclose(said, expected.log_probs, atol=1e-4)


def test_a_request_brings_variables_of_the_chat_template(server):
    messages = [{"role": "user", "content": "Tom?"}]
    asked = {"messages": messages, "seed": 0, "return_token_ids": True}
    counts = {}
    for mood in ("", "glad and merry"):
        status, answer = ask(server, CHAT, asked | {"chat_template_kwargs": {"mood": mood}})
        text = chatty().tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, mood=mood)
        (expected,) = alone(text)
        assert (status, answer["choices"][0]["token_ids"]) == (200, expected.ids)
        counts[mood] = answer["usage"]["prompt_tokens"]
    assert counts["glad and merry"] > counts[""]
    for wrong, told in (
        ({"moody": 1}, "prompt: chat_template_kwargs: the tokenizer's chat template reads no 'moody'; leave it out"),
        ([1], "prompt: chat_template_kwargs must be an object, not [1]"),
    ):
        status, refused = ask(server, CHAT, asked | {"chat_template_kwargs": wrong})
        assert (status, refused["error"]["message"]) == (400, told)


def test_prompts_and_their_completions_are_choices_in_order(server):
    prompts = ["Tom has 3", [5, 6, 7]]
    _, answer = ask(server, COMPLETIONS, {"prompt": prompts, "n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 6})
    expected = generate(chatty(), prompts, dataclasses.replace(DEFAULTS, temperature=1.0, seed=3, max_new_tokens=6), 2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [c.text for c in expected]
    assert answer["usage"]["prompt_tokens"] == len(chatty().tokenizer.encode("Tom has 3")) + 3


def test_the_seed_of_an_answer_draws_it_again(server):
    asked = {"prompt": "Tom has 3", "temperature": 1.0}
    _, answer = ask(server, COMPLETIONS, asked)
    _, again = ask(server, COMPLETIONS, {**asked, "seed": answer["seed"]})
    assert again["choices"][0]["text"] == answer["choices"][0]["text"]


@pytest.mark.parametrize("stop", [None, "e"])
def test_a_stream_of_text_joins_to_the_answer(server, stop):
    asked = {"prompt": ["Tom has 3", "Anna"], "seed": 0, "stop": stop, "return_token_ids": True}
    _, whole = ask(server, COMPLETIONS, asked)
    said = events(server, COMPLETIONS, {**asked, "stream_options": {"include_usage": True}})
    *said, counted = said
    assert counted["choices"] == [] and counted["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        own = [event["choices"][0] for event in said if event["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [token for part in own for token in part.get("token_ids", [])] == choice["token_ids"]
        assert [part["finish_reason"] for part in own[:-1]] == [None] * (len(own) - 1)
        assert (own[-1]["finish_reason"], own[-1]["stats"]) == (choice["finish_reason"], choice["stats"])
    assert {event["id"] for event in said} == {counted["id"]}


@pytest.mark.parametrize(
    "path, prompt",
    [(COMPLETIONS, {"prompt": "Tom has 3"}), (CHAT, {"messages": [{"role": "user", "content": "Tom?"}]})],
)
def test_each_event_counts_the_tokens_that_it_and_those_before_have_brought(server, path, prompt):
    """As guidellm and vLLM's benchmark ask for it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {
        **prompt,
        "n": 2,
        "seed": 0,
        "temperature": 1.0,
        "ignore_eos": True,
        "max_tokens": 9,
        "return_token_ids": True,
    }
    *said, counted = events(server, path, {**asked, "stream_options": options})
    brought = [0, 0]
    for event in said:
        (choice,) = event["choices"]
        brought[choice["index"]] += len(choice.get("token_ids", []))
        prompt_tokens, completed = counted["usage"]["prompt_tokens"], brought[choice["index"]]
        assert event["usage"] == {
            "prompt_tokens": prompt_tokens, "completion_tokens": completed, "total_tokens": prompt_tokens + completed
        }  # fmt: skip
    assert brought == [9, 9]
    assert "usage" not in events(server, path, {**asked, "stream_options": {"continuous_usage_stats": True}})[0]


def test_a_stream_of_a_chat_begins_with_the_role_and_joins_to_the_answer(server):
    asked = {"messages": [{"role": "user", "content": "Tom?"}], "seed": 0}
    _, whole = ask(server, CHAT, asked)
    first, *said = (event["choices"][0] for event in events(server, CHAT, asked))
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert "".join(part["delta"].get("content", "") for part in said) == whole["choices"][0]["message"]["content"]
    assert said[-1]["delta"] == {} and said[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]


def test_an_echoed_prompt_is_scored_as_lm_eval_reads_it(server):
    prompt = [5, 9, 7, 20, 300]
    asked = {
        "prompt": [prompt, prompt[:3]],
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
        "decoder": "streaming",
        "n": 2,
    }
    _, answer = ask(server, COMPLETIONS, asked)
    model = chatty()
    logits = model(jnp.asarray([prompt]), positions=jnp.arange(len(prompt))[None])[0]
    log_p = np.asarray(jax.nn.log_softmax(logits))
    for choice, length in zip(answer["choices"], (5, 5, 3, 3), strict=True):
        said = choice["logprobs"]
        assert said["tokens"][:length] == [model.tokenizer.decode([i]) for i in prompt[:length]]
        assert choice["text"].startswith(model.tokenizer.decode(prompt[:length]))
        assert said["token_logprobs"][0] is None and said["top_logprobs"][0] is None
        expected = [log_p[i, prompt[i + 1]] for i in range(length - 1)]
        np.testing.assert_allclose(said["token_logprobs"][1:length], expected, atol=1e-5)
        largest = [list(top.values()) for top in said["top_logprobs"][1:length]]
        np.testing.assert_allclose(largest, log_p[: length - 1].max(-1, keepdims=True), atol=1e-5)
        assert len(said["token_logprobs"]) == length + 1  # and the one that was generated


def test_a_prompt_is_scored_alone_where_no_token_is_asked_for(server):
    asked = {"prompt": [[5, 9, 7], [5, 20]], "logprobs": 1, "echo": True, "return_token_ids": True}
    _, with_one = ask(server, COMPLETIONS, {**asked, "max_tokens": 1})
    status, alone = ask(server, COMPLETIONS, {**asked, "max_tokens": 0})
    assert (status, alone["usage"]["completion_tokens"]) == (200, 0)
    for ours, longer, prompt in zip(alone["choices"], with_one["choices"], asked["prompt"], strict=True):
        assert (ours["text"], ours["token_ids"]) == (chatty().tokenizer.decode(prompt), [])
        assert (ours["finish_reason"], ours["stats"]["generated_tokens"]) == ("length", 0)
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            assert ours["logprobs"][name] == longer["logprobs"][name][: len(prompt)]


def test_halves_of_characters_are_told_apart_by_name(server):
    """By names lm-eval finds out whether the tokens of an answer are the likeliest."""
    tokenizer = chatty().tokenizer
    halves = [i for i in range(len(tokenizer)) if "\N{REPLACEMENT CHARACTER}" in tokenizer.decode([i])][:20]
    asked = {"prompt": [*halves, 5, 9], "max_tokens": 1, "logprobs": 1, "echo": True}
    said = ask(server, COMPLETIONS, asked)[1]["choices"][0]["logprobs"]
    assert len({*said["tokens"][: len(halves)]}) == len(halves) > 1
    top = [(*scores.items(),)[0] for scores in said["top_logprobs"][1:-1]]
    likeliest = [name == likeliest for name, (likeliest, _) in zip(said["tokens"][1:], top, strict=False)]
    as_likely = [p >= best - 1e-6 for p, (_, best) in zip(said["token_logprobs"][1:], top, strict=False)]
    assert likeliest == as_likely


def test_scores_of_a_prompt_that_are_nan_are_null(server, monkeypatch):
    def nowhere(model, ids):
        unknown = np.full(len(ids), np.nan, np.float32)
        return Scores(unknown[1:], unknown, np.zeros(len(ids), np.int32), unknown, unknown)

    monkeypatch.setattr(answer_words, "score", nowhere)
    _, answer = ask(server, COMPLETIONS, {"prompt": [5, 9], "max_tokens": 1, "logprobs": 1, "echo": True})
    said = answer["choices"][0]["logprobs"]
    assert said["token_logprobs"][:2] == [None, None] and list(said["top_logprobs"][1].values()) == [None]


def test_one_prompt_at_a_time_is_scored_beside_the_engine(server, monkeypatch):
    """Or the forwards of many clients at once would take the memory of the engine's too."""
    score, scoring, most = answer_words.score, [], []

    def slow(model, ids):
        scoring.append(ids)
        most.append(len(scoring))
        time.sleep(0.05)
        scoring.pop()
        return score(model, ids)

    monkeypatch.setattr(answer_words, "score", slow)
    asked = {"prompt": [5, 9, 7], "max_tokens": 0, "logprobs": 1, "echo": True}
    with ThreadPoolExecutor(4) as clients:
        answers = [clients.submit(ask, server, COMPLETIONS, asked) for _ in range(4)]
        assert all(answer.result()[0] == 200 for answer in answers)
    assert most == [1, 1, 1, 1]


def test_over_a_mesh_nothing_is_scored_while_a_step_is_taken(monkeypatch):
    """Devices that are given two programs in different orders would each wait for the others."""
    engine = Engine(
        cut_over(tiny_model(0, EVEN), make_mesh(MeshConfig(tensor=2), jax.devices()[:2])), rows=1, context=64
    )
    stepped, steps = [], engine._steps_taken

    def during_a_step(model, ids):
        step = threading.Thread(target=engine.step, daemon=True)
        step.start()
        step.join(0.2)
        stepped.append(engine._steps_taken > steps)
        return Scores(*[np.zeros(len(ids), np.float32)] * 5)

    monkeypatch.setattr(answer_words, "score", during_a_step)
    asked = read_asked({"prompt": [5, 9], "max_tokens": 0, "logprobs": 1, "echo": True}, DEFAULTS, chat=False)
    ticket = engine.submit([5, 9], dataclasses.replace(asked.config, max_new_tokens=1))
    ticket.cancel()
    Answer(engine, "tiny", asked, [ticket], chat=False).whole()
    assert stepped == [False]


def test_an_answer_that_nobody_limits_ends_where_the_context_does(server):
    _, answer = ask(server, COMPLETIONS, {"prompt": [5] * 90, "seed": 0, "stop_ids": []})
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 6


def test_clients_at_once_each_get_their_own_answer(server):
    prompts = [[5, 6, 7 + i] for i in range(10)]

    def client(prompt):
        asked = {"prompt": prompt, "seed": 0, "max_tokens": 8}
        if prompt[-1] % 2:
            return "".join(event["choices"][0]["text"] for event in events(server, COMPLETIONS, asked))
        return ask(server, COMPLETIONS, asked)[1]["choices"][0]["text"]

    with ThreadPoolExecutor(5) as threads:
        answers = list(threads.map(client, prompts))
    assert answers == [alone(prompt, max_new_tokens=8)[0].text for prompt in prompts]


def test_a_connection_serves_one_request_after_another(server):
    with contextlib.closing(connect(server)) as connection:
        for path, status in (("/v1/models", 200), ("/nowhere", 404), ("/health", 200)):
            connection.request("GET", path)
            reply = connection.getresponse()
            assert (reply.status, bool(json.loads(reply.read()))) == (status, True)
        for prompt, status in (("Tom", 200), ("", 400), ("Tom", 200)):
            connection.request("POST", COMPLETIONS, json.dumps({"prompt": prompt, "max_tokens": 2}), JSON)
            reply = connection.getresponse()
            assert (reply.status, bool(json.loads(reply.read()))) == (status, True)


def test_a_body_may_come_in_chunks_and_the_connection_goes_on(server):
    """As of Node's `req.write`, Java's `ofInputStream` and generators of httpx."""
    with contextlib.closing(connect(server)) as connection:
        for _ in range(2):
            connection.request("POST", COMPLETIONS, iter([b'{"prom', b'pt": ""}']), JSON)
            reply = connection.getresponse()
            assert reply.status == 400 and "prompt is empty" in json.loads(reply.read())["error"]["message"]


def test_of_a_head_the_headers_alone_are_sent(server):
    with contextlib.closing(connect(server)) as connection:
        for path, status in (("/health", 200), ("/v1/models", 200), ("/nowhere", 404), ("/health", 200)):
            connection.request("GET", path)
            whole = connection.getresponse()
            body = whole.read()
            connection.request("HEAD", path)
            reply = connection.getresponse()
            assert (reply.status, reply.headers["Content-Length"]) == (whole.status, str(len(body))) and body
            assert (reply.status, reply.read()) == (status, b"")  # and the connection goes on


def test_a_reply_is_written_at_once(server, monkeypatch):
    """Or a process that ends between two writes would leave a client with headers alone."""
    writes = []

    def set_up(handler, once=Handler.setup):
        once(handler)
        write = handler.wfile.write
        handler.wfile.write = lambda some: writes.append(bytes(some)) or write(some)

    monkeypatch.setattr(Handler, "setup", set_up)
    assert look(server, "/health")[0] == 200 and ask(server, COMPLETIONS, {"prompt": ""})[0] == 400
    assert [(reply[:9], reply[-1:]) for reply in writes] == [(b"HTTP/1.1 ", b"}")] * 2


def test_a_piece_does_not_wait_until_the_one_before_is_acknowledged(server, monkeypatch):
    """Which takes 40 ms on a connection that is kept open."""
    at_once = []

    def serve(handler, one=Handler.handle_one_request):
        at_once.append(handler.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        one(handler)

    monkeypatch.setattr(Handler, "handle_one_request", serve)
    assert ask(server, COMPLETIONS, {"prompt": "Tom", "max_tokens": 1})[0] == 200
    assert at_once and all(at_once)


def test_the_model_is_listed_by_its_name(server):
    (model,) = look(server, "/v1/models?limit=5")[1]["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 96)
    assert look(server, "/v1/models/t%69ny") == (200, model)
    assert look(server, "/v1/models/gpt")[0] == 404


@pytest.mark.parametrize(
    "path, body, headers, status, complaint",
    [
        ("/v1/embeddings", {}, JSON, 404, "/v1/embeddings: nothing is here; /v1/completions and"),
        (COMPLETIONS, {"prompt": "Tom", "model": "gpt"}, JSON, 404, "model='gpt': not served here; take 'tiny'"),
        (COMPLETIONS, {"prompt": "Tom", "tau": 1}, JSON, 400, "'tau': no such field"),
        (COMPLETIONS, {"prompt": [600]}, JSON, 400, "token id 600 is not in the vocabulary"),
        (COMPLETIONS, {"prompt": ["Tom", ""]}, JSON, 400, "prompt 1 is empty"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, JSON, 400, "message 0: content is int, not text"),
        (COMPLETIONS, b"{", JSON, 400, "the body is no JSON"),
        (COMPLETIONS, b"[" * 100_000, JSON, 400, "the body is no JSON"),
        (COMPLETIONS, {"prompt": "Tom"}, {"Content-Type": "text/plain"}, 415, "Content-Type: application/json"),
        (
            COMPLETIONS,
            {"prompt": "Tom"},
            {**JSON, "Host": "evil.example:80"},
            403,
            "ask for localhost, or for a proxy's name set WEDLM_JAX_API_KEY",
        ),
        (COMPLETIONS, {"prompt": "Tom"}, {**JSON, "Content-Length": "9" * 12}, 413, "the body may have"),
        (COMPLETIONS, {"prompt": "Tom"}, {**JSON, "Content-Length": "-1"}, 411, "Content-Length"),
        (COMPLETIONS, {"prompt": "Tom"}, {**JSON, "Content-Length": "9" * 5000}, 411, "Content-Length"),
        (COMPLETIONS, {"prompt": "Tom"}, {**JSON, "Content-Length": "1_7"}, 411, "Content-Length"),
        (COMPLETIONS, {"prompt": "Tom"}, {**JSON, "Transfer-Encoding": "gzip"}, 501, "send the body as chunked"),
        (COMPLETIONS, b"Tom\r\n", {**JSON, "Transfer-Encoding": "chunked"}, 400, "a chunk begins with no size"),
    ],
)
def test_what_is_refused_is_told_in_json(server, path, body, headers, status, complaint, capsys):
    code, answer = ask(server, path, body, headers)
    assert (code, answer["error"]["code"]) == (status, status)
    assert complaint in answer["error"]["message"]
    assert complaint in capsys.readouterr().err
    assert (server.service.engine.waiting, server.service.engine.running) == (0, 0)


@pytest.mark.parametrize(
    "body, complaint",
    [
        ({"prompt": [5] * 4, "max_tokens": 4096}, f"prompt is too long: 4 tokens + max_tokens=4096 {NO_MORE}; shorten it"),
        ({"prompt": [[5], [5] * 90], "max_completion_tokens": 7}, f"prompt 1 is too long: 90 tokens + max_tokens=7 {NO_MORE}"),
        ({"prompt": [5] * 96}, f"prompt is too long: 96 tokens leave no room for an answer {NO_MORE}; shorten it"),
        ({"prompt": [5] * 96, "max_tokens": 0, "echo": True}, "prompt is too long: 96 tokens leave no room for an answer"),
    ],
)  # fmt: skip
def test_what_the_served_context_has_no_room_for_is_told_in_the_words_of_the_protocol(server, body, complaint):
    """Of a model whose own context is 512."""
    status, answer = ask(server, COMPLETIONS, body)
    assert (status, answer["error"]["message"][: len(complaint)]) == (400, complaint)
    assert answer["error"]["code"] == "context_length_exceeded"


def test_text_that_cannot_fit_is_refused_before_it_is_encoded(server, monkeypatch):
    """While it is encoded, the texts of all other requests wait."""
    monkeypatch.setattr(service, "encode_prompt", lambda *_: pytest.fail("encoded"))
    for path, body in (
        (COMPLETIONS, {"prompt": "Tom " * 5000}),
        (CHAT, {"messages": [{"role": "user", "content": "Tom " * 5000}]}),
    ):
        status, answer = ask(server, path, body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert answer["error"]["message"].startswith("prompt is too long: ")
        assert f"characters {NO_MORE}; shorten it" in answer["error"]["message"]


def test_messages_that_cannot_fit_are_refused_before_they_are_searched_for_what_the_template_left_out(
    server, monkeypatch
):
    """It writes them once more for each, or searches all that it has written."""
    monkeypatch.setattr(chat, "_check_written", lambda *_, **__: pytest.fail("searched"))
    for messages, complaint in (
        ([{"role": "tool", "content": "Tom " * 5000}], f"characters {NO_MORE}"),
        ([{"role": "tool", "content": ""}] * 97, f"prompt is too long: 97 messages {NO_MORE}"),
    ):
        status, answer = ask(server, CHAT, {"messages": messages})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert complaint in answer["error"]["message"]


def test_no_text_that_fits_is_refused_before_it_is_encoded(server):
    """Of the longest token as many as there is room for, of characters that a normalizer makes one of."""
    tokenizer = server.service.engine.model.tokenizer
    longest = max((tokenizer.decode([token]) for token in range(len(tokenizer))), key=len)
    assert len(longest) * 96 * 4 <= server.service._most_characters < 4 * 5000
    assert ask(server, COMPLETIONS, {"prompt": longest * 95, "max_tokens": 1})[0] == 200


@pytest.mark.parametrize("host", ["localhost:80", "LOCALHOST", "127.0.0.1", "[::1]:80"])
def test_this_machine_may_be_called_by_its_address(server, host):
    assert ask(server, COMPLETIONS, {"prompt": "Tom", "max_tokens": 1}, {**JSON, "Host": host})[0] == 200


def test_more_requests_than_rows_are_free_and_may_wait_are_refused_whole(monkeypatch):
    with serving(rows=3, queue=2) as server:
        assert ask(server, COMPLETIONS, {"prompt": "Tom", "n": 5, "max_tokens": 2})[0] == 200
        monkeypatch.setattr(server.service.engine, "step", lambda: time.sleep(0.01))  # which starts nothing
        status, answer = ask(server, COMPLETIONS, {"prompt": "Tom", "n": 6})
        assert status == 400  # asking again would not help
        assert answer["error"]["message"] == "6 completions in one request: at most 5 may run and wait; ask in several"
        with contextlib.closing(connect(server)) as connection:
            connection.request("POST", COMPLETIONS, json.dumps({"prompt": "Tom"}), JSON)
            wait_for(lambda: server.service.engine.waiting == 1)
            status, answer = ask(server, COMPLETIONS, {"prompt": ["Tom"] * 5})
        assert (status, answer["error"]["message"]) == (429, "as many requests wait as queue=2 allows; ask again later")
        assert server.service.engine.waiting == 1


def test_one_thread_runs_the_engine_for_all_clients(server, monkeypatch):
    """Were it those of the clients, one by one, each would see what it got only when its turn comes round."""
    engine, stepping = server.service.engine, set()

    def step() -> bool:
        stepping.add(threading.get_ident())
        return type(engine).step(engine)

    monkeypatch.setattr(engine, "step", step)
    with ThreadPoolExecutor(5) as threads:
        asked = [{"prompt": "Tom", "max_tokens": 9, "stream": bool(i % 2)} for i in range(10)]
        list(threads.map(lambda body: post(server, body), asked))
    assert len(stepping) == 1


def test_a_stream_sends_what_every_step_commits(monkeypatch):
    with serving(steps=1) as server:
        engine = server.service.engine
        # Slow enough for each piece to be sent before the next one is there.
        monkeypatch.setattr(engine, "step", lambda: time.sleep(0.05) or type(engine).step(engine))
        said = events(
            server, COMPLETIONS, {"prompt": "Tom", "decoder": "ar", "max_tokens": 9, "return_token_ids": True}
        )
        assert sum(len(event["choices"][0].get("token_ids", [])) for event in said) == 9
        assert len(said) > 5


@pytest.mark.parametrize(("stream", "late"), [(False, b""), (True, b""), (False, b"\r\n")])
def test_the_row_of_a_client_that_leaves_is_free_again(monkeypatch, stream, late):
    """Also where it has sent something behind its body, which nobody reads."""
    with serving(context=512, rows=1) as server:
        engine, steps = server.service.engine, []
        monkeypatch.setattr(engine, "step", lambda: steps.append(time.sleep(0.02)) or type(engine).step(engine))
        with contextlib.closing(connect(server)) as connection:
            body = {"prompt": "Tom", "decoder": "ar", "max_tokens": 500, "stop_ids": [], "stream": stream}
            connection.request("POST", COMPLETIONS, json.dumps(body), JSON)
            wait_for(lambda: engine.running == 1)
            connection.sock.sendall(late)
        wait_for(lambda: engine.running == 0)
        assert len(steps) < 100
        assert ask(server, COMPLETIONS, {"prompt": "Tom", "max_tokens": 1})[0] == 200


def test_a_client_that_leaves_between_two_requests_is_no_error(monkeypatch, capsys):
    with serving() as server:
        left = threading.Event()
        monkeypatch.setattr(server, "shutdown_request", lambda _: left.set())  # the last that is done for a client
        with socket.create_connection(server.server_address[:2]) as raw:
            raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert raw.recv(4096).startswith(b"HTTP/1.1 200")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # at once, by a reset
        assert left.wait(30)
    assert capsys.readouterr().err == ""


def test_a_server_that_ends_answers_with_what_it_has():
    with serving(context=512, rows=1) as server, ThreadPoolExecutor(1) as thread:
        body = {"prompt": "Tom", "decoder": "ar", "max_tokens": 500, "stop_ids": []}
        answer = thread.submit(ask, server, COMPLETIONS, body)
        wait_for(lambda: server.service.engine.running == 1)
        server.service.close()
        status, said = answer.result()
        assert (status, said["choices"][0]["finish_reason"]) == (200, "cancelled")
        assert ask(server, COMPLETIONS, {"prompt": "Tom"})[0] == 503


def test_what_has_not_started_is_refused_where_the_server_ends(monkeypatch):
    """An empty answer would be taken for the model's."""
    with serving() as server, ThreadPoolExecutor(2) as threads:
        engine = server.service.engine
        monkeypatch.setattr(engine, "step", lambda: time.sleep(0.01))  # which starts nothing
        whole = threads.submit(ask, server, COMPLETIONS, {"prompt": "Tom", "n": 2})
        stream = threads.submit(post, server, {"prompt": "Tom", "stream": True})
        wait_for(lambda: engine.waiting == 3)
        assert server.service.close() and engine.waiting == 0
        status, answer = whole.result()
        assert (status, answer["error"]["message"]) == (503, "the server is about to end")
        assert stream.result().decode() == f"data: {json.dumps(answer)}\n\n"


def test_a_server_has_ended_once_the_last_refusal_is_written(monkeypatch):
    """Or the process is gone, and the client reads that the connection was closed."""
    written, refuse = [], Handler._refuse

    def slow(*said):
        time.sleep(0.2)
        refuse(*said)
        written.append(said)

    monkeypatch.setattr(Handler, "_refuse", slow)
    with serving() as server, ThreadPoolExecutor(1) as threads:
        engine = server.service.engine
        monkeypatch.setattr(engine, "step", lambda: time.sleep(0.01))
        threads.submit(ask, server, COMPLETIONS, {"prompt": "Tom"})
        wait_for(lambda: engine.waiting == 1)
        assert server.service.close() and len(written) == 1


def test_a_request_that_has_started_in_part_ends_with_what_it_has(monkeypatch):
    monkeypatch.setattr(service, "SECONDS_TO_END", 0.2)
    with serving() as server:
        monkeypatch.setattr(server.service.engine, "step", lambda: time.sleep(0.01))
        with server.service.serving(read_asked({"prompt": "Tom", "n": 2}, DEFAULTS, chat=False)) as call:
            call.tickets[0].waits = False
            server.service.close()
            assert [ticket.result().finish_reason for ticket in call.tickets] == ["cancelled"] * 2


def test_who_ends_a_server_is_told_whether_all_are_answered(monkeypatch):
    monkeypatch.setattr(service, "SECONDS_TO_END", 0.2)
    with serving() as server:
        asked = read_asked({"prompt": "Tom"}, DEFAULTS, chat=False)
        with server.service.serving(asked) as call:  # whose answer this thread never sends
            assert not server.service.close() and call.done
        assert server.service.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails_ends_the_server(stream, monkeypatch, capfd):
    ended = threading.Event()
    with serving() as server:
        monkeypatch.setattr(server.service, "_broken", ended.set)

        def fail() -> bool:
            raise RuntimeError("a device was lost")

        monkeypatch.setattr(server.service.engine, "step", fail)
        body = {"prompt": "Tom", "stream": stream}
        if stream:
            with contextlib.closing(connect(server)) as connection:
                connection.request("POST", COMPLETIONS, json.dumps(body), JSON)
                last = json.loads(connection.getresponse().read().decode().strip().split("data: ")[-1])
        else:
            status, last = ask(server, COMPLETIONS, body)
            assert status == 500
        assert last["error"] == {
            "message": "RuntimeError: a device was lost", "type": "server_error", "param": None, "code": 500
        }  # fmt: skip
        assert ended.wait(10)
        assert "a device was lost" in capfd.readouterr().err


def test_memory_that_runs_out_is_a_reply_or_the_end_of_a_stream_and_a_line_of_the_log(monkeypatch, capsys):
    with serving() as server:
        monkeypatch.setattr(server.service.engine, "step", lambda: fail_all(server))
        status, answer = ask(server, COMPLETIONS, {"prompt": "Tom"})
        assert (status, answer["error"]["message"]) == (503, "out of memory")
        streamed = post(server, {"prompt": "Tom", "stream": True}).decode()
        assert streamed == f"data: {json.dumps(answer)}\n\n"
    assert capsys.readouterr().err == "127.0.0.1 POST /v1/completions: 503: out of memory\n" * 2


def fail_all(server: Server) -> bool:
    for call in server.service._open:
        for ticket in call.tickets:
            ticket.fail(UserError("out of memory"))
    return False


def test_the_log_obeys_nobody(server, capsys):
    with socket.create_connection(server.server_address[:2]) as raw:
        raw.sendall(b"GET /\x1b[31mred HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert b" 404 " in b"".join(iter(lambda: raw.recv(4096), b""))
    assert "\x1b" not in (log := capsys.readouterr().err) and "/\\x1b[31mred: 404" in log


def test_a_place_that_takes_another_method_names_it(server):
    for path in (COMPLETIONS, CHAT):
        with contextlib.closing(connect(server)) as connection:
            connection.request("GET", path)
            reply = connection.getresponse()
            assert (reply.status, reply.headers["Allow"]) == (405, "POST")
            assert json.loads(reply.read())["error"]["message"] == f"{path}: send what you ask as JSON, by POST"


@pytest.mark.parametrize(
    "body", [b"Content-Length: 5\r\n\r\nhello", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"]
)
def test_the_body_of_a_get_is_no_request(server, body):
    with socket.create_connection(server.server_address[:2]) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + body)
        reply = b"".join(iter(lambda: raw.recv(4096), b""))
    assert reply.count(b"HTTP/1.1 ") == reply.count(b"{") == 1 and b"200 OK" in reply


def test_a_body_that_is_cut_short_is_no_request(server):
    with socket.create_connection(server.server_address[:2]) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
        raw.shutdown(socket.SHUT_WR)
        assert raw.recv(1) == b""


def test_what_is_no_http_is_refused_in_json(server):
    with socket.create_connection(server.server_address[:2]) as raw:
        raw.sendall(b"HELLO 'me' \"you\"\r\n\r\n")
        reply = b"".join(iter(lambda: raw.recv(4096), b""))
    assert json.loads(reply[reply.index(b"{") :])["error"]["code"] == 400


def test_a_place_where_nobody_can_listen_is_one_line(server):
    host, port = server.server_address[:2]
    with pytest.raises(UserError, match=f"--host {host} --port {port}: address already in use; choose another"):
        Server(host, port)
    with pytest.raises(UserError, match="--port 99999: .*; choose another"):
        Server("127.0.0.1", 99999)


def test_others_than_this_machine_are_served_by_any_name():
    """Where the command says so: `--host 0.0.0.0`."""
    with serving("0.0.0.0") as server:
        assert not server.is_local
        assert ask(server, COMPLETIONS, {"prompt": "Tom", "max_tokens": 1}, {**JSON, "Host": "box.lan"})[0] == 200


def test_a_server_with_a_key_answers_those_alone_who_bring_it():
    asked = {"prompt": "Tom", "max_tokens": 1}
    with serving(key="s3cret") as server:
        for brought in (
            {},
            {"Authorization": "s3cret"},
            {"Authorization": "Basic s3cret"},
            {"Authorization": "Bearer s3cre"},
            {"Authorization": "Bearer \xe9"},
        ):
            status, answer = ask(server, COMPLETIONS, asked, {**JSON, **brought})
            assert (status, answer["error"]["type"]) == (401, "invalid_request_error")
            assert look(server, "/v1/models", brought)[0] == 401
        with contextlib.closing(connect(server)) as connection:
            connection.request("GET", "/v1/models")
            assert connection.getresponse().headers["WWW-Authenticate"] == "Bearer"
        right = {"Authorization": "Bearer s3cret"}
        behind_proxy = {**JSON, **right, "Host": "llm.example.com"}  # which a page of that name could not send
        assert ask(server, COMPLETIONS, {"prompt": ""}, behind_proxy)[0] == 400
        assert ask(server, COMPLETIONS, asked, {**JSON, **right})[0] == 200
        assert (look(server, "/v1/models", right)[0], look(server, "/health")[0]) == (200, 200)
        assert look(server, "/v1/models", {"Authorization": "bearer  s3cret"})[0] == 200


def post(server: Server, body: dict) -> bytes:
    with contextlib.closing(connect(server)) as connection:
        connection.request("POST", COMPLETIONS, json.dumps(body), JSON)
        return connection.getresponse().read()


def wait_for(condition) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not happen within 30 s")
