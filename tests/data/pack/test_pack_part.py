"""What is at the output and beside it: before, after, and when a pack is killed in between."""

import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest

from brimful.data.encode import PackOptions
from brimful.data.store import Store
from brimful.data.tokenize import pack
from brimful.errors import BadData, BadOption
from tests.data.pack.test_pack import make_tokenizer, rows, write_jsonl

FILE_ROWS = 50
KILLED = """
import os, signal, sys
from brimful.data.tokenize import pack
from brimful.data.encode import PackOptions

def kill(phrase):
    if phrase.startswith(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)

pack([sys.argv[1]], tokenizer=sys.argv[2], output=sys.argv[3], options=PackOptions(file_rows=50), progress=kill)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of ten files with 20 rows each, every one a chunk, and a tokenizer."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "in").mkdir()
    for number in range(10):
        write_jsonl(folder / "in" / f"{number}.jsonl", [*rows(19, 20 * number), {"prompt": "", "response": "x"}])
    make_tokenizer(folder / "tokenizer")
    return folder


def run(place, output, **options):
    said = []
    report = pack(
        [str(place / "in")], tokenizer=place / "tokenizer", output=output,
        options=PackOptions(**{"file_rows": FILE_ROWS, **options}), progress=said.append,
    )  # fmt: skip
    return report, said


def killed(place, output, at="packed 140 rows"):
    """A pack that dies by SIGKILL at that progress."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(place / "in"), str(place / "tokenizer"), str(output), at])
    assert done.returncode == -signal.SIGKILL
    return output.with_name(f".{output.name}.part")


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_killed_pack_goes_on_and_gives_the_same_store(place, tmp_path):
    part = killed(place, tmp_path / "store")
    assert not (tmp_path / "store").exists()
    whole = json.loads((part / "progress.json").read_text())
    assert whole["counts"]["rows_in"] >= 60
    (part / "tokens-00009.arrow").write_text("half a file")
    report, said = run(place, tmp_path / "store")
    assert said[0] == f"going on after {whole['counts']['rows_in']} rows of an interrupted pack"
    assert said[1].startswith(f"packed {whole['counts']['rows_in'] + 20} rows")
    assert report.resumed_rows == whole["counts"]["rows_out"]
    assert (report.rows_in, report.rows_out, report.dropped["empty"]) == (200, 190, 10)
    straight, _ = run(place, tmp_path / "straight")
    assert contents(tmp_path / "store") == contents(tmp_path / "straight")
    assert report.sides == straight.sides
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_pack_killed_before_the_first_file_starts_anew(place, tmp_path):
    part = killed(place, tmp_path / "store", at="packed 20 rows")
    assert part.exists()
    report, said = run(place, tmp_path / "store")
    assert said[0].startswith("packed 20 rows")
    assert (report.resumed_rows, report.started_over) == (0, "")


@pytest.mark.parametrize("change", ["options", "tokenizer", "source", "damage", "progress"])
def test_what_an_other_pack_left_is_not_gone_on_with(place, tmp_path, change):
    part = killed(place, tmp_path / "store")
    options, said_why = (
        {},
        {"options": "max-tokens", "progress": "cannot be read", "damage": "damaged"}.get(change, change),
    )
    if change == "options":
        options["max_tokens"] = (30,)
    elif change == "tokenizer":
        path = part / "progress.json"
        content = json.loads(path.read_text())
        content["key"]["tokenizer"] = "another"
        path.write_text(json.dumps(content))
    elif change == "source":
        os.utime(place / "in" / "3.jsonl", (1, 1))
    elif change == "damage":
        path = part / "tokens-00000.arrow"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    else:
        (part / "progress.json").write_text("{")
    report, said = run(place, tmp_path / "store", **options)
    assert said[0].startswith("starting over")
    assert said_why in said[0]
    assert said_why in report.started_over
    run(place, tmp_path / "straight", **options)
    assert contents(tmp_path / "store") == contents(tmp_path / "straight")
    assert report.resumed_rows == 0 and report.rows_in == 200


