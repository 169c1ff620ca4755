"""Verified decoding: the output of AR decoding, token for token, at several tokens per forward.

A filled slot is run through the model once more to be cached, and under causal attention that very run gives the exact
next-token distribution behind it. So filled slots are drafts, which every forward checks for the price of reading the head.
That one forward can both draft and verify is the idea of TiDAR (arXiv 2511.08923) and I-DLM (arXiv 2604.11035).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from wedlm_jax.decode.auto_window import window_after, window_in_play
from wedlm_jax.decode.chain import check_drafts
from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.selection import select_drafts
from wedlm_jax.decode.state import DecodeState, StepRecord, advance
from wedlm_jax.decode.text_drafts import with_text
from wedlm_jax.decode.window import feeding_widths, recorded, window_forward
from wedlm_jax.model.transformer import Transformer
from wedlm_jax.model.window_table import AUTO_WINDOWS, WindowTable
from wedlm_jax.ops.categorical import entropy


def verified_step(
    transformer: Transformer, state: DecodeState, settings: RowSettings
) -> tuple[DecodeState, StepRecord]:
    """Slot 0 is the pending token: emitted, not yet cached. Behind it come drafts, of masks or of text, and masks.

    The forward gives the AR chain after the pending token and after each leading draft. Drafts are accepted while they
    agree with it, and the chain's next token is emitted behind them and pends: every forward emits at least one token.
    W slots stay in play from the new cursor; behind drafts of text, which go on where they were right, only what completes the
    window. What the masks say, and which of them are filled, are drafts only: nothing of it can change the output.
    """
    B, C = state.window.shape
    slots = state.slots
    window_size = window_in_play(state, settings)
    by_masks = state
    state, from_text = with_text(state, settings, window_size)
    lead = state.leading_run()
    fed = jnp.where(from_text, window_size, window_size + lead)
    masks = ~state.filled & (slots < fed[:, None])
    before = state
    state, reading = window_forward(
        transformer,
        state,
        settings,
        fed,
        masks | (slots < lead[:, None]),
        widths=widths(C, B, settings.window_table, settings.adapts),
        most_read=C,
        score=entropy,
    )
    state, kept, accepted, next_token = check_drafts(state, settings, reading, lead)

    pending = slots == accepted[:, None]
    behind = (slots > accepted[:, None]) & (slots < (accepted + window_size)[:, None])
    # Masks behind wrong text say nothing. The mask drafts whose place it took are worth what they were.
    wrong_text = (from_text & (accepted < lead))[:, None]
    window = jnp.where(wrong_text, by_masks.window, state.window)
    filled = jnp.where(wrong_text, by_masks.filled, state.filled)
    masked = masks & behind & state.running[:, None] & ~wrong_text
    filling = select_drafts(
        reading.scores, masked, settings.entropy_threshold, settings.distance_penalty, settings.rule
    )
    record = recorded(before, settings, fed, reading, filling, kept)
    state = dataclasses.replace(
        state,
        window=jnp.where(pending, next_token[:, None], jnp.where(filling, reading.tokens, window)),
        filled=pending | (filled & behind) | filling,
        masks_failed=jnp.where(from_text | (lead == 1), state.masks_failed, accepted == 1),
        auto_window=window_after(before, settings, lead, accepted),
    )
    return advance(state, kept), record


def widths(slots: int, rows: int, table: WindowTable, adapts: bool) -> tuple[int, ...]:
    """Of forwards over so many window slots. The least holds a window, where steps choose the narrowest one, and the pending
    token."""
    return feeding_widths(slots, rows, table, (AUTO_WINDOWS[0] if adapts else slots // 2) + 1)
