"""What a forward over more slots costs, and what the windows of verified decoding bring: by it widths and windows are chosen."""

from __future__ import annotations

import bisect
import dataclasses

import jax
from flax import nnx

from wedlm_jax.model.transformer import Transformer
from wedlm_jax.ops.attention import target_platform

AUTO_WINDOWS = (4, 8, 16, 32)  # those of window_size="auto"

# With each of AUTO_WINDOWS, what a row accepts in a forward and the slots that it feeds: of the quickstart's model, geometric
# means of word problems and counting (benchmarks/RESULTS.md, "Windows of verified decoding"). That model was trained in blocks
# of 16 and accepts no more with 32; for those of longer blocks a tenth more is assumed.
ACCEPTED = (3.6, 5.9, 7.5, 8.2)
FED = (7.8, 14.8, 25.7, 42.8)


@dataclasses.dataclass(frozen=True)
class WindowTable:
    """Of one model on one kind of device. `python -m wedlm_jax.calibrate --decoder verified` measures it.

    Attributes:
      costs: (slots, what a forward over so many costs, of one over a single slot), two points and more, both ascending.
      accepted: tokens per forward with each of AUTO_WINDOWS.
      fed: slots of a row per forward with each of them.
    """

    costs: tuple[tuple[float, float], ...]
    accepted: tuple[float, ...] = ACCEPTED
    fed: tuple[float, ...] = FED

    @classmethod
    def linear(cls, a_slot: float) -> WindowTable:
        """Of forwards to which every further slot adds as much."""
        return cls(((0, 1.0), (1, 1.0 + a_slot)))

    def cost(self, slots: float) -> float:
        """On straight lines between the points, and on the last one behind them. `slots` of all rows together."""
        right = min(max(bisect.bisect(self.costs, slots, key=lambda point: point[0]), 1), len(self.costs) - 1)
        (n, low), (m, high) = self.costs[right - 1 : right + 1]
        return low + (high - low) * (slots - n) / (m - n)

    def gains(self, rows: int) -> list[float]:
        """What each of AUTO_WINDOWS accepts for the cost of its forward, where a device computes so many rows, finished ones
        among them."""
        return [accepted / self.cost(rows * fed) for accepted, fed in zip(self.accepted, self.fed, strict=True)]

    def widest(self, rows: int) -> int:
        """The window that gains most: the more rows, and the dearer a slot, the narrower. Never wider than that of one row,
        for which programs are compiled, of any number of rows: costs as measured may rise ever more slowly."""
        gains = self.gains(rows)
        window = AUTO_WINDOWS[gains.index(max(gains))]
        return window if rows == 1 else min(window, self.widest(1))


# Where nothing was measured. On a CPU as `python -m benchmarks.wall_clock --parts curve` gives it: 0.05 at 34M parameters, 0.04
# at 110M, 0.25 at 2M, whose weights are read from the processor's caches; on another processor forwards over 16 slots give
# 0.09, 0.05 and 0.12, by which one prompt gets the same windows. On an accelerator, where reading the weights dominates, by its
# rates of memory and arithmetic.
ON_CPU, ON_CPU_FROM_CACHE, ON_ACCELERATOR = (WindowTable.linear(a_slot) for a_slot in (0.05, 0.25, 0.002))
PROCESSOR_CACHE = 2**25  # bytes of weights that a processor's caches hold


def presumed_table(transformer: Transformer) -> WindowTable:
    """Of a transformer that was not measured, on the platform that is computed on or compiled for."""
    if target_platform() != "cpu":
        return ON_ACCELERATOR
    return ON_CPU if exceeds_processor_cache(transformer) else ON_CPU_FROM_CACHE


def exceeds_processor_cache(transformer: Transformer) -> bool:
    """Whether a forward over few tokens would, on a CPU, take what it takes to read the weights from memory."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(transformer))) > PROCESSOR_CACHE
