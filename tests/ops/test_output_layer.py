"""Logits are the plain product, in either order of its factors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wedlm_jax.ops.output_layer import FEW_ROWS, output_logits


@pytest.mark.parametrize("shape", [(1, 1), (2, 7), (3,), (2, FEW_ROWS)])
def test_logits_equal_the_plain_product_whatever_the_order_of_factors(shape):
    hidden, head = jax.random.normal(jax.random.key(0), (*shape, 16)), jax.random.normal(jax.random.key(1), (40, 16))
    with jax.default_matmul_precision("highest"):
        program = jax.jit(output_logits).lower(hidden, head)
        logits = program.compile()(hidden, head)
    np.testing.assert_allclose(logits, np.asarray(hidden) @ np.asarray(head).T, rtol=1e-5, atol=1e-5)
    assert ("optimization_barrier" in program.as_text()) == (hidden.size // 16 <= FEW_ROWS)
    assert output_logits(hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)).dtype == jnp.float32
