"""RoPE stretched for contexts that are longer than those a model was first trained for.

Plain interpolation (arXiv 2306.15595), the rule of Llama 3.1, and YaRN (arXiv 2309.00071), which Qwen's model cards name for
contexts beyond 32,768 tokens.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from wedlm_jax.config_tree import check_choices
from wedlm_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """The fields have the names, and what may be left out the defaults, of `rope_parameters` in a config.json."""

    rope_type: Literal["linear", "llama3", "yarn"] = "yarn"
    factor: float = 1.0  # how many times longer the context becomes
    original_max_position_embeddings: int = 32_768  # the context of before; "linear" does not read it
    low_freq_factor: float = 1.0  # "llama3": what turns less often in that context is stretched whole
    high_freq_factor: float = 4.0  # and what turns more often not at all
    beta_slow: float = 1.0  # "yarn": the same two bounds
    beta_fast: float = 32.0
    attention_factor: float | None = None  # "yarn": of queries and of keys; None: 0.1 ln(factor) + 1

    def __post_init__(self) -> None:
        check_choices(self, "model.rope_scaling")
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, int | float) and not 0 < value < float("inf"):
                raise UserError(f"model.rope_scaling.{name}={value} must be above 0 and finite")
        if self.factor < 1:
            raise UserError(f"model.rope_scaling.factor={self.factor} must be at least 1")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if getattr(self, low) >= getattr(self, high):
                raise UserError(
                    f"model.rope_scaling.{low}={getattr(self, low)} must be below model.rope_scaling.{high}={getattr(self, high)}"
                )

    def stretch(self, frequencies: jax.Array, theta: float) -> jax.Array:
        """The frequencies [H / 2] that take the place of those of plain RoPE, in radians a token."""
        stretched = frequencies / self.factor
        if self.rope_type == "linear":
            return stretched
        if self.rope_type == "llama3":
            turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
            kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        else:
            kept = self._ramp(2 * len(frequencies), theta)
        kept = jnp.clip(kept, 0, 1)
        return (1 - kept) * stretched + kept * frequencies

    def _ramp(self, head_dim: int, theta: float) -> jax.Array:
        """1 up to the pair of dimensions that turns `beta_fast` times in the original context, falling to 0 at the one that
        turns `beta_slow` times; less and more outside."""

        def pair(turns: float) -> float:
            angle = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return head_dim * math.log(angle) / (2 * math.log(theta))

        first, last = max(math.floor(pair(self.beta_fast)), 0), min(math.ceil(pair(self.beta_slow)), head_dim - 1)
        return 1 - (jnp.arange(head_dim // 2) - first) / ((last - first) or 1e-3)

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by, and so queries and keys."""
        if self.rope_type != "yarn":
            return 1.0
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor
