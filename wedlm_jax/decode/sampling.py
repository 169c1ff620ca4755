"""Which token a slot gets: greedy, or by noise that is fixed for each row and absolute position."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from wedlm_jax.decode.config import RowSettings
from wedlm_jax.ops.categorical import likeliest


def sample(logits: jax.Array, positions: jax.Array, settings: RowSettings) -> jax.Array:
    """argmax(filtered logits / T + Gumbel noise of (row, position)); plain argmax where the temperature is 0.

    The noise depends on nothing else, so decoders that reach the same logits at a position draw the same token there:
    that is why verified decoding equals AR at any temperature (coupled noise; the Gumbel-max trick makes it a fair draw).

    Args:
      logits: float32 [B, T, V].
      positions: int32 [B, T], the absolute position that each drawn token will have.
      settings: of the B rows.

    Returns:
      tokens int32 [B, T].
    """
    chex.assert_shape(positions, logits.shape[:2])
    vocabulary = jnp.arange(logits.shape[-1])
    banned = settings.ban_mask[:, None] & (vocabulary[None, :] == settings.mask_token_id[:, None])
    logits = jnp.where(banned[:, None, :], -jnp.inf, logits)
    greedy = likeliest(logits)
    if not settings.draws:
        return greedy

    temperature = jnp.where(settings.temperature > 0, settings.temperature, 1.0)
    # The best logit becomes 0, so that no temperature, however small, makes two logits infinite.
    relative = logits - jnp.max(logits, axis=-1, keepdims=True)
    filtered = filter_logits(relative, settings.top_k, settings.top_p) / temperature[:, None, None]
    noise = jax.vmap(functools.partial(position_noise, V=logits.shape[-1]))(settings.key, positions)
    drawn = likeliest(filtered + noise)
    return jnp.where(settings.temperature[:, None] > 0, drawn, greedy)


def position_noise(key: jax.Array, positions: jax.Array, V: int) -> jax.Array:
    """The Gumbel noise of one row at its absolute positions int32 [T]: float32 [T, V]."""
    keys = jax.vmap(lambda position: jax.random.fold_in(key, position))(positions)
    # The default "low" never exceeds 15.95: by it no token of a probability under about 1e-7 is ever drawn.
    return jax.vmap(lambda k: jax.random.gumbel(k, (V,), mode="high"))(keys)


def filter_logits(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Sets to -inf what top-k, and then top-p on what is left, exclude.

    Args:
      logits: float32 [B, T, V].
      top_k: int32 [B]; 0 = off. Ties with the k-th are kept.
      top_p: float32 [B]; the token that crosses the limit is kept.
    """
    V = logits.shape[-1]
    k = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)[:, None, None]
    order, place = jnp.argsort(-logits, axis=-1, stable=True), jnp.arange(V)
    descending = jnp.take_along_axis(logits, order, axis=-1)
    # The first by their places: XLA may compute both sides of a comparison apart, and round them apart.
    kept = (place < k) | (descending >= jnp.take_along_axis(descending, k - 1, axis=-1))
    p = jax.nn.softmax(jnp.where(kept, descending, -jnp.inf), axis=-1)
    before = jnp.cumsum(p, axis=-1) - p
    kept &= (place == 0) | (before < top_p[:, None, None]) | (top_p >= 1)[:, None, None]
    return jnp.where(jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1), logits, -jnp.inf)
