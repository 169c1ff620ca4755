"""RMSNorm (arXiv 1910.07467) with a gradient rule of its own."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last axis: normalised in float32, multiplied in the dtype of x, as Qwen's models have it.

    The backward pass keeps x alone. Sums over the last axis are written as products of vectors, which XLA on CPU does many times
    faster where an array has more than two axes (`python -m benchmarks.layouts`); on TPU they compile to sums again.
    """
    return _normalised(x, eps)[0].astype(x.dtype) * scale.astype(x.dtype)


def _normalised(x: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """x / rms(x) and 1 / rms(x), in float32."""
    x = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(_mean_of_products(x, x) + eps)
    return x * inverse, inverse


def _forward(x: jax.Array, scale: jax.Array, eps: float) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return rms_norm(x, scale, eps), (x, scale)


def _backward(eps: float, kept: tuple[jax.Array, jax.Array], d_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, scale = kept
    normalised, inverse = _normalised(x, eps)
    d_out = d_out.astype(jnp.float32)
    d_scale = jnp.sum(d_out * normalised, axis=tuple(range(x.ndim - 1)))
    d_normalised = d_out * scale.astype(x.dtype).astype(jnp.float32)  # the factor of the forward pass
    along = _mean_of_products(d_normalised, normalised)
    return (inverse * (d_normalised - normalised * along)).astype(x.dtype), d_scale.astype(scale.dtype)


def _mean_of_products(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.vecdot(x, y, precision="highest")[..., None] / x.shape[-1]


rms_norm.defvjp(_forward, _backward)
