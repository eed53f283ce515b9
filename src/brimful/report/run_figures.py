"""The figures of a run that `why` and `compare` judge by: typical values with their error, and where time and memory went.

A figure of one step says little: steps of one run differ by 10 % and more, and the first ones choose kernels and compile. So a
`Typical` is the median of the steps after those, and its error is taken from how much the medians of ten parts of the run differ,
because a machine that is slow for a minute is slow for all steps of that minute.

A run may be half written or from another version. Whatever is missing or is no number is None here, never an error.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from brimful.report.run_record import RunRecord
from brimful.training.events import number
from brimful.training.levels import spread
from brimful.units import is_number, is_whole

if TYPE_CHECKING:
    from brimful.memory.model import MemoryModel

UNSETTLED_STEPS = 10
"""At most this many steps at the beginning are left out, and never more than a fifth of them."""
LEAST_STEPS = 5
"""Fewer steps have no typical value."""
MOST_CHANGES = 4
"""Rows a step that change more often are no setting."""
PARTS = 10
"""Parts of a run whose medians give the error of a typical value."""
MOST = 2**60
"""No count and no bytes are above this."""
TIMES = ("compute_s", "data_s", "communication_s", "other_s")
BEFORE_BEGIN = ("flops", "note", "end")
"""Events that may stand before the `begin` of the process that wrote them."""


@dataclass(frozen=True, slots=True)
class Typical:
    """The median of a figure over steps, and by how much it may be off."""

    value: float
    error: float
    """About one standard error."""
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Typical | None":
        """None for fewer than five finite values."""
        known = [value for value in values if value is not None and math.isfinite(value)]
        if len(known) < LEAST_STEPS:
            return None
        error = 1.25 * spread(known) / math.sqrt(len(known))
        if len(known) >= 3 * PARTS:
            medians = [median(part) for part in in_parts(known, PARTS)]
            error = max(error, math.dist(medians, [sum(medians) / PARTS] * PARTS) / math.sqrt(PARTS * (PARTS - 1)))
        return cls(median(known), error, len(known))


def in_parts(values: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """Consecutive parts of almost equal length, none empty."""
    parts = max(1, min(parts, len(values)))
    return [values[len(values) * i // parts : len(values) * (i + 1) // parts] for i in range(parts)]


def part(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object of this name; empty if there is none."""
    found = value.get(name)
    return found if isinstance(found, Mapping) else {}


