"""The molecules of a file: those that RDKit can read, with facts that RDKit computes, and a list of the rows left out.

A SMILES that cannot be read is listed with RDKit's reason and left out. It is never replaced: a lone carbon atom in its
place would be trained on as if it had been measured. Likewise a blank label is NaN or the empty text, never 0.

RDKit takes 0.3 ms per molecule, half of it to read the SMILES: 12 s of one core for the 41,127 rows of HIV. So every
molecule is read once, in several processes where that is faster, and the facts are cached; reading the cache takes 0.3 s.
Its key is a hash of every SMILES and RDKit's version.
"""

import hashlib
import logging
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from brimful.errors import BadData, BadOption, MissingExtra, in_one_line
from brimful.files import atomic_path
from brimful.machine.host import Host, may_spawn
from brimful.molecules.spec_file import close_matches
from brimful.units import GiB

Progress = Callable[[str], object]
Indices = npt.NDArray[np.int64] | Sequence[int]
Column = npt.NDArray[Any]
"""float64 with NaN for blanks, or str objects with "" for them."""


def silent(phrase: str) -> None:
    """The default of `progress`."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What RDKit computes for each molecule, in their order."""

    canonical: npt.NDArray[np.object_]
    """Canonical SMILES without stereochemistry: equal for what counts as the same molecule."""
    scaffold: npt.NDArray[np.object_]
    """Bemis–Murcko scaffold as SMILES; empty for a molecule without a ring."""
    heavy_atoms: npt.NDArray[np.int64]
    rings: npt.NDArray[np.int64]

    def take(self, indices: Indices) -> "Facts":
        positions = np.asarray(indices, dtype=np.int64)
        return Facts(**{name: getattr(self, name)[positions] for name in Facts.__dataclass_fields__})


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
    """As written, without surrounding blanks."""
    rows: npt.NDArray[np.int64]
    """The row of each in the file, counted from 0, without the header."""
    columns: Mapping[str, Column]
    """The file's other columns, aligned."""
    rows_in: int
    """Rows of the file."""
    facts: Facts
    unread: tuple[Unread, ...] = ()

    def __len__(self) -> int:
        return len(self.smiles)

    def take(self, indices: Indices) -> "Molecules":
        """The molecules at these positions. `unread` stays as it is."""
        positions = np.asarray(indices, dtype=np.int64)
        columns = {name: column[positions] for name, column in self.columns.items()}
        return replace(
            self,
            smiles=self.smiles[positions],
            rows=self.rows[positions],
            columns=columns,
            facts=self.facts.take(positions),
        )


def read_molecules(
    file: str | Path, *, smiles: str = "smiles", columns: Sequence[str] = (), cache: Path | None = None, progress: Progress = silent
) -> Molecules:  # fmt: skip
    """All molecules of a csv, tsv (also compressed) or parquet file, with these columns, or all where none is named."""
    table = read_table(Path(file), smiles=smiles, columns=columns)
    broken = [Unread(row, "", reason) for row, reason in table.broken]
    return molecules_from(
        str(file), table.smiles, columns=table.columns, rows=table.rows, broken=broken, cache=cache, progress=progress
    )


def molecules_from(
    source: str,
    smiles: Iterable[Any],
    *,
    columns: Mapping[str, Column],
    rows: npt.NDArray[np.int64] | None = None,
    broken: Sequence[Unread] = (),
    cache: Path | None = None,
    progress: Progress = silent,
) -> Molecules:
    """From a list of SMILES. `rows` defaults to 0, 1, 2 …"""
    texts = np.array([str(text).strip() for text in smiles], dtype=object)
    rows = np.arange(len(texts)) if rows is None else rows
    facts, reasons = read_facts(list(texts), cache=cache, progress=progress)
    unread = [*broken, *(Unread(int(rows[index]), texts[index], reason) for index, reason in reasons.items())]
    kept = np.array([index for index in range(len(texts)) if index not in reasons], dtype=np.int64)
    if not len(kept):
        first = f", the first is {min(unread, key=lambda molecule: molecule.row)}" if unread else ""
        raise BadData(f"{source} has no molecule that RDKit can read{first}. Try: another column as smiles.")
    return Molecules(
        source=source,
        smiles=texts[kept],
        rows=rows[kept],
        columns={name: column[kept] for name, column in columns.items()},
        rows_in=len(texts) + len(broken),
        facts=facts.take(kept),
        unread=tuple(sorted(unread, key=lambda molecule: molecule.row)),
    )


