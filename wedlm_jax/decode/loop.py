"""The decode loop: one pure step, run by a jitted `lax.while_loop` or by a Python generator."""

from __future__ import annotations

import functools
from collections.abc import Generator

import jax
import jax.numpy as jnp
from flax import nnx

from wedlm_jax.decode.autoregressive import autoregressive_step
from wedlm_jax.decode.blockwise import blockwise_step
from wedlm_jax.decode.config import Decoder, Refill, RowSettings
from wedlm_jax.decode.prefill import prefill
from wedlm_jax.decode.state import DecodeState, StepRecord
from wedlm_jax.decode.streaming import streaming_step
from wedlm_jax.decode.verified import verified_step
from wedlm_jax.model.transformer import Transformer


def step(
    transformer: Transformer, state: DecodeState, settings: RowSettings, *, decoder: Decoder, refill: Refill
) -> tuple[DecodeState, StepRecord]:
    """One forward of every row, and what the decoder makes of it."""
    if decoder == "streaming":
        return streaming_step(transformer, state, settings, refill=refill)
    other = {"verified": verified_step, "blockwise": blockwise_step, "ar": autoregressive_step}
    return other[decoder](transformer, state, settings)


@functools.partial(jax.jit, static_argnames=("graph", "slots", "output_slots", "holds_back"))
def start(
    graph: nnx.GraphDef,
    params: nnx.State,
    prompt: jax.Array,
    prompt_length: jax.Array,
    *,
    slots: int,
    output_slots: int,
    holds_back: bool,
) -> DecodeState:
    """Jitted `prefill`."""
    transformer = nnx.merge(graph, params)
    return prefill(transformer, prompt, prompt_length, slots=slots, output_slots=output_slots, holds_back=holds_back)


@functools.partial(jax.jit, static_argnames=("graph", "decoder", "refill"), donate_argnames="state")
def run(
    graph: nnx.GraphDef,
    params: nnx.State,
    state: DecodeState,
    settings: RowSettings,
    *,
    decoder: Decoder,
    refill: Refill,
) -> DecodeState:
    """Steps until every row has finished, without the host."""
    transformer = nnx.merge(graph, params)

    def body(state: DecodeState) -> DecodeState:
        return step(transformer, state, settings, decoder=decoder, refill=refill)[0]

    return jax.lax.while_loop(lambda state: jnp.any(state.running), body, state)


@functools.partial(jax.jit, static_argnames=("graph", "decoder", "refill"), donate_argnames="state")
def run_step(
    graph: nnx.GraphDef,
    params: nnx.State,
    state: DecodeState,
    settings: RowSettings,
    *,
    decoder: Decoder,
    refill: Refill,
) -> tuple[DecodeState, StepRecord]:
    """The jitted `step` of the Python loop."""
    return step(nnx.merge(graph, params), state, settings, decoder=decoder, refill=refill)


def run_stepwise(
    graph: nnx.GraphDef,
    params: nnx.State,
    state: DecodeState,
    settings: RowSettings,
    *,
    decoder: Decoder,
    refill: Refill,
) -> Generator[tuple[DecodeState, StepRecord], DecodeState | None, None]:
    """The same loop from Python, one (state, record) a step: for streaming text, traces and debugging.

    A yielded state is given up to the next step: read what you need of it before asking for more. To end rows early, send
    back a state with their `finish` set.
    """
    while bool(jnp.any(state.running)):
        state, record = run_step(graph, params, state, settings, decoder=decoder, refill=refill)
        changed = yield state, record
        if changed is not None:
            state = changed
