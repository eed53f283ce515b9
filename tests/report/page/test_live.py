"""The live page: on loopback, behind a token, and only what changed."""

import http.client
import json
import socket
import threading
from contextlib import contextmanager

import pytest

from brimful.errors import BadOption
from brimful.report.page.live import CONNECTIONS, LivePage, LiveServer
from brimful.report.run_record import RunRecord
from tests.report.fake_runs import step_event

from .rich_runs import rich_run


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def live_page(folder, clock=None, **values) -> LivePage:
    return LivePage([RunRecord(folder)], clock=clock or Clock(), **values)


def append(folder, *events) -> None:
    with (folder / "events.jsonl").open("a") as file:
        for event in events:
            file.write(json.dumps({"event": event["event"], "time": "2026-01-31T09:05:00.000Z", **event}) + "\n")


@contextmanager
def served(folder):
    with LiveServer(LivePage([RunRecord(folder)], every_s=0)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)


def ask(server, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path)
    answer = connection.getresponse()
    result = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    connection.close()
    return result


# ---- What changed


def test_nothing_has_changed_at_first(tmp_path):
    page = live_page(rich_run(tmp_path / "a", running=True, done=100))
    assert page.changes(1) == {"version": 1, "title": "a · Brimful", "running": True, "parts": {}}


def test_a_step_changes_the_curves_and_leaves_the_plan(tmp_path):
    folder, clock = rich_run(tmp_path / "a", running=True, done=100), Clock()
    page = live_page(folder, clock)
    append(folder, step_event(101, steps=300, loss=0.123))
    clock.now = 10
    news = page.changes(1)
    assert news["version"] == 2
    assert {"summary", "memory", "learning", "speed"} <= set(news["parts"])
    assert not {"plan", "nav", "head", "missing"} & set(news["parts"])
    assert "101" in news["parts"]["summary"]


def test_who_has_the_newest_version_gets_nothing(tmp_path):
    folder, clock = rich_run(tmp_path / "a", running=True, done=100), Clock()
    page = live_page(folder, clock)
    append(folder, step_event(101, steps=300))
    clock.now = 10
    assert page.changes(page.changes(1)["version"])["parts"] == {}


def test_the_run_is_read_at_most_once_in_a_while(tmp_path):
    folder, clock = rich_run(tmp_path / "a", running=True, done=100), Clock()
    page = live_page(folder, clock, every_s=3)
    append(folder, step_event(101, steps=300))
    clock.now = 2.9
    assert page.changes(1)["parts"] == {}
    clock.now = 3.1
    assert page.changes(1)["parts"]


def test_the_end_of_a_run_is_news(tmp_path):
    folder, clock = rich_run(tmp_path / "a", running=True, done=100), Clock()
    page = live_page(folder, clock)
    append(folder, {"event": "end", "step": 100, "reason": "interrupted", "sentence": "stopped by Ctrl-C"})
    clock.now = 10
    news = page.changes(1)
    assert news["running"] is False and "interrupted" in news["parts"]["head"]


def test_parts_have_the_same_names_before_and_after_the_first_step(tmp_path):
    before = live_page(rich_run(tmp_path / "a", running=True, done=0, evals=[], checkpoints=[], ooms=[]))
    after = live_page(rich_run(tmp_path / "b", running=True, done=100))
    assert before.changes(0)["parts"].keys() == after.changes(0)["parts"].keys()


def test_a_run_that_cannot_be_read_for_a_moment_keeps_its_last_state(tmp_path):
    folder, clock = rich_run(tmp_path / "a", running=True, done=100), Clock()
    page = live_page(folder, clock)
    append(folder, {"event": "begin", "step": 100, "format": 99})
    clock.now = 10
    assert page.changes(1)["parts"] == {} and "a · Brimful" in page.page()


# ---- The server


def test_the_page_is_served_under_its_token_alone(tmp_path):
    with served(rich_run(tmp_path / "a")) as server:
        status, headers, body = ask(server, f"/{server.token}/")
        assert status == 200 and b"<h1>a" in body and b'id="live"' in body
        assert headers["content-type"] == "text/html; charset=utf-8"
        assert headers["cache-control"] == "no-store" and headers["referrer-policy"] == "no-referrer"


def test_the_server_listens_on_loopback_only(tmp_path):
    with served(rich_run(tmp_path / "a", steps=3)) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1" and server.url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize("path", ["/", "/changes", "/wrong/", "/wrong/changes?since=0", "//", "/..", "/TOKENx/", "*", "/%00/", "/report.html"])  # fmt: skip
def test_a_wrong_token_is_refused_and_learns_nothing(tmp_path, path):
    with served(rich_run(tmp_path / "secret-name", steps=3)) as server:
        status, _, body = ask(server, path.replace("TOKEN", server.token))
        assert status == 403 and b"secret" not in body


@pytest.mark.parametrize("path", ["events.jsonl", "../events.jsonl", "..%2fevents.jsonl", "%2e%2e/run.json", ".", "/", "changes/", "/etc/passwd"])  # fmt: skip
def test_no_file_is_served(tmp_path, path):
    with served(rich_run(tmp_path / "a", steps=3)) as server:
        status, _, body = ask(server, f"/{server.token}/{path}")
        assert status == 404 and body == b"there is nothing here\n"


def test_changes_are_json(tmp_path):
    folder = rich_run(tmp_path / "a", running=True, done=50)
    with served(folder) as server:
        append(folder, step_event(51, steps=300))
        status, headers, body = ask(server, f"/{server.token}/changes?since=1")
        assert status == 200 and headers["content-type"].startswith("application/json")
        assert "summary" in json.loads(body)["parts"]


@pytest.mark.parametrize("query", ["", "?since=", "?since=x", "?since=-1", "?since=99999999999999999999"])
def test_a_strange_version_gets_everything(tmp_path, query):
    with served(rich_run(tmp_path / "a", steps=3)) as server:
        body = ask(server, f"/{server.token}/changes{query}")[2]
        assert "summary" in json.loads(body)["parts"]


def test_nothing_can_be_written(tmp_path):
    with served(rich_run(tmp_path / "a", steps=3)) as server:
        assert {ask(server, f"/{server.token}/", method)[0] for method in ("POST", "PUT", "DELETE")} == {501}


def test_two_servers_have_two_tokens(tmp_path):
    folder = rich_run(tmp_path / "a", steps=3)
    with served(folder) as one, served(folder) as other:
        assert one.token != other.token and len(one.token) >= 32
        assert ask(other, f"/{one.token}/")[0] == 403


def test_a_port_in_use_is_one_sentence(tmp_path):
    folder = rich_run(tmp_path / "a", steps=3)
    with served(folder) as server, pytest.raises(BadOption, match=f"port={server.server_port} cannot be used"):
        LiveServer(live_page(folder), port=server.server_port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_cannot_be_is_refused(tmp_path, port):
    with pytest.raises(BadOption, match="between 0 and 65535"):
        LiveServer(live_page(rich_run(tmp_path / "a", steps=3)), port=port)


def test_connections_that_say_nothing_do_not_pile_up(tmp_path):
    with served(rich_run(tmp_path / "a", steps=3)) as server:
        address = ("127.0.0.1", server.server_port)
        silent = [socket.create_connection(address, timeout=30) for _ in range(CONNECTIONS)]
        one_more = socket.create_connection(address, timeout=30)
        assert one_more.recv(1) == b""  # closed at once
        for connection in (*silent, one_more):
            connection.close()
