"""The figures of a run, worked out once from its record: what the page, the Markdown and the JSON of `brimful report` show.

Nothing here is a sentence, and nothing is guessed: a figure that the run did not record is None. Of a long run `RunRecord` has
some thousand steps, so its highest peak is that of the steps which were read; counts of rare events are complete.
"""

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from brimful.charts import Floats
from brimful.errors import BadRun
from brimful.report.run_figures import RunFigures, objects, part, seconds_at, sessions_of, text
from brimful.report.run_record import RunRecord
from brimful.training import events as journal
from brimful.units import Zone, zone

TIME_PARTS = ("compute_s", "data_s", "communication_s", "other_s")
WARM_UP_STEPS = 3
"""Steps left out of typical speeds where there are enough: the first ones compile, allocate and fill caches."""
GPU_FIGURES = ("utilization", "temperature_c", "power_w", "used_bytes", "total_bytes", "others_bytes")
HOST_FIGURES = ("tree_bytes", "machine_bytes", "limit_bytes", "swap_used_bytes", "workers", "cpu", "read_bytes_per_s")
LARGEST = 1e39
STEP_FIGURES = (
    "loss", "lr", "grad_norm", "rows", "tokens", "rows_per_s", "tokens_per_s", "mfu", "padding", "micro_batches", "ooms", "seconds",
    "peak_bytes", "reserved_bytes", "limit_bytes", "host_bytes", "machine_bytes", "epoch",
)  # fmt: skip


