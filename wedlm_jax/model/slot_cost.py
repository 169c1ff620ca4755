"""What a further slot adds to a decode forward: by it widths are compiled and windows chosen."""

from __future__ import annotations

import jax
from flax import nnx

from wedlm_jax.model.transformer import Transformer
from wedlm_jax.ops.attention import target_platform

# Of the cost of a forward over one slot. On a CPU as `python -m benchmarks.wall_clock --parts curve` measures it: 0.05 at 34M
# parameters, 0.04 at 110M, 0.25 at 2M, whose weights are read from the processor's caches; on another processor forwards over
# 16 slots give 0.09, 0.05 and 0.12, by which one prompt gets the same windows. On an accelerator, where reading the weights
# dominates, by its rates of memory and arithmetic, not measured.
ON_CPU, ON_CPU_FROM_CACHE, ON_ACCELERATOR = 0.05, 0.25, 0.002
PROCESSOR_CACHE = 2**25  # bytes of weights that a processor's caches hold


def slot_cost(transformer: Transformer) -> float:
    """Of a forward of this transformer on the platform that is computed on or compiled for."""
    if target_platform() != "cpu":
        return ON_ACCELERATOR
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(transformer)))
    return ON_CPU_FROM_CACHE if weights <= PROCESSOR_CACHE else ON_CPU
