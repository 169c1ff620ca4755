"""Attention over a cache on TPU: a Pallas kernel for the few queries of a window, which reads the used part of the cache once.

Row by row, tile by tile of the cache, all heads of a tile: the queries of one kv head are the rows of its products, and the
softmax is kept up to date from tile to tile (FlashAttention, arXiv 2205.14135). There are as many steps as the longest row has
tiles in use; a row with fewer fetches nothing in those behind, whose step names the tile that is there already. XLA's own path
moves 2.5 times as many bytes, and of every row as many slots as the longest one uses (`python -m benchmarks.decode_attention`).

It has not run on a TPU: trial.py runs it before "auto" takes it. In the tests it runs interpreted on CPU, and is compiled for a
TPU that is not there.
"""

from __future__ import annotations

import functools
import math

import chex
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wedlm_jax.ops.attention.dense import MASKED_SCORE, is_exact

TILE_BYTES = 2**20  # of the keys of a tile; as much for the values, and both twice, as the next tile comes meanwhile
MAX_SCORES = 2**18  # of a kv head in a tile, float32
MAX_QUERY_SIZE = 2**19  # elements of a row's queries, which are held beside outputs and sums
MEMORY = 32 * 2**20  # bytes of a core's own, of which a kernel that does not ask gets 16 MiB on v5e and v5p
LANES = 128
SLOTS = 16  # of whole tiles of memory, in bfloat16


def unsupported(q_BTNH: jax.Array, k_LBKSH: jax.Array) -> str | None:
    """Why the kernel cannot do this, or None if it can."""
    S, H = k_LBKSH.shape[3:]
    if H % LANES:
        return f"a cache of {H} numbers a head is not of whole lanes of {LANES}"
    if S % SLOTS:  # XLA would copy the cache into one that is
        return f"a cache of {S} slots is not a multiple of {SLOTS}"
    if math.prod(q_BTNH.shape[1:3]) * H > MAX_QUERY_SIZE or _tile(q_BTNH, k_LBKSH) < LANES:
        T, N = q_BTNH.shape[1:3]
        return f"{T} queries of {N} heads over {k_LBKSH.shape[2]} of {H} are too large for a chip's memory"
    if jax.config.jax_default_matmul_precision == "high":  # type: ignore[attr-defined]
        return "it multiplies at matmul_precision default or highest, not high"
    return None


