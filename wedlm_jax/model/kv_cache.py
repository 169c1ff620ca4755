"""KVCache: one preallocated array for the keys and one for the values, of all layers or of one."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp

from wedlm_jax.model.config import ModelConfig
from wedlm_jax.ops.attention import held_head_dim, widen_heads
from wedlm_jax.sharding import constrain, kv_heads_held

AXES = (None, "batch", "kv_heads", None, None)  # the names of a cache's axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values by slot. A slot holds final contents only below its row's cursor, which the caller keeps.

    The slots of a head lie side by side, as the products with its queries read them.
    """

    k: jax.Array  # [layers, B, K, S, held_head_dim(H)]
    v: jax.Array  # as k

    @classmethod
    def zeros(cls, config: ModelConfig, batch: int, slots: int, layers: int | None = None) -> KVCache:
        """Of all layers unless `layers` says how many. Inside `on_mesh`, of as many kv heads as the devices hold between them,
        each with its own."""
        kv_heads = kv_heads_held(config.num_heads, config.num_kv_heads)
        layers = config.num_layers if layers is None else layers
        shape = (layers, batch, kv_heads, slots, held_head_dim(config.head_dim))
        return cls(*(constrain(jnp.zeros(shape, config.dtype), *AXES) for _ in range(2)))

    def write(self, layer: jax.Array | int, start: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> KVCache:
        """Writes T slots of one layer at each row's own `start` [B]; slots past the end are dropped, never clamped. Rows of the
        cache behind the first B stay as they are; over a mesh that cuts rows there are none.

        Only this slab is touched, so that XLA updates the cache in place instead of copying it.
        """
        B, T = k_BTKH.shape[:2]
        chex.assert_shape(start, (B,))
        chex.assert_shape([k_BTKH, v_BTKH], (B, T, self.k.shape[2], None))
        assert held_head_dim(k_BTKH.shape[3]) == self.k.shape[4]
        rows, slots = jnp.arange(B)[:, None, None], (start[:, None] + jnp.arange(T)[None, :])[..., None]
        # Each head by its number: written as one slice they would make XLA copy the cache.
        heads = jnp.arange(self.k.shape[2])

        def put(cache: jax.Array, new: jax.Array) -> jax.Array:
            new = widen_heads(new.astype(cache.dtype), cache.shape[4])
            return cache.at[layer, rows, heads, slots].set(new, mode="drop", unique_indices=True)

        return KVCache(put(self.k, k_BTKH), put(self.v, v_BTKH))


Cache = KVCache | tuple[KVCache, ...]  # one of all layers, or one of each layer