# ---- The table: whole columns of csv, tsv and parquet --------------------------------------------------------------------

ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".csv.bz2", ".tsv.bz2", ".csv.zst", ".tsv.zst")
NOT_UTF8 = "not UTF-8"
"""The reason for a row of a csv file in another encoding."""
_SEPARATORS = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}
_LISTED = 20
"""The most columns that a message names."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The rows of a file that can be parsed."""

    smiles: Column
    columns: Mapping[str, Column]
    rows: npt.NDArray[np.int64]
    """Which row of the file each is, counted from 0, without the header."""
    broken: tuple[tuple[int, str], ...] = ()
    """Rows that cannot be parsed, with the reason."""


def read_table(path: Path, *, smiles: str, columns: Sequence[str]) -> Table:
    """With these columns, or with all where none is named."""
    if not path.is_file():
        raise BadData(f"{path} is not a file. Try: a table with a column of SMILES.")
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path, smiles, columns)
    if path.name.lower().endswith(ENDINGS):
        return _read_csv(path, smiles, columns)
    raise BadData(f"{path} has an unknown type. Try: .parquet, {', '.join(ENDINGS[:4])}.")


def _read_csv(path: Path, smiles: str, columns: Sequence[str]) -> Table:
    from brimful.data.read import files, tables

    _check_start(path, smiles)
    longest = files.longest_row(GiB)
    names = _choose_columns(path, tables.csv_schema(str(path), longest).common, smiles, columns)
    chunks = list(tables.read_csv(str(path), tuple(files.Column(name, files.TEXT) for name in names), longest))
    texts = {name: [text for chunk in chunks for text in chunk.rows.column(name).to_pylist()] for name in names}
    lines = np.concatenate([chunk.lines for chunk in chunks])
    broken = [problem for chunk in chunks for problem in chunk.broken]
    if not len(lines) and any(problem.message == NOT_UTF8 for problem in broken):
        raise BadData(f"{path} is {NOT_UTF8}. Try: `iconv -f gbk -t utf-8`, or from the encoding it was saved in.")
    order = np.sort(np.concatenate([lines, np.array([problem.line for problem in broken], dtype=np.int64)]))
    return Table(
        smiles=_text_column(texts.pop(smiles)),
        columns={name: column_from(column) for name, column in texts.items()},
        rows=np.searchsorted(order, lines),
        broken=tuple((int(np.searchsorted(order, problem.line)), problem.message) for problem in broken),
    )


def _check_start(path: Path, smiles: str) -> None:
    """Another encoding, or another separator than the ending says, would turn the whole header into one strange name."""
    from brimful.data.read.files import ByteStream

    with ByteStream(str(path)) as stream:
        start = stream.read(4096)
    if b"\0" in start:
        raise BadData(f"{path} is {NOT_UTF8} but looks like UTF-16. Try: `iconv -f utf-16 -t utf-8`.")
    header = start.split(b"\n")[0].decode(errors="replace").strip('\r"')
    own = "\t" if path.name.lower().endswith(tuple(ending for ending in ENDINGS if ".tsv" in ending)) else ","
    other = next((separator for separator in _SEPARATORS if separator in header), own) if own not in header else own
    if other != own and header != smiles:
        fix = {"\t": "rename it to .tsv", ",": "rename it to .csv"}.get(other, "write it with commas")
        raise BadData(f"{path} should have {_SEPARATORS[own]} between columns, but its header has {_SEPARATORS[other]}. Try: {fix}.")  # fmt: skip


def _read_parquet(path: Path, smiles: str, columns: Sequence[str]) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = _choose_columns(path, file.schema_arrow.names, smiles, columns)
            content = file.read(columns=names)
    except (pa.ArrowException, OSError) as error:
        raise BadData(f"{path} is not a whole parquet file ({in_one_line(error)}). Try: write it again.") from None
    arrays = {name: _arrow_column(content[name]) for name in names}
    for name in (smiles, *columns):
        array = arrays[name]
        if array is None or (name == smiles and array.dtype != object):
            wanted = "text" if name == smiles else "text or numbers"
            raise BadData(f"{path}: column {name!r} has the type {content.schema.field(name).type}. Try: a column of {wanted}.")  # fmt: skip
    others = {name: array for name, array in arrays.items() if array is not None and name != smiles}
    texts = arrays[smiles]
    assert texts is not None
    return Table(smiles=texts, columns=others, rows=np.arange(content.num_rows))


