"""What a request that runs alone costs in an engine of many rows: all of them computed, or as few as the engine comes to.

    python -m benchmarks.few_rows --model runs/34m

Three engines take turns with the same request: of one row; of many, held to computing all; and of many as it is, once it has
compiled its program for the fewest. How many seconds of requests that took is told too.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Annotated

import numpy as np
import tyro

from benchmarks.side_by_side import machine, print_table
from wedlm_jax import DecodeConfig, Engine, load
from wedlm_jax.decode.config import Decoder
from wedlm_jax.engine.row_counts import RowCounts
from wedlm_jax.errors import entry
from wedlm_jax.evals.row_cost import median_ratio


@dataclasses.dataclass(frozen=True)
class Flags:
    model: Annotated[str, tyro.conf.arg(metavar="DIR")]
    decoders: tuple[Decoder, ...] = ("ar", "streaming", "verified")
    rows: int = 8
    context: int = 512
    tokens: int = 128
    """To return."""
    rounds: int = 7


@entry
def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    model = load(flags.model, "float32")
    random = np.random.default_rng(0)

    def milliseconds(engine: Engine, config: DecodeConfig) -> float:
        """Of a step, prefill and the host's part among them."""
        prompt = random.integers(0, model.config.vocab_size, 32).tolist()
        start = time.perf_counter()
        stats = engine.submit(prompt, config).result().stats
        return 1e3 * (time.perf_counter() - start) / stats.forwards

    table = []
    for decoder in flags.decoders:
        config = DecodeConfig(decoder, max_new_tokens=flags.tokens, stop_ids=())
        one, held, free = (Engine(model, rows=rows, context=flags.context) for rows in (1, flags.rows, flags.rows))
        for engine in (one, held, free):
            milliseconds(engine, config)  # compiles
        (group,) = held._groups.values()
        group._counts = RowCounts(flags.rows, 1, model.window_table, fixed=True)
        (group,) = free._groups.values()
        fewest = min(group._counts._cost)
        start = time.perf_counter()
        while group._counts.choose(1) > fewest:
            milliseconds(free, config)
        waited = time.perf_counter() - start
        milliseconds(free, config)  # compiles
        turns = [[milliseconds(engine, config) for engine in (one, held, free)] for _ in range(flags.rounds)]
        alone, all_rows, few = zip(*turns, strict=True)
        times = (f"{statistics.median(of):.2f}" for of in (alone, all_rows, few))
        table.append((decoder, *times, f"{median_ratio(all_rows, few):.2f}", str(fewest), f"{waited:.1f}"))
    print_table(
        f"{machine()}, float32, medians of {flags.rounds}: one request at a time, ms a step in an engine of one row and of "
        f"{flags.rows}",
        ("decoder", "one row", "all rows", "as it is", "all / as it is", "rows computed", "s until then"),
        table,
    )


if __name__ == "__main__":
    main()
