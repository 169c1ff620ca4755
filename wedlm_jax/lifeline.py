"""One TCP connection from every process to process 0: they meet here first, and learn at once when one of them is gone.

Left to itself jax answers a process that never comes, or that dies, with an abort and a C++ stack trace, in the second case
after its heartbeat of 100 seconds. Here the operating system tells it: a killed process loses its connections at once, a
lost machine within a minute (TCP keepalive).
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable
from typing import NoReturn

from wedlm_jax.errors import UserError, reason

# Exit statuses: another process is gone or does not come (EX_TEMPFAIL of sysexits.h), so start the run again; and what another
# try would not mend.
TRY_AGAIN = 75
BAD_INPUT = 2
_HELLO = struct.Struct("!10sII")  # magic, number of processes, index of this one
_WORD = struct.Struct("!I")  # index of a process that is gone, or one of these
_MAGIC = b"wedlm_jax\n"
_ALL_HERE, _FINISHED, _REFUSED = 2**32 - 1, 2**32 - 2, 2**32 - 3
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 0.5  # in which a process that is told of bad input may find the same, and say it itself
_LAST_SECONDS = 1.0  # by which process 0 outlives the others: jax aborts a process that loses its coordination service


class NotMet(UserError):
    """Another process does not come, or was gone before all were there: next time it may be."""


class Lifeline:
    """The connections of one process: process 0 has one to each other process, these have one to process 0."""

    def __init__(self, connections: dict[int, socket.socket], index: int, count: int):
        self._connections, self._index, self._count = connections, index, count
        self._finished = False
        self._ending = threading.Lock()
        for connection in connections.values():
            connection.settimeout(None)
            _keep_alive(connection)
        threading.Thread(target=self._watch, daemon=True, name="lifeline").start()

    def finish(self) -> None:
        """Says that this process has done all its work: its end is no death."""
        self._finished = True
        _tell(self._connections.values(), _FINISHED)

    def refuse(self) -> None:
        """Says that this process ends with bad input: so do the others then, since no other try would mend it."""
        self._finished = True
        _tell(self._connections.values(), _REFUSED)

    def fail(self) -> None:
        """Says that this process ends by an error of its own: so do the others then, and may be started again."""
        self._finished = True
        _tell(self._connections.values(), self._index)

    def end(self, status: int) -> NoReturn:
        """Ends this process, process 0 once the others are gone. A second thread that comes here waits for the first."""
        self._ending.acquire()
        if self._index == 0:
            time.sleep(_LAST_SECONDS)
        os._exit(status)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for index, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, index)
            while selector.get_map():
                for key, _ in selector.select():
                    word = _receive(key.fileobj)  # type: ignore[arg-type]
                    if word == _FINISHED:
                        selector.unregister(key.fileobj)
                    elif self._finished:
                        return
                    elif word == _REFUSED:
                        return self._end_with_bad_input()
                    else:
                        self._end(key.data if word is None else word)

    def _end_with_bad_input(self) -> None:
        _tell(self._connections.values(), _REFUSED)
        time.sleep(_GRACE_SECONDS)
        if self._finished:  # this process has found it too, and ends by itself
            return
        print(
            f"error: another of the {self._count} processes ended with bad input (see its output), "
            f"so process {self._index} stops too",
            file=sys.stderr,
            flush=True,
        )
        self.end(BAD_INPUT)

    def _end(self, gone: int) -> NoReturn:
        _tell(self._connections.values(), gone)
        print(
            f"error: process {gone} of {self._count} is gone (killed, out of memory, or an error of its own: see its output), "
            f"so process {self._index} stops too; start all of them again, the run goes on from its last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        self.end(TRY_AGAIN)


def meet(host: str, port: int, index: int, count: int, timeout: float) -> Lifeline:
    """Waits until all processes of the run are here.

    Args:
      host, port: where process 0 listens for the others.
      index, count: of this process; of all.
      timeout: seconds.

    Raises:
      NotMet: a process did not come in time.
      UserError: a process does not belong to this run, or process 0 cannot listen.
    """
    deadline = time.monotonic() + timeout
    connections = (
        _listen(port, count, deadline, timeout) if index == 0 else {0: _call(host, port, index, count, deadline)}
    )
    return Lifeline(connections, index, count)


def _listen(port: int, count: int, deadline: float, timeout: float) -> dict[int, socket.socket]:
    connections: dict[int, socket.socket] = {}
    with _server(port, count) as server:
        server.settimeout(_POLL_SECONDS)
        while len(connections) < count - 1:
            if time.monotonic() > deadline:
                absent = ", ".join(str(index) for index in range(1, count) if index not in connections)
                raise NotMet(
                    f"of {count} processes, {absent} did not come to port {port} within {timeout:.0f} s; "
                    "look at their output, and start all of them with the same coordinator and number of processes"
                )
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            connection.settimeout(10)
            hello = _receive_bytes(connection, _HELLO.size)
            if hello is None or not hello.startswith(_MAGIC):
                connection.close()  # a stranger
                continue
            _, their_count, index = _HELLO.unpack(hello)
            if index in connections and _is_gone(connections[index]):  # this is the same process, started again
                connections.pop(index).close()
            if their_count != count or index in connections or not 0 < index < count:
                _tell([*connections.values(), connection], _REFUSED)
            if their_count != count:
                raise UserError(
                    f"process {index} counts {their_count} processes and process 0 {count}; start all with the same number"
                )
            if index in connections or not 0 < index < count:
                raise UserError(f"two processes have the index {index}; give each its own, from 0 to {count - 1}")
            connections[index] = connection
    for connection in connections.values():
        connection.sendall(_WORD.pack(_ALL_HERE))
    return connections


def require_free(port: int) -> None:
    """Raises a `UserError` where process 0 cannot listen on a port: of one in use jax's own service ends it by a segmentation
    fault, for which the others would say to start again."""
    _server(port, 1).close()


def _server(port: int, backlog: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=backlog)
    except OSError as error:
        raise UserError(f"process 0 cannot listen on port {port} ({reason(error)}); choose another port") from None


def _call(host: str, port: int, index: int, count: int, deadline: float) -> socket.socket:
    why = "timed out"
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((host, port), timeout=min(left, 10))
            connection.sendall(_HELLO.pack(_MAGIC, count, index))
        except OSError as error:  # process 0 may start later than this one, or what stands before it hang up until then
            why = reason(error)
            time.sleep(_POLL_SECONDS)
            continue
        connection.settimeout(max(deadline - time.monotonic(), 1))
        if (word := _receive(connection)) != _ALL_HERE:
            kind = UserError if word == _REFUSED else NotMet
            raise kind(f"process 0 at {host}:{port} ended before all {count} processes were there; see its output")
        return connection
    raise NotMet(
        f"process {index} cannot reach process 0 at {host}:{port} ({why}); "
        "see that process 0 runs and that nothing blocks the port"
    )


def _tell(connections: Iterable[socket.socket], word: int) -> None:
    for connection in connections:
        try:
            connection.sendall(_WORD.pack(word))
        except OSError:
            continue  # gone


def _receive(connection: socket.socket) -> int | None:
    word = _receive_bytes(connection, _WORD.size)
    return None if word is None else _WORD.unpack(word)[0]


def _receive_bytes(connection: socket.socket, size: int) -> bytes | None:
    """`size` bytes, or None where the other side is gone."""
    try:
        data = b""
        while len(data) < size:
            part = connection.recv(size - len(data))
            if not part:
                return None
            data += part
        return data
    except OSError:
        return None


def _is_gone(connection: socket.socket) -> bool:
    """Whether the other side, which has nothing to say before all are here, is closed."""
    connection.settimeout(0)
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}.items():
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
