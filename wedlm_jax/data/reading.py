"""Documents read ahead, in worker processes or in this one; in the same order either way."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import itertools
import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool

from wedlm_jax.data.documents import Document, Documents
from wedlm_jax.errors import UserError

_CHUNK = 16  # documents of one task of a worker
_CHUNKS_AHEAD = 3  # per worker, of all iterators; where these are many, of each as many as there are workers

_Chunk = tuple[list[Document], UserError | None]


class Reader:
    """Documents by index. So many iterators as it is told of share its workers, and what is read ahead; but one alone, which is
    what a batch waits for, keeps all workers busy."""

    def __init__(self, documents: Documents, num_workers: int, iterators: int):
        self._documents, self._num_workers = documents, num_workers
        self._ahead = max(_CHUNKS_AHEAD * num_workers // iterators, num_workers)
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None
        self._has_read = False  # something, through the workers

    def read(self, start: int, step: int) -> Iterator[Document]:
        """`documents[start]`, `documents[start + step]`, ... without end.

        Raises:
          UserError: a bad record, or a worker process that died.
        """
        if not self._num_workers:
            for index in itertools.count(start, step):
                yield self._documents[index]
        waiting: collections.deque[concurrent.futures.Future[_Chunk]] = collections.deque()
        try:
            for chunk_start in itertools.count(start, step * _CHUNK):
                # One more before one is used, so that there is work for the workers meanwhile.
                with _no_signals_for_children():
                    waiting.append(self._workers().submit(_read_chunk, chunk_start, step))
                if len(waiting) <= self._ahead:
                    continue
                documents, error = waiting.popleft().result()
                self._has_read = True
                yield from documents
                if error is not None:
                    raise error
        except BrokenProcessPool:
            # Each first imports the script that was started: without that line it would train there, too.
            script = "" if self._has_read else ' or a script that trains without `if __name__ == "__main__":`?'
            raise UserError(
                f"a worker process of the data died (out of memory?{script}); data.num_workers=0 reads in the training process"
            ) from None
        finally:
            for future in waiting:
                future.cancel()

    def _workers(self) -> concurrent.futures.ProcessPoolExecutor:
        if self._pool is None:
            # Never by fork: this process has the threads of jax.
            self._pool = concurrent.futures.ProcessPoolExecutor(
                self._num_workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(self._documents,),
            )
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        return self._pool


# Ctrl-C goes to all processes of the terminal's group, `timeout` ends a whole group, Slurm tells every process of a job to end:
# the training saves first, and needs its workers for that. So they get a group of their own, and heed a SIGTERM of the training
# alone; and, since it takes them seconds to come so far, no signal from the start.

# To tell whose signal it is takes what macOS lacks; there a worker heeds everybody's SIGTERM.
_HELD_BACK = {signal.SIGINT, signal.SIGTERM} if hasattr(signal, "sigwaitinfo") else {signal.SIGINT}


@contextlib.contextmanager
def _no_signals_for_children() -> Iterator[None]:
    """A process that is started here has these signals blocked: `submit` starts workers."""
    multiprocessing.resource_tracker.ensure_running()  # starting it ends with SIGINT and SIGTERM unblocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker_documents: Documents | None = None


def _start_worker(documents: Documents) -> None:
    global _worker_documents
    os.setpgid(0, 0)
    _worker_documents = documents
    threading.Thread(target=_die_with_parent, daemon=True).start()
    if signal.SIGTERM in _HELD_BACK:
        threading.Thread(target=_die_told_by_parent, daemon=True).start()


def _die_with_parent() -> None:
    """A worker waits for tasks forever; where its parent was killed, none will come."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _die_told_by_parent() -> None:
    """The pool ends its other workers where one has died."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(1)


def _read_chunk(start: int, step: int) -> _Chunk:
    """The documents up to the first that is an error: those before it arrive, as they do without workers."""
    assert _worker_documents is not None
    documents: list[Document] = []
    try:
        for index in range(start, start + step * _CHUNK, step):
            documents.append(_worker_documents[index])
    except UserError as error:
        return documents, error
    return documents, None
