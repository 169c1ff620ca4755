"""Cycles of a program compiled for a TPU, by the compiler's own estimate.

It has one of most operations, of their arithmetic; of kernels, ours or a library's, it has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from wedlm_jax.program_costs import PARTS, parts_of_operations, runs_by_computation

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN = 2**62  # and more is what the compiler writes where it has no estimate


class Operation(NamedTuple):
    cycles: int  # of all its runs
    runs: int
    multiplies: bool  # whether there is a product with a matrix in it


def operations(text: str) -> Iterator[Operation]:
    """Those of a compiled program (`compiled.as_text()`) that the compiler estimates."""
    computations = runs_by_computation(text)
    parts = parts_of_operations(computations)

    def multiplies(line: str) -> bool:
        if " convolution(" in line or " dot(" in line:
            return True
        return any(multiplies(inner) for name in PARTS.findall(line) for inner in computations[name][0])

    for name, (lines, runs) in computations.items():
        for line in lines if name not in parts else ():
            found = _CYCLES.search(line)
            if found and int(found[1]) < _UNKNOWN:
                yield Operation(runs * int(found[1]), runs, multiplies(line))
