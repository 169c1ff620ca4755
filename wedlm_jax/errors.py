"""The one error that users are meant to read, and how an entry prints it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from wedlm_jax.version import __version__


class UserError(ValueError):
    """Bad input: a config, data line, checkpoint, weight file, prompt or flag.

    The message is one line that names the file, line or field and the mend.
    """


@contextlib.contextmanager
def writing(path: Path, mend: str = "make room or name another place") -> Iterator[None]:
    """Around what writes `path`: a full disk, or a folder that may not be written, becomes a `UserError` that names it."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"{path}: cannot be written ({reason}); {mend}") from error


def entry(main: Callable[[], None]) -> Callable[[], None]:
    """Wraps a command: a `UserError`, or a file that the system refuses, becomes `error: ...` on stderr and exit status 2,
    without a traceback. `--version` is answered here, for every command."""

    @functools.wraps(main)
    def run() -> None:
        if "--version" in sys.argv[1:]:
            print(f"wedlm_jax {__version__}")
            return
        try:
            main()
        except UserError as error:
            _exit(str(error))
        except OSError as error:
            if error.filename is None:
                raise
            _exit(f"{error.filename}: {(error.strerror or str(error)).lower()}")

    return run


def _exit(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
