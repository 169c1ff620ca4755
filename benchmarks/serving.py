"""What HTTP adds to an engine: the same requests submitted to one at once, and sent by clients to one behind a server.

    python -m benchmarks.serving --model runs/34m --clients 1 8 16

Clients have a process of their own, and each sends its next request once it has its answer. Both ways take turns.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import statistics
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated

import numpy as np
import tyro

from benchmarks.http_clients import Answered, ask_all
from benchmarks.side_by_side import machine, print_table
from wedlm_jax import DecodeConfig, Engine, load
from wedlm_jax.errors import entry
from wedlm_jax.evals.row_cost import median_ratio
from wedlm_jax.serve.http import Server
from wedlm_jax.serve.service import Service


@dataclasses.dataclass(frozen=True)
class Flags:
    model: Annotated[str, tyro.conf.arg(metavar="DIR")]
    decode: DecodeConfig = DecodeConfig("verified", max_new_tokens=64, stop_ids=())
    clients: tuple[int, ...] = (1, 8, 16)
    rows: int = 8
    context: int = 512
    steps: int = 4
    requests: int = 32
    prompt: int = 48
    """Tokens of each, of which none is shared."""
    rounds: int = 5


@entry
def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    model = load(flags.model, "float32")
    engine = Engine(model, rows=flags.rows, context=flags.context, steps=flags.steps)
    random = np.random.default_rng(0)

    def prompts() -> list[list[int]]:
        return random.integers(0, model.config.vocab_size, (flags.requests, flags.prompt)).tolist()

    def in_process(at_once: int) -> float:
        """Seconds, with so many requests in the engine at a time."""
        waiting, running, start = prompts(), [], time.perf_counter()
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(engine.submit(waiting.pop(), flags.decode))
            engine.step()
            running = [ticket for ticket in running if not ticket.done]
        return time.perf_counter() - start

    rows = []
    spawned = multiprocessing.get_context("spawn")
    with Server("127.0.0.1", 0) as server, ProcessPoolExecutor(1, spawned) as process:
        server.service = Service(engine, "model", flags.decode)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = server.server_address[:2]

        def served(clients: int, stream: bool) -> Answered:
            settings = {"seed": 0, "stream": stream, "max_tokens": flags.decode.max_new_tokens}
            return process.submit(ask_all, address, prompts(), settings, clients).result()

        for clients in flags.clients:
            turns = [
                (in_process(clients), served(clients, False), served(clients, True)) for _ in range(flags.rounds + 1)
            ]
            alone, whole, streamed = zip(*turns[1:], strict=True)  # the first compiles
            seconds = [alone, *([answered.seconds for answered in way] for way in (whole, streamed))]
            first = statistics.median(seconds for answered in streamed for seconds in answered.first)
            medians = (f"{statistics.median(of):.2f}" for of in seconds)
            ratios = (f"{median_ratio(of, alone):.2f}" for of in seconds[1:])
            rows.append((str(clients), *medians, *ratios, f"{1e3 * first:.0f}"))
        server.shutdown()
    print_table(
        f"{machine()}; {flags.requests} requests, {flags.decode.decoder}, {flags.rows} rows, medians of {flags.rounds}",
        ("clients", "engine, s", "served, s", "streamed, s", "served / engine", "streamed / engine", "first piece, ms"),
        rows,
    )


if __name__ == "__main__":
    main()
