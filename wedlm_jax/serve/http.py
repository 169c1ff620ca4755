"""OpenAI's protocol over HTTP: `/v1/completions`, `/v1/chat/completions`, `/v1/models` and `/health`."""

from __future__ import annotations

import contextlib
import hmac
import io
import ipaddress
import json
import select
import socket
import sys
import time
import traceback
import urllib.parse
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from wedlm_jax.engine import QueueFull, Ticket
from wedlm_jax.errors import UserError, reason, shown
from wedlm_jax.serve.answer import Answer
from wedlm_jax.serve.asked import read_asked
from wedlm_jax.serve.body import ClientGone, Refused, read_body
from wedlm_jax.serve.service import Call, Closed, ContextExceeded, Service

SECONDS_TO_LOOK = 0.5  # between two looks whether a client is still there
SECONDS_OF_SILENCE = 600  # after which a client that neither sends nor reads is taken for gone
KEY = "WEDLM_JAX_API_KEY"  # in the environment, since every user of a machine can read the flags of its processes
MODELS, COMPLETIONS, CHAT = "/v1/models", "/v1/completions", "/v1/chat/completions"


class Server(ThreadingHTTPServer):
    """Listens for clients of a service.

    Args:
      host, port: where; port 0 takes a free one.
      key: what clients have to bring, as `Authorization: Bearer KEY`; None asks nobody.

    Raises:
      UserError: nobody can listen there.
    """

    request_queue_size = 128

    def __init__(self, host: str, port: int, key: str | None = None):
        if not host:  # as of a variable that is not set; the system would listen at every address
            raise UserError("--host is empty: 127.0.0.1 is for this machine alone, 0.0.0.0 opens it to the network")
        self.key = key
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.service: Service  # set before it serves: what listens first fails before a model is loaded
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"--host {host} --port {port}: {reason(error).lower()}; choose another") from error

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else host
        return f"http://{shown!s}:{port}/v1"

    @property
    def is_local(self) -> bool:
        """Whether programs of this machine alone can reach it."""
        return ipaddress.ip_address(str(self.server_address[0])).is_loopback


