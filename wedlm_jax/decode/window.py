"""The window forward, the same for every decoder: reorder, feed behind the cache, read the logits back in logical order."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.state import DecodeState
from wedlm_jax.diffusion.reordering import reorder
from wedlm_jax.model.patterns import CachedWindow
from wedlm_jax.model.transformer import Transformer


def window_forward(
    transformer: Transformer, state: DecodeState, settings: RowSettings, fed: jax.Array
) -> tuple[DecodeState, jax.Array]:
    """Runs the first `fed` [B] slots of every window: filled ones in physical order first, then the masks (Eq. 5 to 7).

    Filled slots are written to the very cache slots that they will own if they are committed; masks land behind them and
    are overwritten by the next step. A finished row's window is run and ignored.

    Returns:
      the state with the new cache and counters, and logits float32 [B, C, V] by logical slot.
    """
    in_play = state.slots < fed[:, None]
    order = reorder(~state.filled, ~in_play)
    tokens = jnp.where(state.filled, state.window, jnp.maximum(settings.mask_token_id, 0)[:, None])
    hidden, cache = transformer.hidden(
        jnp.take_along_axis(tokens, order, axis=1),
        positions=state.length[:, None] + order,
        pattern=CachedWindow(state.length),
        cache=state.cache,
    )
    logical = jnp.take_along_axis(hidden, jnp.argsort(order, axis=1)[..., None], axis=1)
    state = dataclasses.replace(
        state,
        cache=cache,
        forwards=state.forwards + state.running,
        processed=state.processed + jnp.where(state.running, fed, 0),
    )
    return state, transformer.logits(logical)
