"""The dual stream of a frozen base under an adapter of mask rows, in two passes.

Memory stream and observed rows are the base's own: they run forward once, outside what is differentiated, and leave nothing
behind but the keys and values that masks read. Observed rows of a block without a mask are read by none, and do not run. The
mask rows, brought to the front, run behind them through the adapted layers. A mask sees the memory of its document before its
block, the observed rows of its block, and the masks of its block up to itself: three ranges of keys, merged by log-sum-exp.
Together the passes are `Transformer.hidden` with `DualStream`.

The memory stream, half of all rows, attends by what `ModelConfig.attention` says. The observed rows and the mask rows attend by
XLA on every platform: which rows they are is drawn in the step, so their ranges of keys are data. Splash makes the schedule of
its tiles while it is traced, from a mask by place in the row; left in their places, as it would want them, masks would be L rows
again, beside idle queries for the memory. The flash kernels take ranges, but hand out no log-sum-exp to merge three by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from wedlm_jax.model.kept_blocks import beside_a_mask
from wedlm_jax.model.layers import Layer
from wedlm_jax.model.patterns import Causal, document_starts
from wedlm_jax.model.rope import rope_angles
from wedlm_jax.model.transformer import REMAT_POLICIES, Transformer
from wedlm_jax.ops.attention import attend_ranges, merge
from wedlm_jax.sharding import constrain, kv_heads_held, over_mesh, repeat_heads


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prediction:
    """A prediction stream in physical order: in every block observed rows, then masks, then padding."""

    tokens: jax.Array  # int [B, L]
    positions: jax.Array  # int [B, L]
    segment_ids: jax.Array  # int [B, L]; 0 = padding
    masked: jax.Array  # bool [B, L]
    block_size: int = dataclasses.field(metadata={"static": True})

    @property
    def observed(self) -> jax.Array:
        """bool [B, L]: the observed rows that some mask sees."""
        return ~self.masked & (self.segment_ids > 0) & beside_a_mask(self.masked, self.block_size)


class Chosen(NamedTuple):
    """Some rows of a prediction stream, in their order, in the first places of [B, C]."""

    rows: jax.Array  # int [B, C]: which row each place holds; any row where none is left
    used: jax.Array  # bool [B, C]
    first: jax.Array  # int [B, C]: the first place that holds a row of the same block

    @classmethod
    def of(cls, chosen_BL: jax.Array, block_size: int, capacity: int) -> Chosen:
        """All rows where bool [B, L] is True; they must be `capacity` at most."""
        rows = jnp.argsort(~chosen_BL, axis=1, stable=True)[:, :capacity]
        first = jnp.take_along_axis(before(chosen_BL), rows // block_size * block_size, axis=1)
        return cls(rows, jnp.take_along_axis(chosen_BL, rows, axis=1), first)

    def take(self, x_BL: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x_BL, self.rows.reshape(*self.rows.shape, *[1] * (x_BL.ndim - 2)), axis=1)

    def own(self) -> Ranges:
        """The places of the same block up to the row's own. An unused place sees itself alone: some key must be seen."""
        place = jnp.broadcast_to(jnp.arange(self.rows.shape[1]), self.rows.shape)
        return jnp.where(self.used, self.first, place), place + 1

    def only_used(self, ranges: Ranges) -> Ranges:
        start, end = ranges
        return start, jnp.where(self.used, end, start)


Ranges = tuple[jax.Array, jax.Array]  # the first key, and the one after the last, of each query
KeysValues = tuple[jax.Array, jax.Array]  # [B, S, K, H] each, or of all layers [layers, B, S, K, H]


class Frozen(NamedTuple):
    """What the base leaves for the mask rows."""

    memory: KeysValues  # of all layers, L keys
    observed: KeysValues  # of all layers, L places: the observed rows of the prediction stream in the first ones
    hidden: jax.Array  # [B, L, D]: the memory stream after the final norm


