"""Attention over a cache on GPU, the context in parts side by side: a Pallas kernel for the few queries of a window.

A window has too few queries to fill a GPU by rows and heads alone. So the used context of a row is cut into splits, each a
program of its own (Flash-Decoding): all queries of one kv head are the rows of its products, it reads the keys and values of its
split where they lie in the cache, and a second kernel merges the softmaxes of the splits by log-sum-exp. How long a context is is
data: what is not used costs nothing, and no program is compiled for it.

The first kernel ran on an H200 (benchmarks/RESULTS.md, "On a GPU"), when XLA still merged, and on no other GPU: trial.py runs
both before "auto" takes them. In the tests they run interpreted on CPU, and are compiled for an H100 that is not there.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from wedlm_jax.ops.attention.dense import MASKED_SCORE, is_exact

try:
    from jax.experimental.pallas import triton
except ImportError:  # jax 0.12 says that a later one will have none
    triton = None  # type: ignore[assignment]

MAX_ROWS = 64  # queries of one kv head in a program; more are cut, and each part reads the keys
KEY_TILE = 64
PROGRAMS = 256  # about so many fill a GPU, two of them on each multiprocessor
MAX_SPLITS = 16


def unsupported(q_BTNH: jax.Array, k_LBKSH: jax.Array) -> str | None:
    """Why the kernel cannot do this, or None if it can."""
    if triton is None:
        return f"jax {jax.__version__} has no Triton backend of Pallas"
    H = q_BTNH.shape[3]
    if H < 16 or H & (H - 1):  # Triton's tiles and products
        return f"a head dimension of {H} is not a power of two from 16 on"
    if k_LBKSH.size >= 2**31:  # places are 32 bits wide
        return f"a cache of {k_LBKSH.size:,} keys' elements in one array has 2 ** 31 or more"
    return None


def attend_split(
    q_BTNH: jax.Array,
    k_LBKSH: jax.Array,
    v_LBKSH: jax.Array,
    layer: jax.Array | int,
    end_BT: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """`cache.attend_cache` by this kernel, for the few queries of a window; `unsupported` names no reason against them.

    Args:
      interpret: run it as plain operations, on any platform; slow.

    Returns:
      out [B, T, N, H] in the dtype of q.
    """
    B, T, N, H = q_BTNH.shape
    K, S = k_LBKSH.shape[2:4]
    chex.assert_equal_shape([k_LBKSH, v_LBKSH])
    chex.assert_shape(end_BT, (B, T))
    rows = T * N // K
    block = min(MAX_ROWS, max(16, 1 << (rows - 1).bit_length()))
    blocks = -(-rows // block)
    splits = max(1, min(MAX_SPLITS, PROGRAMS // (B * K * blocks), -(-S // KEY_TILE)))
    # Triton's arrays have powers of two. The places behind the splits are never written.
    places = 1 << (splits - 1).bit_length()

    def by_kv_head(x_BTN: jax.Array) -> jax.Array:
        """[B, K, rows of a kv head, ...], filled up to whole blocks."""
        x = x_BTN.reshape(B, T, K, N // K, *x_BTN.shape[3:]).swapaxes(1, 2).reshape(B, K, rows, *x_BTN.shape[3:])
        return jnp.pad(x, [(0, 0), (0, 0), (0, blocks * block - rows)] + [(0, 0)] * (x.ndim - 3))

    q_BKRH = by_kv_head(q_BTNH)
    end_BKR = by_kv_head(jnp.broadcast_to(jnp.minimum(end_BT, S)[..., None], (B, T, N)))
    a_block = pl.BlockSpec((1, 1, block, H), lambda b, k, r, s: (b, k, r, 0))
    of_rows = pl.BlockSpec((1, 1, block), lambda b, k, r, s: (b, k, r))
    everything = pl.BlockSpec(memory_space=pl.ANY)
    out_BKRPH, lse_BKRP = pl.pallas_call(
        functools.partial(_kernel, splits=splits, exact=is_exact(q_BTNH.dtype)),
        grid=(B, K, blocks, splits),
        in_specs=[pl.BlockSpec((1,), lambda b, k, r, s: (0,)), a_block, of_rows, everything, everything],
        out_specs=[
            pl.BlockSpec((1, 1, block, 1, H), lambda b, k, r, s: (b, k, r, s, 0)),
            pl.BlockSpec((1, 1, block, 1), lambda b, k, r, s: (b, k, r, s)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((B, K, blocks * block, places, H), jnp.float32),
            jax.ShapeDtypeStruct((B, K, blocks * block, places), jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="attend_split",
    )(jnp.reshape(jnp.asarray(layer, jnp.int32), 1), q_BKRH, end_BKR, k_LBKSH, v_LBKSH)
    return pl.pallas_call(
        functools.partial(_merge_kernel, splits=splits, group=N // K),
        grid=(B, T, N),
        in_specs=[everything, everything],
        out_specs=pl.BlockSpec((1, 1, 1, H), lambda b, t, n: (b, t, n, 0)),
        out_shape=jax.ShapeDtypeStruct(q_BTNH.shape, q_BTNH.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="merge_splits",
    )(out_BKRPH, lse_BKRP)


def _kernel(layer_ref, q_ref, end_ref, k_ref, v_ref, out_ref, lse_ref, *, splits: int, exact: bool) -> None:
    """One split of the context of one block of queries: its normalized output and the log-sum-exp of its scaled scores."""
    b, k, split = pl.program_id(0), pl.program_id(1), pl.program_id(3)
    dot = functools.partial(triton.dot, precision=jax.lax.DotAlgorithmPreset.F32_F32_F32 if exact else None)
    layer, q_RH, end_R = layer_ref[0], q_ref[0, 0], end_ref[0, 0]
    last = jnp.max(end_R)
    tiles = -(-last // (splits * KEY_TILE))  # of a split
    first = split * tiles
    scale = q_RH.shape[1] ** -0.5

    def add(tile: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out_RH, peak_R, total_R = carry
        slots_C = tile * KEY_TILE + jnp.arange(KEY_TILE)
        k_CH, v_CH = (
            triton.load(
                x.at[layer, b, k, pl.ds(tile * KEY_TILE, KEY_TILE), :], mask=(slots_C < last)[:, None], other=0.0
            )
            for x in (k_ref, v_ref)
        )
        scores_RC = dot(q_RH, k_CH, trans_b=True) * scale
        scores_RC = jnp.where(slots_C[None, :] < end_R[:, None], scores_RC, MASKED_SCORE)
        new_peak_R = jnp.maximum(peak_R, jnp.max(scores_RC, axis=1))
        weights_RC = jnp.exp(scores_RC - new_peak_R[:, None])
        shrink_R = jnp.exp(peak_R - new_peak_R)
        seen_RH = dot(weights_RC.astype(v_CH.dtype), v_CH)
        return out_RH * shrink_R[:, None] + seen_RH, new_peak_R, total_R * shrink_R + jnp.sum(weights_RC, axis=1)

    nothing = jnp.zeros(q_RH.shape, jnp.float32), jnp.full(end_R.shape, MASKED_SCORE), jnp.zeros(end_R.shape)
    # A query whose range ends before this split has weights of 1 under the least peak: the merge gives them nothing.
    out_RH, peak_R, total_R = jax.lax.fori_loop(first, jnp.minimum(first + tiles, -(-last // KEY_TILE)), add, nothing)
    total_R = jnp.where(total_R > 0, total_R, 1.0)  # a split behind the context
    out_ref[0, 0, :, 0], lse_ref[0, 0, :, 0] = out_RH / total_R[:, None], peak_R + jnp.log(total_R)


def _merge_kernel(out_ref, lse_ref, merged_ref, *, splits: int, group: int) -> None:
    """One query of one head: the outputs of its splits, weighed by their log-sum-exps. By XLA that would be three kernels."""
    b, t, n = (pl.program_id(axis) for axis in range(3))
    k, row = n // group, t * group + n % group
    is_split = jnp.arange(lse_ref.shape[-1]) < splits
    lse_P = triton.load(lse_ref.at[b, k, row, :], mask=is_split, other=MASKED_SCORE)
    out_PH = triton.load(out_ref.at[b, k, row, :, :], mask=is_split[:, None], other=0.0)
    shares_P = jnp.exp(lse_P - jnp.max(lse_P))
    merged_H = jnp.sum(out_PH * shares_P[:, None], axis=0) / jnp.sum(shares_P)
    merged_ref[0, 0, 0] = merged_H.astype(merged_ref.dtype)
