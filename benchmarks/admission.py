"""What it costs an engine to start requests that come together, against the same requests one after another.

    python -m benchmarks.admission --model runs/34m --prompts 32 64 200

Prompts are random, so that nothing is reused; all are prefilled, and none is decoded. Both ways take turns.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Annotated

import jax
import numpy as np
import tyro

from benchmarks.side_by_side import machine, print_table
from wedlm_jax import DecodeConfig, Engine, load
from wedlm_jax.errors import entry
from wedlm_jax.evals.row_cost import median_ratio


@dataclasses.dataclass(frozen=True)
class Flags:
    model: Annotated[str, tyro.conf.arg(metavar="DIR")]
    decode: DecodeConfig = DecodeConfig("verified", max_new_tokens=8)
    prompts: tuple[int, ...] = (32, 64, 200)
    """Tokens of each."""
    requests: int = 16
    context: int = 1024
    rounds: int = 9


@entry
def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    model = load(flags.model, "float32")
    engine = Engine(model, rows=flags.requests, context=flags.context)
    random = np.random.default_rng(0)

    def admit(length: int, at_once: int) -> float:
        """Seconds until all are prefilled."""
        prompts = random.integers(0, model.config.vocab_size, (flags.requests, length)).tolist()
        seconds, tickets = 0.0, []
        for first in range(0, flags.requests, at_once):
            tickets += [engine.submit(prompt, flags.decode) for prompt in prompts[first : first + at_once]]
            start = time.perf_counter()
            engine._admit()
            jax.block_until_ready([group._state for group in engine._groups.values()])
            seconds += time.perf_counter() - start
        assert all(not ticket.waits for ticket in tickets)
        for ticket in tickets:
            ticket.cancel()
        return seconds

    rows = []
    for length in flags.prompts:
        turns = [(admit(length, flags.requests), admit(length, 1)) for _ in range(flags.rounds + 1)]
        together, apart = zip(*turns[1:], strict=True)  # the first compiles
        rows.append(
            (
                str(length),
                f"{1e3 * statistics.median(together):.1f}",
                f"{1e3 * statistics.median(apart):.1f}",
                f"{median_ratio(apart, together):.2f}",
            )
        )
    print_table(
        f"{machine()}; {flags.requests} requests, {flags.decode.decoder}, medians of {flags.rounds}",
        ("tokens of a prompt", "together, ms", "one after another, ms", "ratio"),
        rows,
    )


if __name__ == "__main__":
    main()
