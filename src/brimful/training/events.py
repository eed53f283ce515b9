"""What a run did, as JSON lines in its folder: the one record that the terminal, trackers and reports are fed from.

A line is one object, `{"event": …, "time": "2026-01-31T09:15:02.418Z", …}`, appended by a single `write`: a process killed
at any moment leaves complete lines and at most one partial line, at the end, which readers skip and the next journal ends.
Nothing is synced to disk, so a line costs about 30 µs: a kill loses nothing, a power cut the last few seconds.

    event        its fields besides `event`, `time` and `step` (the optimizer step it belongs to, from 1)
    begin        run, steps, processes, resumed, request (task, data and options, as in run.json), format (of this file), version
                 (Brimful's), host (its name), pid, gpus ({ranks, host, index, name, uuid, total_bytes} of each in use), cores,
                 ram_limit_bytes
    flops        how the arithmetic of a row and the device's peak were found, for `mfu`; peak_flops, FLOP/s
    plan         the plan, as in plan.json, with its number in plans/; number_before, changes (name, old, new), experiment (new,
                 same, other) and experiment_reasons, which compare it with the plan before
    resume       samples, processes_before, sentence; `step` is the checkpoint's: lines of later steps above it do not count
    step         steps (in all), loss, terms (if there are several), log (values of `Loss.log`), rows, tokens, seconds,
                 micro_batches, lr, grad_norm, applied, ooms, data_wait_s, rows_per_s, tokens_per_s, mfu, epoch, eta_s, and
      peak_bytes, reserved_bytes   the highest peak of a rank in this step, as allocated by tensors and as taken from the device
      limit_bytes                  what the plan may use, on rank 0
      padding                      share of the positions computed that are padding or fill, over all ranks, 0 to 1
      times                        compute_s, data_s, communication_s, other_s, on average over the ranks (`metrics.py` says what is in
                                   each); together the time since the step before, without evaluations and saves
      host_bytes, machine_bytes    memory of the run's processes on rank 0's machine, and RAM in use there under the limit that binds;
                                   both as last sampled
      ranks                        a list of rank, peak_bytes, reserved_bytes, limit_bytes, micro_batches, padding and times of its own
    sample       about every 5 s, from a thread (`monitor.py`): rank, and
      gpu                          index, name, uuid, utilization (0 to 1), temperature_c, power_w, used_bytes, total_bytes, others_bytes
                                   (held by processes that are not the run's); null from a rank without a GPU of its own
      host                         tree_bytes (as host_bytes above), machine_bytes, limit_bytes, limited_by, swap_used_bytes,
                                   swap_total_bytes, workers (of all loaders), cpu (of the run's processes, 0 to 1 of the allowed
                                   cores), read_bytes_per_s (from disks); null but from the first rank of each machine
    eval         loss, perplexity and the task's own scores, rows, seconds, best (whether it is the best so far), ooms
    checkpoint   saved; path, size_bytes and seconds, or the sentence of a failure
    oom grow thrash model skip oversized deal note
                 sentence, and figures of their own: see `step.result`; a note of this file's own has no step, and one with
                 `"level": "warning"` is a warning; a warning of `Task.watch` has its kind as `signal`
    end          reason (finished, interrupted, time-limit, patience, failed), sentence, loss, checkpoint, best (the checkpoint of the
                 best evaluation); repeats, of a failure: whether a resume would run into it again

An unknown figure is null. One that is not a number is null too, for JSON has no word for it, and says so beside itself:
`"loss": null, "loss_is": "nan"` (or `inf`, `-inf`); `number` reads both. Training outlives its journal: what cannot be
written is kept, 10,000 lines (about 5 MB), and written when the disk has space again.
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
from brimful.files import read_json

FORMAT = 2
"""Of events.jsonl, in its `begin` events. Readers refuse a newer one."""
WAITING_LINES = 10_000
"""Lines that wait for a disk with space; the oldest are dropped first, and counted."""

_PLAIN = frozenset((str, int, float, bool, type(None)))
Listener = Callable[[dict[str, Any]], object]
log = logging.getLogger("brimful")


class Journal:
    """Writes events as they happen and passes each, just as a reader of the file would see it, to the listeners.

    Nothing here stops training. A disk or a listener that fails is reported once, and once more when it works again.
    """

    def __init__(self, path: Path | None, listeners: Sequence[Listener] = ()) -> None:
        self._file = None if path is None else LineFile(path)
        self._listeners = {
            f"listener {index}, {_name(listener)}": listener for index, listener in enumerate(listeners, 1)
        }
        self._failing: set[str] = set()
        self._lock = threading.RLock()  # a signal handler may write in the middle of a write

    def write(self, event: str, **fields: Any) -> None:
        """One event. Values may be NumPy's or torch's, or paths; what JSON does not know is written as text."""
        line = self.append(event, **fields)
        if line is not None:
            for name, listener in self._listeners.items():
                self._pass(name, listener, line)

    def append(self, event: str, **fields: Any) -> dict[str, Any] | None:
        """One event, to the file alone: for other threads than the training's, which is the one that listeners expect."""
        try:
            now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            line: dict[str, Any] = _plain({"event": event, "time": now, **fields})
        except Exception as error:  # a value whose text cannot be made
            self._failed(f"event {event!r}", error, "it is skipped")
            return None
        with self._lock:
            if self._file is not None:
                self._file.add(_encoded(line))
                self._flush(self._file)
        return line

    def close(self) -> None:
        """Try once more to write what could not be written. A write after this opens the file again."""
        with self._lock:
            if self._file is not None:
                if self._file.waiting:
                    self._flush(self._file)
                self._file.close()

    def _flush(self, file: "LineFile") -> None:
        waiting, error = file.waiting, file.flush()
        if error is not None:
            self._failed(str(file.path), error, f"up to {WAITING_LINES:,} lines are kept until it can be written")
            return
        dropped, file.dropped = file.dropped, 0
        self._works(str(file.path), f"{waiting} waiting lines were written, {dropped} are lost")
        if dropped:
            self.append(
                "note",
                step=None,
                sentence=f"{dropped} earlier lines are lost because this file could not be written for long",
            )

    def _pass(self, name: str, listener: Listener, line: dict[str, Any]) -> None:
        try:
            listener(dict(line))
        except Exception as error:
            self._failed(name, error, "it is called again with the next event")
        else:
            self._works(name, "it receives events again")

    def _failed(self, what: str, error: Exception, consequence: str) -> None:
        if what not in self._failing:
            self._failing.add(what)
            log.warning("%s failed (%s); training continues, %s", what, in_one_line(error), consequence)

    def _works(self, what: str, consequence: str) -> None:
        if what in self._failing:
            self._failing.discard(what)
            log.warning("%s works again: %s", what, consequence)


