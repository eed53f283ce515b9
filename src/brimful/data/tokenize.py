"""`brimful data tokenize`: rows of any format, tokenized into a token store.

    source ─► read ahead ─► pieces ─► encode (threads) ─► join ─► write (thread) ─► files, then store.json, then rename

Encoding is nine tenths of the work; reading and writing happen beside it. Everything in flight is bounded (two chunks of
rows, four pieces being encoded, one chunk being written), so memory is the same for one million rows and for ten. 50,000
rows of chat took 5.2 s of processor time, where `datasets.map` took 7.6 to 9.9 s for the same ids.

The store is made in `.OUTPUT.part` beside the output and renamed when it is complete. `progress.json` in there lists the
finished files with their checksums and how far in the source they reach. Interrupted and run again with the same source,
tokenizer, encoder and options, it continues after the last of them and gives the same store.

Every row of the source is in the store or counted under a reason. Rows that cannot be read (`broken`) and rows that the
encoder refuses are an error unless `max_bad` allows their share; empty rows and rows with nothing to train on are only
counted.
"""

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brimful.data.encode import (
    EMPTY,
    PIECES_IN_FLIGHT,
    Drop,
    EncodedRows,
    Encoder,
    Note,
    RowEncoder,
    in_pieces,
    piece_size,
)
from brimful.data.pipeline import OutputFolder, PeakMemory, in_order, part_folder, read_ahead, writing_to
from brimful.data.read.files import refuse_output_inside
from brimful.data.read.source import BrokenRowLimit, Chunk, Layout, RowProblem, Source, open_source
from brimful.data.store import (
    FILE_ROWS,
    NAME,
    NOTES,
    VERSION,
    FileFacts,
    Store,
    StoreMeta,
    StoreWriter,
    check_files,
    length_fields,
    token_dtype,
)
from brimful.data.tokenizer.folder import TokenizerFacts, load_tokenizer, special_words
from brimful.errors import BadData, BadOption, InternalError
from brimful.files import parse_object, read_json, write_atomic
from brimful.machine.host import Space
from brimful.units import GiB, show_bytes

