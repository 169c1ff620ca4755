"""DecodeState: everything that a decode loop carries, and the two moves that all decoders share: emit and advance."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.selection import first_slot
from wedlm_jax.model.kv_cache import Cache

RUNNING, STOPPED, FULL = 0, 1, 2  # finish codes: still running, stop id emitted, max_new_tokens reached


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """B rows, each with its own cursor. Window slot i has logical position `length + i`, whatever order it is fed in.

    For example, after a prompt of 5 tokens and with W = 4, two slots filled out of order:

        length 5 · window [m, 17, m, 42] · filled [0, 1, 0, 1] · fed as [17, 42, m, m] at positions [6, 8, 5, 7]
    """

    cache: Cache
    length: jax.Array  # int32 [B]: committed slots; the cache below it is final
    window: jax.Array  # int32 [B, C]: tokens of filled slots
    filled: jax.Array  # bool [B, C]; a slot that is not filled is a mask, or not in play
    prompt: jax.Array  # int32 [B, P], padded on the right
    output: jax.Array  # int32 [B, O]: emitted tokens
    log_probs: jax.Array  # float32 [B, O]: of those by the AR model, in nats; NaN of a token that was not read
    generated: jax.Array  # int32 [B]: how many of them count
    auto_window: jax.Array  # int32 [B]: the one of AUTO_WINDOWS that a row with window_size="auto" has come to
    masks_failed: jax.Array  # bool [B]: whether none of the mask drafts that were last checked was right (verified)
    finish: jax.Array  # int32 [B]: RUNNING, STOPPED or FULL
    forwards: jax.Array  # int32 [B]: decode forwards, prefill not counted
    processed: jax.Array  # int32 [B]: token instances in those forwards, and masks in prefill; no static padding
    checked: jax.Array  # int32 [B, C]: drafts held against the AR chain, by their slot
    agreed: jax.Array  # int32 [B, C]: how many of them were its tokens

    @property
    def running(self) -> jax.Array:
        return self.finish == RUNNING

    @property
    def slots(self) -> jax.Array:
        """int32 [1, C]: the slot numbers."""
        return jnp.arange(self.window.shape[1])[None, :]

    def leading_run(self) -> jax.Array:
        """int32 [B]: filled slots before the leftmost mask."""
        return first_slot(~self.filled)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepRecord:
    """What one step did, in the window's coordinates before the step. The jitted loop drops it, a trace keeps it."""

    base: jax.Array  # int32 [B]: logical position of slot 0
    window: jax.Array  # int32 [B, C]: as fed
    filled: jax.Array  # bool [B, C]: as fed
    fed: jax.Array  # int32 [B]: slots fed, filled ones and masks
    reordered: jax.Array  # bool [B]: whether the masks were fed last
    score: jax.Array  # float32 [B, C]: entropy in nats (block-wise: confidence) where a mask was fed
    filling: jax.Array  # bool [B, C]: slots that this step filled
    tokens: jax.Array  # int32 [B, C]: what they were filled with
    emitted: jax.Array  # int32 [B]: tokens added to the output
    running: jax.Array  # bool [B]: rows that took part


def emit(
    state: DecodeState,
    settings: RowSettings,
    tokens: jax.Array,
    count: jax.Array,
    log_probs: jax.Array | None = None,
) -> tuple[DecodeState, jax.Array]:
    """Appends the first `count` [B] of `tokens` [B, C] to the output of running rows, cut behind the first stop id or at
    max_new_tokens, whichever comes first; a row that is cut or full is finished. `log_probs` [B, C] go with the tokens.

    Returns:
      the new state and the number of tokens kept, int32 [B].
    """
    slots = state.slots
    is_stop = jnp.any(tokens[:, :, None] == settings.stop_ids[:, None, :], axis=-1)
    to_first_stop = 1 + first_slot(is_stop)
    kept = jnp.minimum(jnp.minimum(count, to_first_stop), settings.max_new_tokens - state.generated)
    kept = jnp.where(state.running, kept, 0)
    stopped = (kept == to_first_stop) & (kept > 0)
    generated = state.generated + kept
    full = generated >= settings.max_new_tokens
    finish = jnp.where(stopped, STOPPED, jnp.where(full, FULL, RUNNING))

    rows = jnp.arange(tokens.shape[0])[:, None]
    # Slots that are not kept point past the end, where a dropped write goes.
    place = jnp.where(slots < kept[:, None], state.generated[:, None] + slots, state.output.shape[1])
    state = dataclasses.replace(
        state,
        output=state.output.at[rows, place].set(tokens, mode="drop"),
        generated=generated,
        finish=jnp.where(state.running, finish, state.finish),
    )
    if log_probs is not None:
        state = dataclasses.replace(state, log_probs=state.log_probs.at[rows, place].set(log_probs, mode="drop"))
    return state, kept


def advance(state: DecodeState, count: jax.Array) -> DecodeState:
    """Moves the cursor of every row by `count` [B]: those slots are committed where they lie, and the window slides."""
    C = state.window.shape[1]
    source = state.slots + count[:, None]
    inside = source < C
    source = jnp.minimum(source, C - 1)
    return dataclasses.replace(
        state,
        length=state.length + count,
        window=jnp.take_along_axis(state.window, source, axis=1),
        filled=jnp.take_along_axis(state.filled, source, axis=1) & inside,
    )


def placed_as(like: jax.Array, x: Any) -> jax.Array:
    """`x` on the device of `like`, and committed to it if `like` is: jit compiles one program for arguments that are committed,
    another for those that are not."""
    return jax.device_put(x, like.sharding) if like.committed else jnp.asarray(x)
