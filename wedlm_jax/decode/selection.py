"""Which mask slots a step fills: Eq. 11 with Algorithm 1's rule and two rules for slots that are filled together, and the block
decoder's confidence rule."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp


def first_slot(where: jax.Array) -> jax.Array:
    """int32 [B]: the leftmost slot where bool [B, T] holds; T where none does."""
    T = where.shape[1]
    return jnp.min(jnp.where(where, jnp.arange(T), T), axis=1)


def adjusted_entropy(entropies: jax.Array, masked: jax.Array, distance_penalty: jax.Array) -> jax.Array:
    """Eq. 11: H + lambda * d, d the number of slots right of the leftmost mask; inf where there is no mask."""
    distance = jnp.arange(masked.shape[1])[None, :] - first_slot(masked)[:, None]
    return jnp.where(masked, entropies + distance_penalty[:, None] * distance, jnp.inf)


def each_below(adjusted: jax.Array, masked: jax.Array, entropy_threshold: jax.Array) -> jax.Array:
    """Algorithm 1: every mask whose adjusted entropy lies strictly below tau."""
    return masked & (adjusted < entropy_threshold[:, None])


def sum_below(adjusted: jax.Array, masked: jax.Array, entropy_threshold: jax.Array) -> jax.Array:
    """The most certain masks, as many as their adjusted entropies together stay strictly below tau.

    The sum bounds the entropy of all of them jointly, so a wide window does not make tau looser. Ties go left.
    """
    slots = jnp.arange(masked.shape[1])
    ours, others = adjusted[:, :, None], adjusted[:, None, :]
    # A mask counts itself by its place: XLA may compute the two sides of a comparison separately, and round them differently.
    itself = slots[None, :] == slots[:, None]
    as_certain = itself | (others < ours) | ((others == ours) & (slots[None, :] < slots[:, None]))
    total = jnp.sum(jnp.where(as_certain & masked[:, None, :], others, 0.0), axis=2)
    return masked & (total < entropy_threshold[:, None])


def run_below(adjusted: jax.Array, masked: jax.Array, entropy_threshold: jax.Array) -> jax.Array:
    """From the leftmost mask to the right, up to the first whose adjusted entropy is not strictly below tau.

    For verified decoding: a draft behind a gap is not checked before the gap is filled, and until then it misleads others.
    """
    stop = first_slot(masked & ~(adjusted < entropy_threshold[:, None]))
    return masked & (jnp.arange(masked.shape[1]) < stop[:, None])


RULES = {"each": each_below, "sum": sum_below, "run": run_below}


def passing(
    entropies: jax.Array,
    masked: jax.Array,
    entropy_threshold: jax.Array,
    distance_penalty: jax.Array,
    rule: jax.Array,
) -> jax.Array:
    """What the rule of each row fills: bool [B, T]. Arguments as in `select_by_entropy`."""
    adjusted = adjusted_entropy(entropies, masked, distance_penalty)
    chosen = jnp.zeros_like(masked)
    for number, select in enumerate(RULES.values()):
        chosen |= (rule[:, None] == number) & select(adjusted, masked, entropy_threshold)
    return chosen


def select_by_entropy(
    entropies: jax.Array,
    masked: jax.Array,
    entropy_threshold: jax.Array,
    distance_penalty: jax.Array,
    rule: jax.Array,
) -> jax.Array:
    """What the rule fills, or else the mask with the smallest adjusted entropy (Eq. 11). Ties go left.

    Args:
      entropies: float [B, T] in nats, read at masks only.
      masked: bool [B, T].
      entropy_threshold: tau [B]; -inf fills exactly one, inf all.
      distance_penalty: lambda [B].
      rule: int [B], an index into RULES. The first is Algorithm 1's: every mask below tau.

    Returns:
      bool [B, T], a subset of `masked`; empty only where `masked` is.
    """
    chex.assert_equal_shape([entropies, masked])
    chosen = passing(entropies, masked, entropy_threshold, distance_penalty, rule)
    adjusted = adjusted_entropy(entropies, masked, distance_penalty)
    return _or_else(chosen, masked, jnp.argmin(adjusted, axis=1))


def select_drafts(
    entropies: jax.Array,
    masked: jax.Array,
    entropy_threshold: jax.Array,
    distance_penalty: jax.Array,
    rule: jax.Array,
) -> jax.Array:
    """What the rule fills, or else the leftmost mask: the only draft that the next forward is sure to check."""
    chosen = passing(entropies, masked, entropy_threshold, distance_penalty, rule)
    return _or_else(chosen, masked, first_slot(masked))


def select_by_confidence(confidences: jax.Array, masked: jax.Array, confidence_threshold: jax.Array) -> jax.Array:
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
    """What is chosen, or else the mask `best`: never nothing, even where XLA computes `chosen` twice and rounds it otherwise."""
    T = masked.shape[1]
    first = first_slot(chosen)
    surely = jnp.where(first < T, first, best)
    return masked & (chosen | (jnp.arange(T)[None, :] == surely[:, None]))
