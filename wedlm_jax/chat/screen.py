"""How an answer is shown while it comes: in a terminal with what is filled out of order, elsewhere as plain text."""

from __future__ import annotations

import re
import time
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from wedlm_jax.data.tokenizer import decoder_behind
from wedlm_jax.engine import Ticket

MASK, HALF_CHARACTER = "·", "\N{REPLACEMENT CHARACTER}"
OBEYED = re.compile(r"[\x00-\x08\v\f\x0e-\x1f\x7f-\x9f]")  # by a terminal; tabs and line ends are text


class Screen(Protocol):
    """Where one answer appears."""

    steps: int  # decode steps between two looks

    def __enter__(self) -> Screen: ...

    def __exit__(self, *exception: object) -> None: ...

    def update(self, ticket: Ticket) -> None: ...


class PlainScreen:
    """Text as it is committed, for pipes and files."""

    steps = 8

    def __init__(self, console: Console):
        self._console = console

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *exception: object) -> None:
        self._console.file.write("\n")
        self._console.file.flush()

    def update(self, ticket: Ticket) -> None:
        self._console.file.write("".join(commit.text or "" for commit in ticket.take()))
        self._console.file.flush()


class TerminalScreen:
    """Finished lines are printed; the last one is drawn anew after each forward, with the window behind it: as much of its end
    as the screen holds."""

    steps = 1

    def __init__(self, console: Console, tokenizer: Any):
        self._console, self._tokenizer = console, tokenizer
        self._line = ""  # committed text behind the last line end

    def __enter__(self) -> TerminalScreen:
        self._live = Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="visible")
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()
        self._print(self._line)

    def update(self, ticket: Ticket) -> None:
        committed = harmless("".join(commit.text or "" for commit in ticket.take()))
        *lines, self._line = (self._line + committed).split("\n")
        for line in lines:
            self._print(line)
        drawn = (Text(self._line) + window_text(ticket.window, self._tokenizer)).wrap(
            self._console, self._console.width
        )
        # Rows that have left the screen cannot be drawn anew, but would come again with each forward.
        self._live.update(Text("\n").join(drawn[1 - self._console.height :]), refresh=True)

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


def harmless(text: str) -> str:
    """Text of a model with a replacement character for each that a terminal would obey, as ESC."""
    return OBEYED.sub("\N{REPLACEMENT CHARACTER}", text)


def window_text(window: list[int | None], tokenizer: Any) -> Text:
    """Filled tokens as text, masks as dim dots; tokens that make half a character are dots too, control tokens nothing."""
    decode = decoder_behind(tokenizer)
    shown, run = Text(), []
    for token in [*window, None]:
        if token is not None:
            run.append(token)
            continue
        text = decode(run, skip_special_tokens=True).replace("\n", " ")
        shown.append(harmless(text.replace(HALF_CHARACTER, MASK)), style="cyan").append(MASK, style="dim")
        run = []
    return shown[:-1] if window else Text()


def summary(ticket: Ticket, started: float) -> str:
    """One line on a finished answer. The time is that of the whole answer, prefill included."""
    assert ticket.completion is not None
    stats, seconds = ticket.stats, time.perf_counter() - started
    return (
        f"[{ticket.completion.finish_reason}; {stats.generated_tokens} tokens, "
        f"{stats.tokens_per_forward:.2f} tokens per forward, {stats.generated_tokens / seconds:.1f} tokens/s, "
        f"{ticket.reused_tokens} of {len(ticket.request.prompt)} prompt tokens cached]"
    )
