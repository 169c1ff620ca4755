"""Weights of an HF directory straight into the shards of a mesh: each device's part is read from the files, and no more.

A process reads what its own devices hold, one parameter at a time; what several of them hold is read once.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from wedlm_jax.hf.shards import StoredTensors
from wedlm_jax.hf.turning import copy_turned
from wedlm_jax.hf.weight_map import Row, rows
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.parameters import param_axes, param_shapes
from wedlm_jax.sharding import param_shardings

Part = tuple[slice, ...]


def read_sharded(tensors: StoredTensors, config: ModelConfig, mesh: Mesh) -> dict[str, jax.Array]:
    """The parameters by path, cut over `mesh` as the rules say; `tensors` must fit `config`.

    Raises:
      UserError: a file is truncated, or the mesh does not divide a parameter.
    """
    shapes = param_shapes(config)
    shardings = param_shardings(mesh, param_axes(config), shapes)
    params: dict[str, jax.Array] = {}
    for row in rows(config):
        shape = shapes[row.ours].shape

        @functools.cache
        def read(bounds: tuple[tuple[int, int], ...], row: Row = row) -> np.ndarray:
            return read_part(tensors, row, config, tuple(slice(*ends) for ends in bounds))

        def of_device(part: Part | None, shape: tuple[int, ...] = shape, read: Any = read) -> np.ndarray:
            assert part is not None  # jax types it so, and passes slices
            return read(tuple(cut.indices(size)[:2] for cut, size in zip(part, shape, strict=True)))

        params[row.ours] = jax.make_array_from_callback(shape, shardings[row.ours], of_device)
    return params


def read_part(tensors: StoredTensors, row: Row, config: ModelConfig, part: Part) -> np.ndarray:
    """One part of one parameter, in the param_dtype of `config`; `part` has a slice for each axis of ours."""
    names = row.names(config)[part[0]] if row.stacked else row.names(config)
    part = part[1:] if row.stacked else part
    sizes = tuple(cut.stop - cut.start for cut in part)
    stacked = np.empty((len(names), *sizes), jnp.dtype(config.param_dtype))
    for layer, name in zip(stacked, names, strict=True):
        copy_turned(layer, row.part_from_hf(tensors.read_part(name, row.hf_part(part, config)), sizes))
    return stacked if row.stacked else stacked[0]


def same_tensors(tensors: StoredTensors, one: str, other: str, rows_at_a_time: int = 4096) -> bool:
    """Whether two stored tensors are equal, without holding either."""
    count = tensors.shapes[one][0]
    cuts = ((slice(start, min(start + rows_at_a_time, count)),) for start in range(0, count, rows_at_a_time))
    return all(np.array_equal(tensors.read_part(one, cut), tensors.read_part(other, cut)) for cut in cuts)
