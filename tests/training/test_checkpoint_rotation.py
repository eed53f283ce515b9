"""The last N and the best stay; a step saved again replaces the former; removals are whole and never raise."""

import json
import os
import shutil

import pytest

from brimful.errors import InternalError
from brimful.training.checkpoint import Best, Checkpoints
from tests.training.saved import is_right, names, save


@pytest.fixture
def notes():
    return []


@pytest.fixture
def checkpoints(tmp_path, notes):
    return Checkpoints(tmp_path / "checkpoints", keep=2, note=notes.append)


def test_the_last_ones_stay(checkpoints):
    for step in (1, 2, 3, 4, 5):
        save(checkpoints, step)
    assert names(checkpoints.folder) == ["step-00000004", "step-00000005"]


def test_the_best_stays_besides(checkpoints):
    save(checkpoints, 1)
    save(checkpoints, 2)
    checkpoints.mark_best(Best(step=2, metric="loss", score=1.5))
    for step in (3, 4, 5):
        save(checkpoints, step)
    assert names(checkpoints.folder) == ["best.json", "step-00000002", "step-00000004", "step-00000005"]
    assert checkpoints.best() == Best(step=2, metric="loss", score=1.5)
    checkpoints.mark_best(Best(step=5, metric="loss", score=1.25))
    checkpoints.rotate()
    assert names(checkpoints.folder) == ["best.json", "step-00000004", "step-00000005"]
    assert Checkpoints(checkpoints.folder).best() == Best(step=5, metric="loss", score=1.25)


def test_no_best_is_none(checkpoints, notes):
    assert checkpoints.best() is None and notes == []


@pytest.mark.parametrize("text", ["", "[1]", '{"step": 2}', '{"step": 2, "metric": "loss", "score": NaN}'])
def test_a_damaged_mark_is_told_once_and_ignored(checkpoints, notes, text):
    save(checkpoints, 1)
    (checkpoints.folder / "best.json").write_text(text)
    assert checkpoints.best() is None
    assert checkpoints.best() is None
    assert len(notes) == 1 and "best.json cannot be read" in notes[0]
    checkpoints.mark_best(Best(step=1, metric="bleu", score=12.0))
    assert checkpoints.best().score == 12.0


def test_a_score_that_is_no_number_cannot_be_the_best():
    with pytest.raises(InternalError, match="step 1 cannot be the best with loss nan"):
        Best(step=1, metric="loss", score=float("nan"))


def test_a_mark_the_disk_refuses_holds_and_is_written_with_the_next_save(checkpoints, notes, monkeypatch):
    save(checkpoints, 1)
    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", refuse)
        checkpoints.mark_best(Best(step=1, metric="loss", score=2.0))
    assert notes == ["best.json could not be written (No space left on device); the next save tries again"]
    assert names(checkpoints.folder) == ["step-00000001"] and checkpoints.best().step == 1
    for step in (2, 3, 4):
        save(checkpoints, step)
    assert names(checkpoints.folder) == ["best.json", "step-00000001", "step-00000003", "step-00000004"]
    assert json.loads((checkpoints.folder / "best.json").read_text()) == {"step": 1, "metric": "loss", "score": 2.0}


def refuse(*_, **__):
    raise OSError(28, "No space left on device")


def test_the_same_step_saved_again_replaces_the_former(checkpoints):
    save(checkpoints, 1)
    first = save(checkpoints, 2, "first")
    second = save(checkpoints, 2, "second")
    assert first.path == second.path and second.facts == {"mark": "second"}
    assert checkpoints.newest().checkpoint == second
    assert is_right(second.path, 2, "second")
    assert names(checkpoints.folder) == ["step-00000001", "step-00000002"]


def test_one_set_aside_by_a_killed_save_is_found_and_brought_back(checkpoints):
    save(checkpoints, 1)
    path = save(checkpoints, 2).path
    aside = path.rename(checkpoints.folder / ".step-00000002.aside")
    assert checkpoints.newest().checkpoint.path == aside
    assert checkpoints.clean() == []
    assert checkpoints.newest().checkpoint.path == path