def _choose_columns(path: Path, available: Sequence[str], smiles: str, columns: Sequence[str]) -> list[str]:
    """The columns to read. Missing ones are all named at once, with close matches."""
    wanted = [smiles, *(name for name in columns if name != smiles)]
    missing = [name for name in wanted if name not in available]
    if not missing:
        return wanted if columns else [smiles, *(name for name in available if name != smiles)]
    matches = {name: close_matches(name, available, cutoff=0.5)[:2] for name in missing}
    likely = list(dict.fromkeys(name for names in matches.values() for name in names))
    more = f" and {len(available) - _LISTED} more" if len(available) > _LISTED else ""
    fix = f'smiles = "{(matches[smiles] or ["…"])[0]}" under [[datasets]]' if smiles in missing else ""
    advice = fix or " or ".join(map(repr, likely)) or "one of those"
    raise BadOption(
        f"{path} has no column {', '.join(map(repr, missing))}, only {', '.join(available[:_LISTED])}{more}. Try: {advice}."
    )


def column_from(values: Iterable[Any]) -> Column:
    """Numbers where all that is not blank is a number, else text."""
    kept = [None if value is None or (isinstance(value, str) and not value.strip()) else value for value in values]
    try:
        return np.array([np.nan if value is None else float(value) for value in kept], dtype=np.float64)
    except ValueError:
        return _text_column(kept)


def _text_column(texts: Iterable[Any]) -> Column:
    return np.array(["" if text is None else str(text).strip() for text in texts], dtype=object)


def _arrow_column(column: Any) -> Column | None:
    """None for other types than text, numbers and booleans. Text stays text even where it reads as a number."""
    import pyarrow.types as kind

    if kind.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if kind.is_string(column.type) or kind.is_large_string(column.type) or kind.is_string_view(column.type):
        return _text_column(column.to_pylist())
    if kind.is_integer(column.type) or kind.is_floating(column.type) or kind.is_boolean(column.type):
        return column_from(column.to_pylist())
    return None


# ---- Reading the SMILES with RDKit ------------------------------------------------------------------------------------------

CACHE_FORMAT = 1
"""The version of the cached table and of the facts in it."""
CHUNK = 1000
"""Molecules that a process takes at a time: about half a second, which is also how often progress is reported."""
WORTH_PROCESSES = 6000
"""Fewer molecules are done before other processes have imported RDKit."""
MOST_PROCESSES = 16


class Finding(NamedTuple):
    """What RDKit computes for one SMILES."""

    reason: str
    """Why it cannot be used; empty where it can."""
    canonical: str = ""
    scaffold: str = ""
    heavy_atoms: int = 0
    rings: int = 0


def rdkit_version() -> str:
    """The version of the installed RDKit. Facts and fingerprints may change with it."""
    try:
        from rdkit import rdBase
    except ImportError:
        raise MissingExtra("rdkit", "mol") from None
    return str(rdBase.rdkitVersion)


def read_facts(
    smiles: Sequence[str], *, cache: Path | None = None, progress: Progress = silent
) -> tuple[Facts, Mapping[int, str]]:
    """Facts of all these SMILES, and the reasons of those that cannot be used, by position; their facts mean nothing."""
    path = cache / f"facts-{_cache_key(smiles)}.parquet" if cache else None
    columns = _load_facts(path, len(smiles)) if path else None
    if columns is None:
        findings = examine(smiles, progress)
        columns = {name: [getattr(finding, name) for finding in findings] for name in Finding._fields}
        if path:
            _save_facts(path, columns, progress)
    reasons = {index: str(reason) for index, reason in enumerate(columns["reason"]) if reason}
    facts = Facts(
        canonical=np.array(columns["canonical"], dtype=object),
        scaffold=np.array(columns["scaffold"], dtype=object),
        heavy_atoms=np.array(columns["heavy_atoms"], dtype=np.int64),
        rings=np.array(columns["rings"], dtype=np.int64),
    )
    return facts, reasons


def _cache_key(smiles: Sequence[str]) -> str:
    digest = hashlib.sha256(f"{CACHE_FORMAT} {rdkit_version()} {len(smiles)}\n".encode())
    digest.update("\n".join(smiles).encode())
    return digest.hexdigest()[:24]


def _load_facts(path: Path, rows: int) -> dict[str, list[Any]] | None:
    """The cached table; None where it is missing or damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError):
        return None
    complete = table.num_rows == rows and table.column_names == list(Finding._fields)
    return {name: table[name].to_pylist() for name in table.column_names} if complete else None


def _save_facts(path: Path, columns: dict[str, list[Any]], progress: Progress) -> None:
    """Another sweep may read or write the same file. A full disk costs the cache and not the sweep."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as draft:
            pq.write_table(pa.table(columns), draft, compression="zstd")
    except (pa.ArrowException, OSError) as error:
        progress(f"the facts of RDKit are not cached: {in_one_line(error)}")


