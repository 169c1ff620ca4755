"""Drafts of verified decoding that come from the text: what followed the same tokens before, in the place of what masks say.

Text repeats itself where masks know least, in what is copied and in code. Which of the two is likelier right shows in how many
tokens match, and in whether the masks were right of late: no forward is spent to find out.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.lookup import text_window
from wedlm_jax.decode.state import DecodeState

LONGEST_MATCH = 8
WEIGHT = 2  # of a mask draft in matching tokens; once mask drafts have failed, of a matching token in mask drafts


def with_text(state: DecodeState, settings: RowSettings, window_size: jax.Array) -> tuple[DecodeState, jax.Array]:
    """A window of text behind the pending token, in rows where text is trusted more than the mask drafts that lead there.

    With m matching tokens and d mask drafts it is where m > 2 d; once none of the mask drafts that were last checked was right,
    where 2 m > d.

    Args:
      window_size: W [B]: at most W - 1 tokens of text.

    Returns:
      the state, and bool [B]: whether a row's drafts are text.
    """
    drafts = state.leading_run() - 1
    window, filled, matched = text_window(state, state.window[:, 0], window_size, longest=LONGEST_MATCH)
    trusted = jnp.where(state.masks_failed, WEIGHT * matched > drafts, matched > WEIGHT * drafts)
    from_text = trusted & settings.text_drafts
    state = dataclasses.replace(
        state,
        window=jnp.where(from_text[:, None], window, state.window),
        filled=jnp.where(from_text[:, None], filled, state.filled),
    )
    return state, from_text
