"""The useful arithmetic of a training step: what MFU counts. Recomputation, padding and skipped scores are not in it."""

from __future__ import annotations

import math
from typing import Any

from wedlm_jax.model.adapter import is_adapter_parameter
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.parameters import param_shapes

_OUTSIDE_THE_LAYERS = ("embed.", "embed_positions.", "lm_head.", "mask_embedding")


def non_embedding_parameters(config: ModelConfig) -> int:
    """Parameters without the embeddings and the output layer."""
    return sum(_sizes(config).values())


def _sizes(config: ModelConfig) -> dict[str, int]:
    shapes = param_shapes(config)
    return {name: math.prod(x.shape) for name, x in shapes.items() if not name.startswith(_OUTSIDE_THE_LAYERS)}


def _parts(config: ModelConfig) -> tuple[int, int]:
    """Of these, the parameters of the base and those of its adapter."""
    sizes = _sizes(config)
    adapter = sum(size for name, size in sizes.items() if is_adapter_parameter(name))
    return sum(sizes.values()) - adapter, adapter


def training_flops(config: ModelConfig, *, rows: Any, loss_rows: Any, attention_pairs: Any) -> Any:
    """FLOPs of forward and backward: 6 for each parameter and row, 12 H for each pair of rows and head, 6 V D for each loss.

    Beside an adapter those of the base, its output layer included, are 4: 2 of them make gradients of parameters.

    Args:
      config: the model.
      rows: tokens that run through the layers, padding left out; in the dual stream a token runs twice, or once if it is skipped.
      loss_rows: rows whose logits a loss reads.
      attention_pairs: pairs (query, key) that see each other, summed over the rows.

    Returns:
      a number of the type of the arguments: int, float or a scalar array.
    """
    base, adapter = _parts(config)
    heads = config.num_layers * config.num_heads * config.head_dim
    of_base = 6.0 if config.adapter is None else 4.0
    return (
        (of_base * base + 6.0 * adapter) * rows
        + of_base * config.vocab_size * config.hidden_size * loss_rows
        + 12.0 * heads * attention_pairs
    )


def mask_training_flops(
    config: ModelConfig,
    *,
    rows: Any,
    loss_rows: Any,
    attention_pairs: Any,
    of_masks: tuple[Any, Any],
    distils: bool,
) -> Any:
    """As `training_flops`, of an adapter of mask rows. All rows run forward, the mask rows alone backward, and of parameters the
    adapter's alone have gradients; the output layer has none, and a teacher's logits are made with it once more. Keys and values
    have gradients where they are a mask's.

    Args:
      loss_rows: the mask rows, among `rows`.
      of_masks: the pairs of which the query is a mask row, among `attention_pairs`, and those of which the key is one too.
    """
    base, adapter = _parts(config)
    heads = config.num_layers * config.num_heads * config.head_dim
    return (
        2.0 * base * (rows + loss_rows)
        + 6.0 * adapter * loss_rows
        + (6.0 if distils else 4.0) * config.vocab_size * config.hidden_size * loss_rows
        + 4.0 * heads * attention_pairs
        + 4.0 * heads * sum(of_masks)
    )
