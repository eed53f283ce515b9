"""A talk: questions with and without a memory of earlier ones, several lines, commands, and what does not end it."""

import json

import pytest
import torch

from brimful.errors import BadOption, DoesNotFit
from brimful.serving.chat import Chat, talk
from brimful.tasks.generate import GenerateOptions
from brimful.tasks.model_folder import tokenizer_of
from tests.tasks.tiny_causal import CONVERSATIONS, SYSTEM

CPU = torch.device("cpu")
ANSWERS = [one[-1]["content"] for one in CONVERSATIONS]
QUESTION, ANSWER = "甲的花是什么颜色？", "红色。"


@pytest.fixture(scope="module")
def questions(tiny):
    return Chat(tiny.model, GenerateOptions(max_new_tokens=16), device=CPU)


def talk_output(questions, *lines):
    """The output of a talk with these lines, and the lines that were not read."""
    left, output = list(lines), []

    def read(prompt):
        if not left:
            raise EOFError
        line = left.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    talk(questions, read, output.append)
    return "".join(output), left


def test_an_answer_comes_in_pieces(questions):
    pieces = list(questions.ask(QUESTION))
    assert "".join(pieces) == ANSWER and len(pieces) == 3


def test_a_reply_is_whole(questions):
    pieces = []
    reply = questions.reply(QUESTION, pieces.append)
    assert (reply.prompt, reply.response, "".join(pieces)) == (QUESTION, ANSWER, ANSWER)
    assert set(reply.to_json()) == {"prompt", "response", "seconds"}


def test_a_question_does_not_depend_on_earlier_ones(questions):
    output, _ = talk_output(questions, QUESTION, QUESTION)
    assert output == f"{ANSWER}\n" * 2


@pytest.mark.parametrize("word", ["/quit", "/exit", "  /quit "])
def test_quit_ends(questions, word):
    assert talk_output(questions, word, QUESTION) == ("", [QUESTION])


def test_empty_lines_are_ignored_and_help_is_given(questions):
    output, _ = talk_output(questions, "", "  ", "/help")
    assert output == f"{questions.commands}\n" and "/save FILE" in output
    assert "/new" not in output and "/system" not in output, "it does not remember"


@pytest.mark.parametrize("line", ["/foo", "/New", "/new", "/", "/systm be brief"])
def test_a_command_that_is_not_there_is_answered_with_those_that_are(questions, line):
    output, _ = talk_output(questions, line)
    assert output == f"(there is no command {line.split()[0]} here)\n{questions.commands}\n"


@pytest.mark.parametrize("line", ["/etc/hosts", "1/2", "a /foo"])
def test_a_question_with_a_slash_is_a_question(questions, monkeypatch, line):
    monkeypatch.setattr(questions, "ask", lambda question: (piece for piece in [question]))
    assert talk_output(questions, line)[0] == f"{line}\n"


def test_ctrl_c_at_a_question_says_how_to_end(questions):
    output, _ = talk_output(questions, KeyboardInterrupt(), QUESTION)
    assert output == f"\n(type /quit or Ctrl-D to end)\n{ANSWER}\n"


def test_ctrl_c_stops_the_answer_but_not_the_talk(questions, monkeypatch):
    def interrupted(question):
        yield "红"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(questions, "ask", interrupted)
        output, left = talk_output(questions, QUESTION, "/quit")
    assert output == "红 …\n" and not left


def test_a_failed_question_does_not_end_the_talk(questions, monkeypatch):
    monkeypatch.setattr(questions, "context_tokens", 12)
    output, _ = talk_output(questions, "很长" * 10, QUESTION)
    assert (
        output == f"(the question has 21 tokens, but the model reads 12 at most. Try: a shorter question.)\n{ANSWER}\n"
    )
    with pytest.raises(BadOption):
        list(questions.ask("很长" * 10))


def test_out_of_memory_is_a_user_error(questions, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(questions.model.generator.model, "forward", full)
    with pytest.raises(DoesNotFit, match="out of memory while answering"):
        list(questions.ask(QUESTION))


def test_bytes_that_are_not_text_are_replaced(questions):
    assert isinstance(questions.reply("\udce4甲").response, str)


@pytest.fixture
def chat(causal):
    return Chat(causal.model, GenerateOptions(max_new_tokens=12), device=CPU)


def test_a_conversation_is_remembered_until_a_new_one(chat):
    output, _ = talk_output(chat, "甲的花？", "车？", "/new", "乙的花？", "车？")
    assert output == "红色。\n红车。\n(a new conversation)\n橙色橙色。\n橙车。\n"
    assert chat.turns == [("乙的花？", "橙色橙色。"), ("车？", "橙车。")]


def test_the_prompt_is_that_of_the_template(chat, causal):
    chat.set_system(SYSTEM)
    assert chat.reply("乙的很长很长的一条路？").response == ANSWERS[4]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "乙的很长很长的一条路？"},
                {"role": "assistant", "content": ANSWERS[4]}, {"role": "user", "content": "车？"}]  # fmt: skip
    assert chat._prompt("车？") == causal.template.prompt(messages)


def test_a_system_message_begins_another_conversation(chat):
    output, _ = talk_output(chat, "甲的花？", f"/system {SYSTEM}", "乙的很长很长的一条路？")
    assert output.splitlines()[1:] == ["(a new conversation with this system message)", ANSWERS[4]]
    assert (chat.system, len(chat.turns)) == (SYSTEM, 1)
    output, _ = talk_output(chat, "/system")
    assert output == "(a new conversation without a system message)\n" and chat.system is None