def before(chosen_BL: jax.Array) -> jax.Array:
    """int [B, L + 1]: how many are chosen before each row, and how many in all."""
    return jnp.pad(jnp.cumsum(chosen_BL, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def run_frozen(
    transformer: Transformer,
    memory_tokens: jax.Array,
    memory_positions: jax.Array,
    prediction: Prediction,
    capacity: int,
) -> Frozen:
    """The memory stream [B, L] and the observed rows of the prediction stream, of which there are `capacity` at most in a row,
    through the base alone. Both in one pass, so that a layer's weights are read, and over a mesh gathered, once."""
    config = transformer.config
    pattern = Causal(prediction.segment_ids)
    chosen = Chosen.of(prediction.observed, prediction.block_size, capacity)
    to_memory = memory_ranges(prediction, chosen)
    memory_rope, rope = (
        rope_angles(positions, config.head_dim, config.rope_theta, config.rope_scaling)
        for positions in (memory_positions, chosen.take(prediction.positions))
    )

    def run_layer(carry: tuple[jax.Array, jax.Array], state: nnx.State) -> tuple:
        x_memory, x = carry
        layer = nnx.merge(graph, state)
        q, k_memory, v_memory = layer.attention.queries_keys_values(layer.input_norm(x_memory), memory_rope)
        out = pattern(q, k_memory, v_memory, config.attention)
        x_memory = layer.after_attention(x_memory, layer.attention.o_proj(out))
        q, k, v = layer.attention.queries_keys_values(layer.input_norm(x), rope)
        out = attend_parts(q, [(k_memory, v_memory), (k, v)], [to_memory, chosen.own()])
        x = layer.after_attention(x, layer.attention.o_proj(out))
        left = [(0, 0), (0, memory_tokens.shape[1] - capacity), (0, 0), (0, 0)]  # of L places, as of any other capacity
        return (x_memory, x), ((k_memory, v_memory), (jnp.pad(k, left), jnp.pad(v, left)))

    with jax.default_matmul_precision(config.precision):
        graph, stacked = transformer.split_stack()
        start = transformer.embed(memory_tokens), transformer.embed(chosen.take(prediction.tokens))
        of_layers: tuple[KeysValues, KeysValues]
        (x_memory, _), of_layers = jax.lax.scan(run_layer, start, stacked, unroll=not config.scan_layers)
        return Frozen(of_layers[0], of_layers[1], transformer.final_norm(x_memory))


def run_masks(transformer: Transformer, frozen: Frozen, prediction: Prediction, masks: Chosen) -> jax.Array:
    """The mask rows through the adapted layers: hidden states after the final norm [B, C, D]; of unused places anything."""
    config, J = transformer.config, prediction.block_size
    chex.assert_equal_shape_prefix([masks.rows, prediction.masked], 1)
    assert transformer.mask_embedding is not None
    observed_before = before(prediction.observed)
    block = masks.rows // J * J
    of_block = (jnp.take_along_axis(observed_before, place, axis=1) for place in (block, block + J))
    ranges = [memory_ranges(prediction, masks), masks.only_used(tuple(of_block)), masks.own()]  # type: ignore[arg-type]
    rope = rope_angles(masks.take(prediction.positions), config.head_dim, config.rope_theta, config.rope_scaling)

    def run(x: jax.Array, state: nnx.State, memory: KeysValues, observed: KeysValues) -> jax.Array:
        layer: Layer = nnx.merge(graph, state)
        q, k, v = layer.attention.queries_keys_values(layer.input_norm(x), rope, True)
        out = attend_parts(q, [memory, observed, (k, v)], ranges)
        return layer.after_attention(x, layer.attention.o_proj(out, True), True)

    if config.remat != "none":
        run = jax.checkpoint(run, policy=REMAT_POLICIES[config.remat], prevent_cse=not config.scan_layers)
    with jax.default_matmul_precision(config.precision):
        graph, stacked = transformer.split_stack()
        embedding = transformer.mask_embedding[...]
        # Repeated before it is rounded, so that its gradient, a sum over all masks, is summed in float32.
        repeated = jnp.broadcast_to(embedding, (*masks.rows.shape, embedding.size)).astype(config.dtype)
        x = constrain(repeated, "batch", None, None)
        read = stacked, frozen.memory, frozen.observed
        x, _ = jax.lax.scan(lambda x, read: (run(x, *read), None), x, read, unroll=not config.scan_layers)
        return transformer.final_norm(x)


def memory_ranges(prediction: Prediction, chosen: Chosen) -> Ranges:
    """The memory of the row's document before its block."""
    block = chosen.rows // prediction.block_size * prediction.block_size
    return chosen.only_used((chosen.take(document_starts(prediction.segment_ids)), block))


def attend_parts(q: jax.Array, keys_values: Sequence[KeysValues], ranges: Sequence[Ranges]) -> jax.Array:
    """Attention of q [B, T, N, H] over the union of several sets of keys, of each in a range of its own for every query.

    The last one is the row's own: every query sees a key of it.
    """
    held = kv_heads_held(q.shape[2], keys_values[0][0].shape[2])
    keys_values = [(repeat_heads(k, held), repeat_heads(v, held)) for k, v in keys_values]

    def attend(q: jax.Array, *flat: jax.Array) -> tuple[jax.Array]:
        parts = [attend_ranges(q, *flat[i : i + 4]) for i in range(0, len(flat), 4)]
        out, lse = parts.pop()
        for other, other_lse in parts:
            out, lse = merge(out, lse, other, other_lse), jnp.logaddexp(lse, other_lse)
        return (out,)

    heads, kv_heads = ("batch", None, "heads", None), ("batch", None, "kv_heads", None)
    flat = [x for pair, reach in zip(keys_values, ranges, strict=True) for x in (*pair, *reach)]
    axes = [kv_heads, kv_heads, ("batch", None), ("batch", None)] * len(ranges)
    return over_mesh(attend, [heads, *axes], [heads], q, *flat)[0]
