"""Splash attention by a kernel that masks no tile of which all is seen.

jax's splash computes its mask, and whether two tokens share a segment, for every pair of every tile, which is more arithmetic
than the softmax itself, and in a long row most tiles are seen whole. And its grid has a step for tiles that it does not visit.
Otherwise the algorithm is the same (FlashAttention, arXiv 2205.14135); splash_backward.py takes what is left here.

It has not run on a TPU: where one is, trial.py runs both kernels first. In the tests it runs interpreted on CPU, and is compiled
for a TPU that is not there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wedlm_jax.ops.attention.dense import MASKED_SCORE
from wedlm_jax.ops.attention.splash_tiles import LANES, LANES_BY_LANES, Steps, Tiles, product, visible


def splash_output(
    q_NTH: jax.Array,
    k_KTH: jax.Array,
    v_KTH: jax.Array,
    segments_T: jax.Array | None,
    sees: Callable[..., Any],
    steps: Steps,
    reach_T: jax.Array | None,
    *,
    tile: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention, and the log-sum-exp of each query's scores.

    Args:
      q_NTH: scaled queries.
      k_KTH, v_KTH: keys and values, N a multiple of K.
      segments_T: tokens see those of their own segment only; None: all.
      sees: whether a query sees a key, by their places in the row; every query sees one.
      steps: the pairs of tiles in which anything is seen.
      reach_T: a number for each query that `sees` is given too, beside `segments_T`.
      tile: tokens of a tile.
      interpret: run it as plain operations, on any platform; slow.

    Returns:
      [N, T, H] in the dtype of q, and [N, T] in float32.
    """
    (N, T, H), group = q_NTH.shape, q_NTH.shape[0] // k_KTH.shape[0]
    tiles = Tiles(tile, H, group)
    id_specs, ids = tiles.segments(segments_T, reach_T)
    out_NTH, lse_N1T = pl.pallas_call(
        functools.partial(_kernel, sees=sees),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(k_KTH.shape[0], group, steps.visited),
            in_specs=[tiles.queries, tiles.keys, tiles.keys, *id_specs],
            out_specs=[tiles.queries, tiles.row],
            scratch_shapes=[pltpu.VMEM((tile, n), jnp.float32) for n in (H, LANES, LANES)],
        ),
        out_shape=[jax.ShapeDtypeStruct(q_NTH.shape, q_NTH.dtype), jax.ShapeDtypeStruct((N, 1, T), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="splash_output",
    )(*steps.pairs, q_NTH, k_KTH, v_KTH, *ids)
    return out_NTH, lse_N1T[:, 0]


def _kernel(q_tile_ref, k_tile_ref, partial_ref, q_ref, k_ref, v_ref, *refs, sees):
    """One pair of tiles of one query head, R queries and C keys, added to the weighted values `seen` so far, the highest scores
    and the sums of the weights. These two are [R, LANES], the same in every lane."""
    segment_refs, (out_ref, lse_ref, seen_ref, peak_ref, total_ref) = refs[:-5], refs[-5:]
    step, steps = pl.program_id(2), pl.num_programs(2)
    q_tile, k_tile = q_tile_ref[step], k_tile_ref[step]

    @pl.when((step == 0) | (q_tile_ref[jnp.maximum(step - 1, 0)] != q_tile))
    def begin():
        seen_ref[...] = jnp.zeros_like(seen_ref)
        peak_ref[...] = jnp.full_like(peak_ref, MASKED_SCORE)
        total_ref[...] = jnp.zeros_like(total_ref)

    def add(partial):
        scores_RC = product(q_ref[...], k_ref[...], LANES_BY_LANES)
        if partial:  # a query that has seen nothing yet forgets what it counts here once it sees a key
            visible_RC = visible(scores_RC.shape, q_tile, k_tile, sees, segment_refs, keys=1)
            scores_RC = jnp.where(visible_RC, scores_RC, MASKED_SCORE)
        peak = peak_ref[...]
        new_peak = jnp.maximum(peak, jnp.max(scores_RC, axis=1, keepdims=True))
        weights_RC = jnp.exp(scores_RC - jnp.tile(new_peak, (1, scores_RC.shape[1] // LANES)))
        shrink = jnp.exp(peak - new_peak)
        peak_ref[...] = new_peak
        total_ref[...] = total_ref[...] * shrink + jnp.sum(weights_RC, axis=1, keepdims=True)
        seen_ref[...] *= _of_head(shrink, seen_ref)
        seen_ref[...] += product(weights_RC.astype(v_ref.dtype), v_ref[...])

    jax.lax.cond(partial_ref[step] > 0, lambda: add(True), lambda: add(False))

    @pl.when((step == steps - 1) | (q_tile_ref[jnp.minimum(step + 1, steps - 1)] != q_tile))
    def end():
        out_ref[...] = (seen_ref[...] / _of_head(total_ref[...], seen_ref)).astype(out_ref.dtype)
        lse_ref[...] = (peak_ref[...] + jnp.log(total_ref[...])).T[:1]


def _of_head(x: jax.Array, like_RH: Any) -> jax.Array:
    """[R, H] of a number for each query, [R, LANES], which is the same in every lane."""
    H = like_RH.shape[1]
    return jnp.tile(x, (1, -(-H // LANES)))[:, :H]