def test_help_and_quit(chat):
    output, left = talk_output(chat, "/help", "/quit", "甲的花？")
    assert output == f"{chat.commands}\n" and left == ["甲的花？"]
    assert all(word in output for word in ("/new", "/system", "/quit"))
    assert max(map(len, output.splitlines())) <= 80 and "remembers" in chat.help


def test_the_oldest_turns_are_left_out_when_the_context_is_full(chat):
    chat.reply("甲的花？")
    chat.reply("车？")
    full = len(chat._prompt("丙的花？"))
    chat.context_tokens = full + 3  # a quarter of it is for the answer
    output, _ = talk_output(chat, "丙的花？")
    note = "(the context is full: the model no longer sees the oldest turn)"
    assert output.splitlines()[1:] == [note]
    assert [question for question, _ in chat.turns] == ["车？", "丙的花？"]
    chat.context_tokens = 1000
    assert "full" not in talk_output(chat, "丙的花？")[0]


def test_a_question_longer_than_the_context_is_refused_and_forgets_nothing(chat):
    chat.reply("甲的花？")
    chat.context_tokens = 40
    with pytest.raises(BadOption, match="the model reads 39 at most"):
        chat.reply("很长" * 40)
    assert len(chat.turns) == 1


def test_an_interrupted_answer_is_remembered_as_far_as_it_was_seen(chat):
    def write(piece):
        if piece != "红":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.reply("甲的花？", write)
    assert chat.turns == [("甲的花？", "红色")]


def test_an_empty_answer_is_forgotten(chat, monkeypatch):
    monkeypatch.setattr(chat, "_pieces", lambda ids: iter([]))
    assert chat.reply("甲的花？").response == "" and chat.turns == []


def test_a_model_without_a_chat_template_continues_the_text(causal, tmp_path):
    base = causal.without_template(tmp_path / "base")
    chat = Chat(base, GenerateOptions(max_new_tokens=4), device=CPU)
    assert chat.manner == "continuation" and "has no chat template" in chat.help
    text = "甲的花"
    assert chat._prompt(text) == tokenizer_of(base).encode(text)[:-1], "no eos follows"
    chat.reply(text)
    assert chat.turns == []
    with pytest.raises(BadOption, match="needs a chat template"):
        chat.set_system(SYSTEM)


def test_an_encoder_decoder_has_no_system_message(tiny):
    with pytest.raises(BadOption, match="needs a chat template"):
        Chat(tiny.model, GenerateOptions(), device=CPU, system="short")


def test_a_question_may_have_several_lines(chat, monkeypatch):
    asked = []
    monkeypatch.setattr(chat, "_pieces", lambda ids: iter(["好"]))
    monkeypatch.setattr(chat, "_remember", lambda question, answer: asked.append(question))
    talk_output(chat, "one \\", "two", '"""three', "  four", 'five"""', '"""six"""', '"""', "seven", '"""')
    assert asked == ["one\ntwo", "three\n  four\nfive", "six", "seven"]


def test_a_question_that_goes_on_shows_another_prompt(chat):
    prompts, lines = [], iter(["甲的\\", "花？"])

    def read(prompt):
        prompts.append(prompt)
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    talk(chat, read, lambda text: None)
    assert prompts == ["> ", "… ", "> "]


def test_the_talk_is_saved_as_text_or_json(chat, tmp_path):
    plain, data = tmp_path / "talk.txt", tmp_path / "talk.json"
    output, _ = talk_output(chat, "甲的花？", "/new", "乙的花？", f"/save {plain}", f"/save {data}")
    assert f"(saved to {plain})" in output
    chat.set_system(SYSTEM)
    assert json.loads(chat.save(tmp_path / "more.json").read_text())["messages"][-1] == {
        "role": "system",
        "content": SYSTEM,
    }
    said = ["甲的花？", "红色。", "乙的花？", "橙色橙色。"]
    assert plain.read_text() == "user:\n甲的花？\n\nassistant:\n红色。\n\nuser:\n乙的花？\n\nassistant:\n橙色橙色。\n"
    assert [message["content"] for message in json.loads(data.read_text())["messages"]] == said


def test_only_files_of_this_talk_are_written_again(chat, tmp_path):
    talk, letter = tmp_path / "talk.txt", tmp_path / "letter.txt"
    letter.write_text("yours")
    output, _ = talk_output(chat, f"/save {talk}", "甲的花？", f"/save {talk}", f"/save {letter}")
    assert "红色。" in talk.read_text() and letter.read_text() == "yours"
    assert f"{letter} exists and was not written by this talk. Try: another file." in output


def test_a_file_that_cannot_be_written_does_not_end_the_talk(chat, tmp_path):
    output, _ = talk_output(chat, f"/save {tmp_path / 'no' / 'talk.txt'}", "/save", "甲的花？")
    assert "cannot be written (No such file or directory). Try: another file." in output
    assert "/save needs the name of a file" in output and output.endswith("红色。\n")


def test_an_answer_with_beams_is_one_piece(tiny):
    chat = Chat(tiny.model, GenerateOptions(max_new_tokens=16, beams=2), device=CPU)
    assert list(chat.ask(QUESTION)) == [ANSWER]
