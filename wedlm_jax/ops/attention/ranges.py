"""Attention in which every query sees one contiguous range of keys, tile by tile: XLA alone, on every platform.

Causal attention, packed documents, the clean prefix of a prediction block and a cache with a cursor are all key ranges. A
tile of queries visits only the tiles of keys between the least start and the largest end of its ranges, in loops whose trip
counts are data: other documents, the future and the unused end of a cache cost nothing. Forward and backward hold the scores
of one tile pair at a time (the online softmax of FlashAttention-2, arXiv 2307.08691).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from wedlm_jax.ops.attention.choice import PLATFORMS, target_platform
from wedlm_jax.ops.attention.dense import MASKED_SCORE, attend, scores
from wedlm_jax.program_costs import kernel_runs

QUERY_TILE = 256
KEY_TILE = 256
WIDER_KEY_TILES = 4  # so many times as wide at most, where the queries are few

# So few scores a head are held at once: there the loops cost more than the scores that nobody sees.
DENSE_SCORES = 2**16

# A round costs a GPU the host's answer and the start of several kernels, however little it computes: so its tiles have four times
# as many queries and keys, and of few queries four times as many scores are held at once. Reckoned, not measured.
LARGER_ON_GPU = 4

# The name of output and log-sum-exp, of every implementation, to a remat policy: what it keeps by this name
# (`jax.checkpoint_policies.save_only_these_names`) the backward pass finds instead of computing it again.
RESIDUALS = "attention"


def attend_ranges(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, start_BT: jax.Array, end_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of T queries over S keys, query t of row b over the keys start_BT[b, t] <= s < end_BT[b, t].

    Args:
      q_BTNH: queries [B, T, N, H], N a multiple of K (grouped-query attention; keys are never repeated).
      k_BSKH: keys [B, S, K, H].
      v_BSKH: values [B, S, K, H].
      start_BT, end_BT: int [B, T], in [0, S]. A range may be empty.

    Returns:
      out [B, T, N, H] in the dtype of q, and the natural log-sum-exp of the scaled scores [B, T, N] in float32, as `attend`
      gives them. Both are differentiable, once and in reverse. A query that sees nothing has lse <= -1e29 and a finite output.
    """
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    chex.assert_shape([k_BSKH, v_BSKH], (B, S, K, H))
    chex.assert_is_divisible(N, K)
    chex.assert_shape([start_BT, end_BT], (B, T))
    chex.assert_type([start_BT, end_BT], int)
    if T * S / (_larger() if T <= QUERY_TILE else 1) <= DENSE_SCORES:
        keys_S = jnp.arange(S)
        return attend(q_BTNH, k_BSKH, v_BSKH, (start_BT[..., None] <= keys_S) & (keys_S < end_BT[..., None]))
    # Heads first before the rows are taken apart: a cache lies like that, and XLA turns nothing round.
    k_BKSH, v_BKSH = (x.swapaxes(1, 2) for x in (k_BSKH, v_BSKH))
    # One row at a time, so that its own documents bound its loops.
    return jax.lax.map(lambda row: _attend_row(*row), (q_BTNH, k_BKSH, v_BKSH, start_BT, end_BT))


