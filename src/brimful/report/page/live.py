"""The report of a run while it trains, for a browser on this machine: `brimful report --serve`.

It listens on the loopback interface, and every address begins with a random token, so neither the network nor another user of
the machine nor a page in the same browser can read it. Two addresses exist: the page, and what changed since a version of it.
The page asks for that every few seconds and replaces those parts.

However many ask, the run is read at most once in `EVERY_S` and never without a request; reading takes what was appended since,
drawing about 0.1 s. Nothing is read from the request but its path and one number.
"""

import gzip
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from typing import Any

from brimful.errors import BadOption, BadRun
from brimful.report.page.report import Report
from brimful.report.run_record import RunRecord

HOST = "127.0.0.1"
EVERY_S = 3.0
CONNECTIONS = 16
"""At once; more are closed."""
REQUEST_S = 10.0
"""A client that sends or reads no faster is dropped."""
_SINCE = re.compile(r"since=(\d{1,12})")


class LivePage:
    """The newest state of the runs, and which of its parts changed when."""

    def __init__(
        self,
        runs: Sequence[RunRecord],
        *,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
        wording: Callable[[str], str] = str,
    ) -> None:
        self._runs, self._every_s, self._clock, self._wording = runs, every_s, clock, wording
        self._lock = threading.Lock()
        self._states = [run.state for run in runs]
        self._report = Report(runs, wording=wording)
        self._parts = self._report.parts()
        self._changed = dict.fromkeys(self._parts, 1)
        """The version in which each part last changed."""
        self._version = 1
        self._read_at = clock()

    def page(self) -> str:
        with self._lock:
            self._update()
            return self._report.html(live_version=self._version, every_s=self._every_s)

    def changes(self, since: int) -> dict[str, Any]:
        """The parts that changed after this version."""
        with self._lock:
            self._update()
            parts = {name: self._parts[name] for name, version in self._changed.items() if version > since}
            return {"version": self._version, "title": f"{self._report.title} · Brimful", "running": self._report.running, "parts": parts}  # fmt: skip

    def _update(self) -> None:
        """At most once in a while. A run that cannot be read for a moment keeps its last state."""
        if self._clock() - self._read_at < self._every_s:
            return
        try:
            news = [run.refresh() for run in self._runs]
        except BadRun:
            news = []
        states = [run.state for run in self._runs]
        if any(news) or states != self._states:
            self._states, self._report = states, Report(self._runs, wording=self._wording)
            parts = self._report.parts()
            self._version += 1
            self._changed.update({name: self._version for name, part in parts.items() if part != self._parts.get(name)})
            self._parts = parts
        self._read_at = self._clock()


class LiveServer(ThreadingHTTPServer):
    """Serves one `LivePage`. `serve_forever` until an interrupt; a context manager that closes the socket."""

    daemon_threads = True
    request_queue_size = CONNECTIONS

    def __init__(self, page: LivePage, *, port: int = 0) -> None:
        """Port 0: a free one. Raises `BadOption` if it cannot be had."""
        if not 0 <= port <= 65535:
            raise BadOption(f"port={port} must be between 0 and 65535. Try: port=0 for a free one.")
        self.page, self.token = page, secrets.token_urlsafe(24)
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise BadOption(f"port={port} cannot be used ({error.strerror}). Try: port=0 for a free one.") from None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def server_bind(self) -> None:
        """Without the lookup of this machine's name that the base class does, which may take seconds."""
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = HOST, self.server_address[1]

    def process_request(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        """A browser that closes a connection is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version, sys_version = "brimful", ""
    timeout = REQUEST_S

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        token = path.partition("/")[2].partition("/")[0]
        if not secrets.compare_digest(token.encode(errors="replace"), self.server.token.encode()):
            self._send("wrong token\n", "text/plain", HTTPStatus.FORBIDDEN)
        elif path == f"/{token}/":
            self._send(self.server.page.page(), "text/html")
        elif path == f"/{token}/changes":
            since = _SINCE.fullmatch(query)
            news = self.server.page.changes(int(since[1]) if since else 0)
            self._send(json.dumps(news, ensure_ascii=False), "application/json")
        else:
            self._send("there is nothing here\n", "text/plain", HTTPStatus.NOT_FOUND)

    def _send(self, text: str, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        if "gzip" in self.headers.get("Accept-Encoding", "") and len(body) > 1000:
            body = gzip.compress(body, 5)
            self.send_header("Content-Encoding", "gzip")
        headers = {
            "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)), "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY", "Cross-Origin-Resource-Policy": "same-origin",
        }  # fmt: skip
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the address has the token in it."""
