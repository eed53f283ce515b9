"""A run folder as the views read it: `watch`, `why`, `compare` and `report` know nothing of a run but this.

Nothing here imports torch, and a long run opens as fast as a short one: 1,000,000 steps (590 MB of events.jsonl) in 0.4 s. The
rare events (plans, evaluations, checkpoints, out-of-memory errors) are all found, by one regular expression over the file, which
takes 0.2 s. Of the steps, which all look alike, `points` are read at evenly spaced places of the file, and the newest ones all.
`refresh` reads only what was appended since.
"""

import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

from brimful.errors import BadRun
from brimful.files import read_json
from brimful.training.events import FORMAT, decode_event, error_repeats, number
from brimful.training.run import RunFolder, lock_holder

State = Literal["preparing", "running", "finished", "interrupted", "time-limit", "patience", "failed", "killed"]
"""`killed`: its process has ended without an `end` event."""

POINTS = 2000
"""Steps kept of a long run."""
NEWEST_BYTES = 256 * 1024
OLDEST_BYTES = 32 * 1024
"""This much at the end and at the beginning of the file is read whole: about 400 and 30 steps."""
WHOLE_BYTES = 4 * 2**20
"""A file up to this size is read whole."""
_CHUNK_BYTES = 8 * 2**20
_RARE = re.compile(rb'\n\{"event": "(?!step")[^\n]*(?=\n)')
_FREQUENT = ("step", "sample")


