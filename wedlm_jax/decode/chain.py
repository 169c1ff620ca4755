"""The AR chain of a window: leading filled slots against what the model says after the slot before them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.selection import first_slot
from wedlm_jax.decode.state import DecodeState, emit
from wedlm_jax.decode.window import Reading


def agreement(state: DecodeState, reading: Reading, lead: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which of the drafts in slots 1 .. lead - 1 are the tokens of the AR chain, up to the first that is not.

    Returns:
      checked and agreed, bool [B, C]. A draft behind one that fails is not checked: its chain starts from a wrong token.
    """
    draft = (state.slots > 0) & (state.slots < lead[:, None]) & state.running[:, None]
    fails = first_slot(draft & (state.window != jnp.roll(reading.tokens, 1, axis=1)))[:, None]
    return draft & (state.slots <= fails), draft & (state.slots < fails)


def check_drafts(
    state: DecodeState, settings: RowSettings, reading: Reading, lead: jax.Array
) -> tuple[DecodeState, jax.Array, jax.Array, jax.Array]:
    """Emits the drafts that the AR chain agrees with, and its next token behind them.

    Args:
      state: after the forward; slot 0 holds the pending token, slots 1 .. lead - 1 the drafts.

    Returns:
      the state, the number of tokens kept [B], the number of slots accepted [B] (the pending one and the drafts), and the
      next token [B], which pends. Where nothing ends the row, as many tokens are kept as slots are accepted.
    """
    checked, agreed = agreement(state, reading, lead)
    accepted = 1 + jnp.sum(agreed, axis=1)
    next_token = jnp.take_along_axis(reading.tokens, (accepted - 1)[:, None], axis=1)[:, 0]
    state, kept = emit(state, settings, reading.tokens, accepted, reading.log_probs)
    in_output = state.slots <= kept[:, None]  # drafts behind the end of a row count for nothing
    state = dataclasses.replace(
        state, checked=state.checked + (checked & in_output), agreed=state.agreed + (agreed & in_output)
    )
    return state, kept, accepted, next_token
