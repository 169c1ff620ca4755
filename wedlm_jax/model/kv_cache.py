"""KVCache: one preallocated array for the keys and one for the values of all layers."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp

from wedlm_jax.model.config import ModelConfig
from wedlm_jax.sharding import constrain, kv_heads_held


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values by slot. A slot holds final contents only below its row's cursor, which the caller keeps."""

    k: jax.Array  # [layers, B, S, K, H]
    v: jax.Array  # [layers, B, S, K, H]

    @classmethod
    def zeros(cls, config: ModelConfig, batch: int, slots: int) -> KVCache:
        """Inside `on_mesh`, of as many kv heads as the devices hold between them, each with its own."""
        kv_heads = kv_heads_held(config.num_heads, config.num_kv_heads)
        shape = (config.num_layers, batch, slots, kv_heads, config.head_dim)
        axes = (None, "batch", None, "kv_heads", None)
        return cls(*(constrain(jnp.zeros(shape, config.dtype), *axes) for _ in range(2)))

    def write(self, layer: jax.Array, start: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> KVCache:
        """Writes T slots of one layer at each row's own `start` [B]; slots past the end are dropped, never clamped.

        Only this slab is touched, so that XLA updates the cache in place instead of copying it.
        """
        B, T = k_BTKH.shape[:2]
        chex.assert_shape(start, (B,))
        chex.assert_shape([k_BTKH, v_BTKH], (B, T, *self.k.shape[3:]))
        rows = jnp.arange(B)[:, None]
        slots = start[:, None] + jnp.arange(T)[None, :]

        def put(cache: jax.Array, new: jax.Array) -> jax.Array:
            return cache.at[layer, rows, slots].set(new.astype(cache.dtype), mode="drop", unique_indices=True)

        return KVCache(put(self.k, k_BTKH), put(self.v, v_BTKH))
