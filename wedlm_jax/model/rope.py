"""Rotary position embedding (RoFormer, arXiv 2104.09864) from explicit positions.

Eq. 2 of WeDLM rests on it: attention scores depend on the positions that are passed in, not on where a token lies in memory.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp


def rope_angles(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [B, L, H / 2] of the rotations at integer positions [B, L].

    In float32 whatever the compute dtype: bfloat16 cannot tell position 257 from 256.
    """
    chex.assert_rank(positions, 2)
    chex.assert_type(positions, int)
    frequencies = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x_BLNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (x[i], x[i + H / 2]) of queries or keys [B, L, heads, H]: the layout of the Qwen checkpoints."""
    B, L, _, H = x_BLNH.shape
    chex.assert_shape([cos, sin], (B, L, H // 2))
    first, second = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BLNH.dtype)
