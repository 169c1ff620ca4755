"""Corruption: which tokens of each block become masks (section 4.2 of the paper: a mask ratio of its own for every block)."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

MIN_MASK_RATIO = 1e-8  # as the official code clamps gamma


def corrupt(
    key: jax.Array,
    candidates: jax.Array,
    document_ids: jax.Array,
    positions: jax.Array,
    *,
    block_size: int,
    fully_masked: float = 0.0,
    suffix_masked: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Draws gamma ~ U[0, 1) for every block and masks round(gamma * candidates) of its candidates, uniformly chosen.

    Not in the paper: a share of the blocks is masked as decoding finds them instead, all of it, as a fresh window is (gamma 1),
    or its last round(gamma * candidates) candidates, as a window is that begins with drafts.

    The draw depends on (key, document, block of the document) alone: packing, accumulation and sharding do not change it.

    Args:
      key: a PRNG key, one per (seed, step).
      candidates: bool [B, L]; True where a token may be masked. Prompts and pads may not.
      document_ids: int [B, L], the same for all tokens of a document and different between documents.
      positions: int [B, L], logical positions in the document; documents start on a multiple of `block_size`.
      block_size: J, dividing L.
      fully_masked, suffix_masked: the expected shares of such blocks.

    Returns:
      masked bool [B, L], and the drawn mask_ratio float32 [B, M] (gamma, not the realised share), M = L / J.
    """
    B, L = candidates.shape
    chex.assert_equal_shape([candidates, document_ids])
    document, block = blocks_of(document_ids, positions, block_size)

    def draw(document: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        ratio_key, order_key = jax.random.split(jax.random.fold_in(jax.random.fold_in(key, document), block))
        ratio = jnp.maximum(jax.random.uniform(ratio_key), MIN_MASK_RATIO)
        scores = jax.random.uniform(order_key, (block_size,))
        if fully_masked or suffix_masked:
            kind = jax.random.uniform(jax.random.fold_in(ratio_key, 1))
            ratio = jnp.where(kind < fully_masked, 1.0, ratio)
            last_first = -jnp.arange(block_size, dtype=scores.dtype)
            scores = jnp.where((kind >= fully_masked) & (kind < fully_masked + suffix_masked), last_first, scores)
        return ratio, scores

    mask_ratio, scores = jax.vmap(jax.vmap(draw))(document, block)
    masked = mask_lowest(scores, candidates.reshape(B, L // block_size, block_size), mask_ratio)
    return masked.reshape(B, L), mask_ratio


def corrupt_documents(
    key: jax.Array, candidates: jax.Array, document_ids: jax.Array, positions: jax.Array, *, block_size: int
) -> tuple[jax.Array, jax.Array]:
    """Draws one gamma ~ U[0, 1) for every document and masks each of its candidates with that probability (Eq. 3).

    For the single stream (Eq. 7). As in `corrupt`, packing, accumulation and sharding do not change the draw.

    Args:
      key, candidates, document_ids, positions, block_size: as `corrupt`.

    Returns:
      masked bool [B, L], and the gamma of the document that each block belongs to, float32 [B, M].
    """
    B, L = candidates.shape
    chex.assert_equal_shape([candidates, document_ids])
    document, block = blocks_of(document_ids, positions, block_size)

    def draw(document: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        ratio_key, score_key = jax.random.split(jax.random.fold_in(key, document))
        ratio = jnp.maximum(jax.random.uniform(ratio_key), MIN_MASK_RATIO)
        return ratio, jax.random.uniform(jax.random.fold_in(score_key, block), (block_size,))

    mask_ratio, scores = jax.vmap(jax.vmap(draw))(document, block)
    return candidates & (scores < mask_ratio[..., None]).reshape(B, L), mask_ratio


def blocks_of(document_ids: jax.Array, positions: jax.Array, block_size: int) -> tuple[jax.Array, jax.Array]:
    """For every block of packed rows [B, L], its document's id and its number in that document, each int [B, M]."""
    chex.assert_equal_shape([document_ids, positions])
    chex.assert_type([document_ids, positions], int)
    chex.assert_is_divisible(document_ids.shape[1], block_size)
    first = slice(None, None, block_size)
    return document_ids[:, first], positions[:, first] // block_size


def mask_lowest(scores: jax.Array, candidates: jax.Array, mask_ratio: jax.Array) -> jax.Array:
    """The round(mask_ratio * n) of a block's n candidates with the lowest scores, halves to even; may be none.

    Args:
      scores: float [..., J].
      candidates: bool [..., J].
      mask_ratio: float [...].

    Returns:
      masked bool [..., J].
    """
    chex.assert_equal_shape([scores, candidates])
    chex.assert_shape(mask_ratio, candidates.shape[:-1])
    chex.assert_type(candidates, bool)
    count = jnp.round(mask_ratio * jnp.sum(candidates, axis=-1))
    rank = jnp.argsort(jnp.argsort(jnp.where(candidates, scores, jnp.inf), axis=-1), axis=-1)
    return candidates & (rank < count[..., None])
