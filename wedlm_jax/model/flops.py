"""The useful arithmetic of a training step: what MFU counts. Recomputation, padding and skipped scores are not in it."""

from __future__ import annotations

import math
from typing import Any

import jax

from wedlm_jax.model.adapter import is_adapter_parameter
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.parameters import init_params

_OUTSIDE_THE_LAYERS = ("embed.", "embed_positions.", "lm_head.", "mask_embedding")


def non_embedding_parameters(config: ModelConfig) -> int:
    """Parameters without the embeddings and the output layer."""
    return sum(_sizes(config).values())


def _sizes(config: ModelConfig) -> dict[str, int]:
    shapes = jax.eval_shape(lambda: init_params(config, 0))
    return {name: math.prod(x.shape) for name, x in shapes.items() if not name.startswith(_OUTSIDE_THE_LAYERS)}


def training_flops(config: ModelConfig, *, rows: Any, loss_rows: Any, attention_pairs: Any) -> Any:
    """FLOPs of forward and backward: 6 for each parameter and row, 12 H for each pair of rows and head, 6 V D for each loss.

    Args:
      config: the model.
      rows: tokens that run through the layers, padding left out; in the dual stream each token runs twice.
      loss_rows: rows whose logits a loss reads.
      attention_pairs: pairs (query, key) that see each other, summed over the rows.

    Returns:
      a number of the type of the arguments: int, float or a scalar array.
    """
    heads = config.num_layers * config.num_heads * config.head_dim
    return (
        6.0 * non_embedding_parameters(config) * rows
        + 6.0 * config.vocab_size * config.hidden_size * loss_rows
        + 12.0 * heads * attention_pairs
    )


def mask_training_flops(
    config: ModelConfig, *, rows: Any, loss_rows: Any, attention_pairs: Any, mask_pairs: Any, distils: bool
) -> Any:
    """As `training_flops`, of an adapter of mask rows. All rows run forward, the mask rows alone backward, and of parameters the
    adapter's alone have gradients; the output layer has none, and a teacher's logits are made with it once more.

    Args:
      loss_rows: the mask rows, among `rows`.
      mask_pairs: the pairs of which the query is a mask row, among `attention_pairs`.
    """
    sizes = _sizes(config)
    adapter = sum(size for name, size in sizes.items() if is_adapter_parameter(name))
    base = sum(sizes.values()) - adapter
    heads = config.num_layers * config.num_heads * config.head_dim
    return (
        2.0 * base * (rows + loss_rows)
        + 6.0 * adapter * loss_rows
        + (6.0 if distils else 4.0) * config.vocab_size * config.hidden_size * loss_rows
        + 4.0 * heads * attention_pairs
        + 8.0 * heads * mask_pairs
    )
