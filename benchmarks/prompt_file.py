"""A file of prompts: batches that wait for their longest row, against an engine that gives a finished row to the next prompt.

    python -m benchmarks.prompt_file --model runs/quickstart
    python -m benchmarks.prompt_file --model runs/quickstart --shapes 34m --repeat 20    # behind a beginning that all share

The problems of all tasks, mixed, are completed both ways in turns, with the same tokens: by the model, and by random weights of a
shape, each as long as the model's completion was. `to compile`: what the first turn takes longer.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import tyro

from benchmarks import shapes
from benchmarks.random_model import random_model
from benchmarks.side_by_side import machine, print_table
from wedlm_jax import Completion, DecodeConfig, Model, load
from wedlm_jax.data.quickstart_tasks import TASKS
from wedlm_jax.decode.batches import in_batches
from wedlm_jax.decode.config import Decoder
from wedlm_jax.decode.generation import Request, make_request
from wedlm_jax.engine import in_order
from wedlm_jax.errors import entry
from wedlm_jax.evals.row_cost import median_ratio
from wedlm_jax.evals.tasks import task

SHARED = "Q: Count from 3 to 20. A: "


@dataclasses.dataclass(frozen=True)
class Flags:
    model: Annotated[str, tyro.conf.arg(metavar="DIR")]
    shapes: tuple[shapes.Name, ...] = ("34m",)
    decoders: tuple[Decoder, ...] = ("ar", "verified")
    limit: int = 16
    """Problems a task."""
    repeat: int = 0
    """How often a sentence of 15 tokens comes before every prompt."""
    rows: int = 16
    """Prompts decoded at once."""
    window_size: int = 8
    max_new_tokens: int = 64
    rounds: int = 5


@entry
def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    model = load(flags.model, "float32")
    context = model.config.max_position_embeddings
    models = {flags.model: model} | {name: random_model(name, model, context=context) for name in flags.shapes}
    prompts = [
        flags.repeat * SHARED + problem.prompt for name in TASKS for problem in task(name).problems(flags.limit, 0)
    ]
    np.random.default_rng(0).shuffle(prompts)
    rows = []
    for decoder in flags.decoders:
        config = DecodeConfig(decoder, window_size=flags.window_size, max_new_tokens=flags.max_new_tokens)
        requests = [make_request(model, prompt, config, row=0, name="prompt") for prompt in prompts]
        completions = list(in_batches(model, requests, batch_size=flags.rows))
        for label, of in models.items():
            own = requests if of is model else list(map(as_long, requests, completions))
            rows.append((label, decoder, *both_ways(of, own, flags)))
    print_table(
        f"{machine()}, float32, medians of {flags.rounds}: {len(prompts)} prompts, {flags.rows} at once",
        ("model", "decoder", "batches, s", "engine, s", "ratio", "batches, s to compile", "engine, s to compile"),
        rows,
    )


def as_long(request: Request, completion: Completion) -> Request:
    return request._replace(config=dataclasses.replace(request.config, stop_ids=(), max_new_tokens=len(completion.ids)))


def both_ways(model: Model, requests: Sequence[Request], flags: Flags) -> tuple[str, ...]:
    ways = (
        lambda: in_batches(model, requests, batch_size=flags.rows),
        lambda: in_order(model, requests, rows=flags.rows),
    )
    turns = []
    for _ in range(flags.rounds + 1):
        seconds, ids = [], []
        for complete in ways:
            start = time.perf_counter()
            ids.append([completion.ids for completion in complete()])
            seconds.append(time.perf_counter() - start)
        assert ids[0] == ids[1]
        turns.append(seconds)
    batches, engine = zip(*turns[1:], strict=True)
    medians = statistics.median(batches), statistics.median(engine)
    return (
        *(f"{seconds:.2f}" for seconds in medians),
        f"{median_ratio(batches, engine):.2f}",
        *(f"{first - later:.1f}" for first, later in zip(turns[0], medians, strict=True)),
    )


if __name__ == "__main__":
    main()
