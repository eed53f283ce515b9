"""jsonl and json: what is broken comes out with its line, and everything else is read."""

import gzip
import json
import random
import tracemalloc

import numpy as np
import pytest

from brimful.data.read import files as read_files
from brimful.data.read import json_rows
from brimful.data.read.files import TEXT, Column, messages_type
from brimful.data.read.source import open_source
from brimful.errors import BadData
from brimful.units import MiB
from tests.data.read.row_files import ROWS, broken_of, error_of, problems_of, rows_of

GOOD = b'{"prompt":"a","response":"b"}'


def jsonl(tmp_path, *lines, end=b"\n"):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines) + end)
    return open_source([str(path)])


# ---------------------------------------------------------------- jsonl


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"prompt":"a","response":"b"', "not JSON: Expecting ',' delimiter at character 29"),
        (b"{'prompt':'a'}", "not JSON: Expecting property name enclosed in double quotes at character 2"),
        (b'{"prompt":"\xff","response":"b"}', "not UTF-8"),
        (b'{"prompt":"a","response":"b","x":"\xff"}', "not UTF-8"),
        (b'{"prompt":"a"}', "no field 'response'"),
        (b'{"prompt":"a","response":1}', "'response' is a number, not text"),
        (b'{"prompt":"a","response":true}', "'response' is true or false, not text"),
        (b'{"prompt":"a","response":["b"]}', "'response' is a list, not text"),
        (b'{"prompt":"a","response":{}}', "'response' is an object, not text"),
        (b'{"prompt":"a","response":NaN}', "'response' is a number, not text"),
        (b'{"prompt":"a","response":"\\ud83d"}', "'response' has half of a surrogate pair"),
        (b'{"prompt":"a","prompt":"b","response":"c"}', "the field 'prompt' twice"),
        (b'{"prompt":"a\tb","response":"c"}', "not JSON: Invalid control character at character 13"),
        (b'["a","b"]', "a list, not an object"),
        (b"17", "a number, not an object"),
        (b"null", "null, not an object"),
        (b'"text"', "text, not an object"),
        (b"\x00\x00\x00", "not JSON: Expecting value at character 1"),
        (GOOD + GOOD, "not JSON: Extra data at character 30"),
        (b'{"prompt":"a","response":"b","x":Inf}', "not JSON: Expecting value at character 34"),
        (b'{"x":' + b"[" * 5000, "not JSON: nested too deep"),
    ],
)
def test_a_broken_line_is_told_and_the_others_are_read(line, why, tmp_path):
    source = jsonl(tmp_path, GOOD, line, GOOD)
    assert problems_of(source) == [(2, why)]
    assert len(rows_of(source)) == 2
    assert [number for chunk in source.chunks() for number in chunk.lines.tolist()] == [1, 3]


@pytest.mark.parametrize(
    "line",
    [
        GOOD + b"\r",
        b"  " + GOOD + b"  ",
        b'{"prompt":"a","response":"b","x":NaN,"y":-Infinity}',
        b'{"prompt":"a","response":"b","x":' + b"1" * 5000 + b"}",
        b'{"prompt":"a","response":"b","x":1,"x":2}',
        b'{"prompt":"a","response":"b","x":"\\ud83d"}',
        b'{"\\u0070rompt":"\\u0061","response":"b"}',
    ],
)
def test_an_odd_line_is_read_alone_and_beside_a_broken_one(line, tmp_path):
    for lines in ([line], [line, b"broken"]):
        source = jsonl(tmp_path, *lines)
        assert rows_of(source) == [{"prompt": "a", "response": "b"}]
        assert [line for line, _ in problems_of(source)] == list(range(2, len(lines) + 1))


def test_as_many_objects_as_lines_are_not_yet_one_object_a_line(tmp_path):
    source = jsonl(tmp_path, GOOD, GOOD + GOOD, b'{"prompt":"a","response":"b","x":', b"{}}")
    assert [line for line, _ in problems_of(source)] == [2, 3, 4]
    assert len(rows_of(source)) == 1


