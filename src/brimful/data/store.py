"""The token store: rows as tokens in memory-mapped Arrow files, shared by every worker and process at no extra memory.

    STORE/
    ├── tokens-00000.arrow   one column `tokens: list<uint16>`: all fields of a row one after the other, each with its eos
    ├── index-00000.arrow    as many rows: `start: int64`, where the row begins, and the length in tokens of each field
    ├── tokens-00001.arrow   … about a million rows per file
    ├── tokenizer/           a copy of the tokenizer the tokens were made with
    ├── notes.json           if there is something to know of rows: by reason, how many, and the first
    └── store.json           written last: what is in here, and the size and checksums of every file

Tokens are two bytes each (four where the vocabulary exceeds 65,536), uncompressed, so that a row is a view of the file:
nothing is read, parsed or copied before it is used. `start` counts tokens from the first byte of the file. Ten million rows
of chat are 2.6 GB on disk; opening them takes 2 ms and 0.04 MiB of a process's own memory, verifying them 3 s, and random
rows are read at 800,000/s. MADV_RANDOM is not used: with a cold cache it made reads 20 times slower, because the kernel's
read-ahead soon has the whole store in RAM.

Rows of a causal model have a field `tokens` and, where only some of them are trained on, a field `spans`: run lengths that
alternate untrained, trained, untrained … from the first token on; tokens after the last run are untrained. Spans are stored
as one more list of numbers, but they have no length in tokens: `shapes`, `longest` and `mean_lengths` leave them out.
`spans_of` and `trained` turn a mask into spans and back.

A folder without `store.json` is an unfinished store. A new file begins at about a million rows or 256 M tokens, so an
interrupted writer loses a minute's work at most; it keeps one record batch and one file's lengths in memory, some 20 MB.

Anybody can read a store with pyarrow alone:

    import pyarrow as pa
    tokens = pa.ipc.open_file(pa.memory_map("STORE/tokens-00000.arrow")).read_all()["tokens"]
    lengths = pa.ipc.open_file(pa.memory_map("STORE/index-00000.arrow")).read_all()
    prompt = tokens[7].values[: lengths["prompt"][7].as_py()]
"""

import dataclasses
import json
import mmap
import operator
import shutil
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brimful.errors import BadData, InternalError
from brimful.files import block_hashes, damage, json_sha256, parse_object, read_json, sha256, sync, write_atomic

VERSION = 2
"""The version of the format; another one is refused."""
NAME = "store.json"
NOTES = "notes.json"
SPANS = "spans"
"""The field that says which tokens of a row are trained on."""
LONGEST_SPAN = 2**16 - 1
"""A longer run becomes several with runs of 0 in between, so that spans fit the two bytes of a token."""
FILE_ROWS = 1_000_000
FILE_TOKENS = 256 * 2**20
BATCH_ROWS = 8_192
"""Rows of a record batch: a reader that takes whole batches gets 2 MB of chat at a time."""
TOKENIZER_FILES = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template*",
)  # fmt: skip
"""What makes up a tokenizer in a folder that may also hold a model's weights."""
_AGAIN = "Try: copy it again, or tokenize the rows again."

Tokens: TypeAlias = npt.NDArray[Any]
Indices: TypeAlias = Sequence[int] | npt.NDArray[Any]


