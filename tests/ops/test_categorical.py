"""The likeliest token, log-probabilities, entropy and confidence are those of the plain formulas."""

import jax
import jax.numpy as jnp
import numpy as np

from wedlm_jax.ops.categorical import confidence, entropy, likeliest, log_prob

LOGITS = jax.random.normal(jax.random.key(0), (3, 5, 300)) * 4


def test_the_likeliest_token_is_the_first_of_the_largest_logit():
    tied = jnp.round(LOGITS)
    assert int(jnp.min(jnp.sum(tied == jnp.max(tied, axis=-1, keepdims=True), axis=-1))) >= 1
    assert int(jnp.max(jnp.sum(tied == jnp.max(tied, axis=-1, keepdims=True), axis=-1))) > 1
    for logits in (LOGITS, tied, jnp.full((2, 7), -jnp.inf), jnp.array([-jnp.inf, 1.0, jnp.inf, jnp.inf])):
        found = likeliest(logits)
        np.testing.assert_array_equal(found, jnp.argmax(logits, axis=-1))
        assert found.dtype == jnp.int32


def test_log_probabilities_entropy_and_confidence_equal_the_formulas():
    for logits in (LOGITS, LOGITS + 1e4, LOGITS - 1e4, LOGITS * 50):
        log_p = np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32)), np.float64)
        p = np.exp(log_p)
        np.testing.assert_allclose(entropy(logits), -np.sum(p * log_p, axis=-1), atol=2e-5)
        np.testing.assert_allclose(confidence(logits), p.max(axis=-1), rtol=1e-5)
        tokens = jnp.argmin(logits, axis=-1)
        expected = np.take_along_axis(log_p, np.asarray(tokens)[..., None], axis=-1)[..., 0]
        np.testing.assert_allclose(log_prob(logits, tokens), expected, rtol=1e-5, atol=1e-5)


def test_entropy_is_never_negative_and_never_nan():
    for logits in (jnp.array([0.0, -1e30, -2e5]), jnp.array([200.0, 0.0, 0.0]), jnp.array([3.0])):
        assert float(entropy(logits)) == 0.0
    np.testing.assert_allclose(entropy(jnp.zeros(8)), np.log(8.0), rtol=1e-6)
