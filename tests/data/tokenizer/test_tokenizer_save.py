"""The output appears whole or not at all, and nothing of the user's is lost."""

import errno
import os

import pytest

from brimful.data.tokenizer import train as training
from brimful.data.tokenizer.algorithms import TokenizerOptions, folder_beside
from brimful.data.tokenizer.train import train_tokenizer
from brimful.errors import BadData, BadOption
from tests.data.tokenizer.tokenizer_rows import write_rows

OPTIONS = TokenizerOptions(vocab_size=600)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.parquet", 60)


def fill(folder):
    (folder / "tokenizer.json").write_text("new")


def test_a_tokenizer_is_kept_unless_overwrite_is_asked_for(rows, tmp_path):
    train_tokenizer([rows], output=tmp_path / "t", options=OPTIONS)
    before = (tmp_path / "t" / "tokenizer.json").read_bytes()
    with pytest.raises(BadOption, match="existing tokenizer; name another folder, or add --overwrite"):
        train_tokenizer([rows], output=tmp_path / "t", options=OPTIONS)
    assert (tmp_path / "t" / "tokenizer.json").read_bytes() == before
    train_tokenizer([rows], output=tmp_path / "t", options=TokenizerOptions(vocab_size=650, overwrite=True))
    assert (tmp_path / "t" / "tokenizer.json").read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_tokenizer_is_never_replaced(overwrite, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    for name, kind in (("file", "existing file"), ("folder", "folder that is not a tokenizer")):
        with pytest.raises(BadOption, match=kind), folder_beside(tmp_path / name, overwrite=overwrite) as folder:
            fill(folder)
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "thesis.txt").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


def test_an_empty_folder_and_missing_parents_are_no_obstacle(tmp_path):
    (tmp_path / "empty").mkdir()
    for output in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        with folder_beside(output, overwrite=False) as folder:
            fill(folder)
        assert (output / "tokenizer.json").read_text() == "new"


def test_an_error_on_the_way_leaves_the_old_one(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.json").write_text("old")
    with pytest.raises(KeyboardInterrupt), folder_beside(tmp_path / "t", overwrite=True) as folder:
        fill(folder)
        raise KeyboardInterrupt
    assert (tmp_path / "t" / "tokenizer.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_rename_that_fails_brings_the_old_one_back(tmp_path, monkeypatch):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.json").write_text("old")
    rename = type(tmp_path).rename

    def failing(path, target):
        if path.name.endswith(".part"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return rename(path, target)

    monkeypatch.setattr(type(tmp_path), "rename", failing)
    with pytest.raises(BadData, match="Input/output error"), folder_beside(tmp_path / "t", overwrite=True) as folder:
        fill(folder)
    assert (tmp_path / "t" / "tokenizer.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_place_that_cannot_be_written_to_is_told_before_any_reading(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadData, match="name another folder with --output"):
        train_tokenizer(["no such file"], output=tmp_path / "file" / "t", options=OPTIONS)


def test_a_file_appearing_in_the_way_meanwhile_is_not_lost(tmp_path):
    with pytest.raises(BadOption, match="existing file"), folder_beside(tmp_path / "t", overwrite=False) as folder:
        fill(folder)
        (tmp_path / "t").write_text("mine")
    assert (tmp_path / "t").read_text() == "mine"


def test_a_full_disk_is_one_sentence_and_leaves_nothing(rows, tmp_path, monkeypatch):
    def sync(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("brimful.data.tokenizer.algorithms.sync", sync)
    with pytest.raises(BadData, match="the disk is full; free some space"):
        train_tokenizer([rows], output=tmp_path / "t", options=OPTIONS)
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_that_loses_text_is_not_saved(rows, tmp_path, monkeypatch):
    from tokenizers import decoders

    from brimful.errors import InternalError

    def spoilt(*given, **named):
        tokenizer = original(*given, **named)
        tokenizer.decoder = decoders.WordPiece()
        return tokenizer

    original = training.train_bpe
    monkeypatch.setattr(training, "train_bpe", spoilt)
    with pytest.raises(InternalError, match="the tokenizer turns"):
        train_tokenizer([rows], output=tmp_path / "t", options=OPTIONS)
    assert not list(tmp_path.iterdir())


def test_a_link_is_followed(tmp_path, rows):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    train_tokenizer([rows], output=tmp_path / "link", options=OPTIONS)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "tokenizer.json").is_file()


def test_an_output_among_the_rows_is_refused(tmp_path):
    write_rows(tmp_path / "rows.parquet", 20)
    with pytest.raises(BadOption, match="lies inside"):
        train_tokenizer([str(tmp_path)], output=tmp_path / "t", options=OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]
