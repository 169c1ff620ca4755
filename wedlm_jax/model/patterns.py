"""Who sees whom: the three attention patterns of the one forward pass.

Positions belong to RoPE alone. A pattern reads physical indices and segment ids, never positions: after reordering the two
disagree, and a mask made from positions would be silently wrong. `physical_index` counts along memory from the start of a
document; without masks it is the position.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp

from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.ops.attention import attend, merge


def _static(default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Causal:
    """Plain causal attention by physical index, inside documents where `segment_ids` [B, L] says so."""

    segment_ids: jax.Array | None = None

    def __call__(self, q_BLNH: jax.Array, k_BLKH: jax.Array, v_BLKH: jax.Array) -> jax.Array:
        return attend(q_BLNH, k_BLKH, v_BLKH, self.visible(q_BLNH.shape[1]))[0]

    def visible(self, length: int) -> jax.Array:
        """bool [1 or B, L, L], query by key."""
        visible = jnp.tril(jnp.ones((length, length), bool))[None]
        if self.segment_ids is not None:
            visible = visible & same_segment(self.segment_ids, self.segment_ids)
        return visible

    def physical_index(self, length: int) -> jax.Array:
        """int [1 or B, L]."""
        index = jnp.arange(length)[None]
        if self.segment_ids is None:
            return index
        first = jnp.diff(self.segment_ids, axis=1, prepend=-1) != 0  # of each document, and of each run of padding
        return index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DualStream:
    """Eq. 8 and 9: a row of length 2L = [memory stream, prediction stream], both over the same packed documents.

    The memory stream is causal inside each document. The prediction stream is cut into blocks of `block_size`; each of its
    tokens sees the memory tokens of its document before its block and, causally, its own block. It never sees another
    prediction block. Documents start on a multiple of `block_size` and their pads (segment 0) come last in a block.

    `in_block="bidirectional"` lets the tokens of a block see each other both ways (the paper's ablation, Figure 5c).
    """

    segment_ids: jax.Array  # [B, L]; 0 = padding
    block_size: int = _static()
    in_block: Literal["causal", "bidirectional"] = _static("causal")

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        B, length = self.segment_ids.shape
        chex.assert_axis_dimension(q, 1, 2 * length)
        (q_memory, q_prediction), (k_memory, k_prediction), (v_memory, v_prediction) = (
            jnp.split(x, 2, axis=1) for x in (q, k, v)
        )
        memory = Causal(self.segment_ids)(q_memory, k_memory, v_memory)
        prefix = attend(q_prediction, k_memory, v_memory, self.prefix_visible())
        q_block, k_block, v_block = (self._to_blocks(x) for x in (q_prediction, k_prediction, v_prediction))
        inside = attend(q_block, k_block, v_block, self.block_visible())
        out, lse = (x.reshape(B, length, *x.shape[2:]) for x in inside)
        return jnp.concatenate([memory, merge(out, lse, *prefix)], axis=1)

    def prefix_visible(self) -> jax.Array:
        """bool [B, L, L]: prediction query by memory key, same document and an earlier block."""
        block = jnp.arange(self.segment_ids.shape[1]) // self.block_size
        return same_segment(self.segment_ids, self.segment_ids) & (block[:, None] > block[None, :])[None]

    def block_visible(self) -> jax.Array:
        """bool [B * M, J, J]: query by key inside each prediction block."""
        segments = self._to_blocks(self.segment_ids)
        visible = same_segment(segments, segments)
        if self.in_block == "causal":
            visible = visible & jnp.tril(jnp.ones((self.block_size, self.block_size), bool))[None]
        return visible

    def physical_index(self, length: int) -> jax.Array:
        """int [B, 2L]: each stream counts for itself, and reordering moves tokens inside their block alone."""
        return jnp.tile(Causal(self.segment_ids).physical_index(length // 2), 2)

    def _to_blocks(self, x: jax.Array) -> jax.Array:
        return x.reshape(-1, self.block_size, *x.shape[2:])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CachedWindow:
    """T tokens behind a cache: row b's tokens take the slots length[b] + 0 .. T - 1 and see every slot up to their own.

    Prefill is the same with length 0. The window is written before it is read, so one key range per query says it all.
    """

    length: jax.Array  # [B]: the cursor, the number of committed slots

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, *, cache: KVCache, layer: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        cache = cache.write(layer, self.length, k, v)
        keys, values = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (cache.k, cache.v))
        return attend(q, keys, values, self.visible(q.shape[1], keys.shape[1]))[0], cache

    def visible(self, window: int, slots: int) -> jax.Array:
        """bool [B, T, S]."""
        own_slot = self.length[:, None, None] + jnp.arange(window)[None, :, None]
        return jnp.arange(slots)[None, None, :] <= own_slot

    def physical_index(self, window: int) -> jax.Array:
        """int [B, T]: the cache slots that the window takes."""
        return self.length[:, None] + jnp.arange(window)[None, :]


Pattern = Causal | DualStream | CachedWindow


def same_segment(query_segments: jax.Array, key_segments: jax.Array) -> jax.Array:
    """bool [B, T, S] from segment ids [B, T] and [B, S]."""
    return query_segments[:, :, None] == key_segments[:, None, :]
