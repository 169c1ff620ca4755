"""The look-up of embeddings, with a gradient in float32."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from wedlm_jax.model.config import ModelConfig
from wedlm_jax.sharding import axes_over, constrain, mesh_in_force

EMBEDDING_STDDEV = 0.02
COLUMN_TILES = 4  # in which devices add up a gradient


class Embedding(nnx.Module):
    """A table [rows, D]; `axis` names its rows."""

    def __init__(self, config: ModelConfig, rows: int, axis: str, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(EMBEDDING_STDDEV)
        self.dtype, self.axis = config.dtype, axis
        shape = (rows, config.hidden_size)
        self.embedding = nnx.Param(init(rngs.params(), shape, config.param_dtype), axes=(axis, "embed"))

    def __call__(self, ids: jax.Array, masked: jax.Array | None = None) -> jax.Array:
        """[B, L, D] of ids [B, L]; an id past the table reads its last row.

        Args:
          masked: bool [B, L], where the ids are the mask's. Nothing but the cost of the gradient depends on it.
        """
        table = self.embedding[...]
        return _rows(table, jnp.minimum(ids, len(table) - 1), masked, self.dtype, self.axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _rows(table: jax.Array, ids: jax.Array, masked: jax.Array | None, dtype: str, axis: str) -> jax.Array:
    # Whole along D before the look-up: the rows of a batch are cut over the same devices as D.
    whole = constrain(table.astype(dtype), axis, None)
    return constrain(whole[ids], "batch", None, None)


def _rows_forward(table, ids, masked, dtype, axis):
    return _rows(table, ids, masked, dtype, axis), (table, ids, masked)


def _rows_backward(dtype, axis, kept, d_BLD):
    """Each device sums its own rows of the batch, and all add these up: a few columns of every device at a time, since a whole
    [V, D] in float32, of a device's own sum and of that of all, is more than the rest of a large model's step."""
    table, ids, masked = kept
    (B, _, D), V = d_BLD.shape, len(table)
    over, vocab, width = axes_over("batch", B), axes_over(axis, V), axes_over("embed", D)
    width = width if set(width) <= set(over) else ()
    mesh = mesh_in_force()
    rows, parts = (V, 1) if mesh is None else (V // _devices(mesh, vocab), _devices(mesh, width))

    def sum_held(d_BLD: jax.Array, ids: jax.Array, masked: jax.Array | None) -> jax.Array:
        if vocab:
            ids = ids - jax.lax.axis_index(vocab) * rows
        others = tuple(name for name in over if name not in width)

        def sum_columns(d_BLC: jax.Array) -> jax.Array:
            d_table = _sum_by_id(d_BLC, ids, masked, -(-rows // parts) * parts)
            if width:
                # Rows of the sum to each device, and then of these to each its columns: a sum that is cut along columns libtpu
                # makes whole everywhere, which sends twice as much.
                d_table = jax.lax.psum_scatter(d_table, width, tiled=True)
                d_table = jax.lax.all_to_all(d_table, width, 1, 0, tiled=True)[:rows]
            return jax.lax.psum(d_table, others) if others else d_table

        if not width:
            return sum_columns(d_BLD)
        tiles = math.gcd(D // parts, COLUMN_TILES)
        by_tile = d_BLD.reshape(*d_BLD.shape[:2], parts, tiles, -1)
        by_tile = jnp.moveaxis(by_tile, 3, 0).reshape(tiles, *d_BLD.shape[:2], -1)
        return jnp.moveaxis(jax.lax.map(sum_columns, by_tile), 0, 1).reshape(rows, -1)

    if mesh is not None:
        of_rows, cut = PartitionSpec(over), PartitionSpec(vocab, width)
        sum_held = jax.shard_map(sum_held, mesh=mesh, in_specs=(of_rows,) * 3, out_specs=cut, check_vma=False)
    return constrain(sum_held(d_BLD, ids, masked), axis, "embed").astype(table.dtype), None, None


def _devices(mesh: AbstractMesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in axes)


def _sum_by_id(d_BLD: jax.Array, ids: jax.Array, masked: jax.Array | None, rows: int) -> jax.Array:
    """[rows, D], in float32 whatever the compute dtype is: of a row that thousands of tokens read, bfloat16 would lose most.
    Ids outside the rows add nothing."""
    ids = jnp.where((ids >= 0) & (ids < rows), ids, rows)
    d_BLD, d_table = d_BLD.astype(jnp.float32), jnp.zeros((rows, d_BLD.shape[-1]), jnp.float32)
    if masked is not None:
        # Up to half of all tokens are the mask. A GPU adds to one row one token at a time, so these are summed before.
        mask_id = jnp.min(jnp.where(masked, ids, rows))
        masked &= ids == mask_id
        d_table = d_table.at[mask_id].add(jnp.sum(d_BLD, axis=(0, 1), where=masked[..., None]), mode="drop")
        ids = jnp.where(masked, rows, ids)
    return d_table.at[ids].add(d_BLD, mode="drop")


_rows.defvjp(_rows_forward, _rows_backward)
