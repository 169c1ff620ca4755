"""The windows of window_size="auto", and the widest of them that is worth its cost."""

from __future__ import annotations

import functools

AUTO_WINDOWS = (4, 8, 16, 32)

# With each of AUTO_WINDOWS, what a row accepts in a forward and the slots that it feeds: of the quickstart's model, geometric
# means of word problems and counting (benchmarks/RESULTS.md, "Windows of verified decoding"). That model was trained in blocks
# of 16 and accepts no more with 32; for those of longer blocks a tenth more is assumed.
ACCEPTED = (3.6, 5.9, 7.5, 8.2)
FED = (7.8, 14.8, 25.7, 42.8)


@functools.cache
def widest_window(rows: int, slot_cost: float) -> int:
    """The window that accepts most for the cost of its forward, where a device computes so many rows, finished ones among
    them, and a further slot adds `slot_cost` to each. The more rows, and the dearer a slot, the narrower."""
    gain = [accepted / (1 + slot_cost * rows * fed) for accepted, fed in zip(ACCEPTED, FED, strict=True)]
    return AUTO_WINDOWS[gain.index(max(gain))]
