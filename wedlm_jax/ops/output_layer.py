"""The product of hidden states with the output matrix."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from wedlm_jax.ops.attention import target_platform

FEW_ROWS = 64


def output_logits(hidden: jax.Array, head_VD: jax.Array) -> jax.Array:
    """Logits [..., V] in float32 of hidden states [..., D].

    On a CPU the few rows of a decoding step are the second factor, and the matrix the first: that way their product takes
    less time (`python -m benchmarks.layouts`), of more rows it takes more. The barrier keeps XLA from turning the factors round.
    """
    *shape, D = hidden.shape
    if target_platform() != "cpu" or math.prod(shape) > FEW_ROWS:
        return jnp.einsum("...D,VD->...V", hidden, head_VD, preferred_element_type=jnp.float32)
    rows_RD = hidden.reshape(-1, D)
    logits_VR = jnp.einsum("VD,RD->VR", head_VD, rows_RD, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(logits_VR).T.reshape(*shape, -1)
