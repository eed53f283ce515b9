"""The outputs of clean: the splits as parquet files, the folder they are made in, and the disk space they need.

Everything is made in `OUTPUT/.clean`, and only complete files leave it. Row groups end after 32,768 rows or 32 MiB of text,
whichever comes first, wherever the incoming tables begin and end: readers need little memory, and the same rows give the
same file. Texts are compressed with zstd, without dictionaries, which do not help with long texts.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from brimful.data.clean.segments import SORT_KEY
from brimful.errors import BadData, BadOption, InternalError
from brimful.files import FileLock, disk_full, json_sha256, sync, write_atomic
from brimful.machine.host import Space
from brimful.units import show_bytes

SPLITS = ("train", "valid", "test")
WORK_FOLDER = ".clean"
REPORT = "clean.json"
GROUP_ROWS = 32_768
GROUP_BYTES = 32 * 2**20

_FORMAT = 2
"""The version of the work folder. Work of another version is not resumed."""


# ── The work folder ───────────────────────────────────────────────────────────────────────────────────────────────────


class WorkFolder:
    """`OUTPUT/.clean`, locked by one clean at a time.

    A key over inputs and options says whose work it is: a clean with the same key resumes it, any other starts over. At
    the end the outputs are synced, listed in publish.json and moved, the report last. A clean that was killed in between
    finds the list and moves the rest.
    """

    def __init__(self, output: Path) -> None:
        self.output, self.path = output, output / WORK_FOLDER
        self.segments = self.path / "segments"
        self.drafts = self.path / "out"
        self._publish_list = self.path / "publish.json"
        self._key = self.path / "key.json"

    def belongs_to(self, key: dict[str, Any]) -> bool:
        return self._key.exists() and self._key.read_text() == json_sha256([_FORMAT, key])

    def start(self, key: dict[str, Any]) -> bool:
        """Empty the folder and give it this key. True if there was work under another key."""
        had_work = self._key.exists()
        self._key.unlink(missing_ok=True)
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()
        write_atomic(self._key, json_sha256([_FORMAT, key]))
        return had_work

    def existing_outputs(self) -> list[str]:
        names = [f"{split}.parquet" for split in SPLITS] + [REPORT]
        return [name for name in names if (self.output / name).exists()]

    def is_publishing(self, split: dict[str, float]) -> bool:
        """Whether a clean with the same split was killed while its files were moved."""
        return self._publish_list.exists() and json.loads(self._publish_list.read_text())["split"] == split

    def publish(self, report: dict[str, Any], split: dict[str, float]) -> None:
        """Move the complete outputs to their places and remove the work folder."""
        for path in (*self.drafts.iterdir(), self.drafts):
            sync(path)
        write_atomic(self._publish_list, json.dumps({"split": split, "report": report}))
        self.finish()

    def finish(self) -> dict[str, Any]:
        """Move what is listed and not moved yet. Older outputs that are not replaced are removed as well."""
        report: dict[str, Any] = json.loads(self._publish_list.read_text())["report"]
        (self.output / REPORT).unlink(missing_ok=True)
        for split in SPLITS:
            draft, place = self.drafts / f"{split}.parquet", self.output / f"{split}.parquet"
            if draft.exists():
                draft.replace(place)
            elif split not in report["files"]:
                place.unlink(missing_ok=True)
        sync(self.output)
        write_atomic(self.output / REPORT, json.dumps(report, indent=1) + "\n")
        shutil.rmtree(self.path)
        return report

    def discard(self) -> None:
        """Remove the work folder, and the output folder if it is empty."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.output.rmdir()


@contextmanager
def locked_work_folder(output: Path) -> Iterator[WorkFolder]:
    """The work folder, created if needed, for one command at a time."""
    work = WorkFolder(output)
    try:
        work.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(work.path / "lock")
    except BlockingIOError:
        raise BadOption(f"output='{output}' is in use by another clean. Try: again later, or another folder.") from None
    except OSError as error:
        raise BadOption(f"output='{output}': {error.strerror}. Try: a folder that can be written to.") from None
    with lock:
        yield work


# ── Disk space ────────────────────────────────────────────────────────────────────────────────────────────────────────

_SEGMENT_SHARE, _OUTPUT_SHARE = 0.8, 0.7
"""Upper bounds of what segments and outputs take of the text; 0.65 and 0.6 with generated rows."""
_ROW_BYTES = 64
"""Digest, numbers, and what DuckDB spills."""


def predict_disk_bytes(*, rows: int, text_bytes: int, sketch_bytes: int, read_share: float) -> float:
    """Bytes still to be written, after this many rows and bytes of text were prepared. A prediction."""
    read_share = min(1.0, read_share) or 1.0
    segments = _SEGMENT_SHARE * text_bytes + rows * (_ROW_BYTES + sketch_bytes)
    return segments * (1 / read_share - 1) + _OUTPUT_SHARE * text_bytes / read_share


def check_disk_space(folder: Path, needed_bytes: float) -> None:
    """Refuse early instead of filling the disk for an hour."""
    space = Space.around(folder)
    if space is not None and needed_bytes > space.free_bytes:
        raise _no_space(folder, needed_bytes, space.free_bytes)


