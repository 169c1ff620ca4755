"""RowGroup: a fixed number of rows that share one compiled loop, and what the host knows of each of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from wedlm_jax.decode.config import DecodeConfig, RowSettings
from wedlm_jax.decode.first_drafts import riding_masks
from wedlm_jax.decode.generation import bucket, verification
from wedlm_jax.decode.loop import Program, Progress, run_steps, when_emitted
from wedlm_jax.decode.prefill import CHUNK
from wedlm_jax.decode.state import FULL, RUNNING, STOPPED, DecodeState
from wedlm_jax.decode.stats import FinishReason, Stats
from wedlm_jax.engine.memory import cache_slots
from wedlm_jax.engine.programs import fill_rows, open_rows, prefill_behind, take_rows
from wedlm_jax.engine.ticket import Ticket
from wedlm_jax.model.handle import Model
from wedlm_jax.sharding import rows_of_a_device


@dataclasses.dataclass
class Row:
    tokens: list[int] = dataclasses.field(default_factory=list)  # whose keys and values the cache holds, from slot 0
    ticket: Ticket | None = None  # None where the row is idle
    used: int = 0  # the admission that used it last


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request that has a row, before it is started there."""

    ticket: Ticket
    group: RowGroup
    row: int
    source: RowGroup  # its row `source_row` holds the first `start` tokens of the prompt
    source_row: int
    start: int  # the span of the prompt that is to be prefilled
    stop: int
    used: int  # the number of its admission


