"""One training at a time in a workdir: a second one would take the checkpoint that the first is writing for what a killed run
left half written, and delete it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

from wedlm_jax.distributed import is_main
from wedlm_jax.errors import UserError, writing

LOCK_FILE = ".training"  # locked, and empty
_GRACE = 5.0  # seconds: a training whose study was killed ends a little later than that


@contextlib.contextmanager
def sole_writer(workdir: Path) -> Iterator[None]:
    """Inside, no other process on the machine, or on another one that shares the folder, is inside for the same folder.

    The lock is the process's: it ends with it, however that ends, and holds nobody in the same process off. A file system that
    has no locks (a bucket that is mounted) goes without.

    Args:
      workdir: made where it is not there; in processes other than the main one nothing is done.

    Raises:
      UserError: another process has been inside for five seconds, or the folder cannot be written.
    """
    if not is_main():
        yield
        return
    with writing(workdir, "or choose another --workdir"):
        workdir.mkdir(parents=True, exist_ok=True)
        file = (workdir / LOCK_FILE).open("a")
    with file:
        end = time.monotonic() + _GRACE
        while not locked(file.fileno()):
            if time.monotonic() > end:
                raise UserError(
                    f"{workdir}: another training is at work there; wait for it, end it, or choose another --workdir"
                )
            time.sleep(0.1)
        yield


def locked(file: int) -> bool:
    """Whether this process has the lock of an open file now, or the file system has none."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True
