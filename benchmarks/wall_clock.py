"""What decoding costs in wall-clock: the row-cost curve of a model, the length of the cache, and verified decoding against AR.

    python -m benchmarks.wall_clock --model runs/quickstart                        # all parts: quickstart, 34M and 110M, float32
    python -m benchmarks.wall_clock --model runs/quickstart --parts curve --shapes 110m

`curve`: a forward over 1, 2, 4, ... slots against one over one token, and against the plain products of as many rows,
without and with those of attention.
`allocated`: a forward over 16 slots behind 200 used slots of a cache of 512 to 8192.
`speed`: verified decoding against AR by the clock, prefill not in it. Of the model itself as it is. Of a shape, what the model
did is replayed over random weights: each step feeds as many slots and accepts as many as the recorded one, with all that a
step computes. Programs take turns, and ratios are medians over turns.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.progress import track

from benchmarks import shapes
from benchmarks.random_model import random_model
from benchmarks.side_by_side import machine, print_table
from wedlm_jax import DecodeConfig, Model, generate, load
from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.first_drafts import masks_in_prefill
from wedlm_jax.decode.generation import Batch, bucket, make_request
from wedlm_jax.decode.prompts import encode_prompt
from wedlm_jax.decode.selection import select_drafts
from wedlm_jax.decode.state import DecodeState, advance, emit
from wedlm_jax.decode.text_drafts import with_text
from wedlm_jax.decode.verified import widths
from wedlm_jax.decode.window import window_forward
from wedlm_jax.errors import entry
from wedlm_jax.evals.row_cost import forward_program, in_turns, median_ratio, row_costs
from wedlm_jax.evals.tasks import task
from wedlm_jax.model.parameters import params_of
from wedlm_jax.model.transformer import Transformer
from wedlm_jax.model.weights import Weights
from wedlm_jax.ops.categorical import entropy

Part = Literal["curve", "allocated", "speed"]
TASKS = ("word_problems", "counting")


@dataclasses.dataclass(frozen=True)
class Flags:
    model: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """Whose curve is measured first, and whose steps are replayed."""
    shapes: tuple[shapes.Name, ...] = ("34m", "110m")
    parts: tuple[Part, ...] = ("curve", "allocated", "speed")
    slots: tuple[int, ...] = (1, 2, 4, 8, 16, 20, 24, 32)
    context: int = 200
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    limit: int = 20
    """Problems a task."""
    max_new_tokens: int = 64
    windows: tuple[int | Literal["auto"], ...] = (4, 8, 16, "auto")
    rounds: int = 9


@dataclasses.dataclass(frozen=True)
class Steps:
    """One completion of the model."""

    prompt: list[int]
    lead: list[int]  # filled slots that each forward checked, the pending token among them
    fed: list[int]
    emitted: list[int]


@entry
def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    model = load(flags.model, "float32")
    context = max(2048, model.config.max_position_embeddings)
    models = {flags.model: model} | {name: random_model(name, model, context=context) for name in flags.shapes}
    print(f"{machine()}, medians of {flags.rounds}, float32\n")
    for part in flags.parts:
        {"curve": curve, "allocated": allocated, "speed": speed}[part](flags, models)


def curve(flags: Flags, models: dict[str, Model]) -> None:
    for name, model in models.items():
        context = min(flags.context, model.config.max_position_embeddings - max(flags.slots))
        sizes = dict(rows=1, context=context, allocated=bucket(max(256, context + max(flags.slots))))
        costs = row_costs(model.config, params_of(model.transformer), slots=flags.slots, rounds=flags.rounds, **sizes)
        print_table(
            f"Cost of a forward, {name}, {context} of {sizes['allocated']} slots used",
            ("slots", "ms", "of one token", "of the plain products", "attention's among them"),
            [
                (
                    str(c.slots),
                    f"{1e3 * c.seconds:.2f}",
                    f"{c.over_one:.2f}",
                    f"{c.over_products:.2f}",
                    f"{c.over_all_products:.2f}",
                )
                for c in costs
            ],
        )
        print()


def allocated(flags: Flags, models: dict[str, Model]) -> None:
    for name, model in list(models.items())[1:]:
        params = params_of(model.transformer)
        sizes = dict(rows=1, slots=16, context=flags.context)
        programs = {n: forward_program(model.config, params, allocated=n, **sizes) for n in flags.lengths}
        seconds = in_turns(programs, flags.rounds)
        print_table(
            f"16 slots behind {flags.context} used ones, {name}",
            ("slots of the cache", "ms", f"of {flags.lengths[0]}"),
            [
                (
                    str(n),
                    f"{1e3 * statistics.median(seconds[n]):.2f}",
                    f"{median_ratio(seconds[n], seconds[flags.lengths[0]]):.3f}",
                )
                for n in flags.lengths
            ],
        )
        print()


def speed(flags: Flags, models: dict[str, Model]) -> None:
    model = models[flags.model]
    rows = []
    cells = list(itertools.product(TASKS, flags.windows, models.items()))
    for name, window, (label, of) in track(cells, "speed", console=Console(stderr=True)):
        prompts = [encode_prompt(model, problem.prompt) for problem in task(name).problems(flags.limit, 0)]
        config = DecodeConfig("verified", window_size=window, max_new_tokens=flags.max_new_tokens)
        recorder = dataclasses.replace(model)
        recorder.window_table = of.window_table  # what an automatic window goes by
        recorded = [steps_of(recorder, prompt, config) for prompt in prompts]
        rows.append((label, name, str(window), *against_ar(of, recorded, config, flags, replays=of is not model)))
    print_table(
        f"Verified decoding against AR, {flags.limit} problems a task, one at a time, prefill not in it",
        (
            "model",
            "task",
            "window",
            "tokens/forward",
            "slots/forward",
            "row cost",
            "ms",
            "AR ms",
            "faster",
            "of what they allow",
        ),
        sorted(rows),
    )


def steps_of(model: Model, prompt: list[int], config: DecodeConfig) -> Steps:
    [completion] = generate(model, [prompt], config, trace=True)
    assert completion.trace is not None
    windows = [entry["window"] for entry in completion.trace]
    lead = [next((i for i, token in enumerate(w) if token is None), len(w)) for w in windows]
    return Steps(prompt, lead, [len(w) for w in windows], [entry["emitted"] for entry in completion.trace])


def against_ar(
    model: Model, recorded: Sequence[Steps], config: DecodeConfig, flags: Flags, *, replays: bool
) -> tuple[str, ...]:
    """One line of the table. Row cost: the mean of forwards over just the slots that each step feeds, of one over a single slot.
    "Of what they allow": the speed-up over tokens per forward / row cost, all of one turn."""
    tokens, forwards = sum(sum(s.emitted) for s in recorded), sum(len(s.emitted) for s in recorded)
    fed = [slots for s in recorded for slots in s.fed]
    context = round(statistics.mean(len(s.prompt) + sum(s.emitted) / 2 for s in recorded))
    sizes = dict(rows=1, context=context, allocated=context + 2 * config.slots(model.window_table))
    params = params_of(model.transformer)
    programs = {n: forward_program(model.config, params, slots=n, **sizes) for n in sorted({1, *fed})}
    ar_config = dataclasses.replace(config, decoder="ar", window_size=16)
    turns = []
    for _ in range(flags.rounds + 1):
        seconds = {slots: one for slots, [one] in in_turns(programs, 1).items()}
        row_cost = statistics.mean(seconds[slots] for slots in fed) / seconds[1]
        turns.append((row_cost, decode(model, recorded, config, replays=replays), decode(model, recorded, ar_config)))
    row_costs, ours, theirs = zip(*turns[1:], strict=True)  # the first compiles
    faster = [ar / verified for verified, ar in zip(ours, theirs, strict=True)]
    of_allowed = [f * row_cost * forwards / tokens for f, row_cost in zip(faster, row_costs, strict=True)]
    return (
        f"{tokens / forwards:.2f}", f"{statistics.mean(fed):.1f}", f"{statistics.median(row_costs):.2f}",
        f"{1e3 * statistics.median(ours) / forwards:.2f}", f"{1e3 * statistics.median(theirs) / tokens:.2f}",
        f"{statistics.median(faster):.2f}", f"{statistics.median(of_allowed):.2f}",
    )  # fmt: skip


def decode(model: Model, recorded: Sequence[Steps], config: DecodeConfig, *, replays: bool = False) -> float:
    """Seconds of all completions, one after the other, prefill not in it. AR and replays end by their number of tokens."""
    seconds = 0.0
    for steps in recorded:
        generated, own = sum(steps.emitted), config
        if config.decoder == "ar":
            own = dataclasses.replace(config, stop_ids=(), max_new_tokens=generated)
        elif replays:
            own = dataclasses.replace(config, stop_ids=())
        batch = Batch(model, [make_request(model, steps.prompt, own, row=0, name="prompt")])
        jax.block_until_ready(batch.state)
        start = time.perf_counter()
        state = jax.block_until_ready(replay(batch, steps) if replays else batch.run())
        seconds += time.perf_counter() - start
        assert int(state.generated[0]) == generated
        assert config.decoder == "ar" or int(state.processed[0]) == masks_in_prefill(
            config, 1, model.window_table
        ) + sum(steps.fed)
    return seconds


def replay(batch: Batch, steps: Steps) -> DecodeState:
    """Verified decoding whose steps feed and accept what the recorded ones did."""
    counts = np.array([steps.lead, steps.emitted, steps.fed])
    # So that few lengths are compiled.
    padded = np.pad(counts, ((0, 0), (0, bucket(counts.shape[1]) - counts.shape[1])))
    return _replay(batch.weights, batch.state, batch.settings, jnp.asarray(padded), counts.shape[1])


@functools.partial(jax.jit, donate_argnames="state")
def _replay(
    weights: Weights, state: DecodeState, settings: RowSettings, counts: jax.Array, steps: jax.Array
) -> DecodeState:
    def step(transformer: Transformer, number: jax.Array, state: DecodeState) -> DecodeState:
        C, slots = state.window.shape[1], state.slots
        lead, accepted, fed = counts[:, number, None]
        text, _ = with_text(state, settings, settings.window_size)  # for its time: what was recorded has chosen already
        state = dataclasses.replace(state, window=text.window, filled=slots < lead[:, None])
        state, reading = window_forward(
            transformer, state, settings, fed, slots < fed[:, None], widths=widths(C, 1, settings.window_table, settings.adapts),
            most_read=C, score=entropy,
        )  # fmt: skip
        state, kept = emit(state, settings, reading.tokens, accepted, reading.log_probs)
        masked = (slots >= accepted[:, None]) & (slots < fed[:, None])
        rule = (settings.entropy_threshold, settings.distance_penalty, settings.rule)
        filling = select_drafts(reading.scores, masked, *rule)
        window = jnp.where(filling, reading.tokens, state.window)
        return advance(dataclasses.replace(state, window=window), kept)

    with weights.transformer() as transformer:
        return jax.lax.fori_loop(0, steps, functools.partial(step, transformer), state)


if __name__ == "__main__":
    main()