class RowGroup:
    """Rows of one `DecodeConfig.program`. Each runs its own request with its own settings."""

    def __init__(self, model: Model, config: DecodeConfig, rows: int, context: int):
        self._window_table, self._context = model.window_table, context
        self._program = Program.of(config)
        self._holds_back, self._drafter = config.holds_back, config.drafter
        window_slots = config.slots(model.window_table)
        self._weights = model.weights_for(rows * window_slots)
        self._masks = riding_masks(config.drafter, window_slots)
        self.slots = cache_slots(context, window_slots)
        sizes = dict(rows=rows, context=context, slots=window_slots, cache_slots=self.slots)
        # Waited for, so that what does not fit in memory is told here and not where it is used first.
        self._state = jax.block_until_ready(open_rows(self._weights, **sizes, holds_back=config.holds_back))
        self._batch = rows_of_a_device(rows, model.weights.mesh)
        self._settings = RowSettings.from_configs([config] * rows, [0] * rows, self._window_table, batch=self._batch)
        self._progress: Progress | None = None
        self._halted = np.zeros(rows, bool)
        self.rows = [Row() for _ in range(rows)]

    @property
    def idle(self) -> list[int]:
        return [number for number, row in enumerate(self.rows) if row.ticket is None]

    @property
    def busy(self) -> bool:
        return any(row.ticket is not None for row in self.rows)

    @property
    def draws(self) -> bool:
        return any(row.ticket is not None and row.ticket.request.config.temperature > 0 for row in self.rows)

    @property
    def used(self) -> int:
        return max(row.used for row in self.rows)

    def reserve(self, ticket: Ticket, row: int, source: RowGroup, source_row: int, shared: int, used: int) -> Arrival:
        """Gives an idle row to a request, which `admit` starts; until then the row's cache is what it was.

        Args:
          source, source_row: where the first `shared` tokens of its prompt are cached.
          used: the number of the admission.
        """
        self.rows[row].ticket = ticket
        length = len(ticket.request.prompt)
        cached = length - self._holds_back
        # Masks ride behind the last token of the prompt; else the first forward feeds what is held back.
        return Arrival(
            ticket, self, row, source, source_row, min(shared, cached), length if self._masks else cached, used
        )

    def together(self, arrivals: Sequence[Arrival]) -> Iterator[Sequence[Arrival]]:
        """Cuts requests into those that are prefilled at once: from rows of one cache, in one chunk of about one length, and in
        copies of rows that take no more slots than one whole row. A prompt of several chunks is alone.

        They are 1, 4, 16, ... at once, so that few programs are compiled and none is padded.
        """
        alike: dict[tuple, list[Arrival]] = {}
        for arrival in arrivals:
            alike.setdefault((id(arrival.source), bucket(arrival.stop - arrival.start)), []).append(arrival)
        for (_, chunk), left in alike.items():
            most = 1 if chunk > CHUNK else max(self.slots // self._slots_for(left), 1)
            while left:
                count = 4 ** ((min(len(left), most).bit_length() - 1) // 2)
                yield left[:count]
                left = left[count:]

    def admit(self, arrivals: Sequence[Arrival]) -> None:
        """Starts requests of `together`."""
        requests = [arrival.ticket.request for arrival in arrivals]
        slots = self.slots if len(arrivals) == 1 else self._slots_for(arrivals)
        prompts = np.zeros((len(arrivals), self._context), np.int32)
        for prompt, request in zip(prompts, requests, strict=True):
            prompt[: len(request.prompt)] = request.prompt
        own = RowSettings.from_configs(
            [r.config for r in requests], [r.row for r in requests], self._window_table, batch=self._batch
        )
        rows, sources, start, stop = (
            np.array([getattr(arrival, name) for arrival in arrivals], np.int32)
            for name in ("row", "source_row", "start", "stop")
        )
        cache = take_rows(arrivals[0].source._state.cache, sources, slots=slots)
        hidden = None
        for done in range(0, int(np.max(stop - start)), CHUNK):
            first, last = start + done, np.minimum(start + done + CHUNK, stop)
            sizes = dict(chunk=bucket(int(np.max(last - first))), masks=self._masks if np.all(last == stop) else 0)
            # Prefill draws nothing: one program for all.
            cache, hidden = prefill_behind(
                self._weights, cache, prompts[:, :slots], first, last, dataclasses.replace(own, draws=False), **sizes
            )
        self._state, self._settings = fill_rows(
            self._weights,
            self._state,
            dataclasses.replace(self._settings, draws=own.draws),
            rows,
            cache,
            prompts,
            np.array([len(r.prompt) for r in requests], np.int32),
            own,
            hidden,
            holds_back=self._holds_back,
            drafter=self._drafter,
        )
        for arrival, request in zip(arrivals, requests, strict=True):
            cached = request.prompt[: len(request.prompt) - self._holds_back]
            self.rows[arrival.row] = Row(cached, arrival.ticket, arrival.used)
            self._halted[arrival.row] = False
            arrival.ticket.reused_tokens, arrival.ticket.waits = arrival.start, False

    def _slots_for(self, arrivals: Sequence[Arrival]) -> int:
        """Cache slots in which their prompts fit, and the masks behind them."""
        return bucket(max(arrival.stop for arrival in arrivals) + self._masks)

    def withdraw(self, ticket: Ticket) -> None:
        """Frees the row of a request; what its cache holds stays of use."""
        for number, row in enumerate(self.rows):
            if row.ticket is ticket:
                self._free(number)

    def launch(self, steps: int) -> None:
        """Starts a run of at most `steps` steps and does not wait for it."""
        # A copy, because the arrays of the host are changed while the device may still read them.
        halted = self._halted.copy()
        settings = dataclasses.replace(self._settings, draws=self.draws)
        self._state, self._progress = run_steps(
            self._program, self._weights, self._state, settings, halted, steps=steps
        )

    def collect(self) -> None:
        """Waits for the run and hands every request what it brought."""
        small = dataclasses.replace(self._state, cache=None, prompt=None)
        state, progress, window_size = jax.device_get((small, self._progress, self._settings.window_size))
        self._progress = None
        for number, row in enumerate(self.rows):
            if row.ticket is not None:
                self._hand_over(number, row.ticket, state, progress, int(window_size[number]))

    def _hand_over(self, number: int, ticket: Ticket, state: DecodeState, progress: Progress, window_size: int) -> None:
        """One row's part of a run; all arrays are the host's."""
        prompt = ticket.request.prompt
        ids = state.output[number, : state.generated[number]].tolist()
        self.rows[number].tokens = (prompt + ids)[: state.length[number]]
        window = _beyond(ticket, ids, state, number, window_size)
        reason: FinishReason | None = {RUNNING: None, STOPPED: "stop", FULL: "length"}[int(state.finish[number])]
        # A row that has just met a stop id is read too: the string may have come before it.
        kept = ticket.stop_string_at(ids)
        if kept is not None:
            ids, reason = ids[:kept], "stop"
            state = dataclasses.replace(state, **when_emitted(progress, number, kept))  # type: ignore[arg-type]
        if reason is not None:
            self._free(number)
        stats = Stats(len(ids), int(state.forwards[number]), int(state.processed[number]))
        said = functools.partial(verification, ticket.request.config, state, number, len(ids))
        ticket.update(ids, window, stats, said, reason)

    def _free(self, number: int) -> None:
        self.rows[number].ticket = None
        self._halted[number] = True


def _beyond(ticket: Ticket, ids: list[int], state: DecodeState, number: int, window_size: int) -> list[int | None]:
    """The tokens in play behind those that are committed; None for masks."""
    config = ticket.request.config
    in_play = min(int(state.auto_window[number]), window_size) if config.adapts else window_size
    width = config.block_size if config.decoder == "blockwise" else in_play
    first = len(ticket.request.prompt) + len(ids) - int(state.length[number])  # slots before it are committed already
    shown = slice(first, first + min(width, config.max_new_tokens - len(ids)))
    slots = zip(state.window[number, shown].tolist(), state.filled[number, shown].tolist(), strict=True)
    # Where there are no masks, a slot that is not filled is not in play.
    return [token if filled else None for token, filled in slots if filled or config.uses_masks]