class Clock:
    """Seconds that the run was at work, from its beginning. The time between two sessions does not count."""

    def __init__(self, run: RunRecord) -> None:
        seen = sorted(filter(None, (seconds_at(event) for event in (*run.events, *run.steps, *run.samples))))
        self._starts, self._spans, self._before = [], [], []
        """Of each session: when it began, how long it lasted, and the work before it."""
        worked = 0.0
        for start, end in sessions_of(run):
            self._starts.append(start)
            self._spans.append(end - start)
            self._before.append(worked)
            worked += self._spans[-1]
        self.total_s = worked
        self.first = self._starts[0] if self._starts else None
        self.last = seen[-1] if seen else None

    @property
    def sessions(self) -> list[tuple[float, float]]:
        """From and to, in seconds of work."""
        return [(before, before + span) for before, span in zip(self._before, self._spans, strict=True)]

    def seconds(self, event: Mapping[str, Any]) -> float:
        """NaN for an event without a time."""
        at = seconds_at(event)
        if at is None or not self._starts:
            return math.nan
        place = max(bisect_right(self._starts, at) - 1, 0)
        return self._before[place] + min(max(at - self._starts[place], 0.0), self._spans[place])

    def column(self, events: Iterable[Mapping[str, Any]]) -> Floats:
        return np.array([self.seconds(event) for event in events], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFigures:
    """What one rank's GPU did over the run."""

    rank: int
    name: str | None
    utilization: float | None
    """The median of its samples, as is the power; of temperature and memory the highest."""
    power_w: float | None
    temperature_c: float | None
    used_bytes: float | None
    others_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """What one rank did in its steps."""

    rank: int
    peak_bytes: float | None
    reserved_bytes: float | None
    padding: float | None
    time_shares: dict[str, float]
    """As `ReportFigures.time_shares`, of this rank."""


class ReportFigures:
    """One run in numbers. What takes time is worked out when it is first asked for, and kept."""

    def __init__(self, run: RunRecord, *, wording: Callable[[str], str] = str) -> None:
        """`wording` turns the arguments that notes, warnings and reasons name into what the reader types."""
        self.run, self.wording = run, wording
        self.plan = run.plan
        self.request = run.request
        self.state, self.state_label = run.state, run.state_label
        self.clock = Clock(run)
        self.name = self.run.name
        self.begin: Mapping[str, Any] = next(reversed(self.run.of_kind("begin")), {})
        self.task = text(self.request, "task") or text(self.plan, "task")
        self.device_name = text(self.plan, "device_name")
        self.processes = int(number(self.begin, "processes") or number(self.plan, "processes") or 1)
        self.ending = next((text(event, "sentence") for event in reversed(self.run.of_kind("end"))), None)
        """The sentence of the last `end` event."""
        self.predicted_time: Mapping[str, Any] = part(self.plan, "run_time")
        self.predicted_bytes = number(self.plan, "predicted_peak_bytes")
        self.host_predicted_bytes = number(part(self.plan, "host"), "predicted_bytes")
        self.ooms = self.run.of_kind("oom")
        self.evals = self.run.of_kind("eval")
        self.checkpoints = [event for event in self.run.of_kind("checkpoint") if event.get("saved") is not False]
        self.steps, self.samples = run.steps, run.samples
        _refuse_a_sweep(run)

    # ---- How far it came -------------------------------------------------------------------------------------------------

    @cached_property
    def step(self) -> int:
        return int(self.step_numbers[-1]) if len(self.steps) else 0

    @cached_property
    def planned_steps(self) -> int | None:
        steps = number(self.run.last, "steps") or number(self.begin, "steps") or number(self.predicted_time, "steps")
        return None if steps is None else int(steps)

    @cached_property
    def epochs(self) -> float | None:
        return last_known(self.column("epoch"))

    @cached_property
    def rows_so_far(self) -> Floats:
        """Rows trained up to each step. Steps that were not read count as the one after them."""
        rows, numbers = self.column("rows"), self.step_numbers
        if not len(rows):
            return rows
        return np.cumsum(np.nan_to_num(rows) * np.diff(numbers, prepend=0))

    @cached_property
    def rows(self) -> int | None:
        return int(self.rows_so_far[-1]) if len(self.rows_so_far) and self.rows_so_far[-1] > 0 else None

    @cached_property
    def seconds_per_epoch(self) -> float | None:
        """A pass over the data at the measured speed; where the rows are not known, from the first step to the last."""
        if (typical := self._typical.epoch_s) is not None:
            return typical
        epochs, times = self.column("epoch"), self.times
        known = np.isfinite(epochs) & np.isfinite(times)
        if known.sum() < 2:
            return None
        passed = epochs[known][-1] - epochs[known][0]
        return float((times[known][-1] - times[known][0]) / passed) if passed > 0 else None

    @cached_property
    def left_s(self) -> float | None:
        """Until it is done, as the newest step says; None unless it trains."""
        return number(self.run.last, "eta_s") if self.state == "running" else None

    # ---- How fast it was -------------------------------------------------------------------------------------------------

    @cached_property
    def _typical(self) -> RunFigures:
        """The figures that `compare` and `why` show, so that all views agree."""
        return RunFigures(self.run)

    @cached_property
    def step_s(self) -> float | None:
        """The wall time of a typical step."""
        if self._typical.step_s is not None:
            return self._typical.step_s.value
        return self.typical(np.where(self.part_sum > 0, self.part_sum, self.column("seconds")))

    @cached_property
    def rows_per_s(self) -> float | None:
        if self._typical.rows_per_s is not None:
            return self._typical.rows_per_s.value
        return self.typical(self.column("rows_per_s"))

    @cached_property
    def tokens_per_s(self) -> float | None:
        return self.typical(self.column("tokens_per_s"))

    @cached_property
    def mfu(self) -> float | None:
        return self._typical.mean("mfu")

    @cached_property
    def padding(self) -> float | None:
        return self._typical.mean("padding")

    @cached_property
    def time_shares(self) -> dict[str, float]:
        """Of the steps' wall time, by part; empty where the run did not record it."""
        return self._typical.time_shares if self.part_sum.any() else {}

    # ---- Its memory ------------------------------------------------------------------------------------------------------

    @cached_property
    def limit_bytes(self) -> float | None:
        return last_known(self.column("limit_bytes")) or number(self.plan, "limit_bytes")

    @cached_property
    def peak_bytes(self) -> float | None:
        return highest(self.column("peak_bytes"))

    @cached_property
    def reserved_bytes(self) -> float | None:
        return highest(self.column("reserved_bytes"))

    @cached_property
    def used_bytes(self) -> float | None:
        """What counts against the limit: reserved bytes where they are known."""
        return self.reserved_bytes or self.peak_bytes

    @cached_property
    def used(self) -> float | None:
        """The share of the limit."""
        return self.used_bytes / self.limit_bytes if self.used_bytes and self.limit_bytes else None

    @cached_property
    def zone(self) -> Zone | None:
        return None if self.used is None else zone(self.used)

    @cached_property
    def others_bytes(self) -> float | None:
        """The most that other processes held on a card."""
        return highest(self.gpu_column("others_bytes"))

    @cached_property
    def host_bytes(self) -> float | None:
        """The most that the run's processes held of the host's RAM."""
        return self._typical.host_bytes

    @cached_property
    def machine_bytes(self) -> float | None:
        return highest(np.concatenate((self.host_column("machine_bytes"), self.column("machine_bytes"))))

    @cached_property
    def host_limit_bytes(self) -> float | None:
        return last_known(self.host_column("limit_bytes")) or number(self.begin, "ram_limit_bytes")

    # ---- What happened ---------------------------------------------------------------------------------------------------

    @cached_property
    def oom_count(self) -> int:
        """Events, or what the steps counted where a step had several."""
        return self._typical.ooms

    @cached_property
    def eval_losses(self) -> tuple[Floats, Floats]:
        """Steps and losses of the evaluations that have one."""
        known = [(_step(event), event["loss"]) for event in self.evals if is_number(event.get("loss"))]
        steps, losses = np.array(known, dtype=np.float64).reshape(-1, 2).T
        return steps, losses

    @cached_property
    def best_eval(self) -> Mapping[str, Any] | None:
        """The one that the run marked as its best, else the lowest loss."""
        marked = [event for event in self.evals if event.get("best") is True]
        known = [event for event in self.evals if is_number(event.get("loss"))]
        return marked[-1] if marked else min(known, key=lambda event: event["loss"], default=None)

    @cached_property
    def best_loss(self) -> float | None:
        """Of the best evaluation."""
        return None if self.best_eval is None else number(self.best_eval, "loss")

    @cached_property
    def losses(self) -> tuple[float, float] | None:
        """The first, and the mean of the last twentieth."""
        known = self.column("loss")
        known = known[np.isfinite(known)]
        return (float(known[0]), float(known[-max(len(known) // 20, 1) :].mean())) if len(known) else None

    @cached_property
    def bad_losses(self) -> int:
        """Steps whose loss was NaN or infinite."""
        return sum(
            not math.isfinite(value) for event in self.steps if (value := journal.number(event, "loss")) is not None
        )

    @cached_property
    def bad_from(self) -> int | None:
        """The step from which on no loss is a number; None if the last one is."""
        bad_from = None
        for event in self.steps:
            value = journal.number(event, "loss")
            if value is not None:
                bad_from = None if math.isfinite(value) else bad_from or int(event["step"])
        return bad_from

    @cached_property
    def kept_checkpoints(self) -> int | None:
        """How many of them are on disk still; None if the folder was moved without them."""
        folder = self.run.root / "checkpoints"
        with suppress(OSError):
            return sum(path.is_dir() and path.name.startswith("step-") for path in folder.iterdir())
        return None

    @cached_property
    def skipped_steps(self) -> int:
        return sum(event.get("applied") is False for event in self.steps)

    # ---- Its machine -----------------------------------------------------------------------------------------------------

    @cached_property
    def cards(self) -> list[CardFigures]:
        """One for each rank that has samples of a GPU."""
        ranks = sorted({rank for event in self.samples if part(event, "gpu") and (rank := _rank(event)) is not None})
        return [self._card(rank) for rank in ranks]

    def _card(self, rank: int) -> CardFigures:
        samples = [event for event in self.samples if _rank(event) == rank]
        names = (text(part(event, "gpu"), "name") for event in samples)
        return CardFigures(
            rank=rank, name=next(filter(None, names), None),
            utilization=middle(self.gpu_column("utilization", rank)), power_w=middle(self.gpu_column("power_w", rank)),
            temperature_c=highest(self.gpu_column("temperature_c", rank)), used_bytes=highest(self.gpu_column("used_bytes", rank)),
            others_bytes=highest(self.gpu_column("others_bytes", rank)),
        )  # fmt: skip

    @cached_property
    def ranks(self) -> list[RankFigures]:
        """One for each rank that has recorded steps."""
        by_rank: dict[int, list[Mapping[str, Any]]] = {}
        for event in self.steps:
            for one in objects(event, "ranks"):
                if (rank := _rank(one)) is not None:
                    by_rank.setdefault(rank, []).append(one)
        return [
            RankFigures(
                rank=rank, peak_bytes=highest(_column(steps, "peak_bytes")), reserved_bytes=highest(_column(steps, "reserved_bytes")),
                padding=mean(_column(steps, "padding")), time_shares=_shares([_column([part(one, "times") for one in steps], name) for name in TIME_PARTS]),
            )
            for rank, steps in sorted(by_rank.items())
        ]  # fmt: skip

    @cached_property
    def utilization(self) -> float | None:
        """The median over the samples of all cards; of a short run, those of its first steps too."""
        typical = self._typical.utilization
        return middle(self.gpu_column("utilization")) if typical is None else typical

    @cached_property
    def energy_kwh(self) -> float | None:
        """The mean power of its cards over its time; None without a reading."""
        powers = [self.gpu_column("power_w", card.rank) for card in self.cards]
        means = [float(np.nanmean(power)) for power in powers if np.isfinite(power).any()]
        return sum(means) * self.clock.total_s / 3.6e6 if means and self.clock.total_s else None

    # ---- Columns ---------------------------------------------------------------------------------------------------------

    @cached_property
    def step_numbers(self) -> Floats:
        return np.array([_step(event) for event in self.steps], dtype=np.float64)

    @cached_property
    def times(self) -> Floats:
        """Seconds of work at each step."""
        return self.clock.column(self.steps)

    @cached_property
    def sample_times(self) -> Floats:
        return self.clock.column(self.samples)

    def column(self, name: str) -> Floats:
        """One figure of every step; NaN where it is unknown."""
        return _column(self.steps, name)

    @cached_property
    def logged_names(self) -> list[str]:
        """What the task itself logs of each step, such as the rewards of `dpo`, in its order."""
        return list(dict.fromkeys(name for event in self.steps for name in part(event, "log")))

    def logged(self, name: str) -> Floats:
        """One of these for every step."""
        return _column([part(event, "log") for event in self.steps], name)

    def scores(self, name: str) -> tuple[Floats, Floats]:
        """Step and value of a score in each evaluation that has it."""
        found = [(float(_step(event)), value) for event in self.evals if (value := number(event, name)) is not None]
        return np.array([step for step, _ in found]), np.array([value for _, value in found])

    def part(self, name: str) -> Floats:
        """One part of every step's time."""
        return _column([part(event, "times") for event in self.steps], name)

    @cached_property
    def part_sum(self) -> Floats:
        return np.nansum([self.part(name) for name in TIME_PARTS], axis=0)

    def gpu_column(self, name: str, rank: int | None = None) -> Floats:
        """One figure of every sample of a GPU, or of one rank's; NaN in the samples of the others."""
        return _column(
            [part(event, "gpu") if rank is None or _rank(event) == rank else {} for event in self.samples], name
        )

    def host_column(self, name: str) -> Floats:
        """Of rank 0's machine."""
        return _column([part(event, "host") if not event.get("rank") else {} for event in self.samples], name)

    def typical(self, values: Floats) -> float | None:
        """The median without the first steps."""
        return middle(values[WARM_UP_STEPS:] if len(values) > 4 * WARM_UP_STEPS else values)

    # ---- As JSON ---------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Every figure and every series, in plain JSON without NaN. Sizes are bytes, times are seconds, shares are 0 … 1."""
        time = self.predicted_time
        return {
            "name": self.name, "folder": os.fspath(self.run.root), "state": self.state, "task": self.task, "data": self.request.get("data"),
            "device_name": self.device_name, "processes": self.processes, "started": iso(self.clock.first), "last_event": iso(self.clock.last),
            "ending": self.ending, "steps": self.step, "planned_steps": self.planned_steps, "epochs": self.epochs, "rows": self.rows,
            "seconds": self.clock.total_s, "sessions": len(self.clock.sessions), "seconds_left": self.left_s,
            "seconds_per_epoch": self.seconds_per_epoch, "step_s": self.step_s, "rows_per_s": self.rows_per_s,
            "tokens_per_s": self.tokens_per_s, "mfu": self.mfu, "padding": self.padding, "time_shares": self.time_shares,
            "predicted_epoch_s": number(time, "epoch_s"), "predicted_total_s": number(time, "total_s"),
            "memory": {
                "limit_bytes": self.limit_bytes, "predicted_bytes": self.predicted_bytes, "peak_bytes": self.peak_bytes,
                "reserved_bytes": self.reserved_bytes, "used": self.used, "zone": self.zone, "others_bytes": self.others_bytes,
                "host_bytes": self.host_bytes, "machine_bytes": self.machine_bytes, "host_limit_bytes": self.host_limit_bytes,
                "host_predicted_bytes": self.host_predicted_bytes,
            },
            "loss": {"first": self.losses and self.losses[0], "last": self.losses and self.losses[1], "best_eval": self.best_loss,
                     "bad_steps": self.bad_losses, "skipped_steps": self.skipped_steps},
            "ooms": self.oom_count, "checkpoints": len(self.checkpoints), "evaluations": len(self.evals),
            "ranks": [asdict(rank) for rank in self.ranks], "cards": [asdict(card) for card in self.cards], "utilization": self.utilization, "energy_kwh": self.energy_kwh,
            "steps_thinned": self.run.step_lines_skipped, "plan": self.plan, "events": self.run.events, "series": self.series(),
        }  # fmt: skip

    def series(self) -> dict[str, dict[str, list[float | None]]]:
        """What the charts are drawn from, by step and by sample."""
        steps = {"step": self.step_numbers, "work_s": self.times, **{name: self.column(name) for name in STEP_FIGURES}}
        steps |= {name: self.part(name) for name in TIME_PARTS}
        steps |= {f"log_{name}": self.logged(name) for name in self.logged_names}
        numbers = _column(self.samples, "step")
        samples = {"step": numbers, "work_s": self.sample_times, "rank": _column(self.samples, "rank")}
        samples |= {f"gpu_{name}": self.gpu_column(name) for name in GPU_FIGURES}
        samples |= {f"host_{name}": self.host_column(name) for name in HOST_FIGURES}
        return {
            kind: {name: [None if not math.isfinite(one) else one for one in values.tolist()] for name, values in columns.items() if np.isfinite(values).any()}
            for kind, columns in (("steps", steps), ("samples", samples))
        }  # fmt: skip


# ---- Reading what may be missing or of another type ----------------------------------------------------------------------


def _refuse_a_sweep(run: RunRecord) -> None:
    """Its events look like a run's, and its own page has the name that this one would have."""
    if any("heads" in event for event in run.of_kind("begin")):
        raise BadRun(f"{run.root} is a sweep, whose page is {run.root / 'report.html'}. Try: a folder that `brimful train` wrote.")  # fmt: skip


def number(values: Mapping[str, Any], name: str) -> float | None:
    """A number that can be drawn; None for anything else."""
    value = journal.number(values, name)
    return value if is_number(value) else None


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is finite, and no larger than a float32 can be."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def _rank(event: Mapping[str, Any]) -> int | None:
    rank = event.get("rank")
    return rank if isinstance(rank, int) else None


def _step(event: Mapping[str, Any]) -> int:
    """A step's number, no larger than a float can hold."""
    return max(min(event["step"], 2**53), -(2**53))


def _column(events: Sequence[Mapping[str, Any]], name: str) -> Floats:
    values = (number(event, name) for event in events)
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _shares(parts: Sequence[Floats]) -> dict[str, float]:
    """Of these seconds, in the order of `TIME_PARTS`; empty if there are none."""
    sums = [float(np.nansum(values)) for values in parts]
    total = sum(sums)
    return {name: value / total for name, value in zip(TIME_PARTS, sums, strict=True)} if total > 0 else {}


def mean(values: npt.NDArray[np.float64]) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def highest(values: npt.NDArray[np.float64]) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else None


def middle(values: npt.NDArray[np.float64]) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None


def last_known(values: npt.NDArray[np.float64]) -> float | None:
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else None


def iso(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
