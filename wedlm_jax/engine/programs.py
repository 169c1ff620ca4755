"""The engine's compiled programs: open rows, read a cached prefix, prefill behind it, fill a row, run rows, exchange two.

None of them reaches for the host; between them the engine decides which row does what.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from wedlm_jax.decode.config import Drafter, RowSettings
from wedlm_jax.decode.first_drafts import first_drafts
from wedlm_jax.decode.loop import Program, Progress, run_steps
from wedlm_jax.decode.prefill import begin, fill_cache
from wedlm_jax.decode.state import STOPPED, DecodeState
from wedlm_jax.model.kv_cache import AXES, Cache
from wedlm_jax.model.weights import Weights
from wedlm_jax.sharding import axes_over, on_mesh, over_mesh


@functools.partial(jax.jit, static_argnames=("rows", "context", "slots", "cache_slots", "holds_back"))
def open_rows(
    weights: Weights,
    *,
    rows: int,
    context: int,
    slots: int,
    cache_slots: int,
    holds_back: bool,
) -> DecodeState:
    """Finished rows over a fresh cache. Prompt and output of a row have `context` places each, its window `slots`."""
    with weights.transformer() as transformer:
        cache = transformer.empty_cache(rows, cache_slots)
    prompt, finish = jnp.zeros((rows, context), jnp.int32), jnp.full(rows, STOPPED, jnp.int32)
    if weights.mesh is not None:  # no argument that is read says which devices these are
        finish = jax.lax.with_sharding_constraint(finish, NamedSharding(weights.mesh, PartitionSpec()))
    sizes = dict(slots=slots, output_slots=context)
    state = begin(cache, prompt, jnp.ones(rows, jnp.int32), **sizes, holds_back=holds_back)
    return dataclasses.replace(state, finish=finish)


@functools.partial(jax.jit, static_argnames="slots")
def take_rows(cache: Cache, rows: jax.Array, start: jax.Array, *, slots: int) -> Cache:
    """A copy of the first `start` (int [R]) slots of some rows (int [R]) of a cache, in `slots` slots whose rest is zero.

    What a row held behind them has no weight in attention, but zero times a NaN, if it held one, would be a NaN.
    """
    is_kept = jnp.arange(slots) < start[:, None]

    def take(x: jax.Array) -> jax.Array:
        taken = jnp.take(x[:, :, :, :slots], rows, axis=1, mode="clip")
        taken = jnp.pad(taken, ((0, 0), (0, 0), (0, 0), (0, slots - taken.shape[3]), (0, 0)))
        return jnp.where(is_kept[None, :, None, :, None], taken, 0)  # [layers, R, K, slots, H]

    return jax.tree.map(take, cache)


@functools.partial(jax.jit, static_argnames=("chunk", "masks"), donate_argnames="cache")
def prefill_behind(
    weights: Weights,
    cache: Cache,
    prompt: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    own: RowSettings,
    *,
    chunk: int,
    masks: int,
) -> tuple[Cache, jax.Array | None]:
    """Jitted `fill_cache`."""
    with weights.transformer() as transformer:
        return fill_cache(transformer, cache, prompt, start, stop, own, chunk=chunk, masks=masks)


@functools.partial(jax.jit, static_argnames=("holds_back", "drafter"), donate_argnames=("state", "settings"))
def fill_rows(
    weights: Weights,
    state: DecodeState,
    settings: RowSettings,
    rows: jax.Array,
    cache: Cache,
    prompt: jax.Array,
    prompt_length: jax.Array,
    own: RowSettings,
    hidden_BMD: jax.Array | None,
    *,
    holds_back: bool,
    drafter: Drafter | None,
) -> tuple[DecodeState, RowSettings]:
    """Starts R requests, each in a row of its own, in which nothing of an earlier one is left.

    Args:
      state, settings: of all rows.
      rows: int [R], which ones.
      cache: of these R rows alone, their prompts prefilled; it may have fewer slots.
      prompt: int32 [R, context]; `prompt_length` int32 [R].
      own: settings of the R requests.
      hidden_BMD: of the masks that rode in their prefill, B = R.
    """
    sizes = dict(slots=state.window.shape[1], output_slots=state.output.shape[1])
    fresh = begin(cache, prompt, prompt_length, **sizes, holds_back=holds_back)
    with weights.transformer() as transformer:
        fresh = first_drafts(transformer, fresh, own, hidden_BMD, drafter)

    def put(number: jax.Array, held: tuple[Any, Any]) -> tuple[Any, Any]:
        """One request. A row at a time: written together they would make XLA copy the cache."""

        def one_of(all_rows: jax.Array, new: jax.Array) -> jax.Array:
            one = jax.lax.dynamic_index_in_dim(new, number)
            return jax.lax.dynamic_update_slice_in_dim(all_rows, one, rows[number], 0)

        def cached(all_rows: jax.Array, new: jax.Array) -> jax.Array:  # [layers, B, K, S, H]
            """The prompt alone, and zeros behind it as far as the request before has written."""
            row, slots, S = rows[number], new.shape[3], all_rows.shape[3]
            one = jnp.where(jnp.arange(slots)[:, None] < prompt_length[number], one_row(new, number), 0)
            size = math.gcd(S, slots)  # of a block of zeros: none reaches over an end
            zeros = jnp.zeros_like(one[:, :, :, :size])

            def clear(block: jax.Array, all_rows: jax.Array) -> jax.Array:
                return jax.lax.dynamic_update_slice(all_rows, zeros, (0, row, 0, slots + block * size, 0))

            written = others[0].length[row] + state.window.shape[1]
            blocks = jnp.minimum(-(-(written - slots) // size), (S - slots) // size)
            all_rows = jax.lax.dynamic_update_slice(all_rows, one, (0, row, 0, 0, 0))
            return jax.lax.fori_loop(0, blocks, clear, all_rows)

        caches, others = held
        caches = jax.tree.map(cached, caches, fresh.cache)
        return caches, jax.tree.map(one_of, others, (without_cache(fresh), own))

    with on_mesh(weights.mesh):
        held = state.cache, (without_cache(state), settings)
        cache, (state, settings) = jax.lax.fori_loop(0, rows.shape[0], put, held)
    return dataclasses.replace(state, cache=cache), settings


def one_row(x: jax.Array, number: jax.Array) -> jax.Array:
    """One row of an array of a cache: [layers, 1, K, S, H] of [layers, R, K, S, H]. Over a mesh that cuts rows, from the device
    that holds it: XLA would gather all of them."""
    over = axes_over("batch", x.shape[1])

    def of_held(x: jax.Array, number: jax.Array) -> tuple[jax.Array]:
        if not over:
            return (jax.lax.dynamic_slice_in_dim(x, number, 1, axis=1),)
        number -= jax.lax.axis_index(over) * x.shape[1]
        one = jax.lax.dynamic_slice_in_dim(x, number, 1, axis=1)
        return (jax.lax.psum(jnp.where((number >= 0) & (number < x.shape[1]), one, 0), over),)

    return over_mesh(of_held, [AXES, ()], [(None, None, "kv_heads", None, None)], x, number)[0]


@functools.partial(jax.jit, static_argnames=("program", "rows", "steps"), donate_argnames="state")
def run_rows(
    program: Program,
    weights: Weights,
    state: DecodeState,
    settings: RowSettings,
    halted: jax.Array,
    *,
    rows: int,
    steps: int,
) -> tuple[DecodeState, Progress]:
    """`run_steps` of the first `rows` rows; the others, none of which runs, are not computed. Progress is of these rows alone."""
    first, own, halted = jax.tree.map(lambda x: x[:rows], (without_cache(state), settings, halted))
    # The cache goes in whole and is written in place: a forward over fewer rows than it has touches the first of them.
    first, progress = run_steps(
        program, weights, dataclasses.replace(first, cache=state.cache), own, halted, steps=steps
    )
    put_back = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=0, axis=0)
    others = jax.tree.map(put_back, without_cache(state), without_cache(first))
    return dataclasses.replace(others, cache=first.cache), progress


@functools.partial(jax.jit, donate_argnames=("state", "settings"))
def exchange_rows(state: DecodeState, settings: RowSettings, places: jax.Array) -> tuple[DecodeState, RowSettings]:
    """Two rows, `places` int [2], change places, and with them what their caches hold."""

    def exchange(axis: int, x: jax.Array) -> jax.Array:
        """Read in a loop: gathered or scattered together XLA holds both several times on TPU, and a slice that is fused with what
        writes it makes a copy of the whole on a CPU."""
        rows = jax.lax.map(lambda place: jax.lax.dynamic_slice_in_dim(x, place, 1, axis), places)
        for row, place in zip(rows, places[::-1], strict=True):
            x = jax.lax.dynamic_update_slice_in_dim(x, row, place, axis)
        return x

    cache = jax.tree.map(functools.partial(exchange, 1), state.cache)  # [layers, B, K, S, H]
    state, settings = jax.tree.map(functools.partial(exchange, 0), (without_cache(state), settings))
    return dataclasses.replace(state, cache=cache), settings


def without_cache(state: DecodeState) -> DecodeState:
    return dataclasses.replace(state, cache=None)  # type: ignore[arg-type]
