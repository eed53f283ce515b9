"""`brimful.train` from Python: what it cannot do is one sentence, and leaves nothing behind."""

import pytest

import brimful
from brimful.errors import BadOption, TaskError
from brimful.training.session import _places
from tests.training import runs


class Broken(runs.Run):
    """Reads no rows from one of its files."""

    def __init__(self, broken, error):
        super().__init__()
        self.broken, self.error = broken, error

    def rows(self, data):
        return super().rows(data) if data != self.broken else self.error()


class NoLength:
    def __len__(self):
        raise KeyError("length")


def no_such_key():
    return {}["text"]


@pytest.mark.parametrize("broken", ["rows", "others"])
@pytest.mark.parametrize(("error", "said"), [(no_such_key, "KeyError: 'text'"), (NoLength, "KeyError: 'length'")])
def test_rows_that_cannot_be_read_are_one_sentence(tmp_path, broken, error, said):
    with pytest.raises(TaskError, match=f"task Broken: its rows failed on {broken}: {said}"):
        brimful.train(Broken(broken, error), "rows", valid="others", run=str(tmp_path / "run"), device="cpu")


def test_rows_in_memory_are_refused(tmp_path):
    with pytest.raises(TaskError, match="a path that the task's rows\\(\\) reads, not a Dataset"):
        brimful.train(runs.Run(), runs.Dataset(), run=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("word", ["processes", "gpus"])
def test_a_call_is_one_process(tmp_path, word):
    with pytest.raises(BadOption, match=f"{word}=2: .*torchrun --nproc-per-node 2"):
        brimful.train(runs.Run(), "rows", run=str(tmp_path / "run"), **{word: 2})
    assert not (tmp_path / "run").exists()


def test_data_need_not_be_a_path(tmp_path):
    """A task may read whatever words it likes."""
    assert _places(tmp_path, "word " * 1000, None) == {"data": "word " * 1000, "valid": None}
