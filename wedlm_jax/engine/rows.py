"""RowGroup: a fixed number of rows that share one compiled loop, and what the host knows of each of them."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from wedlm_jax.decode.config import DecodeConfig, RowSettings
from wedlm_jax.decode.first_drafts import riding_masks
from wedlm_jax.decode.generation import bucket, verification
from wedlm_jax.decode.loop import Program
from wedlm_jax.decode.prefill import CHUNK
from wedlm_jax.decode.state import FULL, RUNNING, STOPPED, DecodeState
from wedlm_jax.decode.stats import FinishReason, Stats
from wedlm_jax.engine.memory import cache_slots
from wedlm_jax.engine.programs import COUNTERS, Progress, fill_row, open_rows, prefill_behind, run_steps, take_row
from wedlm_jax.engine.ticket import Ticket
from wedlm_jax.model.handle import Model
from wedlm_jax.model.kv_cache import Cache


@dataclasses.dataclass
class Row:
    tokens: list[int] = dataclasses.field(default_factory=list)  # whose keys and values the cache holds, from slot 0
    ticket: Ticket | None = None  # None where the row is idle
    used: int = 0  # the admission that used it last


class RowGroup:
    """Rows of one decoder, refill rule and window bucket. Each runs its own request with its own settings."""

    def __init__(self, model: Model, config: DecodeConfig, rows: int, context: int):
        self._weights, self._context = model.weights, context
        self._program = Program.of(config)
        self.slots = cache_slots(context, config.slots)
        self._state = open_rows(
            self._weights,
            rows=rows,
            context=context,
            slots=config.slots,
            cache_slots=self.slots,
            holds_back=config.holds_back,
        )
        self._settings = RowSettings.from_configs([config] * rows, [0] * rows)
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
    def used(self) -> int:
        return max(row.used for row in self.rows)

    def cached_row(self, row: int, slots: int) -> Cache:
        """A copy of what the cache holds of one row, with room for `slots`."""
        return take_row(self._state.cache, np.int32(row), slots=slots)

    def admit(self, ticket: Ticket, row: int, cache: Cache, reused: int, used: int) -> None:
        """Starts a request in an idle row. `cache` holds the first `reused` tokens of its prompt and is given up."""
        prompt, config = ticket.request.prompt, ticket.request.config
        cached = len(prompt) - config.holds_back  # the first forward feeds what is held back
        ticket.reused_tokens = min(reused, cached)
        whole = np.zeros((1, self._context), np.int32)
        whole[0, : len(prompt)] = prompt
        own = RowSettings.from_configs([config], [ticket.request.row])
        masks, hidden = riding_masks(config.drafter, config.slots), None
        stop = len(prompt) if masks else cached  # masks ride behind the last token of the prompt
        for start in range(ticket.reused_tokens, stop, CHUNK):
            end = min(start + CHUNK, stop)
            span = (np.array([n], np.int32) for n in (start, end))
            sizes = dict(chunk=bucket(end - start), masks=masks if end == stop else 0)
            cache, hidden = prefill_behind(self._weights, cache, whole, *span, own, **sizes)
        self._state, self._settings = fill_row(
            self._weights,
            self._state,
            self._settings,
            np.int32(row),
            cache,
            whole,
            np.array([len(prompt)], np.int32),
            own,
            hidden,
            holds_back=config.holds_back,
            drafter=config.drafter,
        )
        self._halted[row] = False
        self.rows[row] = Row(prompt[:cached], ticket, used)
        ticket.waits = False

    def withdraw(self, ticket: Ticket) -> None:
        """Frees the row of a request; what its cache holds stays of use."""
        for number, row in enumerate(self.rows):
            if row.ticket is ticket:
                self._free(number)

    def launch(self, steps: int) -> None:
        """Starts a run of at most `steps` steps and does not wait for it."""
        # A copy, because the arrays of the host are changed while the device may still read them.
        halted = self._halted.copy()
        self._state, self._progress = run_steps(
            self._program, self._weights, self._state, self._settings, halted, steps=steps
        )

    def collect(self) -> None:
        """Waits for the run and hands every request what it brought."""
        small = dataclasses.replace(self._state, cache=None, prompt=None)
        state, progress = jax.device_get((small, self._progress))
        self._progress = None
        for number, row in enumerate(self.rows):
            if row.ticket is not None:
                self._hand_over(number, row.ticket, state, progress)

    def _hand_over(self, number: int, ticket: Ticket, state: DecodeState, progress: Progress) -> None:
        """One row's part of a run; all arrays are the host's."""
        prompt = ticket.request.prompt
        ids = state.output[number, : state.generated[number]].tolist()
        self.rows[number].tokens = (prompt + ids)[: state.length[number]]
        window = _beyond(ticket, ids, state, number)
        reason: FinishReason | None = {RUNNING: None, STOPPED: "stop", FULL: "length"}[int(state.finish[number])]
        # A row that has just met a stop id is read too: the string may have come before it.
        kept = ticket.stop_string_at(ids)
        if kept is not None:
            ids, reason = ids[:kept], "stop"
            step = np.argmax(progress["generated"][:, number] >= kept)  # the first that had them all
            then = {name: progress[name][step] for name in COUNTERS}
            state = dataclasses.replace(state, **then)  # type: ignore[arg-type]
        if reason is not None:
            self._free(number)
        stats = Stats(len(ids), int(state.forwards[number]), int(state.processed[number]))
        ticket.update(ids, window, stats, verification(ticket.request.config, state, number, len(ids)), reason)

    def _free(self, number: int) -> None:
        self.rows[number].ticket = None
        self._halted[number] = True


def _beyond(ticket: Ticket, ids: list[int], state: DecodeState, number: int) -> list[int | None]:
    """The tokens in play behind those that are committed; None for masks."""
    config = ticket.request.config
    width = config.block_size if config.decoder == "blockwise" else config.window
    first = len(ticket.request.prompt) + len(ids) - int(state.length[number])  # slots before it are committed already
    shown = slice(first, first + min(width, config.max_new_tokens - len(ids)))
    slots = zip(state.window[number, shown].tolist(), state.filled[number, shown].tolist(), strict=True)
    return [token if filled else None for token, filled in slots]
