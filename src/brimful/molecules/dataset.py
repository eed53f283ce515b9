"""A file of rows with a column of SMILES, as whole columns: csv and tsv, also compressed, and parquet.

A column is of numbers where everything in it that is not blank is one, else of text. A blank is NaN, or the empty text:
a label that was not measured must not become a zero.
"""

import hashlib
import logging
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from brimful.errors import BadData, BadOption, MissingExtra, in_one_line
from brimful.machine.host import Host, may_spawn
from brimful.molecules.spec_file import near

# RDKit's one pass over a list of SMILES: read each, or say why not, and take down what the splits need.
#
# Reading a molecule takes about half of the 0.3 ms that a molecule costs here, so it is read once. RDKit keeps Python's
# lock while it reads (two threads took 1.3 times as long as one); processes are used from `_WORTH_PROCESSES` molecules on,
# and they are spawned, since the caller may have threads or a GPU open. A process that dies costs time, not the result.


_CHUNK = 1000
"""Molecules that a process takes at a time: about half a second, which is also the beat of the progress."""
_WORTH_PROCESSES = 6000
"""Fewer are done before other processes have imported RDKit."""
_MOST_PROCESSES = 16


class Found(NamedTuple):
    """What RDKit says of one SMILES."""

    reason: str
    """Why it cannot be used; empty where it can."""
    canonical: str = ""
    scaffold: str = ""
    heavy_atoms: int = 0
    rings: int = 0


def rdkit_version() -> str:
    """Of the RDKit that is installed; what it says of a molecule may change with it."""
    try:
        from rdkit import rdBase
    except ImportError:
        raise MissingExtra("rdkit", "mol") from None
    return str(rdBase.rdkitVersion)


def examine(smiles: Sequence[str], say: Callable[[str], object] = lambda phrase: None) -> list[Found]:
    """All of them in order; in several processes where that is faster."""
    rdkit_version()
    chunks = [list(smiles[start : start + _CHUNK]) for start in range(0, len(smiles), _CHUNK)]
    done: dict[int, list[Found]] = {}
    processes = min(Host.detect().cores, len(chunks), _MOST_PROCESSES)
    if processes > 1 and len(smiles) >= _WORTH_PROCESSES and may_spawn():
        _in_processes(chunks, done, processes, lambda: _tell(done, len(smiles), say))
    for index, chunk in enumerate(chunks):
        if index not in done:
            done[index] = examine_here(chunk)
            _tell(done, len(smiles), say)
    return [found for index in range(len(chunks)) for found in done[index]]


def examine_here(smiles: Sequence[str]) -> list[Found]:
    """All of them in this process, without a word of RDKit's on the terminal."""
    from rdkit import rdBase

    with rdBase.BlockLogs():
        found = [_look(one) for one in smiles]
    return [one if one is not None else Found(_why_not(text)) for one, text in zip(found, smiles, strict=True)]


def _in_processes(
    chunks: list[list[str]], done: dict[int, list[Found]], processes: int, tell: Callable[[], object]
) -> None:
    """Fill `done`; what a process that died leaves undone is left to the caller."""
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_ignore_interrupts)
    try:
        asked = {pool.submit(examine_here, chunk): index for index, chunk in enumerate(chunks)}
        for future in as_completed(asked):
            done[asked[future]] = future.result()
            tell()
    except BrokenProcessPool:
        logging.getLogger("brimful").warning("a process that reads molecules died; going on without help")
    finally:
        pool.shutdown(cancel_futures=True)


