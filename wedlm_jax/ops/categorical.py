"""What decoding asks of logits [..., V]: the likeliest token, log-probabilities, the entropy, the largest probability.

All but the first are a few plain maxima, exponentials and products of vectors, which XLA on CPU runs many numbers at a time.
What several of them need XLA computes once, because their common parts are written alike.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from wedlm_jax.ops.attention import target_platform


def likeliest(logits: jax.Array) -> jax.Array:
    """int32 [...]: the first token of the largest logit; where a logit is NaN, any token.

    `argmax` is a reduction of pairs, which XLA on CPU runs one by one (`python -m benchmarks.layouts`): there it is asked of the
    maxima of blocks, and then of one block. A search for the logit that equals the maximum would be no safe way: XLA may
    compute the logits anew for it and round them otherwise, and then none does.
    """
    if target_platform() != "cpu":
        return jnp.argmax(logits, axis=-1)
    *shape, V = logits.shape
    width = 1 << (math.isqrt(V) - 1).bit_length()  # about as many blocks as logits in each
    whole, rest = jnp.split(logits, [V - V % width], axis=-1)
    maxima = jnp.max(whole.reshape(*shape, V // width, width), axis=-1)
    if rest.size:
        maxima = jnp.concatenate([maxima, jnp.max(rest, axis=-1, keepdims=True)], axis=-1)
    first = jnp.minimum(width * jnp.argmax(maxima, axis=-1), V - width)[..., None]
    block = jnp.take_along_axis(logits, first + jnp.arange(width), axis=-1)
    return first[..., 0] + jnp.argmax(block, axis=-1)


def log_prob(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """log softmax(logits) [...] of one token [...] each, in nats."""
    relative, weights = _weights(logits)
    return jnp.take_along_axis(relative, tokens[..., None], axis=-1)[..., 0] - jnp.log(_total(weights))


def entropy(logits: jax.Array) -> jax.Array:
    """Entropy [...] of softmax(logits) in nats; the logits are finite."""
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
