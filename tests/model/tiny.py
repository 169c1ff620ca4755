"""A transformer of a few hundred parameters, none of which is at a value (0 or 1) where it would have no effect."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.quick_jit import quick_jit
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.handle import Model
from wedlm_jax.model.parameters import init_params, transformer_from

MASK_TOKEN_ID = 39
TINY = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    rope_theta=10_000.0,
    matmul_precision="highest",
)


@functools.cache
def params(config: ModelConfig = TINY) -> dict[str, jax.Array]:
    """Normal noise on top of every initial value; a parameter has the same values in every config where it has the same shape."""
    shapes = jax.eval_shape(lambda: init_params(config, 0))
    noisy = {}
    for name, like in shapes.items():
        random = np.random.default_rng([*name.encode()])
        noise = random.normal(size=like.shape) * (0.3 if like.ndim > 1 and "kernel" in name else 0.5)
        # The first caller may be inside a jit, and what is cached must not be a tracer.
        with jax.ensure_compile_time_eval():
            noisy[name] = jnp.asarray(noise + name.endswith("scale"), like.dtype)
    return noisy


def tiny_model(**changes) -> Model:
    config = dataclasses.replace(TINY, **changes)
    return Model(transformer_from(config, params(config)), config, mask_token_id=MASK_TOKEN_ID)


@functools.partial(quick_jit, static_argnames="config")
def logits_of(config: ModelConfig, params: dict[str, jax.Array], tokens, positions, pattern) -> jax.Array:
    return transformer_from(config, params)(tokens, positions=positions, pattern=pattern)


@functools.partial(quick_jit, static_argnames="config")
def cached_logits_of(config: ModelConfig, params, tokens, positions, pattern, cache):
    return transformer_from(config, params)(tokens, positions=positions, pattern=pattern, cache=cache)
