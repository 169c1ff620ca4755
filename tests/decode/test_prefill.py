"""Prefill in chunks fills the cache that a prefill in one piece fills, also behind tokens that are there already."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from wedlm_jax.decode import prefill as rooms
from wedlm_jax.model.kv_cache import KVCache

from ..quick_jit import quick_jit
from .models import TINY, tiny_model

LENGTHS = [13, 5, 1]
PROMPT = np.random.default_rng(0).integers(0, TINY.vocab_size, (3, 16)).astype(np.int32)


def filled(chunk: int, monkeypatch, start=(0, 0, 0), cache: KVCache | None = None) -> KVCache:
    monkeypatch.setattr(rooms, "CHUNK", chunk)
    cache = KVCache.zeros(TINY, 3, 24) if cache is None else cache
    fill = quick_jit(functools.partial(rooms.fill_cache, tiny_model().transformer))
    return fill(cache, jnp.asarray(PROMPT), jnp.asarray(start, jnp.int32), jnp.asarray(LENGTHS, jnp.int32))


def check_equal(ours: KVCache, whole: KVCache) -> None:
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(ours.k[:, row, :length], whole.k[:, row, :length], atol=1e-5)
        np.testing.assert_allclose(ours.v[:, row, :length], whole.v[:, row, :length], atol=1e-5)


@pytest.mark.parametrize("chunk", [4, 5])
def test_chunks_of_a_prompt_fill_the_cache_like_the_whole(chunk, monkeypatch):
    check_equal(filled(chunk, monkeypatch), filled(16, monkeypatch))


def test_a_prompt_is_continued_behind_what_is_cached(monkeypatch):
    whole = filled(16, monkeypatch)
    check_equal(filled(4, monkeypatch, start=(6, 5, 0), cache=whole), whole)
    blank = KVCache.zeros(TINY, 3, 24)
    behind_nothing = filled(4, monkeypatch, start=(6, 5, 0), cache=blank)
    assert not np.allclose(behind_nothing.k[1:, 0, 6:13], whole.k[1:, 0, 6:13], atol=1e-3)
