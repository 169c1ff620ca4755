"""What comes of reading a checkpoint that is damaged: one line, and not those of the many reads that fail beside the first."""

from __future__ import annotations

import functools
import gc
import logging
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from wedlm_jax.errors import UserError, out_of_memory


def read_or_say_why(path: Path, read: Callable[[], Any]) -> tuple[Any, UserError | None]:
    """What `read` returns, or None and why the checkpoint at `path` cannot be read.

    Raises:
      UserError: a file of it may not be read.
      JaxRuntimeError: the files are whole, and too large for the memory.
    """
    hook, asyncio = sys.unraisablehook, logging.getLogger("asyncio")
    # Of the reads that end behind the first that failed nobody hears: threads of tensorstore find the event loop closed, and
    # asyncio errors that nobody looked at.
    sys.unraisablehook, asyncio.disabled = functools.partial(unless_loop_is_closed, hook), True
    result, failure = None, None
    try:
        result = read()
    except Exception as error:  # orbax and tensorstore raise many types for files that are not there or cut off
        if isinstance(error, jax.errors.JaxRuntimeError) and out_of_memory(error):
            raise
        _require_permission(path)
        # Not its `reason`, but all that it says: of a checkpoint's many files it may name the one.
        said = textwrap.shorten(str(error), 300, placeholder=" ...")
        failure = unreadable(path, f"{type(error).__name__}: {said}")
    finally:
        if failure is None:
            sys.unraisablehook = hook
        else:
            gc.collect()  # while asyncio is still
        asyncio.disabled = False
    return result, failure


def unless_loop_is_closed(hook: Callable[[Any], None], unraisable: Any) -> None:
    """`hook`, but for what threads of tensorstore raise behind a read or a write that has failed, at any time."""
    if not (isinstance(unraisable.exc_value, RuntimeError) and "Event loop is closed" in str(unraisable.exc_value)):
        hook(unraisable)


def unreadable(path: Path, why: str) -> UserError:
    return UserError(f"{path}: the checkpoint cannot be read ({why})")


def _require_permission(path: Path) -> None:
    """Raises a `UserError` where a file of a checkpoint may not be read: it is another user's, as of a container run as root,
    and no training mends it. Orbax says of some of them that they are not there."""

    def refuse(error: OSError) -> None:
        if isinstance(error, PermissionError):
            raise UserError(
                f"{error.filename}: permission denied; allow reading it, and all of {path.parent}"
            ) from None

    for folder, _, files in os.walk(path, onerror=refuse):
        for file in files:
            try:
                open(os.path.join(folder, file), "rb").close()
            except OSError as error:
                refuse(error)
