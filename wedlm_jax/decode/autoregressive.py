"""Autoregressive decoding (Eq. 1) over the same model, cache and state: one token fed, one token emitted."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.state import DecodeState, StepRecord, advance, emit
from wedlm_jax.decode.window import recorded, window_forward
from wedlm_jax.model.transformer import Transformer


def autoregressive_step(
    transformer: Transformer, state: DecodeState, settings: RowSettings
) -> tuple[DecodeState, StepRecord]:
    """Feeds the pending token, which lies in slot 0, and emits the next one, which then pends."""
    fed = jnp.ones_like(state.length)
    before = state
    slot = state.slots == 0
    state, reading = window_forward(
        transformer, state, settings, fed, slot, widths=(1,), most_read=1, feeds_masks=False
    )
    state, kept = emit(state, settings, reading.tokens, fed, reading.log_probs)
    record = recorded(before, settings, fed, reading, jnp.zeros_like(before.filled), kept)
    state = advance(state, kept)
    return dataclasses.replace(state, window=reading.tokens, filled=jnp.ones_like(state.filled)), record