def test_null_is_empty_and_a_missing_field_is_broken(tmp_path):
    source = jsonl(tmp_path, b'{"prompt":null,"response":"b"}', b'{"response":"b"}', b'{"prompt":"","response":null}')
    assert rows_of(source) == [{"prompt": "", "response": "b"}, {"prompt": "", "response": ""}]
    assert problems_of(source) == [(2, "no field 'prompt'")]


def test_blank_lines_are_no_rows_and_count_as_lines(tmp_path):
    for bad in (b"", b"\xff"):
        source = jsonl(tmp_path, b"", GOOD, b"", b"  ", b"\r", GOOD, bad, b"")
        assert [number for chunk in source.chunks() for number in chunk.lines.tolist()] == [2, 6]
        assert problems_of(source) == ([(7, "not UTF-8")] if bad else [])


def test_a_byte_order_mark_and_a_last_line_without_a_break_do_no_harm(tmp_path):
    assert len(rows_of(jsonl(tmp_path, b"\xef\xbb\xbf" + GOOD, GOOD, end=b""))) == 2


def test_a_line_of_twenty_megabytes_is_one_row(tmp_path):
    source = jsonl(tmp_path, GOOD, b'{"prompt":"a","response":"' + b"x" * 20_000_000 + b'"}', GOOD)
    assert [len(row["response"]) for row in rows_of(source)] == [1, 20_000_000, 1]


@pytest.mark.parametrize("chunk_bytes", [2**16, 2**23])
def test_a_line_too_long_for_the_memory_limit_is_no_row(chunk_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(read_files, "CHUNK_BYTES", chunk_bytes)
    path = tmp_path / "a.jsonl"
    path.write_bytes((GOOD + b"\n") * 100_000 + b'{"prompt":"' + b"x" * 2**20)
    message = r"a.jsonl, line 100001 is longer than 1 MiB, the most for host_limit='32MiB'. Try: one row per line"
    with pytest.raises(BadData, match=message):
        rows_of(open_source([str(path)], host_limit_bytes=32 * MiB))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (b"[" * 2**21, r"line 2: the item that starts here, nested [\d,]+ levels deep, is longer than 1 MiB"),
        (b'{"prompt":"' + b"x" * 2**21, "line 2: the item that starts here is longer than 1 MiB"),
        (b'{"prompt":"' + b"x" * 2**20 + b'"}', "line 2: the item that starts here is longer than 1 MiB"),
    ],
)
def test_an_item_too_deep_or_too_long_for_the_memory_limit_is_no_row(item, message, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"[" + GOOD + b",\n" + item + b",\n" + GOOD + b"]")
    with pytest.raises(BadData, match=message):
        rows_of(open_source([str(path)], host_limit_bytes=32 * MiB))


def test_an_item_of_brackets_takes_no_more_memory_than_the_limit(tmp_path):
    """A file of 1.4 MB, compressed, took 7.6 GB."""
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(b"[" * 2**26))
    tracemalloc.start()
    try:
        assert "levels deep" in error_of(path)
        assert tracemalloc.get_traced_memory()[1] < 256 * MiB
    finally:
        tracemalloc.stop()


