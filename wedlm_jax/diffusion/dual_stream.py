"""The dual-stream batch (Eq. 8): [memory stream, prediction stream] with the same positions twice, and what each row predicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import chex
import jax
import jax.numpy as jnp

from wedlm_jax.diffusion.reordering import reorder_blocks, reorder_documents


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DualStreamBatch:
    """What one training forward reads. The prediction stream is already in its physical order: L rows, or those that run."""

    tokens: jax.Array  # int32 [B, 2L]: clean tokens, then blocks with masks, reordered
    positions: jax.Array  # int32 [B, 2L]
    segment_ids: jax.Array  # int32 [B, L], the same for both streams; 0 = padding
    masked: jax.Array  # bool [B, 2L]: False all over the memory stream
    mask_ratio: jax.Array  # float32 [B, L]: gamma of the block that each prediction row lies in
    targets: jax.Array  # int32 [B, 2L]: the next token (memory, shifted), the token itself (prediction, in place)
    labelled: jax.Array  # bool [B, L]: memory rows that carry the AR loss
    learned: jax.Array  # bool [B, L]: tokens to be learned, masked or not (the loss mask)

    def of_prediction(self, take: Callable[[jax.Array], jax.Array]) -> DualStreamBatch:
        """With those rows of the prediction stream alone that `take` leaves of an array [B, L]."""
        length = self.segment_ids.shape[1]
        both = {
            name: jnp.concatenate([x[:, :length], take(x[:, length:])], axis=1)
            for name in ("tokens", "positions", "masked", "targets")
            for x in [getattr(self, name)]
        }
        return dataclasses.replace(self, **both, mask_ratio=take(self.mask_ratio))


def build_dual_stream(
    tokens: jax.Array,
    loss_mask: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    masked: jax.Array,
    mask_ratio: jax.Array,
    *,
    mask_token_id: int,
    block_size: int,
    whole_documents: bool = False,
    reorder: bool = True,
) -> DualStreamBatch:
    """The two streams of packed rows (Eq. 8).

    Args:
      tokens, positions, segment_ids: int [B, L]; documents start on a multiple of `block_size`, segment 0 is padding.
      loss_mask: bool [B, L]; True on the tokens to be learned (False on prompts and padding).
      masked: bool [B, L], a subset of `loss_mask`.
      mask_ratio: float [B, M], gamma of each block.
      mask_token_id: what masked rows are fed as.
      block_size: J.
      whole_documents: reorder each document as one block instead (Eq. 7): the single stream, beside the memory stream,
        which then carries nothing but the AR loss. Attend with `DualStream(segment_ids, L)`.
      reorder: False leaves masks in their places (standard order): each then sees what lies to its left, and nothing of its
        block to its right.
    """
    chex.assert_equal_shape([tokens, loss_mask, positions, segment_ids, masked])
    chex.assert_is_divisible(tokens.shape[1], block_size)
    chex.assert_shape(mask_ratio, (tokens.shape[0], tokens.shape[1] // block_size))
    moved = masked if reorder else jnp.zeros_like(masked)
    if whole_documents:
        order = reorder_documents(moved, segment_ids)
    else:
        order = reorder_blocks(moved, segment_ids == 0, block_size=block_size)

    def reordered(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, order, axis=1)

    next_tokens, labelled = next_token_targets(tokens, loss_mask, segment_ids)
    prediction = reordered(jnp.where(masked, mask_token_id, tokens))
    return DualStreamBatch(
        tokens=jnp.concatenate([tokens, prediction], axis=1),
        positions=jnp.concatenate([positions, reordered(positions)], axis=1),
        segment_ids=segment_ids,
        masked=jnp.concatenate([jnp.zeros_like(masked), reordered(masked)], axis=1),
        mask_ratio=jnp.repeat(mask_ratio, block_size, axis=1),
        targets=jnp.concatenate([next_tokens, reordered(tokens)], axis=1),
        labelled=labelled,
        learned=loss_mask,
    )


def next_token_targets(tokens: jax.Array, loss_mask: jax.Array, segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The targets of Eq. 1, int [B, L], and where they count, bool [B, L]: never across documents, never onto a prompt token."""
    chex.assert_equal_shape([tokens, loss_mask, segment_ids])
    chex.assert_type([tokens, loss_mask, segment_ids], [int, bool, int])
    following = jnp.roll(tokens, -1, axis=1)
    same_document = jnp.roll(segment_ids, -1, axis=1) == segment_ids
    labelled = jnp.roll(loss_mask, -1, axis=1) & same_document & (segment_ids > 0)
    return following, labelled.at[:, -1].set(False)


def visibility(segment_ids: jax.Array, *, block_size: int, in_block: Literal["causal", "bidirectional"] = "causal"):
    """The dense mask of Eq. 9, bool [B, 2L, 2L], query by key: for pictures and as a test's oracle, never for training.

    Args:
      segment_ids: int [B, L]; 0 = padding.
      block_size: J.
      in_block: whether the tokens of a prediction block see each other causally or both ways.
    """
    chex.assert_rank(segment_ids, 2)
    length = segment_ids.shape[1]
    index = jnp.arange(length)
    causal = index[:, None] >= index[None, :]
    block = index // block_size
    same_block = block[:, None] == block[None, :]
    inside = same_block & causal if in_block == "causal" else same_block
    earlier_blocks = block[:, None] > block[None, :]
    mask = jnp.block([[causal, jnp.zeros_like(causal)], [earlier_blocks, inside]])
    segments = jnp.concatenate([segment_ids, segment_ids], axis=1)
    return mask[None] & (segments[:, :, None] == segments[:, None, :])
