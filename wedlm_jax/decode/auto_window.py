"""window_size="auto" of verified decoding: a window for every row and step, from {4, 8, 16, 32}, by acceptance, the rows of a
forward and the cost of a slot.

A wide window drafts further ahead, and costs a slot of every forward for each draft and mask. So it halves where none of a step's
drafts was right, and doubles where half of the window was accepted at once; but not beyond the one that gains most by the clock
for as many rows as a device computes in a forward (`model/window_table.py`). That count does not fall as rows finish: they are
computed all the same. The tokens are those of AR at any window: only counters can change.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.state import DecodeState
from wedlm_jax.model.window_table import AUTO_WINDOWS


def window_in_play(state: DecodeState, settings: RowSettings) -> jax.Array:
    """int32 [B]: W of every row in this step."""
    return jnp.minimum(state.auto_window, settings.window_size) if settings.adapts else settings.window_size


def window_after(state: DecodeState, settings: RowSettings, lead: jax.Array, accepted: jax.Array) -> jax.Array:
    """int32 [B]: the next step's `DecodeState.auto_window`; `next_window` of what was in play."""
    return next_window(window_in_play(state, settings), lead, accepted) if settings.adapts else state.auto_window


def next_window(window: jax.Array, lead: jax.Array, accepted: jax.Array) -> jax.Array:
    """The next step's windows [B], after one with `window` [B] that accepted `accepted` [B] of `lead` [B] slots, the pending one
    counted in both."""
    narrowed = jnp.where((accepted == 1) & (lead > 1), window // 2, window)
    return jnp.clip(jnp.where(2 * accepted >= window, 2 * window, narrowed), AUTO_WINDOWS[0], AUTO_WINDOWS[-1])
