"""Clients of a server, for a process of their own: it imports nothing that the server needs."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple


class Answered(NamedTuple):
    seconds: float  # until all had their answers
    first: list[float]  # for each, until the first line of its answer came


def ask_all(address: tuple[str, int], prompts: Sequence[Sequence[int]], settings: dict, clients: int) -> Answered:
    """Every prompt by one of so many clients at once, each over one connection after another."""

    def ask(prompt: Sequence[int]) -> float:
        start = time.perf_counter()
        connection = http.client.HTTPConnection(*address)
        body = json.dumps({"prompt": prompt, **settings})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        reply.readline()
        first = time.perf_counter() - start
        reply.read()
        connection.close()
        assert reply.status == 200, reply.status
        return first

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        first = list(threads.map(ask, prompts))
    return Answered(time.perf_counter() - start, first)
