"""Looks at a run again and again, for `brimful watch`: which run is the newest, whether it goes on, and what its cards do now.

The run's folder is only read: no lock is taken and nothing is written, and a refresh reads what was appended since. Temperature,
power, utilisation and the memory of others come from NVML if the run is on this machine, since the run itself samples them only every
five seconds. NVML creates no CUDA context, and torch is not imported.
"""

import math
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from brimful.errors import BadRun
from brimful.machine.gpu import Nvml, NvmlCard, open_nvml
from brimful.machine.host import tree
from brimful.report.run_record import RunRecord
from brimful.report.watch.run_snapshot import ACTIVE, Card, Note, Snapshot, WatchState
from brimful.report.watch.take_snapshot import SILENT_S, parse_time, take
from brimful.training.run import LockHolder, RunFolder, lock_holder

TREE_S = 10.0
"""How long the pids of a run are remembered."""


class Watcher:
    """Looks at one run, or at the newest in a folder of runs.

    with Watcher(Path("runs/first")) as watcher:
        snapshot = watcher.look()
    """

    def __init__(
        self,
        run: Path | None = None,
        *,
        runs: Path = Path("runs"),
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Raises `BadRun` if there is no such run."""
        self._runs, self._now = runs, now
        self._follows = run is None
        self._stack = ExitStack()
        self._gpus: LiveGpus | None = None
        self._switched_from: str | None = None
        self._problem: str | None = None
        root = run if run is not None else _newest(runs)
        if root is None:
            raise BadRun(f"{runs}/ has no run. Try: name the folder of a run.")
        self._open(root)
        self._last: Snapshot | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def look(self) -> Snapshot:
        """The run now; the very same object if it has ended and nothing has changed."""
        self._follow()
        if self._record is None:
            self._open(self._root)
        changed = self._record is None or self._record.refresh()
        state = self._state()
        last = self._last
        if last is not None and not changed and state == last.state and state not in ACTIVE and last.run == str(self._root):  # fmt: skip
            return last
        snapshot = self._snapshot(state)
        if state in ACTIVE and snapshot.cards and self._is_here(snapshot):
            snapshot = replace(snapshot, cards=self._live(snapshot))
        self._last = snapshot
        return snapshot

    def _open(self, root: Path) -> None:
        """A folder that has nothing but a lock is a run that is being prepared."""
        self._root, self._record = root, None
        holder = lock_holder(RunFolder(root).lock)
        prepared = any(path.is_file() for path in (RunFolder(root).events, RunFolder(root).request_file))
        if prepared or holder is None or holder.has_ended:
            self._record = RunRecord(root)

    def _follow(self) -> None:
        newest = _newest(self._runs) if self._follows else None
        if newest is None or newest == self._root:
            return
        before, record = self._root, self._record
        try:
            self._open(newest)
        except BadRun as error:  # what is readable stays in view
            self._root, self._record, self._problem = before, record, str(error)
            return
        self._problem, self._switched_from = None, str(before)

    def _state(self) -> WatchState:
        if self._last is not None and not self._root.exists():
            return "gone"
        if self._record is None:
            return "preparing"
        state = self._record.state
        holder = self._holder()
        end = next(iter(self._record.of_kind("end")[-1:]), {})
        if state not in ACTIVE and holder is not None and not holder.has_ended:
            began, ended = parse_time(holder.since), parse_time(end.get("time"))
            if began is not None and ended is not None and began > ended.replace(microsecond=0):
                return "preparing"  # it is being resumed
        return state

    def _snapshot(self, state: WatchState) -> Snapshot:
        also = _running_beside(self._runs, self._root) if self._follows and state != "gone" else ()
        if self._record is None or state == "gone":
            holder = self._holder()
            known = self._last or Snapshot(taken=self._now(), run=str(self._root), name=self._root.resolve().name, state=state)  # fmt: skip
            since = parse_time(holder.since) if holder is not None else known.since
            line = last_line(self._root / "log.txt") if self._record is None else None
            note = (Note(step=None, time=None, sentence=line, warning=False),) if line else known.notes
            snapshot = replace(known, taken=self._now(), state=state, since=since, notes=note)
        else:
            snapshot = take(self._record, state, self._holder(), self._now())
        return replace(snapshot, switched_from=self._switched_from, also_running=also, problem=self._problem)

    def _holder(self) -> LockHolder | None:
        return lock_holder(RunFolder(self._root).lock)

    def _is_here(self, snapshot: Snapshot) -> bool:
        holder = self._holder()
        return (holder.host if holder is not None else snapshot.host) == socket.gethostname()

    def _live(self, snapshot: Snapshot) -> tuple[Card, ...]:
        if self._gpus is None:
            self._gpus = LiveGpus(self._stack.enter_context(open_nvml()), self._now)
        holder = self._holder()
        pids = [pid for pid in (snapshot.pid, holder.pid if holder is not None else None) if pid is not None]
        return self._gpus.update(snapshot.cards, pids)


def _newest(runs: Path) -> Path | None:
    """The run that was begun or resumed last: its lock is signed only then."""
    begun = dict[Path, float]()
    with suppress(OSError):
        for entry in os.scandir(runs):
            time = _first_mtime(entry.path, ("lock", "events.jsonl", "run.json"))
            if time is not None:
                begun[Path(entry.path)] = time
    return max(begun, key=lambda path: (begun[path], path), default=None)


def _first_mtime(folder: str, names: Iterable[str]) -> float | None:
    for name in names:
        with suppress(OSError):
            return Path(folder, name).stat().st_mtime
    return None


def _running_beside(runs: Path, root: Path) -> tuple[str, ...]:
    """Other runs of the folder that wrote an event within the last minute."""
    found = []
    with suppress(OSError):
        for entry in os.scandir(runs):
            time = _first_mtime(entry.path, ("events.jsonl",))
            if time is not None and Path(entry.path) != root and datetime.now(UTC).timestamp() - time < SILENT_S:
                holder = lock_holder(Path(entry.path, "lock"))
                if holder is not None and not holder.has_ended:
                    found.append(entry.path)
    return tuple(sorted(found))


def last_line(path: Path) -> str | None:
    """The last line of a text file, which may be long."""
    with suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else None
    return None


# ---- From NVML -------------------------------------------------------------------------------------------------------


class LiveGpus:
    """Newer figures of the cards of a run on this machine.

    torch numbers the cards that it sees, NVML all of them. So a card is found by its UUID where the run has recorded it, else by who
    holds memory on it: the cards where the run's processes are listed, if there are as many as the run has.
    """

    def __init__(self, nvml: Nvml, now: Callable[[], datetime]) -> None:
        self._nvml, self._now = nvml, now
        self._pids: set[int] = set()
        self._pids_until = -math.inf

    def update(self, cards: tuple[Card, ...], pids: Sequence[int]) -> tuple[Card, ...]:
        """The cards with what NVML says; those that cannot be told apart as they are."""
        states = self._nvml.cards()
        if not states:
            return cards
        if self._now().timestamp() > self._pids_until:
            self._pids = {one for pid in pids for one in tree(pid)}
            self._pids_until = self._now().timestamp() + TREE_S
        ours = [state for state in states if self._pids & set(state.processes or ())]
        if len(ours) != len(cards):
            if len(states) != 1 or len(cards) != 1:
                return cards
            ours = states
        return tuple(self._updated(card, state) for card, state in zip(cards, ours, strict=True))

    def _updated(self, card: Card, state: NvmlCard) -> Card:
        mine = [size for pid, size in (state.processes or {}).items() if pid in self._pids and size]
        held, others = card.held_bytes, card.others_bytes
        if mine and card.total_bytes is not None:
            held = float(sum(mine))
            others = max(0.0, card.total_bytes - state.free_bytes - held)
        return replace(
            card,
            utilization=card.utilization if state.utilization is None else state.utilization,
            temperature_c=card.temperature_c if state.temperature_c is None else state.temperature_c,
            power_w=card.power_w if state.power_w is None else state.power_w,
            held_bytes=held,
            others_bytes=others,
            live=True,
        )
