"""What a program costs: FLOPs of its products, counted as it is traced, and bytes of its collectives, read from its
compiled text. The compiler's own figures count the body of a loop once; here it counts as often as it runs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.interpreters import partial_eval

# A gathering all-reduce is a gather that XLA compiles as a sum: each device has zeros but for its own part.
GATHERING = "gathering all-reduce"
COLLECTIVES = ("all-gather", GATHERING, "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "s64": 8}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(")
_DEFINED = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*? ([\w\-]+)\((.*?)\)")
_MOVED = ("copy", "copy-start", "copy-done", "bitcast", "reshape", "transpose", "convert")  # the same array elsewhere
_CALLED = re.compile(
    r"(?:calls=|body=|to_apply=|true_computation=|false_computation=|branch_computations=\{)%?([\w.\-]+)"
)
PARTS = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")  # the computations that an operation consists of
_FUSED = re.compile(r"fusion\(.*calls=%?([\w.\-]+)")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CHANNEL = re.compile(r"channel_id=(\d+)")
_KERNEL_RUNS = re.compile(r"kernel_runs_(\d+)")
_SENT_BY_HOST = re.compile(r"= \(([a-z]+\d*)\[([\d,]*)\].* send\(.*is_host_transfer=true")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


def matmul_flops(jaxpr: core.Jaxpr) -> int:
    """FLOPs of all matrix products of a traced program, 2 for each multiply-add; a scan's body as often as it runs. What nobody
    reads does not count, as XLA drops it: the gradients of a frozen MLP in tiles.

    What each device of a mesh does for itself (`jax.shard_map`) counts for all of them. The body of a Pallas kernel, or of a
    loop whose trip count is data, counts as often as `kernel_runs` around it says, or else once for each step
    of the kernel's grid, and a loop once. Of the branches of a condition the costliest counts: where a program skips work,
    what it does at most.
    """
    return _flops(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0], None)


def _flops(jaxpr: core.Jaxpr, runs: int | None) -> int:
    total = 0
    for equation in jaxpr.eqns:
        declared = _KERNEL_RUNS.search(str(equation.source_info.name_stack))
        inside = int(declared[1]) if declared else runs
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, out = (value.aval.shape for value in (equation.invars[0], equation.outvars[0]))  # type: ignore[attr-defined]
            total += 2 * math.prod(out) * math.prod(left[axis] for axis in contracted)
        times = 1
        if equation.primitive.name == "scan":
            times = equation.params["length"]
        elif equation.primitive.name == "shard_map":
            times = equation.params["mesh"].size
        elif equation.primitive.name == "pallas_call":
            times = math.prod(equation.params["grid_mapping"].grid) if inside is None else inside
        elif equation.primitive.name == "while":
            times = 1 if inside is None else inside
        of_all = max if equation.primitive.name == "cond" else sum
        total += times * of_all([_flops(inner, inside) for inner in _inner(equation.params)] or [0])
    return total


def kernel_runs(times: int) -> AbstractContextManager[None]:
    """Says, while tracing, how often each kernel, and loop whose trip count is data, runs its body inside."""
    return jax.named_scope(f"kernel_runs_{times}")


def _inner(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item


class Collective(NamedTuple):
    """One collective of a compiled program."""

    kind: str  # of COLLECTIVES
    shape: tuple[int, ...]  # of the largest array in its result, on one device
    nbytes: int  # of all arrays in its result
    times: int  # that it runs
    group: int  # devices that take part in one

    @property
    def traffic(self) -> float:
        """The least bytes that a device sends in one run, by the ring algorithms."""
        share = (self.group - 1) / self.group
        factor = {
            "all-gather": share,
            GATHERING: 2 * share,
            "all-reduce": 2 * share,
            "reduce-scatter": self.group - 1,  # the result is the small side
            "all-to-all": share,
            "collective-permute": 1.0,
        }
        return self.nbytes * factor[self.kind]


def runs_by_computation(text: str) -> dict[str, tuple[list[str], int]]:
    """The computations of a compiled program (`compiled.as_text()`) by name: their lines, and how often each runs. A loop runs as
    often as the compiler or `kernel_runs` says, else as the bound in its condition, or once; of a conditional's branches the
    first, in a training step the one of the most rows."""
    lines: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            name = start[2]
            lines[name] = []
            entry = name if start[1] else entry
        elif name:
            lines[name].append(line)
    times: Counter[str] = Counter()
    pending = [(entry, 1)]
    while pending:
        name, runs = pending.pop()
        times[name] += runs
        for line in lines.get(name, ()):
            trips = _trips(lines, line) if " while(" in line else 1
            pending += [(called, runs * trips) for called in _CALLED.findall(line)]
    return {name: (body, times[name]) for name, body in lines.items()}


def parts_of_operations(computations: dict[str, tuple[list[str], int]]) -> set[str]:
    """The names of those that are no steps of their own: what a fusion computes, what a reduction applies."""
    return {name for lines, _ in computations.values() for line in lines for name in PARTS.findall(line)}


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled program (`compiled.as_text()`)."""
    computations = runs_by_computation(text)
    lines = {name: body for name, (body, _) in computations.items()}
    times = {name: runs for name, (_, runs) in computations.items()}
    # What runs beside the products is cut into pieces, some of them fused, that name one channel: they are one collective. But
    # equal collectives of loops of their own, or side by side in one computation, may share a channel too.
    fused_in = {called: name for name, body in lines.items() for line in body for called in _FUSED.findall(line)}
    found: dict[tuple[str, str, str], tuple[list[Collective], list[Collective]]] = {}
    for name, body in lines.items():
        for line in body if times[name] else ():
            if (one := _collective(line, scattered="all-reduce-scatter" in name)) is not None:
                channel = _CHANNEL.search(line)
                gathers = one.kind == "all-reduce" and _gathers(lines, name, line)
                key = channel[1] if channel else f"{name}: {line}", one.kind, fused_in.get(name, name)
                direct_and_fused = found.setdefault(key, ([], []))
                one = one._replace(kind=GATHERING if gathers else one.kind, times=times[name])
                direct_and_fused[name in fused_in].append(one)
    return [
        one for direct, fused in found.values() for one in direct or [max(fused, key=lambda x: x.times * x.traffic)]
    ]


