"""Plain text: a file is one document, a large one comes in parts."""

import pytest

from brimful.data.read import plain_text
from brimful.data.read.source import open_source
from brimful.errors import BadData
from tests.data.read.row_files import PACK, broken_of, rows_of, write


def texts(path):
    return [row["text"] for row in rows_of(open_source([str(path)]))]


def test_a_file_is_one_document_with_its_blank_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeff第一行\r\n\r\n第二段\n".encode())
    assert texts(tmp_path / "a.txt") == ["第一行\n\n第二段\n"]


@pytest.mark.parametrize("ending", PACK)
def test_a_compressed_file_is_read(tmp_path, ending):
    (tmp_path / f"a.txt{ending}").write_bytes(PACK[ending](b"one\ntwo\n"))
    assert texts(tmp_path / f"a.txt{ending}") == ["one\ntwo\n"]


def test_a_large_file_comes_in_parts_that_end_with_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(plain_text, "PART_BYTES", 20)
    lines = [f"line {number}\n" for number in range(9)]
    (tmp_path / "a.txt").write_text("".join(lines))
    parts = texts(tmp_path / "a.txt")
    assert parts == ["".join(lines[first : first + 2]) for first in range(0, 9, 2)]
    assert [int(chunk.lines[0]) for chunk in open_source([str(tmp_path / "a.txt")]).chunks()] == [1, 3, 5, 7, 9]


@pytest.mark.parametrize("size", range(5, 12))
def test_a_line_longer_than_a_part_is_divided_between_characters(tmp_path, monkeypatch, size):
    monkeypatch.setattr(plain_text, "PART_BYTES", size)
    text = "aé汉𠀀" * 5
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    parts = texts(tmp_path / "a.txt")
    assert "".join(parts) == text
    assert len(parts) > 1


def test_bytes_that_are_no_text_are_a_broken_row_with_their_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n\xff\xfe three\n")
    (problem,) = broken_of(open_source([str(tmp_path / "a.txt")]))
    assert str(problem) == f"{tmp_path}/a.txt, line 3: not UTF-8"


def test_a_folder_of_texts_is_read(tmp_path):
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    assert texts(tmp_path) == ["one", "two"]


def test_texts_beside_files_of_rows_are_notes_and_named(tmp_path):
    write(tmp_path / "rows.jsonl")
    (tmp_path / "LICENSE.txt").write_text("as you like")
    source = open_source([str(tmp_path)])
    assert source.files == (f"{tmp_path}/rows.jsonl",)
    assert source.skipped == (f"{tmp_path}/LICENSE.txt (a text beside other formats)",)


def test_a_text_has_no_prompts(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(BadData, match="has no column chosen and rejected, only text"):
        open_source([str(tmp_path / "a.txt")], preferences=True)
