"""Prefill: the prompt's keys and values, chunk by chunk, and a fresh window behind them with its first drafts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from wedlm_jax.decode.config import Drafter, RowSettings
from wedlm_jax.decode.first_drafts import first_drafts, riding_masks
from wedlm_jax.decode.state import RUNNING, DecodeState
from wedlm_jax.model.kv_cache import Cache
from wedlm_jax.model.patterns import CachedWindow
from wedlm_jax.model.transformer import Transformer
from wedlm_jax.model.window_table import AUTO_WINDOWS

TILE = 16  # slots, of bfloat16: a cache of whole tiles a TPU writes head by head where it lies, any other it copies
CHUNK = 512  # tokens of a row that one forward runs: what bounds the memory of a long prompt beside its cache


def prefill(
    transformer: Transformer,
    prompt: jax.Array,
    prompt_length: jax.Array,
    settings: RowSettings,
    *,
    slots: int,
    output_slots: int,
    holds_back: bool,
    drafter: Drafter | None,
    context: int | None = None,
) -> DecodeState:
    """Runs the prompts causally and starts the windows.

    Args:
      prompt: int32 [B, P], padded on the right.
      prompt_length: int32 [B], at least 1.
      settings: of the B rows.
      slots: C, the window slots of the decoder.
      output_slots: O, at least the largest max_new_tokens.
      holds_back: whether the last prompt token waits in window slot 0 for the first decode forward, `DecodeConfig.holds_back`.
      drafter: what drafts before that forward, `DecodeConfig.drafter`.
      context: the most tokens that a row has, which P and O may be rounded up beyond; None: P + O.
    """
    B, P = prompt.shape
    # A row writes at most C slots behind prompt + output.
    tokens = P + output_slots if context is None else min(P + output_slots, context)
    cache = transformer.empty_cache(B, -(-(tokens + slots) // TILE) * TILE)
    masks = riding_masks(drafter, slots)
    # Masks that ride behind the prompt see its last token; where it is held back, the first forward writes its slot once more.
    stop = prompt_length - (holds_back and masks == 0)
    cache, hidden_BMD = fill_cache(
        transformer, cache, prompt, jnp.zeros(B, jnp.int32), stop, settings, chunk=min(P, CHUNK), masks=masks
    )
    sizes = dict(slots=slots, output_slots=output_slots)
    state = begin(cache, prompt, prompt_length, **sizes, holds_back=holds_back)
    return first_drafts(transformer, state, settings, hidden_BMD, drafter)


def begin(
    cache: Cache, prompt: jax.Array, prompt_length: jax.Array, *, slots: int, output_slots: int, holds_back: bool
) -> DecodeState:
    """Empty windows behind prompts that the cache holds (but for the last token where it is held back); as in `prefill`."""
    B = prompt.shape[0]
    zeros, zeros_by_slot = jnp.zeros(B, jnp.int32), jnp.zeros((B, slots), jnp.int32)
    window, filled = zeros_by_slot, jnp.zeros((B, slots), bool)
    if holds_back:
        last = jnp.take_along_axis(prompt, (prompt_length - 1)[:, None], axis=1)[:, 0]
        window, filled = window.at[:, 0].set(last), filled.at[:, 0].set(True)
    return DecodeState(
        cache=cache,
        length=prompt_length - holds_back,
        window=window,
        filled=filled,
        prompt=prompt,
        output=jnp.zeros((B, output_slots), jnp.int32),
        log_probs=jnp.zeros((B, output_slots), jnp.float32),
        generated=zeros,
        auto_window=jnp.full(B, AUTO_WINDOWS[-1], jnp.int32),
        masks_failed=jnp.zeros(B, bool),
        finish=jnp.full(B, RUNNING, jnp.int32),
        forwards=zeros,
        processed=zeros,
        checked=zeros_by_slot,
        agreed=zeros_by_slot,
    )


def fill_cache(
    transformer: Transformer,
    cache: Cache,
    tokens: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    settings: RowSettings,
    *,
    chunk: int,
    masks: int = 0,
) -> tuple[Cache, jax.Array | None]:
    """Writes keys and values of the tokens start <= i < stop of every row, behind those before them, which are there.

    As many chunks are run as the longest row needs. What the last one leaves at and above `stop` is for the next to
    overwrite, before it is read.

    Args:
      cache: S slots.
      tokens: int32 [B, P]: token i belongs into slot i.
      start, stop: int32 [B], at most S.
      settings: of the B rows.
      chunk: tokens of a row that one forward runs, beside the masks.
      masks: M, masks that ride in the same forwards, at the positions stop .. stop + M - 1 of every row.

    Returns:
      the cache, and the hidden states of the masks [B, M, D]; None where M is 0.
    """
    (B, P), width = tokens.shape, chunk + masks

    def run_chunk(number: jax.Array, carry: tuple[Cache, jax.Array | None]) -> tuple[Cache, jax.Array | None]:
        cache, hidden_BMD = carry
        cursor = start + number * width
        positions = cursor[:, None] + jnp.arange(width)[None, :]
        fed = jnp.take_along_axis(tokens, jnp.minimum(positions, P - 1), axis=1)
        if hidden_BMD is None:
            return transformer.hidden(fed, positions=positions, pattern=CachedWindow(cursor), cache=cache)[1], None
        masked = positions >= stop[:, None]
        fed = jnp.where(masked, jnp.maximum(settings.mask_token_id, 0)[:, None], fed)
        place = (stop - cursor)[:, None] + jnp.arange(masks)[None, :]  # of the masks; in this chunk or in another
        window = CachedWindow(cursor, read=jnp.clip(place, 0, width - 1))
        new_BMD, cache = transformer.hidden(fed, positions=positions, pattern=window, masked=masked, cache=cache)
        here = (place >= 0) & (place < width)
        return cache, jnp.where(here[..., None], new_BMD, hidden_BMD)

    config = transformer.config
    hidden_BMD = jnp.zeros((B, masks, config.hidden_size), config.dtype) if masks else None
    chunks = -(-jnp.max(stop + masks - start) // width)
    return jax.lax.fori_loop(0, chunks, run_chunk, (cache, hidden_BMD))
