"""Likelihood of held-out text: bits per byte as an AR model, and how well masks are recovered at fixed mask ratios."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from wedlm_jax.data.packing import PackedBatch
from wedlm_jax.decode.scores import SCORED_AT_ONCE
from wedlm_jax.diffusion.corruption import mask_lowest
from wedlm_jax.diffusion.dual_stream import build_dual_stream
from wedlm_jax.errors import UserError
from wedlm_jax.model.handle import Model
from wedlm_jax.model.patterns import Causal, DualStream
from wedlm_jax.ops.categorical import likeliest
from wedlm_jax.sharding import on_mesh

MASK_RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclasses.dataclass(frozen=True)
class BitsPerByte:
    """AR likelihood of texts. Every token is counted once; a first one that nothing precedes costs log2 V bits."""

    bits: float
    bytes: int  # of the texts in UTF-8
    tokens: int

    @property
    def value(self) -> float:
        return self.bits / self.bytes


def bits_per_byte(
    model: Model,
    texts: Sequence[str],
    encode: Callable[[str], list[int]],
    *,
    row_length: int,
    batch_size: int,
    before: Sequence[int] = (),
) -> BitsPerByte:
    """AR bits per byte over whole texts, in rows of `row_length` tokens that overlap by half.

    The overlap gives every token but those at the start of a text at least row_length / 2 tokens of context.

    Args:
      texts: whole texts, none empty.
      encode: text to token ids.
      row_length: the longest row that the model is run on.
      batch_size: rows a forward.
      before: tokens that every text begins behind, which are not scored.
    """
    documents = [[*before, *encode(text)] for text in texts]
    rows = [row for tokens in documents for row in scoring_rows(tokens, row_length, first=max(1, len(before)))]
    graph, params = nnx.split(model.transformer)
    nats = 0.0
    for start in range(0, len(rows), batch_size):
        tokens = np.zeros((batch_size, row_length), np.int32)
        scored = np.zeros((batch_size, row_length), bool)
        for i, (piece, first_scored) in enumerate(rows[start : start + batch_size]):
            tokens[i, : len(piece)] = piece
            scored[i, first_scored : len(piece)] = True
        nats += float(_next_token_nats(graph, params, jnp.asarray(tokens), jnp.asarray(scored), mesh=model.mesh))
    bits = nats / math.log(2) + (0 if before else len(texts) * math.log2(model.config.vocab_size))
    tokens_of_texts = sum(len(tokens) - len(before) for tokens in documents)
    return BitsPerByte(bits, sum(len(text.encode()) for text in texts), tokens_of_texts)


def scoring_rows(tokens: Sequence[int], row_length: int, first: int = 1) -> Iterator[tuple[Sequence[int], int]]:
    """Rows (tokens, first scored index) that overlap by half; together they score each token from `first` on exactly once."""
    stride = row_length - row_length // 2
    scored = first
    for start in range(0, max(len(tokens) - row_length // 2, 1), stride):
        yield tokens[start : start + row_length], scored - start
        scored = min(start + row_length, len(tokens))


@functools.partial(jax.jit, static_argnames=("graph", "mesh"))
def _next_token_nats(
    graph: nnx.GraphDef, params: nnx.State, tokens: jax.Array, scored: jax.Array, *, mesh: Mesh | None
) -> jax.Array:
    """Summed cross-entropy of the scored tokens [B, L], each given all before it in its row."""
    with on_mesh(mesh):
        transformer = nnx.merge(graph, params)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden = transformer.hidden(tokens, positions=positions, pattern=Causal())
        losses = transformer.token_losses(hidden[:, :-1], tokens[:, 1:], scored[:, 1:])
        return jnp.sum(losses)


class Recovery(NamedTuple):
    """What a model makes of masked tokens."""

    loss: float  # mean cross-entropy in nats
    accuracy: float  # the share of them whose likeliest token is the right one


def recovery_by_ratio(
    model: Model,
    batches: Sequence[PackedBatch],
    *,
    block_size: int,
    reorder: bool = True,
    ratios: Sequence[float] = MASK_RATIOS,
) -> dict[float, Recovery]:
    """How masks are recovered when that share of every block is masked (the training layout).

    Args:
      reorder: False leaves masks in their places, so that each sees only what lies to its left.

    Raises:
      UserError: at one of the ratios no token of a block is masked.
    """
    graph, params = nnx.split(model.transformer)
    mask_token_id = model.require_mask_token_id() if model.config.needs_mask_token else 0
    found = {}
    for ratio in ratios:
        sums = np.zeros(3)
        for number, batch in enumerate(batches):
            arrays = tuple(jnp.asarray(x) for x in (batch.tokens, batch.loss_mask, batch.positions, batch.segment_ids))
            key = jax.random.fold_in(jax.random.key(0), number)
            layout = dict(mask_token_id=mask_token_id, block_size=block_size, reorder=reorder, mesh=model.mesh)
            sums += np.asarray(_recovered(graph, params, key, *arrays, ratio, **layout))
        nats, right, count = sums.tolist()
        if not count:
            raise UserError(
                f"block_size={block_size}: at a mask ratio of {ratio:g} no token of a block is masked, as none holds "
                f"{1 + int(0.5 / ratio)} that are learned; use larger blocks, or data with longer answers"
            )
        found[ratio] = Recovery(nats / count, right / count)
    return found


@functools.partial(jax.jit, static_argnames=("graph", "mask_token_id", "block_size", "reorder", "mesh"))
def _recovered(
    graph: nnx.GraphDef,
    params: nnx.State,
    key: jax.Array,
    tokens: jax.Array,
    loss_mask: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    ratio: jax.Array,
    *,
    mask_token_id: int,
    block_size: int,
    reorder: bool,
    mesh: Mesh | None,
) -> jax.Array:
    """Of the masked tokens [3]: the summed cross-entropy, how many are the likeliest token, and how many they are."""
    B, L = tokens.shape
    ratios = jnp.full((B, L // block_size), ratio, jnp.float32)
    candidates = loss_mask.reshape(B, L // block_size, block_size)
    masked = mask_lowest(jax.random.uniform(key, candidates.shape), candidates, ratios).reshape(B, L)
    batch = build_dual_stream(
        tokens, loss_mask, positions, segment_ids, masked, ratios,
        mask_token_id=mask_token_id, block_size=block_size, reorder=reorder,
    )  # fmt: skip
    pattern = DualStream(batch.segment_ids, block_size)
    with on_mesh(mesh):
        transformer = nnx.merge(graph, params)
        hidden = transformer.hidden(batch.tokens, positions=batch.positions, pattern=pattern, masked=batch.masked)
        hidden, targets, masked = hidden[:, L:], batch.targets[:, L:], batch.masked[:, L:]
        losses = transformer.token_losses(hidden, targets, masked)
        # The logits of few places at a time: of a row of 2,048 those of Qwen's vocabulary are 1.2 GB.
        places = hidden.reshape(-1, math.gcd(L, SCORED_AT_ONCE), hidden.shape[-1])
        guesses = jax.lax.map(lambda some: likeliest(transformer.logits(some)), places).reshape(B, L)
    return jnp.stack([jnp.sum(losses), jnp.sum(masked & (guesses == targets)), jnp.sum(masked)])
