"""Serve a model to programs that speak OpenAI's HTTP protocol: chat windows, `openai`, lm-eval.

Where the environment variable WEDLM_JAX_API_KEY is set, clients have to bring that key.

python -m wedlm_jax.serve --model DIR
python -m wedlm_jax.serve --model DIR --decoder streaming --entropy-threshold 0.6 --rows 32
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
from typing import Annotated

import jax
import tyro

from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.measured_windows import measured_in_use
from wedlm_jax.engine import Engine
from wedlm_jax.engine.memory import in_words
from wedlm_jax.errors import UserError, entry
from wedlm_jax.flags import parse
from wedlm_jax.model_flags import ChatModelFlags
from wedlm_jax.serve.http import KEY, Server, say
from wedlm_jax.serve.service import Service

SMALLEST_CONTEXT = 3  # of the requests that compile: a prompt of two tokens, and its answer
LONG = 1.0  # seconds of compiling that the log tells of


@dataclasses.dataclass(frozen=True)
class Serve(ChatModelFlags):
    name: str | None = None
    """How clients name the model; None is what --model says."""
    host: str = "127.0.0.1"
    """Address to listen at; others than 127.0.0.1 open the model to the network, so set WEDLM_JAX_API_KEY."""
    port: int = 8000
    """0 takes a free one."""
    rows: int = 8
    """Requests that are decoded at once; others wait."""
    context: int | None = None
    """Tokens of a prompt and its answer at most; None is the model's, at most 4096."""
    queue: int = 256
    """Requests that may wait beside those for which rows are free; more are refused with status 429."""
    cache_limit: int | None = None
    """Bytes that all caches may take, one for each decoder and size of window in use; idle ones give way. None: the device's."""
    steps: int = 4
    """Forwards between two looks at who has come, left or finished: fewer stream in smaller pieces, more cost the host less."""
    decode: Annotated[DecodeConfig, tyro.conf.arg(name="")] = DecodeConfig(decoder="verified", max_new_tokens=512)


def serve(args: Serve) -> None:
    """Answers until SIGINT or SIGTERM, which end running answers with what they have."""
    if args.decode.seed != DecodeConfig.seed:
        raise UserError("--seed does nothing here: a request brings its own, or draws another one each time")
    if args.context is not None and args.context < SMALLEST_CONTEXT:
        raise UserError(f"--context {args.context}: must be at least {SMALLEST_CONTEXT}")
    with Server(args.host, args.port, key()) as server:
        model = args.load()
        engine = Engine(
            model,
            rows=args.rows,
            context=args.context,
            queue=args.queue,
            steps=args.steps,
            cache_limit=args.cache_limit,
        )
        for line in measured_in_use(model, [args.decode]):
            say(line)
        failed = threading.Event()

        def end() -> None:
            failed.set()
            server.shutdown()

        server.service = Service(engine, args.name or args.model, args.decode, broken=end)
        tell_what_is_waited_for()
        say("compiling")
        for token, temperature in enumerate((0.0, 1.0)):  # each a program, and while one is compiled all streams wait
            config = dataclasses.replace(args.decode, temperature=temperature, max_new_tokens=1)
            engine.submit([token] * (SMALLEST_CONTEXT - 1), config).result()  # another token: nothing is used again
        say(
            f"{server.service.name} at {server.url}: {args.rows} rows of {engine.context} tokens, a cache of "
            f"{in_words(engine.cache_bytes)}; Ctrl-C ends"
        )
        for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell's background job is started without it
            signal.signal(number, signal.default_int_handler)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("ending; once more ends at once")
        status = 0
        try:
            answered = server.service.close()
        except KeyboardInterrupt:
            answered, status = False, 130
    if failed.is_set():
        raise UserError("a step failed, and the engine is of no use after it; start it again")
    if not answered:
        say("ended before every answer was sent")
        os._exit(status)  # Python's own end would abort in a thread that takes a step or scores a prompt


class EngineLog(logging.Handler):
    """What an engine logs, such as caches that it takes, as lines of the server's log."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def tell_what_is_waited_for() -> None:
    """From here on the log tells why requests wait: for the cache of the first of a kind, or while a program was compiled."""

    def compiled(event: str, duration_secs: float, **about: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and duration_secs >= LONG:
            say(f"compiled a program in {duration_secs:.1f} s")

    jax.monitoring.register_event_duration_secs_listener(compiled)
    of_engine = logging.getLogger("wedlm_jax.engine")
    of_engine.setLevel(logging.INFO)
    of_engine.addHandler(EngineLog())


def key() -> str | None:
    """What clients have to bring.

    Raises:
      UserError: it is empty, or does not fit in a header.
    """
    said = os.environ.get(KEY)
    if said is not None and not (said.isascii() and said.isprintable() and said.strip() == said != ""):
        raise UserError(f"{KEY}: must be printable ASCII without spaces around it; unset it to ask for no key")
    return said


@entry
def main() -> None:
    serve(parse(Serve, prog="python -m wedlm_jax.serve", description=__doc__))


if __name__ == "__main__":
    main()
