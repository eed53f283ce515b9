"""A server for the page that says what a test tells it to: slow answers, refusals and broken streams on real sockets.

A real model answers as it likes and at its own pace. What the page makes of each answer is tested here, and that both fit
together in `test_page.py` against the real server.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from brimful.serving.server import page_policy

GiB = 2**30
STATUS = {
    "model": "runs/chat-tiny", "kind": "conversation", "context_length": 2048, "device": "cpu", "tokens_per_second": 42.0,
    "memory": {"used_bytes": int(1.5 * GiB), "predicted_bytes": 2 * GiB, "limit_bytes": 4 * GiB}, "running": 0, "queued": 0,
    "uptime_s": 100.0, "version": "0.2.0",
}  # fmt: skip


def page() -> str:
    return resources.files("brimful.serving").joinpath("page.html").read_text(encoding="utf-8")


def policy(html: str) -> str:
    """The server's policy, and one step further: the browser refuses whatever turns a text into HTML."""
    return f"{page_policy(html)}; require-trusted-types-for 'script'; trusted-types 'none'"


@dataclass(kw_only=True)
class Reply:
    """One answer. With a `gate`, the stream stops before its last piece until the gate is set."""

    pieces: Sequence[str] = ("It ", "is ", "blue.")
    every_s: float = 0.0
    gate: threading.Event | None = None
    status: int = 200
    error: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    breaks_off: bool = False
    finish: str = "stop"


class ScriptedServer(ThreadingHTTPServer):
    """`reply` is called with each request's body. `requests` and `cancelled` say what arrived and what was given up."""

    daemon_threads = True

    def __init__(
        self,
        reply: Callable[[dict[str, Any]], Reply] = lambda body: Reply(),
        *,
        token: str | None = None,
        port: int = 0,
        **status: Any,
    ) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.reply, self.token = reply, token
        self.status = {**STATUS, **status}
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.polls = 0
        self.cancelled = threading.Event()
        self.html = page()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, body in self.requests]

    def __enter__(self) -> "ScriptedServer":
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(10)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that goes away is no failure of a test."""


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/":
            headers = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": policy(self.server.html)}
            return self._send(200, self.server.html.encode(), headers)
        if self.path != "/status":
            return self._send(404, b"{}", {})
        self.server.polls += 1
        if self._refused():
            return None
        return self._send(200, json.dumps(self.server.status).encode(), {"Content-Type": "application/json"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._refused():
            return
        self.server.requests.append((self.path, body))
        reply = self.server.reply(body)
        if reply.status != 200:
            error = reply.error or {"message": "no", "type": "error", "code": None}
            self._send(
                reply.status,
                json.dumps({"error": error}).encode(),
                {"Content-Type": "application/json", **reply.headers},
            )
            return
        try:
            self._stream(reply)
        except OSError:
            self.server.cancelled.set()

    def _stream(self, reply: Reply) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        chat = self.path.endswith("chat/completions")
        for place, piece in enumerate(reply.pieces):
            if reply.gate is not None and place == len(reply.pieces) - 1:
                self._wait_for(reply.gate)
            time.sleep(reply.every_s)
            self._event(
                {
                    "choices": [
                        {
                            "index": 0,
                            "finish_reason": None,
                            **({"delta": {"content": piece}} if chat else {"text": piece}),
                        }
                    ]
                }
            )
        if reply.error is not None:
            self._event({"error": reply.error})
            return
        if reply.breaks_off:
            return
        self._event(
            {"choices": [{"index": 0, "finish_reason": reply.finish, **({"delta": {}} if chat else {"text": ""})}]}
        )
        count = len(reply.pieces)
        self._event(
            {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7 + count}}
        )
        self.wfile.write(b"data: [DONE]\n\n")

    def _wait_for(self, gate: threading.Event) -> None:
        """A comment line now and then, as servers send to keep a connection: it fails once the page has gone."""
        while not gate.wait(0.02):
            self.wfile.write(b": waiting\n\n")
            self.wfile.flush()

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def _refused(self) -> bool:
        if self.server.token is None or self.headers.get("Authorization") == f"Bearer {self.server.token}":
            return False
        self._send(
            401,
            json.dumps(
                {"error": {"message": "a token is needed", "type": "invalid_request_error", "code": "invalid_api_key"}}
            ).encode(),
            {"Content-Type": "application/json"},
        )
        return True

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
