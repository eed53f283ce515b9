"""The token store: rows as tokens in memory-mapped Arrow files, shared by every worker and process at no extra memory.

    STORE/
    ├── tokens-00000.arrow   one column `tokens: list<uint16>`: all sides of a row one after the other, each with its eos
    ├── index-00000.arrow    as many rows: `start: int64`, where the row begins, and for each side its length in tokens
    ├── tokens-00001.arrow   … about a million rows a file
    ├── tokenizer/           a copy of the tokenizer the tokens were made with
    └── store.json           written last: what is in here, and the size and checksums of every file

Tokens are two bytes each (four where the vocabulary exceeds 65,536), uncompressed, so that a row is a view of the file:
nothing is read, parsed or copied before it is used. `start` counts tokens from the first byte of the file. Ten million
rows of chat are 2.6 GB on disk; opening them takes 2 ms and 0.04 MiB of a process's own memory, checking them 3 s, and
random rows come at 800,000/s. The kernel is not told that reads are random (MADV_RANDOM): on a cold cache that made them
20 times slower, because its read-ahead soon has all of the store in RAM.

Anybody can read it with pyarrow alone:

    import pyarrow as pa
    tokens = pa.ipc.open_file(pa.memory_map("STORE/tokens-00000.arrow")).read_all()["tokens"]
    lengths = pa.ipc.open_file(pa.memory_map("STORE/index-00000.arrow")).read_all()
    prompt = tokens[7].values[: lengths["prompt"][7].as_py()]
"""

import mmap
import operator
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brimful.data.store.meta import NAME, StoreMeta, check_files
from brimful.errors import BadData

Tokens: TypeAlias = npt.NDArray[Any]
Indices: TypeAlias = Sequence[int] | npt.NDArray[Any]


