"""HTTP around the engine: the OpenAI API, a page, health, status and metrics, on FastAPI and uvicorn.

Safe by default: it listens on loopback, and there it answers only requests that were sent to a loopback name, so that a web page
elsewhere cannot reach it through a name of its own (DNS rebinding). Beyond loopback it demands a token. Other origins get no CORS
headers, bodies must be JSON, and are limited. What is asked and answered is not logged unless `log_requests` is set.

One thread serves all connections, one tokenizes, and the engine's thread computes. A client that disconnects frees its place
before the next token. One that does not read holds up nobody: its answer waits in memory, and after `SEND_S` it is dropped.

On SIGTERM the server stops listening, answers what it has accepted within a grace period, and exits with code 0.
"""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import ipaddress
import json
import logging
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

import brimful
from brimful.errors import BadOption, BrimfulError, MissingExtra
from brimful.serving.answer import Answer
from brimful.serving.api import Api, ApiError, Completion
from brimful.serving.metrics import metrics_text
from brimful.units import MiB

try:
    import uvicorn
    from fastapi import FastAPI, Request
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise MissingExtra(error.name or "fastapi", "serve") from None

SEND_S = 30.0
"""Seconds after which a client that reads nothing is dropped."""
BODY_S = 30.0
"""Seconds in which a client must have sent its request: as long for its headers as for its body."""
SWITCH_S = 0.0005
"""How long Python lets one thread run while another waits for it. With 64 clients on two busy cores, the first token came after
168 ms at the default of 5 ms, because the engine gives Python's lock away at every operation, and after 87 ms at this."""
LOOPBACK_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))
PAGE = "page.html"
log = logging.getLogger("brimful")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where the server listens, and what it accepts."""

    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback, a token is required."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    token: str | None = None
    """What clients send as `Authorization: Bearer TOKEN`."""
    max_body_bytes: int = 4 * MiB
    """Size of a request at most."""
    grace_s: float = 30.0
    """Seconds to finish requests in flight after SIGTERM."""
    log_requests: bool = False
    """Print every request with its content."""

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.port <= 65535:
            problems.append(f"port={self.port} must be between 0 and 65535.")
        if self.grace_s < 0:
            problems.append(f"grace={self.grace_s:g} must not be negative.")
        if self.token is not None and (not self.token or not self.token.isascii() or not self.token.isprintable()):
            problems.append("token= must have characters, and only printable ASCII ones.")
        if self.token is None and not self.is_loopback:
            problems.append(
                f"host={self.host!r} is reachable from other machines. Try: token= with a secret, or 127.0.0.1."
            )
        if problems:
            raise BadOption(" ".join(problems))

    @property
    def is_loopback(self) -> bool:
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"


def listen(options: ServerOptions) -> socket.socket:
    """The socket, bound before the model is loaded, so that a port in use shows at once."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # the kernel drops a client that takes nothing of what is left to send
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SEND_S))
    try:
        server.bind((options.host, options.port))
        server.listen(2048)
    except OSError as error:
        server.close()
        if isinstance(error, socket.gaierror):
            raise BadOption(f"host={options.host!r} is not an address of this machine. Try: 127.0.0.1.") from None
        raise BadOption(
            f"port={options.port} on {options.host} cannot be used ({error.strerror or error}). Try: port={options.port + 1}, "
            "or port=0 for a free one."
        ) from None
    return server


