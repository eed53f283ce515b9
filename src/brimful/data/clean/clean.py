"""`brimful data clean`: rows of any files, cleaned, shuffled and split into parquet files; every dropped row is counted.

    read    source ─► normalize, drop, hash (threads) ─► segments on disk              about 80 % of the time
    dedup   hashes and sketches ─► DuckDB groups ─► exact and near duplicates              about 8 %
    write   segments ─► sorted by their random keys ─► test, valid, train                  about 12 %

The split comes after deduplication, so no near duplicate that was found and no conversation is on both sides of it. Memory
depends on `--host-limit`, plus one byte per row. Finished segments and bands survive an interruption: the same command
continues after them and gives the same output, byte for byte. A million rows of 600 bytes take 20 s on two cores and 270 MiB.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from brimful.data.check import read_progress
from brimful.data.clean.duplicates import EXACT, HASHES, NEAR, DroppedRows, DuplicateSearch, need_duckdb
from brimful.data.clean.prepare import REASONS, CleanOptions, MemoryShares, Preparer
from brimful.data.clean.segments import ReadState, Segments, bucket_bits, rows_by_key
from brimful.data.clean.write import (
    SPLITS,
    WorkFolder,
    check_disk_space,
    disk_full_errors,
    locked_work_folder,
    predict_disk_bytes,
    split_rows,
    write_splits,
)
from brimful.data.pipeline import PeakMemory, in_order
from brimful.data.read.files import RowProblem, refuse_output_inside, skipped_note
from brimful.data.read.source import BrokenRowLimit, Chunk, Source, open_source
from brimful.errors import BadData, BadOption, InternalError
from brimful.files import file_sha256
from brimful.units import GiB

_UNKNOWN_TEXT_BYTES = 4 * GiB
"""Assumed for a source of unknown size (the hub); decides on the number of buckets only."""

Progress = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanReport:
    """The result of `clean`. `rows_in` is `rows_out` plus everything in `dropped`, or it cannot be created."""

    output: str
    columns: dict[str, str]
    reason: str
    """Why these columns."""
    rows_in: int
    dropped: dict[str, int]
    """Rows by reason, all of `REASONS`."""
    files: dict[str, int]
    """By split, the rows of its file, read back from the file."""
    problems: dict[str, tuple[RowProblem, ...]]
    """By reason, the first few dropped rows."""
    resumed_rows: int
    """Rows that an interrupted clean had already read."""
    notes: tuple[str, ...]
    seconds: float
    """The time of this run."""
    stage_s: dict[str, float]
    """Seconds by stage: read, dedup, write."""
    peak_bytes: int
    """Measured ten times a second: memory beyond that at the start, without mapped files."""

    def __post_init__(self) -> None:
        if set(self.dropped) != set(REASONS) or self.rows_in != self.rows_out + sum(self.dropped.values()):
            raise InternalError(
                f"Rows do not add up: {self.rows_in:,} in, {self.rows_out:,} out, dropped {self.dropped}. Nothing was written."
            )

    @property
    def rows_out(self) -> int:
        return sum(self.files.values())

    @property
    def rows_per_s(self) -> float | None:
        """None for a resumed run."""
        return None if self.resumed_rows or self.seconds <= 0 else self.rows_in / self.seconds

    def to_json(self) -> dict[str, Any]:
        paths = {split: str(Path(self.output) / f"{split}.parquet") for split in self.files}
        return asdict(self) | {
            "rows_out": self.rows_out,
            "files": {split: {"path": paths[split], "rows": rows} for split, rows in self.files.items()},
            "seconds": round(self.seconds, 3),
            "stage_s": {stage: round(seconds, 3) for stage, seconds in self.stage_s.items()},
            "rows_per_s": None if self.rows_per_s is None else round(self.rows_per_s, 1),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "CleanReport":
        values = {name: value for name, value in content.items() if name not in ("rows_out", "rows_per_s")}
        values["files"] = {split: file["rows"] for split, file in content["files"].items()}
        values["problems"] = {
            reason: tuple(RowProblem(**problem) for problem in problems)
            for reason, problems in content["problems"].items()
        }
        return cls(**values | {"notes": tuple(content["notes"])})


def clean(
    paths: Sequence[str] | Source,
    *,
    output: str | Path,
    options: CleanOptions | None = None,
    memory: MemoryShares | None = None,
    progress: Progress = lambda phrase: None,
) -> CleanReport:
    """Clean files, or a source that is already open, into train, valid and test.parquet and clean.json in `output`."""
    options, output = options or CleanOptions(), Path(output)
    memory = memory or MemoryShares.within(options.host_limit_bytes)
    source = open_source(paths, columns=options.columns, host_limit_bytes=options.host_limit_bytes)
    refuse_output_inside(output, source.paths)
    need_duckdb()
    preparer = Preparer(options, source.layout.fields)
    outputs = {(output / f"{split}.parquet").resolve() for split in SPLITS}
    for file in source.files:
        if Path(file).resolve() in outputs:
            raise BadOption(f"output='{output}' would replace its own input {file}. Try: another folder.")
    with locked_work_folder(output) as work:
        run = _CleanRun(source, work, options, memory, preparer, progress)
        try:
            with PeakMemory() as peak, disk_full_errors(output, run.predicted_disk_bytes):
                return run(peak)
        except BaseException:
            if not any(work.segments.glob("*.json")):  # not one complete segment to resume from
                work.discard()
            raise


class _CleanRun:
    """One run: its stages in order, each of which continues where an earlier run stopped."""

    def __init__(
        self,
        source: Source,
        work: WorkFolder,
        options: CleanOptions,
        memory: MemoryShares,
        preparer: Preparer,
        progress: Progress,
    ) -> None:
        self._source, self._work, self._options, self._memory = source, work, options, memory
        self._preparer, self._progress = preparer, progress
        self._state: ReadState | None = None
        self._resumed_rows = 0
        self._notes: list[str] = []
        self._stage_s: dict[str, float] = {}

    def __call__(self, peak: PeakMemory) -> CleanReport:
        started = time.monotonic()
        key, split = self._key(), {"valid": self._options.valid, "test": self._options.test}
        if self._work.belongs_to(key) and self._work.is_publishing(split):
            self._progress("moving the remaining files to their places")
            return CleanReport.from_json(self._work.finish())
        existing = self._work.existing_outputs()
        if existing and not self._options.overwrite:
            raise BadOption(
                f"output='{self._work.output}' already has {', '.join(existing)}. Try: overwrite=True, or another folder."
            )
        self._start_or_resume(key)
        if self._source.skipped:
            self._note(skipped_note(self._source.skipped))
        with self._stage("read"):
            state = self._read()
        with self._stage("dedup"):
            duplicates, problems = self._find_duplicates(state)
        with self._stage("write"):
            files = self._write(state, duplicates)
        counts = np.bincount(duplicates.reasons, minlength=NEAR + 1)
        report = CleanReport(
            output=str(self._work.output),
            columns=self._source.layout.columns,
            reason=self._source.layout.reason,
            rows_in=state.rows_in,
            dropped=state.dropped.counts | {"duplicate": int(counts[EXACT]), "near_duplicate": int(counts[NEAR])},
            files=files,
            problems={reason: tuple(first) for reason, first in (state.dropped.problems | problems).items()},
            resumed_rows=self._resumed_rows,
            notes=tuple(self._notes),
            seconds=time.monotonic() - started,
            stage_s=self._stage_s,
            peak_bytes=peak.bytes - peak.start_bytes,
        )
        self._progress("moving the files to their places")
        self._work.publish(report.to_json(), split)
        return report

    def predicted_disk_bytes(self) -> float:
        """Disk still needed, by what was read so far."""
        state = self._state or ReadState(bits=0)
        sketch_bytes = HASHES + 8 * self._preparer.bands if self._preparer.bands else 0
        share = state.read_bytes / self._source.total_bytes if self._source.total_bytes else 1.0
        return predict_disk_bytes(
            rows=state.rows_kept, text_bytes=state.text_bytes, sketch_bytes=sketch_bytes, read_share=share
        )

    def _key(self) -> dict[str, Any]:
        """What the work in the folder depends on: inputs, options and library versions."""
        tokenizer = self._options.tokenizer
        digest = tokenizer and file_sha256(Path(tokenizer) / "tokenizer.json")
        versions = {"pyarrow": pa.__version__, "numpy": np.__version__}
        return {"source": self._source.fingerprint(), **self._options.key(), "tokenizer": digest, **versions}

    def _start_or_resume(self, key: dict[str, Any]) -> None:
        if not self._work.belongs_to(key) and self._work.start(key):
            self._note("starting over: the unfinished work in the folder was for other files or options")
        self._segments = Segments(
            self._work.segments,
            fields=self._source.layout.fields,
            bands=self._preparer.bands,
            seed=self._options.seed,
        )
        self._state = self._segments.resume()
        if self._state is not None:
            self._resumed_rows = self._state.rows_in
            self._note(f"resuming after {self._resumed_rows:,} rows")

    def _note(self, message: str) -> None:
        self._notes.append(message)
        self._progress(message)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._stage_s[name] = time.monotonic() - started
        pa.default_memory_pool().release_unused()

    def _read(self) -> ReadState:
        """Write all chunks that are not read yet into segments."""
        state, started = self._state, time.monotonic()
        limit = BrokenRowLimit(self._options.max_bad)
        if state is not None:
            first = next(iter(state.dropped.problems["broken"]), None)
            limit = BrokenRowLimit(self._options.max_bad, state.rows_in, state.dropped.counts["broken"], first)
        chunks = iter(()) if state and state.complete else self._source.chunks(skip=state.chunks if state else 0)
        threads = self._memory.threads
        for prepared in in_order(self._preparer, _limited(chunks, limit), threads=threads, in_flight=threads + 1):
            is_first = state is None
            state = self._state = state or ReadState(bits=self._bits(prepared.text_bytes, prepared.read_bytes))
            state.add(prepared)
            self._segments.add(prepared)
            is_full = self._segments.pending_bytes >= self._memory.segment_bytes
            if is_full:
                self._segments.flush(state)
            if is_full or is_first:
                check_disk_space(self._work.output, self.predicted_disk_bytes())
            new_rows, seconds = state.rows_in - self._resumed_rows, time.monotonic() - started
            self._progress(
                read_progress(state.rows_in, new_rows / max(seconds, 1e-9), state.read_bytes, self._source.total_bytes)
            )
        limit.check()
        if state is None:
            raise BadData(f"{', '.join(self._source.files)}: no rows. Try: leave such files out.")
        if not state.complete:
            state.complete = True
            self._segments.flush(state)
        if not state.rows_kept:
            counts = ", ".join(
                f"{count:,} {reason.replace('_', ' ')}" for reason, count in state.dropped.counts.items() if count
            )
            raise BadData(f"No row is left of {state.rows_in:,}: {counts}. Try: `brimful data check`.")
        return state

    def _bits(self, text_bytes: int, read_bytes: int) -> int:
        """By the first chunk; by the size of the files where that predicts more."""
        total = self._source.total_bytes
        predicted = max(total, text_bytes * total / read_bytes) if total and read_bytes else _UNKNOWN_TEXT_BYTES
        return bucket_bits(predicted, self._memory.bucket_bytes)

    def _find_duplicates(self, state: ReadState) -> tuple[DroppedRows, dict[str, list[RowProblem]]]:
        search = DuplicateSearch(
            self._work.path / "dedup", self._segments.hash_files(state), self._segments.signatures,
            rows=state.rows_kept, memory_bytes=self._memory.duckdb_bytes, threads=self._memory.threads,
        )  # fmt: skip
        try:
            duplicates = search.run(near=self._options.near, bands=self._preparer.bands, progress=self._progress)
            return duplicates, _duplicate_examples(search, duplicates, state.files)
        finally:
            search.close()

    def _write(self, state: ReadState, duplicates: DroppedRows) -> dict[str, int]:
        kept = int(np.count_nonzero(duplicates.reasons == 0))
        counts = split_rows(kept, valid=self._options.valid, test=self._options.test)
        shutil.rmtree(self._work.drafts, ignore_errors=True)
        self._work.drafts.mkdir()
        parts = max(1, math.ceil(state.text_bytes / 2**state.bits / (2 * self._memory.bucket_bytes)))
        tables = rows_by_key(self._segments.row_files(state), duplicates.reasons, bits=state.bits, parts=parts)
        fields = self._source.layout.fields
        written = write_splits(self._with_progress(tables, kept), counts, self._work.drafts, fields)
        return {split: written[split] for split in SPLITS if split in written}

    def _with_progress(self, tables: Iterable[pa.Table], kept: int) -> Iterator[pa.Table]:
        done = 0
        for table in tables:
            done += table.num_rows
            self._progress(f"writing {done:,} of {kept:,} rows")
            yield table


def _limited(chunks: Iterable[Chunk], limit: BrokenRowLimit) -> Iterator[Chunk]:
    for chunk in chunks:
        limit.add(chunk)
        yield chunk


def _duplicate_examples(
    search: DuplicateSearch, duplicates: DroppedRows, files: Sequence[str]
) -> dict[str, list[RowProblem]]:
    """The first duplicates of each kind, and what they are duplicates of."""
    rows = {row for pairs in duplicates.examples.values() for pair in pairs for row in pair[:2]}
    places = search.places(sorted(rows))

    def problem(row: int, earlier: int, relation: str) -> RowProblem:
        (file, line), (earlier_file, earlier_line) = places[row], places[earlier]
        name = "" if file == earlier_file else f"{files[earlier_file]}, "
        return RowProblem(files[file], line, f"{relation} {name}line {earlier_line}")

    return {
        "duplicate": [problem(row, earlier, "same as") for row, earlier, _ in duplicates.examples[EXACT]],
        "near_duplicate": [
            problem(row, earlier, f"{similarity:.2f} similar to")
            for row, earlier, similarity in duplicates.examples[NEAR]
        ],
    }