def objects(value: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The objects in the list of this name."""
    found = value.get(name)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def finite(value: Mapping[str, Any], name: str) -> float | None:
    """A number that is neither infinite nor NaN; None for anything else."""
    found = number(value, name)
    return found if found is not None and math.isfinite(found) else None


def whole(value: Mapping[str, Any], name: str) -> int | None:
    """A whole number of at least 0, such as rows or bytes; None for anything else."""
    found = finite(value, name)
    return int(found) if found is not None and 0 <= found <= MOST else None


def lengths(value: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    """The whole numbers in this list, such as lengths of rows; None if it is none."""
    found = value.get(name)
    if not isinstance(found, (list, tuple)) or not all(isinstance(one, int) and one >= 0 for one in found):
        return None
    return tuple(found)


def show_lengths(shape: Sequence[int]) -> str:
    """`228+256`."""
    return "+".join(map(str, shape))


def text(value: Mapping[str, Any], name: str) -> str | None:
    """A text that is not empty; None for anything else."""
    found = value.get(name)
    return found if isinstance(found, str) and found else None


def parse_time(value: object) -> datetime | None:
    """An event's or a lock's time; None if it is none. Without a time zone it is taken for UTC."""
    try:
        time = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def seconds_at(event: Mapping[str, Any]) -> float | None:
    """When an event was written, in seconds since 1970."""
    when = parse_time(event.get("time"))
    with suppress(OverflowError):
        return None if when is None else when.timestamp()
    return None


def sessions_of(record: RunRecord) -> list[tuple[float, float]]:
    """From when to when the run was at work, in seconds since 1970: from each `begin` to its `end`, or to the last event of one killed.

    A process that prepares to continue the run writes events before its own `begin`, even an `end` if it fails. The pause before them
    is no work.
    """
    events = [(at, event) for event in (*record.events, *record.steps, *record.samples) if (at := seconds_at(event)) is not None]  # fmt: skip
    begins = [at for at, event in events if event["event"] == "begin"]
    starts = sorted(begins) or sorted(at for at, _ in events)[:1]
    sessions = []
    for start, following in itertools.pairwise([*starts, math.inf]):
        own = [(at, event) for at, event in events if start <= at < following]
        reached = max((event.get("step") or 0 for _, event in own if event["event"] in ("step", "sample")), default=0)
        ends = [at for at, event in own if event["event"] == "end" and (event.get("step") or 0) >= reached]
        work = [at for at, event in own if event["event"] not in BEFORE_BEGIN]
        sessions.append((start, min(ends) if ends else max(work, default=start)))
    return sessions


def step_seconds(step: Mapping[str, Any]) -> float | None:
    """The wall time of a step, without evaluations and saves."""
    times = part(step, "times")
    known = [value for name in TIMES if (value := finite(times, name)) is not None]
    if known:
        return sum(known)
    seconds = finite(step, "seconds")
    return None if seconds is None else seconds + (finite(step, "data_wait_s") or 0.0)


class RunFigures:
    """One run, or the part of it that was trained with one plan."""

    def __init__(
        self,
        record: RunRecord,
        *,
        plan: Mapping[str, Any] | None = None,
        request: Mapping[str, Any] | None = None,
        after_step: int | None = None,
        up_to_step: int | None = None,
    ) -> None:
        """`after_step` and `up_to_step` bound the steps that count; `plan` and `request` are those of these steps."""
        self.record = record
        self.plan: Mapping[str, Any] = record.plan if plan is None else plan
        begun = part(next(iter(record.of_kind("begin")), {}), "request")
        self.request: Mapping[str, Any] = request or record.request or begun
        low = -1 if after_step is None else after_step
        high = math.inf if up_to_step is None else up_to_step
        self._bounds = (low, high)
        self.steps = [step for step in record.steps if low < step["step"] <= high]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Of these steps. Events of step 0 belong to the first part of a run."""
        low, high = self._bounds
        first = not low or low < 0
        return [
            event
            for event in self.record.of_kind(*kinds)
            if event.get("step") is not None and (low < event["step"] <= high or (first and not event["step"]))
        ]

    @cached_property
    def settled(self) -> list[dict[str, Any]]:
        """The steps without the first few."""
        return self.steps[min(UNSETTLED_STEPS, len(self.steps) // 5) :]

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        low, high = self._bounds
        return [one for one in self.record.samples if one.get("step") is None or low <= one["step"] <= high]

    @cached_property
    def gpu_samples(self) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
        """Samples of cards, of any rank, each with its event."""
        return [(one, part(one, "gpu")) for one in self.samples if part(one, "gpu")]

    @cached_property
    def host_samples(self) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
        """Samples of rank 0's machine."""
        return [(one, host) for one, host in self.host_samples_of_all if not one.get("rank")]

    @cached_property
    def host_samples_of_all(self) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
        """Samples of every machine that the run trains on."""
        return [(one, part(one, "host")) for one in self.samples if part(one, "host")]

    @cached_property
    def losses(self) -> dict[int, float]:
        """By step, NaN and infinite ones included."""
        return {step["step"]: loss for step in self.steps if (loss := number(step, "loss")) is not None}

    @property
    def options(self) -> Mapping[str, Any]:
        """What the user set, of training and of the plan."""
        return part(self.request, "options")

    @property
    def task_options(self) -> Mapping[str, Any]:
        return part(self.request, "task_options")

    @cached_property
    def choices(self) -> dict[str, Mapping[str, Any]]:
        """The plan's choices, by name."""
        return {str(choice.get("name")): choice for choice in objects(self.plan, "choices")}

    def requested(self, name: str) -> Any:
        """What the user asked for; None if it was left open."""
        return part(self.choices, name).get("requested")

    @property
    def store_path(self) -> Path | None:
        """The token store that the run was trained on, if it is still there."""
        path = part(self.request, "prepared").get("data")
        if not isinstance(path, str) or "\0" in path or not (self.record.root / path / "store.json").is_file():
            return None
        return self.record.root / path

    @property
    def begin(self) -> Mapping[str, Any]:
        return next(iter(reversed(self.record.of_kind("begin"))), {})

    @property
    def on_gpu(self) -> bool:
        return not str(self.plan.get("device", "cpu")).startswith("cpu")

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s of the device as measured before the first of these steps: MFU is a share of it."""
        first = seconds_at(self.steps[0]) if self.steps else None
        before = [one for one in self.record.of_kind("flops") if first is None or (seconds_at(one) or 0.0) <= first]
        return finite(before[-1], "peak_flops") if before else None

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def updates(self) -> int:
        """Steps done, those before this part of the run left out."""
        return self.last_step - max(0, self._bounds[0]) if self.steps else 0

    @property
    def steps_in_all(self) -> int | None:
        """The steps that the run is to have."""
        return whole(self.steps[-1], "steps") if self.steps else whole(self.begin, "steps")

    @property
    def rows_per_step(self) -> int | None:
        return whole(self.plan, "global_batch") or (whole(self.steps[-1], "rows") if self.steps else None)

    @cached_property
    def row_changes(self) -> tuple[tuple[int, int], ...]:
        """How many rows the steps had, and from which step on: more than one entry if that changed in the middle.

        A few steps of other sizes do not count: the last of an epoch, or some with rows set aside.
        """
        found: list[tuple[int, int]] = []
        for _, rows, steps in self._stretches:
            if not found or found[-1][1] != rows:
                found.append((steps[0]["step"], rows))
        if 0 < len(found) <= MOST_CHANGES:
            return tuple(found)
        return () if self.rows_per_step is None else ((self.steps[0]["step"] if self.steps else 1, self.rows_per_step),)

    @cached_property
    def _stretches(self) -> list[tuple[int, int, list[dict[str, Any]]]]:
        """Steps in a row that have the same number of rows: how many steps, their rows, and the steps."""
        same: list[list[dict[str, Any]]] = []
        for step in self.steps:
            if same and whole(same[-1][-1], "rows") == whole(step, "rows"):
                same[-1].append(step)
            else:
                same.append([step])
        return [(len(one), rows, one) for one in same if len(one) >= LEAST_STEPS and (rows := whole(one[0], "rows"))]

    @cached_property
    def usual_rows(self) -> int | None:
        """The rows that most steps had. The time of a step and the rows/s are those of these steps."""
        if len(self.row_changes) < 2:
            return self.row_changes[0][1] if self.row_changes else None
        counts: dict[int, int] = {}
        for count, rows, _ in self._stretches:
            counts[rows] = counts.get(rows, 0) + count
        return max(counts, key=lambda rows: counts[rows])

    @cached_property
    def _usual(self) -> list[dict[str, Any]]:
        """The settled steps; if the run changed its rows a step, those of them with the usual number."""
        if len(self.row_changes) < 2:
            return self.settled
        return [step for step in self.settled if whole(step, "rows") == self.usual_rows]

    @property
    def data_rows(self) -> int | None:
        return whole(self.plan, "data_rows") or None

    # ---- Time ----------------------------------------------------------------------------------------------------------

    @cached_property
    def step_s(self) -> Typical | None:
        return Typical.of(step_seconds(step) for step in self._usual)

    @cached_property
    def rows_per_s(self) -> Typical | None:
        rates = []
        for step in self._usual:
            rows, seconds = finite(step, "rows"), step_seconds(step)
            rates.append(rows / seconds if rows and seconds else finite(step, "rows_per_s"))
        return Typical.of(rates)

    @property
    def epoch_s(self) -> float | None:
        """A pass over the data at the measured speed, without evaluations and saves."""
        rate = self.rows_per_s
        return self.data_rows / rate.value if self.data_rows and rate is not None and rate.value else None

    @cached_property
    def time_shares(self) -> dict[str, float]:
        """Which share of the time of these steps went where; empty if it is unknown."""
        totals = dict.fromkeys(TIMES, 0.0)
        for step in self.settled:
            times = part(step, "times")
            if times:
                known = {name: finite(times, name) or 0.0 for name in TIMES}
            else:
                known = {"compute_s": finite(step, "seconds") or 0.0, "data_s": finite(step, "data_wait_s") or 0.0}
            if all(value >= 0 for value in known.values()):
                for name, value in known.items():
                    totals[name] += value
        total = sum(totals.values())
        return {name: value / total for name, value in totals.items()} if total else {}

    @cached_property
    def sessions(self) -> list[tuple[float, float]]:
        """Of the whole run, whichever part of it this is."""
        return sessions_of(self.record)

    @cached_property
    def wall_s(self) -> float:
        """From the first step to the last one, evaluations and saves included, pauses between sessions not; 0 if unknown."""
        times = [at for step in (self.steps[:1] + self.steps[-1:]) if (at := seconds_at(step)) is not None]
        if len(times) < 2:
            return 0.0
        return sum(max(0.0, min(end, times[1]) - max(start, times[0])) for start, end in self.sessions)

    def mean(self, name: str) -> float | None:
        """The mean of a figure over the settled steps."""
        known = [value for step in self.settled if (value := finite(step, name)) is not None]
        return sum(known) / len(known) if known else None

    @cached_property
    def utilization(self) -> float | None:
        """Of the cards, the median over samples after the first steps."""
        first = self.settled[0]["step"] if self.settled else 0
        known = [
            value
            for event, gpu in self.gpu_samples
            if (value := finite(gpu, "utilization")) is not None and (event.get("step") or 0) >= first
        ]
        return median(known) if len(known) >= 3 else None

    # ---- Memory --------------------------------------------------------------------------------------------------------

    def highest(self, name: str) -> int | None:
        """The highest of a figure in bytes over all steps."""
        return max((value for step in self.steps if (value := whole(step, name)) is not None), default=None)

    @property
    def limit_bytes(self) -> int | None:
        return whole(self.plan, "limit_bytes") or (whole(self.steps[-1], "limit_bytes") if self.steps else None)

    @property
    def ooms(self) -> int:
        """Out-of-memory errors that steps survived."""
        return max(len(self.events("oom")), sum(whole(step, "ooms") or 0 for step in self.steps))

    @cached_property
    def host_bytes(self) -> int | None:
        """The most host RAM that the processes of the run held."""
        sampled = (whole(host, "tree_bytes") for _, host in self.host_samples)
        return max((one for one in (self.highest("host_bytes"), *sampled) if one is not None), default=None)

    @cached_property
    def memory_model(self) -> "MemoryModel | None":
        """The plan's, to predict with; None if the plan has none that can be read."""
        from brimful.memory.model import MemoryModel  # numpy takes 50 ms

        try:
            model = MemoryModel.from_json(dict(part(self.plan, "memory_model")))
            factors = [model.margin, model.reserved_ratio]
            terms = [term for phase in model.phases.values() for term in phase.terms.items()]
            powers = [power for powers, _ in terms for power in powers]
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        numbers = all(is_number(value) for value in (*factors, *(value for _, value in terms)))
        return model if terms and numbers and all(is_whole(power, 0) and power <= 2 for power in powers) else None

    def predicted_bytes(self, rows: int, shape: Sequence[int]) -> int | None:
        """What a micro-batch of these rows takes of the limit, by the plan's memory model."""
        model = self.memory_model
        if model is None or rows < 1:
            return None
        try:
            return model.cost_bytes(rows, tuple(shape), whole=rows >= (self.rows_per_step or math.inf))
        except (TypeError, ValueError, OverflowError):  # a model of other lengths
            return None

    def largest_micro_batch(self, shape: Sequence[int], budget_bytes: float) -> int | None:
        """The most rows of this shape that fit the budget, by the plan's memory model; None if that is unknown."""
        model, rows = self.memory_model, self.rows_per_step
        if model is None or rows is None:
            return None
        try:
            return model.largest(tuple(shape), budget_bytes, rows)
        except (TypeError, ValueError, OverflowError):
            return None
