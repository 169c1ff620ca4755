"""Rotary position embedding (RoFormer, arXiv 2104.09864) from explicit positions.

Eq. 2 of WeDLM rests on it: attention scores depend on the positions that are passed in, not on where a token lies in memory.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np

from wedlm_jax.model.rope_scaling import RopeScaling
from wedlm_jax.ops.attention import target_platform


def rope_angles(
    positions: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [B, L, H / 2] of the rotations at integer positions [B, L], times the magnitude of `scaling`.

    In float32 whatever the compute dtype: bfloat16 cannot tell position 257 from 256.
    """
    chex.assert_rank(positions, 2)
    chex.assert_type(positions, int)
    frequencies = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is not None:
        frequencies = scaling.stretch(frequencies, theta)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    magnitude = 1.0 if scaling is None else scaling.magnitude
    return magnitude * jnp.cos(angles), magnitude * jnp.sin(angles)


def apply_rope(x_BLNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (x[i], x[i + H / 2]) of queries or keys [B, L, heads, H]: the layout of the Qwen checkpoints."""
    B, L, _, H = x_BLNH.shape
    chex.assert_shape([cos, sin], (B, L, H // 2))
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    if target_platform() == "tpu":
        return _by_product(x_BLNH, *(jnp.concatenate([half, half], axis=-1) for half in (cos, sin)))
    first, second = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BLNH.dtype)


@jax.custom_vjp
def _by_product(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x cos + (x turned by a quarter) sin, the turn as a product with a matrix of ones: on TPU the exact way that costs least.
    The vector unit computes with 128 lanes: halves of them XLA would write out as arrays, each padded to all 128, while the
    product takes norms, angles and scales into its own loop (benchmarks/RESULTS.md, "A training step on a TPU, compiled ahead of
    time").

    The gradient is the rotation back, which turns numbers of x's own dtype and so is as exact; cosines and sines have none.
    """
    H = x.shape[-1]
    half = np.arange(H // 2)
    turn = np.zeros((H, H), np.float32)
    turn[half + H // 2, half], turn[half, half + H // 2] = -1, 1
    turned = jnp.matmul(x, jnp.asarray(turn, x.dtype), precision="highest", preferred_element_type=jnp.float32)
    return (x.astype(jnp.float32) * cos + turned * sin).astype(x.dtype)


def _forward(x, cos, sin):
    return _by_product(x, cos, sin), (cos, sin)


def _backward(kept, d_out):
    cos, sin = kept
    return _by_product(d_out, cos, -sin), None, None


_by_product.defvjp(_forward, _backward)
