"""64 clients for five minutes on the demo's model: no lost or mixed answer, memory within its limit, a clean end.

    python -m pytest -m torture -s tests/serving/test_torture.py
    BRIMFUL_TORTURE_S=30 BRIMFUL_TORTURE_MODEL=runs/demo python -m pytest -m torture -s tests/serving/test_torture.py

Clients stream or not, ask for short answers or whole ones, at a temperature with a seed or greedily, and some leave in the
middle. Every answer must be the one that the same request had alone. The limit leaves room for a part of the clients.
"""

import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.parse
from collections import Counter

import pytest

from brimful.tasks.demo import questions, train_file
from tests.serving.servers import call, command

CLIENTS = 64
SECONDS = float(os.environ.get("BRIMFUL_TORTURE_S", "300"))
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's model, trained in two minutes unless there is one."""
    if folder := os.environ.get("BRIMFUL_TORTURE_MODEL"):
        return folder
    run = tmp_path_factory.mktemp("torture") / "demo"
    train = ["train", "pretrain", "--demo-data", "--recipe", "demo", "--run", str(run), "--device", "cpu"]
    subprocess.run([sys.executable, "-m", "brimful", *train], check=True, timeout=900)
    return str(run)


def requests():
    """Sixty different ones."""
    rows = [json.loads(line) for line in train_file().read_text(encoding="utf-8").splitlines()]
    texts = [*(one.prompt for one in questions()), *(row["prompt"] for row in random.Random(0).sample(rows, 57))]
    ways = [
        {},
        {"temperature": 1.0, "seed": 5},
        {"max_tokens": 3},
        {"temperature": 0.7, "top_p": 0.9, "seed": 1},
        {"stop": ["。"]},
    ]
    return [
        {"messages": [{"role": "user", "content": text}], "max_tokens": 48, **ways[place % len(ways)]}
        for place, text in enumerate(texts)
    ]


class Client:
    """One connection that asks again and again."""

    def __init__(self, url, expected, number):
        self.netloc, self.expected, self.rng = urllib.parse.urlsplit(url).netloc, expected, random.Random(number)
        self.outcomes, self.wrong, self.first_token_s, self.tokens = Counter(), [], [], 0

    def run(self, until):
        while not until.is_set():
            place = self.rng.randrange(len(self.expected))
            request, expected = self.expected[place]
            stream, leave = self.rng.random() < 0.5, self.rng.random() < 0.05
            try:
                outcome = self.ask({**request, "stream": stream}, expected, stream, leave)
            except (OSError, http.client.HTTPException) as error:
                outcome = f"connection: {type(error).__name__}" if until.is_set() else f"lost: {error!r}"
            self.outcomes[outcome] += 1
            if outcome.startswith("connection") or outcome == "503":
                return

    def ask(self, request, expected, stream, leave):
        connection = http.client.HTTPConnection(self.netloc, timeout=120)
        try:
            started = time.monotonic()
            connection.request("POST", CHAT, json.dumps(request), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                response.read()
                return str(response.status)
            if not stream:
                body = json.loads(response.read())
                return self.check(request, body["choices"][0]["message"]["content"], expected)
            text = ""
            while line := response.readline():
                if not line.startswith(b"data: {"):
                    if line.startswith(b"data: [DONE]"):
                        return self.check(request, text, expected)
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return "503" if "shutting down" in chunk["error"]["message"] else "error in a stream"
                if piece := chunk["choices"][0]["delta"].get("content"):
                    if not text:
                        self.first_token_s.append(time.monotonic() - started)
                        if leave:
                            return "left"
                    text += piece
            return "cut off"
        finally:
            connection.close()

    def check(self, request, text, expected):
        self.tokens += 1
        if text != expected:
            self.wrong.append((request, text, expected))
            return "wrong"
        return "right"


@pytest.mark.torture
def test_64_clients_for_five_minutes(demo):
    limit = ["--memory-limit", "24MiB", "--max-queue", "256", "--grace", "20"]
    with command(demo, *limit) as made:
        asked = requests()
        expected = [(one, call(f"{made.url}{CHAT}", one)[2]["choices"][0]["message"]["content"]) for one in asked]
        clients, until = [Client(made.url, expected, number) for number in range(CLIENTS)], threading.Event()
        threads = [threading.Thread(target=client.run, args=[until]) for client in clients]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        states = []
        while time.monotonic() - started < SECONDS:
            states.append(call(f"{made.url}/status", timeout=60)[2])
            time.sleep(0.5)
        samples = dict(
            line.rsplit(" ", 1) for line in call(f"{made.url}/metrics")[2].splitlines() if not line.startswith("#")
        )
        in_flight = call(f"{made.url}/status")[2]["running"]
        until.set()
        made.process.send_signal(signal.SIGTERM)
        code = made.process.wait(60)
        for thread in threads:
            thread.join(60)
        seconds = time.monotonic() - started
        _, errors = made.process.communicate()
    outcomes = sum((client.outcomes for client in clients), Counter())
    first = sorted(one for client in clients for one in client.first_token_s)
    figures = {
        "seconds": round(seconds), "clients": CLIENTS, "outcomes": dict(outcomes), "requests_per_s": round(outcomes.total() / seconds, 1),
        "first_token_s": {"median": round(statistics.median(first), 3), "p99": round(first[int(0.99 * len(first))], 3)},
        "most_running": max(one["running"] for one in states), "most_queued": max(one["queued"] for one in states),
        "out_of_memory": int(samples["brimful_out_of_memory_total"]), "limit_bytes": states[0]["memory"]["limit_bytes"],
        "most_predicted_bytes": max(one["memory"]["predicted_bytes"] for one in states),
        "peak_bytes": int(samples["brimful_memory_peak_bytes"]), "in_flight_at_sigterm": in_flight, "exit_code": code,
    }  # fmt: skip
    print(json.dumps(figures))
    assert [one for client in clients for one in client.wrong][:3] == []
    assert set(outcomes) <= {
        "right",
        "left",
        "503",
        "connection: ConnectionRefusedError",
        "connection: ConnectionResetError",
    }
    assert outcomes["right"] > 5 * CLIENTS
    assert figures["peak_bytes"] <= figures["limit_bytes"]
    assert figures["most_predicted_bytes"] <= 0.85 * figures["limit_bytes"]
    assert figures["most_running"] > 8 and in_flight > 0
    assert code == 0, errors