def _ignore_interrupts() -> None:
    """Ctrl-C reaches every process of the terminal; the one that asked ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _tell(done: dict[int, list[Found]], total: int, say: Callable[[str], object]) -> None:
    say(f"read {sum(map(len, done.values())):,} of {total:,} molecules")


def _look(smiles: str) -> Found | None:
    """None where RDKit cannot read it. An empty SMILES is a molecule to RDKit, and none to us."""
    from rdkit import Chem
    from rdkit.Chem.Scaffolds import MurckoScaffold

    molecule = Chem.MolFromSmiles(smiles)
    if molecule is None:
        return None
    if not molecule.GetNumHeavyAtoms():
        return Found("no atoms" if smiles else "blank")
    try:
        # Without stereochemistry: fingerprints and most encoders give mirror images one and the same features.
        canonical = Chem.MolToSmiles(molecule, isomericSmiles=False)
        scaffold = Chem.MolToSmiles(MurckoScaffold.GetScaffoldForMol(molecule), isomericSmiles=False)
    except (ValueError, RuntimeError) as error:
        return Found(f"RDKit reads it and finds no scaffold: {str(error).strip().splitlines()[0]}")
    return Found("", canonical, scaffold, molecule.GetNumHeavyAtoms(), molecule.GetRingInfo().NumRings())


def _why_not(smiles: str) -> str:
    """RDKit's own words, on one line: it only ever writes them to its log."""
    from rdkit import Chem

    with _overheard() as lines:
        Chem.MolFromSmiles(smiles)
    said = [re.sub(r"^\[[\d:]+\] |SMILES Parse Error: | for input: '.*'$", "", line) for line in lines]
    if not said:
        return "RDKit cannot read it"
    position = next((match[0] for line in said if (match := re.search(r"around position \d+", line))), None)
    return f"syntax error {position}" if position else said[0]


class _Ear(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: Any) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def _overheard() -> Iterator[list[str]]:
    """RDKit's log lines instead of the terminal's."""
    from rdkit import rdBase

    logger, ear = logging.getLogger("rdkit"), _Ear()
    before, logger.handlers = logger.handlers, [ear]
    silent = re.findall(r"(\S+):disabled", rdBase.LogStatus())
    rdBase.LogToPythonLogger()
    try:
        yield ear.lines
    finally:
        rdBase.LogToCppStreams()  # which also wakes those that the user had put to silence
        for name in silent:
            rdBase.DisableLog(name)
        logger.handlers = before


# What RDKit says of each molecule, aligned with the molecules, and kept on disk.
#
# RDKit takes 0.3 ms a molecule: 12 s of one core for the 41,127 rows of HIV, which come back from the cache in 0.3 s, the
# file included. The cache is keyed by every SMILES and RDKit's version, so that another file or another RDKit never meets
# facts that are not its own.


_FORMAT = 1
"""Of the cached table and of what is asked of RDKit."""

Say = Callable[[str], object]
Indices = npt.NDArray[np.int64] | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Of molecules, in their order."""

    canonical: npt.NDArray[np.object_]
    """Canonical SMILES without stereochemistry: equal for what counts as the same molecule."""
    scaffold: npt.NDArray[np.object_]
    """Bemis–Murcko scaffold as SMILES; empty for a molecule without a ring."""
    heavy_atoms: npt.NDArray[np.int64]
    rings: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.canonical)

    def take(self, indices: Indices) -> "Facts":
        """Of the molecules at these places."""
        at = np.asarray(indices, dtype=np.int64)
        return Facts(
            canonical=self.canonical[at],
            scaffold=self.scaffold[at],
            heavy_atoms=self.heavy_atoms[at],
            rings=self.rings[at],
        )


def facts_of(molecules: "Molecules", *, cache: Path | None = None, say: Say = lambda phrase: None) -> Facts:
    """Those that came with reading the molecules; asked of RDKit where they were made otherwise."""
    if molecules.facts is not None:
        return molecules.facts
    facts, unread = examined(list(molecules.smiles), cache=cache, say=say)
    if unread:
        place, reason = next(iter(unread.items()))
        raise BadData(f"{molecules.source}: RDKit cannot use {molecules.smiles[place]!r} ({reason}); leave it out")
    return facts


def examined(
    smiles: Sequence[str], *, cache: Path | None = None, say: Say = lambda phrase: None
) -> tuple[Facts, Mapping[int, str]]:
    """Facts of all these SMILES, and why those that cannot be used cannot, by their place; their facts mean nothing."""
    path = cache / f"facts-{_key(smiles)}.parquet" if cache else None
    columns = _read(path, len(smiles)) if path else None
    if columns is None:
        columns = _columns(examine(smiles, say))
        if path:
            _keep(path, columns, say)
    unread = {place: str(reason) for place, reason in enumerate(columns["reason"]) if reason}
    facts = Facts(
        canonical=np.array(columns["canonical"], dtype=object),
        scaffold=np.array(columns["scaffold"], dtype=object),
        heavy_atoms=np.array(columns["heavy_atoms"], dtype=np.int64),
        rings=np.array(columns["rings"], dtype=np.int64),
    )
    return facts, unread


def _columns(found: list[Found]) -> dict[str, list[Any]]:
    return {name: [getattr(one, name) for one in found] for name in Found._fields}


def _key(smiles: Sequence[str]) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {rdkit_version()} {len(smiles)}\n".encode())
    digest.update("\n".join(smiles).encode())
    return digest.hexdigest()[:24]


def _read(path: Path, rows: int) -> dict[str, list[Any]] | None:
    """The cached table; None where there is none, or what is there is damaged and has to be made again."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError):
        return None
    whole = table.num_rows == rows and table.column_names == list(Found._fields)
    return {name: table[name].to_pylist() for name in table.column_names} if whole else None


