"""Cross-entropy of an output layer, per token, without ever holding the logits of all tokens."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

MAX_LOGITS = 2**24  # logits held at a time: 64 MiB in float32
MIN_TOKENS = 512  # of a chunk, whatever the vocabulary: with fewer, reading the head takes longer than the products


def cross_entropy(hidden_TD: jax.Array, head_VD: jax.Array, targets_T: jax.Array, parts: int = 1) -> jax.Array:
    """-log softmax(hidden @ head.T)[target] for each token, in float32; weights are for the caller to apply.

    Tokens go through in chunks of at most `MAX_LOGITS` logits on each device, recomputed in the backward pass.

    Args:
      hidden_TD: [T, D].
      head_VD: the output matrix [V, D], in the dtype of `hidden_TD`.
      targets_T: int [T], in [0, V).
      parts: over how many devices the tokens are cut, the first T / parts on the first.

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

    chunk = parts * max(MAX_LOGITS // V, MIN_TOKENS)
    if chunk >= T:
        return chunk_loss(hidden_TD, targets_T)
    chunks = -(-T // chunk)
    hidden_TD = jnp.pad(hidden_TD, ((0, chunks * chunk - T), (0, 0)))
    targets_T = jnp.pad(targets_T, (0, chunks * chunk - T))
    # Chunk c takes tokens c, c + chunks, ...: so each device's share of it is cut from the tokens that the device holds.
    losses = jax.lax.map(
        lambda xs: jax.checkpoint(chunk_loss, prevent_cse=False)(*xs),
        (hidden_TD.reshape(chunk, chunks, D).swapaxes(0, 1), targets_T.reshape(chunk, chunks).T),
    )
    return losses.T.reshape(-1)[:T]
