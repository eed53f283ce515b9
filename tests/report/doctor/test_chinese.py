"""With language zh no English sentence is left, but for flags, commands, units and names."""

import ast
import re
from pathlib import Path

import pytest

from brimful.languages import Sentence, _catalogue, say, set_language
from brimful.report import doctor
from brimful.training.connection import TIMED_OUT, Surroundings, fix_for

CALLS = {
    "say": 1,
    "tr": 1,
    "ok": 1,
    "warn": 1,
    "fail": 1,
    "skip": 1,
    "grade": 1,
    "_guarded": 2,
    "_hangs": 1,
    "_or_hangs": 2,
}
"""How many arguments of these functions may be texts."""
WORDLESS = {"Python", "torch", "NVML", "all_reduce"}
"""Names that Chinese engineers use as they are."""


@pytest.fixture
def chinese():
    set_language("zh")
    yield
    set_language(None)


def texts():
    for file in sorted(Path(doctor.__file__).parent.glob("*.py")):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call):
                name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
                for argument in call.args[: CALLS.get(name, 0)]:
                    yield from _strings(argument)


def _strings(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from (*_strings(node.body), *_strings(node.orelse))


def has_words(text: str) -> bool:
    """Whether something is left to translate besides placeholders, commands, flags and variables."""
    rest = re.sub(r"\{\w+\}|`[^`]*`|--[\w-]+|/dev/shm|\b[A-Z_]{3,}\b", "", text)
    return text not in WORDLESS and bool(re.search(r"[a-z]{2,}", rest))


def test_every_sentence_of_the_doctor_is_in_the_catalogue():
    wanted = {text for text in texts() if has_words(text)}
    assert len(wanted) > 150
    assert not wanted - set(_catalogue())


def test_placeholders_and_commands_are_the_same_in_both_languages():
    for text in set(texts()) & set(_catalogue()):
        for pattern in (r"\{\w+\}", r"`[^`]*`", r"--[\w-]+"):
            assert set(re.findall(pattern, text)) == set(re.findall(pattern, _catalogue()[text])), text


def test_values_stay_as_they_are_and_sentences_within_are_translated(chinese):
    inner = say("{count} cards", count=2)
    sentence = say("{backend} added up one number over {what} in {time}", backend="NCCL", what=inner, time="0.40 s")
    assert sentence.shown() == "NCCL 在 2 张卡之间求和成功，用时 0.40 s"
    assert str(sentence) == "NCCL added up one number over 2 cards in 0.40 s"


@pytest.mark.parametrize(
    "symptom",
    [
        TIMED_OUT,
        "unhandled system error",
        "/dev/shm/nccl-x (size 0)",
        "Duplicate GPU detected",
        "no route to host",
        "x",
    ],
)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_fixes_of_a_broken_connection_are_translated(chinese, symptom, backend):
    here = Surroundings(backend=backend, shm_bytes=2**26, interfaces=["eth0"])
    shown = re.sub(
        r"NCCL|GLOO|--[\w-]+( \w+)?|[A-Z_]{3,}=?\w*|/dev/shm|GPU|MiB|eth0|lo\b|gloo|IOMMU",
        "",
        Sentence(fix_for(symptom, here)).shown(),
    )
    assert not re.search(r"[A-Za-z]{3,}", shown), shown
