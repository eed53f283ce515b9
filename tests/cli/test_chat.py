"""`brimful chat` as a user types it: flags, a pipe, a terminal."""

import json
from io import StringIO

import pytest

from brimful.serving.chat import Chat
from brimful.units import NOTHING
from tests.cli.test_cli import run
from tests.tasks.tiny import tiny_chat
from tests.tasks.tiny_causal import SYSTEM, tiny_causal

QUESTION, ANSWER = "甲的花是什么颜色？", "红色。"
OTHER, OTHER_ANSWER = "丁的车是什么颜色？", "绿色𠀀。"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_chat(tmp_path_factory)


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    return tiny_causal(tmp_path_factory)


def in_terminal(model, *lines, capsys, monkeypatch):
    """What a user sees who types these lines and Ctrl-D; the prompts are not among it."""
    left = list(lines)

    def read(prompt):
        if not left:
            raise EOFError
        return left.pop(0)

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", read)
    code, out, err = run("chat", str(model), "--device", "cpu", capsys=capsys)
    assert code == 0, err
    return out.splitlines()


def test_prompts_are_answered_in_order(tiny, capsys):
    code, out, _ = run(
        "chat", str(tiny.model), "--prompt", QUESTION, "--prompt", OTHER, "--device", "cpu", capsys=capsys
    )
    assert (code, out) == (0, f"{ANSWER}\n{OTHER_ANSWER}\n")


def test_an_empty_answer_is_shown_as_in_an_evaluation(tiny, capsys, monkeypatch):
    monkeypatch.setattr(Chat, "ask", lambda self, question: (piece for piece in [" "]))
    _, out, _ = run("chat", str(tiny.model), "--prompt", QUESTION, "--device", "cpu", capsys=capsys)
    assert out.strip() == NOTHING


def test_json_is_one_object(tiny, capsys):
    _, out, _ = run("chat", str(tiny.model), "--prompt", QUESTION, "--device", "cpu", "--json", capsys=capsys)
    report = json.loads(out)
    assert [(one["prompt"], one["response"]) for one in report["answers"]] == [(QUESTION, ANSWER)]
    assert (report["model"], report["device"]) == (str(tiny.model), "cpu")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_pipe_has_one_question_per_line(tiny, capsys, monkeypatch, as_json):
    monkeypatch.setattr("sys.stdin", StringIO(f"{QUESTION}\n\n{OTHER}"))
    _, out, _ = run("chat", str(tiny.model), "--device", "cpu", *(["--json"] * as_json), capsys=capsys)
    if as_json:
        assert [one["response"] for one in json.loads(out)["answers"]] == [ANSWER, OTHER_ANSWER]
    else:
        assert out == f"> {QUESTION}\n{ANSWER}\n> {OTHER}\n{OTHER_ANSWER}\n"


def test_a_pipe_has_commands_and_questions_of_several_lines(causal, tmp_path, capsys, monkeypatch):
    file = tmp_path / "talk.txt"
    monkeypatch.setattr("sys.stdin", StringIO(f'/foo\n"""甲的\n花？\n"""\n/save {file}\n/quit\n{QUESTION}\n'))
    code, out, _ = run("chat", str(causal.model), "--device", "cpu", capsys=capsys)
    assert code == 0 and "there is no command /foo here" in out and QUESTION not in out
    assert file.read_text().startswith("user:\n甲的\n花？\n")


def test_an_empty_prompt_is_refused(tiny, capsys):
    code, out, err = run("chat", str(tiny.model), "--prompt", QUESTION, "--prompt", " ", capsys=capsys)
    assert (code, out) == (2, "") and "--prompt is empty. Try: a question." in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "-1"], "--temperature -1"),
        (["--beams", "2", "--temperature", "1"], "--beams 2 cannot be combined with --temperature"),
        (["--device", "nothing"], "--device nothing"),
    ],
    ids=str,
)
def test_a_mistake_is_one_message_and_exit_code_2(tiny, capsys, flags, message):
    code, out, err = run("chat", str(tiny.model), "--prompt", QUESTION, *flags, capsys=capsys)
    assert code == 2 and not out
    assert message in err and len(err.strip().splitlines()) == 1


