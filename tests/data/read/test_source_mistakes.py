"""What cannot be read at all ends in one sentence that names the file."""

import os
import shutil
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brimful.data.read.source import open_source
from brimful.errors import BadData
from tests.data.read.test_source import ROWS, rows_of, write


def said(*paths):
    """The sentence that opening and reading these ends in."""
    with pytest.raises(BadData) as caught:
        rows_of(open_source([str(path) for path in paths]))
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_a_missing_file_tells_what_is_near(tmp_path):
    for name in ("train.jsonl", "valid.csv", ".hidden"):
        (tmp_path / name).touch()
    assert said(tmp_path / "trian.jsonl") == (
        f"{tmp_path}/trian.jsonl: there is no such file or folder; did you mean {tmp_path}/train.jsonl?"
    )
    assert said(tmp_path / "x.csv").endswith(f"no such file or folder; {tmp_path} has train.jsonl, valid.csv")
    assert said(tmp_path / "no" / "where" / "x.csv").endswith(f"; {tmp_path} has train.jsonl, valid.csv")
    assert said(tmp_path / "*.parquet").endswith(f"; {tmp_path} has train.jsonl, valid.csv")


def test_a_missing_file_in_a_folder_is_no_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert said("data/train").startswith("data/train: there is no such file or folder; ")
    assert "there is no such file" in said("nowhere/train.jsonl")


def test_an_empty_file_is_named(tmp_path):
    write(tmp_path / "a.jsonl")
    for name in ("b.jsonl", "b.parquet", "b.csv", "b.json"):
        (tmp_path / name).touch()
        assert (
            said(tmp_path / "a.jsonl", tmp_path / name)
            == f"{tmp_path / name} is empty (0 bytes); leave it out, or get it again"
        )


def test_a_file_without_rows_is_named(tmp_path):
    pq.write_table(
        pa.table({"prompt": pa.array([], pa.string()), "response": pa.array([], pa.string())}), tmp_path / "a.parquet"
    )
    (tmp_path / "a.jsonl").write_text("\n \n\n")
    (tmp_path / "a.json").write_text("\n \n\n")
    for name in ("a.parquet", "a.jsonl", "a.json"):
        assert said(tmp_path / name) == f"{tmp_path / name} has no rows; leave it out"


def test_a_folder_without_files_of_rows_tells_what_it_has(tmp_path):
    assert "no file of rows in this folder, it is empty; known are .parquet" in said(tmp_path)
    for name in ("a.txt", "b.md", "c.parquet.gz"):
        (tmp_path / name).touch()
    assert "no file of rows in this folder, it has a.txt, b.md, c.parquet.gz; known are" in said(tmp_path)


def test_an_unknown_format_tells_the_known_ones(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    assert said(tmp_path / "a.txt").startswith(f"{tmp_path}/a.txt: unknown format; known are .parquet, .pq, .jsonl")


def test_a_file_given_twice_is_not_counted_twice(tmp_path):
    path = write(tmp_path / "a.jsonl")
    assert said(path, tmp_path) == f"{path} is given twice; its rows would count twice: name it once"


def test_nothing_given_is_a_mistake():
    assert said() == "no files given; name files, folders or a data set on the hub"


@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_a_truncated_parquet_file_is_one_sentence(keep, tmp_path):
    path = write(tmp_path / "a.parquet", ROWS * 1000)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    assert said(path).startswith(f"{path}: no whole parquet file (")


def test_a_parquet_file_damaged_inside_is_one_sentence(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.Table.from_pylist(ROWS * 10_000), path, row_group_size=5_000, compression="zstd", use_dictionary=False
    )
    raw = bytearray(path.read_bytes())
    at = pq.ParquetFile(path).metadata.row_group(7).column(0).data_page_offset
    raw[at : at + 40] = bytes(40)
    path.write_bytes(raw)
    sentence = said(path)
    assert sentence.startswith(f"{path}, row ") and " or later: no whole parquet file (" in sentence


def test_two_columns_of_one_name_are_one_sentence(tmp_path):
    column = pa.array(["a"])
    pq.write_table(pa.table([column, column, column], names=["prompt", "response", "prompt"]), tmp_path / "a.parquet")
    assert said(tmp_path / "a.parquet") == f"{tmp_path}/a.parquet has 'prompt' twice; rename one of these columns"


def test_text_under_the_name_of_parquet_is_one_sentence(tmp_path):
    (tmp_path / "a.parquet").write_text('{"prompt": "a"}\n' * 100)
    assert said(tmp_path / "a.parquet").startswith(f"{tmp_path}/a.parquet: no whole parquet file (")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("hello\n", "a.json: no JSON, it starts with 'h'; a list of objects starts with ["),
        (
            '{\n"data": [{"prompt": "a"}]\n}',
            "a.json: one object over many lines; rows come as a list of objects or as one object a line",
        ),
    ],
)
def test_json_that_is_no_list_is_one_sentence(text, sentence, tmp_path):
    (tmp_path / "a.json").write_text(text)
    assert said(tmp_path / "a.json") == f"{tmp_path}/{sentence}"


def test_jsonl_without_one_readable_row_tells_its_first_line(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n{broken\n[]\n")
    assert said(tmp_path / "a.jsonl").startswith(f"{tmp_path}/a.jsonl, line 2: not JSON: Expecting property name")


@pytest.fixture
def public_folder():
    """A folder that another user can enter: pytest's own cannot be."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "sub"])
def test_what_may_not_be_read_is_one_sentence(name, public_folder):
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
            said(public_folder) == f"{public_folder / name}: Permission denied; it must be readable for who runs this"
        )
    finally:
        if am_root:
            os.seteuid(0)
        (public_folder / name).chmod(0o755)


def test_the_output_folder_of_clean_is_not_taken_for_one_set_of_rows(tmp_path):
    for name in ("train.parquet", "valid.parquet", "clean.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(
        BadData, match=r"its splits are apart on purpose: name the file you mean, such as .*train\.parquet$"
    ):
        open_source([str(tmp_path)])