def _keep(path: Path, columns: dict[str, list[Any]], say: Say) -> None:
    """Whole or not at all: another sweep may read it at the same time, or write it. A full disk is told and no error."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), draft, compression="zstd")
        draft.replace(path)
    except (pa.ArrowException, OSError) as error:
        say(f"what RDKit said is not kept for the next time: {in_one_line(error)}")
        with suppress(OSError):
            draft.unlink(missing_ok=True)


Column = npt.NDArray[Any]
"""float64 with NaN for blanks, or str objects with "" for them."""

ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".csv.bz2", ".tsv.bz2", ".csv.zst", ".tsv.zst")
NOT_UTF8 = "not UTF-8"
"""What is said of a row of a csv file that is not."""
_SEPARATORS = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}
_LISTED = 20
"""Columns named in a message at most."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The rows of a file that are rows."""

    smiles: Column
    columns: Mapping[str, Column]
    rows: npt.NDArray[np.int64]
    """Which row of the file each is, counted from 0, without the header."""
    broken: tuple[tuple[int, str], ...] = ()
    """The rows that cannot be read, with the reason."""


def read_table(path: Path, *, smiles: str, columns: Sequence[str]) -> Table:
    """With these columns, or with all where none is named."""
    if not path.is_file():
        raise BadData(f"{path} is no file; name a table with a column of SMILES")
    if path.suffix.lower() == ".parquet":
        return _parquet(path, smiles, columns)
    if path.name.lower().endswith(ENDINGS):
        return _csv(path, smiles, columns)
    raise BadData(f"{path} is of no kind that is read here; give .parquet, {', '.join(ENDINGS[:4])}")


def _csv(path: Path, smiles: str, asked: Sequence[str]) -> Table:
    from brimful.data.read.files import TEXT, Field
    from brimful.data.read.tables import csv_columns, read_csv

    _check_start(path, smiles)
    names = _chosen(path, csv_columns(str(path)).usual, smiles, asked)
    stretches = list(read_csv(str(path), tuple(Field(name, TEXT) for name in names)))
    texts = {name: [text for one in stretches for text in one.rows.column(name).to_pylist()] for name in names}
    lines = np.concatenate([one.lines for one in stretches])
    broken = [one for stretch in stretches for one in stretch.broken]
    if not len(lines) and any(one.why == NOT_UTF8 for one in broken):
        raise BadData(f"{path} is {NOT_UTF8}; {_convert('gbk')}, or from the encoding it was saved in")
    order = np.sort(np.concatenate([lines, np.array([one.line for one in broken], dtype=np.int64)]))
    return Table(
        smiles=_text(texts.pop(smiles)),
        columns={name: column_of(column) for name, column in texts.items()},
        rows=np.searchsorted(order, lines),
        broken=tuple((int(np.searchsorted(order, one.line)), one.why) for one in broken),
    )


