"""The training objective: masked-token loss (Eq. 10) and auxiliary AR loss, joined.

Weights are made for the whole global batch before it is cut into micro-batches, so that accumulation and sharding leave
the loss as it is: every loss below is a plain sum over rows.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp

from wedlm_jax.diffusion.dual_stream import DualStreamBatch

RATIO_EPSILON = 1e-8  # that the official code adds to gamma, which is above 0 without it; Eq. 10 has none
Normalization = Literal["weights", "tokens"]


class LossWeights(NamedTuple):
    """What each row's cross-entropy counts for, already divided by the global normaliser."""

    mlm: jax.Array  # float32 [B, P], over the prediction stream: L rows, or those of it that run
    ar: jax.Array  # float32 [B, L], over the memory stream


def loss_weights(batch: DualStreamBatch, *, normalization: Normalization, ar: bool = True) -> LossWeights:
    """The weights 1 / gamma of Eq. 3 and 10 on masked rows, and uniform weights on rows with an AR label.

    Args:
      batch: the global batch.
      normalization: "weights" divides by the sum of the 1 / gamma (as the official code), "tokens" by the number of
        tokens to be learned, masked or not (as the equation). A batch without masks has weights, and loss, 0.
      ar: False gives the memory stream the weight 0.
    """
    length = batch.segment_ids.shape[1]
    masked = batch.masked[:, length:]
    weights = jnp.where(masked, 1.0 / (batch.mask_ratio + RATIO_EPSILON), 0.0)
    total = jnp.sum(weights) if normalization == "weights" else jnp.sum(batch.learned)
    labelled = batch.labelled if ar else jnp.zeros_like(batch.labelled)
    return LossWeights(mlm=_divide(weights, total), ar=ar_loss_weights(labelled))


def ar_loss_weights(labelled: jax.Array) -> jax.Array:
    """Uniform weights float32 [B, L] that sum to 1 over the labelled rows of the global batch."""
    chex.assert_type(labelled, bool)
    labelled = labelled.astype(jnp.float32)
    return _divide(labelled, jnp.sum(labelled))


def _divide(weights: jax.Array, total: jax.Array) -> jax.Array:
    return weights / jnp.where(total > 0, total, 1.0)


def wedlm_loss(token_losses: jax.Array, weights: LossWeights, *, ar_loss_weight: float) -> tuple[jax.Array, dict]:
    """The MLM loss (Eq. 10) joined with the auxiliary AR loss, (MLM + w * AR) / (1 + w), from both streams' cross-entropies.

    Args:
      token_losses: float32 [B, L + P], memory rows against the next token, prediction rows against their own.
      weights: as `loss_weights` made them.
      ar_loss_weight: w; 0 leaves the MLM loss alone.

    Returns:
      the scalar loss and its parts {"mlm_loss", "ar_loss"}.
    """
    chex.assert_equal_shape_prefix([weights.ar, weights.mlm], 1)
    (B, L), P = weights.ar.shape, weights.mlm.shape[1]
    chex.assert_shape(token_losses, (B, L + P))
    ar_losses, mlm_losses = jnp.split(token_losses, [L], axis=1)
    mlm, ar = jnp.sum(weights.mlm * mlm_losses), jnp.sum(weights.ar * ar_losses)
    return (mlm + ar_loss_weight * ar) / (1.0 + ar_loss_weight), {"mlm_loss": mlm, "ar_loss": ar}
