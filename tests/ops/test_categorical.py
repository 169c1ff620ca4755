"""The likeliest token, log-probabilities, entropy and confidence are those of the plain formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wedlm_jax.ops import categorical
from wedlm_jax.ops.categorical import confidence, entropy, likeliest, log_prob

LOGITS = jax.random.normal(jax.random.key(0), (3, 5, 300)) * 4


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_the_likeliest_token_is_the_first_of_the_largest_logit(monkeypatch, platform):
    monkeypatch.setattr(categorical, "target_platform", lambda: platform)
    tied = jnp.round(LOGITS)
    assert int(jnp.max(jnp.sum(tied == jnp.max(tied, axis=-1, keepdims=True), axis=-1))) > 1
    of_sizes = [tied[..., :V] for V in (1, 2, 3, 5, 17, 255, 256, 257)]
    infinite = [
        jnp.full((2, 7), -jnp.inf),
        jnp.array([-jnp.inf, 1.0, jnp.inf, jnp.inf]),
        tied.at[..., :290].set(-jnp.inf),
    ]
    for logits in (LOGITS, tied, *of_sizes, *infinite):
        found = likeliest(logits)
        np.testing.assert_array_equal(found, jnp.argmax(logits, axis=-1))
        assert found.dtype == jnp.int32


def test_the_likeliest_token_is_a_likely_one_however_xla_rounds_the_logits():
    """XLA may compute an argument of two operations for each of them, and contract or divide otherwise: a search for the
    logit that equals the maximum may find none."""
    assert " eq " not in str(jax.make_jaxpr(likeliest)(LOGITS))

    def logits(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x / scale[:, None] + jnp.roll(x, 1, axis=-1)

    for V in (257, 2048, 32_000):
        x, scale = jax.random.normal(jax.random.key(V), (16, V)), jnp.linspace(0.3, 2.0, 16)
        found = jax.jit(lambda x, scale: likeliest(logits(x, scale)))(x, scale)
        reached = jnp.take_along_axis(logits(x, scale), found[:, None], axis=-1)[:, 0]
        np.testing.assert_allclose(reached, jnp.max(logits(x, scale), axis=-1), rtol=1e-6)


def test_where_logits_are_nan_the_likeliest_token_is_one_of_the_vocabulary():
    logits = LOGITS.at[0].set(jnp.nan).at[1, :, 200].set(jnp.nan)
    found = likeliest(logits)
    assert int(found.min()) >= 0 and int(found.max()) < 300
    np.testing.assert_array_equal(found[2], jnp.argmax(logits[2], axis=-1))


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