def _check_start(path: Path, smiles: str) -> None:
    """Another encoding, or another separator than the ending says, would make all of the header one strange name."""
    from brimful.data.read.files import ByteStream

    with ByteStream(str(path)) as stream:
        start = stream.read(4096)
    if b"\0" in start:
        raise BadData(f"{path} is {NOT_UTF8} but looks like UTF-16; {_convert('utf-16')}")
    header = start.split(b"\n")[0].decode(errors="replace").strip('\r"')
    own = "\t" if path.name.lower().endswith(tuple(one for one in ENDINGS if ".tsv" in one)) else ","
    other = next((one for one in _SEPARATORS if one in header), own) if own not in header else own
    if other != own and header != smiles:
        mend = {"\t": "call it .tsv", ",": "call it .csv"}.get(other, "write it with commas")
        raise BadData(
            f"{path} is read as columns between {_SEPARATORS[own]}, and its header has {_SEPARATORS[other]}; {mend}"
        )


def _convert(encoding: str) -> str:
    return f"convert it with iconv -f {encoding} -t utf-8"


def _parquet(path: Path, smiles: str, asked: Sequence[str]) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = _chosen(path, file.schema_arrow.names, smiles, asked)
            found = file.read(columns=names)
    except (pa.ArrowException, OSError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise BadData(f"{path}: no whole parquet file ({why}); get or write it again") from None
    columns = {name: _of_arrow(found[name]) for name in names}
    _refuse_other_types(path, found.schema, columns, smiles, asked)
    kept = {name: column for name, column in columns.items() if column is not None and name != smiles}
    written = columns[smiles]
    assert written is not None
    return Table(smiles=written, columns=kept, rows=np.arange(found.num_rows))


def _refuse_other_types(
    path: Path, schema: Any, columns: Mapping[str, Column | None], smiles: str, asked: Sequence[str]
) -> None:
    """SMILES are text, and what was asked for is text or numbers; other columns of lists and the like are passed over."""
    for name in (smiles, *asked):
        column = columns[name]
        if column is None or (name == smiles and column.dtype != object):
            wanted = "of text" if name == smiles else "of text or numbers"
            raise BadData(f"{path}: the column {name!r} is of {schema.field(name).type}; name one {wanted}")


def _chosen(path: Path, there: Sequence[str], smiles: str, asked: Sequence[str]) -> list[str]:
    """The columns to read. Every one that is not there is named at once, with what may be meant."""
    wanted = [smiles, *(name for name in asked if name != smiles)]
    missing = [name for name in wanted if name not in there]
    if missing:
        meant = {name: near(name, there, cutoff=0.5)[:2] for name in missing}
        likely = dict.fromkeys(one for found in meant.values() for one in found)
        hint = f"did you mean {' or '.join(map(repr, likely))}? " if likely else ""
        key = f'; say smiles = "{(meant[smiles] or ["…"])[0]}" under [[datasets]]' if smiles in missing else ""
        more = f" and {len(there) - _LISTED} more" if len(there) > _LISTED else ""
        raise BadOption(
            f"{path} has no column {', '.join(map(repr, missing))}; {hint}it has {', '.join(there[:_LISTED])}{more}{key}"
        )
    return wanted if asked else [smiles, *(name for name in there if name != smiles)]


def column_of(values: Iterable[Any]) -> Column:
    """Numbers where all that is not blank is a number, else text."""
    kept = [None if value is None or (isinstance(value, str) and not value.strip()) else value for value in values]
    try:
        return np.array([np.nan if value is None else float(value) for value in kept], dtype=np.float64)
    except ValueError:
        return _text(kept)


def _text(texts: Iterable[Any]) -> Column:
    return np.array(["" if text is None else str(text).strip() for text in texts], dtype=object)


def _of_arrow(column: Any) -> Column | None:
    """None for a type that is neither text nor a number nor a truth value. Text stays text, whatever it says."""
    import pyarrow.types as kind

    if kind.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if kind.is_string(column.type) or kind.is_large_string(column.type) or kind.is_string_view(column.type):
        return _text(column.to_pylist())
    if kind.is_integer(column.type) or kind.is_floating(column.type) or kind.is_boolean(column.type):
        return column_of(column.to_pylist())
    return None


# The molecules of one file: those RDKit can read, in the file's order, and a list of those it cannot.
#
# A SMILES that cannot be read is listed with RDKit's reason and left out. It is never replaced: a lone carbon atom in its
# place would be trained on as if it had been measured.


@dataclass(frozen=True, slots=True)
class Unread:
    """A row that is left out, and why."""

    row: int
    """Counted from 0, without the header."""
    smiles: str
    reason: str

    def __str__(self) -> str:
        return f"row {self.row}: {self.smiles!r} ({self.reason})"


@dataclass(frozen=True, kw_only=True)
class Molecules:
    """Molecules that can be used."""

    source: str
    """The file, for messages."""
    smiles: npt.NDArray[np.object_]
    """As written, without blanks around it."""
    rows: npt.NDArray[np.int64]
    """The row of each in the file, counted from 0, without the header."""
    columns: Mapping[str, Column]
    """The file's other columns, aligned."""
    rows_in: int
    """Rows of the file."""
    unread: tuple[Unread, ...] = ()
    facts: Facts | None = None
    """What RDKit said while it read them; `facts_of` gives it, or asks."""

    def __len__(self) -> int:
        return len(self.smiles)

    def take(self, indices: Indices) -> "Molecules":
        """The molecules at these places. What was left out of the file stays listed."""
        at = np.asarray(indices, dtype=np.int64)
        return replace(
            self,
            smiles=self.smiles[at],
            rows=self.rows[at],
            columns={name: column[at] for name, column in self.columns.items()},
            facts=self.facts.take(at) if self.facts is not None else None,
        )


def read_molecules(
    file: str | Path,
    *,
    smiles: str = "smiles",
    columns: Sequence[str] = (),
    cache: Path | None = None,
    say: Say = lambda phrase: None,
) -> Molecules:
    """All molecules of a csv, tsv (also .gz) or parquet file, with these columns, or all where none is named."""
    table = read_table(Path(file), smiles=smiles, columns=columns)
    return molecules_of(
        str(file),
        table.smiles,
        columns=table.columns,
        rows=table.rows,
        broken=[Unread(row, "", why) for row, why in table.broken],
        cache=cache,
        say=say,
    )


def molecules_of(
    source: str,
    smiles: Iterable[Any],
    *,
    columns: Mapping[str, Column],
    rows: npt.NDArray[np.int64] | None = None,
    broken: Sequence[Unread] = (),
    cache: Path | None = None,
    say: Say = lambda phrase: None,
) -> Molecules:
    """From SMILES at hand; the rows are counted where they are not given."""
    written = np.array([str(one).strip() for one in smiles], dtype=object)
    rows = np.arange(len(written)) if rows is None else rows
    facts, reasons = examined(list(written), cache=cache, say=say)
    unread = [*broken, *(Unread(int(rows[place]), written[place], reason) for place, reason in reasons.items())]
    kept = np.array([place for place in range(len(written)) if place not in reasons], dtype=np.int64)
    if not len(kept):
        first = f", the first in {min(unread, key=lambda one: one.row)}" if unread else ""
        raise BadData(f"{source} has no molecule that RDKit can read{first}; is the column of SMILES the right one?")
    return Molecules(
        source=source,
        smiles=written[kept],
        rows=rows[kept],
        columns={name: column[kept] for name, column in columns.items()},
        rows_in=len(written) + len(broken),
        unread=tuple(sorted(unread, key=lambda one: one.row)),
        facts=facts.take(kept),
    )
