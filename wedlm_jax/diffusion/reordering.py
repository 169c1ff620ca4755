"""Topological reordering (Eq. 5, 6, 7): observed tokens first, masks after them, each group in its old order.

Under an unmodified causal mask every mask then sees every observed token, while logical positions stay with their tokens.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp


def reorder(masked: jax.Array, padding: jax.Array) -> jax.Array:
    """The physical order of a window: observed slots, then masks, then padding, stable in each group.

    Args:
      masked: bool [..., T].
      padding: bool [..., T]; physically last, so that nothing real sees it.

    Returns:
      order int32 [..., T]: physical slot i holds logical slot order[i].
    """
    return jnp.argsort(_group(masked, padding), axis=-1, stable=True)


def reorder_blocks(masked: jax.Array, padding: jax.Array, *, block_size: int) -> jax.Array:
    """`reorder` inside every block of a row at once: int32 [B, L] indices into the row, from bool [B, L] masked and padding."""
    chex.assert_is_divisible(masked.shape[1], block_size)
    block = jnp.arange(masked.shape[1]) // block_size
    return jnp.argsort(3 * block[None, :] + _group(masked, padding), axis=-1, stable=True)


def reorder_documents(masked: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """`reorder` inside every document of a row, each with the padding behind it: int32 [B, L] indices into the row.

    Args:
      masked: bool [B, L].
      segment_ids: int [B, L], ascending along a row; 0 = padding.
    """
    chex.assert_type(segment_ids, int)
    document = jax.lax.cummax(segment_ids, axis=1)
    return jnp.argsort(3 * document + _group(masked, segment_ids == 0), axis=-1, stable=True)


def _group(masked: jax.Array, padding: jax.Array) -> jax.Array:
    """int32: 0 of an observed slot, 1 of a mask, 2 of padding, the order in which they lie."""
    chex.assert_equal_shape([masked, padding])
    chex.assert_type([masked, padding], bool)
    return jnp.where(padding, 2, masked.astype(jnp.int32))