@contextmanager
def disk_full_errors(folder: Path, needed_bytes: Callable[[], float]) -> Iterator[None]:
    """Turn the error of a full disk, of whatever library, into one message. Finished work stays."""
    try:
        yield
    except Exception as error:
        if isinstance(error, BadData) or not disk_full(error):
            raise
        space = Space.around(folder)
        raise _no_space(folder, needed_bytes(), space.free_bytes if space else None) from error


def _no_space(folder: Path, needed_bytes: float, free_bytes: int | None) -> BadData:
    return BadData(
        f"Not enough disk space at {folder}: about {show_bytes(needed_bytes)} more needed (predicted), "
        f"{show_bytes(free_bytes)} free. Try: make room and run the same command again, or another output=."
    )


# ── The splits ────────────────────────────────────────────────────────────────────────────────────────────────────────


def split_rows(rows: int, *, valid: float, test: float) -> dict[str, int]:
    """Rows of each file, in writing order: test, valid, train. A share gives at least one row."""
    counts = {"test": _row_count(rows, test), "valid": _row_count(rows, valid)}
    train = rows - sum(counts.values())
    if train < 1:
        raise BadOption(
            f"valid={valid:g} and test={test:g} leave no row for training: {rows:,} rows are left after cleaning. "
            "Try: smaller splits."
        )
    return {**{name: count for name, count in counts.items() if count}, "train": train}


def _row_count(rows: int, share_or_count: float) -> int:
    if share_or_count >= 1 or share_or_count == 0 or rows < 2:
        return int(share_or_count)
    return max(1, round(rows * share_or_count))


def write_splits(
    tables: Iterable[pa.Table], counts: Mapping[str, int], folder: Path, fields: tuple[str, ...]
) -> dict[str, int]:
    """Write the first rows into the first file and so on; returns the rows of each file, which add up to all.

    A file gets exactly its count, and a few rows more where that would separate rows of one key: a conversation.
    """
    incoming, written = iter(tables), dict.fromkeys(counts, 0)
    schema = pa.schema([(name, pa.string()) for name in fields])
    rest, final = schema.empty_table(), list(counts)[-1]
    for split, count in counts.items():
        with GroupedWriter(folder / f"{split}.parquet", schema) as writer:
            while split == final or written[split] < count:
                rest = rest if rest.num_rows else next(incoming, None)
                if rest is None:
                    rest = schema.empty_table()
                    break
                end = rest.num_rows if split == final else _end_of_key(rest, count - written[split])
                writer.add(rest.slice(0, end).select(fields))
                written[split], rest = written[split] + end, rest.slice(end)
    _check_counts(written, counts, folder)
    return written


def _end_of_key(rows: pa.Table, count: int) -> int:
    """`count` rows and those that follow with the key of the last one. Rows of one key come in one table."""
    if SORT_KEY not in rows.column_names or count >= rows.num_rows:
        return min(count, int(rows.num_rows))
    keys = rows.column(SORT_KEY).to_numpy()
    return int(np.searchsorted(keys, keys[count - 1], side="right"))


def _check_counts(written: Mapping[str, int], counts: Mapping[str, int], folder: Path) -> None:
    for split, rows in written.items():
        saved = pq.read_metadata(folder / f"{split}.parquet").num_rows
        if saved != rows:
            raise InternalError(f"{split}.parquet has {saved:,} rows, but {rows:,} were written.")
    if sum(written.values()) != sum(counts.values()):
        raise InternalError(f"{sum(written.values()):,} of {sum(counts.values()):,} rows were written.")
    if empty := [split for split, rows in written.items() if not rows]:
        raise BadOption(
            f"valid= and test= leave no row for {' and '.join(empty)}, since rows of one conversation stay together. "
            "Try: smaller splits."
        )


class GroupedWriter:
    """A parquet file that takes tables of any size and writes row groups of fixed size."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(
            path, schema, compression="zstd", use_dictionary=False, write_statistics=False, store_schema=False
        )
        self._pending: list[pa.Table] = []
        self._rows = self._bytes = 0

    def __enter__(self) -> "GroupedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._rows:
                self._write(pa.concat_tables(self._pending))
        finally:
            self._writer.close()

    def add(self, rows: pa.Table) -> None:
        self._pending.append(rows)
        self._rows += rows.num_rows
        self._bytes += rows.nbytes
        # `_bytes` includes offsets and a group's size does not, so this checks too often rather than too rarely.
        if self._rows >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self._write_full_groups()

    def _write_full_groups(self) -> None:
        rows = pa.concat_tables(self._pending)
        sizes = sum(pc.binary_length(column).to_numpy().astype(np.int64) for column in rows.columns)
        ends, start = np.cumsum(sizes), 0
        while True:
            bytes_before = int(ends[start - 1]) if start else 0
            end = min(start + GROUP_ROWS, int(np.searchsorted(ends, bytes_before + GROUP_BYTES)) + 1)
            if end > rows.num_rows:
                break
            self._write(rows.slice(start, end - start))
            start = end
        rest = rows.slice(start)
        self._pending, self._rows, self._bytes = [rest], rest.num_rows, rest.nbytes

    def _write(self, rows: pa.Table) -> None:
        self._writer.write_table(rows.combine_chunks(), row_group_size=GROUP_ROWS)