def test_one_set_aside_goes_when_the_new_one_has_its_name(checkpoints):
    path = save(checkpoints, 2, "old").path
    aside = checkpoints.folder / ".step-00000002.aside"
    shutil.copytree(path, aside)
    save(checkpoints, 3)
    shutil.rmtree(path)
    shutil.copytree(aside, path)
    assert checkpoints.clean() == [aside]
    assert names(checkpoints.folder) == ["step-00000002", "step-00000003"]


def test_one_set_aside_stays_while_the_new_one_is_damaged(checkpoints, notes):
    path = save(checkpoints, 2).path
    aside = checkpoints.folder / ".step-00000002.aside"
    shutil.copytree(path, aside)
    (path / "state.pt").unlink()
    assert checkpoints.clean() == []
    found = checkpoints.newest()
    assert found.checkpoint.path == aside and is_right(aside, 2)
    assert notes == [f"{aside} keeps this name: state.pt is missing"]


def test_rotation_leaves_a_step_that_is_set_aside_as_well(checkpoints, tmp_path):
    shutil.copytree(save(checkpoints, 1, "old").path, tmp_path / "former")
    save(checkpoints, 1, "new")
    shutil.move(tmp_path / "former", checkpoints.folder / ".step-00000001.aside")
    save(checkpoints, 2)
    assert names(checkpoints.folder) == [".step-00000001.aside", "step-00000001", "step-00000002"]
    assert is_right(checkpoints.path(1), 1, "new")


def test_after_going_back_the_new_course_counts_as_newer(checkpoints):
    for step in (200, 400):
        save(checkpoints, step)
    save(checkpoints, 250)
    assert checkpoints.newest().checkpoint.step == 250
    save(checkpoints, 300)
    assert names(checkpoints.folder) == ["step-00000250", "step-00000300"]


def test_a_damaged_one_does_not_count_as_kept(checkpoints):
    for step in (100, 200):
        save(checkpoints, step)
    file = checkpoints.path(200) / "state.pt"
    file.write_bytes(b"\0" * file.stat().st_size)
    assert checkpoints.newest().checkpoint.step == 100
    save(checkpoints, 150)
    assert "step-00000100" in names(checkpoints.folder)
    save(checkpoints, 160)
    assert names(checkpoints.folder) == ["step-00000150", "step-00000160"]


def test_a_truncated_one_does_not_count_as_kept(checkpoints):
    for step in (100, 200):
        save(checkpoints, step)
    (checkpoints.path(200) / "state.pt").write_bytes(b"")
    save(checkpoints, 300)
    assert "step-00000100" in names(checkpoints.folder)


def test_nothing_goes_while_there_are_too_few_whole_ones(checkpoints):
    for step in (1, 2):
        (save(checkpoints, step).path / "state.pt").unlink()
    save(checkpoints, 3)
    assert names(checkpoints.folder) == ["step-00000001", "step-00000002", "step-00000003"]


def test_what_says_nothing_about_itself_is_not_removed(checkpoints):
    save(checkpoints, 1)
    (checkpoints.path(1) / "manifest.json").unlink()
    for step in (2, 3, 4):
        save(checkpoints, step)
    assert names(checkpoints.folder) == ["step-00000001", "step-00000003", "step-00000004"]


def test_a_removal_renames_first(checkpoints, monkeypatch):
    for step in (1, 2):
        save(checkpoints, step)
    removed = []
    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, **how: (removed.append(path.name), rmtree(path, **how)))
    save(checkpoints, 3)
    assert set(removed) == {f".step-00000001.gone-{os.getpid()}"}


def test_a_removal_that_fails_is_told_once_and_tried_again_by_clean(checkpoints, notes, monkeypatch):
    for step in (1, 2):
        save(checkpoints, step)
    with monkeypatch.context() as disk:
        disk.setattr(os, "rmdir", refuse)
        save(checkpoints, 3)
        checkpoints.rotate()
    assert notes == [f"{checkpoints.path(1)} could not be removed (No space left on device) and still takes up space"]
    assert checkpoints.newest().checkpoint.step == 3
    gone = checkpoints.folder / f".step-00000001.gone-{os.getpid()}"
    assert gone.exists() and checkpoints.newest().skipped == ()
    assert checkpoints.clean() == [gone]
    assert names(checkpoints.folder) == ["step-00000002", "step-00000003"]
