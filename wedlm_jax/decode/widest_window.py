"""The windows of window_size="auto", and the widest of them that is worth its cost."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

AUTO_WINDOWS = (4, 8, 16, 32)

# With each of AUTO_WINDOWS, what a row accepts in a forward and the slots that it feeds: of the quickstart's model, geometric
# means of word problems and counting (benchmarks/RESULTS.md, "Windows of verified decoding"). That model was trained in blocks
# of 16 and accepts no more with 32; for those of longer blocks a tenth more is assumed.
ACCEPTED = (3.6, 5.9, 7.5, 8.2)
FED = (7.8, 14.8, 25.7, 42.8)


def widest_rung(rows: jax.Array | int, slot_cost: jax.Array | float) -> jax.Array:
    """int32 [...]: the place in AUTO_WINDOWS of the window that accepts most for the cost of its forward, where so many rows run
    and a further slot adds `slot_cost` [...] to it. The more rows, and the dearer a slot, the narrower."""
    forward = 1 + jnp.asarray(slot_cost)[..., None] * rows * jnp.array(FED)
    return jnp.argmax(jnp.array(ACCEPTED) / forward, axis=-1).astype(jnp.int32)


@functools.cache
def widest_window(rows: int, slot_cost: float) -> int:
    """That window, on the host."""
    return AUTO_WINDOWS[int(widest_rung(rows, slot_cost))]
