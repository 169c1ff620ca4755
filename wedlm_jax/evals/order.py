"""In which order masks are filled: what decides how much of the work of a forward is kept by the next one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from wedlm_jax.decode.stats import Completion


@dataclasses.dataclass(frozen=True)
class Order:
    """Counts of filled masks over completions; those behind the end of an output are not in them, nor what prefill filled. The
    shares are NaN where no mask was filled."""

    filled: int
    committed_next: int
    right_of_a_mask: int

    @property
    def commit_rate(self) -> float:
        """The share of filled tokens that the very next forward commits."""
        return self.committed_next / self.filled if self.filled else math.nan

    @property
    def out_of_order(self) -> float:
        """The share of tokens that were filled while a mask to their left stayed open."""
        return self.right_of_a_mask / self.filled if self.filled else math.nan


def filling_order(completions: Sequence[Completion], prompt_lengths: Sequence[int]) -> Order:
    """Counts over completions that were generated with `trace=True`; `prompt_lengths` in tokens.

    A token is committed when the cursor has passed it: its keys and values are final. What is still in the window when the
    output ends needs no cache, and counts as committed, unless the last forward replaced it.
    """
    filled = committed = right = 0
    for completion, prompt_length in zip(completions, prompt_lengths, strict=True):
        trace = completion.trace or []
        end, emitted = prompt_length + len(completion.ids), prompt_length
        cursors = [entry["base"] for entry in trace[2:]] + [end, end]  # after the next forward
        for entry, cursor in zip(trace, cursors, strict=False):
            emitted += entry["emitted"]  # verified decoding emits an AR token in the place of a mask
            fillings = zip(entry["filled_positions"], entry["filled_tokens"], strict=True)
            inside = {position: token for position, token in fillings if position < end}
            open_masks = {position for position in entry["mask_positions"] if position >= emitted}
            leftmost = min(open_masks - set(entry["filled_positions"]), default=end)
            outlived = [p for p, token in inside.items() if p < cursor and completion.ids[p - prompt_length] == token]
            filled += len(inside)
            committed += len(outlived)
            right += sum(position > leftmost for position in inside)
    return Order(filled, committed, right)
