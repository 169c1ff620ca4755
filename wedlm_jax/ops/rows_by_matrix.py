"""The product of rows with a matrix whose outputs lie one after the other, [outputs, inputs]: the output layer's form, and on a
CPU that of every layer that decodes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from wedlm_jax.ops.attention import target_platform
from wedlm_jax.ops.single_row import by_matrix_unit

FEW_ROWS = 64


def rows_by_matrix(rows: jax.Array, matrix_OI: jax.Array) -> jax.Array:
    """[..., O] in float32 of rows [..., I].

    On a CPU the few rows of a decoding step are the second factor, and the matrix the first: that way their product takes
    less time (`python -m benchmarks.layouts`), of more rows it takes more. The barrier keeps XLA from turning the factors round.
    """
    *shape, I = rows.shape  # noqa: E741
    if target_platform() != "cpu" or math.prod(shape) > FEW_ROWS:

        def product(rows: jax.Array) -> jax.Array:
            return jnp.einsum("...I,OI->...O", rows, matrix_OI, preferred_element_type=jnp.float32)

        if math.prod(shape) > 1:
            return product(rows)
        return by_matrix_unit(product, rows.reshape(-1, I)).reshape(*shape, -1)
    rows_RI = rows.reshape(-1, I)
    out_OR = jnp.einsum("OI,RI->OR", matrix_OI, rows_RI, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(out_OR).T.reshape(*shape, -1)