@jax.custom_vjp
def _attend_row(
    q_TNH: jax.Array, k_KSH: jax.Array, v_KSH: jax.Array, start_T: jax.Array, end_T: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _forward(q_TNH, k_KSH, v_KSH, start_T, end_T)[0]


def _forward(q_TNH, k_KSH, v_KSH, start_T, end_T):
    T, N, _ = q_TNH.shape
    K = len(k_KSH)
    _, width = _tile_sizes(T)
    k_padded, v_padded = (_pad(x, width, axis=1) for x in (k_KSH, v_KSH))

    def query_tile(queries: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return _attend_tile(*queries, k_padded, v_padded, width)

    out, lse = jax.lax.map(query_tile, (_query_tiles(q_TNH, K), *_range_tiles(start_T, end_T, N // K)))
    out_TNH = checkpoint_name(_from_query_tiles(out, T).astype(q_TNH.dtype), RESIDUALS)
    lse_TN = checkpoint_name(_from_query_tiles(lse[..., None], T)[..., 0], RESIDUALS)
    return (out_TNH, lse_TN), (q_TNH, k_KSH, v_KSH, start_T, end_T, out_TNH, lse_TN)


def _attend_tile(
    q_KRH: jax.Array, start_R: jax.Array, end_R: jax.Array, k_KSH: jax.Array, v_KSH: jax.Array, width: int
) -> tuple[jax.Array, jax.Array]:
    """R scaled queries of each kv head over the tiles of `width` keys that any of them sees: out [K, R, H], lse [K, R],
    float32."""

    def add(tile: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out_KRH, peak_KR, total_KR = carry
        k_KCH, v_KCH = (_slice(x, tile, width) for x in (k_KSH, v_KSH))
        scores_KRC = _scores(q_KRH, k_KCH, start_R, end_R, tile)
        new_peak_KR = jnp.maximum(peak_KR, jnp.max(scores_KRC, axis=-1))
        weights_KRC = jnp.exp(scores_KRC - new_peak_KR[..., None])
        shrink_KR = jnp.exp(peak_KR - new_peak_KR)
        total_KR = total_KR * shrink_KR + jnp.sum(weights_KRC, axis=-1)
        seen_KRH = _dot("KRC,KCH->KRH", weights_KRC.astype(v_KCH.dtype), v_KCH)
        return out_KRH * shrink_KR[..., None] + seen_KRH, new_peak_KR, total_KR

    K, R, _ = q_KRH.shape
    nothing = jnp.zeros(q_KRH.shape, jnp.float32), jnp.full((K, R), MASKED_SCORE), jnp.zeros((K, R))
    out_KRH, peak_KR, total_KR = _over_tiles_seen(start_R, end_R, k_KSH, width, add, nothing)
    total_KR = jnp.where(total_KR > 0, total_KR, 1.0)  # no tile was visited: every range of these is empty
    return out_KRH / total_KR[..., None], peak_KR + jnp.log(total_KR)


def _backward(residuals, cotangents):
    """The FlashAttention-2 backward: weights come again from scores and log-sum-exp, a tile pair at a time.

    d_lse enters like a constant of the row: d_scores = weights * (d_weights - delta), delta = sum(d_out * out) - d_lse.
    """
    q_TNH, k_KSH, v_KSH, start_T, end_T, out_TNH, lse_TN = residuals
    d_out_TNH, d_lse_TN = cotangents
    T, N, H = q_TNH.shape
    (K, S), dtype = k_KSH.shape[:2], k_KSH.dtype
    _, width = _tile_sizes(T)
    k_KSH, v_KSH = (_pad(x, width, axis=1) for x in (k_KSH, v_KSH))
    k_KHS = k_KSH.swapaxes(1, 2)
    delta_TN = jnp.vecdot(d_out_TNH, out_TNH, precision="highest", preferred_element_type=jnp.float32) - d_lse_TN

    def query_tile(d_keys_and_values, xs):
        q_KRH, d_out_KRH, lse_KR, delta_KR, start_R, end_R = xs

        # Scores lie with the keys first here, so that no product contracts the first axis of both factors: on a CPU those
        # are the slow ones (benchmarks/layouts.py).
        def add(tile, carry):
            d_q_KHR, d_k_KSH, d_v_KSH = carry
            k_KCH, v_KCH = (_slice(x, tile, width) for x in (k_KSH, v_KSH))
            keys_C1 = (tile * width + jnp.arange(width))[:, None]
            weights_KCR = jnp.where(
                (start_R <= keys_C1) & (keys_C1 < end_R),
                jnp.exp(_dot("KCH,KRH->KCR", k_KCH, q_KRH) - lse_KR[:, None]),
                0.0,
            )
            d_weights_KCR = _dot("KCH,KRH->KCR", v_KCH, d_out_KRH)
            d_scores_KCR = (weights_KCR * (d_weights_KCR - delta_KR[:, None])).astype(q_KRH.dtype)
            d_v_KCH = _dot("KCR,KRH->KCH", weights_KCR.astype(q_KRH.dtype), d_out_KRH)
            d_k_KCH = _dot("KCR,KRH->KCH", d_scores_KCR, q_KRH)
            d_q_KHR = d_q_KHR + _dot("KHC,KCR->KHR", _slice(k_KHS, tile, width, axis=2), d_scores_KCR)
            return d_q_KHR, _add_slice(d_k_KSH, tile, d_k_KCH), _add_slice(d_v_KSH, tile, d_v_KCH)

        start = (jnp.zeros(q_KRH.swapaxes(1, 2).shape, jnp.float32), *d_keys_and_values)
        d_q_KHR, *d_keys_and_values = _over_tiles_seen(start_R, end_R, k_KSH, width, add, start)
        return tuple(d_keys_and_values), d_q_KHR.swapaxes(1, 2)

    zeros = jnp.zeros(k_KSH.shape, jnp.float32), jnp.zeros(v_KSH.shape, jnp.float32)
    (d_k_KSH, d_v_KSH), d_q = jax.lax.scan(
        query_tile,
        zeros,
        (
            _query_tiles(q_TNH, K),
            _rows(d_out_TNH, K),
            _rows(lse_TN[..., None], K)[..., 0],
            _rows(delta_TN[..., None], K)[..., 0],
            *_range_tiles(start_T, end_T, N // K),
        ),
    )
    d_q_TNH = (_from_query_tiles(d_q, T) * H**-0.5).astype(q_TNH.dtype)
    d_k_KSH, d_v_KSH = (x[:, :S].astype(dtype) for x in (d_k_KSH, d_v_KSH))
    return d_q_TNH, d_k_KSH, d_v_KSH, None, None


_attend_row.defvjp(_forward, _backward)


_dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _scores(q_KRH: jax.Array, k_KCH: jax.Array, start_R: jax.Array, end_R: jax.Array, tile: jax.Array) -> jax.Array:
    C = k_KCH.shape[1]
    keys_C = tile * C + jnp.arange(C)
    visible_RC = (start_R[:, None] <= keys_C) & (keys_C < end_R[:, None])
    return jnp.where(visible_RC, scores(q_KRH, k_KCH), MASKED_SCORE)


def _tile_sizes(T: int) -> tuple[int, int]:
    """Queries and keys of a tile: no more tiles of queries than it takes, cut evenly, so that next to none is padding. Those of a
    decoding window hold few queries, and are wider instead."""
    queries = -(-T // -(-T // (QUERY_TILE * _larger())))
    return queries, KEY_TILE * max(_larger(), min(QUERY_TILE // queries, WIDER_KEY_TILES))


def _larger() -> int:
    return LARGER_ON_GPU if target_platform() in PLATFORMS["tokamax"] else 1


def _over_tiles_seen(
    start_R: jax.Array,
    end_R: jax.Array,
    k_KSH: jax.Array,
    width: int,
    add: Callable[[jax.Array, Any], Any],
    carry: Any,
) -> Any:
    """`add(tile, carry)` from the first tile of `width` keys that any of the ranges touches to the last."""
    empty = start_R >= end_R
    low = jnp.min(jnp.where(empty, jnp.iinfo(jnp.int32).max, start_R)) // width
    high = -(-jnp.max(jnp.where(empty, 0, end_R)) // width)
    with kernel_runs(k_KSH.shape[1] // width):  # at most
        return jax.lax.fori_loop(low, high, add, carry)


def _query_tiles(q_TNH: jax.Array, kv_heads: int) -> jax.Array:
    return _rows(q_TNH * q_TNH.shape[-1] ** -0.5, kv_heads)


def _rows(x_TNH: jax.Array, kv_heads: int) -> jax.Array:
    """[tiles, K, queries of a tile * G, H]: the queries of one kv head are rows of one product."""
    T, N, H = x_TNH.shape
    queries, _ = _tile_sizes(T)
    x_TNH = _pad(x_TNH, queries, axis=0)
    x = x_TNH.reshape(-1, queries, kv_heads, N // kv_heads, H).transpose(0, 2, 1, 3, 4)
    return x.reshape(x.shape[0], kv_heads, -1, H)


def _from_query_tiles(x: jax.Array, length: int) -> jax.Array:
    """Back to [T, N, H]."""
    tiles, K, R, H = x.shape
    queries, _ = _tile_sizes(length)
    x = x.reshape(tiles, K, queries, R // queries, H).transpose(0, 2, 1, 3, 4)
    return x.reshape(tiles * queries, -1, H)[:length]


def _range_tiles(start_T: jax.Array, end_T: jax.Array, group: int) -> tuple[jax.Array, jax.Array]:
    """Each [tiles, queries of a tile * G]."""
    queries, _ = _tile_sizes(len(start_T))

    def tiles(x_T: jax.Array) -> jax.Array:
        return jnp.repeat(_pad(x_T, queries, axis=0).reshape(-1, queries), group, axis=1)

    return tiles(start_T), tiles(end_T)


def _pad(x: jax.Array, multiple: int, axis: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)


def _slice(x_KSH: jax.Array, tile: jax.Array, width: int, axis: int = 1) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x_KSH, tile * width, width, axis)


def _add_slice(x_KSH: jax.Array, tile: jax.Array, part_KCH: jax.Array) -> jax.Array:
    C = part_KCH.shape[1]
    return jax.lax.dynamic_update_slice_in_dim(x_KSH, _slice(x_KSH, tile, C) + part_KCH, tile * C, axis=1)
