"""csv, tsv and parquet: what is broken comes out with its line, and everything else is read."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brimful.data.read.files import RowProblem
from brimful.data.read.source import open_source
from brimful.errors import BadData
from brimful.units import MiB
from tests.data.read.row_files import ROWS, broken_of, error_of, problems_of, rows_of, write

# ---------------------------------------------------------------- csv


def write_csv(tmp_path, text, name="a.csv"):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return open_source([str(tmp_path / name)])


def test_a_row_with_too_many_or_too_few_fields_is_broken(tmp_path):
    source = write_csv(tmp_path, "prompt,response\na,b\na\na,b,c\n\n一,二\n")
    assert [row["prompt"] for row in rows_of(source)] == ["a", "一"]
    assert problems_of(source) == [(3, "1 fields, the header has 2"), (4, "3 fields, the header has 2")]


def test_lines_inside_quotes_count(tmp_path):
    source = write_csv(tmp_path, 'prompt,response\r\n"a\r\n\r\nb",c\r\nd\r\n"e, ""f""",g\r\n')
    assert [row["prompt"] for row in rows_of(source)] == ["a\r\n\r\nb", 'e, "f"']
    assert [broken.line for broken in broken_of(source)] == [5]
    assert [line for chunk in source.chunks() for line in chunk.lines.tolist()] == [2, 6]


def test_text_behind_a_closing_quote_breaks_its_row_only(tmp_path):
    source = write_csv(tmp_path, 'prompt,response\n"a"b,c\nd,e\n')
    assert problems_of(source) == [(2, "not CSV: ',' expected after '\"'")]
    assert rows_of(source) == [{"prompt": "d", "response": "e"}]


def test_a_quote_that_never_closes_does_not_swallow_the_file(tmp_path):
    source = write_csv(tmp_path, 'prompt,response\na,b\na,"b\n' + "c,d\n" * 100)
    with pytest.raises(BadData, match="a.csv, line 3: a quote opens in this row and never closes"):
        rows_of(source)


def test_a_csv_row_too_long_for_the_memory_limit_is_no_row(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('prompt,response\na,b\n"' + "x\n" * 2**18 + '","' + "x\n" * 2**18 + '"\n')
    with pytest.raises(BadData, match="a.csv, line 3: the row that starts here is longer than 1 MiB"):
        rows_of(open_source([str(path)], host_limit_bytes=32 * MiB))


@pytest.mark.parametrize(("rows", "place"), [(1, "row 1 or later"), (100, "line 100")])
def test_a_parquet_row_too_long_for_the_memory_limit_is_no_row(rows, place, tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [*(str(n) for n in range(1, rows)), "x" * 2**21]}), path)
    with pytest.raises(BadData, match=f"a.parquet, {place} is longer than 1 MiB"):
        rows_of(open_source([str(path)], host_limit_bytes=32 * MiB))


