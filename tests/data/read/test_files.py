"""Paths to files: what cannot be read at all is one message that names the file."""

import gzip
import json
import lzma
import os
import random
import shutil
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brimful.data.read.source import open_source
from brimful.errors import BadData
from tests.data.read.row_files import PACK, ROWS, error_of, rows_of, write


def test_a_missing_file_names_what_is_near(tmp_path):
    for name in ("train.jsonl", "valid.csv", ".hidden"):
        (tmp_path / name).touch()
    assert error_of(tmp_path / "trian.jsonl") == (
        f"{tmp_path}/trian.jsonl does not exist. Try: {tmp_path}/train.jsonl."
    )
    assert error_of(tmp_path / "x.csv").endswith(f"does not exist. Try: one of train.jsonl, valid.csv in {tmp_path}.")
    assert error_of(tmp_path / "no" / "where" / "x.csv").endswith(
        f". Try: one of train.jsonl, valid.csv in {tmp_path}."
    )
    assert error_of(tmp_path / "*.parquet").endswith(f". Try: one of train.jsonl, valid.csv in {tmp_path}.")


def test_a_missing_file_in_a_folder_is_no_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert error_of("data/train").startswith("data/train does not exist. ")
    assert "does not exist" in error_of("nowhere/train.jsonl")


def test_an_empty_file_is_named(tmp_path):
    write(tmp_path / "a.jsonl")
    for name in ("b.jsonl", "b.parquet", "b.csv", "b.json"):
        (tmp_path / name).touch()
        assert (
            error_of(tmp_path / "a.jsonl", tmp_path / name)
            == f"{tmp_path / name} is empty (0 bytes). Try: leave it out, or download it again."
        )


def test_a_file_without_rows_is_named(tmp_path):
    pq.write_table(
        pa.table({"prompt": pa.array([], pa.string()), "response": pa.array([], pa.string())}), tmp_path / "a.parquet"
    )
    (tmp_path / "a.jsonl").write_text("\n \n\n")
    (tmp_path / "a.json").write_text("\n \n\n")
    for name in ("a.parquet", "a.jsonl", "a.json"):
        assert error_of(tmp_path / name) == f"{tmp_path / name} has no rows. Try: leave it out."


def test_a_folder_without_files_of_rows_names_what_it_has(tmp_path):
    assert "is empty. Try: .parquet" in error_of(tmp_path)
    for name in ("a.rst", "b.md", "c.parquet.gz"):
        (tmp_path / name).touch()
    assert "contains only a.rst, b.md, c.parquet.gz. Try: " in error_of(tmp_path)


def test_an_unknown_format_names_the_known_ones(tmp_path):
    (tmp_path / "a.rst").write_text("x")
    assert error_of(tmp_path / "a.rst").startswith(f"{tmp_path}/a.rst: unknown format. Try: .parquet, .pq, .jsonl")


def test_a_link_to_nothing_is_refused(tmp_path):
    write(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to("gone.jsonl")
    for path in (tmp_path, tmp_path / "b.jsonl"):
        assert error_of(path) == (
            f"{tmp_path}/b.jsonl is a link to gone.jsonl, which does not exist. Try: repair or remove it."
        )


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    write(tmp_path / "a.jsonl")
    os.mkfifo(tmp_path / "b.jsonl")
    for path in (tmp_path, tmp_path / "b.jsonl"):
        assert error_of(path) == (
            f"{tmp_path}/b.jsonl is not a regular file. Try: write its rows to a file, or remove it."
        )


def test_a_file_given_twice_is_not_counted_twice(tmp_path):
    path = write(tmp_path / "a.jsonl")
    assert error_of(path, tmp_path) == f"{path} was given twice, so its rows would count twice. Try: name it once."


def test_nothing_given_is_a_mistake():
    assert error_of() == "No files were given. Try: files, folders or a dataset on the hub."


@pytest.fixture
def public_folder():
    """A folder that another user can enter: pytest's own cannot be."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "sub"])
def test_what_may_not_be_read_is_one_message(name, public_folder):
    if name == "sub":
        (public_folder / name).mkdir()
    else:
        write(public_folder / name)
    write(public_folder / "good.jsonl")
    (public_folder / name).chmod(0)
    am_root = os.geteuid() == 0
    if am_root:
        os.seteuid(65534)
    try:
        assert (
            error_of(public_folder)
            == f"{public_folder / name}: Permission denied. Try: make it readable for this user."
        )
    finally:
        if am_root:
            os.seteuid(0)
        (public_folder / name).chmod(0o755)


def test_the_output_folder_of_clean_is_not_taken_for_one_set_of_rows(tmp_path):
    for name in ("train.parquet", "valid.parquet", "clean.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(BadData, match=r"with separate splits. Try: one file, such as .*train\.parquet"):
        open_source([str(tmp_path)])


@pytest.mark.parametrize(("ending", "pack"), PACK.items())
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_compressed_file_is_one_message(ending, pack, damage, tmp_path):
    rng = random.Random(0)
    text = "".join(
        json.dumps({"prompt": str(rng.random()), "response": str(rng.random())}) + "\n" for _ in range(2_000)
    )
    packed = pack(text.encode())
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(packed[: len(packed) // 2] if damage == "cut" else b"not packed at all")
    with pytest.raises(BadData, match=f"a.jsonl{ending}: not a complete .* file"):
        rows_of(open_source([str(path)]))


def test_a_gzip_file_of_several_parts_is_read_to_its_end(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    line = b'{"prompt":"a","response":"b"}\n'
    path.write_bytes(gzip.compress(line) + gzip.compress(line))
    assert len(rows_of(open_source([str(path)]))) == 2


@pytest.mark.parametrize("padding", [b"", b"\0" * 8, b"\0" * 2**17])
def test_an_xz_file_of_several_streams_is_read_to_its_end(padding, tmp_path):
    path = tmp_path / "a.jsonl.xz"
    packed = PACK[".xz"](write(tmp_path / "b.jsonl").read_bytes())
    path.write_bytes(packed + padding + packed + padding)
    assert rows_of(open_source([str(path)])) == ROWS + ROWS


def test_an_xz_file_with_a_damaged_second_stream_is_one_message(tmp_path):
    path = tmp_path / "a.jsonl.xz"
    packed = lzma.compress(b'{"prompt":"a","response":"b"}\n')
    path.write_bytes(packed + b"x" + packed[1:])
    assert "not a complete xz file" in error_of(path)
