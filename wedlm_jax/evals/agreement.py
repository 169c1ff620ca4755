"""Agreement with AR: how many tokens of a completion the same weights would have chosen one by one. Needs no labels."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from wedlm_jax.decode.generation import bucket
from wedlm_jax.model.handle import Model
from wedlm_jax.ops.categorical import likeliest


def disagreements(model: Model, prompt: Sequence[int], ids: Sequence[int], mask_token_id: int | None = None) -> int:
    """How many of `ids` are not the likeliest next token after the prompt and the ids before them.

    Every token is held against the AR prediction behind the completion's own beginning, so one that differs is counted once,
    whatever it leads to.

    Args:
      mask_token_id: never the likeliest; None = no token is excluded.
    """
    tokens = np.zeros(bucket(len(prompt) + len(ids)), np.int32)
    tokens[: len(prompt) + len(ids)] = [*prompt, *ids]
    graph, params = nnx.split(model.transformer)
    places = np.minimum(len(prompt) - 1 + np.arange(bucket(len(ids))), len(tokens) - 1).astype(np.int32)
    banned = np.int32(-1 if mask_token_id is None else mask_token_id)
    chosen = np.asarray(_likeliest(graph, params, tokens[None], places, banned))
    return int(np.sum(chosen[: len(ids)] != np.asarray(ids)))


@functools.partial(jax.jit, static_argnames="graph")
def _likeliest(
    graph: nnx.GraphDef, params: nnx.State, tokens_1L: jax.Array, places: jax.Array, banned: jax.Array
) -> jax.Array:
    """The likeliest token [n] behind each of the n `places`."""
    transformer = nnx.merge(graph, params)
    hidden_1LD = transformer.hidden(tokens_1L, positions=jnp.arange(tokens_1L.shape[1])[None])
    logits_nV = transformer.logits(hidden_1LD[:, places])[0]
    return likeliest(jnp.where(jnp.arange(logits_nV.shape[-1]) == banned, -jnp.inf, logits_nV))
