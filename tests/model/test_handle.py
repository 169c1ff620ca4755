import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.tiny import MASK_TOKEN_ID, TINY, tiny_model
from tests.quick_jit import quick_jit
from wedlm_jax.errors import UserError
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.patterns import CachedWindow, Causal

TOKENS, POSITIONS = jnp.array([[3, 4, 5]]), jnp.arange(3)[None]
MASKED = jnp.array([[False, True, False]])


@quick_jit
def logits_of(tokens, masked):
    return tiny_model()(tokens, positions=POSITIONS, masked=masked)


@quick_jit
def logits_by_hidden(tokens, masked):
    model = tiny_model()
    return model.logits(model.hidden(tokens, positions=POSITIONS, masked=masked))


def test_a_masked_row_is_a_mask_whatever_its_token():
    logits = logits_of(TOKENS, MASKED)
    np.testing.assert_array_equal(logits, logits_of(TOKENS.at[0, 1].set(7), MASKED))
    np.testing.assert_allclose(logits, logits_of(TOKENS.at[0, 1].set(MASK_TOKEN_ID), None), atol=1e-6)
    np.testing.assert_allclose(logits, logits_by_hidden(TOKENS, MASKED), atol=1e-6)
    assert np.abs(logits - logits_of(TOKENS, jnp.zeros_like(MASKED)))[0, 1:].max() > 1e-3


def test_a_missing_mask_id_is_an_error_only_where_masks_are_needed():
    model = dataclasses.replace(tiny_model(), mask_token_id=None)
    assert jax.eval_shape(lambda: model(TOKENS, positions=POSITIONS)).shape == (1, 3, TINY.vocab_size)
    with pytest.raises(UserError, match="mask_token_id"):
        model(TOKENS, positions=POSITIONS, masked=MASKED)


def test_a_cache_comes_back_beside_the_result():
    window = CachedWindow(jnp.array([0]))

    @quick_jit
    def both(cache):
        model, inputs = tiny_model(), dict(positions=POSITIONS, pattern=window, cache=cache)
        logits, from_call = model(TOKENS, **inputs)
        hidden, from_hidden = model.hidden(TOKENS, **inputs)
        return logits, model.logits(hidden), from_call, from_hidden

    logits, by_hidden, cache, again = both(KVCache.zeros(TINY, 1, 4))
    np.testing.assert_allclose(logits, logits_of(TOKENS, None), atol=1e-5)
    np.testing.assert_array_equal(by_hidden, logits)
    np.testing.assert_array_equal(cache.k, again.k)
    assert cache.k[:, :, :, :3].any() and not cache.k[:, :, :, 3:].any()


@pytest.mark.parametrize(
    ("pattern", "cached"), [(Causal(), True), (CachedWindow(jnp.array([0])), False)], ids=["unread", "missing"]
)
def test_a_cache_belongs_to_cached_windows_alone(pattern, cached):
    cache = KVCache.zeros(TINY, 1, 4) if cached else None
    with pytest.raises(ValueError, match="CachedWindow"):
        tiny_model()(TOKENS, positions=POSITIONS, pattern=pattern, cache=cache)
