"""A small Chinese question-answer set, written for Brimful, that the tiny model learns on two CPU cores.

    train.jsonl       547 rows: 103 facts (capitals, colours, sums, opposites, units, jobs, greetings), each asked in several ways
    valid.jsonl       53 rows: other ways to ask for facts that train.jsonl holds
    questions.jsonl   what the demo asks at the end, worded as in neither of the two

What is new in valid.jsonl is mostly the pairing and not the words: "日本的首都是哪里？" is asked there, where train.jsonl asks
that of Greece, and for Japan's capital in six other ways. Its loss falls and its BLEU rises only where a model tells the
fact from the way it is asked for, which is as much as 1.2 M parameters can honestly show; no fact is asked for that was
not taught. Answers hold nothing that NFKC changes (no full-width comma), so that a right one comes back from the tokenizer
letter by letter.
"""

import json
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the demo asks, and the only right answer."""

    prompt: str
    response: str


def train_file() -> Path:
    return _HERE / "train.jsonl"


def valid_file() -> Path:
    return _HERE / "valid.jsonl"


def questions() -> list[Question]:
    """The three that the demo ends with."""
    lines = (_HERE / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [Question(**json.loads(line)) for line in lines]
