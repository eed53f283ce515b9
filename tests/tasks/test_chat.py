"""Talking to a model: answers in pieces, single turns, and a conversation that a mistake does not end."""

import pytest
import torch

from brimful.errors import BadOption, DoesNotFit
from brimful.tasks.generate import HELP, Chat, GenerateOptions, talk

CPU = torch.device("cpu")
QUESTION, ANSWER = "甲的花是什么颜色？", "红色。"


@pytest.fixture(scope="module")
def chat(place):
    return Chat(place.model, GenerateOptions(max_new_tokens=16), device=CPU)


def said_in(chat, *lines):
    """What comes out of a talk with these lines, and which of them were read."""
    left, said = list(lines), []

    def read():
        if not left:
            raise EOFError
        line = left.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    talk(chat, read, said.append)
    return "".join(said), left


def test_an_answer_comes_in_pieces(chat):
    pieces = list(chat.ask(QUESTION))
    assert "".join(pieces) == ANSWER and len(pieces) == 3


def test_a_reply_is_whole(chat):
    heard = []
    reply = chat.reply(QUESTION, heard.append)
    assert (reply.prompt, reply.response, "".join(heard)) == (QUESTION, ANSWER, ANSWER)
    assert set(reply.to_json()) == {"prompt", "response", "seconds"}


def test_each_question_stands_for_itself(chat):
    said, _ = said_in(chat, QUESTION, QUESTION)
    assert said == f"{ANSWER}\n" * 2


@pytest.mark.parametrize("word", ["/quit", "/exit", "  /quit "])
def test_quit_ends(chat, word):
    assert said_in(chat, word, QUESTION) == ("", [QUESTION])


def test_empty_lines_are_ignored_and_help_is_given(chat):
    said, _ = said_in(chat, "", "  ", "/help")
    assert said == f"{HELP}\n"
    assert "does not remember" in HELP


def test_ctrl_c_stops_an_answer_and_not_the_talk(chat, monkeypatch):
    def interrupted(question):
        yield "红"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(chat, "ask", interrupted)
        said, left = said_in(chat, QUESTION, "/quit")
    assert said == "红 …\n" and not left


def test_a_mistake_is_told_and_the_next_question_heard(chat, monkeypatch):
    monkeypatch.setattr(chat, "_longest", 12)
    said, _ = said_in(chat, "很长" * 10, QUESTION)
    assert said == f"(the question has 21 tokens and the model reads 12; ask a shorter one)\n{ANSWER}\n"
    with pytest.raises(BadOption):
        list(chat.ask("很长" * 10))


def test_out_of_memory_is_one_sentence(chat, monkeypatch):
    def full(ids):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(chat._generator, "stream", full)
    with pytest.raises(DoesNotFit, match="memory ran out while answering"):
        list(chat.ask(QUESTION))


def test_bytes_that_are_no_text_are_no_error(chat):
    assert isinstance(chat.reply("\udce4甲").response, str)
