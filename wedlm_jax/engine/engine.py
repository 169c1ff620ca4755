"""Engine: many requests over a fixed number of cache rows, each served as if it ran alone."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence

import jax

from wedlm_jax.decode.config import DecodeConfig, at_least_one
from wedlm_jax.decode.generation import make_request, require_model
from wedlm_jax.decode.prompts import Prompt
from wedlm_jax.engine.memory import cache_bytes, cache_slots, in_words
from wedlm_jax.engine.prefix import WORTH_WAITING, choose_row, longest_prefix, shared_length
from wedlm_jax.engine.rows import Arrival, RowGroup
from wedlm_jax.engine.ticket import Ticket
from wedlm_jax.engine.turns import Turns
from wedlm_jax.errors import UserError, out_of_memory
from wedlm_jax.model.handle import Model

LOG = logging.getLogger(__name__)
LARGEST_CONTEXT = 4096  # tokens of a row where the caller does not say


class QueueFull(UserError):
    """No more requests may wait."""


class Engine:
    """Serves requests that come at any time, each with its own settings, and streams what they commit.

    Requests of one program (decoder, refill rule, verify mode, fixed or automatic window, window bucket, width of stop ids) share
    a group of `rows` cache rows and one compiled loop, or another one while any of them is drawn at a temperature. The loop runs
    at most `steps` steps without the host; then finished rows go to the next requests. A finished row keeps its cache until
    then: a request that begins with the same tokens as any row, idle or running, has only the rest prefilled (prefix reuse).
    Short prompts that come together are prefilled together. In float32 a request's tokens are those of `generate` run for it
    alone.

    Nothing runs by itself: `step`, `run`, a ticket's `result` and iteration over a ticket drive all requests. Threads may share
    an engine: `submit` waits for no step, and a step that one thread takes is had by all that wait to take one. A step that an
    exception interrupts (Ctrl-C) has given its state away, and the engine is of no use after it: `chat` shows how to hold Ctrl-C
    back. A long prompt is prefilled whole before the next run.

    Args:
      model: from `wedlm_jax.load`.
      rows: requests that a group decodes at once. While few of them are in use a forward computes only as many, once a program
        for so few is worth compiling (`row_counts.py`).
      context: the most tokens of prompt and max_new_tokens together; None = the model's, at most 4096.
      steps: decode steps of one run, k. Fewer answer sooner to arrivals, cancellations and stop strings; more cost less
        host time.
      queue: requests that may wait beside one for each row that is free; `submit` refuses the next one.
      cache_limit: bytes that the caches may take; None = as many as the device has. Idle groups are closed to stay below it.
        Beyond it, starting requests takes the cache of a quarter of the rows more, at least of one, and moving a row of two or
        three.

    Raises:
      UserError: a setting is out of range, or no integer; the model is a path.
    """

    def __init__(
        self,
        model: Model,
        *,
        rows: int = 8,
        context: int | None = None,
        steps: int = 8,
        queue: int = 256,
        cache_limit: int | None = None,
    ):
        require_model(model)
        longest = model.config.max_position_embeddings
        context = min(longest, LARGEST_CONTEXT) if context is None else context
        rows, context, steps, queue = (
            at_least_one(name, value)
            for name, value in (("rows", rows), ("context", context), ("steps", steps), ("queue", queue))
        )
        if cache_limit is not None and (
            isinstance(cache_limit, bool) or not isinstance(cache_limit, int) or cache_limit < 1
        ):
            raise UserError(f"cache_limit={cache_limit!r}: must be a number of bytes, at least 1, or None")
        if context > longest:
            raise UserError(f"context={context}: the model's is {longest}; lower it")
        self.model = model
        self.context = context
        self._num_rows, self._steps = rows, steps
        self.queue, self._cache_limit = queue, cache_limit
        self._arrived: deque[Ticket] = deque()  # since the last step, which other threads may be taking
        self._moving = threading.Lock()  # held while a request comes or changes places, and while `submit` counts them
        self._arrivals = itertools.count()
        self._waiting: dict[tuple, deque[Ticket]] = {}  # by the group that they need, in the order of arrival
        self._groups: dict[tuple, RowGroup] = {}
        self._reserved: dict[tuple, list[Arrival]] = {}
        self._admitted = 0
        self._steps_taken = 0
        self.turns = Turns()

    @property
    def waiting(self) -> int:
        """Requests that have no row yet."""
        return len(self._arrived) + sum(map(len, [*self._waiting.values()]))  # a copy: another thread may add groups

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return sum(row.ticket is not None for group in [*self._groups.values()] for row in group.rows)

    @property
    def capacity(self) -> int:
        """Requests that an idle engine takes before its next step: `rows` that start with it, and `queue` that wait."""
        return self._num_rows + self.queue

    @property
    def cache_bytes(self) -> int:
        """Bytes of the caches that are held now."""
        return sum(self._bytes(group.slots) for group in [*self._groups.values()])

    def bytes_for(self, config: DecodeConfig = DecodeConfig()) -> int:
        """Bytes of the cache that the first request with such settings takes."""
        return self._bytes(self._cache_slots(config))

    def submit(
        self, prompt: Prompt, config: DecodeConfig = DecodeConfig(), *, row: int = 0, name: str = "prompt",
        wait: bool = False,
    ) -> Ticket:  # fmt: skip
        """Adds a request. It starts with the next step, once a row is free.

        Args:
          prompt: text, messages or token ids, as for `generate`.
          config: its own settings.
          row: seeds its noise together with `config.seed`: row k draws what completion k of one `generate` call draws.
          name: how error messages call the prompt.
          wait: run the engine until the queue has room, instead of refusing.

        Raises:
          QueueFull: `capacity` requests wait or run already and at least `queue` of them wait, and `wait` is not set. Rows
            are counted once, for all groups together.
          UserError: what `generate` refuses; prompt and max_new_tokens exceed `context`; or the cache of such settings
            alone exceeds `cache_limit`.
        """
        request = make_request(self.model, prompt, config, row=row, name=name)
        length = len(request.prompt) + config.max_new_tokens
        if length > self.context:
            raise UserError(
                f"{name}: {len(request.prompt)} prompt tokens + max_new_tokens={config.max_new_tokens} exceed the engine's "
                f"context={self.context}; shorten the prompt, or lower max_new_tokens, or raise context"
            )
        self._require_memory(config)
        while True:
            with self._moving:
                if self.waiting < max(self.queue, self.capacity - self.running):
                    ticket = Ticket(self, request, self._key(request.config), next(self._arrivals))
                    self._arrived.append(ticket)
                    return ticket
            if not wait:
                raise QueueFull(
                    f"{name}: {self.waiting} requests wait already, as many as queue={self.queue} and free rows allow; "
                    "run the engine, raise queue, or submit with wait=True"
                )
            self.step()

    def step(self) -> bool:
        """Gives free rows to waiting requests, runs every group for at most `steps` steps, and hands out what came. Where another
        thread did so while this one waited for its turn, there is nothing left to do.

        Returns:
          whether any request waits or runs still.
        """
        taken = self._steps_taken
        with self.turns:
            if self._steps_taken == taken:
                self._step()
                self._steps_taken += 1
            return self.waiting > 0 or any(group.busy for group in self._groups.values())

    def _step(self) -> None:
        self._admit()
        busy = [key for key, group in self._groups.items() if group.busy]
        for key in busy:
            with self._memory_of(key):
                self._groups[key].launch(self._steps)
        for key in busy:
            with self._memory_of(key):
                if key in self._groups:
                    self._groups[key].collect()

    def run(self) -> None:
        """Steps until every request is done."""
        while self.step():
            pass

    def withdraw(self, ticket: Ticket) -> None:
        """Takes a request out of the queue or off its row; `Ticket.cancel` is what callers want."""
        self._queue_up()
        if ticket in self._waiting[ticket.group]:
            self._waiting[ticket.group].remove(ticket)
        for group in self._groups.values():
            group.withdraw(ticket)

    def _bytes(self, slots: int) -> int:
        return cache_bytes(self.model.config, self._num_rows, slots, self.model.mesh)

    def _queue_up(self) -> None:
        """Who has arrived stands behind those who need the same group."""
        with self._moving:
            while self._arrived:
                ticket = self._arrived.popleft()
                self._waiting.setdefault(ticket.group, deque()).append(ticket)

    def _admit(self) -> None:
        """In the order of arrival, but past requests whose own group is full."""
        self._queue_up()
        full: set[tuple] = set()
        while first := [tickets[0] for key, tickets in self._waiting.items() if tickets and key not in full]:
            ticket = min(first, key=lambda ticket: ticket.arrival)
            key = ticket.group
            if key in self._groups and not self._groups[key].idle:
                full.add(key)
                continue
            with self._memory_of(key, ticket):
                if key not in self._groups:
                    self._start()  # of a group that is closed now no row may be copied any more
                    if not self._open(key, ticket.request.config):
                        # It waits for memory. So do all behind it, or a group that is never idle would starve it.
                        break
                self._reserve(ticket, self._groups[key].idle)
        self._start()

    def _reserve(self, ticket: Ticket, idle: list[int]) -> None:
        """Gives a row to a request, which starts together with others; these start first where it can go on from what they
        prefill, or where they read from every row that it could take."""
        group, prompt = self._groups[ticket.group], ticket.prompt
        others = [*itertools.chain.from_iterable(self._reserved.values())]
        overwritten = {(other.group, other.row) for other in others}
        read = {(other.source, other.source_row) for other in others}
        places = [(held, row) for held in self._groups.values() for row in range(self._num_rows)]
        places = [place for place in places if place not in overwritten]
        best, shared = longest_prefix(prompt, [held.rows[row].tokens for held, row in places])
        free = [row for row in idle if (group, row) not in read]
        reused = [shared_length(prompt, other.ticket.prompt) for other in others]
        if not free or max(reused, default=0) >= shared + WORTH_WAITING:
            self._start()
            return  # it waits still, to look again at what the rows hold then
        row = choose_row(prompt, free, [row.tokens for row in group.rows], [row.used for row in group.rows])
        source = places[best] if shared else (group, row)
        self._admitted += 1
        with self._moving:
            self._waiting[ticket.group].remove(ticket)
            arrival = group.reserve(ticket, row, *source, shared, self._admitted)
        self._reserved.setdefault(ticket.group, []).append(arrival)

    def _start(self) -> None:
        """Starts the requests that have been given a row."""
        reserved, self._reserved = self._reserved, {}
        for key, arrivals in reserved.items():
            group = self._groups[key]
            for together in group.together(arrivals):
                if together[0].source not in self._groups.values():  # closed meanwhile, and its cache may be given away
                    with self._moving:
                        for arrival in together:
                            group.withdraw(arrival.ticket)
                        self._wait_again(key, [arrival.ticket for arrival in together])
                    continue
                with self._memory_of(key):
                    group.admit(together)
                if key not in self._groups:
                    break

    def _wait_again(self, key: tuple, tickets: Sequence[Ticket]) -> None:
        """Puts requests that have committed nothing back where they were in their queue, out of which those that are done go."""
        for ticket in tickets:
            ticket.start_over()
        left = {ticket for ticket in (*self._waiting[key], *tickets) if not ticket.done}
        self._waiting[key] = deque(sorted(left, key=lambda ticket: ticket.arrival))

    def _key(self, config: DecodeConfig) -> tuple:
        return *config.program(self.model.window_table), config.stop_id_slots

    def _cache_slots(self, config: DecodeConfig) -> int:
        return cache_slots(self.context, config.slots(self.model.window_table))

    def _open(self, key: tuple, config: DecodeConfig) -> bool:
        """Takes the cache of a new group, and closes idle ones where there is no room; False where it has to wait for rows that
        run."""
        size = self.bytes_for(config)
        idle = self._idle()
        if self._cache_limit is not None:
            while self.cache_bytes + size > self._cache_limit and idle:
                del self._groups[idle.pop(0)]
            if self.cache_bytes + size > self._cache_limit:
                return False
        LOG.info(
            "taking a cache of %s: %d rows of %d slots for decoder=%s",
            in_words(size), self._num_rows, self._cache_slots(config), config.decoder,
        )  # fmt: skip
        try:
            self._groups[key] = RowGroup(self.model, config, self._num_rows, self.context)
            return True
        except jax.errors.JaxRuntimeError as error:
            if not (out_of_memory(error) and idle):
                raise
        for other in idle:
            del self._groups[other]
        return self._open(key, config)

    def _idle(self) -> list[tuple]:
        """Groups that run nothing, the one that was used longest ago first."""
        return [key for _, key in sorted((group.used, key) for key, group in self._groups.items() if not group.busy)]

    def _require_memory(self, config: DecodeConfig) -> None:
        size = self.bytes_for(config)
        if self._cache_limit is not None and size > self._cache_limit:
            what = "rows or context" if config.sized_by is None else f"rows, context or {config.sized_by}"
            raise UserError(
                f"a cache of {self._num_rows} rows with {self._cache_slots(config)} slots takes "
                f"{in_words(size)}, more than cache_limit={self._cache_limit}: lower {what}, or raise cache_limit"
            )

    @contextlib.contextmanager
    def _memory_of(self, key: tuple, *started: Ticket) -> Iterator[None]:
        """Where the device is out of memory, gives up the group's cache. Where idle groups can be closed too, requests that have
        committed nothing start over without them; all others of the group fail, so that each is answered."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            held = self.cache_bytes
            line = UserError(
                f"out of memory with caches of {in_words(held)} and {self._num_rows} rows of context="
                f"{self.context} for decoder={key[0]}: lower rows (--batch-size) or context (the longest prompt, max_new_tokens)"
            )
            with self._moving:
                group = self._groups.pop(key, None)
                running = [] if group is None else [row.ticket for row in group.rows if row.ticket is not None]
                idle = self._idle()
                for other in idle:
                    del self._groups[other]
                hit = {*started, *running}
                again = [ticket for ticket in hit if idle and not ticket.ids]
                for ticket in hit.difference(again):
                    ticket.fail(line)
                self._wait_again(key, again)
