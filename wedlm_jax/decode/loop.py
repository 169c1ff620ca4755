"""The decode loop: one pure step, run by a jitted `lax.while_loop` or by a Python generator."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Generator

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from wedlm_jax.decode.autoregressive import autoregressive_step
from wedlm_jax.decode.blockwise import blockwise_step
from wedlm_jax.decode.config import DecodeConfig, Decoder, Drafter, Refill, RowSettings, Verify
from wedlm_jax.decode.fallback import fallback_step
from wedlm_jax.decode.lookup import lookup_step
from wedlm_jax.decode.prefill import prefill
from wedlm_jax.decode.state import DecodeState, StepRecord
from wedlm_jax.decode.streaming import streaming_step
from wedlm_jax.decode.verified import verified_step
from wedlm_jax.model.transformer import Transformer
from wedlm_jax.sharding import on_mesh


@dataclasses.dataclass(frozen=True)
class Program:
    """What a loop is compiled for, beside the shapes of its arrays."""

    graph: nnx.GraphDef  # of the transformer
    decoder: Decoder
    refill: Refill
    verify: Verify = "none"
    mesh: Mesh | None = None  # whose devices share the work, each with its rows of the batch and its heads

    @classmethod
    def of(cls, graph: nnx.GraphDef, config: DecodeConfig, mesh: Mesh | None = None) -> Program:
        return cls(graph, config.decoder, config.refill, config.verify, mesh)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Once: a jitted call asks for it every time, and the graph is a tree of its own."""
        return hash((self.graph, self.decoder, self.refill, self.verify, self.mesh))

    def step(
        self, transformer: Transformer, state: DecodeState, settings: RowSettings
    ) -> tuple[DecodeState, StepRecord]:
        """One forward of every row, and what the decoder makes of it."""
        with over(self.mesh):
            return self._step(transformer, state, settings)

    def _step(
        self, transformer: Transformer, state: DecodeState, settings: RowSettings
    ) -> tuple[DecodeState, StepRecord]:
        if self.verify == "fallback":
            return fallback_step(transformer, state, settings)
        if self.decoder == "streaming":
            return streaming_step(transformer, state, settings, refill=self.refill)
        other = {
            "verified": verified_step,
            "lookup": lookup_step,
            "blockwise": blockwise_step,
            "ar": autoregressive_step,
        }
        return other[self.decoder](transformer, state, settings)


def over(mesh: Mesh | None) -> contextlib.AbstractContextManager[None]:
    """Inside a traced function: `on_mesh`, where there is a mesh."""
    return contextlib.nullcontext() if mesh is None else on_mesh(mesh)


@functools.partial(jax.jit, static_argnames=("graph", "slots", "output_slots", "holds_back", "drafter", "mesh"))
def start(
    graph: nnx.GraphDef,
    params: nnx.State,
    prompt: jax.Array,
    prompt_length: jax.Array,
    settings: RowSettings,
    *,
    slots: int,
    output_slots: int,
    holds_back: bool,
    drafter: Drafter | None,
    mesh: Mesh | None = None,
) -> DecodeState:
    """Jitted `prefill`."""
    transformer = nnx.merge(graph, params)
    sizes = dict(slots=slots, output_slots=output_slots)
    with over(mesh):
        return prefill(transformer, prompt, prompt_length, settings, **sizes, holds_back=holds_back, drafter=drafter)


@functools.partial(jax.jit, static_argnames="program", donate_argnames="state")
def run(program: Program, params: nnx.State, state: DecodeState, settings: RowSettings) -> DecodeState:
    """Steps until every row has finished, without the host."""
    transformer = nnx.merge(program.graph, params)

    def body(state: DecodeState) -> DecodeState:
        return program.step(transformer, state, settings)[0]

    return jax.lax.while_loop(lambda state: jnp.any(state.running), body, state)


@functools.partial(jax.jit, static_argnames="program", donate_argnames="state")
def run_step(
    program: Program, params: nnx.State, state: DecodeState, settings: RowSettings
) -> tuple[DecodeState, StepRecord]:
    """The jitted `step` of the Python loop."""
    return program.step(nnx.merge(program.graph, params), state, settings)


def run_stepwise(
    program: Program, params: nnx.State, state: DecodeState, settings: RowSettings
) -> Generator[tuple[DecodeState, StepRecord], DecodeState | None, None]:
    """The same loop from Python, one (state, record) a step: for streaming text, traces and debugging.

    A yielded state is given up to the next step: read what you need of it before asking for more. To end rows early, send
    back a state with their `finish` set.
    """
    while bool(jnp.any(state.running)):
        state, record = run_step(program, params, state, settings)
        changed = yield state, record
        if changed is not None:
            state = changed
