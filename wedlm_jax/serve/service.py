"""Service: requests of many clients over one engine, which a thread of its own runs, and an end that all of them come to."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.prompts import Prompt, encode_prompt, render_messages
from wedlm_jax.engine import Engine, Ticket
from wedlm_jax.errors import UserError
from wedlm_jax.serve.asked import Asked

# For requests that are cancelled. A step that compiles may take longer, prompts that are scored, a client that does not read.
SECONDS_TO_END = 30
ENDING = "the server is about to end"
COMPOSED = 4  # characters, at most, of which a tokenizer that normalizes text (NFC) makes one


class Closed(Exception):
    """The service takes no more requests."""


class ContextExceeded(UserError):
    """A prompt, or it and its answer, is longer than the context. Clients tell it from other refusals by OpenAI's `CODE` or by
    the words, LangChain by "prompt is too long" and LiteLLM by "this model's maximum context length is", and then shorten the
    conversation or ask a model with more room."""

    CODE = "context_length_exceeded"

    def __init__(self, name: str, length: str, context: int, mend: str = "shorten it"):
        limit = f"this model's maximum context length is {context} tokens"
        super().__init__(f"{name} is too long: {length} where {limit}; {mend}")


class Call:
    """A request that is being answered.

    Attributes:
      tickets: one for each completion.
    """

    def __init__(self, tickets: Sequence[Ticket], stream: bool):
        self.tickets = tickets
        self._stream = stream
        self._news = threading.Event()
        self._failure: Exception | None = None

    @property
    def done(self) -> bool:
        return all(ticket.done for ticket in self.tickets)

    def wait(self, seconds: float) -> None:
        """Until there is something to send, a piece of a stream or a whole answer, or so many seconds are over.

        Raises:
          Exception: what a step has failed with.
        """
        self._news.wait(seconds)
        self._news.clear()  # before the tickets are looked at, or what comes meanwhile would be missed
        if self._failure is not None:
            raise self._failure

    def tell(self, failure: Exception | None = None) -> None:
        """Wakes who waits, where there is something to send."""
        self._failure = self._failure or failure
        if self._failure or self.done or (self._stream and any(ticket.has_news for ticket in self.tickets)):
            self._news.set()


class Service:
    """Answers requests.

    Args:
      engine: of the model; a thread runs it while there is a request.
      name: of the model, for clients.
      defaults: settings that a request leaves out.
      broken: called where a step fails: the engine is of no use after it.
    """

    def __init__(self, engine: Engine, name: str, defaults: DecodeConfig, broken: Callable[[], None] = lambda: None):
        self.engine, self.name, self.defaults = engine, name, defaults
        self._broken = broken
        tokenizer = engine.model.tokenizer
        longest = math.inf if tokenizer is None else max(map(len, tokenizer.get_vocab()))
        self._most_characters = engine.context * longest * COMPOSED  # no longer text fits in the context
        self._open: set[Call] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._runner = threading.Thread(target=self._run, daemon=True)
        self._runner.start()

    @contextlib.contextmanager
    def serving(self, asked: Asked) -> Iterator[Call]:
        """The call of a request, whose tickets are cancelled where the block is left before they are done.

        Raises:
          UserError: what `Engine.submit` refuses, and more completions than an idle engine takes.
          Closed: `close` was called, or a step has failed.
        """
        if (count := len(asked.prompts) * asked.n) > self.engine.capacity:
            raise UserError(
                f"{count} completions in one request: at most {self.engine.capacity} may run and wait; ask in several"
            )
        tickets: list[Ticket] = []
        call = Call(tickets, asked.stream)
        try:
            names = ["prompt"] if len(asked.prompts) == 1 else [f"prompt {i}" for i in range(len(asked.prompts))]
            encoded = [self._encoded(prompt, name) for prompt, name in zip(asked.prompts, names, strict=True)]
            # An engine that has nothing else to do steps once all are there, so short prompts are prefilled together.
            for number, (ids, name) in enumerate(zip(encoded, names, strict=True)):
                config = self._with_room(asked, len(ids), name)
                for row in range(number * asked.n, (number + 1) * asked.n):
                    tickets.append(self.engine.submit(ids, config, row=row, name=name))
            with self._changed:
                if self._closed:
                    raise Closed(ENDING)
                self._open.add(call)
                self._changed.notify_all()
            yield call
        finally:
            try:
                self._cancel([call])
            finally:
                with self._changed:
                    self._open.discard(call)
                    self._changed.notify_all()

    def close(self) -> bool:
        """Takes no more requests, fails those of which nothing has started, ends the others with what they have, and waits until
        all are answered, but not for ever.

        Returns:
          whether all are answered and the engine stands still.
        """
        with self._changed:
            self._closed = True
            still_open = [*self._open]
            self._changed.notify_all()
        with self.engine.turns:  # at once: a row that one leaves could start another
            self._refuse_waiting(still_open)
            self._cancel(still_open)
        for call in still_open:
            call.tell()
        with self._changed:
            self._changed.wait_for(lambda: not self._open, SECONDS_TO_END)
        self._runner.join(SECONDS_TO_END)
        return not self._open and not self._runner.is_alive()

    def _run(self) -> None:
        """Steps of the engine, for all, while there is a request."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_work() or self._closed)
                if not self._has_work():
                    return
            failure = None
            try:
                self.engine.step()
            except Exception as error:
                failure = error
            with self._changed:
                self._closed |= failure is not None
                calls = [*self._open]
            for call in calls:
                call.tell(failure)
            if failure is not None:
                self._broken()
                return

    def _has_work(self) -> bool:
        return not all(call.done for call in self._open)

    def _refuse_waiting(self, calls: Sequence[Call]) -> None:
        """Fails calls of which no completion has a row: an empty answer would be taken for what the model says."""
        for call in calls:
            if all(ticket.status == "waiting" for ticket in call.tickets):
                for ticket in call.tickets:
                    self.engine.withdraw(ticket)
                    ticket.fail(UserError(ENDING))

    def _cancel(self, calls: Sequence[Call]) -> None:
        left = [ticket for call in calls for ticket in call.tickets if not ticket.done]
        if left:
            with self.engine.turns:  # at once: between two turns a step could be taken
                for ticket in left:
                    ticket.cancel()

    def _encoded(self, prompt: Prompt, name: str) -> list[int]:
        """Token ids. What cannot fit is refused before it is encoded: meanwhile the texts of all others would wait."""
        context = self.engine.context

        def require_short(text: str) -> None:
            if len(text) > self._most_characters:
                raise ContextExceeded(name, f"{len(text)} characters", context)

        if isinstance(prompt, Mapping):
            if (count := len(prompt["messages"])) > context:  # of which each is a token, and more
                raise ContextExceeded(name, f"{count} messages", context)
            prompt = render_messages(self.engine.model, prompt, name, require_short)
        elif isinstance(prompt, str):
            require_short(prompt)
        return encode_prompt(self.engine.model, prompt, name)

    def _with_room(self, asked: Asked, prompt: int, name: str) -> DecodeConfig:
        """The settings of a request behind so many tokens: without a limit of its own, for an answer as long as there is room."""
        context, most = self.engine.context, asked.config.max_new_tokens
        room = context - prompt
        if room < 1:
            raise ContextExceeded(name, f"{prompt} tokens leave no room for an answer", context)
        if asked.limited and most > room:
            length = f"{prompt} tokens + max_tokens={most}"
            raise ContextExceeded(name, length, context, "shorten it or lower max_tokens")
        return dataclasses.replace(asked.config, max_new_tokens=min(most, room))
