"""The look-up of embeddings, with a gradient in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from wedlm_jax.model.config import ModelConfig
from wedlm_jax.sharding import constrain

EMBEDDING_STDDEV = 0.02


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
          masked: bool [B, L], where all ids are the same. Nothing but the cost of the gradient depends on it.
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
    """Sums in float32 whatever the compute dtype is: of a row that thousands of tokens read, bfloat16 would lose most of them."""
    table, ids, masked = kept
    d_BLD, nowhere = d_BLD.astype(jnp.float32), len(table)
    d_table = jnp.zeros(table.shape, jnp.float32)
    if masked is not None:
        # Up to half of all tokens are the mask. A GPU adds to one row one token at a time, so these are summed before.
        mask_id = jnp.min(jnp.where(masked, ids, nowhere))
        d_mask = jnp.sum(d_BLD, axis=(0, 1), where=masked[..., None])
        d_table = d_table.at[mask_id].add(d_mask, mode="drop")
        ids = jnp.where(masked, nowhere, ids)
    d_table = d_table.at[ids].add(d_BLD, mode="drop")
    return constrain(d_table, axis, None).astype(table.dtype), None, None


_rows.defvjp(_rows_forward, _rows_backward)
