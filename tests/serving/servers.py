"""Real servers on loopback: in a thread of the test, or as the command that a user types."""

import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from types import SimpleNamespace

from brimful.planning.plan_options import PlanOptions
from brimful.planning.target import find_target
from brimful.serving.api import Api
from brimful.serving.chat_model import ChatModel
from brimful.serving.engine import Engine, EngineOptions
from brimful.serving.server import Server, ServerOptions, listen
from brimful.tasks.generate import GenerateOptions

NAME = "tiny"


@contextmanager
def serving(folder, *, endless=False, engine=None, log=None, **options):
    """A server in a thread: `url`, `engine`, `server`, `log`. `endless`: no token ends an answer."""
    lines = [] if log is None else log
    chosen = ServerOptions(**{"port": 0, "grace_s": 10, **options})
    listener = listen(chosen)
    target = find_target(PlanOptions(device="cpu"))
    defaults = GenerateOptions(max_new_tokens=16)
    model = ChatModel(folder, defaults, device=target.device)
    if endless:
        model.generator.end_ids = (10**9,)
    made = Engine(model.generator, target, EngineOptions(**(engine or {})), note=lines.append).start()
    server = Server(Api(model, made, NAME, defaults), chosen, lines.append)
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=[listener, ready.set])
    thread.start()
    try:
        assert ready.wait(60)
        port = listener.getsockname()[1]
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", port=port, engine=made, server=server, log=lines)
    finally:
        server.stop()
        made.close()
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"


@contextmanager
def command(*arguments, **environment):
    """`brimful serve …` as a process, ready: `url` and `process`. It is killed at the end unless it has ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "brimful", "serve", *map(str, arguments), "--port", "0", "--device", "cpu", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
    )  # fmt: skip
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        ready = json.loads(line)
        yield SimpleNamespace(url=ready["url"], ready=ready, process=process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def call(url, body=None, *, data=None, headers=None, method=None, timeout=60):
    """Status, headers and content (parsed if it is JSON) of one request."""
    content = data if body is None else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **(headers or {})}
    sent = {name: value for name, value in sent.items() if value is not None}
    request = urllib.request.Request(url, content, sent, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            status, received, text = response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        status, received, text = error.code, error.headers, error.read()
    parsed = json.loads(text) if received.get_content_type() == "application/json" else text.decode()
    return status, received, parsed


def question(text, **options):
    return {"model": NAME, "messages": [{"role": "user", "content": text}], **options}