def test_a_missing_model_is_refused(capsys):
    code, _, err = run("chat", "/no/such/model", "--prompt", QUESTION, "--device", "cpu", capsys=capsys)
    assert code == 2 and "there is no model at /no/such/model" in err


def test_in_a_terminal_it_asks_until_the_end_of_input(tiny, capsys, monkeypatch):
    questions, prompts = iter([QUESTION, OTHER]), []

    def read(prompt):
        prompts.append(prompt)
        try:
            return next(questions)
        except StopIteration:
            raise EOFError from None  # Ctrl-D

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", read)
    code, out, _ = run("chat", str(tiny.model), "--device", "cpu", capsys=capsys)
    assert code == 0 and prompts == ["> "] * 3
    assert "does not remember earlier ones" in out.splitlines()[1]
    assert out.splitlines()[3:5] == [ANSWER, OTHER_ANSWER]
    assert max(map(len, out.splitlines()[1:])) <= 80


def test_a_causal_model_remembers_the_conversation_in_a_terminal(causal, capsys, monkeypatch):
    lines = in_terminal(
        causal.model, "乙的花？", "车？", "/new", "甲的花？", "车？", capsys=capsys, monkeypatch=monkeypatch
    )
    assert "remembers the conversation" in lines[1] and "/help" in lines[2]
    assert lines[3:8] == ["橙色橙色。", "橙车。", "(a new conversation)", "红色。", "红车。"]


def test_questions_from_flags_and_pipes_are_answered_each_by_itself(causal, capsys, monkeypatch):
    questions = ["乙的花？", "甲的花？"]
    flags = [word for question in questions for word in ("--prompt", question)]
    _, out, _ = run("chat", str(causal.model), *flags, "--device", "cpu", "--json", capsys=capsys)
    report = json.loads(out)
    assert [one["response"] for one in report["answers"]] == ["橙色橙色。", "红色。"]
    assert report["manner"] == "conversation"
    monkeypatch.setattr("sys.stdin", StringIO("\n".join(questions)))
    _, out, _ = run("chat", str(causal.model), "--device", "cpu", capsys=capsys)
    assert out == "> 乙的花？\n橙色橙色。\n> 甲的花？\n红色。\n"


def test_a_system_message_is_passed_on(causal, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(Chat, "set_system", lambda self, text: seen.append(text))
    run("chat", str(causal.model), "--prompt", "甲的花？", "--system", SYSTEM, "--device", "cpu", capsys=capsys)
    assert seen == [SYSTEM]


def test_an_encoder_decoder_takes_no_system_message(tiny, capsys):
    code, out, err = run(
        "chat", str(tiny.model), "--prompt", QUESTION, "--system", "short", "--device", "cpu", capsys=capsys
    )
    assert (code, out) == (2, "") and "--system short needs a chat template" in err


def test_a_base_model_continues_the_text_and_says_so(causal, tmp_path, capsys, monkeypatch):
    base = causal.without_template(tmp_path / "base")
    code, out, err = run(
        "chat", str(base), "--prompt", "甲的", "--device", "cpu", "--max-new-tokens", "2", capsys=capsys
    )
    assert code == 0 and out.strip() and "has no chat template, so it continues the text" in err
    lines = in_terminal(base, "/new", capsys=capsys, monkeypatch=monkeypatch)
    assert "has no chat template" in lines[1] and "(a new conversation)" not in lines


def test_the_flags_are_frozen(capsys):
    _, out, _ = run("chat", "--help", capsys=capsys)
    flags = {word.strip("│ ,[];") for word in out.split() if word.startswith("--")}
    assert flags == {
        "--prompt", "--system", "--max-new-tokens", "--beams", "--temperature", "--top-p", "--repetition-penalty", "--seed", "--device",
        "--json", "--traceback", "--lang",
    }  # fmt: skip
