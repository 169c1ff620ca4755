"""What a decode forward over several slots costs: against one over one token, and against the plain products of as many rows.

The first ratio bounds what parallel decoding gains in wall-clock: tokens per forward over it. The second is what the forward
adds to the arithmetic that it cannot do without.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.parameters import transformer_from
from wedlm_jax.model.patterns import CachedWindow
from wedlm_jax.ops.output_layer import output_logits

FORWARDS = 4  # of a call, in a loop on the device
Program = Callable[[], Any]
Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class RowCost:
    """Medians over rounds in which all programs take turns."""

    slots: int  # of a row
    seconds: float  # of a forward over so many
    over_one: float  # of that, against one token
    over_products: float  # against the plain products of as many rows


def row_costs(
    config: ModelConfig, params: Params, *, slots: Sequence[int], rows: int, context: int, allocated: int, rounds: int
) -> list[RowCost]:
    """The curve of one model.

    Args:
      slots: window slots of a row, 1 among them or not.
      rows: B.
      context: cache slots in use.
      allocated: cache slots that there are.
      rounds: timed calls of each program, after one that compiles.
    """
    widths = sorted({1, *slots})
    programs: dict[tuple[str, int], Program] = {}
    for width in widths:
        shape = dict(rows=rows, slots=width, context=context, allocated=allocated)
        programs["forward", width] = forward_program(config, params, **shape)
        programs["products", width] = product_program(config, params, rows * width)
    seconds = in_turns(programs, rounds)
    return [
        RowCost(
            width,
            statistics.median(seconds["forward", width]) / FORWARDS,
            median_ratio(seconds["forward", width], seconds["forward", 1]),
            median_ratio(seconds["forward", width], seconds["products", width]),
        )
        for width in slots
    ]


def product_seconds(config: ModelConfig, params: Params, rows: int, rounds: int) -> float:
    """The median time of the plain products of one forward."""
    return statistics.median(in_turns({"": product_program(config, params, rows)}, rounds)[""]) / FORWARDS


def forward_program(
    config: ModelConfig, params: Params, *, rows: int, slots: int, context: int, allocated: int, masks: int = 0
) -> Program:
    """FORWARDS times a window behind a cache and the logits of all its slots, each fed what the one before says.

    Args:
      masks: of the slots of a row, its last ones; an adapter of mask rows has a part in these alone, and without any in nothing.
    """

    @functools.partial(jax.jit, donate_argnames="cache")
    def run(
        params: Params, tokens_BT: jax.Array, masked_BT: jax.Array | None, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        transformer = transformer_from(config, params)
        length = jnp.full(rows, context)
        positions_BT = length[:, None] + jnp.arange(slots)

        def forward(_: Any, carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
            tokens_BT, cache = carry
            window = CachedWindow(length)
            hidden, cache = transformer.hidden(
                tokens_BT, positions=positions_BT, pattern=window, masked=masked_BT, cache=cache
            )
            logits = transformer.logits(hidden)
            return jnp.abs(logits.sum(axis=-1)).astype(jnp.int32) % config.vocab_size, cache

        return jax.lax.fori_loop(0, FORWARDS, forward, (tokens_BT, cache))

    tokens_BT, held = jnp.ones((rows, slots), jnp.int32), [KVCache.zeros(config, rows, allocated)]
    # An array that the program is given: as a constant it would be worked into the program.
    masked_BT = jnp.broadcast_to(jnp.arange(slots) >= slots - masks, (rows, slots)) if masks else None

    def call() -> jax.Array:
        said, held[0] = run(
            params, tokens_BT, masked_BT, held[0]
        )  # given away, as in a decode loop: else it would be copied
        return said

    return call


def product_program(config: ModelConfig, params: Params, rows: int) -> Program:
    """FORWARDS times the products of `rows` vectors with every matrix of the model, and sums that link one to the next."""
    D = config.hidden_size
    head = "embed.embedding" if config.tie_word_embeddings else "lm_head.kernel"
    names = [f"layers.attention.{name}_proj.kernel" for name in "qkvo"]
    names += [f"layers.mlp.{name}_proj.kernel" for name in ("gate", "up", "down")]

    @jax.jit
    def run(params: Params, x_RD: jax.Array) -> jax.Array:
        q, k, v, o, gate, up, down = (params[name].astype(config.dtype) for name in names)
        q, k, v = (w.reshape(w.shape[0], D, -1) for w in (q, k, v))
        o = o.reshape(o.shape[0], -1, D)

        def layer(x_RD: jax.Array, of_layer: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            q, k, v, o, gate, up, down = of_layer
            x_RD = x_RD + (x_RD @ q) @ o + jnp.mean(x_RD @ k + x_RD @ v, axis=-1, keepdims=True)
            return x_RD + (x_RD @ gate + x_RD @ up) @ down, None

        def products(_: Any, x_RD: jax.Array) -> jax.Array:
            y_RD, _ = jax.lax.scan(layer, x_RD, (q, k, v, o, gate, up, down))
            logits = output_logits(y_RD, params[head].astype(config.dtype))
            return x_RD + 1e-6 * jnp.mean(logits, axis=-1, keepdims=True)

        with jax.default_matmul_precision(config.matmul_precision):
            return jax.lax.fori_loop(0, FORWARDS, products, x_RD)

    x_RD = jnp.full((rows, D), 1e-3, config.dtype)
    return lambda: run(params, x_RD)


def in_turns(
    programs: Mapping[Any, Program], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[Any, list[float]]:
    """Seconds of `rounds` calls of each, one after the other in every round, after a call that compiles."""
    for program in programs.values():
        jax.block_until_ready(program())
    seconds: dict[Any, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            start = clock()
            jax.block_until_ready(program())
            seconds[name].append(clock() - start)
    return seconds


def median_ratio(seconds: Sequence[float], against: Sequence[float]) -> float:
    """Of each round: what else the machine did met both."""
    return statistics.median(a / b for a, b in zip(seconds, against, strict=True))
