"""window_size="auto" of verified decoding: a window for every row and step, from {4, 8, 16, 32}, by acceptance and batch fill.

A wide window drafts further ahead, and costs a slot of every forward for each draft and mask. So it halves where none of a step's
drafts was right, and doubles where half of the window was accepted at once; but never to one that makes the forward of all
rows that run too dear. The tokens are those of AR at any window: only counters can change.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from wedlm_jax.decode.config import AUTO_WINDOWS, RowSettings
from wedlm_jax.decode.state import DecodeState

FED = 1.75  # slots that a window of W feeds, of W: its masks, and the drafts before them
DEAREST = 2.0  # a forward over windows, of one of AR for the same rows


def rung_in_play(state: DecodeState, settings: RowSettings) -> jax.Array:
    """int32 [B]: the place in AUTO_WINDOWS of the window that a row gets in this step."""
    return jnp.minimum(state.rung, widest_rung(jnp.sum(state.running), settings.slot_cost))


def widest_rung(rows: jax.Array | int, slot_cost: jax.Array | float) -> jax.Array:
    """int32 [...]: the place in AUTO_WINDOWS of the widest window that is worth its slots [...] where so many rows run: the
    first, or one with which a forward costs at most DEAREST of what AR's costs."""
    a_row = jnp.asarray(slot_cost)[..., None] * rows
    worth = 1 + a_row * FED * jnp.array(AUTO_WINDOWS) <= DEAREST * (1 + a_row)
    return jnp.maximum(jnp.sum(worth, axis=-1) - 1, 0)


def window_in_play(state: DecodeState, settings: RowSettings) -> jax.Array:
    """int32 [B]: W of every row in this step."""
    return jnp.where(settings.adapts, jnp.array(AUTO_WINDOWS)[rung_in_play(state, settings)], settings.window_size)


def next_rung(rung: jax.Array, lead: jax.Array, accepted: jax.Array) -> jax.Array:
    """After a step with the windows of `rung` [B] that accepted so many [B] of `lead` [B] slots, the pending one among them."""
    window = jnp.array(AUTO_WINDOWS)[rung]
    moved = rung + (2 * accepted >= window) - ((accepted == 1) & (lead > 1))
    return jnp.clip(moved, 0, len(AUTO_WINDOWS) - 1)
