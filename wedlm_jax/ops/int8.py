"""Weights rounded to eight bits, with a scale for every output (the vector-wise absmax of LLM.int8(), arXiv 2208.07339)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

LARGEST = 127


def to_int8(kernel: jax.Array, inputs: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """The int8 nearest to kernel / scale, and the float32 scale of each output: the kernel is about their product.

    Args:
      kernel: floats.
      inputs: its axes that a product sums over. The scale has the others, and there the greatest weight becomes 127.

    Returns:
      int8 of the kernel's shape; float32 of the kernel's shape without `inputs`, 1 of an output whose weights are all 0.
    """
    kernel = kernel.astype(jnp.float32)
    greatest = jnp.max(jnp.abs(kernel), axis=tuple(inputs))
    scale = jnp.where(greatest > 0, greatest / LARGEST, 1.0)
    return jnp.round(kernel / jnp.expand_dims(scale, tuple(inputs))).astype(jnp.int8), scale
