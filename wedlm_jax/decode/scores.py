"""Scores: what the AR model says of every token of a text, by one forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from wedlm_jax.decode.generation import bucket
from wedlm_jax.errors import UserError, out_of_memory
from wedlm_jax.model.handle import Model
from wedlm_jax.model.weights import Weights
from wedlm_jax.ops.categorical import entropy, likeliest, log_prob
from wedlm_jax.sharding import batch_parts, constrain

SCORED_AT_ONCE = 256  # positions whose logits are held at a time: 156 MB of a vocabulary of 152k


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of a text of L tokens, in nats, unfiltered and at temperature 1. Entry i is of the distribution behind token i."""

    log_probs: np.ndarray  # float32 [L - 1], of the token that follows
    entropies: np.ndarray  # float32 [L]
    likeliest: np.ndarray  # int32 [L], the token of the largest probability
    largest: np.ndarray  # float32 [L], the log-probability of that
    hidden: np.ndarray  # float [D], behind the last token, after the final norm


def score(model: Model, ids: Sequence[int], banned: int | None = None) -> Scores:
    """Runs the model over a text once, as AR does.

    Args:
      ids: the text's token ids, at least one, all in the vocabulary.
      banned: a token that is never the likeliest, as the mask, and with it none of the rows that pad the vocabulary. None: all
        may be.

    Raises:
      UserError: it does not fit in memory.
    """
    # Over a mesh every part of a batch has a row.
    tokens = np.zeros((batch_parts(model.weights.mesh), bucket(len(ids))), np.int32)
    tokens[:, : len(ids)] = ids
    try:
        scores, hidden = jax.device_get(
            _score(
                model.weights,
                tokens,
                np.int32(len(ids)),
                np.int32(-1 if banned is None else banned),
                np.int32(model.config.vocab_size if banned is None else model.num_tokens),
            )
        )
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        raise UserError(
            f"out of memory with one forward over {tokens.shape[1]} tokens, which scores a text of {len(ids)}: shorten the "
            "prompt or lower max_new_tokens"
        ) from error
    log_probs, entropies, first, largest = (np.asarray(x)[: len(ids)] for x in scores)
    return Scores(log_probs[:-1], entropies, first, largest, hidden)


@jax.jit
def _score(
    weights: Weights, tokens_BL: jax.Array, count: jax.Array, banned: jax.Array, num_tokens: jax.Array
) -> tuple[tuple[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]:
    """Of the first row, what is known behind each of its places, and the hidden state of the last of `count`."""
    with weights.transformer() as transformer:
        positions = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
        hidden_LD = constrain(transformer.hidden(tokens_BL, positions=positions)[0], None, None)
        following = jnp.roll(tokens_BL[0], -1)

        def at_some(chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            logits_CV = transformer.logits(chunk[0])
            vocabulary = jnp.arange(logits_CV.shape[-1])
            first = likeliest(jnp.where((vocabulary == banned) | (vocabulary >= num_tokens), -jnp.inf, logits_CV))
            return log_prob(logits_CV, chunk[1]), entropy(logits_CV), first, log_prob(logits_CV, first)

        C = min(SCORED_AT_ONCE, len(following))  # a divisor: both are powers of two
        chunks = hidden_LD.reshape(-1, C, hidden_LD.shape[-1]), following.reshape(-1, C)
        log_probs, entropies, first, largest = (x.reshape(-1) for x in jax.lax.map(at_some, chunks))
        return (log_probs, entropies, first, largest), hidden_LD[count - 1]
