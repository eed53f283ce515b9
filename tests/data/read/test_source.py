"""Every format gives the same rows under the same names, in chunks that do not depend on the format's blocks."""

import bz2
import csv
import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brimful.data.read.files import CHUNK_ROWS, Broken
from brimful.data.read.source import open_source
from brimful.errors import BadData, MissingExtra

ROWS = [
    {"prompt": "鱼油哪种好？", "response": "看纯度，\n也看价格。"},
    {"prompt": 'say "hi", {x}', "response": '[hi]\\ "ok", 👋'},
    {"prompt": "", "response": " "},
    {"prompt": "2020-01-01", "response": "3.5"},
]


def rows_of(source):
    return [row for chunk in source.chunks() for row in chunk.rows.to_pylist()]


def broken_of(source):
    return [broken for chunk in source.chunks() for broken in chunk.broken]


def write(path, rows=ROWS):
    """These rows in the format of the file's name."""
    text = {".jsonl": _jsonl, ".ndjson": _jsonl, ".json": json.dumps, ".csv": _csv, ".tsv": _csv}
    ending = next((one for one in path.suffixes if one in text), None)
    if ending is None:
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    data = (
        _csv(rows, "\t" if ending == ".tsv" else ",") if ending in (".csv", ".tsv") else text[ending](rows)
    ).encode()
    packed = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": lambda raw: pa.compress(raw, "zstd", asbytes=True)}
    path.write_bytes(packed.get(path.suffix, bytes)(data))
    return path


def _jsonl(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _csv(rows, delimiter=","):
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


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
    rows = [{"prompt": str(number), "response": "x" * 2_000_000} for number in range(15)]
    source = open_source([str(write(tmp_path / name, rows))])
    chunks = list(source.chunks())
    assert len(chunks) > 1
    assert max(chunk.rows.nbytes for chunk in chunks) < 25_000_000
    assert [row["prompt"] for row in rows_of(source)] == [str(number) for number in range(15)]


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


def test_a_broken_row_in_parquet_stays_in_its_stretch(tmp_path):
    bad = pa.array([b"x" * 9_000_000, b"\xff", b"y" * 9_000_000, *[b"z"] * 1000, b"\xff"])
    pq.write_table(pa.table({"prompt": bad, "response": bad}), tmp_path / "a.parquet")
    chunks = list(open_source([str(tmp_path / "a.parquet")]).chunks())
    assert sum(chunk.rows_in for chunk in chunks) == 1004
    assert [line for chunk in chunks for line in chunk.lines.tolist()] == [1, *range(3, 1004)]
    assert [broken.line for broken in chunks[0].broken] == [2]
    assert chunks[0].lines[-1] < 100
    assert [broken.line for chunk in chunks[1:] for broken in chunk.broken] == [1004]


# ---------------------------------------------------------------- parquet


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
def test_text_of_any_arrow_type_is_text(kind, tmp_path):
    column = pa.array(["一", None, "c"]).cast(kind)
    pq.write_table(pa.table({"prompt": column, "response": column}), tmp_path / "a.parquet")
    assert [row["prompt"] for row in rows_of(open_source([str(tmp_path / "a.parquet")]))] == ["一", "", "c"]


def test_a_column_of_nulls_is_empty_text(tmp_path):
    pq.write_table(pa.table({"prompt": pa.nulls(2), "response": ["a", "b"]}), tmp_path / "a.parquet")
    assert rows_of(open_source([str(tmp_path / "a.parquet")]))[0] == {"prompt": "", "response": "a"}


@pytest.mark.parametrize("kind", [pa.string(), pa.binary()], ids=str)
def test_invalid_utf8_in_parquet_breaks_only_its_row(kind, tmp_path):
    raw = pa.array([b"good", b"\xff\xfe", b"fine", "一".encode()[:2]])
    column = pa.Array.from_buffers(kind, 4, raw.buffers())
    pq.write_table(pa.table({"prompt": column, "response": ["a", "b", "c", "d"]}), tmp_path / "a.parquet")
    source = open_source([str(tmp_path / "a.parquet")])
    assert [row["response"] for row in rows_of(source)] == ["a", "c"]
    assert broken_of(source) == [
        Broken(str(tmp_path / "a.parquet"), 2, "'prompt' is not UTF-8"),
        Broken(str(tmp_path / "a.parquet"), 4, "'prompt' is not UTF-8"),
    ]


def test_small_row_groups_do_not_make_small_chunks(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS * 100), tmp_path / "a.parquet", row_group_size=7)
    assert [chunk.rows_in for chunk in open_source([str(tmp_path / "a.parquet")]).chunks()] == [400]


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
    with pytest.raises(BadData, match="owner/name has the splits test, dev; say which, such as owner/name:test"):
        open_source(["owner/name"])


def test_a_hub_name_with_one_split_means_that(tmp_path, monkeypatch):
    local_hub(monkeypatch, {"test": write(tmp_path / "a.jsonl")})
    assert rows_of(open_source(["owner/name"])) == ROWS


def test_a_hub_name_that_cannot_be_loaded_is_one_sentence(tmp_path, monkeypatch):
    local_hub(monkeypatch, {"train": write(tmp_path / "a.jsonl")})
    with pytest.raises(BadData, match="owner/name:nope: there is no such file or folder, and .* Bad split: nope"):
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


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(("text", "count"), [("问题" * 8, 1_000_000), ("问题" * 8_000, 1_500)])
def test_a_row_group_is_not_held(text, count, tmp_path):
    """Short rows or long ones, 48 or 72 MB a column: what is held at any time is a chunk or two."""
    pool = pa.default_memory_pool()
    rows = pa.array([text]).take(pa.array([0] * count))
    table = pa.table({"prompt": rows, "response": rows})
    pq.write_table(
        table,
        tmp_path / "a.parquet",
        row_group_size=count,
        use_dictionary=False,
        compression="none",
        write_batch_size=16,
    )
    del rows, table
    before, most = pool.bytes_allocated(), 0
    for chunk in open_source([str(tmp_path / "a.parquet")]).chunks():
        most = max(most, pool.bytes_allocated() - before)
        del chunk
    assert most < 40_000_000


def test_importing_the_reader_does_not_import_torch():
    script = "import sys, brimful.data.read.source, brimful.data.check; assert not {'torch', 'datasets', 'tokenizers', 'duckdb'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