def test_a_broken_line_in_a_later_chunk_has_its_number(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write((GOOD + b"\n") * 100_000)
        file.write(b"{broken\n" + GOOD + b"\n")
    source = open_source([str(path)])
    rows, broken = 0, []
    for chunk in source.chunks():
        rows += chunk.rows.num_rows
        broken += chunk.broken
    assert rows == 100_001
    assert [str(one) for one in broken] == [
        f"{path}, line 100001: not JSON: Expecting property name enclosed in double quotes at character 2"
    ]


def test_columns_are_found_behind_broken_first_lines(tmp_path):
    assert problems_of(jsonl(tmp_path, b"broken", b"[]", GOOD)) == [
        (1, "not JSON: Expecting value at character 1"),
        (2, "a list, not an object"),
    ]


def test_arrow_and_python_read_the_same(tmp_path):
    """Objects of odd parts in odd lines: where Arrow's reading counts, it is Python's."""
    rng = random.Random(0)
    fields = (Column("a", TEXT), Column("b", TEXT, False), Column("c", messages_type("from", "value")))
    values = [
        '"x"',
        "null",
        "1",
        "[]",
        '"\\ud800"',
        "NaN",
        "Inf",
        '[{"from":"h","value":"v"}]',
        '[{"from":"h"}]',
        "[null]",
        '"',
    ]
    usual = {"a": '"t"', "b": '"t"', "c": '[{"from":"h","value":"v"}]'}
    by_arrow = 0
    for _ in range(600):
        lines = []
        for _ in range(rng.randint(1, 3)):
            keys = rng.choice([["a", "b", "c"], ["a", "c"], ["a", "b", "c", "d"], ["c", "a", "a"]])
            parts = [
                f'"{key}":{usual[key] if key in usual and rng.random() < 0.85 else rng.choice(values)}' for key in keys
            ]
            form = rng.choice(["{%s}"] * 8 + [" {%s}", "{%s}\r", "{\n%s}", "{%s", "{%s}{}", "%s"])
            lines.append(form % ",".join(parts))
        data = "\n".join(lines).encode()
        ends = np.flatnonzero(np.frombuffer(data + b"\n", dtype=np.uint8) == ord("\n"))
        block = json_rows.Block(file="f", data=data, ends=ends, lines=np.arange(1, len(ends) + 1))
        fast, exact = json_rows._by_arrow(block, fields), json_rows._by_python(block, fields)
        if fast is not None:
            by_arrow += 1
            assert (fast[0].to_pylist(), fast[1].tolist(), fast[2]) == (
                exact[0].to_pylist(),
                exact[1].tolist(),
                exact[2],
            )
    assert by_arrow > 80


def test_plain_lines_are_read_by_arrow(tmp_path, monkeypatch):
    monkeypatch.setattr(json_rows, "_by_python", None)
    source = jsonl(tmp_path, GOOD, b"", GOOD + b"\r", b'{"prompt":null,"response":"b","x":NaN}')
    assert len(rows_of(source)) == 3


# ---------------------------------------------------------------- json


def write_json(tmp_path, text, name="a.json"):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return open_source([str(tmp_path / name)])


@pytest.mark.parametrize("chunk_bytes", [1, 3, 10, 64, 1000])
@pytest.mark.parametrize("indent", [None, 0, 2])
def test_a_list_is_read_in_pieces_of_any_size(chunk_bytes, indent, tmp_path, monkeypatch):
    rows = [*ROWS, {"prompt": 'a\\" ] , {', "response": "x\\", "y": [{"z": ["]", "}"]}, []]}] * 3
    source = write_json(tmp_path, json.dumps(rows, ensure_ascii=False, indent=indent))
    monkeypatch.setattr(json_rows, "CHUNK_BYTES", chunk_bytes)
    assert rows_of(source) == [{"prompt": row["prompt"], "response": row["response"]} for row in rows]
    assert not broken_of(source)


def test_rows_of_a_list_have_the_line_on_which_they_start(tmp_path):
    text = '\n\n[\n{"prompt": "a",\n"response": "b"}, {"prompt": "a", "response": "b"}\n,\n\n{"prompt": "a", "response": "b"}\n]\n'
    (chunk,) = write_json(tmp_path, text).chunks()
    assert chunk.lines.tolist() == [4, 5, 8]


@pytest.mark.parametrize(
    ("item", "why"),
    [
        ('{"prompt": "a",}', "not JSON: Expecting property name enclosed in double quotes at character 16"),
        ('{"prompt": "a\nb", "response": "b"}', "not JSON: Invalid control character at character 14"),
        ("", "not JSON: Expecting value at character 1"),
        ("17", "a number, not an object"),
        ('[{"prompt": "a", "response": "b"}]', "a list, not an object"),
        ('{"prompt": "a", "response": "b"} {"prompt": "a", "response": "b"}', "not JSON: Extra data at character 34"),
    ],
)
def test_what_is_no_object_in_a_list_is_one_broken_row(item, why, tmp_path):
    good = '{"prompt": "a", "response": "b"}'
    source = write_json(tmp_path, f"[\n{good},\n{item},\n{good}]")
    assert len(rows_of(source)) == 2
    assert problems_of(source) == [(3, why)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[{"prompt": "a", "response": "b"},\n{"prompt": "a", "resp',
            "a.json, line 2: the item that starts here never ends",
        ),
        ('[{"prompt": "a", "response": "b"}', "a.json, line 1: the item that starts here never ends"),
        (
            '[{"prompt": "a", "response": "b"},\n{"prompt": "a, "response": "b"},\n' + '{"prompt": "a"},' * 9 + "]",
            "a.json, line 2: the item that starts here never ends",
        ),
        ('[{"prompt": "a", "response": "b"}]\n[{"x": 1}]', "a.json, line 1: the list ends here but the file goes on"),
        ('[{"prompt": "a", "response": "b"}},\n{"x": 1}]', "a.json, line 1: one closing brace too many"),
    ],
)
def test_a_list_that_does_not_end_where_it_should_is_one_message(text, message, tmp_path):
    with pytest.raises(BadData, match=message):
        rows_of(write_json(tmp_path, text))


def test_jsonl_under_the_name_of_json_is_read_as_jsonl(tmp_path):
    source = write_json(tmp_path, b"\xef\xbb\xbf\n" + GOOD + b"\nbroken\n" + GOOD)
    assert len(rows_of(source)) == 2
    assert [line for line, _ in problems_of(source)] == [3]


@pytest.mark.parametrize("text", ["[]", "[ \n ]", "[" + " " * 50 + "]"])
def test_an_empty_list_has_no_rows(text, tmp_path):
    with pytest.raises(BadData, match="a.json has no rows"):
        write_json(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\n", "a.json is not JSON: it starts with 'h'. "),
        (
            '{\n"data": [{"prompt": "a"}]\n}',
            "a.json is one object over many lines. ",
        ),
    ],
)
def test_json_that_is_no_list_is_one_message(text, message, tmp_path):
    (tmp_path / "a.json").write_text(text)
    assert error_of(tmp_path / "a.json").startswith(f"{tmp_path}/{message}")


