"""Agreement with AR: how many tokens of a completion the same weights would have chosen one by one. Needs no labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wedlm_jax.decode.scores import score
from wedlm_jax.model.handle import Model


def disagreements(model: Model, prompt: Sequence[int], ids: Sequence[int], mask_token_id: int | None) -> int:
    """How many of `ids` are not the likeliest next token after the prompt and the ids before them.

    Every token is held against the AR prediction behind the completion's own beginning, so one that differs is counted once,
    whatever it leads to.

    Args:
      mask_token_id: never the likeliest; None = no token is excluded.

    Raises:
      UserError: it does not fit in memory.
    """
    chosen = score(model, [*prompt, *ids], banned=mask_token_id).likeliest[len(prompt) - 1 : -1]
    return int(np.sum(chosen != np.asarray(ids)))
