"""Bytes that the kernels of a program compiled for a GPU read and write.

Loops over elements are bound by them, so over the rate of the memory they are close to the time that these take.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from wedlm_jax.program_costs import PARTS, parts_of_operations, runs_by_computation

KERNELS = ("fusion", "custom-call", "copy", "sort", "scatter", "reduce", "dot", "transpose", "convert")
_LINE = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(?:,|$)")
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
        operations, _ = _parsed(lines) if runs and name not in parts else ({}, "")
        for operation in operations.values():
            if operation.kind not in KERNELS:
                continue
            nbytes = _nbytes(operation.shape) + sum(
                _nbytes(operations[name].shape) for name in operation.arguments if name in operations
            )
            multiplies = operation.kind == "dot" or "gemm" in operation.line
            if operation.kind == "fusion":
                (inner,) = PARTS.findall(operation.line)
                body = computations[inner][0]
                nbytes, multiplies = _of_fusion(body), any(" dot(" in line for line in body)
            yield Kernel(nbytes, runs, multiplies, operation.kind == "custom-call" and not multiplies)


def _of_fusion(lines: list[str]) -> int:
    operations, root = _parsed(lines)
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


def _parsed(lines: list[str]) -> tuple[dict[str, _Operation], str]:
    """Operations by name, and the name of the root."""
    found = [match for line in lines if (match := _LINE.match(line))]
    operations = {m[2]: _Operation(m[3], m[4], re.findall(r"%([\w.\-]+)", m[5]), m.string) for m in found}
    return operations, next((match[2] for match in found if match[1]), "")


def _nbytes(shape: str) -> int:
    """Of all arrays in the text of a type."""
    return sum(
        (int(bits) // 8 if bits else 1) * math.prod(int(size) for size in sizes.split(",") if size)
        for _, bits, sizes in _ARRAY.findall(shape)
    )