def test_jsonl_without_one_readable_row_names_its_first_line(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n{broken\n[]\n")
    assert error_of(tmp_path / "a.jsonl").startswith(f"{tmp_path}/a.jsonl, line 2: not JSON: Expecting property name")


# ---------------------------------------------------------------- rows that once took quadratic time


@pytest.mark.parametrize("count", [2_000_000, 2_000_002])
def test_millions_of_backslashes_escape_each_other(count, tmp_path):
    """Took 80 s when each quote walked back over all of them."""
    path = tmp_path / "a.json"
    path.write_text('[{"prompt":"a","response":"' + "\\" * count + '"},\n{"prompt":"a","response":"\\"b\\\\\\""}]')
    assert [row["response"] for row in rows_of(open_source([str(path)]))] == ["\\" * (count // 2), '"b\\"']


def test_a_quote_behind_an_odd_number_of_backslashes_ends_no_text(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"prompt":"a","response":"' + "\\" * 2_000_001 + '"},\n{"prompt":"a","response":"b"}]')
    assert "never ends" in error_of(path)


def test_hundreds_of_thousands_of_repeated_keys_are_one_row(tmp_path):
    """600 kB of them took 7 s when each name was counted alone."""
    line = b'{"prompt":"a","response":"b"' + b"".join(b',"%d":1,"%d":2' % (n, n) for n in range(200_000)) + b"}"
    assert rows_of(jsonl(tmp_path, line)) == [{"prompt": "a", "response": "b"}]
