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
from brimful.report.run_figures import parse_time
from brimful.report.run_record import RunRecord
from brimful.report.watch.run_snapshot import ACTIVE, SILENT_S, Card, Note, Snapshot, WatchState, take
from brimful.training.run import LockHolder, RunFolder, lock_holder

TREE_S = 10.0
"""How long the pids of a run are remembered."""
NOT_BEGUN = "it ended before its first step"


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
        """Raises `BadRun` if there is no such run, or none in `runs`."""
        self._runs, self._now = runs, now
        self._follows = run is None
        self._stack = ExitStack()
        self._gpus: LiveGpus | None = None
        self._switched_from: str | None = None
        self._unreadable: dict[Path, float] = {}
        self._problem: str | None = None
        self._root = Path()
        self._record: RunRecord | None = None
        self._last: Snapshot | None = None
        if run is not None:
            self._open(run)
        else:
            self._follow()
            if self._record is None and self._root == Path():
                raise BadRun(self._problem or f"{runs}/ has no run. Try: name the folder of a run.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def look(self) -> Snapshot:
        """The run now; the very same object if it has ended and nothing has changed."""
        if self._follows:
            self._follow()
        state, changed = self._refresh()
        last = self._last
        if last is not None and state == last.state and state not in ACTIVE and not changed:
            return last
        snapshot = self._snapshot(state)
        if state in ACTIVE and snapshot.cards and self._is_here(snapshot):
            snapshot = replace(snapshot, cards=self._live(snapshot))
        self._last = snapshot
        return snapshot

    def _follow(self) -> None:
        """Go to the run that was begun last, of those that can be read."""
        for root, begun in _begun(self._runs):
            if root == self._root:
                return
            if self._unreadable.get(root) == begun:
                continue
            before = self._root
            try:
                self._open(root)
            except BadRun as error:  # what can be read stays in view
                self._unreadable[root] = begun
                self._problem = self._problem or str(error)
                continue
            self._problem, self._last = None, None
            self._switched_from = str(before) if before.exists() and before != Path() else None
            return

    def _open(self, root: Path) -> None:
        """A folder that has nothing but a lock is a run that is being prepared. Raises `BadRun`."""
        folder = RunFolder(root)
        holder = lock_holder(folder.lock)
        waiting = holder is not None and not holder.has_ended
        record = None if waiting and not _has_begun(folder) else RunRecord(root)
        self._root, self._record = root, record

    def _refresh(self) -> tuple[WatchState, bool]:
        """The state of the run, and whether anything was written."""
        if self._last is not None and not self._root.exists():
            return "gone", False
        if self._record is None:
            try:
                self._open(self._root)
            except BadRun:
                return "failed", False
            return ("preparing" if self._record is None else self._state(self._record)), True
        changed = self._record.refresh()
        return self._state(self._record), changed

    def _state(self, record: RunRecord) -> WatchState:
        state, holder = record.state, self._holder()
        if state in ACTIVE or holder is None or holder.has_ended:
            return state
        began = parse_time(holder.since)
        ended = parse_time(next((event.get("time") for event in reversed(record.of_kind("end"))), None))
        is_resumed = began is not None and ended is not None and began > ended.replace(microsecond=0)
        return "preparing" if is_resumed else state

    def _snapshot(self, state: WatchState) -> Snapshot:
        now, holder = self._now(), self._holder()
        if self._record is None or state == "gone":
            empty = Snapshot(taken=now, run=str(self._root), name=self._root.resolve().name, state=state)
            line = last_line(self._root / "log.txt")
            notes = (_logged(line),) if line else ()
            since = parse_time(holder.since) if holder is not None else None
            snapshot = replace(self._last or replace(empty, since=since, notes=notes), taken=now, state=state)
            if state == "failed":
                snapshot = replace(snapshot, sentence=NOT_BEGUN)
        else:
            snapshot = take(self._record, state, holder, now)
        also = _running_beside(self._runs, self._root) if self._follows else ()
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


def _has_begun(folder: RunFolder) -> bool:
    return folder.events.is_file() or folder.request_file.is_file()


def _begun(runs: Path) -> list[tuple[Path, float]]:
    """Folders that may be runs and when they were begun or resumed, the last first: a lock is signed only then."""
    begun = []
    with suppress(OSError):
        for entry in os.scandir(runs):
            time = _first_mtime(entry.path, ("lock", "events.jsonl", "run.json"))
            if time is not None:
                begun.append((Path(entry.path), time))
    return sorted(begun, key=lambda one: (one[1], one[0]), reverse=True)


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


def _logged(line: str) -> Note:
    """A line of log.txt, which begins with its date and time."""
    words = line.split(" ", 2)
    time = parse_time(" ".join(words[:2])) if len(words) == 3 and "-" in words[0] else None
    return Note(step=None, time=time, sentence=line if time is None else words[2].strip(), warning=False)


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

    torch numbers the cards that it sees, NVML all of them. So a card is found by the UUID that the run has recorded.
    """

    def __init__(self, nvml: Nvml, now: Callable[[], datetime]) -> None:
        self._nvml, self._now = nvml, now
        self._pids: set[int] = set()
        self._pids_until = -math.inf

    def update(self, cards: tuple[Card, ...], pids: Sequence[int]) -> tuple[Card, ...]:
        """The cards with what NVML says; those on other machines, and slices of a card, as they are."""
        states = self._nvml.cards() if all(card.kind == "cuda" for card in cards) else []
        if not states:
            return cards
        if self._now().timestamp() > self._pids_until:
            self._pids = {one for pid in pids for one in tree(pid)}
            self._pids_until = self._now().timestamp() + TREE_S
        by_uuid = {(state.uuid or "").partition("-")[2]: state for state in states}
        return tuple(self._updated(card, by_uuid[card.uuid]) if card.uuid in by_uuid else card for card in cards)

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
