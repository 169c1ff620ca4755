"""window_size="auto" of verified decoding: a window for every row and step, from {4, 8, 16, 32}, by acceptance, batch fill and
the cost of a slot.

A wide window drafts further ahead, and costs a slot of every forward for each draft and mask. So it halves where none of a step's
drafts was right, and doubles where half of the window was accepted at once; but not beyond the one that gains most by the clock
for as many rows as run (`widest_window.py`). The tokens are those of AR at any window: only counters can change.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.state import DecodeState
from wedlm_jax.decode.widest_window import AUTO_WINDOWS, widest_rung


def rung_in_play(state: DecodeState, settings: RowSettings) -> jax.Array:
    """int32 [B]: the place in AUTO_WINDOWS of the window that a row gets in this step."""
    return jnp.minimum(state.rung, widest_rung(jnp.sum(state.running), settings.slot_cost))


def window_in_play(state: DecodeState, settings: RowSettings) -> jax.Array:
    """int32 [B]: W of every row in this step."""
    return jnp.array(AUTO_WINDOWS)[rung_in_play(state, settings)] if settings.adapts else settings.window_size


def rung_after(state: DecodeState, settings: RowSettings, lead: jax.Array, accepted: jax.Array) -> jax.Array:
    """int32 [B]: the next step's `DecodeState.rung`; `next_rung` of what was in play."""
    return next_rung(rung_in_play(state, settings), lead, accepted) if settings.adapts else state.rung


def next_rung(rung: jax.Array, lead: jax.Array, accepted: jax.Array) -> jax.Array:
    """After a step with the windows of `rung` [B] that accepted so many [B] of `lead` [B] slots, the pending one among them."""
    window = jnp.array(AUTO_WINDOWS)[rung]
    moved = rung + (2 * accepted >= window) - ((accepted == 1) & (lead > 1))
    return jnp.clip(moved, 0, len(AUTO_WINDOWS) - 1)
