"""Attention over a cache on GPU, the context in parts side by side: jax's Pallas decode kernel, for a few queries a row.

A window has too few queries to fill a GPU by rows and heads alone. So the slots that all its queries see are cut into splits,
each a program of its own with the queries of one kv head as its rows, and their softmaxes are merged; what only some queries
see, the slots of the window itself, is attended densely and merged by log-sum-exp.

Run in the tests: interpreted on CPU. Never run on a GPU by us, so nothing chooses it but model.attention=tokamax, the setting
that asks for GPU kernels.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from wedlm_jax.ops.attention.dense import attend, merge

MAX_QUERIES = 64  # of a row; a longer one, a prompt, has rows enough
ROWS = 64  # queries of one kv head in a program: keys are read once for each
KEY_TILE = 64
SLOTS_OF_A_SPLIT, MAX_SPLITS = 256, 16


def unsupported(q_BTNH: jax.Array) -> str | None:
    """Why the kernel cannot do this, or None if it can."""
    H = q_BTNH.shape[3]
    if H < 16 or H & (H - 1):  # Triton's tiles and products
        return f"a head dimension of {H} is not a power of two from 16 on"
    return None


def attend_split(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, end_BT: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """Attention of query t of row b over the slots s < end_BT[b, t].

    Args:
      q_BTNH: queries of a window, T of at most MAX_QUERIES.
      k_BSKH, v_BSKH: the used part of one layer of a cache.
      end_BT: int [B, T], in [1, S]; those of a row differ by less than T, as a causal window's do.
      interpret: run the kernel as plain operations, on any platform; slow.

    Returns:
      out [B, T, N, H].
    """
    from jax.experimental.pallas.ops.gpu import decode_attention

    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    rows = T * N // K
    seen_by_all_B = jnp.min(end_BT, axis=1)  # at least 1: no part is empty

    block_rows = min(ROWS, max(16, 1 << (rows - 1).bit_length()))
    splits = min(MAX_SPLITS, -(-S // SLOTS_OF_A_SPLIT))
    q_BKRH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 1, 3, 4).reshape(B, K, rows, H)
    q_BKRH = jnp.pad(q_BKRH, ((0, 0), (0, 0), (0, -rows % block_rows), (0, 0)))
    to_splits = ((0, 0), (0, -S % (splits * KEY_TILE)), (0, 0), (0, 0))
    k_splits, v_splits = (jnp.pad(x, to_splits).reshape(B, splits, -1, K, H) for x in (k_BSKH, v_BSKH))
    slots = k_splits.shape[2]
    seen_of_splits = jnp.clip(seen_by_all_B[:, None] - slots * jnp.arange(splits), 0, slots)
    # A call's own splits are merged in the dtype of q, each sum and factor rounded; these are merged here, in float32.
    kernel = functools.partial(
        decode_attention.gqa, block_h=block_rows, block_k=KEY_TILE, k_splits=1, return_residuals=True,
        normalize_output=False, interpret=interpret,
    )  # fmt: skip
    out_of_splits, (totals, peaks) = jax.vmap(kernel, (None, 1, 1, None, 1))(
        q_BKRH.reshape(B, -1, H), k_splits, v_splits, None, seen_of_splits
    )
    # As in jax's own merge: without the barrier XLA may make NaN or other wrong values of what the kernel returned.
    peak = jax.lax.optimization_barrier(jnp.max(peaks, axis=0))
    shares = jnp.exp(peaks - peak)
    total = jnp.sum(totals * shares, axis=0)
    out = jnp.sum(out_of_splits * shares[..., None], axis=0) / total[..., None]

    def by_query(x: jax.Array) -> jax.Array:
        """[B, T, N, ...] of [B, rows of all kv heads, ...]."""
        x = x.reshape(B, K, -1, *x.shape[2:])[:, :, :rows].reshape(B, K, T, N // K, *x.shape[2:])
        return jnp.moveaxis(x, 2, 1).reshape(B, T, N, *x.shape[4:])

    # The window: T slots behind what all see, shifted back where the cache ends first.
    start_B = jnp.minimum(seen_by_all_B, S - min(T, S))
    slots_BT = start_B[:, None] + jnp.arange(min(T, S))
    k_window, v_window = (jnp.take_along_axis(x, slots_BT[:, :, None, None], axis=1) for x in (k_BSKH, v_BSKH))
    visible = (seen_by_all_B[:, None, None] <= slots_BT[:, None]) & (slots_BT[:, None] < end_BT[..., None])
    inside = attend(q_BTNH, k_window, v_window, visible)
    return merge(by_query(out), by_query(peak + jnp.log(total)), *inside).astype(q_BTNH.dtype)
