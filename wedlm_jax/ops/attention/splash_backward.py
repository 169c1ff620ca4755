"""The gradients of splash attention by one kernel, which computes scores and weights once.

jax's splash has a kernel for the gradient of the queries and one for those of keys and values, and both compute scores, weights
and the gradient of the weights: 7 products for each pair of tiles. Here they are 5 (FlashAttention-2, arXiv 2307.08691,
Algorithm 2). The tiles come query by query, as in the forward pass: the gradient of a tile of queries is summed up from step to
step, and those of all keys and values of a head stay in the chip's own memory until its queries are through.

It has not run on a TPU: where one is, trial.py runs it first. In the tests it runs interpreted on CPU, and is compiled for a TPU
that is not there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wedlm_jax.ops.attention.choice import Shaped, target_kind
from wedlm_jax.ops.attention.splash_tiles import (
    LANES,
    LANES_BY_LANES,
    Steps,
    Tiles,
    product,
    visible,
)

MEMORY = 56 * 2**20  # bytes of a core's own memory, of 64 MiB (v5p, v7x) or 128 (v5e, v6e)
SMALLER = ("TPU v2", "TPU v3", "TPU v4")  # 16 MiB: the short rows of a trial would fit, those of a training would not
MAX_SUMS = 40 * 2**20  # of that, for the gradients of keys and values
_SUBLANES_BY_SUBLANES = (((0,), (0,)), ((), ()))  # a.T @ b


def unsupported(k_BTKH: Shaped) -> str | None:
    """Why the kernel cannot do this, or None if it can."""
    T, H = k_BTKH.shape[1], k_BTKH.shape[3]
    if (kind := target_kind()).startswith(SMALLER):
        return f"a core of a {kind} has too little memory of its own"
    sums = T * max(H, LANES) * 2 * (4 + 2 * k_BTKH.dtype.itemsize)  # summed in float32; two results on their way out
    return None if sums <= MAX_SUMS else f"{T} keys of {H} are too many for a chip's memory"


def splash_gradients(
    q_NTH: jax.Array,
    k_KTH: jax.Array,
    v_KTH: jax.Array,
    d_out_NTH: jax.Array,
    lse_NT: jax.Array,
    delta_NT: jax.Array,
    segments_T: jax.Array | None,
    sees: Callable[..., Any],
    steps: Steps,
    reach_T: jax.Array | None,
    *,
    tile: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of softmax attention, by what its forward pass left; `unsupported` names no reason against them.

    Args:
      q_NTH: scaled queries.
      k_KTH, v_KTH: keys and values, N a multiple of K.
      d_out_NTH: the gradient of the output.
      lse_NT: log-sum-exp of each query's scores, float32.
      delta_NT: the sum of output times its gradient, float32.
      segments_T: tokens see those of their own segment only; None: all.
      sees: whether a query sees a key, by their places in the row.
      steps: the pairs of tiles in which anything is seen, at least one for every tile of queries.
      reach_T: a number for each query that `sees` is given too, beside `segments_T`.
      tile: tokens of a tile.
      interpret: run it as plain operations, on any platform; slow.

    Returns:
      The gradients of q, k and v, in their shapes and dtypes.
    """
    (T, H), K, group = q_NTH.shape[1:], k_KTH.shape[0], q_NTH.shape[0] // k_KTH.shape[0]
    tiles = Tiles(tile, H, group)
    id_specs, ids = tiles.segments(segments_T, reach_T)
    all_keys = pl.BlockSpec((None, T, H), lambda k, *_: (k, 0, 0))
    return pl.pallas_call(
        functools.partial(_kernel, sees=sees),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(K, group, steps.visited),
            in_specs=[tiles.queries, tiles.keys, tiles.keys, tiles.queries, tiles.row, tiles.row, *id_specs],
            out_specs=[tiles.queries, all_keys, all_keys],
            scratch_shapes=[pltpu.VMEM((n, H), jnp.float32) for n in (tile, T, T)],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q_NTH, k_KTH, v_KTH)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=MEMORY
        ),
        interpret=interpret,
        name="splash_gradients",
    )(*steps.pairs, q_NTH, k_KTH, v_KTH, d_out_NTH, lse_NT[:, None], delta_NT[:, None], *ids)


def _kernel(q_tile_ref, k_tile_ref, partial_ref, q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, *refs, sees):
    """One pair of tiles of one query head, C keys and R queries, scores as [C, R]: what is known of a query is a row of them."""
    segment_refs, (dq_ref, dk_ref, dv_ref, dq_sum, dk_sum, dv_sum) = refs[:-6], refs[-6:]
    head, step, steps = pl.program_id(1), pl.program_id(2), pl.num_programs(2)
    q_tile, k_tile, tile = q_tile_ref[step], k_tile_ref[step], q_ref.shape[0]

    @pl.when((head == 0) & (step == 0))
    def begin_keys():
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    @pl.when((step == 0) | (q_tile_ref[jnp.maximum(step - 1, 0)] != q_tile))
    def begin_queries():
        dq_sum[...] = jnp.zeros_like(dq_sum)

    def add(partial):
        q, k, v, d_out = (ref[...] for ref in (q_ref, k_ref, v_ref, d_out_ref))
        weights_CR = jnp.exp(product(k, q, LANES_BY_LANES) - lse_ref[...])
        if partial:
            visible_CR = visible(weights_CR.shape, q_tile, k_tile, sees, segment_refs, keys=0)
            weights_CR = jnp.where(visible_CR, weights_CR, 0.0)
        d_scores_CR = (weights_CR * (product(v, d_out, LANES_BY_LANES) - delta_ref[...])).astype(q.dtype)
        rows = pl.ds(pl.multiple_of(k_tile * tile, tile), tile)
        dv_sum[rows] += product(weights_CR.astype(d_out.dtype), d_out)
        dk_sum[rows] += product(d_scores_CR, q)
        dq_sum[...] += product(d_scores_CR, k, _SUBLANES_BY_SUBLANES)

    jax.lax.cond(partial_ref[step] > 0, lambda: add(True), lambda: add(False))

    @pl.when((step == steps - 1) | (q_tile_ref[jnp.minimum(step + 1, steps - 1)] != q_tile))
    def end_queries():
        dq_ref[...] = dq_sum[...].astype(dq_ref.dtype)

    @pl.when((head == pl.num_programs(1) - 1) & (step == steps - 1))
    def end_keys():
        dk_ref[...] = dk_sum[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_sum[...].astype(dv_ref.dtype)
