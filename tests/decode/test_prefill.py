"""Prefill in chunks fills the cache that a prefill in one piece fills, also behind tokens that are there already; masks may ride
in it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wedlm_jax.decode import prefill as rooms
from wedlm_jax.decode.config import RowSettings
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.patterns import CachedWindow
from wedlm_jax.model.weights import with_layers_apart
from wedlm_jax.model.window_table import ON_CPU

from ..quick_jit import quick_jit
from .models import MASK, TINY, config_of, tiny_model

LENGTHS = [13, 5, 1]
PROMPT = np.random.default_rng(0).integers(0, TINY.vocab_size, (3, 16)).astype(np.int32)
SETTINGS = RowSettings.from_configs(
    [dataclasses.replace(config_of("verified"), mask_token_id=MASK)] * 3, range(3), window_table=ON_CPU
)


def filled(chunk: int, start=(0, 0, 0), cache: KVCache | None = None, masks: int = 0) -> tuple:
    """The cache, and the hidden states of the masks."""
    cache = KVCache.zeros(TINY, 3, 24) if cache is None else cache
    fill = quick_jit(functools.partial(rooms.fill_cache, tiny_model().transformer, chunk=chunk, masks=masks))
    spans = (jnp.asarray(x, jnp.int32) for x in (start, LENGTHS))
    return fill(cache, jnp.asarray(PROMPT), *spans, SETTINGS)


def check_equal(ours: KVCache, whole: KVCache) -> None:
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(ours.k[:, row, :, :length], whole.k[:, row, :, :length], atol=1e-5)
        np.testing.assert_allclose(ours.v[:, row, :, :length], whole.v[:, row, :, :length], atol=1e-5)


@pytest.mark.parametrize("chunk", [4, 5])
def test_chunks_of_a_prompt_fill_the_cache_like_the_whole(chunk):
    check_equal(filled(chunk)[0], filled(16)[0])


@pytest.mark.parametrize(("chunk", "start"), [(16, (0, 0, 0)), (2, (0, 0, 0)), (2, (6, 4, 0))])
def test_masks_that_ride_say_what_a_forward_behind_the_prompt_says(chunk, start):
    """Also where they lie in two chunks, and where the prompt is cached but for its last tokens."""
    whole, none = filled(16)
    assert none is None
    cache, riding = filled(chunk, start, whole if any(start) else None, masks=3)
    check_equal(cache, whole)
    behind = jnp.asarray(LENGTHS)
    expected, _ = tiny_model().transformer.hidden(
        jnp.full((3, 3), MASK), positions=behind[:, None] + jnp.arange(3), pattern=CachedWindow(behind), cache=whole
    )
    np.testing.assert_allclose(riding, expected, atol=1e-4)


def test_masks_that_ride_are_all_that_goes_through_the_last_layer():
    """Of everything else it takes keys and values, as where no mask rides."""

    def operations(chunk: int, masks: int) -> float:
        transformer = with_layers_apart(tiny_model().transformer)
        fill = functools.partial(rooms.fill_cache, transformer, chunk=chunk, masks=masks)
        cache, spans = transformer.empty_cache(3, 24), (jnp.asarray(x, jnp.int32) for x in ((0, 0, 0), LENGTHS))
        return jax.jit(fill).lower(cache, jnp.asarray(PROMPT), *spans, SETTINGS).compile().cost_analysis()["flops"]

    of_all, riding = operations(16, 0), operations(14, 2)
    assert of_all < riding < (1 + 0.7 / TINY.num_layers) * of_all


def test_a_prompt_is_continued_behind_what_is_cached():
    whole, _ = filled(16)
    check_equal(filled(4, start=(6, 5, 0), cache=whole)[0], whole)
    behind_nothing, _ = filled(4, start=(6, 5, 0), cache=KVCache.zeros(TINY, 3, 24))
    assert not np.allclose(behind_nothing.k[1:, 0, :, 6:13], whole.k[1:, 0, :, 6:13], atol=1e-3)