def widen_heads(x: jax.Array, held: int) -> jax.Array:
    """[..., H] as [..., held], with zeros behind each head."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, held - x.shape[-1]),))


def attend_window(
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
    B, T, N, head_dim = q_BTNH.shape
    K, S, H = k_LBKSH.shape[2:]
    chex.assert_equal_shape([k_LBKSH, v_LBKSH])
    chex.assert_shape(end_BT, (B, T))
    rows = T * N // K
    tile = _tile(q_BTNH, k_LBKSH)

    end_BT = jnp.minimum(end_BT, S)
    q_BKRH = widen_heads(q_BTNH, H).reshape(B, T, K, N // K, H).swapaxes(1, 2).reshape(B, K, rows, H)
    end_BR1 = jnp.repeat(end_BT, N // K, axis=1)[..., None]
    tiles_B = -(-jnp.max(end_BT, axis=1) // tile)

    def of_row(b: jax.Array, s: jax.Array, *_: jax.Array) -> tuple[jax.Array | int, ...]:
        return b, 0, 0, 0

    def of_tile(b: jax.Array, s: jax.Array, layer: jax.Array, tiles_B: jax.Array) -> tuple[jax.Array | int, ...]:
        return layer[0], b, 0, jnp.minimum(s, tiles_B[b] - 1), 0

    precision = jax.lax.Precision.HIGHEST if is_exact(q_BTNH.dtype) else None
    # Else XLA fetches a cache that fits there, whole, into the chip's own memory, layer by layer.
    in_place = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (k_LBKSH, v_LBKSH)]
    a_tile = pl.BlockSpec((None, None, K, tile, H), of_tile)
    out_BKRH = pl.pallas_call(
        functools.partial(_kernel, slots=S, scale=head_dim**-0.5, precision=precision),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, jnp.max(tiles_B)),
            in_specs=[
                pl.BlockSpec((None, K, rows, H), of_row),
                pl.BlockSpec((None, rows, 1), lambda b, s, *_: (b, 0, 0)),
                a_tile,
                a_tile,
            ],
            out_specs=pl.BlockSpec((None, K, rows, H), of_row),
            scratch_shapes=[pltpu.VMEM((K, rows, n), jnp.float32) for n in (H, LANES, LANES)],
        ),
        out_shape=jax.ShapeDtypeStruct(q_BKRH.shape, q_BTNH.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=MEMORY),
        interpret=interpret,
        name="attend_window",
    )(jnp.reshape(jnp.asarray(layer, jnp.int32), 1), tiles_B.astype(jnp.int32), q_BKRH, end_BR1, *in_place)
    return out_BKRH.reshape(B, K, T, N // K, H).swapaxes(1, 2).reshape(B, T, N, H)[..., :head_dim]


def _tile(q_BTNH: jax.Array, k_LBKSH: jax.Array) -> int:
    """Slots of a tile."""
    T, N = q_BTNH.shape[1:3]
    K, S, H = k_LBKSH.shape[2:]
    most = min(TILE_BYTES // (K * H * k_LBKSH.dtype.itemsize), MAX_SCORES // (T * N // K), -(-S // LANES) * LANES)
    return most // LANES * LANES


def _kernel(
    layer_ref, tiles_ref, q_ref, end_ref, k_ref, v_ref, out_ref, seen_ref, peak_ref, total_ref,
    *, slots, scale, precision,
):  # fmt: skip
    """One tile of one row: adds it to the weighted values `seen` so far, the highest scores and the sums of the weights."""
    del layer_ref
    number, tiles = pl.program_id(1), tiles_ref[pl.program_id(0)]
    (K, rows, _), tile = q_ref.shape, k_ref.shape[1]

    @pl.when(number == 0)
    def begin():
        seen_ref[...] = jnp.zeros_like(seen_ref)
        peak_ref[...] = jnp.full_like(peak_ref, MASKED_SCORE)
        total_ref[...] = jnp.zeros_like(total_ref)

    @pl.when(number < tiles)
    def add():
        slots_RC = number * tile + jax.lax.broadcasted_iota(jnp.int32, (rows, tile), 1)
        visible_RC = slots_RC < end_ref[...]
        # Behind the last slot of the cache the last tile holds anything, not a number too.
        inside_C1 = number * tile + jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0) < slots
        for k in range(K):
            scores_RC = scale * jax.lax.dot_general(
                q_ref[k], k_ref[k], (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
            )
            scores_RC = jnp.where(visible_RC, scores_RC, MASKED_SCORE)
            peak_R1 = peak_ref[k, :, :1]
            new_peak_R1 = jnp.maximum(peak_R1, jnp.max(scores_RC, axis=1, keepdims=True))
            # Of a row that has seen nothing yet the weights would be 1.
            weights_RC = jnp.where(visible_RC, jnp.exp(scores_RC - new_peak_R1), 0.0)
            shrink_R1 = jnp.exp(peak_R1 - new_peak_R1)
            v_CH = jnp.where(inside_C1, v_ref[k], 0) if slots % tile else v_ref[k]
            seen_RH = jax.lax.dot_general(
                weights_RC.astype(v_ref.dtype), v_CH, (((1,), (0,)), ((), ())),
                precision=precision, preferred_element_type=jnp.float32,
            )  # fmt: skip
            seen_ref[k] = seen_ref[k] * shrink_R1 + seen_RH
            total_R1 = total_ref[k, :, :1] * shrink_R1 + jnp.sum(weights_RC, axis=1, keepdims=True)
            total_ref[k] = jnp.broadcast_to(total_R1, (rows, LANES))
            peak_ref[k] = jnp.broadcast_to(new_peak_R1, (rows, LANES))

    @pl.when(number == pl.num_programs(1) - 1)
    def end():
        out_ref[...] = (seen_ref[...] / total_ref[:, :, :1]).astype(out_ref.dtype)
