"""Ticket: one request in an engine, from `submit` to its completion."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import numpy as np

from wedlm_jax.decode.generation import Request, completion, nothing_verified
from wedlm_jax.decode.stats import Completion, FinishReason, Stats
from wedlm_jax.decode.text import Commit, Pieces
from wedlm_jax.engine.turns import Turns
from wedlm_jax.errors import UserError
from wedlm_jax.model.handle import Model


class Driver(Protocol):
    """What a ticket asks of its engine."""

    model: Model
    turns: Turns

    def step(self) -> bool: ...

    def withdraw(self, ticket: Ticket) -> None: ...


class Ticket:
    """What `Engine.submit` returns. Iterating over it, or asking for its `result`, runs the engine, and with it every
    other request; `Engine.step` serves all tickets alike.

    Attributes:
      ids: tokens committed so far.
      window: the slots after `ids`, as the last run left them: tokens that are filled and may change, None for masks.
      stats: counters so far.
      reused_tokens: tokens of the prompt that were not prefilled, because a row held them already.
      completion: what came out; None while the request waits or runs.
      prompt: the request's, int32 [tokens].
      group, arrival: the key of the rows that it needs, and its place in the order of arrival.
    """

    def __init__(self, engine: Driver, request: Request, group: tuple, arrival: int):
        self._engine, self.request = engine, request
        self.prompt = np.array(request.prompt, np.int32)
        self.group, self.arrival = group, arrival
        self.ids: list[int] = []
        self.window: list[int | None] = []
        self.stats = Stats(0, 0, 0)
        self.reused_tokens = 0
        self.completion: Completion | None = None
        self.error: UserError | None = None
        self.waits = True
        # Fields of the completion: what the AR chain said.
        self._verification: Callable[[], dict[str, Any]] = functools.partial(nothing_verified, request.config)
        self._commits: deque[Commit] = deque()
        self._pieces = Pieces(engine.model.tokenizer, request.config)

    @property
    def done(self) -> bool:
        return self.completion is not None or self.error is not None

    @property
    def status(self) -> Literal["waiting", "running", "done"]:
        return "done" if self.done else "waiting" if self.waits else "running"

    @property
    def has_news(self) -> bool:
        """Whether there is a commit that nobody has taken yet."""
        return bool(self._commits)

    def __iter__(self) -> Iterator[Commit]:
        """Tokens and text as they are committed; the pieces join to those of `result`.

        Raises:
          UserError: the memory for this request could not be had.
        """
        while True:
            last = self.done  # asked before the commits: another thread may bring the last ones in between
            # One at a time: whoever takes them may run the engine before asking for the next.
            while self._commits:
                yield self._commits.popleft()
            if last:
                break
            self._engine.step()
        if self.error is not None:
            raise self.error

    def take(self) -> list[Commit]:
        """The commits that nobody has taken yet, without running the engine: for a loop that serves several tickets. Where `done`
        was true before, they are the last."""
        return [self._commits.popleft() for _ in range(len(self._commits))]  # another thread may bring more meanwhile

    def result(self) -> Completion:
        """Runs the engine until this request is done. A cancelled one returns what it had.

        Raises:
          UserError: the memory for this request could not be had.
        """
        while not self.done:
            self._engine.step()
        if self.error is not None:
            raise self.error
        assert self.completion is not None
        return self.completion

    def cancel(self) -> None:
        """Ends the request with what it has; its row is free for the next one. Nothing happens to one that is done."""
        with self._engine.turns:
            if not self.done:
                self._engine.withdraw(self)
                self._finish("cancelled")

    def stop_string_at(self, ids: list[int]) -> int | None:
        """The fewest of `ids`, all that the row has emitted, whose text holds a stop string; or None."""
        return self._pieces.up_to_stop(ids) if self.request.config.stop else None

    def update(
        self,
        ids: list[int],
        window: list[int | None],
        stats: Stats,
        verification: Callable[[], dict[str, Any]],
        reason: FinishReason | None,
    ) -> None:
        """Takes over what a run of steps has brought. `ids` are all that are committed; `verification` is asked for where they
        are the last, before the next run."""
        self.ids, self.window, self.stats, self._verification = ids, window, stats, verification
        if reason is not None:
            self._finish(reason)
        elif commit := self._pieces.next(ids, finished=False):
            self._commits.append(commit)

    def start_over(self) -> None:
        """Waits for a row again; the one that it had is gone, and nothing was committed there."""
        self.waits, self.reused_tokens = True, 0
        self.window, self.stats = [], Stats(0, 0, 0)
        self._verification = functools.partial(nothing_verified, self.request.config)

    def fail(self, error: UserError) -> None:
        self.error, self.window, self._verification = error, [], dict

    def _finish(self, reason: FinishReason) -> None:
        self.window = []
        if commit := self._pieces.next(self.ids, finished=True):
            self._commits.append(commit)
        plain = completion(self._engine.model, self.request.config, self.ids, reason, self.stats)
        self.completion = dataclasses.replace(plain, **self._verification())  # now it is done, for every thread
        self._verification = dict  # what it read, the state of all rows, is not held any longer
