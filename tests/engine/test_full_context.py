"""Rows that come to the very end of their context: the window behind it has cache slots of its own.

What is written past the end of a cache is dropped, so masks and drafts there would be seen by none, and a window would be filled
otherwise.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from wedlm_jax import Completion, Engine, generate
from wedlm_jax.model.window_table import ON_ACCELERATOR

from ..decode.models import MASK, TINY, config_of, tiny_model
from ..decode.test_against_reference import TIE, check_equals_autoregressive, expected

CONTEXT = TINY.max_position_embeddings  # a multiple of what lengths and cache slots are rounded up to
MODEL = dataclasses.replace(tiny_model())
MODEL.window_table = ON_ACCELERATOR  # so cheap that every forward is as wide as the window slots


def by_engine(prompts, configs) -> list[Completion]:
    engine = Engine(MODEL, rows=len(prompts), context=CONTEXT)
    tickets = [
        engine.submit(prompt, config, row=row)
        for row, (prompt, config) in enumerate(zip(prompts, configs, strict=True))
    ]
    engine.run()
    return [ticket.completion for ticket in tickets]


def by_generate(prompts, configs) -> list[Completion]:
    return generate(MODEL, prompts, configs)


# What verified decoding writes there are drafts alone, which change its steps and no token: one case is enough.
@pytest.mark.parametrize(
    ("decode", "prompt_tokens", "loop"),
    [(by_engine, 40, "verified"), (by_engine, 40, "streaming_eager"), (by_generate, 32, "streaming_eager")],
)
def test_rows_are_decoded_to_the_end_of_the_context_as_by_the_reference(decode, prompt_tokens, loop):
    """Which has no cache. Prompts of `generate` and what it writes fill their buckets to the last place."""
    prompts = np.random.default_rng(1).integers(0, MASK, (3, prompt_tokens)).tolist()
    sizes = dict(window_size=16, max_new_tokens=CONTEXT - prompt_tokens, mask_token_id=MASK)
    configs = [config_of(loop, entropy_threshold=1.4, temperature=t, **sizes) for t in (0.0, 0.5, 1.0)]
    rows = expected(0, prompts, configs)
    for row, ours in zip(rows, decode(prompts, configs), strict=True):
        assert row.margin > TIE and len(ours.ids) == CONTEXT - prompt_tokens
        assert (ours.ids, ours.stats.forwards, ours.stats.tokens_processed) == (
            row.emitted,
            row.forwards,
            row.processed,
        )
        if loop == "verified":
            check_equals_autoregressive(row, ours)
