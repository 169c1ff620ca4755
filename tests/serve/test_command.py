"""`python -m wedlm_jax.serve`: it says where it is, answers, and ends with the signal; bad flags are one line."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.one_line import complaint_of
from wedlm_jax import DecodeConfig, generate, load, save
from wedlm_jax.serve import __main__ as command

from ..conftest import FULL
from .client import chatty

FLAGS = ("--decoder", "ar", "--max-new-tokens", "9", "--context", "120", "--rows", "2", "--name", "tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "chat"
    save(chatty(), path)
    return str(path)


@pytest.mark.parametrize("number", [signal.SIGTERM, *([signal.SIGINT] if FULL else [])])
def test_it_serves_until_a_signal_ends_it(folder, number):
    started = [sys.executable, "-m", "wedlm_jax.serve", "--model", folder, "--port", "0", *FLAGS]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "WEDLM_JAX_API_KEY": "s3cret"}
    with subprocess.Popen(started, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            said: list[str] = []
            while not said or "Ctrl-C ends" not in said[-1]:
                said.append(process.stderr.readline())
                assert said[-1], said
            url = re.search(r"^tiny at (http://127\.0\.0\.1:\d+/v1): 2 rows of 120 tokens", said[-1])[1]
            body = json.dumps({"model": "tiny", "prompt": "Tom has 3", "seed": 0}).encode()
            headers = {"Content-Type": "application/json", "Authorization": "Bearer s3cret"}
            request = urllib.request.Request(f"{url}/completions", body, headers)
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{url}/models", timeout=60)
            with urllib.request.urlopen(request, timeout=60) as reply:
                (choice,) = json.loads(reply.read())["choices"]
            (expected,) = generate(load(folder), ["Tom has 3"], DecodeConfig("ar", max_new_tokens=9))
            assert choice["text"] == expected.text
            process.send_signal(number)
            rest = process.stderr.read()
            assert process.wait(60) == 0
            refused = r"127\.0\.0\.1 GET /v1/models: 401: .*\n"
            answered = r"127\.0\.0\.1 POST /v1/completions: 9 tokens, 1\.00 per forward, .* s\n"
            assert re.fullmatch(f"{refused}{answered}ending; once more ends at once\n", rest)
        finally:
            process.kill()


def test_it_answers_and_ends_well_where_nobody_reads_its_log(folder):
    """As behind `| tee`, which Ctrl-C ends before it."""
    started = [sys.executable, "-m", "wedlm_jax.serve", "--model", folder, "--port", "0", *FLAGS]
    with subprocess.Popen(
        started, stderr=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    ) as process:
        try:
            while not (found := re.search(r"at http://127\.0\.0\.1:(\d+)/v1", process.stderr.readline())):
                assert process.poll() is None
            process.stderr.close()
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
            for body, status in (({"prompt": ""}, 400), ({"prompt": "Tom", "max_tokens": 2}, 200)):
                connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                reply = connection.getresponse()
                assert (reply.status, bool(json.loads(reply.read()))) == (status, True)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_its_log_tells_what_a_request_waits_for(folder):
    """A cache that is taken for the first request of another decoder, and what is compiled: of its own nothing is any more."""
    script = "from wedlm_jax.serve import __main__ as command; command.LONG = 0; command.main()"
    with subprocess.Popen(
        [sys.executable, "-c", script, "--model", folder, "--port", "0", *FLAGS],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    ) as process:  # fmt: skip
        try:
            while not (found := re.search(r"at http://127\.0\.0\.1:(\d+)/v1", process.stderr.readline())):
                assert process.poll() is None
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
            for changes in ({"temperature": 0.7, "top_p": 0.9}, {}, {"decoder": "streaming"}):
                body = json.dumps({"prompt": [5, 6], "max_tokens": 2, **changes})
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                reply = connection.getresponse()
                assert (reply.status, bool(reply.read())) == (200, True)
            process.send_signal(signal.SIGINT)
            said = process.stderr.read()
            own, other = said.split("taking a cache of ")
            assert re.fullmatch(r"(127\.0\.0\.1 POST /v1/completions: 2 tokens, .* s\n){2}", own)
            assert re.match(r".*: 2 rows of \d+ slots for decoder=streaming\n", other)
            assert re.search(r"^compiled a program in \d+\.\d s$", other, re.MULTILINE)
            assert process.wait(60) == 0
        finally:
            process.kill()


# Once it serves, a step never ends, or the scoring of a prompt: {never} says which.
NEVER_ENDS = """
import threading
import jax
from wedlm_jax.engine import Engine
from wedlm_jax.serve import answer, service
from wedlm_jax.serve.__main__ import main

