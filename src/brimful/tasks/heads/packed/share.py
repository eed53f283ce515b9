"""A share of a sweep's heads, trained on one device: the unit that is handed to another process, or another machine.

A share goes out as plain data and comes back as a stream of messages, so that one process alone writes results whatever
trains: this one, one for each card of a box (`processes`), or a Ray cluster (`cluster`).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from brimful.errors import DoesNotFit
from brimful.memory.meter import has_peak_statistics
from brimful.memory.oom import OutOfMemory, attempt
from brimful.memory.room import room_bytes
from brimful.tasks.heads.packed.job import Job, Rows
from brimful.tasks.heads.packed.packing import Packing, choose
from brimful.tasks.heads.packed.runner import Finished, Runner
from brimful.tasks.heads.packed.shelf import Shelf
from brimful.tasks.heads.packed.state import State
from brimful.units import show_bytes, show_count

FILL = 0.85
"""The share of a card's memory to use where no budget is given."""
SNAPSHOT_S = 20.0
"""A killed sweep loses at most so much of its work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Groups of jobs that can share packs, and what they need."""

    number: int = 0
    groups: Sequence[Sequence[Job]]
    rows: Mapping[str, Rows]
    device: str
    threads: int | None = None
    """Cores that a CPU share may use; all unless given."""
    budget_bytes: int | None = None
    most: int | None = None
    """The largest pack asked for."""
    begun: Sequence[State] = ()
    """Of runs that had begun when the sweep was interrupted; they go on from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A group is about to be trained."""

    share: int
    jobs: int
    packing: Packing


@dataclass(frozen=True, slots=True, kw_only=True)
class Went:
    """What has happened since the last message."""

    share: int
    finished: Sequence[Finished] = ()
    epochs: int = 0
    """Of all runs together."""
    alive: int = 0
    ooms: int = 0
    state: State | None = None
    """All runs that have begun and not stopped, from time to time."""
    peak_bytes: int | None = None


Message = Packed | Went


def work(share: Share, stop: Callable[[], bool] = lambda: False) -> Iterator[Message]:
    """Trains the share from beginning to end, or until it is to stop; then the last message has the state."""
    before = torch.get_num_threads()
    torch.set_num_threads(share.threads or before)
    try:
        for group in share.groups:
            if not stop():
                yield from _group(group, share, torch.device(share.device), stop)
    finally:
        torch.set_num_threads(before)


def _group(group: Sequence[Job], share: Share, device: torch.device, stop: Callable[[], bool]) -> Iterator[Message]:
    used = {job.data for job in group}
    shelf = attempt(lambda: Shelf({key: rows for key, rows in share.rows.items() if key in used}, device), device)
    if isinstance(shelf, OutOfMemory):
        needed = sum(share.rows[key].features.nbytes for key in used)
        raise DoesNotFit(
            f"the features of {show_count(len(used), 'dataset')}, {show_bytes(needed)}, and what it takes to put them on {share.device} do not fit: "
            "give more --memory-limit, or fewer molecules, datasets or encoders",
            needed_bytes=needed,
        )
    packing = choose(group, shelf, share.budget_bytes or _budget(device), most=share.most)
    yield Packed(share=share.number, jobs=len(group), packing=packing)
    begun = _begun(group, share.begun)
    there = {job.name for state in begun for job in state.jobs}
    runner = Runner([job for job in group if job.name not in there], shelf, packing.runs, begun=begun)
    saved, ooms = time.monotonic(), 0
    for finished in runner.run():
        now = time.monotonic()
        stopping = stop()
        due = stopping or now - saved > SNAPSHOT_S
        saved = now if due else saved
        alive, _ = runner.progress()
        yield Went(
            share=share.number, finished=finished, epochs=runner.judged, alive=alive,
            ooms=runner.ooms - ooms, state=runner.state() if due else None, peak_bytes=peak_bytes(device),
        )  # fmt: skip
        ooms = runner.ooms
        if stopping:
            return


def _begun(group: Sequence[Job], states: Sequence[State]) -> list[State]:
    """Those rows of the states that belong to the group."""
    names = {job.name for job in group}
    found = []
    for state in states:
        places = [place for place, job in enumerate(state.jobs) if job.name in names]
        found += [state.take(places)] if places else []
    return found


def _budget(device: torch.device) -> int | None:
    """For a card that nobody has looked at yet: most of what is free and what this process has of it already."""
    room = room_bytes(device)
    return None if room is None else int(FILL * room)


def peak_bytes(device: torch.device) -> int | None:
    """Measured; None where the device cannot tell."""
    return torch.accelerator.max_memory_allocated(device) if has_peak_statistics(device) else None
