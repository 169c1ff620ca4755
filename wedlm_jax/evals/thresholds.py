"""What the thresholds of streaming decoding bring on given prompts: speed, and agreement with AR."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.progress import track

from wedlm_jax.decode.calibration import Calibration
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.generation import bucket, make_request
from wedlm_jax.decode.prompts import Prompt
from wedlm_jax.decode.scores import score
from wedlm_jax.engine import Engine
from wedlm_jax.model.handle import Model

THRESHOLDS = (0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)  # tau, nats
PENALTIES = (0.0, 0.02, 0.1, 0.5)  # lambda, nats a slot


def measure_thresholds(
    model: Model, prompts: Sequence[tuple[str, Prompt]], config: DecodeConfig, max_disagreement: float, batch_size: int
) -> list[Calibration]:
    """One entry for every tau and lambda. All run in one engine: a prompt is prefilled once, and its row's cache used again.

    Args:
      prompts: each with its name for error messages.
      config: the other settings of streaming.
      max_disagreement: what the entries are held against, the largest share of tokens that are not AR's.
      batch_size: requests decoded at once.

    Raises:
      UserError: a prompt is refused, before any is decoded.
    """
    longest = max(len(make_request(model, prompt, config, row=0, name=name).prompt) for name, prompt in prompts)
    context = min(bucket(longest + config.max_new_tokens), model.config.max_position_embeddings)
    engine = Engine(model, rows=batch_size, context=context, queue=batch_size)
    pairs = list(itertools.product(THRESHOLDS, PENALTIES))
    configs = [dataclasses.replace(config, entropy_threshold=tau, distance_penalty=penalty) for tau, penalty in pairs]
    totals = {each: [0, 0, 0] for each in configs}  # tokens that differ, tokens, forwards
    known: dict[tuple, int] = {}  # settings often give the same completion
    for name, prompt in track(prompts, "calibrating", console=Console(stderr=True)):
        tickets = [engine.submit(prompt, each, name=name, wait=True) for each in configs]
        for each, ticket in zip(configs, tickets, strict=True):
            completion, request = ticket.result(), ticket.request
            key = (*request.prompt, -1, *completion.ids)
            if key not in known:
                banned = request.config.mask_token_id if request.config.ban_mask else None
                known[key] = disagreements(model, request.prompt, completion.ids, banned)
            for i, count in enumerate((known[key], len(completion.ids), completion.stats.forwards)):
                totals[each][i] += count
    return [
        Calibration(
            entropy_threshold=tau,
            distance_penalty=penalty,
            window_size=config.window,
            max_disagreement=max_disagreement,
            disagreement=differ / tokens,
            tokens=tokens,
            tokens_per_forward=tokens / forwards,
        )
        for (tau, penalty), (differ, tokens, forwards) in zip(pairs, totals.values(), strict=True)
    ]


def choose(measured: Sequence[Calibration]) -> Calibration | None:
    """The fastest (tokens per forward) that agrees often enough; of equals the one that agrees more. None: there is none."""
    good = [m for m in measured if m.disagreement <= m.max_disagreement]
    return max(good, key=lambda m: (m.tokens_per_forward, -m.disagreement), default=None)


def disagreements(model: Model, prompt: Sequence[int], ids: Sequence[int], mask_token_id: int | None) -> int:
    """How many of `ids` are not the likeliest next token after the prompt and the ids before them, which needs no labels.

    Every token is held against the AR prediction behind the completion's own beginning, so one that differs is counted once,
    whatever it leads to.

    Args:
      mask_token_id: never the likeliest; None = no token is excluded.

    Raises:
      UserError: it does not fit in memory.
    """
    chosen = score(model, [*prompt, *ids], banned=mask_token_id).likeliest[len(prompt) - 1 : -1]
    return int(np.sum(chosen != np.asarray(ids)))
