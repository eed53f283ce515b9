"""`brimful chat` as a user types it: flags, a pipe, a terminal."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from io import StringIO

import pytest

from tests.cli.test_cli import run
from tests.tasks.tiny import the_place

QUESTION, ANSWER = "甲的花是什么颜色？", "红色。"
OTHER, OTHER_ANSWER = "丁的车是什么颜色？", "绿色𠀀。"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return the_place(tmp_path_factory)


def test_prompts_are_answered_in_order(place, capsys):
    code, out, _ = run(
        "chat", str(place.model), "--prompt", QUESTION, "--prompt", OTHER, "--device", "cpu", capsys=capsys
    )
    assert (code, out) == (0, f"{ANSWER}\n{OTHER_ANSWER}\n")


def test_json_is_one_object(place, capsys):
    _, out, _ = run("chat", str(place.model), "--prompt", QUESTION, "--device", "cpu", "--json", capsys=capsys)
    found = json.loads(out)
    assert [(one["prompt"], one["response"]) for one in found["answers"]] == [(QUESTION, ANSWER)]
    assert (found["model"], found["device"]) == (str(place.model), "cpu")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_pipe_is_one_question_a_line(place, capsys, monkeypatch, as_json):
    monkeypatch.setattr("sys.stdin", StringIO(f"{QUESTION}\n\n{OTHER}"))
    _, out, _ = run("chat", str(place.model), "--device", "cpu", *(["--json"] * as_json), capsys=capsys)
    if as_json:
        assert [one["response"] for one in json.loads(out)["answers"]] == [ANSWER, OTHER_ANSWER]
    else:
        assert out == f"{ANSWER}\n{OTHER_ANSWER}\n"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--temperature", "-1"], "--temperature -1"),
        (["--beams", "2", "--temperature", "1"], "--beams and --temperature"),
        (["--device", "nothing"], "--device nothing"),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence_and_exit_code_2(place, capsys, flags, said):
    code, out, err = run("chat", str(place.model), "--prompt", QUESTION, *flags, capsys=capsys)
    assert code == 2 and not out
    assert said in err and len(err.strip().splitlines()) == 1


def test_a_model_that_is_not_there_is_one_sentence(capsys):
    code, _, err = run("chat", "/no/such/model", "--prompt", QUESTION, "--device", "cpu", capsys=capsys)
    assert code == 2 and "there is no model at /no/such/model" in err


def test_it_talks_in_a_terminal_until_quit(place):
    """A real terminal: the sign, the answer, Ctrl-D at the end."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "brimful", "chat", str(place.model), "--device", "cpu"],
        stdin=child, stdout=child, stderr=child, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    os.close(child)
    try:
        heard = _until(parent, "> ")
        assert "does not remember earlier ones" in heard
        os.write(parent, f"{QUESTION}\n".encode())
        assert ANSWER in _until(parent, "\r\n> ")  # the next line is being read
        os.write(parent, b"\x04")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def _until(terminal, words, patience_s=60):
    heard, end = "", time.monotonic() + patience_s
    while words not in heard:
        assert time.monotonic() < end, heard
        if select.select([terminal], [], [], 1)[0]:
            heard += os.read(terminal, 4096).decode(errors="replace")
    return heard


def test_the_flags_are_frozen(capsys):
    _, out, _ = run("chat", "--help", capsys=capsys)
    flags = {word.strip("│ ,[];") for word in out.split() if word.startswith("--")}
    assert flags == {
        "--prompt", "--max-new-tokens", "--beams", "--temperature", "--top-p", "--repetition-penalty", "--seed", "--device",
        "--json",
    }  # fmt: skip