def never(*_):
    some = jax.jit(lambda: jax.lax.while_loop(lambda i: i < 10**7, lambda i: i + 1, 0))
    while True:  # a thread that comes out of XLA once Python ends is what aborts
        jax.block_until_ready(some())

def step(engine, once=Engine._step):
    return once(engine) if threading.current_thread() is threading.main_thread() else never()

{never}
main()
"""


@pytest.mark.parametrize(
    "never, signals, status",
    [
        ("Engine._step = step", [signal.SIGINT] * 2, 130),
        *([("answer.score = never", [signal.SIGINT] * 2, 130)] if FULL else []),
        ("answer.score, service.SECONDS_TO_END = never, 0.2", [signal.SIGTERM], 0),
    ],
)
def test_it_ends_though_a_thread_is_inside_xla(folder, never, signals, status):
    """Python's own end would abort there. A second signal ends it at once, else it waits for a while."""
    script = NEVER_ENDS.replace("{never}", never)
    flags = ("--decoder", "ar", "--rows", "2", "--port", "0")
    with subprocess.Popen(
        [sys.executable, "-c", script, "--model", folder, *flags],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    ) as process:  # fmt: skip
        try:
            while not (found := re.search(r"at http://127\.0\.0\.1:(\d+)/v1", process.stderr.readline())):
                assert process.poll() is None
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]))
            body = json.dumps({"prompt": "Tom has 3", "max_tokens": 0, "echo": True, "logprobs": 0})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            time.sleep(0.5)
            process.send_signal(signals[0])
            assert process.stderr.readline() == "ending; once more ends at once\n"
            for number in signals[1:]:
                time.sleep(0.1)
                process.send_signal(number)
            assert process.stderr.read() == "ended before every answer was sent\n"
            assert process.wait(60) == status
        finally:
            process.kill()


@pytest.mark.parametrize(
    "flags, complaint",
    [
        (("--rows", "0"), "rows=0"),
        (("--context", "2"), "--context 2: must be at least 3"),
        (("--context", "100000"), "context=100000: the model's is 512"),
        (("--seed", "3"), "--seed does nothing here"),
        (("--host", ""), "--host is empty: 127.0.0.1 is for this machine alone"),
        (("--host", "no.such.host.invalid"), "--host no.such.host.invalid --port 0"),
        (("--model", "nowhere"), "nowhere: no such directory"),
        (("--window-size", "0"), "window_size=0"),
        (("--cache-limit", "0"), "cache_limit=0: must be a number of bytes"),
    ],
)
def test_bad_flags_are_one_line(folder, flags, complaint, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serve", "--model", folder, "--port", "0", *flags])
    assert complaint in complaint_of(capsys, command.main)


def test_a_key_that_no_header_holds_is_one_line(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serve", "--model", folder, "--port", "0"])
    for key in ("", " s3cret", "schlüssel", "two\nlines"):
        monkeypatch.setenv("WEDLM_JAX_API_KEY", key)
        assert complaint_of(capsys, command.main).startswith("error: WEDLM_JAX_API_KEY: ")


def test_a_port_in_use_is_told_before_a_model_is_loaded(folder, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setattr(sys, "argv", ["serve", "--model", "nowhere", "--port", port])
        said = complaint_of(capsys, command.main)
    assert said == f"error: --host 127.0.0.1 --port {port}: address already in use; choose another"
