"""Which mask slots a step fills: Eq. 11 with Algorithm 1's rule, and the block decoder's confidence rule."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp


def entropy(logits: jax.Array) -> jax.Array:
    """Entropy in nats [...] of softmax(logits [..., V])."""
    log_p = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def confidence(logits: jax.Array) -> jax.Array:
    """Probability [...] of the likeliest token by logits [..., V]."""
    return jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1)


def select_by_entropy(
    entropies: jax.Array, masked: jax.Array, entropy_threshold: jax.Array, distance_penalty: jax.Array
) -> jax.Array:
    """Algorithm 1: every mask whose adjusted entropy lies strictly below tau, or else the one with the smallest.

    The adjusted entropy (Eq. 11) is H + lambda * d, d the number of slots right of the leftmost mask. Ties go left.

    Args:
      entropies: float [B, T] in nats, read at masks only.
      masked: bool [B, T].
      entropy_threshold: tau [B]; -inf fills exactly one, inf all.
      distance_penalty: lambda [B].

    Returns:
      bool [B, T], a subset of `masked`; empty only where `masked` is.
    """
    chex.assert_equal_shape([entropies, masked])
    slots = jnp.arange(masked.shape[1])[None, :]
    distance = slots - jnp.argmax(masked, axis=1)[:, None]
    adjusted = jnp.where(masked, entropies + distance_penalty[:, None] * distance, jnp.inf)
    below = masked & (adjusted < entropy_threshold[:, None])
    return _or_else(below, masked, jnp.argmin(adjusted, axis=1))


def select_by_confidence(
    confidences: jax.Array, masked: jax.Array, confidence_threshold: jax.Array
) -> jax.Array:
    """Every mask at least as confident as the threshold, or else the most confident one. Ties go left.

    Args:
      confidences: float [B, T], probability of the likeliest token, read at masks only.
      masked: bool [B, T].
      confidence_threshold: [B]; inf fills exactly one.

    Returns:
      bool [B, T], a subset of `masked`; empty only where `masked` is.
    """
    chex.assert_equal_shape([confidences, masked])
    confidences = jnp.where(masked, confidences, -jnp.inf)
    above = masked & (confidences >= confidence_threshold[:, None])
    return _or_else(above, masked, jnp.argmax(confidences, axis=1))


def _or_else(chosen: jax.Array, masked: jax.Array, best: jax.Array) -> jax.Array:
    only_best = masked & (jnp.arange(masked.shape[1])[None, :] == best[:, None])
    return jnp.where(jnp.any(chosen, axis=1, keepdims=True), chosen, only_best)
