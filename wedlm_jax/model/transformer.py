"""Transformer: the one forward pass, for training, prefill and decoding alike. Only the attention pattern differs."""

from __future__ import annotations

from typing import Any, overload

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.embedding import EMBEDDING_STDDEV, Embedding
from wedlm_jax.model.kv_cache import Cache, KVCache
from wedlm_jax.model.layers import AdaptedRows, Layer, RMSNorm
from wedlm_jax.model.patterns import CachedWindow, Causal, Pattern, of_read, reading_all
from wedlm_jax.model.rope import rope_angles
from wedlm_jax.ops import attention
from wedlm_jax.ops.cross_entropy import Cut, cross_entropy
from wedlm_jax.ops.rows_by_matrix import rows_by_matrix
from wedlm_jax.sharding import axes_over, mesh_in_force

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(attention.RESIDUALS),
    ),
    "attention": jax.checkpoint_policies.save_only_these_names(attention.RESIDUALS),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class OutputLayer(nnx.Module):
    """The output matrix [V, D] of a model that is not tied, as it is also beside kernels in int8: rounded, it would cost most and
    gain least."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, V = config.hidden_size, config.vocab_size
        kernel = nnx.initializers.normal(D**-0.5)(rngs.params(), (V, D), config.param_dtype)
        self.kernel = nnx.Param(kernel, axes=("vocab", "embed"))


class Transformer(nnx.Module):
    """A causal decoder stack. The layers' parameters are stacked on axis 0 and run as one `lax.scan`.

    For decoding on a CPU or a GPU `layers` may be a list of layers, run one after the other (`weights.with_layers_apart`).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config, config.vocab_size, "vocab", rngs=rngs)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> Layer:
            return Layer(config, rngs=rngs)

        self.layers: Layer | nnx.List[Layer] = stack(rngs)
        self.final_norm = RMSNorm(config, config.hidden_size, "embed")
        self.lm_head = None if config.tie_word_embeddings else OutputLayer(config, rngs=rngs)
        self.embed_positions = self._position_table(config, rngs)
        self.mask_embedding = self._mask_embedding(config, rngs)

    @staticmethod
    def _position_table(config: ModelConfig, rngs: nnx.Rngs) -> Embedding | None:
        """Read by physical index, as in GPT-2: a token's place in memory is its position there, and reordering moves it.

        Read by explicit `positions` its rows would travel with the tokens, as RoPE's angles do, and nothing would break.
        """
        if config.position_embedding_type == "rope":
            return None
        return Embedding(config, config.max_position_embeddings, "position", rngs=rngs)

    @staticmethod
    def _mask_embedding(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Param | None:
        """What mask rows are fed where an adapter works on them alone: no row of the vocabulary is needed for it."""
        if config.adapter is None or config.adapter.rows != "mask":
            return None
        init = nnx.initializers.normal(EMBEDDING_STDDEV)
        return nnx.Param(init(rngs.adapter(), (config.hidden_size,), jnp.float32), axes=("embed",))

    @overload
    def hidden(
        self, tokens: jax.Array, *, positions: jax.Array, pattern: Pattern = ..., masked: jax.Array | None = ...
    ) -> jax.Array: ...
    @overload
    def hidden(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array,
        pattern: Pattern,
        masked: jax.Array | None = ...,
        cache: Cache,
    ) -> tuple[jax.Array, Cache]: ...
    def hidden(self, tokens, *, positions, pattern=Causal(), masked=None, cache=None):
        """Runs the layers.

        Args:
          tokens: int [B, L], in physical order.
          positions: int [B, L], the logical position of each token; RoPE reads these and nothing else does. A model with
            learned absolute positions ignores them and reads the pattern's physical index.
          pattern: who sees whom, by physical order.
          masked: bool [B, L], the mask rows, which an adapter of rows="mask" applies to; without it the base alone runs.
            Nothing else reads it: without such an adapter a mask row is what `tokens` says.
          cache: the KV cache that a `CachedWindow` pattern writes and reads.

        Returns:
          The hidden states after the final norm [B, L, D], or [B, M, D] where the pattern says which of them are `read`; with
          a cache, the pair (hidden states, new cache).

        Raises:
          ValueError: a cache without a `CachedWindow`, or the other way round.
        """
        chex.assert_rank(tokens, 2)
        chex.assert_type([tokens, positions], int)
        chex.assert_equal_shape([tokens, positions])
        if (cache is None) == isinstance(pattern, CachedWindow):
            raise ValueError("pass a cache with the CachedWindow pattern, and with no other")
        with jax.default_matmul_precision(self.config.precision):
            adapted = self._adapted_rows(masked)
            x_BLD, rope = self.embedded(tokens, masked), None
            if self.embed_positions is None:
                rope = self._angles(positions)
            else:
                x_BLD = x_BLD + self.embed_positions(pattern.physical_index(tokens.shape[1]))
            run = self._run_list if isinstance(self.layers, nnx.List) else self._run_stack
            x_BLD, cache = run(x_BLD, cache, rope=rope, pattern=pattern, adapted=adapted)
            hidden = self.final_norm(x_BLD)
        return hidden if cache is None else (hidden, cache)

    def _angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config

        def angles() -> tuple[jax.Array, jax.Array]:
            return rope_angles(positions, config.head_dim, config.rope_theta, config.rope_scaling)

        if not isinstance(self.layers, nnx.List) or attention.target_platform() != "cpu":
            return angles()
        # XLA on CPU would compute the cosines anew for every head of every layer in the loop that reads them. It merges nothing
        # across a conditional, and cannot know that this one always holds.
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(angles))
        return jax.lax.cond(positions[0, 0] > jnp.iinfo(positions.dtype).min, angles, lambda: nothing)

    def split_stack(self) -> tuple[nnx.GraphDef[Layer], nnx.State]:
        """What a layer is, and the parameters of all of them, for a scan."""
        assert isinstance(self.layers, Layer)
        return nnx.split(self.layers)

    def _run_stack(
        self, x_BLD: jax.Array, cache: KVCache | None, *, pattern: Pattern, **given: Any
    ) -> tuple[jax.Array, KVCache | None]:
        graph, stacked = self.split_stack()
        of_each = reading_all(pattern)

        def run_layer(carry, index_and_state):
            index, state = index_and_state
            return nnx.merge(graph, state)(carry[0], cache=carry[1], layer=index, pattern=of_each, **given), None

        apart = cache is None and not self.config.scan_layers
        if self.config.remat != "none":  # in a scan nothing is there to be merged with, so no barriers against it
            run_layer = jax.checkpoint(run_layer, policy=REMAT_POLICIES[self.config.remat], prevent_cse=apart)
        # The cache rides in the carry: as scanned input and output it would be copied at every step.
        indexed = (jnp.arange(self.config.num_layers), stacked)
        x_BLD, cache = jax.lax.scan(run_layer, (x_BLD, cache), indexed, unroll=apart)[0]
        return of_read(pattern, x_BLD), cache

    def _run_list(
        self, x_BLD: jax.Array, cache: tuple[KVCache, ...] | None, *, pattern: Pattern, **given: Any
    ) -> tuple[jax.Array, tuple[KVCache, ...] | None]:
        assert isinstance(self.layers, nnx.List)
        graph, _ = nnx.split(self.layers[0])

        @jax.jit  # so that one trace serves all layers, or all but the last
        def run_layer(state, x_BLD, cache, pattern):
            return nnx.merge(graph, state)(x_BLD, cache=cache, layer=0, pattern=pattern, **given)

        of_layers, before_last, last = [], reading_all(pattern), len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            of_this = pattern if number == last else before_last
            x_BLD, of_layer = run_layer(nnx.state(layer), x_BLD, None if cache is None else cache[number], of_this)
            of_layers.append(of_layer)
        return x_BLD, None if cache is None else tuple(of_layers)

    def empty_cache(self, batch: int, slots: int) -> Cache:
        """A cache as `hidden` takes it: of all layers, or of each layer its own where they are a list."""
        if isinstance(self.layers, nnx.List):
            return tuple(KVCache.zeros(self.config, batch, slots, layers=1) for _ in self.layers)
        return KVCache.zeros(self.config, batch, slots)

    def embedded(self, tokens: jax.Array, masked: jax.Array | None) -> jax.Array:
        """[B, L, D] of ids [B, L]; of the mask rows the learned embedding, where there is one."""
        x_BLD = self.embed(tokens, masked)
        if self.mask_embedding is None or masked is None:
            return x_BLD
        chex.assert_equal_shape([tokens, masked])
        chex.assert_type(masked, bool)
        return jnp.where(masked[..., None], self.mask_embedding[...].astype(x_BLD.dtype), x_BLD)

    def _adapted_rows(self, masked: jax.Array | None) -> AdaptedRows:
        if self.config.adapter is None:
            return False
        if self.config.adapter.rows == "all":
            return True
        return False if masked is None else masked

    @property
    def head(self) -> jax.Array:
        """The output matrix [V, D]; the embedding itself where they are tied."""
        return self.embed.embedding[...] if self.lm_head is None else self.lm_head.kernel[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., V] in float32 of hidden states [..., D]; a call of its own, so that nobody pays for unread rows."""
        chex.assert_axis_dimension(hidden, -1, self.config.hidden_size)
        with jax.default_matmul_precision(self.config.precision):
            return rows_by_matrix(hidden, self.head.astype(self.config.dtype))

    def token_losses(self, hidden: jax.Array, targets: jax.Array, carries_loss: jax.Array | None = None) -> jax.Array:
        """Cross-entropy [B, L] in nats of hidden states [B, L, D] against `targets` [B, L].

        Args:
          carries_loss: bool [B, L]; the other rows never see the output layer and get 0. None: all rows.
        """
        D = self.config.hidden_size
        chex.assert_shape(hidden, (*targets.shape, D))
        if carries_loss is not None:
            chex.assert_equal_shape([carries_loss, targets])
        losses = cross_entropy(
            hidden.reshape(-1, D),
            self.head,
            targets.reshape(-1),
            None if carries_loss is None else carries_loss.reshape(-1),
            cut=self._cut(targets.size),
            precision=self.config.precision,
        )
        return losses.reshape(targets.shape)

    def _cut(self, rows: int) -> Cut:
        """How the operands of the loss lie on the mesh in force."""
        mesh = mesh_in_force()
        if mesh is None:
            return Cut()
        over = axes_over("batch", rows)
        width = axes_over("embed", self.config.hidden_size)
        return Cut(mesh, over, axes_over("vocab", self.config.vocab_size), width if set(width) <= set(over) else ())

    def __call__(self, tokens, *, positions, pattern=Causal(), masked=None, cache=None):
        """Logits [B, L, V]; with a cache, the pair (logits, new cache)."""
        if cache is None:
            return self.logits(self.hidden(tokens, positions=positions, pattern=pattern, masked=masked))
        hidden, cache = self.hidden(tokens, positions=positions, pattern=pattern, masked=masked, cache=cache)
        return self.logits(hidden), cache
