"""Keys of a query's own block: a row cut into short blocks, each of which attends to itself."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

# Tokens of the largest block whose scores are held as they are.
DENSE_BLOCK = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OwnBlocks:
    """Keys and values of blocks of `size` tokens, of which a query sees those of its own block in its own range."""

    k_BTKH: jax.Array
    v_BTKH: jax.Array
    start_BT: jax.Array  # int, places in the row, as are the ends
    end_BT: jax.Array
    size: int = dataclasses.field(metadata={"static": True})

    def by_block(self, q_BTNH: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """q, k, v [B * M, J, heads, H] and bool [B * M, J, J]: who sees whom in a block."""
        places = jnp.broadcast_to(jnp.arange(self.start_BT.shape[1]), self.start_BT.shape)
        key = self.blocks(places)[:, None, :]
        visible = (self.blocks(self.start_BT)[..., None] <= key) & (key < self.blocks(self.end_BT)[..., None])
        return self.blocks(q_BTNH), self.blocks(self.k_BTKH), self.blocks(self.v_BTKH), visible

    def blocks(self, x_BT: jax.Array) -> jax.Array:
        return x_BT.reshape(-1, self.size, *x_BT.shape[2:])