def test_a_text_that_a_parquet_file_repeats_is_decoded_in_chunks(tmp_path):
    """3,000 rows of one text of 1 MiB, a file of 49 kB, took 4 GiB."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), pa.array(["x" * 2**20]))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts}), path, dictionary_pagesize_limit=2**30, store_schema=False)
    before, rows = pa.total_allocated_bytes(), 0
    for chunk in open_source([str(path)]).chunks():
        assert pa.total_allocated_bytes() - before < 32 * MiB
        rows += chunk.rows.num_rows
    assert rows == 300


def test_invalid_utf8_in_a_csv_breaks_its_row_only(tmp_path):
    source = write_csv(tmp_path, b"prompt,response,x\na,b,c\na,b,\xff\nd,e,f\n")
    assert problems_of(source) == [(3, "not UTF-8")]
    assert len(rows_of(source)) == 2


def test_a_field_longer_than_pythons_limit_is_read(tmp_path):
    source = write_csv(tmp_path, "prompt,response\na," + "x" * 1_000_000 + "\n")
    assert len(rows_of(source)[0]["response"]) == 1_000_000


def test_unicode_line_separators_end_no_row(tmp_path):
    source = write_csv(tmp_path, "\ufeffprompt,response\na\u2028b,c\x0cd\x85\n")
    assert rows_of(source) == [{"prompt": "a\u2028b", "response": "c\x0cd\x85"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,response\n", "a.csv has a header but no rows"),
        ("\n\n", "a.csv, line 1: no rows"),
        ("prompt,response,prompt\na,b,c\n", "a.csv, line 1: the header has 'prompt' twice"),
        (
            "问题,回答\n一,二\n".encode("gbk"),
            "a.csv, line 1: the header is not UTF-8. Try: `iconv",
        ),
        ("prompt;response\na;b\n", "a.csv: no columns look like .* only prompt;response"),
    ],
)
def test_a_csv_without_a_usable_header_is_one_message(text, message, tmp_path):
    with pytest.raises(BadData, match=message):
        write_csv(tmp_path, text)


def test_a_csv_may_be_compressed(tmp_path):
    assert rows_of(open_source([str(write(tmp_path / "a.tsv.gz"))])) == ROWS


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
        RowProblem(str(tmp_path / "a.parquet"), 2, "'prompt' is not UTF-8"),
        RowProblem(str(tmp_path / "a.parquet"), 4, "'prompt' is not UTF-8"),
    ]


def test_small_row_groups_do_not_make_small_chunks(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS * 100), tmp_path / "a.parquet", row_group_size=7)
    assert [chunk.rows_in for chunk in open_source([str(tmp_path / "a.parquet")]).chunks()] == [400]


def test_a_broken_row_in_parquet_stays_in_its_stretch(tmp_path):
    bad = pa.array([b"x" * 9_000_000, b"\xff", b"y" * 9_000_000, *[b"z"] * 1000, b"\xff"])
    pq.write_table(pa.table({"prompt": bad, "response": bad}), tmp_path / "a.parquet")
    chunks = list(open_source([str(tmp_path / "a.parquet")]).chunks())
    assert sum(chunk.rows_in for chunk in chunks) == 1004
    assert [line for chunk in chunks for line in chunk.lines.tolist()] == [1, *range(3, 1004)]
    assert [broken.line for broken in chunks[0].broken] == [2]
    assert chunks[0].lines[-1] < 100
    assert [broken.line for chunk in chunks[1:] for broken in chunk.broken] == [1004]


@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_a_truncated_parquet_file_is_one_message(keep, tmp_path):
    path = write(tmp_path / "a.parquet", ROWS * 1000)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    assert error_of(path).startswith(f"{path}: not a complete parquet file (")


def test_a_parquet_file_damaged_inside_is_one_message(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.Table.from_pylist(ROWS * 10_000), path, row_group_size=5_000, compression="zstd", use_dictionary=False
    )
    raw = bytearray(path.read_bytes())
    at = pq.ParquetFile(path).metadata.row_group(7).column(0).data_page_offset
    raw[at : at + 40] = bytes(40)
    path.write_bytes(raw)
    message = error_of(path)
    assert message.startswith(f"{path}, row ") and " or later: not a complete parquet file (" in message


def test_two_columns_of_one_name_are_one_sentence(tmp_path):
    column = pa.array(["a"])
    pq.write_table(pa.table([column, column, column], names=["prompt", "response", "prompt"]), tmp_path / "a.parquet")
    assert (
        error_of(tmp_path / "a.parquet") == f"{tmp_path}/a.parquet has 'prompt' twice. Try: rename one of the columns."
    )


def test_text_under_the_name_of_parquet_is_one_message(tmp_path):
    (tmp_path / "a.parquet").write_text('{"prompt": "a"}\n' * 100)
    assert error_of(tmp_path / "a.parquet").startswith(f"{tmp_path}/a.parquet: not a complete parquet file (")


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


# ---------------------------------------------------------------- headers that once took quadratic time


def test_a_header_of_hundreds_of_thousands_of_names_is_read(tmp_path):
    """50 MB of them took more than 150 s when each name was counted alone."""
    names = ["prompt", "response", *map(str, range(300_000))]
    path = tmp_path / "a.csv"
    path.write_text(",".join(names) + "\n" + ",".join(["x"] * len(names)) + "\n")
    assert rows_of(open_source([str(path)])) == [{"prompt": "x", "response": "x"}]


def test_of_many_repeated_names_in_a_header_the_first_are_told(tmp_path):
    names = [f"c{number}" for number in range(100_000)]
    path = tmp_path / "a.csv"
    path.write_text(",".join([*names, *names]) + "\n")
    assert error_of(path) == (
        f"{path}, line 1: the header has 'c0', 'c1', 'c10', 'c100', 'c1000' … twice. Try: rename one of the columns."
    )
