"""RMSNorm and its gradient rule equal what autodiff makes of the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wedlm_jax.ops.rms_norm import rms_norm

EPS = 1e-6


def formula(x, scale):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPS) * scale


@pytest.mark.parametrize("shape", [(3, 5, 16), (2, 3, 4, 8), (7, 16)])
def test_value_and_gradients_are_those_of_the_formula(shape):
    x, d_out = jax.random.normal(jax.random.key(0), (2, *shape))
    x = x.at[..., :2].set(1e-4)  # where eps matters
    scale = jnp.linspace(0.5, 2.0, shape[-1])
    out, pullback = jax.vjp(lambda x, scale: rms_norm(x, scale, EPS), x, scale)
    with jax.enable_x64():
        exact, exact_pullback = jax.vjp(formula, jnp.float64(x), jnp.float64(scale))
        expected = exact, *exact_pullback(jnp.float64(d_out))
    for value, reference in zip((out, *pullback(d_out)), expected, strict=True):
        np.testing.assert_allclose(value, reference, rtol=2e-6, atol=2e-6)


def _pulled_back(x, scale, d_out):
    return jax.vjp(lambda x: rms_norm(x, scale, EPS), x)[1](d_out)[0]


def test_in_bfloat16_the_gradient_is_that_of_the_scale_which_the_forward_pass_multiplies_by():
    x, d_out = jax.random.normal(jax.random.key(1), (2, 64, 16)).astype(jnp.bfloat16)
    scale = jnp.linspace(0.5, 2.0, 16)  # not all of bfloat16
    d_x, of_rounded = (_pulled_back(x, one, d_out) for one in (scale, scale.astype(jnp.bfloat16)))
    np.testing.assert_array_equal(d_x, of_rounded)


def test_bfloat16_rows_are_normalised_in_float32_and_their_scale_gradient_is_summed_there():
    x = jax.random.normal(jax.random.key(0), (4096, 8)).astype(jnp.bfloat16)
    out, pullback = jax.vjp(lambda x, scale: rms_norm(x, scale, EPS), x, jnp.ones(8))
    assert out.dtype == jnp.bfloat16
    d_x, d_scale = pullback(jnp.ones_like(x))
    assert d_x.dtype == jnp.bfloat16 and d_scale.dtype == jnp.float32
    # A bfloat16 sum of thousands of rows would stop growing at 256.
    np.testing.assert_allclose(d_scale, jnp.sum(formula(x.astype(jnp.float32), 1.0), axis=0), rtol=1e-3, atol=1e-2)
