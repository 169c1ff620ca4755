"""window_size="auto" of verified decoding: a window for every row and step, from {4, 8, 16, 32}, by acceptance and batch fill.

A wide window drafts further ahead, and costs a slot of every forward for each draft and mask. So it halves where none of a step's
drafts was right, and doubles where half of the window was accepted at once; and the rows that run share SHARED_SLOTS, because
the cost of a forward grows with the slots of all of them. The tokens are those of AR at any window: only counters can change.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from wedlm_jax.decode.config import AUTO_WINDOWS, RowSettings
from wedlm_jax.decode.state import DecodeState

SHARED_SLOTS = 128


def rung_in_play(state: DecodeState) -> jax.Array:
    """int32 [B]: the place in AUTO_WINDOWS of the window that a row gets in this step; the least where rows are many."""
    return jnp.minimum(state.rung, widest_rung(jnp.sum(state.running)))


def widest_rung(rows: jax.Array | int) -> jax.Array:
    """int32: the place in AUTO_WINDOWS of the widest window that so many running rows may have."""
    shared = jnp.array(AUTO_WINDOWS) * rows <= SHARED_SLOTS
    return jnp.maximum(jnp.sum(shared) - 1, 0)


def window_in_play(state: DecodeState, settings: RowSettings) -> jax.Array:
    """int32 [B]: W of every row in this step."""
    return jnp.where(settings.adapts, jnp.array(AUTO_WINDOWS)[rung_in_play(state)], settings.window_size)


def next_rung(rung: jax.Array, lead: jax.Array, accepted: jax.Array) -> jax.Array:
    """After a step with the windows of `rung` [B] that accepted so many [B] of `lead` [B] slots, the pending one among them."""
    window = jnp.array(AUTO_WINDOWS)[rung]
    moved = rung + (2 * accepted >= window) - ((accepted == 1) & (lead > 1))
    return jnp.clip(moved, 0, len(AUTO_WINDOWS) - 1)
