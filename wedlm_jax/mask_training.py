"""Gradients of an adapter of mask rows: the base runs forward once, and what is differentiated are the mask rows alone."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from wedlm_jax.diffusion.dual_stream import DualStreamBatch
from wedlm_jax.diffusion.losses import LossWeights
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.frozen_head import cross_entropy_of_targets, divergence_from_teacher
from wedlm_jax.model.kept_blocks import capacities, least_holding
from wedlm_jax.model.mask_rows import Chosen, Frozen, Prediction, run_frozen, run_masks
from wedlm_jax.model.parameters import transformer_from
from wedlm_jax.model.patterns import DualStream, document_starts
from wedlm_jax.objective import Targets

Params = dict[str, jax.Array]


def mask_gradients(
    trained: Params,
    frozen: Params,
    streams: DualStreamBatch,
    weights: LossWeights,
    *,
    model: ModelConfig,
    block_size: int,
    targets: Targets = "data",
    temperature: float = 1.0,
) -> tuple[Params, jax.Array, jax.Array]:
    """Gradients of the weighted sum of the masks' losses, that sum, and the losses of the prediction stream [B, L] (0 where
    no mask is).

    The mask rows are brought to the front of as few places as hold them, and so are the observed rows that they see: all of
    `capacities` are compiled, the device chooses.
    """
    L = streams.segment_ids.shape[1]
    parts = {
        name: jnp.split(getattr(streams, name), 2, axis=1) for name in ("tokens", "positions", "masked", "targets")
    }
    prediction = Prediction(
        parts["tokens"][1], parts["positions"][1], streams.segment_ids, parts["masked"][1], block_size
    )
    of_observed, of_masks = least_holding(prediction.observed, prediction.masked)
    memory = parts["tokens"][0], parts["positions"][0]
    run_base = functools.partial(run_frozen, transformer_from(model, frozen | trained), *memory, prediction)
    of_base = jax.lax.switch(of_observed, [functools.partial(run_base, c) for c in capacities(L)])
    of_base = jax.lax.stop_gradient(of_base)

    def run(capacity: int) -> tuple[Params, jax.Array, jax.Array]:
        masks = Chosen.of(prediction.masked, block_size, capacity)

        def loss(trained: Params) -> tuple[jax.Array, jax.Array]:
            transformer = transformer_from(model, frozen | trained)
            hidden = run_masks(transformer, of_base, prediction, masks)
            read = dict(precision=model.precision)
            if targets == "data":
                losses = cross_entropy_of_targets(hidden, transformer.head, masks.take(parts["targets"][1]), **read)
            else:
                has_teacher, teacher = teacher_of(of_base, prediction, masks)
                losses = divergence_from_teacher(hidden, transformer.head, teacher, temperature=temperature, **read)
                losses = jnp.where(has_teacher, losses, 0.0)
            losses = jnp.where(masks.used, losses, 0.0)
            return jnp.sum(masks.take(weights.mlm) * losses), losses

        (value, losses), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
        rows = jnp.arange(losses.shape[0])[:, None]
        return gradients, value, jnp.zeros(weights.mlm.shape, jnp.float32).at[rows, masks.rows].set(losses)

    return jax.lax.switch(of_masks, [functools.partial(run, c) for c in capacities(L)])


def taught(streams: DualStreamBatch) -> DualStreamBatch:
    """The batch without the masks and learned tokens that begin a document, of which the base predicts nothing. For counting
    only: in the model such a mask is a row like any other."""
    said = streams.positions > 0
    return dataclasses.replace(
        streams, masked=streams.masked & said, learned=streams.learned & said[:, : streams.learned.shape[1]]
    )


def pairs_of_masks(streams: DualStreamBatch, block_size: int) -> tuple[jax.Array, jax.Array]:
    """How many pairs of rows there are of which the first, a mask, sees the second; and of how many the second is a mask too."""
    place = DualStream(streams.segment_ids, block_size).physical_index(streams.masked.shape[1])
    of_block = jnp.sum(streams.masked.reshape(-1, block_size), axis=1, dtype=jnp.float32)
    return jnp.sum(jnp.where(streams.masked, place + 1.0, 0.0)), jnp.sum(of_block * (of_block + 1)) / 2


def teacher_of(of_base: Frozen, prediction: Prediction, masks: Chosen) -> tuple[jax.Array, jax.Array]:
    """Whether something is before a mask in its document, bool [B, C], and the base's hidden state there [B, C, D].

    The memory stream in its row at position p - 1 says what AR decoding puts at p.
    """
    position = masks.take(prediction.positions)
    row = masks.take(document_starts(prediction.segment_ids)) + position - 1
    teacher = jnp.take_along_axis(of_base.hidden, jnp.maximum(row, 0)[..., None], axis=1)
    return position > 0, teacher