class Server:
    """The web application for one model, and the loop that runs it."""

    def __init__(
        self, api: Api, options: ServerOptions, log: Callable[[str], object] = lambda line: print(line, file=sys.stderr)
    ) -> None:
        self.api, self.engine, self.options = api, api.engine, options
        self._log = log
        self._started_s = time.monotonic()
        self._responses: Counter[tuple[str, int]] = Counter()
        self._dropped = 0
        self._stop: Callable[[], object] = lambda: None
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="brimful-tokenize")
        self.app = Gate(self._routes(), options, self._responses)

    def run(self, listener: socket.socket, ready: Callable[[], object] = lambda: None) -> None:
        """Serve until SIGTERM or Ctrl-C, or until the engine fails, which is raised."""
        sys.setswitchinterval(SWITCH_S)
        asyncio.run(self._serve(listener, ready))
        if self.engine.failed is not None:
            raise self.engine.failed

    async def _serve(self, listener: socket.socket, ready: Callable[[], object]) -> None:
        config = uvicorn.Config(
            self.app, http=_Protocol, ws="none", lifespan="off", log_config=None, log_level="critical", access_log=False,
            server_header=False, proxy_headers=False, timeout_graceful_shutdown=int(self.options.grace_s) + 5,
        )  # fmt: skip
        server = _Uvicorn(config)
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # only the main thread has signals
                loop.add_signal_handler(number, stopping.set)
        self._stop = partial(loop.call_soon_threadsafe, stopping.set)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        ready()
        watch = asyncio.create_task(self._engine_ended())
        await asyncio.wait({asyncio.create_task(stopping.wait()), serving, watch}, return_when=asyncio.FIRST_COMPLETED)
        self.engine.drain()
        server.should_exit = True
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(serving), self.options.grace_s)
        await asyncio.to_thread(self.engine.close)  # what is left gets an error, which its client still sees
        await serving
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """As SIGTERM, from any thread."""
        self._stop()

    async def _engine_ended(self) -> None:
        while self.engine.failed is None:
            await asyncio.sleep(0.25)

    def _routes(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)  # its own pages load scripts from elsewhere
        app.state.max_body_bytes = self.options.max_body_bytes
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"], response_model=None)
        app.add_api_route("/v1/completions", self._complete, methods=["POST"], response_model=None)
        app.add_api_route("/v1/models", self._models, methods=["GET"])
        app.add_api_route("/v1/models/{name:path}", self._model, methods=["GET"], response_model=None)
        app.add_api_route("/health", self._health, methods=["GET"], response_model=None)
        app.add_api_route("/status", self._status, methods=["GET"])
        app.add_api_route("/metrics", self._metrics, methods=["GET"], response_model=None)
        app.add_api_route("/", self._page, methods=["GET"], response_model=None)
        app.add_exception_handler(ApiError, _api_error)
        app.add_exception_handler(HTTPException, _http_error)
        app.add_exception_handler(_Gone, _gone)
        app.add_exception_handler(Exception, _failed)
        return app

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        body = await _json_body(request)
        loop = asyncio.get_running_loop()
        asked = await loop.run_in_executor(self._tokenizing, lambda: self.api.parse(body, chat=chat))
        changed = asyncio.Event()

        def over() -> bool:
            return any(one.error is not None for one in answers) or all(one.done for one in answers)

        def notify() -> None:
            if not asked.stream and not over():  # it is read at the end only, so the loop is not woken for each token
                return
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(changed.set)

        answers: list[Answer] = []
        try:
            answers.extend(self.engine.submit(prompt, notify) for prompt in asked.prompts)
            gone = asyncio.create_task(_disconnected(request))
            try:
                begun = lambda: any(one.first_token_s is not None or one.done for one in answers)  # noqa: E731
                await _until(begun if asked.stream else over, changed, gone)
            finally:
                gone.cancel()
            _raise_failed(answers)
            if asked.stream:
                return _EventStream(self._events(asked, answers, changed), self._drop(answers, asked))
        except BaseException as error:
            for answer in answers:
                self.engine.cancel(answer)
            if isinstance(error, BrimfulError):
                raise ApiError.of(error) from None
            raise
        taken = [answer.take() for answer in answers]
        self._log_request(asked, [text for text, _ in taken])
        return JSONResponse(self.api.response(asked, answers, taken))

    async def _events(
        self, asked: Completion, answers: Sequence[Answer], changed: asyncio.Event
    ) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream. Text that came while the last one was being sent goes into one chunk."""
        texts = [""] * len(answers)
        for chunk in self.api.first_chunks(asked):
            yield chunk
        left = list(range(len(answers)))
        while left:
            changed.clear()
            for place in list(left):
                answer = answers[place]
                done = answer.done  # before the text is taken: what comes with the end must not be missed
                text, logprobs = answer.take()
                if text or logprobs:
                    texts[place] += text
                    yield self.api.chunk(asked, place, text, logprobs)
                if not done:
                    continue
                if answer.error is not None:
                    yield ApiError.of(answer.error).to_json()
                    return
                yield self.api.chunk(asked, place, "", finish=answer.finish)
                left.remove(place)
            if left:
                await changed.wait()
        if asked.include_usage:
            yield self.api.usage_chunk(asked, answers)
        self._log_request(asked, texts)

    def _drop(self, answers: Sequence[Answer], asked: Completion) -> Callable[[bool], None]:
        """Called when a stream ends before its answer: the client has gone, or reads nothing."""

        def drop(slow: bool) -> None:
            self._dropped += slow
            for answer in answers:
                self.engine.cancel(answer)

        return drop

    def _log_request(self, asked: Completion, texts: Sequence[str]) -> None:
        if self.options.log_requests:
            self._log(json.dumps({"id": asked.id, "asked": asked.texts, "answered": list(texts)}, ensure_ascii=False))

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self.api.model_card()]}

    async def _model(self, name: str) -> Response:
        self.api.check_model(name)
        return JSONResponse(self.api.model_card())

    async def _health(self) -> Response:
        failed = self.engine.failed is not None
        return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    async def _status(self) -> dict[str, Any]:
        state = self.engine.state()
        return {
            "model": self.api.name,
            "kind": self.api.model.manner,
            "context_length": self.engine.context_tokens,
            "device": str(self.engine.generator.device),
            "tokens_per_second": round(self.engine.counts.tokens_per_second, 1),
            "memory": {
                "used_bytes": state.used_bytes,
                "predicted_bytes": state.predicted_bytes,
                "limit_bytes": state.limit_bytes,
            },
            "running": state.running,
            "queued": state.queued,
            "uptime_s": round(time.monotonic() - self._started_s, 1),
            "version": brimful.__version__,
        }

    async def _metrics(self) -> Response:
        return PlainTextResponse(
            metrics_text(self.engine.state(), self.engine.counts, self._responses, self._dropped),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )

    async def _page(self) -> Response:
        page = resources.files("brimful.serving").joinpath(PAGE)
        if not page.is_file():
            raise ApiError(
                404, f"{PAGE} is missing from this installation. Try: pip install --force-reinstall brimful."
            )
        text = page.read_text(encoding="utf-8")
        return Response(
            text, media_type="text/html; charset=utf-8", headers={"content-security-policy": page_policy(text)}
        )


class Gate:
    """What every request passes first: where it was sent to, who sent it, how large it is. Counts the responses."""

    def __init__(self, app: Any, options: ServerOptions, responses: "Counter[tuple[str, int]]") -> None:
        self._app, self._options, self._responses = app, options, responses

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return

        started = False

        async def count(message: Any) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._responses[(_route(scope["path"]), message["status"])] += 1
                message = {**message, "headers": [*message["headers"], *_COMMON_HEADERS]}
            await send(message)

        try:
            self._check(
                scope["path"], {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            )
            await self._app(scope, receive, count)
        except ApiError as error:
            await _error_response(error)(scope, receive, count)
        except Exception as error:  # ours, since a client's mistake is an ApiError: uvicorn's own log is off
            log.error("the server failed to answer %s", _route(scope["path"]), exc_info=error)
            if not started:
                await _error_response(ApiError.of(BrimfulError("")))(scope, receive, count)

    def _check(self, path: str, headers: dict[str, str]) -> None:
        options = self._options
        host = headers.get("host", "")
        if options.is_loopback and _host_name(host) not in LOOPBACK_NAMES | {options.host}:
            raise ApiError(403, f"the request was sent to {host[:64]!r}. Try: http://localhost.", code="wrong_host")
        origin = headers.get("origin")
        if origin is not None and _netloc(origin) != host:
            raise ApiError(403, "requests of pages from elsewhere are not answered.", code="wrong_origin")
        if options.token is not None and path not in ("/", "/health"):
            scheme, _, token = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), options.token.encode()):
                raise ApiError(
                    401, "the token is missing or wrong. Try: Authorization: Bearer TOKEN.", kind="authentication_error",
                    code="invalid_api_key",
                )  # fmt: skip
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > options.max_body_bytes:
            raise _too_large(options.max_body_bytes)


class _Uvicorn(uvicorn.Server):
    """uvicorn would raise the signal again after a clean shutdown, and the exit code would not be 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


