"""What a terminal shows: finished lines once, and behind the committed text the window, filled out of order."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

from rich.console import Console

from wedlm_jax.chat.screen import MASK, PlainScreen, TerminalScreen, window_text
from wedlm_jax.decode.text import Commit

from ..decode.test_stream import TEXT, reciter, settings, tokenizer
from ..engine.models import engine


def test_masks_are_dim_dots_and_half_characters_are_dots():
    half = tokenizer().encode("世")[0]
    a, b = tokenizer().encode("ab")
    shown = window_text([a, None, b, b, None, half, None], tokenizer())
    assert shown.plain == f"a{MASK}bb{MASK}{MASK}{MASK}"
    assert [str(span.style) for span in shown.spans] == ["cyan", "dim", "cyan", "dim", "cyan", "dim"]
    assert window_text([], tokenizer()).plain == ""


def test_a_terminal_obeys_no_character_of_a_model():
    """Which could rename its window, or fill the clipboard; a line end and a tab are text, and so is what joins an emoji."""
    written, stream = "\x1b]0;mine\x07\x9b31mred\x7f\ttab\u3000👩\u200d🚀\r\nnext\x1b[2J", io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system=None, width=60, legacy_windows=False)
    ticket = SimpleNamespace(take=lambda: [Commit([], written)], window=tokenizer().encode("\x1b]0;again\x07"))
    with TerminalScreen(console, tokenizer()) as screen:
        screen.update(ticket)
    shown = re.sub(r"\x1b\[(\?25[lh]|1A|2K)", "", stream.getvalue())  # of rich's: the cursor, and what is drawn anew
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", shown)
    assert "\N{REPLACEMENT CHARACTER}]0;mine" in shown and "\N{REPLACEMENT CHARACTER}]0;again" in shown
    assert "tab\u3000👩\u200d🚀" in shown


def shown_by(screen, stream: io.StringIO, ticket) -> str:
    with screen:
        while not ticket.done:
            ticket._engine.step()
            screen.update(ticket)
    return stream.getvalue()


def test_a_pipe_gets_the_text_and_a_line_end():
    stream = io.StringIO()
    ticket = engine(reciter(TEXT, end=True)).submit("x", settings("verified"))
    assert shown_by(PlainScreen(Console(file=stream)), stream, ticket) == TEXT + "\n"


def test_a_line_that_the_screen_does_not_hold_is_drawn_from_its_end(monkeypatch):
    """What has scrolled off cannot be erased, and would be there once more after every forward."""
    text, drawn = " ".join(map(str, range(12))), []
    monkeypatch.setattr("wedlm_jax.chat.screen.Live.update", lambda live, shown, refresh: drawn.append(shown.plain))
    ticket = engine(reciter(text, end=True)).submit("x", settings("verified", max_new_tokens=60))
    console = Console(file=io.StringIO(), force_terminal=True, width=5, height=4, legacy_windows=False)
    shown = shown_by(TerminalScreen(console, tokenizer()), console.file, ticket)
    assert max(len(lines.split("\n")) for lines in drawn) == 3 and drawn[-1].endswith("11")
    assert re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).strip() == text


def test_a_terminal_ends_with_the_whole_text_and_has_shown_masks():
    text, stream = "one\ntwo\nthree", io.StringIO()
    ticket = engine(reciter(text, end=True)).submit("x", settings("streaming_eager", entropy_threshold=None))
    console = Console(file=stream, force_terminal=True, width=60, legacy_windows=False)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown_by(TerminalScreen(console, tokenizer()), stream, ticket))
    lines = [line.strip() for line in shown.replace("\r", "\n").split("\n")]
    whole = [line for line in lines if line in ("one", "two", "three")]
    assert whole[-1] == "three" and {"one", "two"} <= set(whole)
    assert any(MASK in line for line in lines) and MASK not in lines[-2]
