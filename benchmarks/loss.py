"""What the losses cost, forward and backward, when half of the rows carry one: time and compiled temporary memory.

    python -m benchmarks.loss                                                   # the shape of the CPU training step
    python -m benchmarks.loss --rows 1024 --width 64 --vocab-size 151936        # the vocabulary of Qwen

The forms take turns, and medians over the rounds are printed: all logits of all rows at once; all rows in chunks that are
computed again in the backward pass; `ops.cross_entropy`. Beside them the floor of a form that keeps no logits: four products
of [rows with a loss, D] with [D, V], each a program of its own with its operands there.
"""

from __future__ import annotations

import dataclasses
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from wedlm_jax.ops.cross_entropy import cross_entropy

CHUNK = 512  # rows


@dataclasses.dataclass(frozen=True)
class Flags:
    rows: int = 2048
    """T: rows of both streams."""
    width: int = 512
    """D."""
    vocab_size: int = 8192
    """V."""
    share: float = 0.5
    """Of the rows, those that carry a loss."""
    dtype: str = "float32"
    rounds: int = 7


def all_at_once(hidden_TD: jax.Array, head_VD: jax.Array, targets_T: jax.Array, carries_T: jax.Array) -> jax.Array:
    logits_TV = jnp.einsum("TD,VD->TV", hidden_TD, head_VD, preferred_element_type=jnp.float32)
    picked_T = jnp.take_along_axis(logits_TV, targets_T[:, None], axis=1)[:, 0]
    return jnp.where(carries_T, jax.nn.logsumexp(logits_TV, axis=1) - picked_T, 0.0)


def checkpointed(hidden_TD: jax.Array, head_VD: jax.Array, targets_T: jax.Array, carries_T: jax.Array) -> jax.Array:
    def chunk(rows: tuple[jax.Array, ...]) -> jax.Array:
        hidden_CD, targets_C, carries_C = rows
        return all_at_once(hidden_CD, head_VD, targets_C, carries_C)

    rows = [x.reshape(-1, CHUNK, *x.shape[1:]) for x in (hidden_TD, targets_T, carries_T)]
    return jax.lax.map(jax.checkpoint(chunk, prevent_cse=False), tuple(rows)).reshape(-1)


def forward_and_backward(losses: Callable[..., jax.Array]) -> Callable[..., Any]:
    def run(hidden_TD, head_VD, targets_T, carries_T, d_losses_T):
        value, pullback = jax.vjp(lambda h, w: losses(h, w, targets_T, carries_T), hidden_TD, head_VD)
        return value, pullback(d_losses_T)

    return run


PRODUCTS = {"CD,VD->CV": 2, "CV,VD->CD": 1, "CV,CD->VD": 1}  # the logits twice, and the two gradients


def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    T, D, V = flags.rows, flags.width, flags.vocab_size
    assert T % CHUNK == 0, f"--rows must be a multiple of {CHUNK}"
    keys = iter(jax.random.split(jax.random.key(0), 6))
    hidden_TD = jax.random.normal(next(keys), (T, D), flags.dtype)
    head_VD = jax.random.normal(next(keys), (V, D), flags.dtype) * jnp.asarray(D**-0.5, flags.dtype)
    targets_T = jax.random.randint(next(keys), (T,), 0, V)
    count = round(flags.share * T)
    carries_T = jax.random.permutation(next(keys), jnp.arange(T) < count)
    operands = hidden_TD, head_VD, targets_T, carries_T, jax.random.uniform(next(keys), (T,))

    forms = {"all logits at once": all_at_once, "checkpointed chunks": checkpointed, "ops.cross_entropy": cross_entropy}
    compiled = {name: jax.jit(forward_and_backward(form)).lower(*operands).compile() for name, form in forms.items()}
    runs: dict[str, Callable[[], Any]] = {name: lambda one=one: one(*operands) for name, one in compiled.items()}  # type: ignore[misc]

    sides = {"CD": hidden_TD[:count], "VD": head_VD, "CV": jax.random.normal(next(keys), (count, V), flags.dtype)}
    for equation, times in PRODUCTS.items():
        left, right = (sides[name] for name in equation.partition("->")[0].split(","))
        product = jax.jit(
            lambda a, b, equation=equation: jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
        )
        for number in range(times):
            runs[f"{equation} {number}"] = lambda product=product, a=left, b=right: product(a, b)  # type: ignore[misc]

    times_of: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(flags.rounds + 1):
        for name, run in runs.items():
            begun = time.perf_counter()
            jax.block_until_ready(run())
            if number:  # the first warms up
                times_of[name].append(time.perf_counter() - begun)
    medians = {name: statistics.median(times) for name, times in times_of.items()}
    floor = sum(seconds for name, seconds in medians.items() if name not in forms)

    device = f"{jax.devices()[0].device_kind}, {platform.machine()}, jax {jax.__version__}"
    print(f"T = {T}, {count} with a loss, D = {D}, V = {V}, {flags.dtype}; {device}; medians of {flags.rounds}\n")
    print("| | ms | of the floor | temporary memory, MiB |\n|---|---|---|---|")
    for name in forms:
        memory = compiled[name].memory_analysis().temp_size_in_bytes / 2**20
        print(f"| {name} | {1e3 * medians[name]:.0f} | {medians[name] / floor:.2f} | {memory:.0f} |")
    print(f"| floor: four products | {1e3 * floor:.0f} | 1.00 | |")


if __name__ == "__main__":
    main()
