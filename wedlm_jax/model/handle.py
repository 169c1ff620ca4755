"""Model: the plain handle that `wedlm_jax.load` returns. It holds a transformer and what belongs to it."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from wedlm_jax.errors import UserError
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.patterns import Causal, Pattern
from wedlm_jax.model.transformer import Transformer
from wedlm_jax.model.weights import ROWS_TO_TURN_FOR, Weights, gains_from_turned_kernels, mesh_of
from wedlm_jax.model.window_table import WindowTable, presumed_table

CALIBRATION_FILE = "decoding.json"  # beside the weights, or beside the adapter
WINDOWS_FILE = "windows.json"  # likewise


@dataclasses.dataclass
class Model:
    """A transformer with its config, its tokenizer and its special ids."""

    transformer: Transformer
    config: ModelConfig
    tokenizer: Any = None  # transformers.PreTrainedTokenizerFast, or None
    mask_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # of generation_config, else config, else tokenizer
    files: Path | None = None  # the directory that it was loaded from, whose tokenizer files an export carries along
    source: str | None = None  # what `load` was given
    calibration: Any = None  # decode.calibration.Calibration: tau and lambda measured for these weights, or None
    measured_windows: Any = None  # decode.measured_windows.MeasuredWindows, or None

    @functools.cached_property
    def mesh(self) -> Mesh | None:
        """The devices that the parameters are cut over; None for a single one."""
        return mesh_of(nnx.state(self.transformer))

    @functools.cached_property
    def weights(self) -> Weights:
        """The transformer as the decoding programs take it."""
        return Weights.of(self.transformer)

    def weights_for(self, rows: int) -> Weights:
        """The same for forwards over so many rows of tokens or more: on a CPU larger models hold a second copy of their layers
        for them, turned, which is made here the first time."""
        return self.weights if rows < ROWS_TO_TURN_FOR else self._turned_weights

    @functools.cached_property
    def _turned_weights(self) -> Weights:
        gains = gains_from_turned_kernels(self.transformer, ROWS_TO_TURN_FOR)
        return Weights.of(self.transformer, ROWS_TO_TURN_FOR) if gains else self.weights

    @functools.cached_property
    def window_table(self) -> WindowTable:
        """What window_size="auto" and the compiled widths go by: measured on a device of this kind, else presumed from platform
        and size."""
        presumed = presumed_table(self.transformer)
        return presumed if self.measured_windows is None else self.measured_windows.table(self, presumed)

    @functools.cached_property
    def num_tokens(self) -> int:
        """One more than the largest id that is a token. Rows of the vocabulary past the tokenizer's ids are padding; without a
        tokenizer all rows are tokens."""
        if self.tokenizer is None:
            return self.config.vocab_size
        return 1 + max((*self.tokenizer.get_vocab().values(), *self.eos_token_ids), default=-1)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array,
        pattern: Pattern = Causal(),
        masked: jax.Array | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        """Logits [B, L, V] in float32; with a cache, the pair (logits, new cache). Arguments as in `hidden`."""
        tokens = self._with_masks(tokens, masked)
        return self.transformer(tokens, positions=positions, pattern=pattern, masked=masked, cache=cache)

    def hidden(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array,
        pattern: Pattern = Causal(),
        masked: jax.Array | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        """Hidden states after the final norm [B, L, D], or of those that the pattern `read`s; with a cache, the pair (hidden
        states, new cache).

        Args:
          tokens: int [B, L], in physical order.
          positions: int [B, L], logical positions, for RoPE.
          pattern: `Causal`, `DualStream` or `CachedWindow`.
          masked: bool [B, L]; True rows are mask tokens, whatever `tokens` holds there.
          cache: the KV cache of a `CachedWindow`.
        """
        tokens = self._with_masks(tokens, masked)
        if cache is None:
            return self.transformer.hidden(tokens, positions=positions, pattern=pattern, masked=masked)
        return self.transformer.hidden(tokens, positions=positions, pattern=pattern, masked=masked, cache=cache)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., V] in float32 of hidden states [..., D]."""
        return self.transformer.logits(hidden)

    def _with_masks(self, tokens: jax.Array, masked: jax.Array | None) -> jax.Array:
        tokens = jnp.asarray(tokens)
        if masked is None:
            return tokens
        chex.assert_equal_shape([tokens, masked])
        chex.assert_type(masked, bool)
        if not self.config.needs_mask_token:
            return tokens
        return jnp.where(masked, self.require_mask_token_id(), tokens)

    def require_mask_token_id(self) -> int:
        """The mask id, or a `UserError` where the model has none: plain AR decoding never asks for it."""
        if self.mask_token_id is None:
            raise UserError(
                "this model has no mask token: --decoder ar and lookup need none; else put an adapter beside it, or name the id "
                "that it was trained with (mask_token_id; --mask-token-id ID)"
            )
        return self.mask_token_id
