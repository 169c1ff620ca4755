"""A lock whose next holder is whoever waits, so that a thread that steps and steps lets others in between."""

from __future__ import annotations

import threading


class Turns:
    """`with turns:` for what one thread at a time may do; a thread that has the turn may take it again."""

    def __init__(self) -> None:
        self._next, self._turn = threading.RLock(), threading.RLock()
        self._holder: int | None = None
        self._depth = 0  # of the holder, which alone changes it

    def __enter__(self) -> None:
        if self._holder != threading.get_ident():  # or it would wait behind one that waits for it
            with self._next:  # held while waiting: who has just had its turn waits behind it
                self._turn.acquire()
            self._holder = threading.get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None
            self._turn.release()