class LineFile:
    """A file that complete lines are appended to, each by one write. What cannot be written waits for a disk with space."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0
        """Lines that are lost because too many waited."""
        self._waiting: deque[bytes] = deque()
        self._file = -1

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, line: bytes) -> None:
        """Behind those that wait."""
        self._waiting.append(line)
        if len(self._waiting) > WAITING_LINES:
            self._waiting.popleft()
            self.dropped += 1

    def flush(self) -> OSError | None:
        """Write the lines that wait, in order; stops at the first that fails, and returns why."""
        try:
            self._open()
            while self._waiting:
                line = self._waiting[0]
                if os.write(self._file, line) < len(line):
                    raise OSError("only part of a line was written")
                self._waiting.popleft()
        except OSError as error:
            self.close()  # opening it again finds the partial line and ends it
            return error
        return None

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _open(self) -> None:
        """Always at the start of a line: a process killed while it wrote left one without an end."""
        if self._file >= 0:
            return
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a journal in order, one at a time; none if there is no file.

    Partial lines are skipped: at the end because it has no line break, elsewhere because it is no JSON object. So is an
    object that is no event.
    """
    try:
        with path.open("rb") as lines:
            for line in lines:
                event = decode_event(line)
                if event is not None:
                    yield event
    except FileNotFoundError:
        return
    except OSError as error:
        raise BadRun(f"{path} cannot be read ({error.strerror}). Try: the events.jsonl of a run folder.") from error


def last_steps(events: Iterable[Mapping[str, Any]], kind: str = "step") -> list[dict[str, Any]]:
    """The lines of one kind that count, by step: the last for a step trained twice, none for steps undone by a resume."""
    lines: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["event"] == "resume" and event.get("step") is not None:  # a sweep resumes heads, not a step
            lines = {step: line for step, line in lines.items() if step <= event["step"]}
        elif event["event"] == kind:
            lines[event["step"]] = dict(event)
    return [lines[step] for step in sorted(lines)]


def error_repeats(end: Mapping[str, Any]) -> bool:
    """Whether the error of an `end` event would come again after a resume."""
    return end.get("reason") == "failed" and end.get("repeats") is True


def number(event: Mapping[str, Any], name: str) -> float | None:
    """A figure of an event, NaN and infinities included; None if it is unknown or not a number."""
    value = event.get(name)
    if value is None:
        value = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.get(str(event.get(f"{name}_is")))
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:  # a whole number of hundreds of digits, in a damaged file
        return None


def _plain(value: Any) -> Any:
    """The same in JSON's types."""
    if type(value) in _PLAIN:  # nearly all are, and to ask whether one is a Mapping takes longer than the rest
        return value
    if isinstance(value, Mapping):
        plain = {}
        for key, part in value.items():
            plain[str(key)] = plain_part = _plain(part)
            if isinstance(plain_part, float) and not math.isfinite(plain_part):
                plain[str(key)], plain[f"{key}_is"] = None, str(plain_part)
        return plain
    if isinstance(value, (list, tuple, set, frozenset)):
        return [None if isinstance(part, float) and not math.isfinite(part) else part for part in map(_plain, value)]
    if isinstance(value, (int, float, str)):  # of a type of its own
        return value
    return _plain(value.item()) if getattr(value, "ndim", None) == 0 else str(value)


def _encoded(line: dict[str, Any]) -> bytes:
    """A lone surrogate, from a file name that is not UTF-8, is written as a question mark."""
    return (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="replace")


def decode_event(line: bytes) -> dict[str, Any] | None:
    """The event of a complete line; None for a partial line and for what is no event."""
    if not line.endswith(b"\n"):
        return None
    try:
        event = read_json(line)
    except ValueError:
        return None
    kind, step = event.get("event"), event.get("step")
    has_step = isinstance(step, int) or (step is None and kind not in ("step", "eval"))
    return event if isinstance(kind, str) and has_step else None


def _name(listener: Listener) -> str:
    return getattr(listener, "__qualname__", type(listener).__qualname__)
