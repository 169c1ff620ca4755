"""Streaming parallel decoding (section 5 of the paper, Algorithm 1)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from wedlm_jax.decode.config import Refill, RowSettings
from wedlm_jax.decode.sampling import sample
from wedlm_jax.decode.selection import entropy, select_by_entropy
from wedlm_jax.decode.state import DecodeState, StepRecord, advance, emit
from wedlm_jax.decode.window import window_forward
from wedlm_jax.model.transformer import Transformer


def streaming_step(
    transformer: Transformer, state: DecodeState, settings: RowSettings, *, refill: Refill
) -> tuple[DecodeState, StepRecord]:
    """Forward, commit the leading filled run, fill masks of low adjusted entropy, slide.

    The run that is committed was filled before this forward, which is the one that gives it its own keys and values.
    `refill="eager"` feeds W masks and unresolved slots behind that run (the engine), "paper" feeds W slots in all.
    """
    lead = state.leading_run()
    fed = settings.window_size + (lead if refill == "eager" else 0)
    before = state
    state, logits = window_forward(transformer, state, settings, fed)
    state, kept = emit(state, settings, state.window, lead)

    entropies = entropy(logits)
    masked = ~state.filled & (state.slots < fed[:, None]) & state.running[:, None]
    filling = select_by_entropy(entropies, masked, settings.entropy_threshold, settings.distance_penalty)
    tokens = sample(logits, state.length[:, None] + state.slots, settings)
    record = StepRecord(
        before.length, before.window, before.filled, fed, entropies, filling, tokens, kept, before.running
    )
    state = dataclasses.replace(state, window=jnp.where(filling, tokens, state.window), filled=state.filled | filling)
    return advance(state, kept), record
