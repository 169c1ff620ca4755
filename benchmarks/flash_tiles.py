"""How fast the flash kernels for GPUs are, by the tiles that they work on: forward and backward of one causal row, in bfloat16.

    python -m benchmarks.flash_tiles        # a Hopper GPU with tokamax

A line for each choice of `flash_gpu.sm90`, then `triton`; the fastest of three times ten calls. FLOPs are the useful ones, 4 H
forward and 10 H backward for each pair of tokens that see each other. The difference is that of the result (forward), or of the
gradient of the queries, from the first line's.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from benchmarks.side_by_side import compile_all, machine, print_table
from wedlm_jax.errors import UserError, entry
from wedlm_jax.ops.attention import flash_gpu

# Tiles, stages and warp groups as tokamax tries them, less those that do not fit into shared memory.
FORWARD = ((64, 128, 2), (64, 64, 3), (64, 64, 4), (128, 128, 2), (128, 64, 2), (128, 64, 3))
BACKWARD = ((64, 64, 2, 2), (64, 64, 2, 1), (64, 64, 3, 2), (128, 64, 2, 2), (64, 128, 2, 2), (128, 128, 2, 1))


@dataclasses.dataclass(frozen=True)
class Flags:
    length: int = 4096
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128


@entry
def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    if jax.default_backend() != "gpu":
        raise UserError(f"the flash kernels run on GPUs, and this is {jax.default_backend()}; run this where one is")
    print_table(
        f"{machine()}; {flags.length} tokens, {flags.heads} heads, {flags.kv_heads} kv heads, H = {flags.head_dim}, bfloat16",
        ("", "tiles", "ms", "useful TFLOP/s", "difference"),
        (row for direction in (forward, backward) for row in rows(flags, *direction(flags))),
    )


def arrays(flags: Flags) -> list[jax.Array]:
    """q, k, v and the cotangent of the output."""
    heads = flags.heads, flags.kv_heads, flags.kv_heads, flags.heads
    shapes = [(flags.length, n, flags.head_dim) for n in heads]
    return [jax.random.normal(jax.random.key(n), shape, jnp.bfloat16) for n, shape in enumerate(shapes)]


def ranges(flags: Flags) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros(flags.length, jnp.int32), jnp.arange(1, flags.length + 1, dtype=jnp.int32)


def of_kernels(direction: str) -> dict[str, flash_gpu.Kernels]:
    if direction == "forward":
        kernels = {str(tiles): flash_gpu.sm90(forward_tiles=tiles) for tiles in FORWARD}
    else:
        kernels = {str(tiles): flash_gpu.sm90(backward_tiles=tiles) for tiles in BACKWARD}
    return kernels | {"triton": flash_gpu.triton()}


def forward(flags: Flags) -> tuple[str, dict[str, Callable[..., Any]], list[jax.Array], float]:
    def of(kernels: flash_gpu.Kernels) -> Callable[..., Any]:
        return lambda q, k, v: kernels.forward(q, k, v, *ranges(flags), causal=True)

    return "forward", {name: of(k) for name, k in of_kernels("forward").items()}, arrays(flags)[:3], 4


def backward(flags: Flags) -> tuple[str, dict[str, Callable[..., Any]], list[jax.Array], float]:
    """With keys for every head, as `flash_attention` asks for them."""
    q, k, v, d_out = arrays(flags)
    out, lse = jax.jit(lambda q, k, v: flash_gpu.sm90().forward(q, k, v, *ranges(flags), causal=True))(q, k, v)

    def of(kernels: flash_gpu.Kernels) -> Callable[..., Any]:
        return lambda q, k, v, *rest: kernels.backward(q, k, v, *ranges(flags), *rest, causal=True)

    k, v = (jnp.repeat(x, flags.heads // flags.kv_heads, axis=1) for x in (k, v))
    return "backward", {name: of(x) for name, x in of_kernels("backward").items()}, [q, k, v, lse, out, d_out], 10


def rows(
    flags: Flags, direction: str, programs: dict[str, Callable[..., Any]], given: list[jax.Array], flops: float
) -> Iterator[tuple[str, ...]]:
    compiled = compile_all(jax.jit(program).lower(*given) for program in programs.values())
    useful = flops * flags.heads * flags.head_dim * flags.length * (flags.length + 1) / 2
    first = None
    for name, program in zip(programs, compiled, strict=True):
        found = program(*given)[0].astype(jnp.float32)
        first = found if first is None else first
        seconds = min(timed(program, given) for _ in range(3))
        difference = float(jnp.linalg.norm(found - first) / jnp.linalg.norm(first))
        yield direction, name, f"{1e3 * seconds:.3f}", f"{useful / seconds / 1e12:.0f}", f"{difference:.4f}"


def timed(program: jax.stages.Compiled, given: list[jax.Array], calls: int = 10) -> float:
    """Seconds a call, of several that follow each other."""
    start = time.perf_counter()
    for _ in range(calls):
        result = program(*given)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


if __name__ == "__main__":
    main()