class Store:
    """A map-style dataset: `store[7]` is `{"prompt": array, "response": array}`, read-only views of the file."""

    def __init__(self, path: Path, meta: "StoreMeta") -> None:
        self.path, self.meta = path, meta
        self.fields = meta.fields
        self.length_fields = meta.length_fields
        names = [file.name for file in meta.files if file.rows]
        self._tokens = [_map_tokens(path / name, meta.dtype) for name in names if name.startswith("tokens")]
        indexes = [_map_index(path / name, meta.fields) for name in names if name.startswith("index")]
        self._starts = [index[0] for index in indexes]
        self._lengths = [index[1:] for index in indexes]
        self._bounds = np.cumsum([0, *(len(starts) for starts in self._starts)])
        self._firsts: list[int] = self._bounds[:-1].tolist()
        if self._bounds[-1] != meta.rows or len(self._tokens) != len(indexes):
            raise BadData(f"{path}: its index has {self._bounds[-1]:,} rows and {NAME} says {meta.rows:,}. {_AGAIN}")

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> "Store":
        """Map a store. `verify` reads all of it once (1.5 GB/s) and detects any flipped byte; sizes are always checked."""
        folder = Path(path)
        if not (folder / NAME).is_file():
            raise BadData(_why_no_store(folder))
        meta = StoreMeta.read(folder)
        check_files(folder, meta.files, contents=verify)
        return cls(folder, meta)

    def __len__(self) -> int:
        return self.meta.rows

    def __getitem__(self, index: int) -> dict[str, Tokens]:
        number = operator.index(index)
        place = number + len(self) if number < 0 else number
        if not 0 <= place < len(self):
            raise IndexError(f"row {number} of a store of {len(self):,} rows")
        file = bisect_right(self._firsts, place) - 1
        within, row = place - self._firsts[file], {}
        start = int(self._starts[file][within])
        for field, lengths in zip(self.fields, self._lengths[file], strict=True):
            end = start + int(lengths[within])
            row[field], start = self._tokens[file][start:end], end
        return row

    def __getitems__(self, indices: Indices) -> list[dict[str, Tokens]]:
        """Many rows at once, as torch's DataLoader requests them: the index is read for all of them together."""
        places = self._places(indices)
        rows: list[Any] = [None] * len(places)
        for file, positions, within in self._by_file(places):
            edges = [self._starts[file][within]]
            for lengths in self._lengths[file]:
                edges.append(edges[-1] + lengths[within])
            views = _row_views(self._tokens[file], self.fields, [edge.tolist() for edge in edges])
            for position, row in zip(positions.tolist(), views, strict=True):
                rows[position] = row
        return rows

    def shapes(self, indices: Indices) -> npt.NDArray[np.int64]:
        """Lengths in tokens of these rows: one line per row, one column per field of tokens. Reads the index only."""
        places = self._places(indices)
        columns = [self.fields.index(field) for field in self.length_fields]
        lengths = np.empty((len(places), len(columns)), dtype=np.int64)
        for file, positions, within in self._by_file(places):
            for number, column in enumerate(columns):
                lengths[positions, number] = self._lengths[file][column][within]
        return lengths

    @property
    def longest(self) -> tuple[int, ...]:
        """The largest length of each field of tokens."""
        return tuple(self.meta.longest[field] for field in self.length_fields)

    @property
    def mean_lengths(self) -> tuple[float, ...]:
        """The mean length of each field of tokens."""
        return tuple(self.meta.tokens[field] / max(1, self.meta.rows) for field in self.length_fields)

    @property
    def fingerprint(self) -> str:
        """Changes when any token, their order or a special id does."""
        return self.meta.fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, it is its path: a spawned worker maps the files itself and need not verify them again."""
        return _reopen, (str(self.path.absolute()), self.fingerprint)

    def _places(self, indices: Indices) -> npt.NDArray[np.int64]:
        """Positions from 0; negative indices count from the end."""
        numbers = np.asarray(indices)
        if numbers.dtype.kind not in "iu" and len(numbers):
            raise TypeError(f"indices of a store must be integers, not {numbers.dtype}")
        places = numbers.astype(np.int64)
        places = np.where(places < 0, places + len(self), places)
        outside = (places < 0) | (places >= len(self))
        if outside.any():
            raise IndexError(f"row {numbers[outside][0]} of a store of {len(self):,} rows")
        return places

    def _by_file(self, places: npt.NDArray[np.int64]) -> Iterable[tuple[int, npt.NDArray[Any], npt.NDArray[Any]]]:
        """For each file that has some of these rows: their positions in `places`, and their positions in the file."""
        if len(self._starts) == 1:
            yield 0, np.arange(len(places)), places
            return
        order = np.argsort(places, kind="stable")
        ordered = places[order]
        edges = np.searchsorted(ordered, self._bounds)
        for file in np.flatnonzero(np.diff(edges)).tolist():
            part = slice(edges[file], edges[file + 1])
            yield file, order[part], ordered[part] - self._bounds[file]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """One file of the store as it was written."""

    name: str
    """Within the store: `tokens-00000.arrow`, `tokenizer/tokenizer.json`."""
    size_bytes: int
    sha256: tuple[str, ...]
    """The hash of each block of 64 MiB."""
    rows: int = 0
    """Rows of a tokens or index file."""

    @classmethod
    def of(cls, folder: Path, name: str, *, rows: int = 0) -> "FileFacts":
        """Reads the whole file."""
        path = folder / name
        return cls(name=name, size_bytes=path.stat().st_size, sha256=block_hashes([path])[0], rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMeta:
    """Everything in `store.json`. Lengths and tokens include the eos that ends each field."""

    fields: tuple[str, ...]
    dtype: str
    """`uint16`, or `int32` where the vocabulary exceeds 65,536."""
    rows: int
    tokens: dict[str, int]
    """By field, over all rows."""
    longest: dict[str, int]
    """By field, the tokens of the longest row."""
    max_tokens: dict[str, int]
    """By field, the length to which longer ones were truncated, eos included."""
    eos_id: int
    pad_id: int | None
    """None where the tokenizer has none."""
    vocab_size: int
    tokenizer_fingerprint: str
    sources: tuple[str, ...] = ()
    """The files it was made from."""
    rows_in: int
    dropped: dict[str, int]
    """Rows of the source that are not in here, by reason."""
    truncated: dict[str, int]
    """Rows truncated, by field."""
    files: tuple[FileFacts, ...]
    version: int = VERSION

    @property
    def length_fields(self) -> tuple[str, ...]:
        """The fields that hold tokens: all but the spans."""
        return length_fields(self.fields)

    @property
    def fingerprint(self) -> str:
        """Changes with the tokens, their order, the fields and the special ids, not with where they came from."""
        content = {
            "sides": self.fields, "dtype": self.dtype, "rows": self.rows, "eos": self.eos_id, "pad": self.pad_id,
            "vocab": self.vocab_size, "files": [[file.name, file.sha256] for file in self.files if file.rows],
        }  # fmt: skip
        return sha256(json.dumps(content))[:32]

    @property
    def size_bytes(self) -> int:
        """The size of all files on disk except `store.json`."""
        return sum(file.size_bytes for file in self.files)

    def to_text(self) -> str:
        content = asdict(self)
        return json.dumps({"sha256": json_sha256(content), **content}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> "StoreMeta":
        """From the `store.json` of a store's folder, which must exist."""
        path = folder / NAME
        try:
            content = read_json(path.read_bytes())
            version = content["version"]
        except (OSError, ValueError, KeyError) as error:
            raise BadData(f"{path} cannot be read ({type(error).__name__}). {_AGAIN}") from None
        if version != VERSION:
            raise BadData(
                f"{path} has format version {version}, and this Brimful reads version {VERSION}. "
                "Try: tokenize the rows again, or use the Brimful that made it."
            )
        checksum = content.pop("sha256", None)
        with suppress(ValueError):
            if checksum == json_sha256(content):
                return parse_object(cls, content)
        raise BadData(f"{path} was changed after it was written: its checksum differs. {_AGAIN}")


