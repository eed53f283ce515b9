"""`RUN/model` leads to the newest weights, wherever the run folder is taken."""

import os
import shutil

from brimful.training.checkpoint import point
from tests.training.checkpoint.saved import names


def made(run, step):
    folder = run / "checkpoints" / f"step-{step}" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(str(step))
    return folder


def test_a_link_follows_the_newest(tmp_path):
    for step in (1, 2):
        assert point(tmp_path / "model", made(tmp_path, step), tell=print)
        assert (tmp_path / "model" / "config.json").read_text() == str(step)
    assert names(tmp_path) == ["checkpoints", "model"]


def test_a_run_folder_may_be_moved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    point(tmp_path / "run" / "model", made(tmp_path / "run", 1).relative_to(tmp_path), tell=print)
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / "model" / "config.json").read_text() == "1"


def test_a_folder_in_the_place_of_the_link_stays_and_is_told(tmp_path):
    told = []
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("mine")
    target = made(tmp_path, 1)
    assert not point(tmp_path / "model", target, tell=told.append)
    assert (tmp_path / "model" / "mine.txt").read_text() == "mine"
    assert names(tmp_path) == ["checkpoints", "model"]
    assert told == [
        f"{tmp_path / 'model'} could not be pointed at {target} (Is a directory); use the path of the checkpoint itself"
    ]


def test_where_links_are_impossible_it_is_told(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    told = []
    assert not point(tmp_path / "model", made(tmp_path, 1), tell=told.append)
    assert "Operation not permitted" in told[0]
    assert names(tmp_path) == ["checkpoints"]
