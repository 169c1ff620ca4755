"""Attention over one layer of a preallocated cache, at the cost of its used part."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from wedlm_jax.ops.attention.choice import target_platform
from wedlm_jax.ops.attention.ranges import attend_ranges
from wedlm_jax.ops.attention.split_gpu import attend_split
from wedlm_jax.ops.attention.window_tpu import LANES, attend_window, widen_heads

FEW_QUERIES = 64  # of a row: what the kernels are for; a longer one, a prompt, has rows enough


def held_head_dim(head_dim: int) -> int:
    """Numbers that a cache holds of each head: on TPU whole lanes, of which those behind the head are 0. XLA pads them to as many
    in memory anyway, but would lay narrower ones out in another order than its products read, and so copy the cache of all layers
    in every layer."""
    return -(-head_dim // LANES) * LANES if target_platform() == "tpu" else head_dim


def attend_cache(
    q_BTNH: jax.Array,
    k_LBKSH: jax.Array,
    v_LBKSH: jax.Array,
    layer: jax.Array | int,
    end_BT: jax.Array,
    *,
    implementation: str = "xla",
) -> jax.Array:
    """Attention of query t of row b over the slots s < end_BT[b, t] of one layer.

    Reads the least of S, S / 2, S / 4, ... slots (`smallest_context` or more) that hold every range: the cost of a step grows
    with the longest used context, never with the allocated one. All of these programs are compiled, and chosen on the device. The
    kernels read what every row uses, and are one program.

    Args:
      q_BTNH: queries [B, T, N, H].
      k_LBKSH, v_LBKSH: keys and values of all layers [layers, B or more, K, S, `held_head_dim(H)`]; rows behind B are not read.
      layer: the layer's number, int [].
      end_BT: int [B, T], in [1, S]; a larger one reads as S.
      implementation: "xla", or a kernel: "split_gpu" or "window_tpu", whose `unsupported` names no reason against it.

    Returns:
      out [B, T, N, H].
    """
    B, T, _, H = q_BTNH.shape
    S, held = k_LBKSH.shape[3:]
    chex.assert_equal_shape([k_LBKSH, v_LBKSH])
    chex.assert_shape(end_BT, (B, T))
    if implementation != "xla":
        kernel = {"split_gpu": attend_split, "window_tpu": attend_window}[implementation]
        return kernel(q_BTNH, k_LBKSH, v_LBKSH, layer, end_BT)
    if held > H:  # the queries get zeros, too: of keys that are cut off XLA would again copy the cache
        q_BTNH = widen_heads(q_BTNH * (held / H) ** 0.5, held)  # scaled by held ** -0.5 below
    contexts = [S]
    while contexts[0] >= 2 * smallest_context(B):
        contexts.insert(0, -(-contexts[0] // 2))

    def attend_first(slots: int, q_BTNH, k_LBKSH, v_LBKSH, layer, end_BT):
        k_BCKH, v_BCKH = (
            jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)[:B, :, :slots].swapaxes(1, 2)
            for x in (k_LBKSH, v_LBKSH)
        )
        return attend_ranges(q_BTNH, k_BCKH, v_BCKH, jnp.zeros_like(end_BT), jnp.minimum(end_BT, slots))[0]

    if len(contexts) == 1:
        return attend_first(S, q_BTNH, k_LBKSH, v_LBKSH, jnp.asarray(layer), end_BT)[..., :H]
    # Not by a search, which would be a loop of its own in every layer.
    smallest = jnp.sum(jnp.max(end_BT) > jnp.array(contexts[:-1]))
    programs = [functools.partial(attend_first, slots) for slots in contexts]
    return jax.lax.switch(smallest, programs, q_BTNH, k_LBKSH, v_LBKSH, jnp.asarray(layer), end_BT)[..., :H]


def smallest_context(rows: int) -> int:
    """The fewest slots of a row that a program is compiled to read. What rows read adds up, so for many it pays to compile
    programs that read fewer slots of each (benchmarks/RESULTS.md, "A file of prompts")."""
    return max(64, 256 // rows)
