"""A trace: for each forward of one row, what was fed, committed and filled, in absolute logical positions."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from wedlm_jax.decode.state import StepRecord


def trace_entry(record: StepRecord, row: int) -> dict[str, Any]:
    """One row's step as plain JSON values.

    Keys: `base` (position of window slot 0), `window` (tokens in logical order, None = mask), `fed_positions` (in the
    physical order fed to the model), `emitted` (number of tokens added to the output), `mask_positions` and `scores`
    (entropy in nats, or confidence for block-wise, at the masks), `filled_positions` and `filled_tokens` (of the masks:
    what AR, verified and lookup emit behind a token that they feed fills none).
    """
    r = jax.tree.map(lambda x: np.asarray(x)[row], record)
    base, fed = int(r.base), int(r.fed)
    slots = np.arange(fed)
    filled, filling = r.filled[:fed], np.flatnonzero(r.filling)
    masks = slots[~filled]
    return {
        "base": base,
        "window": [int(token) if is_filled else None for token, is_filled in zip(r.window[:fed], filled, strict=True)],
        "fed_positions": [base + int(i) for i in ([*slots[filled], *masks] if r.reordered else slots)],
        "emitted": int(r.emitted),
        "mask_positions": [base + int(i) for i in masks],
        "scores": [float(x) for x in r.score[:fed][~filled]],
        "filled_positions": [base + int(i) for i in filling],
        "filled_tokens": [int(r.tokens[i]) for i in filling],
    }
