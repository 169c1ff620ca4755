"""window_size="auto" of verified decoding: a window for every row and step, from {4, 8, 16, 32}, by acceptance, batch fill and
the cost of a slot.

A wide window drafts further ahead, and costs a slot of every forward for each draft and mask. So it halves where none of a step's
drafts was right, and doubles where half of the window was accepted at once; but not beyond the one that gains most by the clock
for as many rows as run. The tokens are those of AR at any window: only counters can change.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from wedlm_jax.decode.config import AUTO_WINDOWS, RowSettings
from wedlm_jax.decode.state import DecodeState

# With each of AUTO_WINDOWS, what a row accepts in a forward and the slots that it feeds: of the quickstart's model, geometric
# means of word problems and counting (benchmarks/RESULTS.md, "Windows of verified decoding"). That model was trained in blocks
# of 16 and accepts no more with 32; for those of longer blocks a tenth more is assumed.
ACCEPTED = (3.6, 5.9, 7.5, 8.2)
FED = (7.8, 14.8, 25.7, 42.8)


def rung_in_play(state: DecodeState, settings: RowSettings) -> jax.Array:
    """int32 [B]: the place in AUTO_WINDOWS of the window that a row gets in this step."""
    return jnp.minimum(state.rung, widest_rung(jnp.sum(state.running), settings.slot_cost))


def widest_rung(rows: jax.Array | int, slot_cost: jax.Array | float) -> jax.Array:
    """int32 [...]: the place in AUTO_WINDOWS of the window that accepts most for the cost of its forward, where so many rows run
    and a further slot adds `slot_cost` [...] to it."""
    forward = 1 + jnp.asarray(slot_cost)[..., None] * rows * jnp.array(FED)
    return jnp.argmax(jnp.array(ACCEPTED) / forward, axis=-1).astype(jnp.int32)


def may_adapt(slots: int) -> bool:
    """Whether a loop over so many window slots may hold rows with window_size="auto": those of a narrower one are fixed."""
    return slots == 2 * AUTO_WINDOWS[-1]


def window_in_play(state: DecodeState, settings: RowSettings) -> jax.Array:
    """int32 [B]: W of every row in this step."""
    if not may_adapt(state.window.shape[1]):
        return settings.window_size
    return jnp.where(settings.adapts, jnp.array(AUTO_WINDOWS)[rung_in_play(state, settings)], settings.window_size)


def rung_after(state: DecodeState, settings: RowSettings, lead: jax.Array, accepted: jax.Array) -> jax.Array:
    """int32 [B]: the next step's `DecodeState.rung`; `next_rung` of what was in play."""
    if not may_adapt(state.window.shape[1]):
        return state.rung
    return next_rung(rung_in_play(state, settings), lead, accepted)


def next_rung(rung: jax.Array, lead: jax.Array, accepted: jax.Array) -> jax.Array:
    """After a step with the windows of `rung` [B] that accepted so many [B] of `lead` [B] slots, the pending one among them."""
    window = jnp.array(AUTO_WINDOWS)[rung]
    moved = rung + (2 * accepted >= window) - ((accepted == 1) & (lead > 1))
    return jnp.clip(moved, 0, len(AUTO_WINDOWS) - 1)
