"""Chat with a model and watch tokens land in parallel.

python -m wedlm_jax.chat --model DIR
python -m wedlm_jax.chat --model DIR --plain        # a base model: it continues what you write

Commands: /reset starts a new conversation, /quit or the end of input leaves. Ctrl-C ends the answer. With --plain any other line
is continued, whatever it begins with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import signal
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import tyro
from rich.console import Console

from wedlm_jax.chat.conversation import Conversation
from wedlm_jax.chat.screen import PlainScreen, Screen, TerminalScreen, summary
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.generation import bucket
from wedlm_jax.decode.measured_windows import measured_in_use
from wedlm_jax.engine import Engine, Ticket
from wedlm_jax.errors import UserError, entry
from wedlm_jax.flags import TextFlag, parse
from wedlm_jax.model_flags import ChatModelFlags

# Two tokens of a prompt, of which one is prefilled, and one of an answer: with them all is compiled.
SMALLEST_CONTEXT = 3


@dataclasses.dataclass(frozen=True)
class Chat(ChatModelFlags):
    system: TextFlag = None
    """What the system says first."""
    plain: bool = False
    """No chat template: the model continues what you write, for base models."""
    context: int | None = None
    """Tokens of the whole conversation at most; None is the model's, at most 4096."""
    decode: Annotated[DecodeConfig, tyro.conf.arg(name="")] = DecodeConfig(decoder="verified", max_new_tokens=512)


def chat(args: Chat, console: Console) -> None:
    """Answers line by line until the input ends. On a terminal an error is shown and the conversation goes on; a pipe
    fails."""
    if args.context is not None and args.context < SMALLEST_CONTEXT:
        raise UserError(f"--context {args.context}: leaves no room for a conversation; at least {SMALLEST_CONTEXT}")
    if args.plain and args.chat_template_kwargs is not None:
        raise UserError("--chat-template-kwargs needs the chat template; leave out --plain")
    notes = console if console.is_terminal else Console(stderr=True)  # what is not the answer
    model = args.load()
    conversation = Conversation(model, plain=args.plain, system=args.system)
    engine = Engine(
        model, rows=1, context=args.context, steps=TerminalScreen.steps if console.is_terminal else PlainScreen.steps
    )
    for line in measured_in_use(model, [args.decode]):
        note(notes, line)
    # Answers are not timed with compilation: of the first prompt, unless the first line is long, and of short turns behind it.
    hello = conversation.prompt("Hello")
    first = min(len(hello), engine.context - 1)
    lengths = {bucket(length): length for length in (SMALLEST_CONTEXT - 1, first)}.values()
    with notes.status("compiling"):
        # Another token each, and none that a conversation begins with: nothing is used again.
        others = (token for token in range(model.config.vocab_size) if token != hello[0])
        for token, length in zip(others, lengths, strict=False):
            engine.submit([token] * length, dataclasses.replace(args.decode, max_new_tokens=1)).result()
    for line in spoken(console):
        said = line.strip()
        if said == "/quit":
            return
        if said == "/reset":
            conversation.reset()
            note(notes, "a new conversation")
        elif said.startswith("/") and " " not in said and not args.plain:  # a path or a comment may be continued
            note(notes, f"{said}: no such command; /reset starts a new conversation, /quit leaves")
        else:
            if args.plain:  # what is to be continued counts as it is, the indentation of code above all
                said = line
            screen = TerminalScreen(console, model.tokenizer) if console.is_terminal else PlainScreen(console)
            try:
                started = time.perf_counter()
                ticket = answer(engine, conversation.prompt(said), args.decode, screen)
            except UserError as error:
                if not console.is_terminal:
                    raise
                note(notes, f"error: {error}")
                continue
            conversation.add(said, ticket)
            note(notes, summary(ticket, started))


def answer(engine: Engine, prompt: list[int], config: DecodeConfig, screen: Screen) -> Ticket:
    """Runs one answer and shows it. Ctrl-C ends it with what it has.

    Raises:
      UserError: the conversation leaves no room for an answer.
    """
    room = engine.context - len(prompt)
    if room < 1:
        raise UserError(
            f"the conversation with this line fills the context of {engine.context} tokens; /reset starts a new one, a shorter "
            "line or a larger --context leaves more room"
        )
    ticket = engine.submit(prompt, dataclasses.replace(config, max_new_tokens=min(config.max_new_tokens, room)))
    with ctrl_c() as pressed, screen:
        while not ticket.done:
            engine.step()
            if pressed:
                ticket.cancel()
            screen.update(ticket)
    ticket.result()  # raises where memory ran out
    return ticket


def spoken(console: Console) -> Iterator[str]:
    """The user's lines as written, without their ends and without empty ones."""
    asks = console.is_terminal and sys.stdin.isatty()
    if asks:
        # Makes `input` edit its line: the terminal itself would drop what is typed or pasted behind 4,095 bytes, and put arrow
        # keys into the text. Not every Python has it.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    while True:
        try:
            line = input("> ") if asks else sys.stdin.readline()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not asks:  # nobody reads the advice
                raise
            note(console, "/quit leaves")
            continue
        if not line and not asks:  # a line that is read has its end, and only the end of input is empty
            return
        if line.strip():
            yield line.rstrip("\r\n")


@contextlib.contextmanager
def ctrl_c() -> Iterator[list[int]]:
    """Inside, Ctrl-C does not interrupt: it adds to the list. An interrupted step would lose the state that it was given."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def note(console: Console, line: str) -> None:
    console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


@entry
def main() -> None:
    args = parse(Chat, prog="python -m wedlm_jax.chat", description=__doc__)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a line that is not UTF-8 is no reason to end
    chat(args, Console())


if __name__ == "__main__":
    main()
