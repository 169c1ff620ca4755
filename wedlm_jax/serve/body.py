"""The body of a request: of the length that its headers say, or in chunks, as clients send what they do not know the end of."""

from __future__ import annotations

import re
from email.message import Message
from http import HTTPStatus
from io import BufferedIOBase

LARGEST_BODY = 64 << 20  # bytes
LONGEST_LINE = 4096  # bytes of a chunk's size and what is said beside it, or of a trailer
MOST_TRAILERS = 100
CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n]*)?\r\n")


class Refused(Exception):
    """A request that is not served, with its status."""

    def __init__(self, status: HTTPStatus, message: str):
        super().__init__(message)
        self.status = status


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def read_body(headers: Message, file: BufferedIOBase, version: str) -> bytes:
    """All of the body that `file` goes on with (RFC 9112, 6.3 and 7.1). Where this raises, what follows is no request.

    Where a proxy before this server could see another end, it is refused: requests of others may come on the same connection.

    Raises:
      Refused: it has no length or two of them, is larger than LARGEST_BODY, or comes in another coding or in broken chunks.
      ClientGone: it is cut short.
    """
    lengths, codings = headers.get_all("Content-Length", []), headers.get_all("Transfer-Encoding", [])
    if codings:
        if lengths or version < "HTTP/1.1":
            raise Refused(
                HTTPStatus.BAD_REQUEST, "Transfer-Encoding: goes with HTTP/1.1 alone, and without Content-Length"
            )
        if [coding.lower() for coding in codings] != ["chunked"]:
            raise Refused(HTTPStatus.NOT_IMPLEMENTED, "Transfer-Encoding: send the body as chunked, or Content-Length")
        return _read_chunks(file)
    if len(lengths) != 1 or not lengths[0].isdecimal() or len(lengths[0]) >= 20:  # int() would take +5 and 1_0, too
        raise Refused(HTTPStatus.LENGTH_REQUIRED, "Content-Length: say once how many bytes the body has")
    _require_room(int(lengths[0]))
    return _read(file, int(lengths[0]))


def _read_chunks(file: BufferedIOBase) -> bytes:
    body = bytearray()
    while size := _chunk_size(file):
        _require_room(len(body) + size)
        body += _read(file, size)
        if _read(file, 2) != b"\r\n":
            raise Refused(HTTPStatus.BAD_REQUEST, "Transfer-Encoding: a chunk does not end where its size says")
    for _ in range(MOST_TRAILERS):
        if _line(file) == b"\r\n":
            return bytes(body)
    raise Refused(HTTPStatus.BAD_REQUEST, f"Transfer-Encoding: more than {MOST_TRAILERS} trailers behind the chunks")


def _chunk_size(file: BufferedIOBase) -> int:
    said = CHUNK_SIZE.fullmatch(_line(file))
    if said is None:
        raise Refused(HTTPStatus.BAD_REQUEST, "Transfer-Encoding: a chunk begins with no size; write it in hex")
    return int(said[1], 16)


def _line(file: BufferedIOBase) -> bytes:
    line = file.readline(LONGEST_LINE)
    if line.endswith(b"\n"):
        return line
    if len(line) < LONGEST_LINE:
        raise ClientGone
    raise Refused(
        HTTPStatus.BAD_REQUEST, f"Transfer-Encoding: a line between chunks has more than {LONGEST_LINE} bytes"
    )


def _read(file: BufferedIOBase, count: int) -> bytes:
    raw = file.read(count)
    if len(raw) < count:
        raise ClientGone
    return raw


def _require_room(length: int) -> None:
    if length > LARGEST_BODY:
        raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body may have {LARGEST_BODY} bytes, not {length}")
