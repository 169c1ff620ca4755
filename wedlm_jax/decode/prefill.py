"""Prefill: the prompt's keys and values, and a fresh window behind them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from wedlm_jax.decode.state import RUNNING, DecodeState
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.patterns import CachedWindow
from wedlm_jax.model.transformer import Transformer


def prefill(
    transformer: Transformer,
    prompt: jax.Array,
    prompt_length: jax.Array,
    *,
    slots: int,
    output_slots: int,
    holds_back: bool,
) -> DecodeState:
    """Runs the prompts causally and starts the windows.

    Args:
      prompt: int32 [B, P], padded on the right.
      prompt_length: int32 [B], at least 1.
      slots: C, the window slots of the decoder.
      output_slots: O, at least the largest max_new_tokens.
      holds_back: whether the last prompt token waits in window slot 0 for the first decode forward (AR, verified).
    """
    B, P = prompt.shape
    positions = jnp.broadcast_to(jnp.arange(P), (B, P))
    start = CachedWindow(jnp.zeros(B, jnp.int32))
    cache = KVCache.zeros(transformer.config, B, P)
    _, cache = transformer.hidden(prompt, positions=positions, pattern=start, cache=cache)
    # A row writes at most C slots behind prompt + output; what padding left above the cursor is overwritten before it is read.
    room = ((0, 0), (0, 0), (0, output_slots + slots), (0, 0), (0, 0))
    cache = jax.tree.map(lambda x: jnp.pad(x, room), cache)
    return begin(cache, prompt, prompt_length, slots=slots, output_slots=output_slots, holds_back=holds_back)


def begin(
    cache: KVCache, prompt: jax.Array, prompt_length: jax.Array, *, slots: int, output_slots: int, holds_back: bool
) -> DecodeState:
    """Empty windows behind prompts that the cache holds (but for the last token where it is held back); as in `prefill`."""
    B = prompt.shape[0]
    zeros = jnp.zeros(B, jnp.int32)
    window, filled = jnp.zeros((B, slots), jnp.int32), jnp.zeros((B, slots), bool)
    if holds_back:
        last = jnp.take_along_axis(prompt, (prompt_length - 1)[:, None], axis=1)[:, 0]
        window, filled = window.at[:, 0].set(last), filled.at[:, 0].set(True)
    return DecodeState(
        cache=cache,
        length=prompt_length - holds_back,
        window=window,
        filled=filled,
        output=jnp.zeros((B, output_slots), jnp.int32),
        generated=zeros,
        finish=jnp.full(B, RUNNING, jnp.int32),
        forwards=zeros,
        processed=zeros,
    )
