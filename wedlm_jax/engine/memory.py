"""What the caches of an engine cost, known before they are taken."""

from __future__ import annotations

import jax.numpy as jnp

from wedlm_jax.model.config import ModelConfig

# Cache slots of a row are rounded up to a multiple of this. Decoders whose windows differ then mostly have rows of one
# length, and share the programs of prefill.
SLOT_MULTIPLE = 64


def cache_slots(context: int, window_slots: int) -> int:
    """Slots of one row: a window of `window_slots` may stand behind `context` tokens."""
    return -(-(context + window_slots) // SLOT_MULTIPLE) * SLOT_MULTIPLE


def cache_bytes(config: ModelConfig, rows: int, slots: int) -> int:
    """Bytes of the keys and values of `rows` rows with `slots` slots each."""
    return (
        2 * config.num_layers * rows * slots * config.num_kv_heads * config.head_dim * jnp.dtype(config.dtype).itemsize
    )


def in_words(size: int) -> str:
    """For example `12,582,912 bytes (12.0 MiB)`."""
    return f"{size:,} bytes ({size / 2**20:.1f} MiB)"
