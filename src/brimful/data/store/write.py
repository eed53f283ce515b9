"""Writing a token store: chunks of tokens in, Arrow files out, each whole and checksummed before the next begins.

A file ends at about a million rows or 256 M tokens, so that an interrupted pack has lost a minute's work at most, and
what the writer keeps in memory is one record batch and the lengths of one file's rows: some 20 MB.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brimful.data.store.meta import NAME, FileFacts, StoreMeta
from brimful.data.store.store import Tokens, column_numbers
from brimful.errors import InternalError

FILE_ROWS = 1_000_000
FILE_TOKENS = 256 * 2**20
BATCH_ROWS = 8_192
"""Of a record batch: a reader that takes whole batches gets 2 MB of chat at a time."""
TOKENIZER_FILES = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template*",
)  # fmt: skip
"""What makes up a tokenizer in a folder that may also hold a model's weights."""


def token_dtype(vocab_size: int) -> str:
    """Two bytes where every id fits."""
    return "uint16" if vocab_size <= 2**16 else "int32"


@dataclass
class StoreWriter:
    """Appends rows to a folder that becomes a store with `finish`. `files` are those of an earlier, interrupted writer."""

    folder: Path
    sides: tuple[str, ...]
    vocab_size: int
    files: list[FileFacts] = field(default_factory=list)
    file_rows: int = FILE_ROWS
    file_tokens: int = FILE_TOKENS

    def __post_init__(self) -> None:
        self.dtype = token_dtype(self.vocab_size)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._open: tuple[Any, Any] | None = None
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._rows = self._tokens = 0

    @property
    def rows(self) -> int:
        """In all files, the open one included."""
        return sum(one.rows for one in self.files) // 2 + self._rows

    def add(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> bool:
        """Rows one after the other, sides within a row too; `lengths` has a line a row, a column a side.

        True when that filled the file: it is then whole, synced to disk and in `files`.
        """
        ends = np.cumsum(lengths.sum(axis=1, dtype=np.int64))
        if lengths.shape[1] != len(self.sides) or len(tokens) != (ends[-1] if len(ends) else 0):
            raise InternalError(f"{len(tokens)} tokens do not match the lengths {lengths.shape}")
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise InternalError(f"token {int(tokens.max())} is outside the vocabulary of {self.vocab_size}")
        for first in range(0, len(ends), BATCH_ROWS):
            self._write(tokens, ends, first, min(len(ends), first + BATCH_ROWS))
        self._lengths.append(lengths.astype(np.int32))
        self._rows += len(ends)
        self._tokens += len(tokens)
        full = self._rows >= self.file_rows or self._tokens >= self.file_tokens
        if full:
            self.seal()
        return full

    def seal(self) -> None:
        """End the open file: its index is written, both are synced and their checksums taken."""
        if self._open is None:
            return
        number = len(self.files) // 2
        tokens, index = f"tokens-{number:05}.arrow", f"index-{number:05}.arrow"
        for part in self._open:
            part.close()
        lengths = np.concatenate(self._lengths)
        _write_index(self.folder / index, _starts(self.folder / tokens, self.dtype, lengths), lengths, self.sides)
        for name in (tokens, index):
            sync(self.folder / name)
            self.files.append(FileFacts.of(self.folder, name, rows=self._rows))
        self._open, self._lengths, self._rows, self._tokens = None, [], 0, 0

    def finish(self, *, tokenizer: Path | None, **facts: Any) -> StoreMeta:
        """Seal, copy the tokenizer in, write `store.json`. `facts` are the fields of `StoreMeta` the writer cannot know."""
        self.seal()
        copied = [] if tokenizer is None else copy_tokenizer(tokenizer, self.folder)
        tokens, longest = self._sums()
        meta = StoreMeta(
            sides=self.sides, dtype=self.dtype, vocab_size=self.vocab_size, rows=self.rows, tokens=tokens, longest=longest,
            files=(*self.files, *copied), **facts,
        )  # fmt: skip
        write_synced(self.folder / NAME, meta.to_text())
        return meta

    def abandon(self) -> None:
        """Close what is open; the half file stays for the next writer to overwrite."""
        for part in self._open or ():
            with suppress(OSError, pa.ArrowException):  # the disk may be full
                part.close()
        self._open = None

    def _write(self, tokens: npt.NDArray[Any], ends: npt.NDArray[np.int64], first: int, last: int) -> None:
        begin = int(ends[first - 1]) if first else 0
        offsets = np.concatenate(([0], ends[first:last] - begin)).astype(np.int32)
        values = pa.array(tokens[begin : int(ends[last - 1])].astype(self.dtype, copy=False))
        rows = pa.ListArray.from_arrays(pa.array(offsets), values)
        batch = pa.record_batch([rows], names=["tokens"])
        if self._open is None:
            sink = pa.OSFile(str(self.folder / f"tokens-{len(self.files) // 2:05}.arrow"), "wb")
            self._open = pa.ipc.new_file(sink, batch.schema), sink
        self._open[0].write_batch(batch)

    def _sums(self) -> tuple[dict[str, int], dict[str, int]]:
        """Tokens and longest row of each side, read back from what was written."""
        tokens, longest = dict.fromkeys(self.sides, 0), dict.fromkeys(self.sides, 0)
        for one in self.files[1::2]:
            batch = pa.ipc.open_file(pa.memory_map(str(self.folder / one.name))).get_batch(0)
            for side in self.sides:
                lengths = column_numbers(batch.column(side))
                tokens[side] += int(lengths.sum(dtype=np.int64))
                longest[side] = max(longest[side], int(lengths.max()))
        return tokens, longest


def _starts(path: Path, dtype: str, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Where each row begins in the file, in tokens: asked of the written file, because Arrow puts headers in between."""
    size, mapping = np.dtype(dtype).itemsize, pa.memory_map(str(path))
    base = mapping.read_buffer(1).address
    reader = pa.ipc.open_file(mapping)
    totals, starts, done = lengths.sum(axis=1, dtype=np.int64), [], 0
    for number in range(reader.num_record_batches):
        column = reader.get_batch(number).column(0)
        offset = column.values.buffers()[1].address - base if len(column.values) else 0
        within = totals[done : done + len(column)]
        starts.append(offset // size + np.cumsum(within) - within)
        done += len(column)
    return np.concatenate(starts)


def _write_index(path: Path, starts: Tokens, lengths: npt.NDArray[np.int32], sides: Sequence[str]) -> None:
    """One record batch, so that each column is one stretch of memory once mapped."""
    batch = pa.record_batch(
        [pa.array(starts), *(pa.array(lengths[:, n].copy()) for n in range(len(sides)))], names=["start", *sides]
    )
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def copy_tokenizer(source: Path, folder: Path) -> list[FileFacts]:
    """The tokenizer's files, and nothing else that lies beside them."""
    target = folder / "tokenizer"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    names = sorted({path.name for pattern in TOKENIZER_FILES for path in source.glob(pattern) if path.is_file()})
    for name in names:
        shutil.copyfile(source / name, target / name)
        sync(target / name)
    return [FileFacts.of(folder, f"tokenizer/{name}") for name in names]


def write_synced(path: Path, text: str) -> None:
    """Whole or not at all: beside it, synced, renamed."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    sync(part)
    part.rename(path)


def sync(path: Path) -> None:
    """Have the kernel write a file to the disk now: a full disk is told here and not at the next power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
