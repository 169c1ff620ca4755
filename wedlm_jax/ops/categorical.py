"""What decoding asks of logits [..., V]: the likeliest token, log-probabilities, the entropy, the largest probability.

Each is a few plain maxima, exponentials and products of vectors, which XLA on CPU runs many numbers at a time; `jnp.argmax`, a
reduction of pairs, it runs one by one. What several of them need is computed once: their common parts are written alike.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def likeliest(logits: jax.Array) -> jax.Array:
    """int32 [...]: the first token of the largest logit."""
    V = logits.shape[-1]
    tokens = jnp.arange(V, dtype=jnp.int32)
    at_peak = jnp.where(logits == jnp.max(logits, axis=-1, keepdims=True), tokens, V - 1)
    return jnp.min(at_peak, axis=-1)


def log_prob(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """log softmax(logits) [...] of one token [...] each, in nats."""
    relative, weights = _weights(logits)
    return jnp.take_along_axis(relative, tokens[..., None], axis=-1)[..., 0] - jnp.log(_total(weights))


def entropy(logits: jax.Array) -> jax.Array:
    """Entropy [...] of softmax(logits) in nats."""
    relative, weights = _weights(logits)
    total = _total(weights)
    return jnp.log(total) - jnp.vecdot(weights, relative, precision="highest") / total


def confidence(logits: jax.Array) -> jax.Array:
    """The largest probability [...] of softmax(logits)."""
    return 1 / _total(_weights(logits)[1])


def _weights(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logits less the largest of them, and the exponentials of that: probabilities times a common total."""
    relative = logits - jnp.max(logits, axis=-1, keepdims=True)
    return relative, jnp.exp(relative)


def _total(weights: jax.Array) -> jax.Array:
    return jnp.sum(weights, axis=-1)
