"""What a training step says of itself: its losses, the MLM loss by mask ratio, tokens, padding and useful FLOPs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from wedlm_jax.data.packing import PackedBatch
from wedlm_jax.diffusion.dual_stream import DualStreamBatch
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.flops import mask_training_flops, training_flops
from wedlm_jax.objective import ObjectiveConfig

Metrics = dict[str, jax.Array]

# The MLM loss by the mask ratio of the block: mean cross-entropy of the masked tokens, gamma up to the number in the name.
LOSS_BY_RATIO = ("mlm_loss_0.25", "mlm_loss_0.50", "mlm_loss_0.75", "mlm_loss_1.00")


def sums_by_ratio(token_losses: jax.Array, streams: DualStreamBatch) -> Metrics:
    """The cross-entropies [B, L + P] of the masked rows, summed by the mask ratio of their block."""
    losses = token_losses[:, streams.segment_ids.shape[1] :]
    return {name: jnp.sum(jnp.where(masked, losses, 0.0)) for name, masked in masked_by_ratio(streams).items()}


def masked_by_ratio(streams: DualStreamBatch) -> dict[str, jax.Array]:
    """The masked rows of the prediction stream, bool [B, P], whose block has gamma in each quarter of (0, 1]."""
    masked = streams.masked[:, streams.segment_ids.shape[1] :]
    quarter = jnp.clip(jnp.ceil(4 * streams.mask_ratio).astype(jnp.int32) - 1, 0, 3)
    return {name: masked & (quarter == number) for number, name in enumerate(LOSS_BY_RATIO)}


def logged_losses(sums: Metrics, counted: DualStreamBatch, objective: ObjectiveConfig) -> Metrics:
    """The losses of a whole batch as they are logged: those by mask ratio as means, NaN where there is no mask."""
    counts = {name: jnp.sum(masked) for name, masked in masked_by_ratio(counted).items()}
    means = {name: jnp.where(count > 0, sums[name] / count, jnp.nan) for name, count in counts.items()}
    # No loss of masks where there are none, though `loss` counts it as 0. By the counts that are there: fake devices of a CPU
    # share as many threads, all of which may come to wait in one more reduction that is free to run beside others.
    mlm_loss = jnp.where(sum(counts.values()) > 0, sums["mlm_loss"], jnp.nan)
    losses = sums | means | {"mlm_loss": mlm_loss}
    if objective.ar_loss_weight == 0:
        losses.pop("ar_loss", None)  # of mask rows alone there is none
    if objective.targets == "distill":  # another quantity than the cross-entropy of the data, and so under another name
        losses = {name.replace("mlm_loss", "distillation_loss"): value for name, value in losses.items()}
    return losses


def row_metrics(
    batch: PackedBatch,
    model: ModelConfig,
    *,
    runs: jax.Array,
    loss_rows: jax.Array,
    reach: jax.Array | None = None,
    of_masks: tuple[jax.Array, jax.Array] | None = None,
    distils: bool = False,
) -> Metrics:
    """Tokens of the batch that are not padding, the share that is, and the useful FLOPs of the step.

    Args:
      runs: how often each token runs, int [] or [B, L], each time seeing itself and what is before it in its document.
      loss_rows: rows whose logits a loss reads.
      reach: int [B, L]: up to which place each token's copy in the prediction stream sees, that left out; None: there is none.
      of_masks: as `pairs_of_masks`, where an adapter of mask rows is trained, which makes gradients of these alone.
      distils: of that adapter, whether its base teaches it.
    """
    real = batch.segment_ids > 0
    tokens = jnp.sum(real)
    rows = jnp.where(real, runs.astype(jnp.float32), 0.0)
    pairs = rows * (batch.positions + 1)
    if reach is not None:
        pairs += jnp.where(real, rows - 1, 0.0) * (reach - 1 - jnp.arange(reach.shape[1]))
    rows, pairs = jnp.sum(jnp.stack([rows, pairs]), axis=(1, 2))
    counts: dict[str, Any] = dict(rows=rows, loss_rows=loss_rows.astype(jnp.float32), attention_pairs=pairs)
    if of_masks is not None:
        flops = mask_training_flops(model, **counts, of_masks=of_masks, distils=distils)
    else:
        flops = training_flops(model, **counts)
    return {"tokens": tokens, "padding_share": 1.0 - tokens / batch.segment_ids.size, "useful_flops": flops}
