"""What a decode step of a request costs beside rows that have finished and still hold a long context, for prefix reuse.

    python -m benchmarks.random_model runs/34m --shape 34m --tokenizer runs/quickstart
    python -m benchmarks.idle_rows --model runs/34m

Two engines take turns with the same request: one that ran nothing else, and one whose other rows hold `held` tokens each.
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
from wedlm_jax.errors import entry
from wedlm_jax.evals.row_cost import median_ratio


@dataclasses.dataclass(frozen=True)
class Flags:
    model: Annotated[str, tyro.conf.arg(metavar="DIR")]
    decoders: tuple[Decoder, ...] = ("ar", "verified")
    held: int = 2000
    """Tokens in each of the other rows, with 32 to spare in the model's context (of `random_model` 2048)."""
    rows: int = 4
    tokens: int = 128
    """To return."""
    rounds: int = 5


@entry
def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    model = load(flags.model, "float32")
    random = np.random.default_rng(0)

    def prompt(length: int) -> list[int]:
        return random.integers(0, model.config.vocab_size, length).tolist()

    def milliseconds(engine: Engine, config: DecodeConfig) -> float:
        """Of a step, prefill and the host's part among them."""
        start = time.perf_counter()
        stats = engine.submit(prompt(32), config).result().stats
        return 1e3 * (time.perf_counter() - start) / stats.forwards

    rows = []
    for decoder in flags.decoders:
        config = DecodeConfig(decoder, max_new_tokens=flags.tokens, stop_ids=())
        engines = [Engine(model, rows=flags.rows, context=flags.held + 32) for _ in range(2)]
        long = [prompt(flags.held) for _ in range(flags.rows - 1)]
        turns = []
        for _ in range(flags.rounds + 1):
            # In every turn, so that the timed request gets the row that was used longest ago: the last one.
            for one in long:
                engines[1].submit(one, dataclasses.replace(config, max_new_tokens=8)).result()
            turns.append([milliseconds(engine, config) for engine in engines])
        alone, beside = zip(*turns[1:], strict=True)  # the first compiles
        figures = (
            f"{statistics.median(alone):.2f}",
            f"{statistics.median(beside):.2f}",
            f"{median_ratio(beside, alone):.2f}",
        )
        rows.append((decoder, *figures))
    print_table(
        f"{machine()}, float32, medians of {flags.rounds}: one request in {flags.rows} rows, of which the others hold "
        f"{flags.held:,} tokens or nothing",
        ("decoder", "ms a step, nothing held", "held", "ratio"),
        rows,
    )


if __name__ == "__main__":
    main()
