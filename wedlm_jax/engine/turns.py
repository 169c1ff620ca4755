"""A lock whose next holder is whoever waits, so that a thread that steps and steps lets others in between."""

from __future__ import annotations

import threading


class Turns:
    """`with turns:` for what one thread at a time may do; a thread that has the turn may take it again."""

    def __init__(self) -> None:
        self._next, self._turn = threading.RLock(), threading.RLock()

    def __enter__(self) -> None:
        with self._next:  # held while waiting: who has just had its turn waits behind it
            self._turn.acquire()

    def __exit__(self, *_: object) -> None:
        self._turn.release()
