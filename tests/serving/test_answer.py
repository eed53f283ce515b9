"""Text of an answer: whole characters, nothing of a stop string, the same in pieces as in one."""

import pytest

from brimful.serving.answer import WINDOW, AnswerText
from brimful.tasks.model_folder import tokenizer_of


def pieces(text, tokens):
    return [*(piece for token in tokens if (piece := text.add(token))), text.rest()]


def spelled(*stop):
    """Each token is a character."""
    return AnswerText(lambda ids: "".join(map(chr, ids)), stop)


def test_an_incomplete_character_comes_at_the_end(tiny):
    tokenizer = tokenizer_of(tiny.model)
    half = tokenizer.encode("𠀀")[:2]  # two of its four bytes
    tokens = [*tokenizer.encode("红")[:-1], *half]
    assert pieces(AnswerText(tokenizer.decode), tokens) == ["红", tokenizer.decode(half)]


def test_a_long_answer_in_pieces_is_the_whole_text(tiny):
    """Longer than the window, with characters of several tokens."""
    tokenizer = tokenizer_of(tiny.model)
    tokens = tokenizer.encode("红色𠀀。很长很长的一条路，是的。" * 20)[:-1]
    assert len(tokens) > 5 * WINDOW
    assert "".join(pieces(AnswerText(tokenizer.decode), tokens)) == tokenizer.decode(tokens)


def test_a_token_late_in_an_answer_decodes_as_little_as_an_early_one():
    seen = []

    def decode(ids):
        seen.append(len(ids))
        return "".join(map(chr, ids))

    pieces(AnswerText(decode), range(1000, 1500))
    assert max(seen) <= WINDOW + 1


def test_tokens_that_never_become_a_character_are_shown_and_decode_as_little():
    """Bytes that are no text, and a character after them."""
    seen = []

    def decode(ids):
        seen.append(len(ids))
        return bytes(ids).decode("utf-8", "replace")

    tokens = [0x80] * 500 + list("𠀀。".encode())
    shown = pieces(AnswerText(decode), tokens)
    assert "".join(shown) == bytes(tokens).decode("utf-8", "replace")
    assert len(shown) > 5 and max(seen) <= WINDOW + 1


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["END"], "one "),
        (["N", "END"], "one E"),
        (["nothing"], "one ENTER END two"),
        (["one"], ""),
        (["two"], "one ENTER END "),
        (["END two!"], "one ENTER END two"),
    ],
    ids=str,
)
def test_a_stop_string_across_tokens_is_never_shown(stops, expected):
    text = spelled(*stops)
    shown = ""
    for token in map(ord, "one ENTER END two"):
        shown += text.add(token)
        assert expected.startswith(shown) or stops == ["END"]
        if text.stopped:
            break
    shown += text.rest()
    if stops == ["END"]:
        expected = "one ENTER "
    assert shown == expected and text.stopped == (expected != "one ENTER END two")


def test_the_earliest_stop_string_counts():
    text = AnswerText(lambda ids: "a b c d"[: 7 * len(ids)], ["c", "b"])
    assert text.add(1) == "a " and text.stopped
