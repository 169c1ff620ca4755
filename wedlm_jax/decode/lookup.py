"""Prompt lookup: drafts copied from behind an earlier place of the same tokens, checked as in verified decoding.

The baseline that needs no training and no masks (Saxena, Prompt Lookup Decoding, 2023; "n-gram" speculation in vLLM).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from wedlm_jax.decode.chain import check_drafts
from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.state import DecodeState, StepRecord, advance
from wedlm_jax.decode.window import SMALLEST_WIDTH, recorded, window_forward
from wedlm_jax.model.transformer import Transformer

LONGEST_NGRAM = 3
REPEATS = 3  # tokens of a match that reaches the end of the history from which on it is taken to repeat itself


def lookup_step(transformer: Transformer, state: DecodeState, settings: RowSettings) -> tuple[DecodeState, StepRecord]:
    """Feeds the pending token and the drafts behind it, emits what the AR chain agrees with and its next token, and drafts
    anew. Where nothing is found the next forward feeds one token, like AR."""
    C = state.window.shape[1]
    lead = state.leading_run()
    before = state
    widths = sorted({1, C // 2 if C // 2 >= SMALLEST_WIDTH else 1, C})
    state, reading = window_forward(
        *(transformer, state, settings, lead, state.slots < lead[:, None]),
        widths=widths,
        most_read=C,
        feeds_masks=False,
    )
    state, kept, _, next_token = check_drafts(state, settings, reading, lead)
    record = recorded(before, settings, lead, reading, jnp.zeros_like(before.filled), kept)
    return draft(advance(state, kept), next_token, settings), record


def draft(state: DecodeState, pending: jax.Array, settings: RowSettings) -> DecodeState:
    """A new window: the pending token [B], the last one of the history, and behind it what is found for it."""
    window, filled, _ = text_window(state, pending, settings.window_size, longest=LONGEST_NGRAM)
    return dataclasses.replace(state, window=window, filled=filled)


def text_window(
    state: DecodeState, pending: jax.Array, window_size: jax.Array, *, longest: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The pending token [B] and behind it what is found for it, at most W - 1 tokens [B]: window [B, C], filled [B, C], and how
    many tokens match [B], of at most `longest`."""
    slots = state.window.shape[1] - 1
    drafts, count, matched = find_drafts(*_history(state), window_size - 1, slots=slots, longest=longest)
    return jnp.concatenate([pending[:, None], drafts], axis=1), state.slots <= count[:, None], matched


def find_drafts(
    history: jax.Array, length: jax.Array, most: jax.Array, *, slots: int, longest: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What followed the last tokens of a history where they came before: the longest match, of these the latest. Where what
    follows a match of 3 tokens or more reaches the end of the history, drafts go on with themselves: such text repeats itself.

    Args:
      history: int32 [B, S], tokens by position; `length` int32 [B] of them count, at least 1.
      most: int32 [B], drafts wanted at most.
      slots: drafts returned, padded.
      longest: tokens of a match that are counted, at most.

    Returns:
      drafts int32 [B, slots], how many of them count [B], and how many tokens match [B]; 0 and 0 where no earlier token is the
      last one.
    """
    S = history.shape[1]
    ends = jnp.arange(S)[None, :]  # a match ends before `end`, its continuation begins there
    matched = jnp.zeros(history.shape, jnp.int32)
    still = ends < length[:, None]
    for back in range(1, longest + 1):
        token = jnp.take_along_axis(history, jnp.maximum(length - back, 0)[:, None], axis=1)
        still = still & (ends >= back) & (jnp.roll(history, back, axis=1) == token)
        matched = matched + still
    best = jnp.argmax(matched * S + ends * (matched > 0), axis=1)
    found = jnp.take_along_axis(matched, best[:, None], axis=1)[:, 0]
    followed_by = jnp.maximum(length - best, 1)  # tokens of the history
    source = best[:, None] + jnp.arange(slots)[None, :] % followed_by[:, None]
    drafts = jnp.take_along_axis(history, jnp.minimum(source, S - 1), axis=1)
    ends_at = jnp.where(found >= REPEATS, most, jnp.minimum(most, followed_by))
    return drafts, jnp.where(found > 0, ends_at, 0), found


def _history(state: DecodeState) -> tuple[jax.Array, jax.Array]:
    """Prompt and output by position, int32 [B, P + O], and how long it is; the pending token is its last."""
    length = state.length + 1
    prompt_length = (length - state.generated)[:, None]
    positions = jnp.arange(state.prompt.shape[1] + state.output.shape[1])[None, :]
    rows = jnp.arange(length.shape[0])[:, None]
    prompt = state.prompt[rows, jnp.minimum(positions, state.prompt.shape[1] - 1)]
    output = state.output[rows, jnp.clip(positions - prompt_length, 0, state.output.shape[1] - 1)]
    return jnp.where(positions < prompt_length, prompt, output), length