def examine(smiles: Sequence[str], progress: Progress = silent) -> list[Finding]:
    """In several processes where that is faster: RDKit holds the GIL, and two threads took 1.3 times as long as one.

    Processes are spawned, since the caller may have threads or a GPU open. One that dies costs time, not the result.
    """
    rdkit_version()
    chunks = [list(smiles[start : start + CHUNK]) for start in range(0, len(smiles), CHUNK)]
    done: dict[int, list[Finding]] = {}

    def report() -> None:
        progress(f"read {sum(map(len, done.values())):,} of {len(smiles):,} molecules")

    processes = min(Host.detect().cores, len(chunks), MOST_PROCESSES)
    if processes > 1 and len(smiles) >= WORTH_PROCESSES and may_spawn():
        _examine_in_processes(chunks, done, processes, report)
    for index, chunk in enumerate(chunks):
        if index not in done:
            done[index] = examine_here(chunk)
            report()
    return [finding for index in range(len(chunks)) for finding in done[index]]


def _examine_in_processes(
    chunks: list[list[str]], done: dict[int, list[Finding]], processes: int, report: Callable[[], object]
) -> None:
    """Fill `done`. If a process dies, the caller has to do the chunks that are missing."""
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_ignore_interrupts)
    try:
        futures = {pool.submit(examine_here, chunk): index for index, chunk in enumerate(chunks)}
        for future in as_completed(futures):
            done[futures[future]] = future.result()
            report()
    except BrokenProcessPool:
        logging.getLogger("brimful").warning("a process that reads molecules died; continuing in this process")
    finally:
        pool.shutdown(cancel_futures=True)


def _ignore_interrupts() -> None:
    """Ctrl-C reaches every process of the terminal; the parent ends its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def examine_here(smiles: Sequence[str]) -> list[Finding]:
    """In this process, without RDKit's messages on the terminal."""
    from rdkit import rdBase

    with rdBase.BlockLogs():
        findings = [_examine_one(text) for text in smiles]
    return [finding or Finding(_parse_error(text)) for finding, text in zip(findings, smiles, strict=True)]


def _examine_one(smiles: str) -> Finding | None:
    """None where RDKit cannot read it. An empty SMILES is a molecule to RDKit, and none to us."""
    from rdkit import Chem
    from rdkit.Chem.Scaffolds import MurckoScaffold

    molecule = Chem.MolFromSmiles(smiles)
    if molecule is None:
        return None
    if not molecule.GetNumHeavyAtoms():
        return Finding("no atoms" if smiles else "blank")
    try:
        # Without stereochemistry: fingerprints and most encoders give mirror images the same features.
        canonical = Chem.MolToSmiles(molecule, isomericSmiles=False)
        scaffold = Chem.MolToSmiles(MurckoScaffold.GetScaffoldForMol(molecule), isomericSmiles=False)
    except (ValueError, RuntimeError) as error:
        return Finding(f"RDKit finds no scaffold: {str(error).strip().splitlines()[0]}")
    return Finding("", canonical, scaffold, molecule.GetNumHeavyAtoms(), molecule.GetRingInfo().NumRings())


def _parse_error(smiles: str) -> str:
    """RDKit's own words, on one line: it only writes them to its log."""
    from rdkit import Chem

    with _rdkit_log() as lines:
        Chem.MolFromSmiles(smiles)
    texts = [re.sub(r"^\[[\d:]+\] |SMILES Parse Error: | for input: '.*'$", "", line) for line in lines]
    if not texts:
        return "RDKit cannot read it"
    position = next((match[0] for line in texts if (match := re.search(r"around position \d+", line))), None)
    return f"syntax error {position}" if position else texts[0]


class _LineHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: Any) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def _rdkit_log() -> Iterator[list[str]]:
    """RDKit's log lines, kept from the terminal."""
    from rdkit import rdBase

    logger, handler = logging.getLogger("rdkit"), _LineHandler()
    before, logger.handlers = logger.handlers, [handler]
    disabled = re.findall(r"(\S+):disabled", rdBase.LogStatus())
    rdBase.LogToPythonLogger()
    try:
        yield handler.lines
    finally:
        rdBase.LogToCppStreams()  # which also enables the logs that the user had disabled
        for name in disabled:
            rdBase.DisableLog(name)
        logger.handlers = before
