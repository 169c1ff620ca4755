"""Streaming parallel decoding (section 5 of the paper, Algorithm 1)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from wedlm_jax.decode.config import Refill, RowSettings
from wedlm_jax.decode.selection import select_by_entropy
from wedlm_jax.decode.state import DecodeState, StepRecord, advance, emit
from wedlm_jax.decode.window import feeding_widths, recorded, window_forward
from wedlm_jax.model.transformer import Transformer
from wedlm_jax.ops.categorical import entropy


def streaming_step(
    transformer: Transformer, state: DecodeState, settings: RowSettings, *, refill: Refill
) -> tuple[DecodeState, StepRecord]:
    """Forward, commit the leading filled run, fill masks of low adjusted entropy, slide.

    The run that is committed was filled before this forward, which is the one that gives it its own keys and values.
    `refill="eager"` feeds W masks and unresolved slots behind that run (the engine), "paper" feeds W slots in all.
    """
    lead = state.leading_run()
    B, C = state.window.shape
    fed = settings.window_size + (lead if refill == "eager" else 0)
    masks = ~state.filled & (state.slots < fed[:, None])
    before = state
    state, reading = window_forward(
        transformer,
        state,
        settings,
        fed,
        masks,
        # W slots and the one that was committed last, where a step commits one.
        widths=feeding_widths(C, B, settings.window_table, C // 2 + 1) if refill == "eager" else (C,),
        most_read=C // 2 if refill == "eager" else C,  # W masks, never more
        score=entropy,
    )
    state, kept = emit(state, settings, state.window, lead)  # the commit

    masked = masks & state.running[:, None]
    filling = select_by_entropy(  # Eq. 11
        reading.scores, masked, settings.entropy_threshold, settings.distance_penalty, settings.rule
    )
    record = recorded(before, settings, fed, reading, filling, kept)
    window = jnp.where(filling, reading.tokens, state.window)
    state = dataclasses.replace(state, window=window, filled=state.filled | filling)
    return advance(state, kept), record
