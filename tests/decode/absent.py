"""Decoding compiled for devices that are not there: prefill, and the loop that goes on from the state that it leaves."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from wedlm_jax.decode.config import DecodeConfig, RowSettings
from wedlm_jax.decode.loop import Program, run, start
from wedlm_jax.decode.state import DecodeState
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.parameters import param_axes, param_shapes, transformer_from
from wedlm_jax.model.weights import Weights
from wedlm_jax.model.window_table import ON_ACCELERATOR
from wedlm_jax.sharding import MeshConfig, make_mesh, param_shardings


def compiled_for(
    absent: Sequence[jax.Device], sizes: MeshConfig, model: ModelConfig, config: DecodeConfig, *, rows: int, prompt: int
) -> tuple[jax.stages.Compiled, jax.stages.Lowered, DecodeState]:
    """Prefill, the loop to compile, and the state between them, over a mesh of `absent` devices. As many are here, over which the
    weights are laid out first."""
    here, there = (make_mesh(sizes, some) for some in (jax.devices()[: len(absent)], absent))
    params = zeros(model)
    shardings = param_shardings(here, param_axes(model), params)
    arrays, structure = Weights.of(transformer_from(model, jax.device_put(params, shardings))).tree_flatten()
    weights = Weights([abstract(x, there) for x in arrays], dataclasses.replace(structure, mesh=there))
    fixed = dict(
        slots=config.slots(ON_ACCELERATOR), output_slots=config.max_new_tokens, holds_back=config.holds_back,
        drafter=config.drafter,
    )  # fmt: skip
    given = RowSettings.from_configs([config] * rows, range(rows), ON_ACCELERATOR)
    settings, tokens, lengths = jax.tree.map(
        lambda x: abstract(x, there), (given, jnp.zeros((rows, prompt), jnp.int32), jnp.zeros(rows, jnp.int32))
    )
    started = start.lower(weights, tokens, lengths, settings, **fixed).compile()
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(functools.partial(start, **fixed), weights, tokens, lengths, settings),
        started.output_shardings,
    )
    return started, run.lower(Program.of(config), weights, state, settings), state


def zeros(model: ModelConfig) -> dict[str, jax.Array]:
    """Parameters whose values nobody asks for: to draw them takes longer than some programs to compile."""
    return {name: jnp.zeros(x.shape, x.dtype) for name, x in param_shapes(model).items()}


def abstract(x: jax.Array, mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
    """An array on devices that are not there, cut as it is cut here."""
    cut = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, cut))
