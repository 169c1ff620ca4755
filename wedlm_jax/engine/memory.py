"""What the caches of an engine cost, known before they are taken."""

from __future__ import annotations

import functools

import jax
from jax.sharding import Mesh

from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.sharding import batch_parts, on_mesh, rows_of_a_device

# Cache slots of a row are rounded up to a multiple of this. Decoders whose windows differ then mostly have rows of one
# length, and share the programs of prefill.
SLOT_MULTIPLE = 64


def cache_slots(context: int, window_slots: int) -> int:
    """Slots of one row: a window of `window_slots` may stand behind `context` tokens."""
    return -(-(context + window_slots) // SLOT_MULTIPLE) * SLOT_MULTIPLE


@functools.lru_cache
def cache_bytes(config: ModelConfig, rows: int, slots: int, mesh: Mesh | None = None) -> int:
    """Bytes of the keys and values of `rows` rows with `slots` slots each, on all devices together. Rows that the mesh cannot cut
    evenly are held by each of the parts that it would cut them into."""
    held = rows_of_a_device(rows, mesh) * batch_parts(mesh)

    def zeros() -> KVCache:
        with on_mesh(mesh):
            return KVCache.zeros(config, held, slots)

    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(zeros)))


def in_words(size: int) -> str:
    """For example `12,582,912 bytes (12.0 MiB)`."""
    return f"{size:,} bytes ({size / 2**20:.1f} MiB)"
