"""Our streaming beside the official engine: same weights, prompts and settings, in turns, and the matmul floor beside them."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence

import jax
from rich import box
from rich.table import Table

from wedlm_jax.baselines.process import PAUSE, Baseline
from wedlm_jax.data.quickstart_tasks import Problem
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.generation import Batch, make_request, memory_errors
from wedlm_jax.engine.prefix import shared_length
from wedlm_jax.evals.row_cost import product_seconds
from wedlm_jax.evals.speed import Work, prompts_of
from wedlm_jax.evals.sweep import resolved
from wedlm_jax.model.handle import Model
from wedlm_jax.model.parameters import params_of


@dataclasses.dataclass(frozen=True)
class Beside:
    """Both on one piece of work. Times are of decode steps alone, forwards of the batch; prefill is not in them."""

    work: Work
    steps: tuple[int, int]  # official, ours
    seconds: tuple[float, float]  # a step, medians of the repeats
    faster: float  # official over ours, the median of the repeats
    floor_seconds: float  # plain products of as many rows as a step of ours feeds on average
    slots: float  # that a row feeds to a step of ours on average
    same_rows: int  # whose tokens are the same
    parts_at: tuple[int, int] | None  # row and token of the first difference


def streaming_as_official(config: DecodeConfig, max_new_tokens: int) -> DecodeConfig:
    """The official engine's decoder: greedy, masks topped up before the forward, the mask id a token like any other."""
    return dataclasses.replace(
        config, decoder="streaming", refill="eager", verify="none", fill_rule="each", temperature=0.0, ban_mask=False,
        max_new_tokens=max_new_tokens,
    )  # fmt: skip


def beside(
    model: Model, official: Baseline, work: Work, problems: Sequence[Problem], config: DecodeConfig, repeats: int
) -> Beside:
    """Both decode the prompts of `work` in turns, `repeats` times after a call that warms up.

    Raises:
      UserError: either does not fit in memory, or the official engine fails otherwise.
    """
    config = streaming_as_official(config, work.output_tokens)
    prompts = prompts_of(model, problems, work)
    requests = [make_request(model, ids, config, row=row, name="prompt") for row, ids in enumerate(prompts)]
    settings = resolved(model, config)
    rule = dict(entropy_threshold=settings.entropy_threshold, distance_penalty=settings.distance_penalty)

    theirs: list[float] = []
    ours: list[float] = []
    for turn in range(repeats + 1):
        time.sleep(PAUSE)
        run = official.run(prompts, work.output_tokens, settings.stop_ids or (), **rule)
        time.sleep(PAUSE)
        with memory_errors(requests):
            batch = Batch(model, requests)
            jax.block_until_ready(batch.state)
            start = time.perf_counter()
            state = jax.block_until_ready(batch.run())
            seconds = time.perf_counter() - start
            completions = batch.completions(state)
        assert run.decode_seconds is not None and run.steps is not None
        steps = run.steps, max(completion.stats.forwards for completion in completions)
        if turn:
            theirs.append(run.decode_seconds / steps[0])
            ours.append(seconds / steps[1])

    pairs = [(a.ids, b.ids) for a, b in zip(run.completions, completions, strict=True)]
    parted = [(row, shared_length(a, b)) for row, (a, b) in enumerate(pairs) if a != b]
    slots = sum(c.stats.tokens_processed for c in completions) / sum(c.stats.forwards for c in completions)
    floor = product_seconds(model.config, params_of(model.transformer), round(work.batch * slots), repeats)
    return Beside(
        work=work,
        steps=steps,
        seconds=(statistics.median(theirs), statistics.median(ours)),
        faster=statistics.median(a / b for a, b in zip(theirs, ours, strict=True)),
        floor_seconds=floor,
        slots=slots,
        same_rows=len(pairs) - len(parted),
        parts_at=parted[0] if parted else None,
    )


def beside_table(rows: Sequence[Beside]) -> Table:
    """Fits 80 columns."""
    shown = Table(
        title="Streaming beside the official engine", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    shown.add_column("task, batch,\nprompt + output", min_width=15, max_width=20)
    for name in ("official\nsteps/s", "ours\nsteps/s", "ours is\nfaster", "official\nms", "ours\nms", "floor\nms"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("same\ntokens", justify="right", no_wrap=True)
    for row in rows:
        theirs, ours = row.seconds
        work = row.work
        shown.add_row(
            f"{work.task}, {work.batch}, {work.prompt_tokens} + {work.output_tokens}", f"{1 / theirs:.1f}", f"{1 / ours:.1f}",
            f"{row.faster:.2f}x", f"{1e3 * theirs:.1f}", f"{1e3 * ours:.1f}", f"{1e3 * row.floor_seconds:.1f}",
            f"{row.same_rows}/{work.batch}",
        )  # fmt: skip
    return shown


def where_they_part(rows: Sequence[Beside]) -> list[str]:
    """One line for each piece of work whose tokens are not the same."""
    parted = [(row, *row.parts_at) for row in rows if row.parts_at is not None]
    return [
        f"{row.work}: {row.work.batch - row.same_rows} rows part from the official engine's, row {number} at token {token}."
        for row, number, token in parted
    ]