class _Protocol(H11Protocol):
    """uvicorn waits for the headers of a request as long as a client likes. Here the connection is closed after `BODY_S`."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._limit_wait()

    def handle_events(self) -> None:
        super().handle_events()
        self._limit_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_wait()

    def _limit_wait(self) -> None:
        """The time runs from the connection or from the end of the request before, however often bytes come."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_wait()
        elif self._waiting is None and not self.transport.is_closing():
            self._waiting = self.loop.call_later(BODY_S, self.transport.close)

    def _end_wait(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class _Gone(Exception):
    """The client has disconnected."""


class _EventStream(Response):
    """Server-sent events. Ends when the client goes, or when it does not take a chunk within `SEND_S`."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], drop: Callable[[bool], None]) -> None:
        super().__init__(headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks, self._drop = chunks, drop

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        sending, leaving = asyncio.create_task(self._send(send)), asyncio.create_task(gone())
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            slow = sending.done() and isinstance(sending.exception(), TimeoutError)
            if not sending.done() or sending.exception() is not None:
                self._drop(slow)
            if sending.done() and not slow:  # uvicorn closes the connection of a response that is not complete
                sending.result()
        finally:
            for task in (sending, leaving):
                task.cancel()
            with contextlib.suppress(BaseException):
                await sending

    async def _send(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await self._event(send, json.dumps(chunk, ensure_ascii=False, separators=(",", ":")))
        await self._event(send, "[DONE]", more=False)

    async def _event(self, send: Any, data: str, *, more: bool = True) -> None:
        message = {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": more}
        async with asyncio.timeout(SEND_S):  # `wait_for` takes twice as long, for each chunk of each stream
            await send(message)


async def _json_body(request: Request) -> Any:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON. Try: Content-Type: application/json.")
    limit, content = request.app.state.max_body_bytes, bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                content += part
                if len(content) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise ApiError(408, f"the request was not complete after {BODY_S:g} s.") from None
    except HTTPException:
        raise
    except Exception as error:
        if type(error).__name__ == "ClientDisconnect":
            raise _Gone from None
        raise
    try:
        return json.loads(content)
    except (ValueError, RecursionError):  # UnicodeDecodeError among them
        raise ApiError(400, "the body is not valid JSON.") from None


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _until(reached: Callable[[], bool], changed: asyncio.Event, gone: "asyncio.Task[None]") -> None:
    """Wait for the engine. A client that goes meanwhile raises `_Gone`."""
    while not reached():
        changed.clear()
        if reached():  # it came in between
            return
        waiting = asyncio.create_task(changed.wait())
        try:
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if gone.done():
            raise _Gone


def _raise_failed(answers: Sequence[Answer]) -> None:
    for answer in answers:
        if answer.error is not None:
            raise answer.error


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request is larger than {limit / MiB:g} MiB.", code="request_too_large")


def _error_response(error: ApiError) -> JSONResponse:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error.to_json(), error.status, headers)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error)


async def _gone(_: Request, error: Exception) -> Response:
    """The client is gone, so this is only counted in the metrics, and not as an error of the server."""
    return _error_response(ApiError(499, "the client has gone."))


async def _failed(_: Request, error: Exception) -> Response:
    """Starlette raises it again, and `Gate` logs it."""
    return _error_response(ApiError.of(BrimfulError("")))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {404: "there is nothing at this path", 405: f"{request.method} is not answered here"}
    text = message.get(error.status_code, str(error.detail))
    response = _error_response(ApiError(error.status_code, f"{text}. Try: POST /v1/chat/completions."))
    response.headers.update(error.headers or {})  # which methods a path allows
    return response


_COMMON_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"x-frame-options", b"DENY"),
]
_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/status", "/metrics", "/")


def _route(path: str) -> str:
    """A path as a label: not one that a client makes up."""
    return path if path in _ROUTES else "/v1/models" if path.startswith("/v1/models/") else "other"


def _netloc(origin: str) -> str | None:
    with contextlib.suppress(ValueError):
        return urlsplit(origin).netloc
    return None


def _host_name(host: str) -> str:
    """Without the port: `[::1]:8000` is `::1`."""
    with contextlib.suppress(ValueError):
        return urlsplit(f"//{host}").hostname or ""
    return ""


def page_policy(page: str) -> str:
    """A Content-Security-Policy that allows the page's own script and style, this server, and nothing else."""

    def hashes(tag: str) -> str:
        parts = re.findall(rf"<{tag}(?:\s[^>]*)?>(.*?)</{tag}>", page, re.DOTALL)
        sums = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts]
        return " ".join(f"'sha256-{one}'" for one in sums) or "'none'"

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
