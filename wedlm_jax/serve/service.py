"""Service: requests of many clients over one engine, each in a thread of its own, and an end that all of them come to."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence

from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.prompts import encode_prompt
from wedlm_jax.engine import Engine, Ticket
from wedlm_jax.serve.answer import Answer
from wedlm_jax.serve.asked import Asked

SECONDS_TO_END = 30  # for requests that are cancelled; a step that compiles may take longer


class Closed(Exception):
    """The service takes no more requests."""


class Service:
    """Answers requests. Whoever waits for one runs the engine, in turns with the others.

    Args:
      engine: of the model.
      name: of the model, for clients.
      defaults: settings that a request leaves out.
      broken: called where a step fails: the engine is of no use after it.
    """

    def __init__(self, engine: Engine, name: str, defaults: DecodeConfig, broken: Callable[[], None] = lambda: None):
        self.engine, self.name, self.defaults = engine, name, defaults
        self._broken = broken
        self._open: set[Ticket] = set()
        self._changed = threading.Condition()
        self._closed = False

    @contextlib.contextmanager
    def serving(self, asked: Asked) -> Iterator[list[Ticket]]:
        """The tickets of a request, which are cancelled where the block is left before they are done.

        Raises:
          UserError: what `Engine.submit` refuses.
          Closed: `close` was called.
        """
        tickets: list[Ticket] = []
        try:
            with self.engine.turns:  # no step before all are there: short prompts are prefilled together
                for number, prompt in enumerate(asked.prompts):
                    name = "prompt" if len(asked.prompts) == 1 else f"prompt {number}"
                    ids = encode_prompt(self.engine.model, prompt, name)
                    config = asked.config if asked.limited else self._with_room(asked.config, len(ids))
                    for row in range(number * asked.n, (number + 1) * asked.n):
                        tickets.append(self.engine.submit(ids, config, row=row, name=name))
            with self._changed:
                if self._closed:
                    raise Closed("the server is about to end")
                self._open.update(tickets)
            yield tickets
        finally:
            try:
                for ticket in tickets:
                    if not ticket.done:
                        ticket.cancel()
            finally:
                with self._changed:
                    self._open.difference_update(tickets)
                    self._changed.notify_all()

    def answer(self, asked: Asked, tickets: Sequence[Ticket], *, chat: bool) -> Answer:
        """In the words of `chat/completions`, or else of `completions`."""
        return Answer(self.engine.model, self.name, asked, tickets, chat=chat)

    def step(self) -> None:
        """One step of the engine, for all."""
        try:
            self.engine.step()
        except Exception:
            self._broken()
            raise

    def close(self) -> None:
        """Takes no more requests, ends those that run with what they have, and waits until they are answered."""
        with self._changed:
            self._closed = True
            still_open = list(self._open)
        for ticket in still_open:
            ticket.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._open, SECONDS_TO_END)

    def _with_room(self, config: DecodeConfig, prompt: int) -> DecodeConfig:
        """An answer as long as there is room for, and no longer than the settings have it."""
        room = max(1, self.engine.context - prompt)
        return dataclasses.replace(config, max_new_tokens=min(config.max_new_tokens, room))
