"""The one error that users are meant to read, and how an entry prints it."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import select
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from wedlm_jax.version import __version__


class UserError(ValueError):
    """Bad input: a config, data line, checkpoint, weight file, prompt or flag.

    The message is one line that names the file, line or field and the mend.
    """


def out_of_memory(error: Exception) -> bool:
    """Whether a `JaxRuntimeError` says that what a device was asked for does not fit in its memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def reason(error: BaseException) -> str:
    """An exception in a few words, for a message of one line."""
    text = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    return " ".join(text.split())[:200]


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Around what reads `path`: where the system does not, at once or in the midst of training, a `UserError` names it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({reason(error)})") from None


@contextlib.contextmanager
def writing(path: Path, then: str = "or name another place") -> Iterator[None]:
    """Around what writes `path`: a full disk, or a folder that may not be written, becomes a `UserError` that names it, and the
    mend: `room_for` it, and `then` what else."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({reason(error).lower()}); {room_for(error)} {then}") from error


def room_for(error: BaseException) -> str:
    """What lets a file be written that could not be: room, or the permission, of which orbax tells in words of its own."""
    text = reason(error).lower()
    denied = isinstance(error, PermissionError) or "permission denied" in text or "read-only file system" in text
    return "allow writing there" if denied else "make room"


def say_interrupted() -> None:
    """Ctrl-C before a command begins, while it is imported, is one word too: Python ends by the signal, which shells call 130."""
    hook = sys.excepthook

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
        else:
            hook(kind, error, trace)

    sys.excepthook = say


_PYTHONS_OWN = warnings.formatwarning


def _as_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning to users without the place in the code that it comes from, as the other lines of a command."""
    if category is UserWarning:
        return f"warning: {message}\n"
    return _PYTHONS_OWN(message, category, filename, lineno, line)


def entry(main: Callable[[], None]) -> Callable[[], None]:
    """Wraps a command: a `UserError`, a file that the system refuses, a full disk, a device with too little memory or a kind of
    device that is not there becomes `error: ...` on stderr and exit status 2, without a traceback, and Ctrl-C one word and 130,
    as shells have it. One whose reader has left (`| head`) ends there with exit status 1, silently. `--version` is answered here,
    for every command."""

    @functools.wraps(main)
    def run() -> None:
        if "--version" in sys.argv[1:]:
            print(f"wedlm_jax {__version__}")
            return
        if isinstance(sys.stdout, io.TextIOWrapper):
            # What the terminal's encoding has no letters for is printed as escapes, as on stderr, and ends no training.
            sys.stdout.reconfigure(errors="backslashreplace")
        warnings.formatwarning = _as_one_line
        try:
            try:
                main()
            finally:
                sys.stdout.flush()
        except UserError as error:
            _exit(str(error))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)
        except (AssertionError, RuntimeError) as error:
            if out_of_memory(error):  # where nobody knew what to lower, as in loading
                _exit(
                    f"a device has too little memory ({reason(error)}); end what else uses it, cut the model over more devices "
                    "(mesh), or do it on the CPU (JAX_PLATFORMS=cpu)"
                )
            if not _no_device(error):
                raise
            asked = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
            _exit(f"{asked}: jax finds no such device here ({reason(error)}); unset it, or install jax for that device")
        except OSError as error:
            if isinstance(error, BrokenPipeError) and _reader_has_left():
                sys.exit(1)
            if error.filename is not None:
                _exit(f"{error.filename}: {reason(error).lower()}")
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            _forget_unwritten()
            what = "what is printed, or a file, cannot be written"
            _exit(f"{what} ({reason(error).lower()}); make room or name another place")

    return run


def _no_device(error: BaseException) -> bool:
    """Whether jax did not find the kind of device that it was told to use: of a plugin that is not there it says no more than an
    assertion."""
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].name == "backends" and Path(frames[-1].filename).name == "xla_bridge.py"


def forget_closed_output() -> None:
    """Lets what is still printed to a terminal that is closed, or to a pipe whose reader has left, go nowhere."""
    for output in (1, 2):
        if _is_closed(output):
            _forget(output)


def _reader_has_left() -> bool:
    """Whether nobody reads stdout any more."""
    stdout = sys.stdout.fileno()
    if not _is_closed(stdout):
        return False
    _forget(stdout)
    return True


def _is_closed(output: int) -> bool:
    poll = select.poll()
    poll.register(output, 0)
    return bool(poll.poll(0))


def _forget_unwritten() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _forget(sys.stdout.fileno())


def _forget(output: int) -> None:
    """What is left to write goes nowhere, or Python would complain of it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)


def _exit(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def shown(value: object) -> str:
    """A value in an error: the first characters of its repr, in one line."""
    return " ".join(repr(value).split())[:80]
