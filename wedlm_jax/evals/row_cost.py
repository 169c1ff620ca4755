"""What a decode forward over several slots costs: against one over one token, and against the plain products of as many rows.

The first ratio bounds what parallel decoding gains in wall-clock: tokens per forward over it. The others are what the forward
adds to the arithmetic that it cannot do without: with the model's matrices, and with those and attention's.
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
from flax import nnx

from wedlm_jax.errors import UserError
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.kv_cache import Cache
from wedlm_jax.model.layers import Layer, products_of
from wedlm_jax.model.parameters import transformer_from
from wedlm_jax.model.patterns import CachedWindow
from wedlm_jax.model.weights import Weights

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Program:
    """What is timed: a call that runs so many forwards, in a loop on the device."""

    call: Callable[[], Any]
    forwards: int = 1


def forwards_of_a_call(params: Params) -> int:
    """So many that the call itself, a fifth of a millisecond on a CPU, is next to nothing beside them, and so is what the first
    one waits for weights that the program before has driven out of the processor's caches. More than 4,096 are too many: the
    call is a hundredth of them even where the model is tiny."""
    return min(4096, max(32, 2**28 // sum(x.size for x in params.values())))


@dataclasses.dataclass(frozen=True)
class RowCost:
    """Medians over rounds in which all programs take turns."""

    slots: int  # of a row
    seconds: float  # of a forward over so many
    over_one: float  # of that, against one token
    over_products: float  # against the plain products of as many vectors with the model's matrices
    over_all_products: float  # against these and those of their queries with the keys and values in use


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
        programs["forward", width] = forward_program(
            config, params, rows=rows, slots=width, context=context, allocated=allocated
        )
        programs["products", width] = product_program(config, params, rows, width)
        programs["all products", width] = product_program(config, params, rows, width, context + width)
    seconds = in_turns(programs, rounds)
    return [
        RowCost(
            width,
            statistics.median(seconds["forward", width]),
            median_ratio(seconds["forward", width], seconds["forward", 1]),
            median_ratio(seconds["forward", width], seconds["products", width]),
            median_ratio(seconds["forward", width], seconds["all products", width]),
        )
        for width in slots
    ]


def product_seconds(config: ModelConfig, params: Params, rows: int, rounds: int) -> float:
    """The median time of the plain products of one forward."""
    return statistics.median(in_turns({"": product_program(config, params, rows)}, rounds)[""])


def forward_program(
    config: ModelConfig, params: Params, *, rows: int, slots: int, context: int, allocated: int, masks: int = 0,
    turns: bool = True, weights: Weights | None = None,
) -> Program:  # fmt: skip
    """Again and again a window behind a cache and the logits of all its slots, each fed what the one before says.

    Args:
      masks: how many slots at the end of a row are masks. An adapter of mask rows runs on these alone; with 0 it does not run.
      turns: with kernels turned where decoding turns them; False: as they were trained.
      weights: these parameters as decoding holds them already; None: laid out anew.

    Raises:
      UserError: the cache does not hold the window, which would be written over what is in use.
    """
    if context + slots > allocated:
        raise UserError(
            f"{slots} slots behind {context} used ones do not fit into a cache of {allocated}; take fewer, or a longer cache"
        )
    weights = weights or Weights.of(transformer_from(config, params), rows * slots if turns else 1)
    forwards = forwards_of_a_call(params)

    @functools.partial(jax.jit, donate_argnames="cache")
    def run(
        weights: Weights, tokens_BT: jax.Array, masked_BT: jax.Array | None, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        length = jnp.full(rows, context)
        positions_BT = length[:, None] + jnp.arange(slots)
        with weights.transformer() as transformer:

            def forward(_: Any, carry: tuple[jax.Array, Cache]) -> tuple[jax.Array, Cache]:
                tokens_BT, cache = carry
                window = CachedWindow(length)
                hidden, cache = transformer.hidden(
                    tokens_BT, positions=positions_BT, pattern=window, masked=masked_BT, cache=cache
                )
                logits = transformer.logits(hidden)
                return jnp.abs(logits.sum(axis=-1)).astype(jnp.int32) % config.vocab_size, cache

            return jax.lax.fori_loop(0, forwards, forward, (tokens_BT, cache))

    held = [_empty_cache(weights, rows=rows, slots=allocated)]
    tokens_BT = jnp.ones((rows, slots), jnp.int32)
    # An array that the program is given: as a constant it would be worked into the program.
    masked_BT = jnp.broadcast_to(jnp.arange(slots) >= slots - masks, (rows, slots)) if masks else None

    def call() -> jax.Array:
        # Given away, as in a decode loop: else it would be copied.
        said, held[0] = run(weights, tokens_BT, masked_BT, held[0])
        return said

    return Program(call, forwards)


def product_program(config: ModelConfig, params: Params, rows: int, slots: int = 1, context: int = 0) -> Program:
    """Again and again the products of `rows * slots` vectors with every matrix of the model, as decoding lays it out for so many,
    and sums that link one to the next.

    Args:
      context: if any, also those of each row's queries with so many cached keys and values.
    """
    weights, forwards = Weights.of(transformer_from(config, params), rows * slots), forwards_of_a_call(params)

    def layer(x_RD: jax.Array, of_layer: Layer, k_BKCH: jax.Array, v_BKCH: jax.Array) -> jax.Array:
        attention, mlp = of_layer.attention, of_layer.mlp
        mixed, k, v = products_of([attention.q_proj, attention.k_proj, attention.v_proj], x_RD)
        if context:  # which query is whose changes nothing of the time
            scores = jnp.einsum(
                "BKRH,BKCH->BKRC", mixed.reshape(rows, config.num_kv_heads, -1, config.head_dim), k_BKCH
            )
            mixed = jnp.einsum("BKRC,BKCH->BKRH", scores, v_BKCH).reshape(mixed.shape)
        x_RD = x_RD + attention.o_proj.product(mixed) + jnp.mean(k + v, axis=(1, 2))[:, None]
        gate, up = products_of([mlp.gate_proj, mlp.up_proj], x_RD)
        return x_RD + mlp.down_proj.product(gate + up)

    @jax.jit
    def run(weights: Weights, x_RD: jax.Array, cache: Cache) -> jax.Array:
        with weights.transformer() as transformer, jax.default_matmul_precision(config.precision):

            def products(_: Any, x_RD: jax.Array) -> jax.Array:
                y_RD = x_RD
                if isinstance(cache, tuple):
                    assert isinstance(transformer.layers, nnx.List)
                    for of_layer, cached in zip(transformer.layers, cache, strict=True):
                        y_RD = layer(y_RD, of_layer, cached.k[0], cached.v[0])
                else:
                    graph, stacked = transformer.split_stack()
                    y_RD, _ = jax.lax.scan(
                        lambda y_RD, xs: (layer(y_RD, nnx.merge(graph, xs[0]), *xs[1:]), None),
                        y_RD,
                        (stacked, cache.k, cache.v),
                    )
                return x_RD + 1e-6 * jnp.mean(transformer.logits(y_RD), axis=-1, keepdims=True)

            return jax.lax.fori_loop(0, forwards, products, x_RD)

    x_RD = jnp.full((rows * slots, config.hidden_size), 1e-3, config.dtype)
    cache = _empty_cache(weights, rows=rows, slots=context)
    return Program(lambda: run(weights, x_RD, cache), forwards)


@functools.partial(jax.jit, static_argnames=("rows", "slots"))
def _empty_cache(weights: Weights, *, rows: int, slots: int) -> Cache:
    with weights.transformer() as transformer:
        return transformer.empty_cache(rows, slots)


def in_turns(
    programs: Mapping[Any, Program], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[Any, list[float]]:
    """Seconds a forward in `rounds` calls of each, one after the other in every round, after a call that compiles."""
    for program in programs.values():
        jax.block_until_ready(program.call())
    seconds: dict[Any, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            start = clock()
            jax.block_until_ready(program.call())
            seconds[name].append((clock() - start) / program.forwards)
    return seconds


def median_ratio(seconds: Sequence[float], against: Sequence[float]) -> float:
    """The median of the ratios within each round: what else the machine did then met both."""
    return statistics.median(a / b for a, b in zip(seconds, against, strict=True))
