"""Cross-entropy of an output layer, per token, without ever holding the logits of all tokens."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

MAX_LOGITS = 2**24  # logits held at a time: 64 MiB in float32


def cross_entropy(hidden_TD: jax.Array, head_VD: jax.Array, targets_T: jax.Array) -> jax.Array:
    """-log softmax(hidden @ head.T)[target] for each token, in float32; weights are for the caller to apply.

    Tokens go through in chunks of at most `MAX_LOGITS` logits, recomputed in the backward pass.

    Args:
      hidden_TD: [T, D].
      head_VD: the output matrix [V, D], in the dtype of `hidden_TD`.
      targets_T: int [T], in [0, V).

    Returns:
      losses [T] in nats.
    """
    T, D = hidden_TD.shape
    V = head_VD.shape[0]
    chex.assert_shape(head_VD, (V, D))
    chex.assert_shape(targets_T, (T,))
    chex.assert_type(targets_T, int)

    def chunk_loss(hidden_CD: jax.Array, targets_C: jax.Array) -> jax.Array:
        logits_CV = jnp.einsum("CD,VD->CV", hidden_CD, head_VD, preferred_element_type=jnp.float32)
        picked_C = jnp.take_along_axis(logits_CV, targets_C[:, None], axis=-1)[:, 0]
        return jax.nn.logsumexp(logits_CV, axis=-1) - picked_C

    if T * V <= MAX_LOGITS:
        return chunk_loss(hidden_TD, targets_T)
    chunk = max(MAX_LOGITS // V, 1)
    chunks = -(-T // chunk)
    hidden_TD = jnp.pad(hidden_TD, ((0, chunks * chunk - T), (0, 0)))
    targets_T = jnp.pad(targets_T, (0, chunks * chunk - T))
    losses = jax.lax.map(
        lambda xs: jax.checkpoint(chunk_loss)(*xs),
        (hidden_TD.reshape(chunks, chunk, D), targets_T.reshape(chunks, chunk)),
    )
    return losses.reshape(-1)[:T]
