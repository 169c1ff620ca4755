"""Block-wise decoding, the usual scheme of masked diffusion models, over the same reordered causal window: blocks one after
another, of which every forward fills what is sure enough (the threshold of Fast-dLLM, arXiv 2505.22618)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.selection import select_by_confidence
from wedlm_jax.decode.state import DecodeState, StepRecord, advance, emit
from wedlm_jax.decode.window import feeding_widths, recorded, window_forward
from wedlm_jax.model.transformer import Transformer
from wedlm_jax.ops.categorical import confidence


def blockwise_step(
    transformer: Transformer, state: DecodeState, settings: RowSettings
) -> tuple[DecodeState, StepRecord]:
    """Fills masks of the current block by confidence; a block is emitted when it is full.

    The next block's first forward also feeds the full block, to cache it: slots 0 .. J - 1 then hold the old block and
    the next one lies behind. The last block is cut to what max_new_tokens leaves.
    """
    slots = state.slots
    full = jnp.all(state.filled | (slots >= settings.block_size[:, None]), axis=1)
    lead = jnp.where(full, settings.block_size, 0)
    block = jnp.minimum(settings.block_size, settings.max_new_tokens - state.generated)
    fed = lead + block
    in_block = (slots >= lead[:, None]) & (slots < fed[:, None])
    masks = ~state.filled & in_block
    before = state
    B, C = state.window.shape
    state, reading = window_forward(
        transformer,
        state,
        settings,
        fed,
        masks,
        widths=feeding_widths(C, B, settings.window_table, C // 2),
        most_read=C // 2,
        score=confidence,
    )

    masked = masks & state.running[:, None]
    filling = select_by_confidence(reading.scores, masked, settings.confidence_threshold)
    window = jnp.where(filling, reading.tokens, state.window)
    state = dataclasses.replace(state, window=window, filled=state.filled | filling)
    state = advance(state, jnp.where(state.running, lead, 0))
    done = jnp.all(state.filled | (slots >= block[:, None]), axis=1)
    state, kept = emit(state, settings, state.window, jnp.where(done, block, 0))
    record = recorded(before, settings, fed, reading, filling, kept)
    return state, record
