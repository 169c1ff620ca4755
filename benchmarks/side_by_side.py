"""Programs that take turns, so that what else the machine does meets all of them: median times and compiled memory."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Measured:
    """One program."""

    seconds: float  # the median of the rounds
    processor_seconds: float  # of all cores of the host, likewise: on a CPU it hardly depends on what else runs
    temporaries: int  # bytes, of the compiled program
    arguments: int  # bytes that it is given


def side_by_side(
    programs: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]], rounds: int, carried: Collection[str] = ()
) -> dict[str, Measured]:
    """Compiles and runs `rounds` times, in turns, each function with its arguments.

    Args:
      programs: of each name the function and its arguments.
      rounds: turns. On a CPU every timed run comes right behind one that is not: what a program has freed a virtual machine
        may hand back to its host while others run, and a loop of the program would have kept it.
      carried: names of functions that run as a training loop runs its step: they are given their first argument for good,
        and what they return first takes its place. Of that the caller keeps no more than what other programs are given too.
    """
    given = {name: (0,) if name in carried else () for name in programs}
    lowered = {
        name: jax.jit(function, donate_argnums=given[name]).lower(*args) for name, (function, args) in programs.items()
    }
    compiled = dict(zip(lowered, compile_all(lowered.values()), strict=True))
    holders = collections.Counter(x for _, args in programs.values() for x in set(map(id, jax.tree.leaves(args))))

    def for_good(tree: Any) -> Any:
        """What another program is given too as a copy; else nothing is, for a large model must fit once alone."""
        return jax.tree.map(lambda x: jnp.copy(x) if holders[id(x)] > 1 else x, tree)

    arguments = {name: (for_good(args[0]), *args[1:]) if given[name] else args for name, (_, args) in programs.items()}

    def timed(name: str) -> tuple[float, float]:
        start, processor = time.perf_counter(), time.process_time()
        result = jax.block_until_ready(compiled[name](*arguments[name]))
        seconds = time.perf_counter() - start, time.process_time() - processor
        if given[name]:
            arguments[name] = (result[0], *arguments[name][1:])
        return seconds

    def turn(name: str) -> tuple[float, float]:
        if jax.default_backend() == "cpu":
            timed(name)
        return timed(name)

    for name in programs:
        timed(name)
    seconds = [{name: turn(name) for name in programs} for _ in range(rounds)]
    memory = {name: compiled[name].memory_analysis() for name in programs}
    return {
        name: Measured(
            *(statistics.median(s[name][clock] for s in seconds) for clock in (0, 1)),
            temporaries=memory[name].temp_size_in_bytes,
            arguments=memory[name].argument_size_in_bytes,
        )
        for name in programs
    }


def compile_all(
    lowered: Iterable[jax.stages.Lowered], options: dict[str, Any] | None = None
) -> list[jax.stages.Compiled]:
    """At the same time, as far as the host has cores: for a GPU that is most of the time of a short measurement."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda program: program.compile(options), lowered))


def forward_and_backward(function: Callable[..., Any]) -> Callable[..., Any]:
    """(arguments of `function`, cotangent of its result) -> its result, and the gradients of the arguments."""

    def run(*arguments: Any) -> Any:
        *inputs, cotangent = arguments
        result, pullback = jax.vjp(function, *inputs)
        return result, pullback(cotangent)

    return run


SQUARE_PRODUCTS = 8


def square_products(dtype: str) -> tuple[tuple[Callable[..., Any], tuple[Any, ...]], float]:
    """A program of plain products of square matrices, as large as the device likes them, and its FLOPs."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    x = jax.random.normal(jax.random.key(0), (size, size), dtype) * jnp.asarray(size**-0.5, dtype)

    def run(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, SQUARE_PRODUCTS, lambda _, y: x @ y, x)

    return (run, (x,)), SQUARE_PRODUCTS * 2.0 * size**3


def machine() -> str:
    """Where the figures are from."""
    devices = jax.devices()
    return f"{len(devices)} x {devices[0].device_kind}, {os.cpu_count()} cores of {platform.machine()}, jax {jax.__version__}"


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """In Markdown, each row when it is there; the first column is text, the others are numbers."""
    print(f"{title}\n")
    for cells in itertools.chain((columns, ["---", *["---:"] * (len(columns) - 1)]), rows):
        print(f"| {' | '.join(cells)} |", flush=True)
