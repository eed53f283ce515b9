"""What errors say: their code, the line of the user's code, types with their article, how to see the traceback."""

import json
import pickle

import pytest

from brimful import errors
from brimful.errors import BadData, TaskError, UserError, kind_of, traceback_hint, user_line, will_repeat, with_hint


def raised(call) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_line_is_that_of_the_users_own_code_even_if_a_library_raised(tmp_path, monkeypatch):
    code = compile("import json\ndef read():\n    json.loads('{')\n", str(tmp_path / "mine.py"), "exec")
    (tmp_path / "mine.py").touch()
    exec(code, names := {})
    assert user_line(raised(names["read"])) == f" at {tmp_path}/mine.py:3"
    monkeypatch.chdir(tmp_path)
    assert user_line(raised(names["read"])) == " at mine.py:3"


def test_an_error_without_a_line_of_the_user_names_none():
    error = raised(lambda: json.loads("{"))
    error.__traceback__ = error.__traceback__.tb_next.tb_next
    assert user_line(error) == ""


@pytest.mark.parametrize(("value", "words"), [(7, "an int"), ([], "a list"), (object(), "an object")])
def test_a_type_has_its_article(value, words):
    assert kind_of(value) == words


def test_only_an_error_of_the_users_own_code_offers_its_traceback(monkeypatch):
    monkeypatch.delenv("BRIMFUL_TRACEBACK", raising=False)
    task, data = TaskError("loss() failed."), BadData("line 7 is bad.")
    assert traceback_hint(task) == ""
    task.__cause__ = data.__cause__ = KeyError("ids")
    assert traceback_hint(task) == "Add --traceback to see the traceback." and traceback_hint(data) == ""
    monkeypatch.setenv("BRIMFUL_TRACEBACK", "1")
    assert traceback_hint(task) == ""


def test_a_hint_is_a_sentence_of_its_own():
    assert with_hint("it failed", "Look.") == with_hint("it failed.", "Look.") == "it failed. Look."
    assert with_hint("it failed.", "") == "it failed."


def test_the_code_of_an_error_never_changes():
    """Documentation, searches and scripts rely on these. Add a code; do not reuse or change one."""
    assert {kind.code: kind.__name__ for kind in (UserError, *UserError.__subclasses__(), errors.InternalError) if kind.__module__ == errors.__name__} == {
        "B100": "UserError",
        "B101": "BadOption",
        "B102": "UnknownTask",
        "B103": "MissingExtra",
        "B201": "BadData",
        "B202": "TaskError",
        "B203": "BadModel",
        "B204": "UnsupportedModel",
        "B301": "DoesNotFit",
        "B302": "DeviceBusy",
        "B303": "InexactSplit",
        "B304": "ServerBusy",
        "B401": "NonFiniteGradients",
        "B402": "PartialUpdate",
        "B501": "ProcessLost",
        "B502": "ConnectionFailed",
        "B601": "BadRun",
        "B602": "BadCheckpoint",
        "B603": "SaveFailed",
        "B900": "InternalError",
    }  # fmt: skip


def test_an_instance_has_its_code():
    assert errors.DoesNotFit("too large.", needed_bytes=1).code == "B301"
    assert errors.MissingExtra("rdkit", "mol").code == "B103"


def test_a_code_survives_a_pickle():
    error = UserError("of another process")
    error.code = "B301"
    assert pickle.loads(pickle.dumps(error)).code == "B301"


def wrapped(cause: BaseException) -> TaskError:
    try:
        raise TaskError("task Net: loss() failed at mine.py:12") from cause
    except TaskError as error:
        return error


@pytest.mark.parametrize(
    ("error", "repeats"),
    [
        (TaskError("task Net: loss() returned an int"), True),
        (BadData("line 4 of rows.jsonl is not JSON"), True),
        (errors.BadOption("lr= must be positive"), True),
        (wrapped(KeyError("logits")), True),
        (wrapped(FileNotFoundError("images/4.png")), True),
        (wrapped(OSError(28, "No space left on device")), False),
        (wrapped(RuntimeError("CUDA error: an illegal memory access was encountered")), False),
        (wrapped(RuntimeError("CUDA error: device-side assert triggered")), True),
        (errors.ProcessLost("rank 1 ended"), False),
        (errors.SaveFailed("the disk is full"), False),
        (errors.DeviceBusy("others hold its memory"), False),
        (raised(lambda: {}["logits"]), True),  # in this file, which is nobody's library
        (RuntimeError("in a library"), False),
    ],
)  # fmt: skip
def test_a_mistake_will_repeat_and_a_full_disk_may_not(error, repeats):
    assert will_repeat(error) is repeats
