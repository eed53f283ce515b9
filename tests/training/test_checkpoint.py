"""What is saved is found, whole; what is damaged is found out and named."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from brimful import files
from brimful.errors import BadCheckpoint, BadOption, SaveFailed
from brimful.files import json_sha256
from brimful.training.checkpoint import Checkpoint, Checkpoints, link
from tests.training.saved import content, is_right, names, save


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "run" / "checkpoints", keep=3)


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_save_is_found_again_with_its_facts(checkpoints):
    made = save(checkpoints, 200, facts={"task": "chat", "samples": 6400})
    found = checkpoints.newest()
    assert found.checkpoint == made and found.skipped == ()
    assert made.path == checkpoints.path(200) and made.path.name == "step-00000200"
    assert made.step == 200 and made.facts == {"task": "chat", "samples": 6400}
    assert made.size_bytes == sum(map(len, content(200).values()))
    assert is_right(made.path, 200)


def test_the_manifest_lists_every_file_with_size_and_hash(checkpoints):
    made = save(checkpoints, 7)
    written = json.loads((made.path / "manifest.json").read_text())
    assert [(one["name"], one["size_bytes"]) for one in written["files"]] == sorted(
        (name, len(data)) for name, data in content(7).items()
    )
    assert written["step"] == 7 and written["version"] == 1
    assert all(len(digest) == 64 for one in written["files"] for digest in one["sha256"])


def test_facts_come_back_as_json_says_them(checkpoints):
    made = save(checkpoints, 7, facts={"lengths": (1, 2), "rows": {2: "a", 10: "b"}, "loss": float("inf")})
    assert made.facts == {"lengths": [1, 2], "rows": {"2": "a", "10": "b"}, "loss": float("inf")}
    assert checkpoints.newest().checkpoint == made


def test_nothing_saved_is_nothing_found(checkpoints):
    assert checkpoints.newest().checkpoint is None
    assert checkpoints.newest().skipped == ()


def test_the_last_saved_is_the_newest_however_large_its_step(checkpoints):
    for step in (5, 123_456_789, 40):
        save(checkpoints, step)
    assert checkpoints.newest().checkpoint.step == 40
    shutil.rmtree(checkpoints.path(40))
    assert checkpoints.newest().checkpoint.step == 123_456_789


def test_what_the_same_process_left_does_not_get_into_a_save(checkpoints):
    part = checkpoints.folder / f".step-00000100.part-{os.getpid()}"
    part.mkdir(parents=True)
    (part / "old.pt").write_text("old")
    assert not (save(checkpoints, 100).path / "old.pt").exists()


def remove_file(path):
    (path / "optimizer.pt").unlink()


def remove_folder(path):
    (path / "model" / "weights.bin").unlink()
    (path / "model" / "config.json").unlink()
    (path / "model").rmdir()


def make_pipe(path):
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


def sign(path, **changes):
    """Change the manifest, and its own hash with it."""
    content = {**json.loads((path / "manifest.json").read_text()), **changes}
    del content["sha256"]
    (path / "manifest.json").write_text(json.dumps({"sha256": files.json_sha256(content), **content}))


DAMAGES = {
    "flipped first byte": (lambda path: flip(path / "optimizer.pt", 0), "optimizer.pt is damaged between bytes 0 and"),
    "flipped last byte": (lambda path: flip(path / "model/weights.bin"), "model/weights.bin is damaged between bytes"),
    "truncated": (lambda path: os.truncate(path / "state.pt", 3), "state.pt is truncated: 3 bytes instead of"),
    "grown": (lambda path: (path / "state.pt").write_bytes(b"x" * 99), "state.pt is too long: 99 bytes instead of"),
    "missing": (remove_file, "optimizer.pt is missing"),
    "folder missing": (remove_folder, "model/config.json is missing"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "it has no manifest.json"),
    "garbled manifest": (
        lambda path: (path / "manifest.json").write_bytes(b"\xff{]"),
        "its manifest.json cannot be read",
    ),
    "manifest of nothing": (lambda path: (path / "manifest.json").write_text("[]"), "its manifest.json cannot be read"),
    "deep manifest": (
        lambda path: (path / "manifest.json").write_text('{"version": ' + "[" * 100_000),
        "its manifest.json cannot be read",
    ),
    "empty manifest": (lambda path: os.truncate(path / "manifest.json", 0), "its manifest.json cannot be read"),
    "manifest is a pipe": (make_pipe, "its manifest.json cannot be read"),
    "weights put beside it": (
        lambda path: (path / "weights.safetensors").write_bytes(b""),
        "weights.safetensors was added after it was written",
    ),
    "files of no kind": (lambda path: sign(path, files=[1]), "its manifest.json cannot be read (files of another type"),
    "a serial in words": (
        lambda path: sign(path, serial="2"),
        "its manifest.json cannot be read (serial of another type",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_one_is_named_and_the_one_before_it_used(checkpoints, kind):
    damage, why = DAMAGES[kind]
    save(checkpoints, 100)
    last = save(checkpoints, 200)
    damage(last.path)
    found = checkpoints.newest()
    assert found.checkpoint.step == 100 and is_right(found.checkpoint.path, 100)
    (skipped,) = found.skipped
    assert skipped.path == last.path and skipped.step == 200
    assert skipped.why.startswith(why)


def edit_manifest(path, **changes):
    file = path / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_manifest_that_was_edited_is_not_believed(checkpoints):
    last = save(checkpoints, 200)
    edit_manifest(last.path, files=[])
    assert "was changed after it was written" in checkpoints.newest().skipped[0].why


@pytest.mark.parametrize(
    "changes", [{"files": 5}, {"files": [{"name": "a"}]}, {"step": "200"}, {"facts": []}, {"created": {}}], ids=str
)
def test_a_manifest_of_other_types_is_not_believed_even_with_a_right_checksum(checkpoints, changes):
    last = save(checkpoints, 200)
    content = {**json.loads((last.path / "manifest.json").read_text()), **changes}
    del content["sha256"]
    edit_manifest(last.path, **changes, sha256=json_sha256(content))
    assert checkpoints.newest().skipped[0].why.startswith("its manifest.json cannot be read")


def test_a_manifest_of_another_version_is_refused_by_its_number(checkpoints):
    last = save(checkpoints, 200)
    edit_manifest(last.path, version=9)
    assert checkpoints.newest().skipped[0].why == "its manifest.json has version 9, and this Brimful reads version 1"


def test_a_folder_renamed_by_hand_is_not_taken_for_another_step(checkpoints):
    save(checkpoints, 100).path.rename(checkpoints.path(900))
    found = checkpoints.newest()
    assert found.checkpoint is None
    assert found.skipped[0].why == "its name says step 900 and its manifest step 100"


def test_a_half_written_one_is_skipped_and_cleaned(checkpoints):
    save(checkpoints, 100)
    part = checkpoints.folder / ".step-00000200.part-4711"
    part.mkdir()
    (part / "optimizer.pt").write_bytes(b"half")
    found = checkpoints.newest()
    assert found.checkpoint.step == 100
    assert [str(one) for one in found.skipped] == [f"{part.name}: its save was interrupted"]
    assert checkpoints.clean() == [part]
    assert names(checkpoints.folder) == ["step-00000100"]
    assert checkpoints.newest().skipped == ()


def test_older_leftovers_are_not_said_to_be_skipped(checkpoints):
    save(checkpoints, 300)
    (checkpoints.folder / ".step-00000200.part-4711").mkdir()
    (checkpoints.folder / "step-00000100").mkdir()
    assert checkpoints.newest().skipped == ()


def test_all_skipped_are_told_newest_first(checkpoints):
    for step in (100, 200, 300):
        save(checkpoints, step)
    (checkpoints.path(200) / "state.pt").unlink()
    flip(checkpoints.path(300) / "state.pt")
    (checkpoints.folder / ".step-00000400.part-1").mkdir()
    found = checkpoints.newest()
    assert found.checkpoint.step == 100
    assert [one.step for one in found.skipped] == [400, 300, 200]


def test_clean_leaves_whole_ones_and_strangers_alone(checkpoints):
    save(checkpoints, 100)
    (checkpoints.folder / "notes.txt").write_text("mine")
    (checkpoints.folder / ".hidden").mkdir()
    (checkpoints.folder / "step-1").mkdir()
    assert checkpoints.clean() == []
    assert names(checkpoints.folder) == [".hidden", "notes.txt", "step-00000100", "step-1"]


def test_every_block_of_a_large_file_is_hashed(checkpoints, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", 1000)
    made = save(checkpoints, 100)
    size = len(content(100)["optimizer.pt"])
    for at in (0, 999, 1000, size - 1):
        flip(made.path / "optimizer.pt", at)
        first = at // 1000 * 1000
        why = f"optimizer.pt is damaged between bytes {first:,} and {min(size, first + 1000):,}: its checksum differs"
        assert checkpoints.newest().skipped[0].why == why
        flip(made.path / "optimizer.pt", at)
    assert checkpoints.newest().checkpoint == made


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(BadCheckpoint, match="there is no such folder"):
        Checkpoint.read(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadCheckpoint, match=r"its manifest.json cannot be read \(NotADirectoryError\)"):
        Checkpoint.read(tmp_path / "file")


def test_at_least_one_is_kept(tmp_path):
    with pytest.raises(BadOption, match="keep=0 must be at least 1"):
        Checkpoints(tmp_path, keep=0)


def test_a_folder_that_cannot_be_listed_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadCheckpoint, match="cannot be read .Not a directory."):
        Checkpoints(tmp_path / "file").newest()


def test_everything_is_on_the_disk_before_the_name_is(checkpoints, monkeypatch):
    log, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (log.append(os.fstat(fd).st_ino), fsync(fd))[1])
    monkeypatch.setattr(os, "rename", lambda old, new: (log.append(str(new)), rename(old, new))[1])
    made = save(checkpoints, 100)
    renamed = log.index(str(made.path))
    inodes = {path.stat().st_ino for path in [made.path, *made.path.rglob("*")]}
    assert len(inodes) == 7
    assert inodes <= set(log[:renamed])
    assert checkpoints.folder.parent.stat().st_ino in log
    assert log[renamed + 1 :].count(checkpoints.folder.stat().st_ino) == 1
    assert log.index(made.path.stat().st_ino, log.index((made.path / "manifest.json").stat().st_ino)) < renamed


def test_the_package_knows_nothing_of_torch_or_arrow():
    look = "import sys, brimful.training.checkpoint; print({'torch', 'pyarrow', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout.strip() == "set()"


class TestFailing:
    """A save that fails leaves what was there, and nothing else."""

    @pytest.fixture(autouse=True)
    def _one_before(self, checkpoints):
        save(checkpoints, 100)

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (OSError(28, "No space left on device"), "the disk is full (19.53 KiB needed, "),
            (OSError(122, "Disk quota exceeded"), "the disk quota is used up ("),
            (OSError(27, "File too large"), "a file exceeds what the disk or `ulimit -f` allows ("),
            (
                RuntimeError("[enforce fail] . unexpected pos 704 vs 598"),
                "a file was truncated, as on a full disk",
            ),
            (ValueError("I/O error: No space left on device (os error 28)"), "the disk is full ("),
            (OSError(13, "Permission denied"), "Permission denied. Try: make the folder writable"),
            (MemoryError(), "MemoryError."),
            (BadCheckpoint("strange"), "BadCheckpoint: strange."),
        ],
        ids=str,
    )
    def test_every_error_becomes_one_sentence(self, checkpoints, error, said):
        def write(folder):
            (folder / "half.pt").write_bytes(b"x")
            raise error

        with pytest.raises(SaveFailed) as caught:
            checkpoints.save(200, write, needs_bytes=20_000)
        sentence = str(caught.value)
        assert sentence.startswith(f"the checkpoint of step 200 could not be written to {checkpoints.folder}: {said}")
        assert "\n" not in sentence
        assert caught.value.__cause__ is error
        assert names(checkpoints.folder) == ["step-00000100"]
        assert checkpoints.newest().checkpoint.step == 100

    def test_the_cause_behind_torchs_words_is_named(self, checkpoints):
        def write(folder):
            try:
                raise OSError(122, "Disk quota exceeded")
            except OSError:
                raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904 torch leaves the cause to the context as well

        with pytest.raises(SaveFailed, match="the disk quota is used up"):
            checkpoints.save(200, write, needs_bytes=1)

    def test_an_interrupt_is_passed_on_and_leaves_nothing(self, checkpoints):
        def write(folder):
            (folder / "half.pt").write_bytes(b"x")
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(200, write, needs_bytes=1)
        assert names(checkpoints.folder) == ["step-00000100"]

    def test_facts_that_json_cannot_say_fail_the_save(self, checkpoints):
        with pytest.raises(SaveFailed, match="TypeError: Object of type set is not JSON serializable"):
            save(checkpoints, 200, facts={"set": {1}})
        assert names(checkpoints.folder) == ["step-00000100"]

    def test_the_same_step_failing_leaves_the_former(self, checkpoints):
        def write(folder):
            raise OSError(28, "No space left on device")

        with pytest.raises(SaveFailed):
            checkpoints.save(100, write, needs_bytes=1)
        assert is_right(checkpoints.newest().checkpoint.path, 100)

    def test_a_rename_that_fails_brings_the_former_back(self, checkpoints, monkeypatch):
        rename = os.rename

        def failing(old, new):
            if ".part-" in str(old):
                raise OSError(5, "Input/output error")
            rename(old, new)

        monkeypatch.setattr(os, "rename", failing)
        with pytest.raises(SaveFailed, match="Input/output error"):
            save(checkpoints, 100, "again")
        assert names(checkpoints.folder) == ["step-00000100"]
        assert is_right(checkpoints.newest().checkpoint.path, 100)


def made_model(run, step):
    folder = run / "checkpoints" / f"step-{step}" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(str(step))
    return folder


def test_a_link_follows_the_newest(tmp_path):
    for step in (1, 2):
        assert link(tmp_path / "model", made_model(tmp_path, step), note=print)
        assert (tmp_path / "model" / "config.json").read_text() == str(step)
    assert names(tmp_path) == ["checkpoints", "model"]


def test_a_run_folder_may_be_moved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    link(tmp_path / "run" / "model", made_model(tmp_path / "run", 1).relative_to(tmp_path), note=print)
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / "model" / "config.json").read_text() == "1"


def test_a_folder_in_the_place_of_the_link_stays_and_is_notes(tmp_path):
    notes = []
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("mine")
    target = made_model(tmp_path, 1)
    assert not link(tmp_path / "model", target, note=notes.append)
    assert (tmp_path / "model" / "mine.txt").read_text() == "mine"
    assert names(tmp_path) == ["checkpoints", "model"]
    assert notes[0].startswith(f"{tmp_path / 'model'} could not be linked to {target} (Is a directory)")


def test_where_links_are_impossible_it_is_notes(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    notes = []
    assert not link(tmp_path / "model", made_model(tmp_path, 1), note=notes.append)
    assert "Operation not permitted" in notes[0]
    assert names(tmp_path) == ["checkpoints"]