def _gathers(lines: dict[str, list[str]], name: str, line: str) -> bool:
    """Whether all that an all-reduce sums are zeros but for the part of each device."""
    # By computation and name: opcode, operands, line.
    definitions: dict[str, dict[str, tuple[str, list[str], str]]] = {}

    def of(computation: str) -> dict[str, tuple[str, list[str], str]]:
        if computation not in definitions:
            matches = ((_DEFINED.match(text), text) for text in lines.get(computation, ()))
            definitions[computation] = {
                m[1]: (m[2], re.findall(r"%([\w.\-]+)", m[3]), text) for m, text in matches if m
            }
        return definitions[computation]

    def is_zeros(computation: str, operand: str) -> bool:
        return operand in of(computation) and of(computation)[operand][0] == "broadcast"

    def is_own_part(operand: str) -> bool:
        opcode, operands, text = of(name).get(operand, ("", [], ""))
        if opcode in _MOVED:
            return is_own_part(operands[0])
        if opcode == "dynamic-update-slice":
            return is_zeros(name, operands[0])
        if opcode != "fusion" or (called := _CALLED.search(text)) is None:
            return False
        inner = of(called[1])
        root = next((d for d in inner.values() if d[2].lstrip().startswith("ROOT")), ("", [], ""))
        while root[0] in _MOVED and root[1][0] in inner:
            root = inner[root[1][0]]
        if root[0] != "dynamic-update-slice":
            return False
        base = root[1][0]
        given = re.search(rf"%{re.escape(base)} = .* parameter\((\d+)\)", "\n".join(lines[called[1]]))
        return is_zeros(called[1], base) if given is None else is_zeros(name, operands[int(given[1])])

    summed = _DEFINED.match(line)
    return summed is not None and all(map(is_own_part, re.findall(r"%([\w.\-]+)", summed[3])))


def _trips(lines: dict[str, list[str]], loop: str) -> int:
    """How often a loop runs: as the compiler says, or as `kernel_runs` around it does, or else the bound in its condition, which
    counts from 0."""
    if known := _KNOWN_TRIPS.search(loop):
        return int(known[1])
    if declared := _KERNEL_RUNS.findall(loop):
        return int(declared[-1])
    condition = _CONDITION.search(loop)
    bounds = re.findall(r"[su]32\[\]\S* constant\((\d+)\)", "\n".join(lines.get(condition[1], ()) if condition else ()))
    return max(map(int, bounds), default=1)


def traffic_by_kind(found: list[Collective]) -> dict[str, float]:
    """Bytes that one device sends, by kind of collective."""
    total: Counter[str] = Counter()
    for one in found:
        total[one.kind] += one.times * one.traffic  # type: ignore[assignment]
    return dict(total)


def sent_between_slices(text: str) -> int:
    """Bytes that each chip hands to its host, for other slices, in a compiled program of several slices of TPUs: between these
    there are no collectives of chips."""
    total = 0
    for lines, runs in runs_by_computation(text).values():
        for line in lines:
            if (sent := _SENT_BY_HOST.search(line)) is not None:
                dtype, dims = sent.groups()
                total += runs * math.prod(int(n) for n in dims.split(",") if n) * _BYTES.get(dtype, 4)
    return total


def _collective(line: str, scattered: bool) -> Collective | None:
    """The collective of a line; `scattered`: of an all-reduce whose result is cut up at once only the half is sent."""
    match = _COLLECTIVE.search(line)
    if match is None:
        return None
    found = [(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in _ARRAY.findall(match[1])]
    sized = [(math.prod(shape) * _BYTES.get(dtype, 4), shape) for dtype, shape in found]
    # A collective over several arrays sums over them; the result of `-start` lists operands before results, then scalars.
    # Of one number alone it is that number.
    if match[3] and (arrays := [(size, shape) for size, shape in sized if shape]):
        sized = arrays[len(arrays) // 2 :] if len(arrays) > 1 else arrays
    nbytes = sum(size for size, _ in sized)
    group = _group_size(line)
    if scattered and match[2] == "all-reduce":
        return Collective("reduce-scatter", max(sized)[1], nbytes // group, 1, group)
    return Collective(match[2], max(sized)[1], nbytes, 1, group)


def _group_size(line: str) -> int:
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return listed[1].count(",") + 1
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(iota[1])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    return 2  # a permutation goes to one other device
