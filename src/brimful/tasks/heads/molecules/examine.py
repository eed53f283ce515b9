"""RDKit's one pass over a list of SMILES: read each, or say why not, and take down what the splits need.

Reading a molecule takes about half of the 0.3 ms that a molecule costs here, so it is read once. RDKit keeps Python's
lock while it reads (two threads took 1.3 times as long as one); processes are used from `_WORTH_PROCESSES` molecules on,
and they are spawned, since the caller may have threads or a GPU open. A process that dies costs time, not the result.
"""

import logging
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple

from brimful.errors import MissingExtra
from brimful.machine.host import Host
from brimful.machine.spawning import may_spawn

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
