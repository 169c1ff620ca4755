"""generate and stream: prompts in, completions out, over any decoder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from wedlm_jax.data.tokenizer import decoder_behind
from wedlm_jax.decode.config import DecodeConfig, RowSettings, at_least_one, integer
from wedlm_jax.decode.loop import COUNTERS, HostProgress, Program, run, run_steps, run_stepwise, start, when_emitted
from wedlm_jax.decode.prompts import Prompt, encode_prompt
from wedlm_jax.decode.state import RUNNING, STOPPED, DecodeState, StepRecord, placed_as
from wedlm_jax.decode.stats import Completion, FinishReason, Stats
from wedlm_jax.decode.text import Commit, Decode, Pieces, ids_up_to_stop, text_of
from wedlm_jax.decode.trace import trace_entry
from wedlm_jax.errors import UserError, out_of_memory, shown
from wedlm_jax.model.handle import Model
from wedlm_jax.sharding import batch_parts, rows_of_a_device

STEPS_BETWEEN_TEXTS = 8  # forwards after which the host looks for stop strings
SMALLEST_BUCKET = 32  # lengths are rounded up to this times a power of two, so that few shapes are compiled


class Request(NamedTuple):
    """One row to decode: everything checked and resolved."""

    prompt: list[int]
    config: DecodeConfig  # stop_ids and mask_token_id resolved
    row: int  # its number in the call, which seeds its noise


def generate(
    model: Model,
    prompts: Sequence[Prompt],
    config: DecodeConfig | Sequence[DecodeConfig] = DecodeConfig(),
    n: int = 1,
    trace: bool = False,
) -> list[Completion]:
    """Completes every prompt `n` times; prompts of one `DecodeConfig.program` run as one batch, whose rows are filled up to a
    number that programs are compiled for (`row_bucket`).

    Args:
      model: from `wedlm_jax.load`.
      prompts: text, lists of messages, or lists (arrays) of token ids. Messages may come as
        `{"messages": [...], "tools": [...], "chat_template_kwargs": {...}}` too.
      config: one for all prompts, or one for each.
      n: completions a prompt, each prefilled (an `Engine` prefills it once); they differ where the temperature is above 0.
      trace: also return what every forward did (slower: the loop then runs from Python).

    Returns:
      completions in the order of the prompts, the `n` of a prompt side by side.

    Raises:
      UserError: for an empty prompt, an id out of range, a prompt that leaves no room for max_new_tokens in the model's
        context, a decoder that needs a mask id where the model has none, or a batch that does not fit in memory.
    """
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Iterable):
        raise UserError(f"prompts must be a list of prompts, not {shown(prompts)}: wrap a single one in a list")
    prompts = list(prompts)
    if prompts and (isinstance(prompts[0], (int, np.integer)) or _is_message(prompts[0])):
        raise UserError("prompts must be a list of prompts: wrap a single one in a list")
    n = at_least_one("n", n)
    if not isinstance(config, DecodeConfig) and (isinstance(config, Mapping) or not isinstance(config, Iterable)):
        raise UserError(f"config must be a DecodeConfig, or a list of one for each prompt, not {shown(config)}")
    configs = [config] * len(prompts) if isinstance(config, DecodeConfig) else list(config)
    if len(configs) != len(prompts):
        raise UserError(f"{len(configs)} configs for {len(prompts)} prompts: give one, or one for each")
    requests = [
        make_request(model, prompt, c, row=i * n + k, name=f"prompt {i}")
        for i, (prompt, c) in enumerate(zip(prompts, configs, strict=True))
        for k in range(n)
    ]
    groups: dict[tuple, list[Request]] = {}
    for request in requests:
        key = *request.config.program(model.window_table), bool(request.config.stop)
        groups.setdefault(key, []).append(request)
    completions: dict[int, Completion] = {}
    for group in groups.values():
        rows = row_bucket(len(group), model.weights.mesh)
        for request, completion in zip(group, decode_batch(model, group, trace, rows=rows), strict=True):
            completions[request.row] = completion
    return [completions[row] for row in range(len(requests))]


def _is_message(prompt: object) -> bool:
    """Whether it is one of the messages of a prompt, and no prompt."""
    return isinstance(prompt, Mapping) and "messages" not in prompt


def stream(model: Model, prompt: Prompt, config: DecodeConfig = DecodeConfig()) -> Iterator[Commit]:
    """Completes one prompt and yields `Commit`s of `.ids` and `.text` as they come, which join to what `generate` returns.

    Raises:
      UserError: as `generate`, at once but for a lack of memory, which is met at the first piece.
    """
    return _pieces(model, make_request(model, prompt, config, row=0, name="prompt"))


def _pieces(model: Model, request: Request) -> Iterator[Commit]:
    pieces = Pieces(model.tokenizer, request.config)
    with memory_errors([request]):
        batch = Batch(model, [request])
        for state, _ in batch.stepwise():
            if (commit := pieces.next(batch.ids(state)[0], finished=not bool(state.running[0]))) is not None:
                yield commit


def make_request(model: Model, prompt: Prompt, config: DecodeConfig, *, row: int, name: str) -> Request:
    """Checks one prompt with its settings and resolves what the model decides: stop ids, the mask id, calibrated thresholds.

    Raises:
      UserError: the prompt is not one or is too long, or a setting does not go with the model; `name` is the prompt's.
    """
    require_model(model)
    if not isinstance(config, DecodeConfig):
        raise UserError(f"{name}: config must be a DecodeConfig, not {shown(config)}")
    ids = encode_prompt(model, prompt, name)
    context = model.config.max_position_embeddings
    if len(ids) + config.max_new_tokens > context:
        raise UserError(
            f"{name}: {len(ids)} prompt tokens + max_new_tokens={config.max_new_tokens} exceed the model's context of "
            f"{context}; shorten the prompt or lower max_new_tokens"
        )
    size = config.block_size if config.sized_by == "block_size" else config.window
    if config.sized_by is not None and not config.adapts and size > context:
        raise UserError(f"{config.sized_by}={size} exceeds the model's context of {context}; lower it")
    mask_token_id = None
    needed = config.uses_masks and model.config.needs_mask_token
    if needed or model.mask_token_id is not None or config.mask_token_id is not None:
        mask_token_id = model.require_mask_token_id() if config.mask_token_id is None else config.mask_token_id
        if not 0 <= mask_token_id < model.config.vocab_size:
            raise UserError(f"mask_token_id={mask_token_id} is not in the vocabulary [0, {model.config.vocab_size})")
    if config.stop and model.tokenizer is None:
        raise UserError("stop strings need a tokenizer, and this model has none: use stop_ids")
    stop_ids = model.eos_token_ids if config.stop_ids is None else config.stop_ids
    if outside := [token for token in stop_ids if not 0 <= token < model.config.vocab_size]:
        raise UserError(f"stop_ids: {outside[0]} is not in the vocabulary [0, {model.config.vocab_size})")
    config = dataclasses.replace(config, stop_ids=tuple(stop_ids), mask_token_id=mask_token_id)
    config = config if model.calibration is None else model.calibration.apply(config)
    return Request(ids, config, integer("row", row))


def require_model(model: object) -> None:
    """Raises a `UserError` where it is none, as a path."""
    if not isinstance(model, Model):
        raise UserError(f"model must be what wedlm_jax.load returns, not {shown(model)}")


class Batch:
    """Requests of one `DecodeConfig.program`, prefilled and ready to run, once: the loop takes the state."""

    def __init__(self, model: Model, requests: Sequence[Request]):
        self.model, self.requests = model, requests
        config = requests[0].config
        self.program = Program.of(config)
        computed = rows_of_a_device(len(requests), model.weights.mesh)
        self.settings = RowSettings.from_configs(
            [r.config for r in requests], [r.row for r in requests], model.window_table, model.num_tokens
        ).for_rows(computed)
        width = bucket(max(len(r.prompt) for r in requests))
        prompts = np.zeros((len(requests), width), np.int32)
        for row, request in enumerate(requests):
            prompts[row, : len(request.prompt)] = request.prompt
        slots = config.slots(model.window_table)
        self.weights = model.weights_for(computed * slots)
        self.state = start(
            self.weights,
            prompts,
            np.array([len(r.prompt) for r in requests], np.int32),
            self.settings,
            slots=slots,
            output_slots=bucket(max(r.config.max_new_tokens for r in requests)),
            holds_back=config.holds_back,
            drafter=config.drafter,
            context=model.config.max_position_embeddings,
        )

    def run(self) -> DecodeState:
        """Steps until every row has finished. Where stop strings may end one, the host reads the texts now and then."""
        if self._has_stop_strings:
            return self._run_to_stop_strings()
        return run(self.program, self.weights, self.state, self.settings)

    def _run_to_stop_strings(self) -> DecodeState:
        """A few steps at a time."""
        state, halted = self.state, np.zeros(len(self.requests), bool)
        running = np.ones_like(halted)
        while running.any():
            state, progress = run_steps(
                self.program, self.weights, state, self.settings, halted, steps=STEPS_BETWEEN_TEXTS
            )
            state = self._set_back_to_stop_strings(state, jax.device_get(progress), running)
            running = np.asarray(state.finish) == RUNNING
        return state

    def stepwise(self) -> Iterator[tuple[DecodeState, StepRecord]]:
        """`run_stepwise`, ending rows whose text holds a stop string."""
        before = _counters(self.state)  # copies: every step takes the state
        steps = run_stepwise(self.program, self.weights, self.state, self.settings)
        try:
            state, record = next(steps)
            while True:
                if self._has_stop_strings:
                    progress = {name: np.stack([before[name], x]) for name, x in _counters(state).items()}
                    state = self._set_back_to_stop_strings(state, progress, np.asarray(record.running))
                    after = _counters(state)
                    emitted = after["generated"] - before["generated"]  # without what a stop string cut off
                    record, before = dataclasses.replace(record, emitted=emitted), after
                yield state, record
                state, record = steps.send(state)
        except StopIteration:
            return

    def ids(self, state: DecodeState) -> list[list[int]]:
        output, generated = np.asarray(state.output), np.asarray(state.generated)
        return [output[row, :count].tolist() for row, count in enumerate(generated)]

    def completions(self, state: DecodeState) -> list[Completion]:
        state = jax.device_get(dataclasses.replace(state, cache=None))  # type: ignore[arg-type]
        done = []
        for row, (request, ids) in enumerate(zip(self.requests, self.ids(state), strict=True)):
            stats = Stats(len(ids), int(state.forwards[row]), int(state.processed[row]))
            reason: FinishReason = "stop" if state.finish[row] == STOPPED else "length"
            plain = completion(self.model, request.config, ids, reason, stats)
            done.append(dataclasses.replace(plain, **verification(request.config, state, row, len(ids))))
        return done

    @property
    def _has_stop_strings(self) -> bool:
        return any(r.config.stop for r in self.requests)

    @functools.cached_property
    def _decode(self) -> Decode:
        return decoder_behind(self.model.tokenizer)

    def _set_back_to_stop_strings(self, state: DecodeState, progress: HostProgress, ran: np.ndarray) -> DecodeState:
        """After the steps of `progress`: a row that `ran` (bool [B]) and whose text is found to hold a stop string is set back to
        the step that completed it, and is finished."""
        changed = {**_counters(state), "finish": np.array(state.finish)}
        ids = self.ids(state)
        for row in np.flatnonzero(ran).tolist():
            kept = self._stop_string_at(row, ids[row], checked=int(progress["generated"][0, row]))
            if kept is not None:
                for name, values in when_emitted(progress, row, kept).items():
                    changed[name][row] = values[row]
                changed["generated"][row], changed["finish"][row] = kept, STOPPED
        placed: dict[str, Any] = {name: placed_as(getattr(state, name), x) for name, x in changed.items()}
        return dataclasses.replace(state, **placed)

    def _stop_string_at(self, row: int, ids: list[int], checked: int) -> int | None:
        """The fewest of the row's `ids` whose text holds a stop string. Those of a row that has just met a stop id are read
        too: the string may have come before it."""
        stop = self.requests[row].config.stop
        return ids_up_to_stop(self._decode, ids, stop, checked) if stop else None


def _counters(state: DecodeState) -> dict[str, np.ndarray]:
    return {name: np.array(getattr(state, name)) for name in COUNTERS}


def completion(model: Model, config: DecodeConfig, ids: list[int], reason: FinishReason, stats: Stats) -> Completion:
    """A finished row as it is handed out. `config.stop_ids` is resolved."""
    text = None
    if model.tokenizer is not None:
        text = text_of(decoder_behind(model.tokenizer), ids, config, finished=True)
    return Completion(ids, reason, stats, text)


def verification(config: DecodeConfig, state: DecodeState, row: int, count: int) -> dict[str, Any]:
    """What the AR chain said of the first `count` tokens of a row: the fields `log_probs` and `acceptance`, where there are any.

    Args:
      state: on the host.
    """
    fields: dict[str, Any] = {}
    if config.holds_back:
        fields["log_probs"] = [None if math.isnan(x) else x for x in state.log_probs[row, :count].tolist()]
    if config.drafter is not None:
        by_slot = list(zip(state.checked[row].tolist(), state.agreed[row].tolist(), strict=True))[1:]
        used = [slot for slot, (checked, _) in enumerate(by_slot, 1) if checked]
        fields["acceptance"] = by_slot[: max(used, default=0)]
    return fields


def nothing_verified(config: DecodeConfig) -> dict[str, Any]:
    """`verification` of a row of which no forward has run."""
    return {name: [] for name, has in (("log_probs", config.holds_back), ("acceptance", config.drafter)) if has}


def decode_batch(
    model: Model, requests: Sequence[Request], trace: bool, *, rows: int | None = None
) -> list[Completion]:
    """Decodes requests of one `DecodeConfig.program` as one batch of `rows` rows; None: as many as there are requests."""
    shortest = min(requests, key=lambda request: len(request.prompt))
    # What fills the batch up ends with its first token.
    filler = shortest._replace(config=dataclasses.replace(shortest.config, max_new_tokens=1))
    filled_up = [*requests, *[filler] * ((rows or 0) - len(requests))]
    traces: list[list[dict]] = [[] for _ in filled_up]
    with memory_errors(filled_up):
        batch = Batch(model, filled_up)
        if trace:
            for state, record in batch.stepwise():  # noqa: B007 - the last state is read below
                for row in np.flatnonzero(np.asarray(record.running)):
                    traces[row].append(trace_entry(record, int(row)))
        else:
            state = batch.run()
        completions = batch.completions(state)[: len(requests)]
    if not trace:
        return completions
    return [dataclasses.replace(c, trace=t) for c, t in zip(completions, traces, strict=False)]


@contextlib.contextmanager
def memory_errors(requests: Sequence[Request]) -> Iterator[None]:
    """Turns the device's out-of-memory error into a `UserError` of one line that names what to lower."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        config = requests[0].config
        windows, blocks = f" and a window of {config.window_size}", f" and blocks of {config.block_size}"
        fed = {"window_size": windows, "block_size": blocks, None: ""}[config.sized_by]
        lower = "max_new_tokens" if config.sized_by is None else f"{config.sized_by} or max_new_tokens"
        raise UserError(
            f"out of memory with a batch of {len(requests)}{fed} (max_new_tokens={config.max_new_tokens}): "
            f"{'pass fewer prompts at a time, or ' if len(requests) > 1 else ''}lower {lower}"
        ) from error


def bucket(n: int) -> int:
    """`n` rounded up to a length that programs are compiled for."""
    return SMALLEST_BUCKET << max(0, (-(-n // SMALLEST_BUCKET) - 1).bit_length())


def row_bucket(n: int, mesh: Mesh | None = None) -> int:
    """`n` rounded up to a number of rows that programs are compiled for: 1, 2, 3, 4, 6, 8, 12, 16, 24, ...; over a mesh, as many
    for each of the parts that it cuts a batch into."""
    parts = batch_parts(mesh)
    of_a_part = -(-n // parts)
    power = 1 << (of_a_part - 1).bit_length()
    return parts * (power * 3 // 4 if of_a_part <= power * 3 // 4 else power)