class RunRecord:
    """One run.

    >>> run = RunRecord("runs/first")  # doctest: +SKIP
    >>> run.state, run.last["step"], run.of_kind("oom")  # doctest: +SKIP
    """

    def __init__(self, root: Path | str, *, points: int = POINTS) -> None:
        """Raises `BadRun` if this is no run folder, or one of a newer version."""
        self.folder = RunFolder(Path(root))
        self.root = self.folder.root
        self._points = points
        self._lines: list[tuple[int, dict[str, Any]]] = []
        """Events by their place in the file."""
        self._read_to = 0
        self._inode = 0
        self.step_lines_skipped = False
        """Whether some steps were not read, because there are more than `points`."""
        self.events: list[dict[str, Any]] = []
        """All but `step` and `sample`, in order."""
        self.steps: list[dict[str, Any]] = []
        """`step` events that count, in order: not those that a resume has undone."""
        self.samples: list[dict[str, Any]] = []
        """`sample` events, in order: what the machine did every few seconds."""
        if not self.root.exists():
            raise BadRun(f"there is no run at {self.root}. Try: a folder that `brimful train` wrote.")
        if not self.folder.events.is_file() and not self.folder.request_file.is_file():
            raise BadRun(
                f"{self.root} has no events.jsonl, so it is not a run. Try: a folder that `brimful train` wrote."
            )
        self.refresh()

    @property
    def name(self) -> str:
        return self.root.resolve().name

    @property
    def last(self) -> dict[str, Any]:
        """The newest step; empty before the first."""
        return self.steps[-1] if self.steps else {}

    @property
    def lost_its_events(self) -> bool:
        """Whether it was trained, as its checkpoints show, but its events.jsonl is missing."""
        return not self.folder.events.is_file() and self.folder.has_checkpoint

    @property
    def request(self) -> dict[str, Any]:
        """run.json: task, data, options; empty if it cannot be read."""
        return _json_file(self.folder.request_file)

    @property
    def plan(self) -> dict[str, Any]:
        """The plan in effect, as in plan.json; empty before there is one."""
        return next((event for event in reversed(self.events) if event["event"] == "plan"), {}) or _json_file(
            self.folder.plan()
        )

    @property
    def plans(self) -> list[dict[str, Any]]:
        """Every plan of the run, the oldest first."""
        return [plan for path in self.folder.kept_plans() if (plan := _json_file(path))] or [
            plan for plan in [self.plan] if plan
        ]

    @property
    def state(self) -> State:
        end = next((event for event in reversed(self.events) if event["event"] in ("end", "begin", "resume")), None)
        if end is not None and end["event"] == "end":
            reason = str(end.get("reason"))
            return reason if reason in ("finished", "interrupted", "time-limit", "patience", "failed") else "failed"  # type: ignore[return-value]
        holder = lock_holder(self.folder.lock)
        if holder is None or holder.has_ended:
            return "killed"
        return "running" if self.steps else "preparing"

    @property
    def state_label(self) -> str:
        """The state as people read it. Without events.jsonl nothing says how the run ended."""
        state = self.state
        return "no record" if state == "killed" and not self.folder.events.is_file() else state

    @property
    def fails_again(self) -> bool:
        """Whether the run ended with an error that a resume would run into again."""
        ends = self.of_kind("end") if self.state == "failed" else []
        return bool(ends) and error_repeats(ends[-1])

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] in kinds]

    def column(self, name: str, events: Iterable[Mapping[str, Any]] | None = None) -> list[float | None]:
        """One figure of every step, or of these events. NaN is NaN; None is unknown."""
        return [number(event, name) for event in (self.steps if events is None else events)]

    def refresh(self) -> bool:
        """Read what was appended; whether there was anything."""
        try:
            with self.folder.events.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._read_to:  # another file
                    self._lines, self._read_to, self._inode, self.step_lines_skipped = [], 0, status.st_ino, False
                if status.st_size == self._read_to:
                    return False
                read_before = self._read_to
                self._read(file, status.st_size)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise BadRun(
                f"{self.folder.events} cannot be read ({error.strerror}). Try: the folder of a run."
            ) from error
        if self._read_to == read_before:
            return False
        self._check_format()
        self._sort_out()
        return True

    def _read(self, file: BinaryIO, size: int) -> None:
        """The complete lines up to here: all of a short piece, else the rare ones, evenly spaced steps and the newest."""
        start = self._read_to
        if size - start <= WHOLE_BYTES:
            self._read_to = start + self._read_whole(file, start, size)
            return
        self.step_lines_skipped = True
        start += self._read_whole(file, start, start + OLDEST_BYTES)
        newest = size - NEWEST_BYTES
        file.seek(newest)
        newest += len(file.readline())
        self._lines += self._rare(file, start, newest)
        for index in range(self._points):
            place = start + (newest - start) * index // self._points
            file.seek(place)
            place += len(file.readline()) if place else 0  # usually in the middle of a line
            event = decode_event(file.readline())
            if event is not None and event["event"] == "step" and place < newest:
                self._lines.append((place, event))
        self._read_to = newest + self._read_whole(file, newest, size)

    def _read_whole(self, file: BinaryIO, start: int, end: int) -> int:
        """Bytes of complete lines in this part of the file, whose events are added."""
        file.seek(start)
        content = file.read(end - start)
        complete = content.rfind(b"\n") + 1
        place = start
        for line in content[:complete].splitlines(keepends=True):
            event = decode_event(line)
            if event is not None:
                self._lines.append((place, event))
            place += len(line)
        return complete

    def _rare(self, file: BinaryIO, start: int, end: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Every event but steps; of samples, which are decoded last, about `points` at even distances."""
        file.seek(start)
        place, rest, found, every = start, b"\n", 0, 1
        samples: list[tuple[int, bytes]] = []
        while place < end and (chunk := file.read(min(_CHUNK_BYTES, end - place))):
            first = place - len(rest)
            chunk, place = rest + chunk, place + len(chunk)
            for match in _RARE.finditer(chunk):
                line = match[0][1:] + b"\n"
                if line.startswith(b'{"event": "sample"'):
                    found += 1
                    if found % every == 0:
                        samples.append((first + match.start() + 1, line))
                    if len(samples) > 2 * self._points:
                        samples, every = samples[1::2], 2 * every
                elif (event := decode_event(line)) is not None:
                    yield first + match.start() + 1, event
            rest = chunk[chunk.rfind(b"\n") :] if b"\n" in chunk else chunk
        yield from ((at, event) for at, line in samples if (event := decode_event(line)) is not None)

    def _sort_out(self) -> None:
        """By kind and in order; steps after the checkpoint that a resume continued from are undone."""
        lines = dict(self._lines)  # evenly spaced places of a short piece may name one line twice
        self._lines = sorted(lines.items())
        kinds = Counter(event["event"] for _, event in self._lines)
        if any(kinds[kind] > 4 * self._points for kind in _FREQUENT):
            self._thin()
        self.events, self.samples, self.steps = [], [], []
        numbers: list[int] = []
        for _, event in self._lines:
            kind = event["event"]
            if kind == "sample":
                self.samples.append(event)
                continue
            if kind != "step":
                self.events.append(event)
            undone_from = (
                event["step"]
                if kind == "step"
                else event["step"] + 1
                if kind == "resume" and event.get("step") is not None
                else None
            )
            if undone_from is not None and numbers and numbers[-1] >= undone_from:
                keep = bisect_left(numbers, undone_from)
                del self.steps[keep:], numbers[keep:]
            if kind == "step":
                self.steps.append(event)
                numbers.append(event["step"])

    def _thin(self) -> None:
        """While a run is watched for days, what is kept of it stays bounded."""
        steps = [line for line in self._lines if line[1]["event"] == "step"]
        newest = self._points // 4
        kept = _thinned(steps[:-newest], self._points) + steps[-newest:]
        self.step_lines_skipped |= len(kept) < len(steps)
        others = [line for line in self._lines if line[1]["event"] not in _FREQUENT]
        samples = [line for line in self._lines if line[1]["event"] == "sample"]
        samples = _thinned(samples[:-newest], 2 * self._points) + samples[-newest:]
        self._lines = sorted([*others, *samples, *kept], key=lambda line: line[0])

    def _check_format(self) -> None:
        formats = [event.get("format") for _, event in self._lines if event["event"] == "begin"]
        if any(isinstance(one, int) and one > FORMAT for one in formats):
            raise BadRun(f"{self.root} was written by a newer Brimful (format {max(f for f in formats if isinstance(f, int))}, this one reads {FORMAT}). Try: pip install -U brimful.")  # fmt: skip


def _thinned(lines: list[tuple[int, dict[str, Any]]], most: int) -> list[tuple[int, dict[str, Any]]]:
    if len(lines) <= most:
        return lines
    return [lines[index * len(lines) // most] for index in range(most)]


def _json_file(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return read_json(path.read_text(encoding="utf-8"))
    return {}


def newest_run_folder(runs: Path = Path("runs")) -> Path:
    """The run below this folder that wrote its events last. Raises `BadRun` if there is none."""
    candidates = [path for path in runs.glob("*/events.jsonl") if path.is_file()]
    if not candidates:
        raise BadRun(f"{runs}/ has no run. Try: name the folder of a run.")
    return max(candidates, key=lambda path: path.stat().st_mtime).parent
