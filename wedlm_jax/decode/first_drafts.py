"""What the first decode forward checks: drafts of masks that ride in prefill's own forward, or of the prompt's n-grams.

Masks behind a prompt see all of it, whether a forward of their own feeds them or the one that fills the cache. So verified
decoding feeds its first masks with the prompt, and the first forward behind prefill checks drafts instead of making them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from wedlm_jax.decode.auto_window import window_in_play
from wedlm_jax.decode.config import DecodeConfig, Drafter, RowSettings
from wedlm_jax.decode.lookup import draft
from wedlm_jax.decode.selection import select_drafts
from wedlm_jax.decode.state import DecodeState
from wedlm_jax.decode.window import Reading, read_slots
from wedlm_jax.model.transformer import Transformer
from wedlm_jax.model.window_table import WindowTable
from wedlm_jax.ops.categorical import entropy


def riding_masks(drafter: Drafter | None, slots: int) -> int:
    """How many masks ride in prefill: those behind the pending token, in a program of so many window slots. What of them lies
    behind a row's own window is padding."""
    return slots // 2 - 1 if drafter == "verified" else 0


def masks_in_prefill(config: DecodeConfig, rows: int, window_table: WindowTable) -> int:
    """How many of the `riding_masks` lie in a row's own window, in a batch of so many rows. They are drafted from and counted as
    processed; the rest is padding."""
    if config.drafter != "verified":
        return 0
    return (window_table.widest(rows) if config.adapts else config.window) - 1


def first_drafts(
    transformer: Transformer,
    state: DecodeState,
    settings: RowSettings,
    hidden_BMD: jax.Array | None,
    drafter: Drafter | None,
) -> DecodeState:
    """The state that prefill leaves, with drafts behind the pending token.

    Args:
      state: slot 0 holds the last prompt token, the others nothing.
      hidden_BMD: of the masks at the positions of slots 1 .. M; None where none rode along.
    """
    if drafter == "lookup":
        return draft(state, state.window[:, 0], settings)
    if hidden_BMD is None:
        return state
    B, M, _ = hidden_BMD.shape
    slots = jnp.broadcast_to(1 + jnp.arange(M)[None, :], (B, M))
    new = read_slots(transformer.logits(hidden_BMD), slots, state, settings, entropy)
    reading = jax.tree.map(lambda x, new: x.at[:, 1 : M + 1].set(new), Reading.zeros(B, state.window.shape[1]), new)
    masked = (state.slots > 0) & (state.slots < window_in_play(state, settings)[:, None])
    filling = select_drafts(
        reading.scores, masked, settings.entropy_threshold, settings.distance_penalty, settings.rule
    )
    window = jnp.where(filling, reading.tokens, state.window)
    processed = state.processed + jnp.sum(masked, axis=1)
    return dataclasses.replace(state, window=window, filled=state.filled | filling, processed=processed)
