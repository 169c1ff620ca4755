"""Rows by a matrix are the plain product, in either order of its factors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wedlm_jax.ops.rows_by_matrix import FEW_ROWS, rows_by_matrix


@pytest.mark.parametrize("shape", [(1, 1), (2, 7), (3,), (2, FEW_ROWS)])
def test_it_equals_the_plain_product_whatever_the_order_of_factors(shape):
    hidden, head = jax.random.normal(jax.random.key(0), (*shape, 16)), jax.random.normal(jax.random.key(1), (40, 16))
    with jax.default_matmul_precision("highest"):
        program = jax.jit(rows_by_matrix).lower(hidden, head)
        logits = program.compile()(hidden, head)
    np.testing.assert_allclose(logits, np.asarray(hidden) @ np.asarray(head).T, rtol=1e-5, atol=1e-5)
    assert ("optimization_barrier" in program.as_text()) == (hidden.size // 16 <= FEW_ROWS)
    assert rows_by_matrix(hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)).dtype == jnp.float32