class Store:
    """A map-style data set: `store[7]` is `{"prompt": array, "response": array}`, read-only views of the file."""

    def __init__(self, path: Path, meta: StoreMeta) -> None:
        self.path, self.meta = path, meta
        self.sides = meta.sides
        names = [one.name for one in meta.files if one.rows]
        self._tokens = [_map_tokens(path / name, meta.dtype) for name in names if name.startswith("tokens")]
        indexes = [_map_index(path / name, meta.sides) for name in names if name.startswith("index")]
        self._starts = [index[0] for index in indexes]
        self._lengths = [index[1:] for index in indexes]
        self._bounds = np.cumsum([0, *(len(starts) for starts in self._starts)])
        self._firsts: list[int] = self._bounds[:-1].tolist()
        if self._bounds[-1] != meta.rows or len(self._tokens) != len(indexes):
            raise BadData(f"{path}: its index has {self._bounds[-1]:,} rows and {NAME} says {meta.rows:,}; pack again")

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> "Store":
        """Map a store. `verify` reads all of it once (1.5 GB/s) and finds any flipped byte; sizes are always checked."""
        folder = Path(path)
        if not (folder / NAME).is_file():
            raise BadData(_what_it_is(folder))
        meta = StoreMeta.read(folder)
        check_files(folder, meta.files, contents=verify)
        return cls(folder, meta)

    def __len__(self) -> int:
        return self.meta.rows

    def __getitem__(self, index: int) -> dict[str, Tokens]:
        wanted = operator.index(index)
        place = wanted + len(self) if wanted < 0 else wanted
        if not 0 <= place < len(self):
            raise IndexError(f"row {wanted} of a store of {len(self):,} rows")
        file = bisect_right(self._firsts, place) - 1
        within, row = place - self._firsts[file], {}
        start = int(self._starts[file][within])
        for side, lengths in zip(self.sides, self._lengths[file], strict=True):
            end = start + int(lengths[within])
            row[side], start = self._tokens[file][start:end], end
        return row

    def __getitems__(self, indices: Indices) -> list[dict[str, Tokens]]:
        """Many rows at once, which torch's DataLoader asks for: the index is looked up for all of them together."""
        wanted = self._checked(indices)
        rows: list[Any] = [None] * len(wanted)
        for file, places, within in self._by_file(wanted):
            edges = [self._starts[file][within]]
            for lengths in self._lengths[file]:
                edges.append(edges[-1] + lengths[within])
            found = _rows(self._tokens[file], self.sides, [edge.tolist() for edge in edges])
            for place, row in zip(places.tolist(), found, strict=True):
                rows[place] = row
        return rows

    def shapes(self, indices: Indices) -> npt.NDArray[np.int64]:
        """Lengths in tokens of these rows: one line a row, one column a side. Touches the index only."""
        wanted = self._checked(indices)
        lengths = np.empty((len(wanted), len(self.sides)), dtype=np.int64)
        for file, places, within in self._by_file(wanted):
            for number, side in enumerate(self._lengths[file]):
                lengths[places, number] = side[within]
        return lengths

    @property
    def longest(self) -> tuple[int, ...]:
        """The largest length of each side."""
        return tuple(self.meta.longest[side] for side in self.sides)

    @property
    def mean_lengths(self) -> tuple[float, ...]:
        """The mean length of each side."""
        return tuple(self.meta.tokens[side] / max(1, self.meta.rows) for side in self.sides)

    @property
    def fingerprint(self) -> str:
        """Changes when any token, their order or a special id does."""
        return self.meta.fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, it is its path: a spawned worker maps the files itself and need not check them again."""
        return _reopen, (str(self.path.absolute()), self.fingerprint)

    def _checked(self, indices: Indices) -> npt.NDArray[np.int64]:
        """As an array of positions from 0; negative ones count from the end."""
        found = np.asarray(indices)
        if found.dtype.kind not in "iu" and len(found):
            raise TypeError(f"rows of a store are counted in whole numbers, not {found.dtype}")
        wanted = found.astype(np.int64)
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        outside = (wanted < 0) | (wanted >= len(self))
        if outside.any():
            raise IndexError(f"row {found[outside][0]} of a store of {len(self):,} rows")
        return wanted

    def _by_file(self, wanted: npt.NDArray[np.int64]) -> Iterable[tuple[int, npt.NDArray[Any], npt.NDArray[Any]]]:
        """For each file that has some of these rows: which of the wanted they are, and their position in the file."""
        if len(self._starts) == 1:
            yield 0, np.arange(len(wanted)), wanted
            return
        order = np.argsort(wanted, kind="stable")
        ordered = wanted[order]
        cuts = np.searchsorted(ordered, self._bounds)
        for file in np.flatnonzero(np.diff(cuts)).tolist():
            part = slice(cuts[file], cuts[file + 1])
            yield file, order[part], ordered[part] - self._bounds[file]


def _rows(tokens: Tokens, sides: tuple[str, ...], edges: list[list[int]]) -> list[dict[str, Tokens]]:
    """Views between these edges. Two sides are the common case; written out they take half the time."""
    if len(sides) == 2:
        one, two = sides
        return [{one: tokens[a:b], two: tokens[b:c]} for a, b, c in zip(*edges, strict=True)]
    steps = zip(*edges, strict=True)
    return [{side: tokens[step[n] : step[n + 1]] for n, side in enumerate(sides)} for step in steps]


def _reopen(path: str, fingerprint: str) -> Store:
    store = Store.open(path, verify=False)
    if store.fingerprint != fingerprint:
        raise BadData(f"{path} was packed anew while it was in use; start again")
    return store


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def _map_tokens(path: Path, dtype: str) -> Tokens:
    mapping = _map(path)
    return np.frombuffer(mapping, dtype=dtype, count=len(mapping) // np.dtype(dtype).itemsize)


def _map_index(path: Path, sides: tuple[str, ...]) -> list[Tokens]:
    """`start` and the lengths of each side: the file has one record batch, so each column is one stretch of the mapping."""
    try:
        batch = pa.ipc.open_file(pa.py_buffer(_map(path))).get_batch(0)
        return [column_numbers(batch.column(name)) for name in ("start", *sides)]
    except (pa.ArrowInvalid, KeyError, OSError) as error:
        raise BadData(f"{path} is damaged ({type(error).__name__}); copy it again or pack the rows again") from None


def column_numbers(column: pa.Array) -> Tokens:
    """A column without nulls as a view. Arrow's own `to_numpy` imports pandas, 30 MB in every worker."""
    dtype = np.dtype(column.type.to_pandas_dtype())
    return np.frombuffer(column.buffers()[1], dtype, count=len(column), offset=column.offset * dtype.itemsize)


def _what_it_is(path: Path) -> str:
    """Why a path is no store, and what to do with what it is."""
    pack = "pack it first with `brimful data pack`"
    if not path.exists():
        return f"there is no token store at {path}; make one with `brimful data pack`"
    if path.is_file():
        kind = path.suffix.lstrip(".") or "plain"
        return f"{path} is a {kind} file, not a token store: {pack}"
    if list(path.glob("tokens-*.arrow")):
        return f"{path} is an unfinished token store, without {NAME}; run the same `brimful data pack` again"
    if (path / "tokenizer.json").is_file():
        return f"{path} is a tokenizer's folder, not a token store: pack rows with it by `brimful data pack --tokenizer {path}`"
    for suffix in ("parquet", "jsonl", "json", "csv"):
        if any(path.glob(f"*.{suffix}*")):
            return f"{path} is a folder of {suffix} files, not a token store: {pack}"
    return f"{path} is not a token store: it has no {NAME}; make one with `brimful data pack`"