class Handler(BaseHTTPRequestHandler):
    """One client, in a thread of its own."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = SECONDS_OF_SILENCE
    _streams = False
    disable_nagle_algorithm = True  # or a piece waits until the client has acknowledged the one before

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # of a client that leaves between two requests
            super().handle()

    def do_GET(self) -> None:
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # or a body would be read as the next request
        service, path = self.server.service, self.path.partition("?")[0]
        if path == "/health":
            self._reply(HTTPStatus.OK, {"running": service.engine.running, "waiting": service.engine.waiting})
            return
        try:
            self._require_key()
            model = {"id": service.name, "object": "model", "created": 0, "owned_by": "wedlm_jax"}
            about = {**model, "max_model_len": service.engine.context}
            if path == MODELS:
                self._reply(HTTPStatus.OK, {"object": "list", "data": [about]})
            elif path.startswith(f"{MODELS}/"):
                self._require_model(urllib.parse.unquote(path.removeprefix(f"{MODELS}/")))
                self._reply(HTTPStatus.OK, about)
            elif path in (COMPLETIONS, CHAT):
                raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"{path}: send what you ask as JSON, by POST")
            else:
                raise Refused(HTTPStatus.NOT_FOUND, f"{path}: nothing is here; {MODELS}, {COMPLETIONS} and {CHAT} are")
        except Refused as error:
            self._refuse(error.status, str(error))

    do_HEAD = do_GET  # what looks whether a server is up may ask for the headers alone

    def do_POST(self) -> None:
        path, started = self.path.partition("?")[0], time.perf_counter()
        with self._refusing(HTTPStatus.BAD_REQUEST):
            self._require_key()
            body = self._body()
            if path not in (COMPLETIONS, CHAT):
                raise Refused(HTTPStatus.NOT_FOUND, f"{path}: nothing is here; {COMPLETIONS} and {CHAT} are")
            asked = read_asked(body, self.server.service.defaults, chat=path == CHAT)
            self._require_model(body.get("model"))
            service = self.server.service
            # Who ends the server waits for open calls, so what becomes of one is told before it is left. What fails in it is
            # memory, or the server ends: the request can do nothing about it.
            with service.serving(asked) as call, self._refusing(HTTPStatus.SERVICE_UNAVAILABLE):
                answer = Answer(service.engine, service.name, asked, call.tickets, chat=path == CHAT)
                if asked.stream:
                    self._stream(answer, call)
                else:
                    self._reply(HTTPStatus.OK, self._whole(answer, call))
                self._note(_summary(call.tickets, time.perf_counter() - started))

    @contextlib.contextmanager
    def _refusing(self, of_user_error: HTTPStatus) -> Iterator[None]:
        """Replies for what goes wrong in the block, with that status where it is a `UserError`."""
        try:
            yield
        except QueueFull:
            limit = self.server.service.engine.queue
            self._refuse(
                HTTPStatus.TOO_MANY_REQUESTS, f"as many requests wait as queue={limit} allows; ask again later"
            )
        except ContextExceeded as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error), error.CODE)
        except Refused as error:
            self._refuse(error.status, str(error))
        except Closed as error:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except UserError as error:
            self._refuse(of_user_error, str(error))
        except (ClientGone, OSError):
            self.close_connection = True
            self._note("the client has gone; cancelled")
        except Exception as error:
            traceback.print_exc()
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {reason(error)}")

    def _require_key(self) -> None:
        if (key := self.server.key) is None:
            return
        scheme, _, brought = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(brought.strip().encode(), key.encode()):
            self.close_connection = True  # a body is not read
            raise Refused(HTTPStatus.UNAUTHORIZED, "Authorization: bring the key of this server, as Bearer KEY")

    def _body(self) -> Any:
        self.close_connection, kept = True, self.close_connection  # unless all is read, what follows is no request
        raw = read_body(self.headers, self.rfile, self.request_version)
        self.close_connection = kept
        # A page in a browser may send anything but this to a server that does not allow it, and may have a name of its own that
        # leads here; but it has no key.
        if self.headers.get_content_type() != "application/json":
            raise Refused(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send JSON, with the header Content-Type: application/json"
            )
        if self.server.is_local and self.server.key is None and not _names_this_machine(self.headers.get("Host", "")):
            raise Refused(
                HTTPStatus.FORBIDDEN,
                f"Host: {self.headers.get('Host')} is not this machine; ask for localhost, or for a proxy's name set {KEY}",
            )
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise Refused(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {reason(error)}") from error

    def _require_model(self, asked: Any) -> None:
        name = self.server.service.name
        if asked not in (name, None):
            raise Refused(HTTPStatus.NOT_FOUND, f"model={shown(asked)}: not served here; take {name!r}")

    def _whole(self, answer: Answer, call: Call) -> dict[str, Any]:
        while not call.done:
            self._require_client()
            call.wait(SECONDS_TO_LOOK)
        return answer.whole()

    def _stream(self, answer: Answer, call: Call) -> None:
        """Server-sent events, up to the end of the connection."""
        self.close_connection = True
        self.send_response(HTTPStatus.OK)
        for name, value in (
            ("Content-Type", "text/event-stream"), ("Cache-Control", "no-cache"), ("Connection", "close")
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self._streams = True
        self._send(answer.began())
        left = dict(enumerate(call.tickets))
        while left:
            for index, ticket in list(left.items()):
                done = ticket.done
                self._send([answer.piece(index, commit) for commit in ticket.take()])
                if done:
                    self._send([answer.ended(index)])
                    del left[index]
            if left:
                self._require_client()
                call.wait(SECONDS_TO_LOOK)
        self._send(answer.counted())
        self.wfile.write(b"data: [DONE]\n\n")

    def _require_client(self) -> None:
        """Raises `ClientGone` where the other side has closed the connection."""
        # Linux tells it behind bytes that nobody has read too, as of another request.
        poll, closed = select.poll(), getattr(select, "POLLRDHUP", 0)
        poll.register(self.connection, select.POLLIN | closed)
        for _, event in poll.poll(0):
            if event & closed or not self.connection.recv(1, socket.MSG_PEEK):
                raise ClientGone

    def _send(self, events: Sequence[dict[str, Any]]) -> None:
        if events:
            self.wfile.write("".join(f"data: {json.dumps(event)}\n\n" for event in events).encode())

    def _reply(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        encoded = json.dumps(content).encode()
        client, self.wfile = self.wfile, io.BytesIO()  # one write: a process that ends leaves no headers without a body
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(encoded)))
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "POST")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        head, self.wfile = self.wfile.getvalue(), client
        client.write(head if self.command == "HEAD" else head + encoded)

    def _refuse(self, status: HTTPStatus, message: str, code: str | None = None) -> None:
        self._note(f"{status.value}: {message}")
        try:
            if self._streams:  # its status has been sent
                self._send([_error(message, status)])
            else:
                self._reply(status, _error(message, status, code))
        except OSError:
            self.close_connection = True

    def _note(self, line: str) -> None:
        """One line for each request that was answered or refused; what a terminal would obey is written out."""
        said = f"{self.client_address[0]} {self.command} {self.path.partition('?')[0]}: {line}"
        say("".join(c if c.isprintable() else ascii(c)[1:-1] for c in said))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library refuses, as what is no HTTP, in JSON too."""
        self.close_connection = True
        self._reply(HTTPStatus(code), _error(message or HTTPStatus(code).phrase, HTTPStatus(code)))

    def log_message(self, format: str, *values: Any) -> None:
        """Nothing: the lines above say more."""


def say(line: str) -> None:
    """Logs a line, if anybody still reads the log: a terminal may be closed, and Ctrl-C ends the `tee` behind a server too."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")  # at once: print would let another thread write before the end of the line
        sys.stderr.flush()


def _error(message: str, status: HTTPStatus, code: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code or status.value}}


def _names_this_machine(host: str) -> bool:
    """Whether a Host header holds an address, or localhost."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name.lower() == "localhost"
    return True


def _summary(tickets: Sequence[Ticket], seconds: float) -> str:
    tokens = sum(ticket.stats.generated_tokens for ticket in tickets)
    forwards = sum(ticket.stats.forwards for ticket in tickets)
    choices = "" if len(tickets) == 1 else f"{len(tickets)} choices, "
    return f"{choices}{tokens} tokens, {tokens / max(forwards, 1):.2f} per forward, {seconds:.2f} s"
