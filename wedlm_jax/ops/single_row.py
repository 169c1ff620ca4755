"""The product of a single row with a matrix, where XLA would do it element by element."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from wedlm_jax.ops.attention import target_platform


def by_matrix_unit(product: Callable[[jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
    """product(rows), which treats each row [..] of rows [T, ...] by itself.

    Of one row alone XLA on TPU makes a product with a matrix a multiplication and a sum of elements, which by its own estimate
    takes longer than to read the matrix; two rows it gives to the matrix unit. So there a single row gets another one of zeros.
    """
    if len(rows) != 1 or target_platform() != "tpu":
        return product(rows)
    two = jnp.concatenate([rows, jnp.zeros_like(rows)])
    # The barrier keeps XLA from taking the row out before the product.
    return jax.lax.optimization_barrier(product(two))[:1]