def test_a_pack_that_allows_more_broken_rows_goes_on(place, tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(6):
        write_jsonl(tmp_path / "in" / f"{number}.jsonl", rows(20, 20 * number))
    with (tmp_path / "in" / "4.jsonl").open("a") as file:
        file.write("{broken\n")
    where = type("Place", (), {"__truediv__": lambda self, name: (tmp_path if name == "in" else place) / name})()
    with pytest.raises(BadData, match="4.jsonl, line 21"):
        run(where, tmp_path / "store")
    assert not (tmp_path / "store").exists()
    report, said = run(where, tmp_path / "store", max_bad=0.5)
    assert said[0].startswith("going on after 60 rows")
    assert (report.rows_in, report.rows_out, report.dropped["broken"]) == (121, 120, 1)


def test_broken_rows_before_the_interruption_still_count(place, tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(4):
        path = tmp_path / "in" / f"{number}.jsonl"
        write_jsonl(path, rows(30, 30 * number))
        with path.open("a") as file:
            file.write("{broken\n" if number == 0 else "")
    where = type("Place", (), {"__truediv__": lambda self, name: (tmp_path if name == "in" else place) / name})()

    def stop(phrase):
        if phrase.startswith("packed 91"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(
            [str(tmp_path / "in")], tokenizer=place / "tokenizer", output=tmp_path / "store",
            options=PackOptions(file_rows=50, max_bad=0.1), progress=stop,
        )  # fmt: skip
    with pytest.raises(
        BadData, match="1 of 121 rows are broken, more than --max-bad 0.001; the first is .*0.jsonl, line 31"
    ):
        run(where, tmp_path / "store", max_bad=0.001)
    report, _ = run(where, tmp_path / "store", max_bad=0.1)
    assert report.resumed_rows == 120
    assert report.dropped["broken"] == 1
    assert "0.jsonl, line 31" in report.first_broken


def test_an_existing_store_is_refused_and_replaced_only_on_demand(place, tmp_path):
    run(place, tmp_path / "store")
    before = contents(tmp_path / "store")
    with pytest.raises(BadOption, match="is an existing token store; name another folder, or add --overwrite"):
        run(place, tmp_path / "store", max_tokens=(30,))
    assert contents(tmp_path / "store") == before
    run(place, tmp_path / "store", max_tokens=(30,), overwrite=True)
    assert Store.open(tmp_path / "store").meta.max_tokens == {"prompt": 30, "response": 30}
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_the_old_store_stays_when_replacing_it_fails(place, tmp_path):
    run(place, tmp_path / "store")
    before = contents(tmp_path / "store")
    with pytest.raises(BadOption, match="too small"):
        run(place, tmp_path / "store", overwrite=True, host_limit_bytes=1)
    assert contents(tmp_path / "store") == before


def test_what_is_no_store_of_ours_is_never_replaced(place, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_text("x")
    (tmp_path / "file").write_text("x")
    for name, kind in (("photos", "folder that is not a token store"), ("file", "file")):
        with pytest.raises(BadOption, match=f"is an existing {kind}"):
            run(place, tmp_path / name, overwrite=True)
    assert (tmp_path / "photos" / "one.jpg").read_text() == (tmp_path / "file").read_text() == "x"


def test_a_hidden_folder_that_is_no_store_of_ours_is_never_removed(place, tmp_path):
    run(place, tmp_path / "store")
    before = contents(tmp_path / "store")
    (tmp_path / ".store.old").mkdir()
    (tmp_path / ".store.old" / "mine").write_text("x")
    with pytest.raises(BadData, match="store.*: Directory not empty"):
        run(place, tmp_path / "store", overwrite=True)
    assert (tmp_path / ".store.old" / "mine").read_text() == "x"
    assert contents(tmp_path / "store") == before


def test_a_link_to_a_store_stays_a_link(place, tmp_path):
    run(place, tmp_path / "store")
    (tmp_path / "link").symlink_to("store")
    run(place, tmp_path / "link", overwrite=True, max_tokens=(30,))
    assert (tmp_path / "link").is_symlink()
    assert Store.open(tmp_path / "store").meta.max_tokens == {"prompt": 30, "response": 30}


def test_an_empty_folder_and_a_missing_parent_will_do(place, tmp_path):
    (tmp_path / "empty").mkdir()
    run(place, tmp_path / "empty")
    run(place, tmp_path / "a" / "b" / "store")
    assert len(Store.open(tmp_path / "empty")) == len(Store.open(tmp_path / "a" / "b" / "store")) == 190


def test_an_output_among_the_rows_is_refused(place):
    with pytest.raises(BadOption, match="lies inside .*, whose files are read"):
        run(place, place / "in" / "store")


def test_an_output_that_cannot_be_made_is_one_sentence(place, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadData, match="Not a directory"):
        run(place, tmp_path / "file" / "store")


def test_a_second_pack_in_the_same_place_is_refused_and_harms_nothing(place, tmp_path):
    part = tmp_path / ".store.part"
    part.mkdir()
    (part / "tokens-00000.arrow").write_text("of the first")
    held = os.open(part, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        with pytest.raises(BadOption, match="another brimful data pack is writing there"):
            run(place, tmp_path / "store")
        assert (part / "tokens-00000.arrow").read_text() == "of the first"
    finally:
        os.close(held)
    run(place, tmp_path / "store")


def test_nothing_of_the_making_stays_in_the_store(place, tmp_path):
    run(place, tmp_path / "store")
    assert not any("progress" in name or "part" in name for name in contents(tmp_path / "store"))
