"""The reader for plain text (.txt): a file is one document, the column `text`.

Lines and paragraphs of a document belong together, so a file is not divided at them. One of several MB is read in parts of
`PART_BYTES` that end with a line; each part is a row, and ends with eos once it is tokenized: one in about 250,000 tokens.
Line breaks of Windows become `\\n`.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from brimful.data.read.files import TEXT, ByteStream, Chunk, Column, FileSchema, RowProblem, record_batch

PART_BYTES = 2**20
COLUMN = "text"


def text_schema(path: str, max_row_bytes: int) -> FileSchema:
    return FileSchema({COLUMN: TEXT}, (COLUMN,))


def read_text(path: str, columns: tuple[Column, ...], max_row_bytes: int) -> Iterator[Chunk]:
    """Each part as a chunk of one row, with the line on which it begins."""
    line = 1
    with ByteStream(path) as stream:
        for part in _parts(stream, min(PART_BYTES, max_row_bytes)):
            broken: tuple[RowProblem, ...] = ()
            texts: list[str] = []
            try:
                texts = [part.decode().replace("\r\n", "\n")]
            except UnicodeDecodeError as error:
                broken = (RowProblem(path, line + part[: error.start].count(b"\n"), "not UTF-8"),)
            lines = np.full(len(texts), line, dtype=np.int64)
            rows = record_batch(columns, [pa.array(texts, type=TEXT) for _ in columns])
            yield Chunk(path, rows, lines, broken, stream.position())
            line += part.count(b"\n")


def _parts(stream: ByteStream, size: int) -> Iterator[bytes]:
    """All bytes in parts of at most `size`, which end with a line, else between two characters."""
    rest = b""
    while piece := stream.read(size - len(rest)):
        rest += piece
        if len(rest) < size:
            continue
        edge = rest.rfind(b"\n") + 1 or len(rest) - _cut_off(rest)
        yield rest[:edge]
        rest = rest[edge:]
    if rest:
        yield rest


def _cut_off(data: bytes) -> int:
    """Bytes at the end that begin a character without ending it."""
    for count in range(1, min(4, len(data))):
        if data[-count] & 0xC0 == 0xC0:
            return count if count < _width(data[-count]) else 0
    return 0


def _width(first: int) -> int:
    """Bytes of a character by its first one."""
    return 4 if first >= 0xF0 else 3 if first >= 0xE0 else 2
