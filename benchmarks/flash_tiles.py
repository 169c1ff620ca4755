"""How fast the flash kernels for GPUs are, by the tiles that they work on: forward and backward of one causal row, in bfloat16.

    python -m benchmarks.flash_tiles        # a Hopper GPU with tokamax

A line for each choice of `flash_gpu.sm90`, then `triton`: a call of ten that follow each other. FLOPs are the useful ones, 4 H
forward and 10 H backward for each pair of tokens that see each other. benchmarks/correctness.py says whether they are right.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from benchmarks.side_by_side import compile_all, machine, print_table
from wedlm_jax.errors import UserError, entry
from wedlm_jax.evals.row_cost import Program, in_turns
from wedlm_jax.ops.attention import flash_gpu

# Tiles, stages and warp groups as tokamax tries them, less those that do not fit into shared memory.
FORWARD = ((64, 128, 2), (64, 64, 3), (64, 64, 4), (128, 128, 2), (128, 64, 2), (128, 64, 3))
BACKWARD = ((64, 64, 2, 2), (64, 64, 2, 1), (64, 64, 3, 2), (128, 64, 2, 2), (64, 128, 2, 2), (128, 128, 2, 1))
CALLS = 10


@dataclasses.dataclass(frozen=True)
class Flags:
    length: int = 4096
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    rounds: int = 5


@entry
def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    if jax.default_backend() != "gpu":
        raise UserError(f"the flash kernels run on GPUs, and this is {jax.default_backend()}; run this where one is")
    print_table(
        f"{machine()}; {flags.length} tokens, {flags.heads} heads, {flags.kv_heads} kv heads, H = {flags.head_dim}, bfloat16, "
        f"medians of {flags.rounds}",
        ("", "tiles", "ms", "useful TFLOP/s"),
        rows(flags),
    )


def rows(flags: Flags) -> Iterator[tuple[str, ...]]:
    """Forward, then backward with keys for every head, as `flash_attention` asks for them."""
    heads = flags.heads, flags.kv_heads, flags.kv_heads, flags.heads
    shapes = [(flags.length, n, flags.head_dim) for n in heads]
    q, k, v, d_out = (jax.random.normal(jax.random.key(n), x, jnp.bfloat16) for n, x in enumerate(shapes))
    ranges = jnp.zeros(flags.length, jnp.int32), jnp.arange(1, flags.length + 1, dtype=jnp.int32)

    def forward(kernels: flash_gpu.Kernels) -> Callable[..., Any]:
        return lambda q, k, v: kernels.forward(q, k, v, *ranges)

    def backward(kernels: flash_gpu.Kernels) -> Callable[..., Any]:
        return lambda q, k, v, *rest: kernels.backward(q, k, v, *ranges, *rest)

    triton = {"triton": flash_gpu.triton()}
    choices = {str(tiles): flash_gpu.sm90(forward_tiles=tiles) for tiles in FORWARD} | triton
    yield from timed(flags, "forward", 4, {name: forward(kernels) for name, kernels in choices.items()}, (q, k, v))

    out, lse = jax.jit(forward(flash_gpu.sm90()))(q, k, v)
    k, v = (jnp.repeat(x, flags.heads // flags.kv_heads, axis=1) for x in (k, v))
    choices = {str(tiles): flash_gpu.sm90(backward_tiles=tiles) for tiles in BACKWARD} | triton
    given = q, k, v, lse, out, d_out
    yield from timed(flags, "backward", 10, {name: backward(kernels) for name, kernels in choices.items()}, given)


def timed(
    flags: Flags, direction: str, flops: int, functions: dict[str, Callable[..., Any]], given: tuple[jax.Array, ...]
) -> Iterator[tuple[str, ...]]:
    compiled = compile_all(jax.jit(function).lower(*given) for function in functions.values())
    programs = {
        name: Program(lambda program=program: [program(*given) for _ in range(CALLS)], CALLS)  # type: ignore[misc]
        for name, program in zip(functions, compiled, strict=True)
    }
    useful = flops * flags.heads * flags.head_dim * flags.length * (flags.length + 1) / 2
    for name, seconds in in_turns(programs, flags.rounds).items():
        median = statistics.median(seconds)
        yield direction, name, f"{1e3 * median:.3f}", f"{useful / median / 1e12:.0f}"


if __name__ == "__main__":
    main()
