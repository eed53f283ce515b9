"""Every format gives the same rows under the same names, in chunks that do not depend on the format's blocks."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from brimful.data.read.files import CHUNK_ROWS
from brimful.data.read.source import open_source
from brimful.errors import BadData, MissingExtra
from tests.data.read.row_files import ROWS, broken_of, rows_of, write

NAMES = [
    "a.parquet",
    "a.jsonl",
    "a.ndjson",
    "a.json",
    "a.csv",
    "a.tsv",
    "a.jsonl.gz",
    "a.json.gz",
    "a.csv.bz2",
    "a.jsonl.zst",
    "a.jsonl.xz",
    "a.csv.xz",
    "A.JSONL",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_format_gives_the_rows_that_were_written(name, tmp_path):
    path = write(tmp_path / name.lower())
    path = path.rename(tmp_path / name)
    source = open_source([str(path)])
    assert rows_of(source) == ROWS
    assert not broken_of(source)
    assert source.layout.columns == {"prompt": "prompt", "response": "response"}
    assert source.files == (str(path),)
    assert source.total_bytes == path.stat().st_size
    last = list(source.chunks())[-1]
    assert last.read_bytes == source.total_bytes
    assert last.rows.schema.types == [pa.string(), pa.string()]


def test_a_source_can_be_read_twice(tmp_path):
    source = open_source([str(write(tmp_path / "a.jsonl"))])
    assert rows_of(source) == rows_of(source) == ROWS


def test_only_the_columns_that_count_are_read(tmp_path):
    source = open_source([str(write(tmp_path / "a.parquet", [{"id": 1, "response": "b", "prompt": "a", "x": [1]}]))])
    (chunk,) = source.chunks()
    assert chunk.rows.schema.names == ["prompt", "response"]
    assert chunk.rows.to_pylist() == [{"prompt": "a", "response": "b"}]


# ---------------------------------------------------------------- chunks


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json", "a.csv"])
def test_chunks_are_of_limited_size_and_the_same_every_time(name, tmp_path):
    rows = [{"prompt": f"p{number}", "response": f"r{number}"} for number in range(2 * CHUNK_ROWS + 5)]
    path = write(tmp_path / name, rows)
    source = open_source([str(path)])
    sizes = [chunk.rows_in for chunk in source.chunks()]
    assert sizes == [CHUNK_ROWS, CHUNK_ROWS, 5]
    assert rows_of(source) == rows
    first = 2 if name == "a.csv" else 1
    lines = [line for chunk in source.chunks() for line in chunk.lines.tolist()]
    assert lines == list(range(first, first + len(rows))) if name != "a.json" else lines == [1] * len(rows)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json", "a.csv"])
def test_long_rows_make_chunks_of_few_rows(name, tmp_path):
    rows = [{"prompt": str(number), "response": "x" * 2_000_000} for number in range(6)]
    source = open_source([str(write(tmp_path / name, rows))])
    chunks = list(source.chunks())
    assert len(chunks) > 1
    assert max(chunk.rows.nbytes for chunk in chunks) < 25_000_000
    assert [row["prompt"] for row in rows_of(source)] == [str(number) for number in range(6)]


def test_skipped_chunks_leave_the_rest(tmp_path):
    rows = [{"prompt": f"p{number}", "response": "r"} for number in range(2 * CHUNK_ROWS + 5)]
    paths = [str(write(tmp_path / "a.parquet", rows)), str(write(tmp_path / "b.jsonl", rows))]
    source = open_source(paths)
    whole = list(source.chunks())
    rest = list(source.chunks(skip=2))
    assert [(chunk.file, chunk.rows_in) for chunk in rest] == [(chunk.file, chunk.rows_in) for chunk in whole[2:]]
    assert rest[0].rows.equals(whole[2].rows)
    assert not list(source.chunks(skip=100))


def test_the_bytes_read_rise_over_all_files(tmp_path):
    paths = [str(write(tmp_path / name)) for name in ("a.parquet", "b.jsonl.gz", "c.csv")]
    source = open_source(paths)
    read = [chunk.read_bytes for chunk in source.chunks()]
    assert read == sorted(read)
    assert read[-1] == source.total_bytes == sum(Path(path).stat().st_size for path in paths)


# ---------------------------------------------------------------- many files


def test_a_folder_gives_its_files_by_name_and_leaves_out_others(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    write(tmp_path / "b.jsonl", ROWS[:1])
    write(tmp_path / "a.parquet", ROWS[1:2])
    write(tmp_path / "sub" / "c.csv", ROWS[2:3])
    write(tmp_path / ".hidden" / "d.jsonl")
    (tmp_path / "README.md").write_text("no rows")
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / ".crc.jsonl").write_text("no rows")
    source = open_source([str(tmp_path)])
    assert [os.path.relpath(file, tmp_path) for file in source.files] == ["a.parquet", "b.jsonl", "sub/c.csv"]
    assert rows_of(source) == [ROWS[1], ROWS[0], ROWS[2]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
@pytest.mark.parametrize("change", ["truncated", "longer", "gone", "rewritten"])
def test_a_file_that_changes_while_it_is_read_is_refused(name, change, tmp_path):
    rows = [{"prompt": str(number), "response": "x" * 2_000_000} for number in range(12)]
    path = write(tmp_path / name, rows)
    chunks = open_source([str(path)]).chunks()
    next(chunks)
    if change == "truncated":
        os.truncate(path, path.read_bytes().rindex(b"\n", 0, -1) + 1)
    elif change == "longer":
        with path.open("ab") as file:
            file.write(b"\n")
    elif change == "gone":
        path.unlink()
    else:
        os.utime(path, ns=(1, 1))
    with pytest.raises(BadData, match="changed while it was read"):
        list(chunks)


def test_what_a_folder_has_besides_files_of_rows_is_named(tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "a.jsonl")
    (tmp_path / "data" / "README.md").write_text("no rows")
    (tmp_path / "data" / ".hidden").write_text("no rows")
    (tmp_path / "more").mkdir()
    write(tmp_path / "more" / "b.jsonl")
    (tmp_path / "data" / "more").symlink_to(tmp_path / "more")
    source = open_source([str(tmp_path / "data")])
    assert source.skipped == (
        f"{tmp_path}/data/README.md (unknown format)",
        f"{tmp_path}/data/more (a link to a folder)",
    )
    assert len(rows_of(source)) == len(ROWS)


def test_a_link_to_a_file_is_read(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").symlink_to(write(tmp_path / "b.jsonl"))
    assert rows_of(open_source([str(tmp_path / "data")])) == ROWS


def test_a_quoted_pattern_is_a_pattern(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.csv"):
        write(tmp_path / name)
    assert open_source([f"{tmp_path}/*.jsonl"]).files == (f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl")


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(tmp_path):
    assert open_source([str(write(tmp_path / "a[1].jsonl"))]).files == (f"{tmp_path}/a[1].jsonl",)


def test_the_fingerprint_follows_files_and_columns(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "response": "b", "answer": "c"}])
    first = open_source([str(path)]).fingerprint()
    assert open_source([str(path)]).fingerprint() == first
    assert open_source([str(path)], columns="prompt=prompt,response=answer").fingerprint() != first
    os.utime(path, ns=(1, 1))
    second = open_source([str(path)]).fingerprint()
    assert second != first
    path.write_text(path.read_text() + "\n")
    os.utime(path, ns=(1, 1))
    assert open_source([str(path)]).fingerprint() not in (first, second)


def test_the_fingerprint_does_not_depend_on_the_folder_one_is_in(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl")
    monkeypatch.chdir(tmp_path)
    assert open_source(["a.jsonl"]).fingerprint() == open_source([str(path)]).fingerprint()


# ---------------------------------------------------------------- the hub


def local_hub(monkeypatch, splits):
    datasets = pytest.importorskip("datasets")
    found = {
        name: datasets.load_dataset("json", data_files=str(path), split="train", streaming=True)
        for name, path in splits.items()
    }

    def load_dataset(name, split=None, streaming=False):
        assert name == "owner/name" and streaming
        if split is None:
            return datasets.IterableDatasetDict(found)
        if split not in found:
            raise ValueError(f"Bad split: {split}. Available splits: {list(found)}")
        return found[split]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def test_a_hub_name_streams_its_train_split(tmp_path, monkeypatch):
    local_hub(monkeypatch, {"train": write(tmp_path / "a.jsonl"), "test": write(tmp_path / "b.jsonl", ROWS[:1])})
    source = open_source(["owner/name"])
    assert rows_of(source) == ROWS
    assert source.total_bytes == 0
    assert [line for chunk in source.chunks() for line in chunk.lines.tolist()] == [1, 2, 3, 4]
    assert rows_of(open_source(["owner/name:test"])) == ROWS[:1]


def test_a_hub_name_without_a_train_split_must_say_which(tmp_path, monkeypatch):
    local_hub(monkeypatch, {"test": write(tmp_path / "a.jsonl"), "dev": write(tmp_path / "b.jsonl")})
    with pytest.raises(BadData, match="owner/name has the splits test, dev. Try: owner/name:test"):
        open_source(["owner/name"])


def test_a_hub_name_with_one_split_means_that(tmp_path, monkeypatch):
    local_hub(monkeypatch, {"test": write(tmp_path / "a.jsonl")})
    assert rows_of(open_source(["owner/name"])) == ROWS


def test_a_hub_name_that_cannot_be_loaded_is_one_message(tmp_path, monkeypatch):
    local_hub(monkeypatch, {"train": write(tmp_path / "a.jsonl")})
    with pytest.raises(BadData, match="owner/name:nope is not a file, and .* Bad split: nope"):
        open_source(["owner/name:nope"])


def test_the_hub_needs_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"pip install 'brimful\[hub\]'"):
        open_source(["owner/name"])


def test_a_folder_that_exists_is_no_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    write(tmp_path / "owner" / "name" / "a.jsonl")
    assert open_source(["owner/name"]).files == ("owner/name/a.jsonl",)


def test_importing_the_reader_does_not_import_torch():
    script = "import sys, brimful.data.read.source, brimful.data.check; assert not {'torch', 'datasets', 'tokenizers', 'duckdb'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
