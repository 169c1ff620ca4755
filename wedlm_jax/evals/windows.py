"""What the automatic windows of verified decoding bring on given prompts, and what forwards cost on this device."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.first_drafts import masks_in_prefill
from wedlm_jax.decode.generation import generate
from wedlm_jax.decode.measured_windows import Costs
from wedlm_jax.decode.prompts import Prompt
from wedlm_jax.evals.row_cost import Program, forward_program, in_turns, median_ratio
from wedlm_jax.model.handle import Model
from wedlm_jax.model.parameters import params_of
from wedlm_jax.model.window_table import AUTO_WINDOWS

SLOTS = (8, 16, 32, 64, 128, 256, 512, 1024)  # of all rows together
DEAR = 16  # of one slot: a forward that costs more is the last one measured, behind it arithmetic alone counts


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """With one window, over all prompts."""

    tokens: int
    accepted: float  # tokens per forward
    fed: float  # slots of a row per forward


def acceptance(
    model: Model, prompts: Sequence[Prompt], config: DecodeConfig, window: int, batch_size: int
) -> Acceptance:
    """Of verified decoding by `config` with this window."""
    own = dataclasses.replace(config, window_size=window)
    stats = [
        completion.stats
        for first in range(0, len(prompts), batch_size)
        for completion in generate(model, prompts[first : first + batch_size], own)
    ]
    tokens, forwards = (sum(getattr(s, name) for s in stats) for name in ("generated_tokens", "forwards"))
    in_prefill = len(prompts) * masks_in_prefill(own, 1, model.window_table)
    return Acceptance(tokens, tokens / forwards, (sum(s.tokens_processed for s in stats) - in_prefill) / forwards)


def forward_costs(model: Model, context: int, rounds: int, tell: Callable[[str], None]) -> Costs:
    """What a forward over 1, 8, 16, ... slots behind so many used ones costs, of one over a single slot: medians of `rounds` in
    turns. None costs less than one over fewer slots, whatever was measured."""
    allocated = context + 2 * AUTO_WINDOWS[-1]
    params = params_of(model.transformer)

    def program(slots: int) -> Program:
        most = max(allocated, context + slots)
        # About half of what a window feeds; an adapter runs on these.
        masks = 0 if model.config.adapter is None else slots // 2
        weights = model.weights_for(slots)  # held already: no further copy of them
        return forward_program(
            model.config, params, rows=1, slots=slots, context=context, allocated=most, masks=masks, weights=weights
        )

    one = program(1)
    points: list[tuple[float, float]] = [(1, 1.0)]
    for slots in SLOTS:
        tell(f"timing forwards over {slots} slots")
        seconds = in_turns({1: one, slots: program(slots)}, rounds)
        points.append((slots, max(points[-1][1], median_ratio(seconds[slots], seconds[1]))))
        if points[-1][1] > DEAR:
            break
    return tuple(points)


def mean_context(prompts: Sequence[Sequence[int]], config: DecodeConfig) -> int:
    """Cache slots in use half-way through a completion, on the mean."""
    return round(statistics.mean(len(prompt) for prompt in prompts) + config.max_new_tokens / 2)
