"""Models with an adapter for the interchange tests: an oracle's directory as the base, and pairs of noise beside it."""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from wedlm_jax.model.adapter import AdapterConfig, is_adapter_parameter
from wedlm_jax.model.handle import Model
from wedlm_jax.model.parameters import init_params, params_of, transformer_from
from wedlm_jax.pretrained import load

from .conftest import ORACLE

ON_ALL = AdapterConfig(rank=3, alpha=6.0, rows="all")
ON_MASKS = AdapterConfig(rank=3, alpha=6.0)
BASE = ORACLE / "wedlm_qwen3" / "model"


def adapted(adapter: AdapterConfig, base: Path = BASE, **options) -> Model:
    return with_noise(load(base, **{"dtype": "float32"} | options), adapter)


def with_noise(model: Model, adapter: AdapterConfig) -> Model:
    """The base with an adapter of which no value is 0."""
    config = dataclasses.replace(model.config, adapter=adapter)
    own = {
        name: jnp.asarray(np.random.default_rng(zlib.crc32(name.encode())).normal(0, 0.2, x.shape), x.dtype)
        for name, x in jax.eval_shape(lambda: init_params(config, 0)).items()
        if is_adapter_parameter(name)
    }
    return dataclasses.replace(
        model, transformer=transformer_from(config, params_of(model.transformer) | own), config=config
    )
