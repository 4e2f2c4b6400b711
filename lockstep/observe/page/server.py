"""Serves the page of runs to a browser on this host. Read only.

# Note [Who may see the page]
# The server listens on loopback alone. Other users of the host reach loopback too, so the address has a token that
# nobody can guess; without it every path is answered alike, with 403. A page of the web could make this browser ask for
# an address here under a name of its own (DNS rebinding): a request whose Host is not this server's is refused. No part
# of a path becomes part of a file's name: runs and workers are numbers, and all else is a table. The page loads
# nothing from elsewhere, and its policy (CSP) lets the browser load nothing from elsewhere either.
"""

import hashlib
import hmac
import json
import re
import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

from lockstep.errors import BadArgument, BadEnvironment
from lockstep.observe.page.entries import read_entries, signature
from lockstep.observe.page.log_tail import log_tail
from lockstep.observe.page.view import make_view
from lockstep.observe.timeline.file import trace_text

HOST = "127.0.0.1"
ASSETS = {
    "": ("page.html", "text/html"),
    "page.js": ("page.js", "text/javascript"),
    "page.css": ("page.css", "text/css"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_LOG = re.compile(r"log/(\d{1,6})/(\d{1,6})")
_TIMELINE = re.compile(r"timeline/(\d{1,6})\.json")


@dataclass(frozen=True)
class Answer:
    """What the server answers; `etag` lets a browser ask whether anything has changed."""

    status: HTTPStatus
    body: bytes = b""
    kind: str = "text/plain"
    etag: str = ""
    filename: str = ""


@dataclass(frozen=True)
class PageRequest:
    """What of a request matters."""

    path: str
    host: str
    if_none_match: str = ""


class PageSite:
    """What is at which path. Any thread may ask; nothing is changed by it."""

    def __init__(self, folders: Sequence[Path], token: str) -> None:
        self._folders, self._token = [folder.resolve() for folder in folders], token

    def answer(self, request: PageRequest, port: int) -> Answer:
        """See Note [Who may see the page]."""
        token, slash, rest = request.path.partition("?")[0].removeprefix("/").partition("/")
        is_ours = request.host in (f"{HOST}:{port}", f"localhost:{port}")
        if not hmac.compare_digest(token.encode(), self._token.encode()) or not is_ours or not slash:
            return Answer(HTTPStatus.FORBIDDEN, b"The address of this page has a token, which is missing or wrong.\n")
        return self._at(rest, request.if_none_match)

    def _at(self, path: str, if_none_match: str) -> Answer:
        if path in ASSETS:
            name, kind = ASSETS[path]
            return Answer(HTTPStatus.OK, asset(name).encode(), kind)
        if path == "runs.json":
            return self._runs(if_none_match)
        if (found := _LOG.fullmatch(path)) and (folder := self._folder(found[1])):
            return Answer(HTTPStatus.OK, log_tail(folder, int(found[2])).encode())
        if (found := _TIMELINE.fullmatch(path)) and (folder := self._folder(found[1])):
            return _timeline(folder)
        return Answer(HTTPStatus.NOT_FOUND, b"There is nothing at this address.\n")

    def _folder(self, number: str) -> Path | None:
        return self._folders[int(number)] if int(number) < len(self._folders) else None

    def _runs(self, if_none_match: str) -> Answer:
        now = repr([signature(folder) for folder in self._folders])
        etag = f'"{hashlib.sha256(now.encode()).hexdigest()[:24]}"'
        if etag == if_none_match:
            return Answer(HTTPStatus.NOT_MODIFIED, etag=etag)
        views = [make_view(read_entries(folder)) for folder in self._folders]
        return Answer(HTTPStatus.OK, json.dumps({"runs": views}, allow_nan=False).encode(), "application/json", etag)


def _timeline(folder: Path) -> Answer:
    try:
        text = trace_text(folder)
    except BadArgument as error:
        return Answer(HTTPStatus.NOT_FOUND, f"{error}\n".encode())
    return Answer(HTTPStatus.OK, text.encode(), "application/json", filename="timeline.json")


def asset(name: str) -> str:
    """A file of the page, which the package brings along."""
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


class PageHandler(BaseHTTPRequestHandler):
    """Passes requests on to the site, and its answers back. Other methods than GET and HEAD do not exist here."""

    protocol_version = "HTTP/1.1"
    timeout = 30

    def __init__(self, site: PageSite, *args: Any) -> None:
        self._site = site
        super().__init__(*args)  # handles the connection

    @property
    def _port(self) -> int:
        assert isinstance(self.server, QuietServer)
        return self.server.server_port

    def do_GET(self) -> None:
        headers = self.headers
        asked = PageRequest(self.path, headers.get("Host", ""), headers.get("If-None-Match", ""))
        self._send(self._site.answer(asked, self._port))

    def do_HEAD(self) -> None:
        self.do_GET()

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in headers_of(answer).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def version_string(self) -> str:
        return "lockstep"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not shown: the address in them has the token."""


def headers_of(answer: Answer) -> dict[str, str]:
    headers = {
        "Content-Type": f"{answer.kind}; charset=utf-8",
        "Content-Length": str(len(answer.body)),
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }
    if answer.etag:
        headers["ETag"] = answer.etag
    if answer.filename:
        headers["Content-Disposition"] = f'attachment; filename="{answer.filename}"'
    return headers


class QuietServer(ThreadingHTTPServer):
    """A thread for each connection. A browser that goes away in the middle of an answer is no error."""

    daemon_threads = False

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self._connections: set[socket.socket] = set()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass

    def server_close(self) -> None:
        """Ends connections that browsers keep open, and waits for their threads."""
        for connection in tuple(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()


class PageServer:
    """The page of runs, at `address` while this context is open; a thread serves it."""

    def __init__(self, folders: Sequence[Path], port: int = 0) -> None:
        """`port` 0 takes one that is free. Raises BadEnvironment if the port cannot be had."""
        token = secrets.token_urlsafe(24)
        handler = partial(PageHandler, PageSite(folders, token))
        try:
            self._server = QuietServer((HOST, port), handler)
        except OSError as error:
            raise BadEnvironment(
                f"port {port} of {HOST} cannot be had: {error.strerror}; give another --port"
            ) from error
        self.address = f"http://{HOST}:{self._server.server_port}/{token}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="lockstep-page", daemon=True
        )

    def __enter__(self) -> "PageServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
