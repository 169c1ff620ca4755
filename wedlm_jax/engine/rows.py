"""RowGroup: a fixed number of rows that share one compiled loop, and what the host knows of each of them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from wedlm_jax.decode.config import DecodeConfig, RowSettings
from wedlm_jax.decode.first_drafts import riding_masks
from wedlm_jax.decode.generation import bucket, verification
from wedlm_jax.decode.loop import HostProgress, Program, Progress, when_emitted
from wedlm_jax.decode.prefill import CHUNK
from wedlm_jax.decode.state import FULL, RUNNING, STOPPED, DecodeState, placed_as
from wedlm_jax.decode.stats import FinishReason, Stats
from wedlm_jax.engine.memory import cache_slots
from wedlm_jax.engine.programs import exchange_rows, fill_rows, open_rows, prefill_behind, run_rows, take_rows
from wedlm_jax.engine.row_counts import RowCounts
from wedlm_jax.engine.ticket import Ticket
from wedlm_jax.model.handle import Model
from wedlm_jax.sharding import batch_parts, rows_of_a_device

LOG = logging.getLogger(__name__)


@dataclasses.dataclass
class Row:
    tokens: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros(0, np.int32)
    )  # whose keys and values the cache holds, from slot 0
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


@dataclasses.dataclass(frozen=True)
class Run:
    """Some steps of the first rows of a group, on their way."""

    progress: Progress
    rows: int  # that are computed
    running: int
    seconds: float  # that the host took to start it
    is_new: bool  # whether a program was compiled for it


class RowGroup:
    """Rows of one `DecodeConfig.program`. Each runs its own request with its own settings. Those that run lie first, so that a
    run can leave the others out."""

    def __init__(self, model: Model, config: DecodeConfig, rows: int, context: int):
        self._model = model
        self._num_rows, self._context = rows, context
        self._program = Program.of(config)
        self._holds_back, self._drafter = config.holds_back, config.drafter
        window_slots = config.slots(model.window_table)
        self._window_slots = window_slots
        self._weights = model.weights_for(rows * window_slots)
        self._masks = riding_masks(config.drafter, window_slots)
        self.slots = cache_slots(context, window_slots)
        sizes = dict(rows=rows, context=context, slots=window_slots, cache_slots=self.slots)
        # Waited for, so that what does not fit in memory is told here and not where it is used first.
        state = jax.block_until_ready(open_rows(self._weights, **sizes, holds_back=config.holds_back))
        settings = self._row_settings([config] * rows, [0] * rows)
        if model.weights.mesh is None:  # as what the programs make of them and the weights will be
            state, settings = jax.tree.map(
                functools.partial(placed_as, jax.tree.leaves(self._weights)[0]), (state, settings)
            )
        self._state, self._settings = state, settings
        self._halted = np.zeros(rows, bool)
        cut = batch_parts(model.weights.mesh) > 1
        self._counts = RowCounts(rows, window_slots, model.window_table, fixed=cut)
        self._compiled: set[tuple[int, bool]] = set()
        self._run: Run | None = None
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
        copies of rows that take no more slots than a quarter of the rows. A prompt of several chunks is alone.

        They are 1, 4, 16, ... at once, so that few programs are compiled and none is padded.
        """
        alike: dict[tuple, list[Arrival]] = {}
        for arrival in arrivals:
            alike.setdefault((id(arrival.source), bucket(arrival.stop - arrival.start)), []).append(arrival)
        for (_, chunk), left in alike.items():
            slots = self.slots * max(self._num_rows // 4, 1)
            most = 1 if chunk > CHUNK else max(slots // self._slots_for(left), 1)
            while left:
                count = 4 ** ((min(len(left), most).bit_length() - 1) // 2)
                yield left[:count]
                left = left[count:]

    def admit(self, arrivals: Sequence[Arrival]) -> None:
        """Starts requests of `together`."""
        requests = [arrival.ticket.request for arrival in arrivals]
        slots = self.slots if len(arrivals) == 1 else self._slots_for(arrivals)
        prompts = np.zeros((len(arrivals), self._context), np.int32)
        for prompt, arrival in zip(prompts, arrivals, strict=True):
            prompt[: len(arrival.ticket.prompt)] = arrival.ticket.prompt
        own = self._row_settings([r.config for r in requests], [r.row for r in requests])
        rows, sources, start, stop = (
            np.array([getattr(arrival, name) for arrival in arrivals], np.int32)
            for name in ("row", "source_row", "start", "stop")
        )
        cache = take_rows(arrivals[0].source._state.cache, sources, start, slots=slots)
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
        for arrival in arrivals:
            prompt = arrival.ticket.prompt
            cached = prompt[: len(prompt) - self._holds_back]
            self.rows[arrival.row] = Row(cached, arrival.ticket, arrival.used)
            self._halted[arrival.row] = False
            arrival.ticket.reused_tokens, arrival.ticket.waits = arrival.start, False

    def _slots_for(self, arrivals: Sequence[Arrival]) -> int:
        """Cache slots in which their prompts fit, and the masks behind them; no more than a row has."""
        return min(bucket(max(arrival.stop for arrival in arrivals) + self._masks), self.slots)

    def withdraw(self, ticket: Ticket) -> None:
        """Frees the row of a request; what its cache holds stays of use."""
        for number, row in enumerate(self.rows):
            if row.ticket is ticket:
                self._free(number)

    def launch(self, steps: int) -> None:
        """Starts a run of at most `steps` steps and does not wait for it."""
        running = sum(row.ticket is not None for row in self.rows)
        rows, draws = self._counts.choose(running), self.draws
        self._move_below(rows)
        self._settings = self._settings.for_rows(self._of_a_device(rows))
        is_new = (rows, draws) not in self._compiled
        if is_new and rows < self._num_rows:
            LOG.info("compiling a program for %d of %d rows, as no more have been in use", rows, self._num_rows)
        self._compiled.add((rows, draws))
        begun = time.perf_counter()
        self._state, progress = run_rows(
            self._program,
            self._model.weights_for(rows * self._window_slots),
            self._state,
            dataclasses.replace(self._settings, draws=draws),
            self._halted.copy(),  # the host's array is changed while the device may still read it
            rows=rows,
            steps=steps,
        )
        self._run = Run(progress, rows, running, time.perf_counter() - begun, is_new)

    def collect(self) -> None:
        """Waits for the run and hands every request what it brought."""
        assert self._run is not None
        run, self._run = self._run, None
        begun = time.perf_counter()
        small = dataclasses.replace(self._state, cache=None, prompt=None)
        state, progress, window_size = jax.device_get((small, run.progress, self._settings.window_size))
        if run.is_new:
            self._counts.compiled(run.seconds)
        else:
            self._counts.ran(run.running, run.rows, run.seconds + time.perf_counter() - begun)
        for number, row in enumerate(self.rows):
            if row.ticket is not None:
                self._hand_over(number, row.ticket, state, progress, int(window_size[number]))

    def _move_below(self, count: int) -> None:
        """Brings all rows that run below row number `count`; what lay there changes places with them."""
        runs = [row.ticket is not None for row in self.rows]
        above, free = np.flatnonzero(runs[count:]) + count, np.flatnonzero(~np.array(runs[:count]))
        for one, other in zip(above.tolist(), free.tolist(), strict=False):
            self._state, self._settings = exchange_rows(self._state, self._settings, np.array([one, other]))
            order = np.arange(self._num_rows)
            order[[one, other]] = other, one
            # A list of its own: another thread that goes through the rows meets each once.
            self.rows, self._halted = [self.rows[number] for number in order], self._halted[order]

    def _row_settings(self, configs: Sequence[DecodeConfig], rows: Sequence[int]) -> RowSettings:
        settings = RowSettings.from_configs(configs, rows, self._model.window_table, self._model.num_tokens)
        return settings.for_rows(self._of_a_device(self._num_rows))

    def _of_a_device(self, rows: int) -> int:
        """How many of the rows that are computed a device computes."""
        return rows_of_a_device(rows, self._model.weights.mesh)

    def _hand_over(
        self, number: int, ticket: Ticket, state: DecodeState, progress: HostProgress, window_size: int
    ) -> None:
        """One row's part of a run; all arrays are the host's."""
        emitted = state.output[number, : state.generated[number]]
        self.rows[number].tokens = np.concatenate([ticket.prompt, emitted])[: state.length[number]]
        ids = emitted.tolist()
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
