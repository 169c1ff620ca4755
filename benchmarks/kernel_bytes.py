"""Bytes that the kernels of a program compiled for a GPU, or the loops of one for a CPU, read and write.

Loops over elements are bound by them, so over the rate of the memory they are close to the time that these take.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from wedlm_jax.program_costs import PARTS, parts_of_operations, runs_by_computation

KERNELS = ("custom-call", "copy", "sort", "scatter", "reduce", "dot", "transpose", "convert")
_LINE = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(?:,|$)")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")


class Kernel(NamedTuple):
    nbytes: int  # of one run
    runs: int
    multiplies: bool  # whether there is a product with a matrix in it
    custom: bool  # not written by XLA


class _Operation(NamedTuple):
    shape: str
    kind: str
    arguments: list[str]
    line: str


def kernels(text: str) -> Iterator[Kernel]:
    """Those of a compiled program (`compiled.as_text()`). Of an array that a kernel only slices, or only writes a slice of, the
    slice counts."""
    computations = runs_by_computation(text)
    parts = parts_of_operations(computations)
    for name, (lines, runs) in computations.items():
        operations = _parsed(lines) if runs and name not in parts else {}
        for operation in operations.values():
            if operation.kind == "fusion":
                (inner,) = PARTS.findall(operation.line)
                body = computations[inner][0]
                yield Kernel(_of_fusion(body), runs, any(" dot(" in line for line in body), custom=False)
            elif operation.kind in KERNELS:
                read = sum(_nbytes(operations[argument].shape) for argument in operation.arguments)
                multiplies = operation.kind == "dot" or "gemm" in operation.line
                custom = operation.kind == "custom-call" and not multiplies
                yield Kernel(read + _nbytes(operation.shape), runs, multiplies, custom)


def _of_fusion(lines: list[str]) -> int:
    operations = _parsed(lines)
    root = next(name for name, operation in operations.items() if operation.line.lstrip().startswith("ROOT "))
    users: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for name, operation in operations.items():
        for place, argument in enumerate(operation.arguments):
            users[argument].append((name, place))

    def read(name: str) -> int:
        """Of a parameter: what its users read of it."""
        total = 0
        for user, place in users[name]:
            if operations[user].kind == "bitcast":
                total += read(user)
            elif place == 0 and operations[user].kind in ("dynamic-slice", "gather", "slice"):
                total += _nbytes(operations[user].shape)
            elif place != 0 or operations[user].kind != "dynamic-update-slice":
                return _nbytes(operations[name].shape)
        return min(total, _nbytes(operations[name].shape))

    def written(name: str) -> int:
        operation = operations[name]
        if operation.kind in ("tuple", "bitcast"):
            return sum(written(argument) for argument in operation.arguments)
        updates = operation.kind == "dynamic-update-slice"
        return _nbytes(operations[operation.arguments[1]].shape if updates else operation.shape)

    return written(root) + sum(read(name) for name, one in operations.items() if one.kind == "parameter")


def _parsed(lines: list[str]) -> dict[str, _Operation]:
    """Operations by name."""
    found = [match for line in lines if (match := _LINE.match(line))]
    return {m[1]: _Operation(m[2], m[3], re.findall(r"%([\w.\-]+)", m[4]), m.string) for m in found}


def _nbytes(shape: str) -> int:
    """Of all arrays in the text of a type."""
    return sum(
        (int(bits) // 8 if bits else 1) * math.prod(int(size) for size in sizes.split(",") if size)
        for _, bits, sizes in _ARRAY.findall(shape)
    )
