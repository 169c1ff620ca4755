"""What the dual stream costs, beside one causal attention and a dense mask: forward and backward, time and memory.

    python -m benchmarks.attention                                              # L = 1024 and 2048
    python -m benchmarks.attention --lengths 4096 8192 16384 32768 --heads 1 --kv-heads 1 --head-dim 16 --no-dense --rounds 3

One row of 2L tokens, both streams. `causal` is one causal attention over L tokens by the same implementation; `dense` is
softmax over the whole [2L, 2L] mask by XLA's `jax.nn.dot_product_attention`. FLOPs are the useful ones, 12 H for each pair of
tokens that see each other: where their rate does not fall with L, time is quadratic with the constant of the arithmetic. The
second command shows that, and that memory is linear.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from benchmarks.side_by_side import forward_and_backward, machine, print_table, side_by_side
from wedlm_jax.diffusion.dual_stream import visibility
from wedlm_jax.errors import entry
from wedlm_jax.model.patterns import Causal, DualStream


@dataclasses.dataclass(frozen=True)
class Flags:
    lengths: tuple[int, ...] = (1024, 2048)
    """L: tokens of a row."""
    documents: int = 1
    """Of equal length, in each row."""
    block_size: int = 32
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    dtype: str = "float32"
    implementation: str = "auto"
    dense: bool = True
    """Also the dense mask, which takes gigabytes."""
    rounds: int = 7


@entry
def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    print_table(
        f"{machine()}; {flags.heads} heads, {flags.kv_heads} kv heads, H = {flags.head_dim}, blocks of {flags.block_size}, "
        f"{flags.documents} documents, {flags.dtype}, {flags.implementation}, medians of {flags.rounds}",
        ("L", "", "forward and backward, ms", "processor, ms", "of one causal", "useful GFLOP/s", "temporaries, MiB"),
        (row for length in flags.lengths for row in rows(flags, length)),
    )


def rows(flags: Flags, length: int) -> list[tuple[str, ...]]:
    segment_ids = 1 + jnp.arange(length)[None] * flags.documents // length
    dual = DualStream(segment_ids, flags.block_size)
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (flags.heads, flags.kv_heads, flags.kv_heads, flags.heads)
    both = [
        jax.random.normal(k, (1, 2 * length, n, flags.head_dim), flags.dtype) for k, n in zip(keys, heads, strict=True)
    ]
    one = tuple(x[:, :length] for x in both)

    def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        visible = visibility(segment_ids, block_size=flags.block_size)
        return jax.nn.dot_product_attention(q, k, v, mask=visible[:, None])

    by: Any = flags.implementation
    programs: dict[str, Any] = {
        "causal": (forward_and_backward(lambda q, k, v: Causal(segment_ids)(q, k, v, by)), one),
        "dual stream": (forward_and_backward(lambda q, k, v: dual(q, k, v, by)), tuple(both)),
    }
    if flags.dense:
        programs["dense"] = forward_and_backward(dense), tuple(both)
    measured = side_by_side(programs, flags.rounds)
    of_a_stream = flags.documents * sum(range(1, length // flags.documents + 1))
    useful = {name: 12 * flags.head_dim * flags.heads * of_a_stream * (2 - (name == "causal")) for name in programs}
    return [
        (
            f"{length:,}",
            name,
            f"{1e3 * m.seconds:.1f}",
            f"{1e3 * m.processor_seconds:.1f}",
            f"{m.seconds / measured['causal'].seconds:.2f}",
            f"{useful[name] / m.seconds / 1e9:,.1f}",
            f"{m.temporaries / 2**20:.1f}",
        )
        for name, m in measured.items()
    ]


if __name__ == "__main__":
    main()
