"""A body is read to where its headers or chunks say that it ends, and refused where that could be read in two ways."""

from __future__ import annotations

import io
from email.message import Message

import pytest

from wedlm_jax.serve import body
from wedlm_jax.serve.body import ClientGone, Refused, read_body

CHUNKED = ("Transfer-Encoding", "chunked")


def read(sent: bytes, *headers: tuple[str, str], version: str = "HTTP/1.1") -> tuple[bytes, bytes]:
    """The body, and what is left behind it."""
    message = Message()
    for name, value in headers:
        message[name] = value
    file = io.BytesIO(sent)
    return read_body(message, file, version), file.read()


@pytest.mark.parametrize(
    "sent, content",
    [
        (b"0\r\n\r\n", b""),
        (b"5\r\nhello\r\n0\r\n\r\n", b"hello"),
        (b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", b"hello"),
        (b"00a;name=value\r\nhello\r\nyou\r\n0\r\n\r\n", b"hello\r\nyou"),
        (b"A\r\nhello\r\nyou\r\n0\r\nDigest: none\r\nTwo: 2\r\n\r\n", b"hello\r\nyou"),
    ],
)
def test_chunks_are_read_to_the_end_of_the_last_one_and_no_further(sent, content):
    assert read(sent + b"GET /", CHUNKED) == (content, b"GET /")
    with pytest.raises(ClientGone):
        read(sent[:-1], CHUNKED)


@pytest.mark.parametrize(
    "sent, complaint",
    [
        (b"\r\n", "no size"),
        (b"-1\r\n", "no size"),
        (b"+1\r\na\r\n", "no size"),
        (b"0x1\r\na\r\n", "no size"),
        (b"1_0\r\n", "no size"),
        (b" 1\r\na\r\n", "no size"),
        (b"1\na\r\n", "no size"),
        (b"1;\r\r\na\r\n", "no size"),
        (b"0" * 17 + b"\r\n", "no size"),
        (b"1\r\nab\r\n", "does not end where its size says"),
        (b"1\r\na\n\n", "does not end where its size says"),
        (b"1;" + b"a" * 5000 + b"\r\n", "more than 4096 bytes"),
        (b"0\r\n" + b"a" * 4096 + b"\r\n\r\n", "more than 4096 bytes"),
        (b"0\r\n" + b"a: b\r\n" * 101 + b"\r\n", "more than 100 trailers"),
    ],
)
def test_broken_chunks_are_refused(sent, complaint):
    with pytest.raises(Refused, match=complaint) as told:
        read(sent, CHUNKED)
    assert told.value.status == 400


@pytest.mark.parametrize(
    "headers, version, status",
    [
        ([CHUNKED, ("Content-Length", "5")], "HTTP/1.1", 400),
        ([CHUNKED], "HTTP/1.0", 400),
        ([CHUNKED, CHUNKED], "HTTP/1.1", 501),
        ([("Transfer-Encoding", "gzip, chunked")], "HTTP/1.1", 501),
        ([("Transfer-Encoding", "identity")], "HTTP/1.1", 501),
        ([("Content-Length", "5"), ("Content-Length", "6")], "HTTP/1.1", 411),
        ([], "HTTP/1.1", 411),
    ],
)
def test_a_body_of_which_two_ends_could_be_read_is_refused(headers, version, status):
    with pytest.raises(Refused) as told:
        read(b"5\r\nhello\r\n0\r\n\r\n", *headers, version=version)
    assert told.value.status == status


@pytest.mark.parametrize(
    "sent, header", [(b"12345", ("Content-Length", "5")), (b"3\r\n123\r\n2\r\n45\r\n0\r\n\r\n", CHUNKED)]
)
def test_a_body_has_as_many_bytes_as_there_is_room_for(sent, header, monkeypatch):
    monkeypatch.setattr(body, "LARGEST_BODY", 5)
    assert read(sent, header) == (b"12345", b"")
    monkeypatch.setattr(body, "LARGEST_BODY", 4)
    with pytest.raises(Refused, match="the body may have 4 bytes, not 5") as told:
        read(sent, header)
    assert told.value.status == 413
