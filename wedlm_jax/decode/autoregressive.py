"""Autoregressive decoding over the same model, cache and state: one token fed, one token emitted."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.sampling import sample
from wedlm_jax.decode.state import DecodeState, StepRecord, advance, emit
from wedlm_jax.decode.window import window_forward
from wedlm_jax.model.transformer import Transformer


def autoregressive_step(
    transformer: Transformer, state: DecodeState, settings: RowSettings
) -> tuple[DecodeState, StepRecord]:
    """Feeds the pending token, which lies in slot 0, and emits the next one, which then pends."""
    fed = jnp.ones_like(state.length)
    before = state
    state, logits = window_forward(transformer, state, settings, fed)
    tokens = sample(logits, state.length[:, None] + state.slots + 1, settings)
    state, kept = emit(state, settings, tokens, fed)
    filling = (state.slots == 0) & before.running[:, None]
    record = StepRecord(
        before.length,
        before.window,
        before.filled,
        fed,
        jnp.zeros_like(logits[..., 0]),
        filling,
        tokens,
        kept,
        before.running,
    )
    state = advance(state, kept)
    return dataclasses.replace(state, window=tokens, filled=jnp.ones_like(state.filled)), record
