"""The bytes of a file of text, uncompressed on the way, with the position in the file itself.

A compressed stream that ends in the middle must not pass for the end of the file: Arrow says so for .gz, .bz2 and .zst.
"""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pyarrow as pa

from brimful.data.read.raw import CHUNK_BYTES, MAX_ROW_BYTES
from brimful.errors import BadData

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}

_BOM = b"\xef\xbb\xbf"


class ByteStream:
    """A file opened for reading from its start, without a byte-order mark."""

    def __init__(self, path: str) -> None:
        self._path, self._compression = path, COMPRESSIONS.get(Path(path).suffix.lower())
        self._first, self._given_back = True, b""
        try:
            self._file = pa.OSFile(path)
            self._stream = pa.CompressedInputStream(self._file, self._compression) if self._compression else self._file
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from None

    def read(self, count: int) -> bytes:
        """The next bytes, `count` of them unless the file ends; b"" at its end. What was given back comes by itself."""
        if self._given_back:
            found, self._given_back = self._given_back, b""
            return found
        pieces, missing = [], count
        while missing:
            piece = self._some(missing)
            if not piece:
                break
            pieces.append(piece)
            missing -= len(piece)
        found = b"".join(pieces) if len(pieces) != 1 else pieces[0]
        if self._first and found:
            self._first, found = False, found.removeprefix(_BOM)
        return found

    def unread(self, data: bytes) -> None:
        """Give back what was read last."""
        self._given_back = data

    def at_bytes(self) -> int:
        """How much of the file was read."""
        return int(self._file.tell())

    def whole_lines(self) -> Iterator[bytes]:
        """Blocks that end with a line break, about `CHUNK_BYTES` of them; the last one ends with the file."""
        pieces, line = [b""], 1
        while piece := self.read(CHUNK_BYTES):
            last = piece.rfind(b"\n") + 1
            pieces.append(piece[:last] if last else piece)
            if last:
                block = b"".join(pieces)
                line += block.count(b"\n")
                yield block
                pieces = [piece[last:]]
            elif sum(map(len, pieces)) > MAX_ROW_BYTES:
                raise BadData(
                    f"{self._path}, line {line}: longer than {MAX_ROW_BYTES >> 20} MiB; is this one row a line?"
                )
        if rest := b"".join(pieces):
            yield rest

    def __enter__(self) -> "ByteStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        self._file.close()

    def _some(self, count: int) -> bytes:
        try:
            return bytes(self._stream.read(count))
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> BadData:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if self._compression and not isinstance(error, FileNotFoundError | PermissionError):
            return BadData(
                f"{self._path}: no whole {self._compression} file ({lines[0].rstrip('.')}); get or write it again"
            )
        return BadData(f"{self._path}: {lines[0].rstrip('.')}")
