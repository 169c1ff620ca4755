"""What the losses cost, forward and backward, when half of the rows carry one: time and compiled temporary memory.

    python -m benchmarks.loss                                                   # the shape of the CPU training step
    python -m benchmarks.loss --rows 1024 --width 64 --vocab-size 151936        # the vocabulary of Qwen

The forms take turns, and medians over the rounds are printed: all logits of all rows at once; all rows in chunks that are
computed again in the backward pass; `ops.cross_entropy`. Beside them the floor of a form that keeps no logits: four products
of [rows with a loss, D] with [D, V], each a program of its own with its operands there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from benchmarks.side_by_side import forward_and_backward, machine, print_table, side_by_side
from wedlm_jax.errors import entry
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


PRODUCTS = {"CD,VD->CV": 2, "CV,VD->CD": 1, "CV,CD->VD": 1}  # the logits twice, and the two gradients


@entry
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
    d_losses_T = jax.random.uniform(next(keys), (T,))

    def form(losses: Callable[..., jax.Array]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        with_rows = lambda hidden_TD, head_VD: losses(hidden_TD, head_VD, targets_T, carries_T)  # noqa: E731
        return forward_and_backward(with_rows), (hidden_TD, head_VD, d_losses_T)

    forms = {"all logits at once": all_at_once, "checkpointed chunks": checkpointed, "ops.cross_entropy": cross_entropy}
    programs: dict[str, Any] = {name: form(losses) for name, losses in forms.items()}
    sides = {"CD": hidden_TD[:count], "VD": head_VD, "CV": jax.random.normal(next(keys), (count, V), flags.dtype)}
    for equation in PRODUCTS:
        product = functools.partial(jnp.einsum, equation, preferred_element_type=jnp.float32)
        programs[equation] = product, tuple(sides[name] for name in equation.partition("->")[0].split(","))
    measured = side_by_side(programs, flags.rounds)
    floor = sum(times * measured[equation].seconds for equation, times in PRODUCTS.items())

    table = [
        (name, f"{1e3 * m.seconds:.0f}", f"{m.seconds / floor:.2f}", f"{m.temporaries / 2**20:.0f}")
        for name, m in measured.items()
        if name in forms
    ]
    print_table(
        f"T = {T}, {count} with a loss, D = {D}, V = {V}, {flags.dtype}; {machine()}; medians of {flags.rounds}",
        ("", "ms", "of the floor", "temporary memory, MiB"),
        [*table, ("floor: four products", f"{1e3 * floor:.0f}", "1.00", "")],
    )


if __name__ == "__main__":
    main()
