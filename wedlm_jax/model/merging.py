"""An adapter of all rows, added to the weights that it stands beside: then nothing of it is left to load or to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from wedlm_jax.errors import UserError
from wedlm_jax.model.adapter import AdapterConfig, split_adapter
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.handle import Model
from wedlm_jax.model.int8 import require_unrounded
from wedlm_jax.model.parameters import params_of, transformer_from


def plain(model: Model) -> Model:
    """The model without an adapter whose AR text this one returns: the merged one, or the base as it is where the adapter works
    on mask rows alone."""
    config, params = model.config, params_of(model.transformer)
    if config.adapter is not None and config.adapter.rows == "mask":
        config, params = dataclasses.replace(config, adapter=None), split_adapter(params)[0]
    config, params = merged(config, params)
    return dataclasses.replace(model, transformer=transformer_from(config, params), config=config)


def merged(config: ModelConfig, params: Mapping[str, jax.Array]) -> tuple[ModelConfig, dict[str, jax.Array]]:
    """Config and parameters of the model without an adapter whose weights are W + (alpha / rank) A B, summed in float32 and
    kept in the dtype of W; as they are where there is no adapter.

    Raises:
      UserError: the adapter works on mask rows alone, which no single W can do; or the weights were rounded to int8.
    """
    require_unrounded(config)
    base, pairs = split_adapter(params)
    if config.adapter is None:
        return config, base
    require_mergeable(config.adapter)
    for name, b in pairs.items():
        if name.endswith(".lora_b"):
            kernel = name.replace("lora_b", "kernel")
            base[kernel] = _add(base[kernel], pairs[name.replace("lora_b", "lora_a")], b, config.adapter.scale)
    return dataclasses.replace(config, adapter=None), base


def require_mergeable(adapter: AdapterConfig | None) -> None:
    """Raises a `UserError` where the adapter works on mask rows alone."""
    if adapter is not None and adapter.rows == "mask":
        raise UserError(
            "an adapter of mask rows (rows=mask) cannot be merged: a merged weight works on every row, so the text would no "
            "longer be the base's; export the base alone, and keep the adapter beside it (--adapter DIR)"
        )


@jax.jit
def _add(kernel: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """kernel [layers, *inputs, *outputs] + scale * a [layers, *inputs, R] b [layers, R, *outputs]."""
    product = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1, precision="highest"))(a, b)
    return (kernel.astype(jnp.float32) + scale * product).astype(kernel.dtype)
