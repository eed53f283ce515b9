"""Files of rows for tests, in every format."""

import bz2
import csv
import gzip
import io
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brimful.data.read.source import open_source
from brimful.errors import BadData

ROWS = [
    {"prompt": "鱼油哪种好？", "response": "看纯度，\n也看价格。"},
    {"prompt": 'say "hi", {x}', "response": '[hi]\\ "ok", 👋'},
    {"prompt": "", "response": " "},
    {"prompt": "2020-01-01", "response": "3.5"},
]

PACK = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda raw: pa.compress(raw, "zstd", asbytes=True),
    ".xz": lzma.compress,
}


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
    path.write_bytes(PACK.get(path.suffix, bytes)(data))
    return path


def _jsonl(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _csv(rows, delimiter=","):
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def problems_of(source):
    """Line and message of every broken row."""
    return [(problem.line, problem.message) for problem in broken_of(source)]


def error_of(*paths):
    """The message that opening and reading these ends in."""
    with pytest.raises(BadData) as caught:
        rows_of(open_source([str(path) for path in paths]))
    message = str(caught.value)
    assert "\n" not in message
    return message
