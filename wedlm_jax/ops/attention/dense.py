"""Masked softmax attention that also returns its log-sum-exp, and the merge of two such parts.

For the small: the tokens of a block, a window over a short cache. All scores are held at once; `ranges.py` does the rest.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from wedlm_jax.ops.attention.choice import target_platform

# Finite, so that a row which sees nothing has a finite lse and no NaN gradient; so low that a merge gives it weight 0.
MASKED_SCORE = -1e30

# Where keys first are faster on a CPU, as measured (benchmarks/RESULTS.md, "Verified decoding by the clock").
FEW_ROWS, MANY_KEYS, WIDE_HEAD = 32, 256, 64


def is_exact(dtype: jnp.dtype) -> bool:
    """Whether a kernel is to multiply float32 as it is; otherwise, as everywhere on its device, as TF32 or bfloat16."""
    asked = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return dtype == jnp.float32 and asked in ("highest", "float32")


def attend(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, visible: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of T queries over S keys, scores and softmax in float32.

    Args:
      q_BTNH: queries [B, T, N, H], N a multiple of K (grouped-query attention; keys are never repeated).
      k_BSKH: keys [B, S, K, H].
      v_BSKH: values [B, S, K, H].
      visible: bool, broadcastable to [B, T, S]; True where the query may see the key.

    Returns:
      out [B, T, N, H] in the dtype of q, and the natural log-sum-exp of the scaled scores [B, T, N] in float32. Both are
      differentiable. A query that sees nothing has lse <= -1e29 and an arbitrary finite output: merge it with a part that
      sees something.
    """
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    chex.assert_shape([k_BSKH, v_BSKH], (B, S, K, H))
    chex.assert_is_divisible(N, K)
    chex.assert_type(visible, bool)
    visible_BTS = jnp.broadcast_to(visible, (B, T, S))
    G = N // K
    # Queries of one kv head become rows of one matmul: [B, K, T * G, H].
    q_BKRH = (q_BTNH * H**-0.5).reshape(B, T, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, H)
    # Keys with their heads first, as the values below: of "BSKH" XLA on CPU would turn every head's keys round for the product.
    k_BKSH = k_BSKH.swapaxes(1, 2)
    scores_BKRS = scores(q_BKRH, k_BKSH)
    scores_BKTGS = jnp.where(visible_BTS[:, None, :, None, :], scores_BKRS.reshape(B, K, T, G, S), MASKED_SCORE)
    # One exponential a score: the sum over keys is divided out of the small output instead of the large weights.
    peak_BKTG = jax.lax.stop_gradient(jnp.max(scores_BKTGS, axis=-1))
    weights_BKTGS = jnp.exp(scores_BKTGS - peak_BKTG[..., None])
    total_BKTG = jnp.sum(weights_BKTGS, axis=-1)
    weights_BKRS = weights_BKTGS.reshape(B, K, T * G, S).astype(v_BSKH.dtype)
    out_BKRH = jnp.einsum("BKRS,BSKH->BKRH", weights_BKRS, v_BSKH, preferred_element_type=jnp.float32)
    out_BKTGH = out_BKRH.reshape(B, K, T, G, H) / total_BKTG[..., None]
    out_BTNH = out_BKTGH.transpose(0, 2, 1, 3, 4).reshape(B, T, N, H).astype(q_BTNH.dtype)
    lse_BKTG = peak_BKTG + jnp.log(total_BKTG)
    return out_BTNH, lse_BKTG.transpose(0, 2, 1, 3).reshape(B, T, N)


def scores(q_RH: jax.Array, k_SH: jax.Array) -> jax.Array:
    """Products [..., R, S], in float32, of queries [..., R, H] with keys [..., S, H].

    On a CPU the keys of a window's few queries are the first factor: as the second one XLA would turn every key round, and
    now it turns round the scores, which are fewer (`python -m benchmarks.layouts`). With narrow heads it takes longer. The
    barrier keeps XLA from turning the factors round.
    """
    (R, H), S = q_RH.shape[-2:], k_SH.shape[-2]
    if target_platform() != "cpu" or not 1 < R <= FEW_ROWS or S < MANY_KEYS or H < WIDE_HEAD:
        return jnp.einsum("...RH,...SH->...RS", q_RH, k_SH, preferred_element_type=jnp.float32)
    scores_SR = jnp.einsum("...SH,...RH->...SR", k_SH, q_RH, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(scores_SR).swapaxes(-2, -1)


def merge(out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array) -> jax.Array:
    """Attention over the union of two disjoint key sets, from the attention over each.

    Args:
      out_a, out_b: outputs [..., H] of `attend`.
      lse_a, lse_b: their log-sum-exps [...]. At least one of the two parts of a query must see a key.

    Returns:
      The merged output [..., H].
    """
    chex.assert_equal_shape([out_a, out_b])
    chex.assert_shape([lse_a, lse_b], out_a.shape[:-1])
    return _merge(out_a, lse_a, out_b, lse_b)


@jax.custom_vjp
def _merge(out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array) -> jax.Array:
    return _merge_forward(out_a, lse_a, out_b, lse_b)[0]


def _merge_forward(out_a, lse_a, out_b, lse_b):
    share_a, share_b = jax.nn.sigmoid(lse_a - lse_b), jax.nn.sigmoid(lse_b - lse_a)
    out = (out_a * share_a[..., None] + out_b * share_b[..., None]).astype(out_a.dtype)
    return out, (out_a, out_b, share_a, share_b)


def _merge_backward(kept, d_out):
    """d_lse_a = -d_lse_b = share_a * share_b * d_out . (out_a - out_b)."""
    out_a, out_b, share_a, share_b = kept
    d_out = d_out.astype(jnp.float32)
    dot = functools.partial(jnp.vecdot, precision="highest")  # faster than a sum on CPU: benchmarks/layouts.py
    d_lse_a = share_a * share_b * (dot(d_out, out_a.astype(jnp.float32)) - dot(d_out, out_b.astype(jnp.float32)))
    d_out_a, d_out_b = (d_out * share[..., None] for share in (share_a, share_b))
    return d_out_a.astype(out_a.dtype), d_lse_a, d_out_b.astype(out_b.dtype), -d_lse_a


_merge.defvjp(_merge_forward, _merge_backward)
