"""A small Chinese question-answer set, written for Brimful, that the tiny model learns on two CPU cores.

    train.jsonl       547 rows: 103 facts (capitals, colours, sums, opposites, units, jobs, greetings) in several wordings
    valid.jsonl       53 rows: other wordings for facts of train.jsonl
    questions.jsonl   the three questions at the end of the demo, worded as in neither of the two

valid.jsonl mostly pairs known facts with known wordings in new ways: it asks "日本的首都是哪里？", which train.jsonl asks of
Greece, while it asks for Japan's capital in six other ways. No fact is new, since 1.2 M parameters cannot know it. Answers
hold nothing that NFKC changes (no full-width comma), so a correct one comes back from the tokenizer unchanged.
"""

import json
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question of the demo and its only correct answer."""

    prompt: str
    response: str


def train_file() -> Path:
    return _FOLDER / "train.jsonl"


def valid_file() -> Path:
    return _FOLDER / "valid.jsonl"


def questions() -> list[Question]:
    """The three questions that the demo ends with."""
    lines = (_FOLDER / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [Question(**json.loads(line)) for line in lines]
