"""A server of a tiny model over loopback, in this process, and a client that speaks plain HTTP."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

from wedlm_jax import DecodeConfig, Engine, Model
from wedlm_jax.serve.http import Server
from wedlm_jax.serve.service import Service

from ..evals.models import tiny_model
from ..test_notebooks import CHATML

DEFAULTS = DecodeConfig("verified", window_size=4, max_new_tokens=12)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


@functools.cache
def chatty() -> Model:
    tokenizer = copy.deepcopy(tiny_model().tokenizer)
    tokenizer.chat_template = CHATML + "{{ mood }}"
    return dataclasses.replace(tiny_model(), tokenizer=tokenizer)


@contextlib.contextmanager
def serving(host: str = "127.0.0.1", key: str | None = None, **sizes: Any) -> Iterator[Server]:
    with Server(host, 0, key) as server:
        engine = Engine(chatty(), **{"rows": 3, "context": 96, "steps": 2, **sizes})
        server.service = Service(engine, "tiny", DEFAULTS, broken=server.shutdown)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.service.close()
            server.shutdown()
            thread.join()


def connect(server: Server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(*server.server_address[:2], timeout=60)


def ask(server: Server, path: str, body: Any, headers: dict[str, str] = JSON) -> tuple[int, Any]:
    """Status and JSON of the reply."""
    with contextlib.closing(connect(server)) as connection:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, raw, headers)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


def look(server: Server, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Status and JSON of what a GET is answered."""
    with contextlib.closing(connect(server)) as connection:
        connection.request("GET", path, headers=headers or {})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


def events(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a stream, to its end."""
    with contextlib.closing(connect(server)) as connection:
        connection.request("POST", path, json.dumps({**body, "stream": True}), JSON)
        reply = connection.getresponse()
        assert (reply.status, reply.headers["Content-Type"]) == (200, "text/event-stream")
        *said, end, rest = reply.read().decode().split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in said]
