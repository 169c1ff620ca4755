"""Prefix reuse: which row holds the beginning of a request, and which row the request goes to.

The committed slots of a row are the exact causal keys and values of its tokens, whatever decoder wrote them, so a request
that begins with the same tokens need not prefill them again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Tokens = Sequence[int] | np.ndarray  # an array is compared at once

# A row is continued where a request shares all of its tokens but this many. The end of an answer may be written otherwise
# when it comes back inside a prompt: by a stop id, a line end, or another split into tokens.
LEFT_BEHIND = 16
# Tokens that a request saves by the prompt of another, for which it lets that one start before it instead of beside it.
WORTH_WAITING = 16


def shared_length(left: Tokens, right: Tokens) -> int:
    """How many leading tokens agree."""
    both = min(len(left), len(right))
    differs = np.asarray(left[:both]) != np.asarray(right[:both])
    return int(np.argmax(differs)) if differs.any() else both


def longest_prefix(prompt: Tokens, cached: Sequence[Tokens]) -> tuple[int, int]:
    """(which of `cached` shares the longest beginning with `prompt`, how many tokens); the first of equals."""
    lengths = [shared_length(prompt, tokens) for tokens in cached]
    longest = max(lengths)
    return lengths.index(longest), longest


def choose_row(prompt: Tokens, idle: Sequence[int], cached: Sequence[Tokens], used: Sequence[int]) -> int:
    """The idle row that a request takes: the one that it continues, or else the one that was used longest ago.

    Args:
      idle: row numbers, at least one.
      cached: tokens in the cache, of every row.
      used: when each row was last used; 0 = never.
    """
    continued = [row for row in idle if _continues(prompt, cached[row])]
    if continued:
        return max(continued, key=lambda row: shared_length(prompt, cached[row]))
    return min(idle, key=lambda row: used[row])


def _continues(prompt: Tokens, cached: Tokens) -> bool:
    shared = shared_length(prompt, cached)
    return shared > 0 and len(cached) - shared <= LEFT_BEHIND
