"""Prefill: the prompt's keys and values, chunk by chunk, and a fresh window behind them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from wedlm_jax.decode.config import AUTO_WINDOWS
from wedlm_jax.decode.state import RUNNING, DecodeState
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.patterns import CachedWindow
from wedlm_jax.model.transformer import Transformer

CHUNK = 512  # tokens of a row that one forward runs: what bounds the memory of a long prompt beside its cache


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
      holds_back: whether the last prompt token waits in window slot 0 for the first decode forward (AR, verified, lookup).
    """
    B, P = prompt.shape
    # A row writes at most C slots behind prompt + output.
    cache = KVCache.zeros(transformer.config, B, P + output_slots + slots)
    cache = fill_cache(transformer, cache, prompt, jnp.zeros(B, jnp.int32), prompt_length - holds_back)
    return begin(cache, prompt, prompt_length, slots=slots, output_slots=output_slots, holds_back=holds_back)


def begin(
    cache: KVCache, prompt: jax.Array, prompt_length: jax.Array, *, slots: int, output_slots: int, holds_back: bool
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
        rung=jnp.full(B, len(AUTO_WINDOWS) - 1, jnp.int32),
        finish=jnp.full(B, RUNNING, jnp.int32),
        forwards=zeros,
        processed=zeros,
        checked=zeros_by_slot,
        agreed=zeros_by_slot,
    )


def fill_cache(
    transformer: Transformer, cache: KVCache, tokens: jax.Array, start: jax.Array, stop: jax.Array
) -> KVCache:
    """Writes keys and values of the tokens start <= i < stop of every row, behind those before them, which are there.

    As many chunks are run as the longest row needs. What the last one leaves at and above `stop` is for the next to
    overwrite, before it is read.

    Args:
      cache: S slots.
      tokens: int32 [B, P], P <= S: token i belongs into slot i.
      start, stop: int32 [B].
    """
    P = tokens.shape[1]
    chunk = min(P, CHUNK)

    def run_chunk(number: jax.Array, cache: KVCache) -> KVCache:
        cursor = start + number * chunk
        positions = cursor[:, None] + jnp.arange(chunk)[None, :]
        fed = jnp.take_along_axis(tokens, jnp.minimum(positions, P - 1), axis=1)
        return transformer.hidden(fed, positions=positions, pattern=CachedWindow(cursor), cache=cache)[1]

    chunks = -(-jnp.max(stop - start) // chunk)
    return jax.lax.fori_loop(0, chunks, run_chunk, cache)
