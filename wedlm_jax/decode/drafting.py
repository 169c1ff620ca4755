"""Which masks verified decoding fills: a draft that fails costs compute alone, so the rule is made for accepted tokens."""

from __future__ import annotations

import jax

from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.selection import select_by_entropy


def select_drafts(entropies: jax.Array, masked: jax.Array, settings: RowSettings) -> jax.Array:
    return select_by_entropy(entropies, masked, settings.entropy_threshold, settings.distance_penalty)
