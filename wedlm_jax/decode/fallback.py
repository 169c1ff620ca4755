"""Streaming with an AR fallback: the entropy rule as in the paper, and the AR token where nothing passes it.

Where no mask is certain enough, Algorithm 1 fills the likeliest guess all the same. Here that forward emits the AR token at the
leftmost mask instead, which is exact given what was committed before it.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.selection import passing
from wedlm_jax.decode.state import DecodeState, StepRecord, advance, emit
from wedlm_jax.decode.window import feeding_widths, recorded, window_forward
from wedlm_jax.model.transformer import Transformer
from wedlm_jax.ops.categorical import entropy


def fallback_step(
    transformer: Transformer, state: DecodeState, settings: RowSettings
) -> tuple[DecodeState, StepRecord]:
    """Slot 0 is the last emitted token, fed once more so that its row says what AR would put behind the leading run.

    The leading run is emitted as it was filled, without a check. W slots are in play from the new cursor, slot 0 among them.
    """
    B, C = state.window.shape
    slots = state.slots
    lead = state.leading_run()
    last = lead - 1
    fed = last + settings.window_size
    masks = ~state.filled & (slots < fed[:, None])
    before = state
    state, reading = window_forward(
        transformer,
        state,
        settings,
        fed,
        masks | (slots == last[:, None]),
        widths=feeding_widths(C, B, settings.window_table, C // 2),
        most_read=C // 2,  # W - 1 masks and the last of the run
        score=entropy,
    )
    masked = masks & state.running[:, None]
    filling = passing(reading.scores, masked, settings.entropy_threshold, settings.distance_penalty, settings.rule)
    falls_back = ~jnp.any(filling, axis=1)
    pending = falls_back[:, None] & (slots == lead[:, None])
    next_token = jnp.take_along_axis(reading.tokens, last[:, None], axis=1)
    reading = dataclasses.replace(reading, tokens=jnp.where(pending, next_token, reading.tokens))
    window = jnp.where(filling | pending, reading.tokens, state.window)
    # Of what is emitted, the AR token alone was read; the run's rows would each have to see the output layer.
    at_last = falls_back[:, None] & (slots == last[:, None])
    log_probs = jnp.where(at_last, reading.log_probs, jnp.nan)
    state, kept = emit(state, settings, jnp.roll(window, -1, axis=1), last + falls_back, log_probs)

    in_play = slots < (kept + settings.window_size)[:, None]
    state = dataclasses.replace(state, window=window, filled=((state.filled | filling) & in_play) | pending)
    return advance(state, kept), recorded(before, settings, fed, reading, filling | pending, kept)
