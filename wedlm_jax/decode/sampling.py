"""Which token a slot gets: greedy, or by noise that is fixed for each row and absolute position."""

from __future__ import annotations

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from wedlm_jax.decode.config import RowSettings
from wedlm_jax.ops.attention import target_platform
from wedlm_jax.ops.categorical import likeliest

LARGE_VOCABULARY = 8192  # from which on a CPU draws slot by slot in less time (`python -m benchmarks.sampling`)


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
    no_text = (vocabulary == settings.mask_token_id[:, None]) | (vocabulary >= settings.num_tokens[:, None])
    banned = settings.ban_mask[:, None] & no_text
    logits = jnp.where(banned[:, None, :], -jnp.inf, logits)
    greedy = likeliest(logits)
    if not settings.draws:
        return greedy

    of_rows = settings.key, settings.temperature, settings.top_k, settings.top_p
    one_by_one = positions.size > 1 and in_pieces(logits)
    drawn = (_draw_slot_by_slot if one_by_one else _draw)(logits, positions, *of_rows)
    return jnp.where(settings.temperature[:, None] > 0, drawn, greedy)


def in_pieces(logits: jax.Array) -> bool:
    """Whether what is made of logits is made of some of them at a time: on a CPU where the vocabulary is large, since it is as
    large as they are, and that of a few stays in a processor's caches."""
    return target_platform() == "cpu" and logits.shape[-1] >= LARGE_VOCABULARY


def _draw_slot_by_slot(logits: jax.Array, positions: jax.Array, *of_rows: jax.Array) -> jax.Array:
    """`_draw` of one slot after the other: what is made on the way is eight times as large as the logits, 2.5 GB of 16 windows of
    32 slots and Qwen's vocabulary."""
    B, T, _ = logits.shape

    def draw(slot: jax.Array) -> jax.Array:
        b, t = slot // T, slot % T
        return _draw(logits[b, t][None, None], positions[b, t][None, None], *(x[b][None] for x in of_rows))[0, 0]

    return jax.lax.map(draw, jnp.arange(B * T)).reshape(B, T)


def _draw(
    logits: jax.Array,
    positions: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
) -> jax.Array:
    """Tokens [B, T] of logits [B, T, V] and the settings [B] of their rows; where the temperature is 0, any."""
    temperature = jnp.where(temperature > 0, temperature, 1.0)
    # The best logit becomes 0, so that no temperature, however small, makes two logits infinite.
    relative = logits - jnp.max(logits, axis=-1, keepdims=True)
    filtered = filter_logits(relative, top_k, top_p)
    # XLA may multiply by 1 / T, which is 0 where T is huge, and -inf * 0 is no number.
    filtered = jnp.where(filtered == -jnp.inf, -jnp.inf, filtered / temperature[:, None, None])
    return likeliest(filtered + jax.vmap(functools.partial(position_noise, V=logits.shape[-1]))(key, positions))


def position_noise(key: jax.Array, positions: jax.Array, V: int) -> jax.Array:
    """The Gumbel noise of one row at its absolute positions int32 [T]: float32 [T, V]."""
    keys = jax.vmap(lambda position: jax.random.fold_in(key, position))(positions)
    # The default "low" never exceeds 15.95: by it no token of a probability under about 1e-7 is ever drawn.
    return jax.vmap(lambda k: jax.random.gumbel(k, (V,), mode="high"))(keys)


def filter_logits(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Sets to -inf what top-k, and then top-p on what is left, exclude.

    Nothing is sorted, which costs more than a forward where the vocabulary is large: what is looked for is the least logit that
    stays, a bit of it at a time.

    Args:
      logits: float32 [B, T, V].
      top_k: int32 [B]; 0 = off. Ties with the k-th are kept.
      top_p: float32 [B]; the token that crosses the limit is kept. Of ties with it those that come first.
    """
    keys = _ordered(logits)

    def by_count() -> jax.Array:
        k = jnp.where(top_k > 0, jnp.minimum(top_k, logits.shape[-1]), logits.shape[-1])[:, None]
        kth = _largest(lambda key: jnp.sum(keys >= key[..., None], axis=-1) >= k, keys.shape[:2])
        return keys >= kth[..., None]

    kept = jax.lax.cond(jnp.any(top_k > 0), by_count, lambda: jnp.ones_like(keys, bool))
    kept &= jax.lax.cond(
        jnp.any(top_p < 1),
        lambda: _nucleus(keys, jax.nn.softmax(jnp.where(kept, logits, -jnp.inf), axis=-1), top_p[:, None]),
        lambda: jnp.ones_like(kept),
    )
    return jnp.where(kept, logits, -jnp.inf)


def _nucleus(keys: jax.Array, p: jax.Array, top_p: jax.Array) -> jax.Array:
    """Whether the mass of the tokens before each, by their keys and then by their places, is below top_p: bool [B, T, V].

    Args:
      keys: uint32 [B, T, V], in the order of p.
      p: float32 [B, T, V], probabilities.
      top_p: float32 [B, 1].
    """

    def mass(of: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(of, p, 0), axis=-1)

    last = _largest(lambda key: mass(keys >= key[..., None]) >= top_p, keys.shape[:2])[..., None]
    above, ties, place = keys > last, keys == last, jnp.arange(keys.shape[-1], dtype=jnp.uint32)
    # So many of the ties stay that the limit is crossed, the first of all tokens in any case.
    most = jnp.ceil((top_p - mass(above)) / jnp.max(jnp.where(ties, p, 0), axis=-1))
    most = jnp.clip(most, 1, keys.shape[-1])
    bits = keys.shape[-1].bit_length()
    end = _largest(lambda end: jnp.sum(ties & (place < end[..., None]), axis=-1) < most, keys.shape[:2], bits)
    return above | (ties & (place <= end[..., None])) | (top_p >= 1)[..., None]


def _ordered(x: jax.Array) -> jax.Array:
    """uint32 that are ordered as the float32 are; both zeros are one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], bits: int = 32) -> jax.Array:
    """The largest uint32 of `bits` bits for which `holds` is true, found bit by bit; `holds` must be true from 0 up to it."""

    def decide(i: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (jnp.uint32(1 << (bits - 1)) >> i.astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, found)

    return jax.lax.fori_loop(0, bits, decide, jnp.zeros(shape, jnp.uint32))
