"""The rows of the demo."""

import json
import re
import unicodedata
from collections import Counter
from pathlib import Path

import pytest

from brimful.data.check import check
from brimful.tasks import demo

LETTERS = re.compile(r"\w")


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def train() -> list[dict[str, str]]:
    return rows_of(demo.train_file())


@pytest.fixture(scope="module")
def valid() -> list[dict[str, str]]:
    return rows_of(demo.valid_file())


@pytest.fixture(scope="module")
def questions() -> list[dict[str, str]]:
    return [{"prompt": one.prompt, "response": one.response} for one in demo.questions()]


def normalized(text: str) -> str:
    """Without punctuation and forms of letters: what a reader would call the same question."""
    return "".join(LETTERS.findall(unicodedata.normalize("NFKC", text)))


def test_a_few_hundred_rows_to_train_on_and_a_tenth_to_validate_on(train, valid):
    assert 400 <= len(train) <= 600 and 40 <= len(valid) <= 60


@pytest.mark.parametrize("path", [demo.train_file(), demo.valid_file()], ids=["train", "valid"])
def test_data_check_finds_a_prompt_and_a_response_in_every_row(path):
    report = check([str(path)], max_bad=0)
    assert report.layout.fields == ("prompt", "response") and not any(report.dropped.values())


def test_no_question_is_in_two_files_or_twice_in_one(train, valid, questions):
    counts = Counter(normalized(row["prompt"]) for row in [*train, *valid, *questions])
    assert [question for question, count in counts.items() if count > 1] == []


def test_every_fact_that_is_questions_for_was_taught_in_three_ways_or_more(train, valid, questions):
    taught = Counter(row["response"] for row in train)
    assert [row for row in [*valid, *questions] if taught[row["response"]] < 3] == []


def test_answers_are_short_sentences(train, valid, questions):
    wrong = [
        row
        for row in [*train, *valid, *questions]
        if not 5 <= len(row["response"]) <= 25 or row["response"][-1] != "。"
    ]
    assert wrong == []


def test_a_right_answer_comes_back_from_the_tokenizer_as_it_is_written(train, valid, questions):
    changed = [
        row for row in [*train, *valid, *questions] if unicodedata.normalize("NFKC", row["response"]) != row["response"]
    ]
    assert changed == []


def test_every_character_of_a_question_is_in_the_rows_to_train_on(train, valid, questions):
    known = set("".join(row["prompt"] + row["response"] for row in train))
    assert {row["prompt"] for row in [*valid, *questions] if set(row["prompt"]) - known} == set()


def test_sums_are_right(train, valid, questions):
    signs = {"加": int.__add__, "减": int.__sub__}
    sums = [re.fullmatch(r"(\d+)([加减])(\d+)等于(\d+)。", row["response"]) for row in [*train, *valid, *questions]]
    found = [
        (signs[sign](int(left), int(right)), int(said)) for left, sign, right, said in (s.groups() for s in sums if s)
    ]
    assert len(found) > 50 and all(real == said for real, said in found)


def test_the_demo_asks_three_questions(questions):
    assert len(questions) == 3
