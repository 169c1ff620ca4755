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
    reach_T: jax.Array | None = None,
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
    """One pair of tiles of one query head, added to the weighted values `seen` so far, the highest scores and the sums of the
    weights, which lie in all lanes alike."""
    segment_refs, (out_ref, lse_ref, seen_QH, peak_QL, total_QL) = refs[:-5], refs[-5:]
    step, steps = pl.program_id(2), pl.num_programs(2)
    q_tile, k_tile = q_tile_ref[step], k_tile_ref[step]

    @pl.when((step == 0) | (q_tile_ref[jnp.maximum(step - 1, 0)] != q_tile))
    def begin():
        seen_QH[...] = jnp.zeros_like(seen_QH)
        peak_QL[...] = jnp.full_like(peak_QL, MASKED_SCORE)
        total_QL[...] = jnp.zeros_like(total_QL)

    def add(partial):
        scores_QK = product(q_ref[...], k_ref[...], LANES_BY_LANES)
        if partial:  # a query that has seen nothing yet forgets what it counts here once it sees a key
            visible_QK = visible(scores_QK.shape, q_tile, k_tile, sees, segment_refs, keys=1)
            scores_QK = jnp.where(visible_QK, scores_QK, MASKED_SCORE)
        before_QL = peak_QL[...]
        new_QL = jnp.maximum(before_QL, jnp.max(scores_QK, axis=1, keepdims=True))
        weights_QK = jnp.exp(scores_QK - jnp.tile(new_QL, (1, scores_QK.shape[1] // LANES)))
        shrink_QL = jnp.exp(before_QL - new_QL)
        peak_QL[...] = new_QL
        total_QL[...] = total_QL[...] * shrink_QL + jnp.sum(weights_QK, axis=1, keepdims=True)
        seen_QH[...] *= _of_head(shrink_QL, seen_QH)
        seen_QH[...] += product(weights_QK.astype(v_ref.dtype), v_ref[...])

    jax.lax.cond(partial_ref[step] > 0, lambda: add(True), lambda: add(False))

    @pl.when((step == steps - 1) | (q_tile_ref[jnp.minimum(step + 1, steps - 1)] != q_tile))
    def end():
        out_ref[...] = (seen_QH[...] / _of_head(total_QL[...], seen_QH)).astype(out_ref.dtype)
        lse_ref[...] = (peak_QL[...] + jnp.log(total_QL[...])).T[:1]


def _of_head(x_QL: jax.Array, like_QH: Any) -> jax.Array:
    """A number for each query, the same in all lanes, beside each of its H."""
    H = like_QH.shape[1]
    return jnp.tile(x_QL, (1, -(-H // LANES)))[:, :H]
