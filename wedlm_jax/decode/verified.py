"""Verified decoding: the output of AR decoding, token for token, at several tokens per forward.

A filled slot is run through the model once more to be cached, and under causal attention that very run gives the exact
next-token distribution behind it. So filled slots are drafts, which every forward checks for the price of reading the head.
That one forward can both draft and verify is the idea of TiDAR (arXiv 2511.08923) and I-DLM (arXiv 2604.11035).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.sampling import sample
from wedlm_jax.decode.selection import entropy, select_by_entropy
from wedlm_jax.decode.state import DecodeState, StepRecord, advance, emit
from wedlm_jax.decode.window import window_forward
from wedlm_jax.model.transformer import Transformer


def verified_step(
    transformer: Transformer, state: DecodeState, settings: RowSettings
) -> tuple[DecodeState, StepRecord]:
    """Slot 0 is the pending token: emitted, not yet cached. Behind it come drafts and masks.

    The forward gives the AR chain after the pending token and after each leading draft. Drafts are accepted while they
    agree with it, and the chain's next token is emitted behind them and pends: every forward emits at least one token.
    What follows a rejected draft is masked again, and W slots stay in play from the new cursor. The masks' own logits
    serve as drafts only, so nothing that they say can change the output.
    """
    slots = state.slots
    lead = state.leading_run()
    fed = settings.window_size + lead
    before = state
    state, logits = window_forward(transformer, state, settings, fed)
    # A filled row predicts the token after it, a mask row the token of its own place.
    tokens = sample(logits, state.length[:, None] + slots + state.filled, settings)

    agrees = (slots == 0) | (state.window == jnp.roll(tokens, 1, axis=1))
    accepted = jnp.sum(jnp.cumprod(agrees & (slots < lead[:, None]), axis=1), axis=1)  # with the pending token
    state, kept = emit(state, settings, tokens, accepted)
    next_token = jnp.take_along_axis(tokens, (accepted - 1)[:, None], axis=1)

    behind = slots > accepted[:, None]
    drafts = state.filled & behind & (accepted == lead)[:, None]
    in_play = slots < jnp.minimum(fed, accepted + settings.window_size)[:, None]
    masked = ~state.filled & behind & in_play & state.running[:, None]
    entropies = entropy(logits)
    filling = select_by_entropy(entropies, masked, settings.entropy_threshold, settings.distance_penalty)
    pending = slots == accepted[:, None]
    record = StepRecord(
        before.length, before.window, before.filled, fed, entropies, filling, tokens, kept, before.running
    )
    state = dataclasses.replace(
        state,
        window=jnp.where(pending, next_token, jnp.where(filling, tokens, state.window)),
        filled=pending | drafts | filling,
    )
    return advance(state, kept), record
