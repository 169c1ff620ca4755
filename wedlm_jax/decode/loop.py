"""The decode loop: one pure step, run by a jitted `lax.while_loop` or by a Python generator."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator

import jax
import jax.numpy as jnp
import numpy as np

from wedlm_jax.decode.autoregressive import autoregressive_step
from wedlm_jax.decode.blockwise import blockwise_step
from wedlm_jax.decode.config import DecodeConfig, Decoder, Drafter, Refill, RowSettings, Verify
from wedlm_jax.decode.fallback import fallback_step
from wedlm_jax.decode.lookup import lookup_step
from wedlm_jax.decode.prefill import prefill
from wedlm_jax.decode.state import STOPPED, DecodeState, StepRecord
from wedlm_jax.decode.streaming import streaming_step
from wedlm_jax.decode.verified import verified_step
from wedlm_jax.model.transformer import Transformer
from wedlm_jax.model.weights import Weights

COUNTERS = ("generated", "forwards", "processed", "checked", "agreed")  # fields of DecodeState that count what was done
# Of each of COUNTERS, before the first of k steps and after each: int32 [k + 1, B, ...]; 0 behind the last step run.
Progress = dict[str, jax.Array]
HostProgress = dict[str, np.ndarray]  # the same where the host reads it


@dataclasses.dataclass(frozen=True)
class Program:
    """What a loop is compiled for, beside the shapes of its arrays."""

    decoder: Decoder
    refill: Refill
    verify: Verify = "none"

    @classmethod
    def of(cls, config: DecodeConfig) -> Program:
        return cls(config.decoder, config.refill_rule, config.verify)

    def step(
        self, transformer: Transformer, state: DecodeState, settings: RowSettings
    ) -> tuple[DecodeState, StepRecord]:
        """One forward of every row, and what the decoder makes of it."""
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


@functools.partial(jax.jit, static_argnames=("slots", "output_slots", "holds_back", "drafter", "context"))
def start(
    weights: Weights,
    prompt: jax.Array,
    prompt_length: jax.Array,
    settings: RowSettings,
    *,
    slots: int,
    output_slots: int,
    holds_back: bool,
    drafter: Drafter | None,
    context: int | None = None,
) -> DecodeState:
    """Jitted `prefill`."""
    with weights.transformer() as transformer:
        return prefill(
            transformer, prompt, prompt_length, settings, slots=slots, output_slots=output_slots, holds_back=holds_back,
            drafter=drafter, context=context,
        )  # fmt: skip


@functools.partial(jax.jit, static_argnames="program", donate_argnames="state")
def run(program: Program, weights: Weights, state: DecodeState, settings: RowSettings) -> DecodeState:
    """Steps until every row has finished, without the host."""
    with weights.transformer() as transformer:

        def body(state: DecodeState) -> DecodeState:
            return program.step(transformer, state, settings)[0]

        return jax.lax.while_loop(lambda state: jnp.any(state.running), body, state)


@functools.partial(jax.jit, static_argnames=("program", "steps"), donate_argnames="state")
def run_steps(
    program: Program, weights: Weights, state: DecodeState, settings: RowSettings, halted: jax.Array, *, steps: int
) -> tuple[DecodeState, Progress]:
    """At most `steps` steps, fewer where every row finishes before; rows that are `halted` (bool [B]) take no part."""
    state = dataclasses.replace(state, finish=jnp.where(halted & state.running, STOPPED, state.finish))
    counters = {name: getattr(state, name) for name in COUNTERS}
    before = {name: jnp.zeros((steps + 1, *x.shape), jnp.int32).at[0].set(x) for name, x in counters.items()}
    with weights.transformer() as transformer:

        def body(carry: tuple[jax.Array, DecodeState, Progress]) -> tuple[jax.Array, DecodeState, Progress]:
            step, state, progress = carry
            state, _ = program.step(transformer, state, settings)
            return step + 1, state, {name: progress[name].at[step + 1].set(getattr(state, name)) for name in COUNTERS}

        _, state, progress = jax.lax.while_loop(
            lambda carry: (carry[0] < steps) & jnp.any(carry[1].running), body, (jnp.int32(0), state, before)
        )
    return state, progress


def when_emitted(progress: HostProgress, row: int, count: int) -> dict[str, np.ndarray]:
    """COUNTERS of all rows after the first step by which this row had emitted `count` tokens, more than it had before the steps.
    Of what it drafted in that step the drafts among these tokens count, as at any other end.
    """
    step = np.argmax(progress["generated"][:, row] >= count)
    counters = {name: np.array(values[step]) for name, values in progress.items()}
    behind = slice(count - progress["generated"][step - 1, row] + 1, None)  # slots; the first of all is no draft
    for name in ("checked", "agreed"):
        counters[name][row, behind] = progress[name][step - 1, row, behind]
    return counters


@functools.partial(jax.jit, static_argnames="program", donate_argnames="state")
def run_step(
    program: Program, weights: Weights, state: DecodeState, settings: RowSettings
) -> tuple[DecodeState, StepRecord]:
    """The jitted `step` of the Python loop."""
    with weights.transformer() as transformer:
        return program.step(transformer, state, settings)


def run_stepwise(
    program: Program, weights: Weights, state: DecodeState, settings: RowSettings
) -> Generator[tuple[DecodeState, StepRecord], DecodeState | None, None]:
    """The same loop from Python, one (state, record) a step: for streaming text, traces and debugging.

    A yielded state is given up to the next step: read what you need of it before asking for more. To end rows early, send
    back a state with their `finish` set.
    """
    while bool(jnp.any(state.running)):
        state, record = run_step(program, weights, state, settings)
        changed = yield state, record
        if changed is not None:
            state = changed
