import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.tiny import MASK_TOKEN_ID, TINY, tiny_model
from wedlm_jax.errors import UserError
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.patterns import CachedWindow, Causal

TOKENS, POSITIONS = jnp.array([[3, 4, 5]]), jnp.arange(3)[None]
MASKED = jnp.array([[False, True, False]])


def test_a_masked_row_is_a_mask_whatever_its_token():
    model = tiny_model()
    logits = model(TOKENS, positions=POSITIONS, masked=MASKED)
    np.testing.assert_array_equal(logits, model(TOKENS.at[0, 1].set(MASK_TOKEN_ID), positions=POSITIONS))
    np.testing.assert_array_equal(logits, model(TOKENS.at[0, 1].set(7), positions=POSITIONS, masked=MASKED))
    hidden = model.hidden(TOKENS, positions=POSITIONS, masked=MASKED)
    np.testing.assert_array_equal(model.logits(hidden), logits)


def test_a_token_that_equals_the_mask_id_is_a_token_where_masked_is_not_given():
    model, tokens = tiny_model(), TOKENS.at[0, 1].set(MASK_TOKEN_ID)
    nothing = jnp.zeros_like(MASKED)
    np.testing.assert_array_equal(
        model(tokens, positions=POSITIONS, masked=nothing), model(tokens, positions=POSITIONS)
    )


def test_a_missing_mask_id_is_an_error_only_where_masks_are_needed():
    model = dataclasses.replace(tiny_model(), mask_token_id=None)
    assert np.isfinite(model(TOKENS, positions=POSITIONS)).all()
    with pytest.raises(UserError, match="mask_token_id"):
        model(TOKENS, positions=POSITIONS, masked=MASKED)


def test_a_cache_comes_back_beside_the_result():
    model, window = tiny_model(), CachedWindow(jnp.array([0]))
    logits, cache = model(TOKENS, positions=POSITIONS, pattern=window, cache=KVCache.zeros(TINY, 1, 4))
    hidden, again = model.hidden(TOKENS, positions=POSITIONS, pattern=window, cache=KVCache.zeros(TINY, 1, 4))
    np.testing.assert_allclose(logits, model(TOKENS, positions=POSITIONS), atol=1e-5)
    np.testing.assert_array_equal(model.logits(hidden), logits)
    np.testing.assert_array_equal(cache.k, again.k)
    assert cache.k[:, :, :3].any() and not cache.k[:, :, 3:].any()


@pytest.mark.parametrize(
    ("pattern", "cached"), [(Causal(), True), (CachedWindow(jnp.array([0])), False)], ids=["unread", "missing"]
)
def test_a_cache_belongs_to_cached_windows_alone(pattern, cached):
    cache = KVCache.zeros(TINY, 1, 4) if cached else None
    with pytest.raises(ValueError, match="CachedWindow"):
        tiny_model()(TOKENS, positions=POSITIONS, pattern=pattern, cache=cache)