PERCENTILES = (50, 90, 99)
BROKEN = "broken"
"""The reason for a row that cannot be read."""
THREADS = 2
"""Threads that encode: while one turns its ids into an array, the cores work for the other."""
_PROGRESS_FILE = "progress.json"
_LENGTHS_AT_ONCE = 100_000
_IN_WORDS = {BROKEN: "broken", EMPTY: "with an empty field"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeOptions:
    """How to tokenize."""

    columns: str | None = None
    """Which columns make up which field: `prompt=question,response=answer`. Default: found by name."""
    max_tokens: tuple[int, ...] = (256,)
    """Fields are truncated to this, eos included: one number for all fields, or one for each."""
    keep_end: tuple[str, ...] | None = None
    """Fields that lose their beginning when truncated, not their end. Default: the prompts of conversations."""
    host_limit_bytes: int = GiB
    max_bad: float = 0.0
    """The share of rows that may be broken, or refused by the encoder."""
    overwrite: bool = False
    """Replace an existing token store."""
    file_rows: int = FILE_ROWS
    """Rows after which a new file begins."""

    def __post_init__(self) -> None:
        problems = []
        if not self.max_tokens or min(self.max_tokens) < 2:
            value = ",".join(map(str, self.max_tokens)) or "''"
            problems.append(f"max_tokens={value} must be at least 2, one token and the eos")
        if not 0 <= self.max_bad <= 1:
            problems.append(f"max_bad={self.max_bad} must be a share from 0 to 1")
        if self.host_limit_bytes <= 0:
            problems.append(f"host_limit={self.host_limit_bytes} must be positive")
        if problems:
            raise BadOption("; ".join(problems) + ".")

    def limits(self, fields: tuple[str, ...]) -> tuple[int, ...]:
        """By field, the most tokens."""
        if len(self.max_tokens) not in (1, len(fields)):
            raise BadOption(
                f"max_tokens={self.max_tokens} does not match the {len(fields)} fields of the rows "
                f"({', '.join(fields)}). Try: one number for all, or one for each."
            )
        return self.max_tokens * len(fields) if len(self.max_tokens) == 1 else self.max_tokens

    def keeps_end(self, fields: tuple[str, ...], *, conversations: bool) -> tuple[bool, ...]:
        """By field, whether truncation keeps the end: in a conversation the question comes last."""
        default = ("prompt",) if conversations else ()
        names = default if self.keep_end is None else self.keep_end
        if unknown := [name for name in names if name not in fields]:
            raise BadOption(f"keep_end='{','.join(unknown)}' is not a field of the rows. Try: {' or '.join(fields)}.")
        return tuple(field in names for field in fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldStats:
    """One field of all rows."""

    column: str
    """The column of the files."""
    characters: int
    """Before truncation."""
    tokens: int
    """In the store, the eos of each row included."""
    max_tokens: int
    keeps_end: bool
    """Whether truncation removes the beginning instead of the end."""
    truncated: int
    """Rows longer than `max_tokens`."""
    lost_tokens: int
    """Removed by truncation."""
    mean: float
    percentiles: dict[str, int]
    longest: int


@dataclass(frozen=True, slots=True)
class RowNotes:
    """Rows that are kept, with something that their owner should know."""

    rows: int
    first: str
    """The first: file, line and what there is in it."""

    @classmethod
    def read(cls, store: Path) -> "dict[str, RowNotes]":
        """Those of a store, by reason. They tell nothing that training needs, so there are none if the file is damaged."""
        try:
            return {reason: cls(**one) for reason, one in json.loads((store / NOTES).read_bytes()).items()}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeReport:
    """The result of `tokenize`. `rows_in + rows_added` is `rows_out` plus everything in `dropped`."""

    store: str
    rows_in: int
    rows_out: int
    rows_added: int = 0
    """How many rows there are more because one of the source gave several: one for each reply, or pieces of a long text."""
    dropped: dict[str, int]
    first_dropped: dict[str, str] = dataclasses.field(default_factory=dict)
    """By reason, the first row that was dropped for it: file, line and what is wrong with it."""
    notes: dict[str, RowNotes] = dataclasses.field(default_factory=dict)
    """By reason, rows that are in the store and whose owner should know something."""
    fields: dict[str, FieldStats]
    """Fields of tokens: all of the store but the spans."""
    layout_reason: str
    requested_max_tokens: tuple[int, ...]
    first_broken: str | None
    """The first row that could not be read."""
    sources: int
    """Files read."""
    skipped: tuple[str, ...]
    """What the folders contain besides these files, each with the reason."""
    tokenizer: str
    vocab_size: int
    dtype: str
    seconds: float
    rows_per_s: float
    """Rows read per second, without those of an earlier, interrupted run."""
    peak_bytes: int
    """Measured: the most anonymous and shared memory of the process; 0 where the kernel does not report it."""
    start_bytes: int
    """The same before the first row was read: Python, libraries, tokenizer."""
    host_limit_bytes: int
    size_bytes: int
    """On disk."""
    resumed_rows: int
    """Rows in the store that an interrupted run had written."""
    started_over: str
    """Why the files of an interrupted run could not be used; empty where there were none."""
    fingerprint: str

    def to_json(self) -> dict[str, Any]:
        content = asdict(self)
        fields = content.pop("fields")
        for name in ("tokens", "truncated", "lost_tokens", "characters", "max_tokens"):
            content[name] = {field: values[name] for field, values in fields.items()}
        content["columns"] = {field: values["column"] for field, values in fields.items()}
        content["lengths"] = {
            field: {"mean": values["mean"], **values["percentiles"], "longest": values["longest"]}
            for field, values in fields.items()
        }
        return content


def tokenize(
    paths: Sequence[str] | Source,
    *,
    tokenizer: str | Path,
    output: str | Path,
    options: TokenizeOptions | None = None,
    encoder: RowEncoder | None = None,
    progress: Callable[[str], object] = lambda phrase: None,
) -> TokenizeReport:
    """Tokenize all rows of these files, or of an open source, into a new token store. After an interruption it continues.

    By default each field of text becomes a field of tokens. An `encoder` makes something else of the rows, which are then
    read as conversations (`open_source(…, messages=True)`); it has its own limit, and `options.max_tokens` and
    `options.keep_end` are not used.
    """
    options, path, begin_s = options or TokenizeOptions(), Path(output).resolve(), time.monotonic()
    folder = OutputFolder(path=path, kind="token store", marker=NAME, overwrite=options.overwrite)
    folder.check()
    source = open_source(
        paths, columns=options.columns, host_limit_bytes=options.host_limit_bytes, messages=encoder is not None
    )
    refuse_output_inside(path, source.paths)
    facts = TokenizerFacts.read(tokenizer)
    with writing_to(path), PeakMemory() as peak, part_folder(path, progress=_PROGRESS_FILE) as part:
        job = _Job(source, facts, Path(tokenizer), part, path, options, peak, encoder)
        job.run(progress)
        meta = job.finish()
        folder.publish(part)
        (path / _PROGRESS_FILE).unlink(missing_ok=True)
    return job.report(Store(path, meta), time.monotonic() - begin_s)


@dataclass(kw_only=True)
class Counts:
    """Rows and tokens so far; lists have one entry per field."""

    chunks: int = 0
    rows_in: int = 0
    rows_out: int = 0
    rows_used: int = 0
    """Rows of the source that are in the store."""
    dropped: dict[str, int] = dataclasses.field(default_factory=lambda: {BROKEN: 0, EMPTY: 0})
    first_dropped: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    """By reason: file, line and message of the first row."""
    notes: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    """By reason: how many rows, and file, line and message of the first."""
    bad: int = 0
    """Rows that could not be read or were refused."""
    first_bad: list[Any] | None = None
    truncated: list[int] = dataclasses.field(default_factory=list)
    lost_tokens: list[int] = dataclasses.field(default_factory=list)
    characters: list[int] = dataclasses.field(default_factory=list)

    def add(self, chunk: Chunk, encoded: EncodedRows) -> None:
        self.chunks += 1
        self.rows_in += chunk.rows_in
        self.rows_out += len(encoded.lengths)
        self.rows_used += encoded.rows_used
        for reason, problem in dropped_rows(chunk, encoded):
            self.dropped[reason] = self.dropped.get(reason, 0) + 1
            self.first_dropped.setdefault(reason, [problem.file, problem.line, problem.message])
        for note in encoded.notes:
            first = named(chunk, note)
            self.notes.setdefault(note.reason, [0, first.file, first.line, first.message])[0] += 1
        for name in ("truncated", "lost_tokens", "characters"):
            new = getattr(encoded, name)
            total = getattr(self, name) or [0] * len(new)
            setattr(self, name, [one + other for one, other in zip(total, new, strict=True)])


def dropped_rows(chunk: Chunk, encoded: EncodedRows) -> Iterator[tuple[str, RowProblem]]:
    """The rows of a chunk that an encoder cannot use or was not given, with their reasons."""
    yield from ((BROKEN, problem) for problem in chunk.broken)
    yield from ((drop.reason, named(chunk, drop)) for drop in encoded.drops)


def named(chunk: Chunk, one: Drop | Note) -> RowProblem:
    """Where a row is that an encoder says something about."""
    return RowProblem(chunk.file, int(chunk.lines[one.row]), one.message or one.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Earlier:
    """The usable results of an interrupted run: none where `files` is empty."""

    counts: Counts
    files: tuple[FileFacts, ...] = ()
    discarded: str = ""
    """Why its files cannot be used; empty where there were none."""


class _Job:
    """One run of `tokenize`."""

    def __init__(
        self, source: Source, facts: TokenizerFacts, tokenizer: Path, part: Path, output: Path, options: TokenizeOptions, peak: PeakMemory,
        encoder: RowEncoder | None,
    ) -> None:  # fmt: skip
        self.source, self.facts, self.tokenizer, self.options = source, facts, tokenizer, options
        self.part, self.output, self.peak = part, output, peak
        self.encoder: RowEncoder = encoder or _text_encoder(source.layout, facts, tokenizer, options)
        self.fields, self.max_tokens = self.encoder.fields, self.encoder.max_tokens
        self.length_fields = length_fields(self.fields)
        self.start_bytes = peak.measure()
        self.piece_bytes = piece_size(options.host_limit_bytes, self.start_bytes)
        self.key = {
            "format": VERSION, "source": source.fingerprint(),
            "tokenizer": f"{facts.fingerprint}, eos {facts.eos_id}, pad {facts.pad_id}",
            "encoder": [self.encoder.key, *self.fields], "max-tokens": list(self.max_tokens),
            "keep-end": list(self.encoder.keep_end), "rows per file": options.file_rows,
        }  # fmt: skip
        self.earlier = _take_over(part, self.key)
        self.counts = self.earlier.counts
        self.resumed_in, self.resumed_out = self.counts.rows_in, self.counts.rows_out
        first = self.counts.first_bad
        self.bad_rows = BrokenRowLimit(
            options.max_bad, self.counts.rows_in, self.counts.bad, None if first is None else RowProblem(*first)
        )
        self.writer = StoreWriter(
            part, self.fields, facts.vocab_size, files=list(self.earlier.files), file_rows=options.file_rows
        )
        self.run_s = 0.0

    def run(self, progress: Callable[[str], object]) -> None:
        """Write all rows that are left to files."""
        if self.resumed_in:
            progress(f"continuing after {self.resumed_in:,} rows of an interrupted run")
        elif self.earlier.discarded:
            progress(f"starting over, because an interrupted run cannot be continued: {self.earlier.discarded}")
        begin_s = time.monotonic()
        try:
            with closing(in_order(self._write, self._encoded(), threads=1, in_flight=2)) as written:
                for rows_in, read_bytes in written:
                    self.run_s = time.monotonic() - begin_s
                    total = self.source.total_bytes
                    share = f", {min(1, read_bytes / total):.0%}" if total else ""
                    progress(f"tokenized {rows_in:,} rows, {self._rate(rows_in):,.0f} rows/s{share}")
        except BaseException:
            self.writer.abandon()
            raise
        self.writer.seal()
        self._save()

    def finish(self) -> StoreMeta:
        """Check that the rows add up, and write `store.json`."""
        counts = self.counts
        self.bad_rows.check()
        if not counts.rows_out:
            dropped = ", ".join(
                f"{count:,} {_IN_WORDS.get(reason, reason)}"
                for reason, count in counts.dropped.items()
                if count or reason in _IN_WORDS
            )
            first = [str(RowProblem(*problem)) for problem in counts.first_dropped.values()]
            advice = f"repair them, starting with {first[0]}" if first else "`brimful data check`"
            raise BadData(f"{self.source.files[0]}: no row is left of {counts.rows_in:,} ({dropped}). Try: {advice}.")
        notes = {reason: asdict(note) for reason, note in self._notes().items()}
        meta = self.writer.finish(
            notes=json.dumps(notes) if notes else "", tokenizer=self.tokenizer, max_tokens=self._by_field(self.max_tokens), eos_id=self.facts.eos_id,
            pad_id=self.facts.pad_id, tokenizer_fingerprint=self.facts.fingerprint, sources=self.source.files,
            rows_in=counts.rows_in, dropped=counts.dropped, truncated=self._by_field(counts.truncated),
        )  # fmt: skip
        if meta.rows != counts.rows_out or counts.rows_used != counts.rows_in - sum(counts.dropped.values()):
            raise InternalError(f"rows do not add up: {counts} but the store has {meta.rows:,}")
        return meta

    def _notes(self) -> dict[str, RowNotes]:
        return {reason: RowNotes(one[0], str(RowProblem(*one[1:]))) for reason, one in self.counts.notes.items()}

    def report(self, store: Store, seconds: float) -> TokenizeReport:
        counts, meta, layout = self.counts, store.meta, self.source.layout
        first = {reason: str(RowProblem(*problem)) for reason, problem in counts.first_dropped.items()}
        fields = {
            field: FieldStats(
                column=layout.column_of(field), characters=counts.characters[n], tokens=meta.tokens[field],
                max_tokens=self.max_tokens[n], keeps_end=self.encoder.keep_end[n], truncated=counts.truncated[n],
                lost_tokens=counts.lost_tokens[n], mean=store.mean_lengths[n], percentiles=percentiles,
                longest=store.longest[n],
            )
            for n, (field, percentiles) in enumerate(zip(self.length_fields, _length_percentiles(store), strict=True))
        }  # fmt: skip
        return TokenizeReport(
            store=str(store.path), rows_in=counts.rows_in, rows_out=meta.rows, rows_added=meta.rows - counts.rows_used,
            dropped=counts.dropped, first_dropped=first, notes=self._notes(), fields=fields, layout_reason=layout.reason,
            requested_max_tokens=self.options.max_tokens if isinstance(self.encoder, Encoder) else self.max_tokens, first_broken=first.get(BROKEN),
            sources=len(self.source.files), skipped=self.source.skipped, tokenizer=str(self.tokenizer), vocab_size=meta.vocab_size, dtype=meta.dtype,
            seconds=seconds, rows_per_s=self._rate(counts.rows_in), peak_bytes=self.peak.bytes, start_bytes=self.start_bytes,
            host_limit_bytes=self.options.host_limit_bytes, size_bytes=meta.size_bytes, resumed_rows=self.resumed_out,
            started_over=self.earlier.discarded, fingerprint=meta.fingerprint,
        )  # fmt: skip

    def _encoded(self) -> Iterator[tuple[Chunk, EncodedRows]]:
        """Chunks in order, encoded."""
        chunks = read_ahead(self.source.chunks(skip=self.counts.chunks), in_flight=2)
        parts: list[EncodedRows] = []
        encoded = in_order(self._encode, self._pieces(chunks), threads=THREADS, in_flight=PIECES_IN_FLIGHT)
        for chunk, part, last in encoded:
            parts.append(part)
            if last:
                yield chunk, EncodedRows.join(parts)
                parts = []

    def _pieces(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, pa.RecordBatch, bool]]:
        for chunk in chunks:
            pieces = list(in_pieces(chunk.rows, piece_bytes=self.piece_bytes))
            for number, rows in enumerate(pieces, start=1):
                yield chunk, rows, number == len(pieces)

    def _encode(self, piece: tuple[Chunk, pa.RecordBatch, bool]) -> tuple[Chunk, EncodedRows, bool]:
        chunk, rows, last = piece
        encoded = self.encoder(rows)
        if encoded.rows_used + len(encoded.drops) != rows.num_rows:
            raise InternalError(
                f"{type(self.encoder).__name__} used {encoded.rows_used:,} rows of {rows.num_rows:,} and dropped {len(encoded.drops):,}"
            )
        return chunk, encoded, last

    def _write(self, item: tuple[Chunk, EncodedRows]) -> tuple[int, int]:
        """Add one chunk to the files and the counts, in one thread. Returns rows and bytes of the source read so far."""
        chunk, encoded = item
        self.bad_rows.add(chunk, refused=[named(chunk, drop) for drop in encoded.drops if drop.refused])
        if not self.counts.chunks:
            self._check_space(chunk, encoded)
        self.counts.add(chunk, encoded)
        self.counts.bad, first = self.bad_rows.broken, self.bad_rows.first
        self.counts.first_bad = None if first is None else [first.file, first.line, first.message]
        if self.writer.add(encoded.tokens, encoded.lengths):
            self._save()
        return self.counts.rows_in, chunk.read_bytes

    def _check_space(self, chunk: Chunk, encoded: EncodedRows) -> None:
        """Extrapolate the size from the first chunk, before anything large is written."""
        space, total = Space.around(self.part), self.source.total_bytes
        if space is None or not chunk.read_bytes or not total:
            return
        index_bytes = len(encoded.lengths) * (12 + 4 * len(self.fields))
        needed = (encoded.tokens.nbytes + index_bytes) * max(1.0, total / chunk.read_bytes)
        if needed > space.free_bytes:
            raise BadData(
                f"{self.output}: the token store will take about {show_bytes(needed)} and the disk has "
                f"{show_bytes(space.free_bytes)} free. Try: free some, or another disk with output=."
            )

    def _save(self) -> None:
        """After each finished file: what a later run needs to continue."""
        files = [asdict(file) for file in self.writer.files]
        content = {"key": self.key, "counts": asdict(self.counts), "files": files}
        write_atomic(self.part / _PROGRESS_FILE, json.dumps(content))

    def _by_field(self, values: Sequence[int]) -> dict[str, int]:
        return dict(zip(self.length_fields, values, strict=True))

    def _rate(self, rows_in: int) -> float:
        return (rows_in - self.resumed_in) / max(self.run_s, 1e-9)


def _text_encoder(layout: Layout, facts: TokenizerFacts, tokenizer: Path, options: TokenizeOptions) -> Encoder:
    return Encoder(
        fields=layout.fields, tokenizer=load_tokenizer(tokenizer), max_tokens=options.limits(layout.fields),
        keep_end=options.keeps_end(layout.fields, conversations=layout.kind == "conversations"), eos_id=facts.eos_id,
        dtype=token_dtype(facts.vocab_size), special=special_words(tokenizer),
    )  # fmt: skip


def _length_percentiles(store: Store) -> list[dict[str, int]]:
    """By field, the lengths that 50, 90 and 99 % of the rows do not exceed."""
    counts = [np.zeros(longest + 1, dtype=np.int64) for longest in store.longest]
    for first in range(0, len(store), _LENGTHS_AT_ONCE):
        shapes = store.shapes(np.arange(first, min(len(store), first + _LENGTHS_AT_ONCE)))
        for number, count in enumerate(counts):
            count += np.bincount(shapes[:, number], minlength=len(count))
    return [{f"p{share}": _percentile(count, share) for share in PERCENTILES} for count in counts]


def _percentile(count: npt.NDArray[np.int64], share: int) -> int:
    """The smallest length that is not exceeded by `share` percent of the rows."""
    below = np.cumsum(count)
    return int(np.searchsorted(below, share / 100 * below[-1]))


def _take_over(part: Path, key: dict[str, Any]) -> _Earlier:
    """What an earlier run of the same rows has finished; everything else in the folder is removed."""
    earlier = _read_progress(part, key)
    keep = {file.name for file in earlier.files} | ({_PROGRESS_FILE} if earlier.files else set())
    for path in part.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in keep:
            path.unlink()
    return earlier


def _read_progress(part: Path, key: dict[str, Any]) -> _Earlier:
    path = part / _PROGRESS_FILE
    if not path.is_file():
        return _Earlier(counts=Counts())
    try:
        content = read_json(path.read_bytes())
        files = tuple(parse_object(FileFacts, file) for file in content["files"])
        changed = [name for name in key if content["key"].get(name) != key[name]]
        if changed:
            return _Earlier(counts=Counts(), discarded=f"it had another {' and '.join(changed)}")
        check_files(part, files, contents=True)
        return _Earlier(counts=Counts(**content["counts"]), files=files)
    except (ValueError, KeyError, TypeError, AttributeError):
        return _Earlier(counts=Counts(), discarded=f"its {_PROGRESS_FILE} cannot be read")
    except BadData as error:
        return _Earlier(counts=Counts(), discarded=str(error).partition(". Try")[0])
