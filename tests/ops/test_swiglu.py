"""SwiGLU and its gradient rule equal what autodiff makes of the formula, and keep its two inputs alone."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import print_saved_residuals

from wedlm_jax.ops.swiglu import swiglu


def formula(gate, up):
    return gate / (1 + jnp.exp(-gate)) * up


def test_value_and_gradients_are_those_of_the_formula():
    gate, up, d_out = jax.random.normal(jax.random.key(0), (3, 4, 32)) * 3
    out, pullback = jax.vjp(swiglu, gate, up)
    expected, expected_pullback = jax.vjp(formula, gate, up)
    for value, reference in zip((out, *pullback(d_out)), (expected, *expected_pullback(d_out)), strict=True):
        np.testing.assert_allclose(value, reference, rtol=1e-5, atol=1e-5)


def test_the_backward_pass_keeps_the_two_inputs_and_nothing_between(capsys):
    x = jnp.ones((4, 32))
    print_saved_residuals(swiglu, x, x)
    kept = capsys.readouterr().out.strip().splitlines()
    assert len(kept) == 2 and all("from the argument" in line for line in kept), kept
