"""What a run did, as JSON lines in its folder: the one truth that the terminal, trackers and reports are fed from.

A line is one object, `{"event": …, "time": "2026-01-31T09:15:02.418Z", …}`, appended by a single `write`: a process killed
at any moment leaves whole lines and at most one half line, at the end, which readers leave out and the next journal closes
off. Nothing is synced to disk, so a line costs about 30 µs: a kill loses nothing, a power cut the last few seconds.

    event        its fields beside `event`, `time` and `step` (the optimizer step it belongs to, from 1)
    begin        run, steps, processes, resumed, request (what was asked, as one object)
    flops        how the arithmetic of a row and the device's peak were found, for `mfu`
    plan         the plan, as in plan.json
    resume       samples, processes_before, sentence; `step` is the checkpoint's: lines of later steps above it are void
    step         steps (how many were asked for), loss, terms (where there are several), rows, tokens, seconds, peak_bytes,
                 limit_bytes, micro_batches, lr, grad_norm, applied, ooms, data_wait_s, rows_per_s, tokens_per_s, mfu,
                 epoch, eta_s
    eval         loss, perplexity and the task's own metrics, rows, seconds, best (whether it is the best so far), ooms
    checkpoint   saved; path, size_bytes and seconds, or the sentence of a failure
    oom grow thrash model skip oversized deal note
                 sentence, and figures of their own: see `events`; a note of this file's own has no step
    end          reason (finished, interrupted, time-limit, window, failed), sentence, loss, checkpoint

A figure that is unknown is null. One that is not a number is null too, for JSON has no word for it, and says so beside
itself: `"loss": null, "loss_is": "nan"` (or `inf`, `-inf`); `number` reads both. Training outlives its journal: what cannot
be written is kept, 10,000 lines (about 5 MB), and written when the disk has room again.
"""

import json
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from brimful.errors import BadRun, in_one_line

KEPT = 10_000
"""Lines that wait for a disk with room; the oldest are lost first, and counted."""

Listener = Callable[[dict[str, Any]], object]
log = logging.getLogger("brimful")


class Journal:
    """Writes events as they happen and hands each, just as a reader of the file would see it, to the listeners.

    Nothing here stops training. A disk or a listener that fails is told of once, and once more when it works again.
    """

    def __init__(self, path: Path | None, listeners: Sequence[Listener] = ()) -> None:
        self._path, self._file = path, -1
        self._listeners = {f"listener {place}, {_name(one)}": one for place, one in enumerate(listeners, 1)}
        self._waiting: deque[bytes] = deque()
        self._lost = 0
        self._failing: set[str] = set()
        self._lock = threading.RLock()  # a signal handler may write in the middle of a write

    def write(self, event: str, **fields: Any) -> None:
        """One event. Values may be of NumPy or torch, or paths; what JSON does not know is written as its text."""
        try:
            now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            line = _plain({"event": event, "time": now, **fields})
        except Exception as error:  # a value whose own text cannot be made
            self._tell(f"event {event!r}", error, "it is left out")
            return
        with self._lock:
            if self._path is not None:
                self._keep(line)
                self._flush(self._path)
        for name, listener in self._listeners.items():
            self._hand(name, listener, line)

    def close(self) -> None:
        """Try once more what could not be written. A write after this opens the file again."""
        with self._lock:
            if self._path is not None and self._waiting:
                self._flush(self._path)
            self._shut()

    def _keep(self, line: dict[str, Any]) -> None:
        self._waiting.append(_encoded(line))
        if len(self._waiting) > KEPT:
            self._waiting.popleft()
            self._lost += 1

    def _flush(self, path: Path) -> None:
        """The lines that wait, in order, each by one write; stops at the first that fails."""
        kept = len(self._waiting)
        try:
            self._open(path)
            while self._waiting:
                line = self._waiting[0]
                if os.write(self._file, line) < len(line):
                    raise OSError("the disk took half a line")
                self._waiting.popleft()
        except OSError as error:
            self._shut()  # opening it again finds the half line and closes it off
            self._tell(str(path), error, f"up to {KEPT:,} lines are kept until it can be written")
            return
        lost, self._lost = self._lost, 0
        self._works(str(path), f"{kept} lines that waited are in it, {lost} are lost")
        if lost:
            self.write(
                "note", step=None, sentence=f"{lost} earlier lines are lost: this file could not be written for long"
            )

    def _open(self, path: Path) -> None:
        """Always at the start of a line: a process killed in the middle of one left it without an end."""
        if self._file >= 0:
            return
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def _shut(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _hand(self, name: str, listener: Listener, line: dict[str, Any]) -> None:
        try:
            listener(dict(line))
        except Exception as error:
            self._tell(name, error, "it is called again with the next event")
        else:
            self._works(name, "it is heard from again")

    def _tell(self, what: str, error: Exception, so: str) -> None:
        if what not in self._failing:
            self._failing.add(what)
            log.warning("%s failed (%s): training goes on, %s", what, in_one_line(error), so)

    def _works(self, what: str, so: str) -> None:
        if what in self._failing:
            self._failing.discard(what)
            log.warning("%s works again: %s", what, so)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a journal in order, one at a time; none where there is no file.

    A half line is left out: at the end as long as it has no end, and anywhere else because it is no JSON object.
    """
    try:
        with path.open("rb") as lines:
            for line in lines:
                event = _decoded(line) if line.endswith(b"\n") else None
                if event is not None:
                    yield event
    except FileNotFoundError:
        return
    except OSError as error:
        raise BadRun(
            f"{path} cannot be read ({error.strerror}): it should be the events.jsonl of a run folder"
        ) from error


def last_steps(events: Iterable[Mapping[str, Any]], kind: str = "step") -> list[dict[str, Any]]:
    """The lines of one kind that count, by step: of a step trained twice the last, of steps undone by a resume none."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["event"] == "resume":
            found = {step: line for step, line in found.items() if step <= event["step"]}
        elif event["event"] == kind:
            found[event["step"]] = dict(event)
    return [found[step] for step in sorted(found)]


def number(event: Mapping[str, Any], name: str) -> float | None:
    """A figure of an event, NaN and infinities included; None where it is unknown or no number."""
    value = event.get(name)
    if value is None:
        value = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.get(event.get(f"{name}_is", ""))
    return float(value) if isinstance(value, (int, float)) else None


def _plain(value: Any) -> Any:
    """The same in what JSON knows."""
    if isinstance(value, Mapping):
        plain = {}
        for key, part in value.items():
            plain[str(key)] = one = _plain(part)
            if isinstance(one, float) and not math.isfinite(one):
                plain[str(key)], plain[f"{key}_is"] = None, str(one)
        return plain
    if isinstance(value, (list, tuple, set, frozenset)):
        return [None if isinstance(one, float) and not math.isfinite(one) else one for one in map(_plain, value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return _plain(value.item()) if getattr(value, "ndim", None) == 0 else str(value)


def _encoded(line: dict[str, Any]) -> bytes:
    """A lone surrogate, from a file name that is not UTF-8, is written as a question mark."""
    return (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="replace")


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _name(listener: Listener) -> str:
    return getattr(listener, "__qualname__", type(listener).__qualname__)