def check_files(folder: Path, files: Sequence[FileFacts], *, contents: bool) -> None:
    """Every file exists with its size and, with `contents`, its checksums. Sizes first: they cost nothing."""
    for hashes in (False, True) if contents else (False,):
        for file in files:
            if problem := damage(folder, file.name, file.size_bytes, file.sha256 if hashes else None):
                raise BadData(f"{folder}: {problem}. {_AGAIN}")


@dataclass
class StoreWriter:
    """Appends rows to a folder that becomes a store with `finish`. `files` are those of an earlier, interrupted writer."""

    folder: Path
    fields: tuple[str, ...]
    vocab_size: int
    files: list[FileFacts] = dataclasses.field(default_factory=list)
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
        return sum(file.rows for file in self.files) // 2 + self._rows

    def add(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> bool:
        """Rows one after the other, fields within a row too; `lengths` has a line per row, a column per field.

        True when that filled the file: it is then complete, synced to disk and in `files`.
        """
        ends = np.cumsum(lengths.sum(axis=1, dtype=np.int64))
        if lengths.shape[1] != len(self.fields) or len(tokens) != (ends[-1] if len(ends) else 0):
            raise InternalError(f"{len(tokens)} tokens do not match the lengths {lengths.shape}")
        ids = self._without_spans(tokens, lengths)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise InternalError(f"token {int(ids.max())} is outside the vocabulary of {self.vocab_size}")
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
        """End the open file: write its index, sync both and take their checksums."""
        if self._open is None:
            return
        number = len(self.files) // 2
        tokens, index = f"tokens-{number:05}.arrow", f"index-{number:05}.arrow"
        for part in self._open:
            part.close()
        lengths = np.concatenate(self._lengths)
        _write_index(self.folder / index, _starts(self.folder / tokens, self.dtype, lengths), lengths, self.fields)
        for name in (tokens, index):
            sync(self.folder / name)
            self.files.append(FileFacts.of(self.folder, name, rows=self._rows))
        self._open, self._lengths, self._rows, self._tokens = None, [], 0, 0

    def finish(self, *, tokenizer: Path | None, notes: str = "", **facts: Any) -> StoreMeta:
        """Seal, copy the tokenizer, write `store.json`. `facts` are the fields of `StoreMeta` the writer cannot know, `notes` the
        text of `notes.json`."""
        self.seal()
        copied = [] if tokenizer is None else _copy_tokenizer(tokenizer, self.folder)
        if notes:
            write_atomic(self.folder / NOTES, notes)
            copied.append(FileFacts.of(self.folder, NOTES))
        tokens, longest = self._totals()
        meta = StoreMeta(
            fields=self.fields, dtype=self.dtype, vocab_size=self.vocab_size, rows=self.rows, tokens=tokens, longest=longest,
            files=(*self.files, *copied), **facts,
        )  # fmt: skip
        write_atomic(self.folder / NAME, meta.to_text())
        return meta

    def abandon(self) -> None:
        """Close what is open; the next writer overwrites the incomplete file."""
        for part in self._open or ():
            with suppress(OSError, pa.ArrowException):  # the disk may be full
                part.close()
        self._open = None

    def _without_spans(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The ids alone: a run may be longer than the vocabulary is large."""
        if SPANS not in self.fields:
            return tokens
        is_id = np.array([field != SPANS for field in self.fields])
        ids: npt.NDArray[Any] = tokens[np.repeat(np.tile(is_id, len(lengths)), lengths.ravel())]
        return ids

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

    def _totals(self) -> tuple[dict[str, int], dict[str, int]]:
        """Tokens and longest row of each field, read back from what was written."""
        tokens, longest = dict.fromkeys(self.fields, 0), dict.fromkeys(self.fields, 0)
        for file in self.files[1::2]:
            batch = pa.ipc.open_file(pa.memory_map(str(self.folder / file.name))).get_batch(0)
            for field in self.fields:
                lengths = column_numbers(batch.column(field))
                tokens[field] += int(lengths.sum(dtype=np.int64))
                longest[field] = max(longest[field], int(lengths.max()))
        return tokens, longest


def length_fields(fields: Iterable[str]) -> tuple[str, ...]:
    """The fields that hold tokens: all but the spans."""
    return tuple(field for field in fields if field != SPANS)


def spans_of(mask: Sequence[bool] | npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """The run lengths of a mask: untrained, trained, untrained … up to the end of the last trained run."""
    flags = np.asarray(mask, dtype=bool)
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    runs = np.diff(edges, prepend=0)
    if len(runs) and int(runs.max()) > LONGEST_SPAN:
        runs = np.array([part for run in runs.tolist() for part in _split_run(run)])
    return runs.astype(np.int32)


def _split_run(run: int) -> list[int]:
    """`[65535, 0, 4465]` for 70,000: the same tokens, with runs of nothing in between."""
    full, rest = divmod(run, LONGEST_SPAN)
    parts = [LONGEST_SPAN] * full + [rest] * (rest > 0 or not full)
    return [part for length in parts for part in (0, length)][1:]


def trained(spans: Sequence[int] | Tokens, length: int) -> npt.NDArray[np.bool_]:
    """Which tokens of a row of this length are trained on."""
    runs = np.asarray(spans, dtype=np.int64)
    total = int(runs.sum())
    if total > length:
        raise ValueError(f"spans of {total:,} tokens for a row of {length:,}")
    mask = np.zeros(length, dtype=bool)
    mask[:total] = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    return mask


def token_dtype(vocab_size: int) -> str:
    """Two bytes where every id fits."""
    return "uint16" if vocab_size <= 2**16 else "int32"


def column_numbers(column: pa.Array) -> Tokens:
    """A column without nulls as a view. Arrow's own `to_numpy` imports pandas, 30 MB in every worker."""
    dtype = np.dtype(column.type.to_pandas_dtype())
    return np.frombuffer(column.buffers()[1], dtype, count=len(column), offset=column.offset * dtype.itemsize)


def _row_views(tokens: Tokens, fields: tuple[str, ...], edges: list[list[int]]) -> list[dict[str, Tokens]]:
    """Views between these edges. Two fields are the common case; written out they take half the time."""
    if len(fields) == 2:
        first, second = fields
        return [{first: tokens[a:b], second: tokens[b:c]} for a, b, c in zip(*edges, strict=True)]
    steps = zip(*edges, strict=True)
    return [{field: tokens[step[n] : step[n + 1]] for n, field in enumerate(fields)} for step in steps]


def _reopen(path: str, fingerprint: str) -> Store:
    store = Store.open(path, verify=False)
    if store.fingerprint != fingerprint:
        raise BadData(f"{path} was replaced by another store while it was in use. Try: start again.")
    return store


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def _map_tokens(path: Path, dtype: str) -> Tokens:
    mapping = _map(path)
    return np.frombuffer(mapping, dtype=dtype, count=len(mapping) // np.dtype(dtype).itemsize)


def _map_index(path: Path, fields: tuple[str, ...]) -> list[Tokens]:
    """`start` and the lengths of each field. The file has one record batch, so each column is contiguous in the mapping."""
    try:
        batch = pa.ipc.open_file(pa.py_buffer(_map(path))).get_batch(0)
        return [column_numbers(batch.column(name)) for name in ("start", *fields)]
    except (pa.ArrowInvalid, KeyError, OSError) as error:
        raise BadData(f"{path} is damaged ({type(error).__name__}). {_AGAIN}") from None


def _why_no_store(path: Path) -> str:
    """Why a path is not a store, and what to do with what it is."""
    advice = "Try: `brimful data tokenize`."
    if not path.exists():
        return f"there is no token store at {path}. {advice}"
    if path.is_file():
        return f"{path} is a {path.suffix.lstrip('.') or 'plain'} file, not a token store. {advice}"
    if list(path.glob("tokens-*.arrow")):
        return f"{path} is an unfinished token store without {NAME}. Try: the same `brimful data tokenize` again."
    if (path / "tokenizer.json").is_file():
        return f"{path} is a tokenizer, not a token store. Try: `brimful data tokenize FILES --tokenizer {path}`."
    for suffix in ("parquet", "jsonl", "json", "csv"):
        if any(path.glob(f"*.{suffix}*")):
            return f"{path} is a folder of {suffix} files, not a token store. {advice}"
    return f"{path} is not a token store, since it has no {NAME}. {advice}"


def _starts(path: Path, dtype: str, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Where each row begins in the file, in tokens: read from the written file, because Arrow puts headers in between."""
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


def _write_index(path: Path, starts: Tokens, lengths: npt.NDArray[np.int32], fields: Sequence[str]) -> None:
    """One record batch, so that each column is contiguous once mapped."""
    batch = pa.record_batch(
        [pa.array(starts), *(pa.array(lengths[:, n].copy()) for n in range(len(fields)))], names=["start", *fields]
    )
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _copy_tokenizer(source: Path, folder: Path) -> list[FileFacts]:
    """The tokenizer's files, and nothing else that is beside them."""
    target = folder / "tokenizer"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    names = sorted({path.name for pattern in TOKENIZER_FILES for path in source.glob(pattern) if path.is_file()})
    for name in names:
        shutil.copyfile(source / name, target / name)
        sync(target / name)
    return [FileFacts.of(folder, f"tokenizer/{name}") for name in names]
