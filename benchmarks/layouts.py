"""The same arithmetic written in two ways, as XLA on CPU does it: why norms, attention, projections and what decoding
asks of logits are written as they are.

    python -m benchmarks.layouts

Shapes are those of `benchmarks.train_step`: 2,048 tokens, D = 512, 8 heads of 64, tiles of 256 keys and 512 queries; below them
those of a decoding step: 16 slots, 8,192 tokens of the vocabulary, 12 heads of 64 over 256 slots of the cache, a kernel back from
these heads to D = 768, and eight matrices of 4 MiB, one after the other, on 16 rows and on one token.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.side_by_side import machine, print_table, side_by_side
from wedlm_jax.errors import entry
from wedlm_jax.ops.attention import dense
from wedlm_jax.ops.categorical import likeliest
from wedlm_jax.ops.rows_by_matrix import rows_by_matrix

TIMES = 20  # in a loop, so that a call's own time does not count
ROUNDS = 7


@entry
def main() -> None:
    heads, out = _random((1, 2048, 8, 64), (1, 2048, 8, 64))
    (x,) = _random((1, 2048, 512))
    scores, queries = _random((4, 512, 256), (4, 512, 64))
    keys, window = _random((1, 256, 12, 64), (1, 12, 16, 64))
    logits, rows, head = _random((16, 8192), (16, 512), (8192, 512))
    kernel, attended, token, stack = _random((12, 64, 768), (16, 12, 64), (1, 1024), (8, 1024, 1024))
    (slots,) = _random((16, 1024))
    pairs: dict[str, tuple[tuple[Any, Any], tuple[jax.Array, Any]]] = {
        "sum of products over the last of four axes: `sum`, `vecdot`": (
            (lambda a, b: jnp.sum(a * b, axis=-1), lambda a, b: jnp.vecdot(a, b)), (heads, out),
        ),
        "gradient of a kernel [D, N, H], summed over: batch and length, one axis of tokens": (
            (
                lambda a, b: jnp.einsum("BLD,BLNH->DNH", _silu(a), _silu(b)),
                lambda a, b: jnp.einsum("TD,TNH->DNH", _silu(a[0]), _silu(b[0])),
            ),
            (x, out),
        ),
        "scores by queries, summed over queries: queries first, keys first": (
            (lambda a, b: jnp.einsum("KRC,KRH->KCH", a, b), lambda a, b: jnp.einsum("KCR,KRH->KCH", a.reshape(4, 256, 512), b)),
            (scores, queries),
        ),
        "scores of a window over a cache: slots first, heads first": (
            (
                lambda a, b: jnp.einsum("BKRH,BSKH->BKRS", b, a),
                lambda a, b: jnp.einsum("BKRH,BKSH->BKRS", b, a.swapaxes(1, 2)),
            ),
            (keys, window),
        ),
        "scores of a window's few queries: queries first, keys first": (
            (
                lambda a, b: jnp.einsum("BKRH,BKSH->BKRS", b, a.reshape(1, 12, 256, 64)),
                lambda a, b: dense.scores(b, a.reshape(1, 12, 256, 64)),
            ),
            (keys, window),
        ),
        "logits: rows by matrix, matrix by rows": (
            (lambda a, b: jnp.einsum("RD,VD->RV", a, b), rows_by_matrix), (rows, head),
        ),
        "products with a kernel [N, H, D]: `einsum`, `tensordot`": (
            (lambda a, b: jnp.einsum("TNH,NHD->TD", b, a), lambda a, b: jnp.tensordot(b, a, axes=2)), (kernel, attended),
        ),
        "16 rows by eight matrices: inputs by outputs, turned": (
            (
                lambda a, b: functools.reduce(jnp.matmul, b[0], a),
                lambda a, b: functools.reduce(rows_by_matrix, b[1], a),
            ),
            (slots, (tuple(stack), tuple(matrix.T for matrix in stack))),
        ),
        "eight matrices: a scan over their stack, each by itself": (
            (
                lambda a, b: jax.lax.scan(lambda x, matrix: (x @ matrix, None), a, b[0])[0],
                lambda a, b: functools.reduce(jnp.matmul, b[1], a),
            ),
            (token, (stack, tuple(stack))),
        ),
        "likeliest token: `argmax`, maxima of blocks first": (
            (lambda a, b: jnp.argmax(a, axis=-1), lambda a, b: likeliest(a)), (logits, logits),
        ),
    }  # fmt: skip
    programs = {
        f"{name}|{which}": (_repeated(function), arguments)
        for name, (functions, arguments) in pairs.items()
        for which, function in zip(("first", "second"), functions, strict=True)
    }
    measured = side_by_side(programs, ROUNDS)
    rows = []
    for name in pairs:
        first, second = (measured[f"{name}|{which}"].processor_seconds for which in ("first", "second"))
        rows.append((name, f"{1e3 * first / TIMES:.2f}", f"{1e3 * second / TIMES:.2f}", f"{first / second:.1f}"))
    print_table(
        f"{machine()}; float32, processor time, medians of {ROUNDS}", ("", "first, ms", "second, ms", "ratio"), rows
    )


def _repeated(function: Any) -> Any:
    """Each turn's input depends on the turn before, so that none is left out."""

    def run(a: jax.Array, b: Any) -> jax.Array:
        def turn(_: Any, carry: jax.Array) -> jax.Array:
            return 1e-9 * jnp.ravel(function(a + carry, b))[0]

        return jax.lax.fori_loop(0, TIMES, turn, jnp.float32(0))

    return run


def _random(*shapes: tuple[int, ...]) -> list[jax.Array]:
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


def _silu(x: jax.Array) -> jax.Array:
    """As in training, where what meets in the product comes from elementwise work that XLA fuses with its copies."""
    return x * jax.nn.sigmoid(x)


if __name__ == "__main__":
    main()
