"""What is known of a run at one moment: a frozen `Snapshot`, which `take` makes from the run's folder and `watch_screen` draws.

Work and size are bounded however long the run is: `RunRecord` keeps some thousand steps, and curves get at most `SERIES_POINTS` points.

Every figure may be missing, in a run that has just begun, was killed while it wrote or is of an older version: what is unknown is
None.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any, Literal, cast

from brimful.files import read_json
from brimful.report.run_figures import lengths, objects, parse_time, part, sessions_of, step_seconds, text, whole
from brimful.report.run_record import RunRecord, State
from brimful.training.events import number
from brimful.training.run import LockHolder
from brimful.training.run_log import NOT_METRICS, RATE_STEPS
from brimful.units import Zone, zone

WatchState = Literal[State, "gone"]
"""`gone`: the folder was removed."""
ACTIVE: tuple[WatchState, ...] = ("preparing", "running")
NO_EVENTS = "It has checkpoints, but its events.jsonl is missing: nothing is known about its steps."
TIME_PARTS = ("compute", "data", "communication", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A device and the rank that trains on it."""

    label: str
    """`GPU 0`."""
    rank: int
    name: str | None = None
    """`NVIDIA H200`."""
    kind: str = ""
    """torch's device type: `cuda`, `cpu`."""
    uuid: str | None = None
    """torch's, without a prefix."""
    allocated_bytes: float | None = None
    reserved_bytes: float | None = None
    """Highest peaks of the recent steps."""
    held_bytes: float | None = None
    """What the run holds now, CUDA contexts included, as NVML counts it."""
    others_bytes: float | None = None
    """What other processes hold."""
    limit_bytes: float | None = None
    total_bytes: float | None = None
    predicted_bytes: float | None = None
    """The peak that the plan predicts."""
    utilization: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    times: tuple[tuple[str, float], ...] = ()
    """Of this rank, as `Snapshot.times`."""
    padding: float | None = None
    slowest: bool = False
    live: bool = False
    """Whether NVML has just answered; else the figures are those that the run sampled last."""
    used: float | None = None
    """Share of the limit: of the reserved peak if it is known, else of the allocated one."""
    zone: Zone | None = None

    @property
    def busy_s(self) -> float | None:
        """Seconds of a step that this rank computes, on average."""
        return dict(self.times).get("compute")

    @property
    def ours_bytes(self) -> float | None:
        return next((one for one in (self.reserved_bytes, self.allocated_bytes, self.held_bytes) if one), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """RAM under the limit that binds, a cgroup's or the machine's."""

    tree_bytes: float | None = None
    """Of the run's processes."""
    machine_bytes: float | None = None
    """All that counts against the limit."""
    limit_bytes: float | None = None
    limited_by: str | None = None
    predicted_bytes: float | None = None
    swap_used_bytes: float | None = None
    swap_total_bytes: float | None = None
    workers: int | None = None
    cpu: float | None = None
    read_bytes_per_s: float | None = None
    used: float | None = None
    zone: Zone | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A curve over the steps, thinned to a few hundred points."""

    points: tuple[tuple[int, float], ...] = ()
    last: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    not_finite: int = 0
    """Points that are NaN or infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    step: int
    time: datetime | None
    metrics: tuple[tuple[str, float], ...]
    best: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint, or a save that failed."""

    step: int
    time: datetime | None
    size_bytes: float | None = None
    seconds: float | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Oom:
    """An out-of-memory error and what became of it."""

    step: int
    time: datetime | None
    rank: int
    what: str
    """What ran: `backward, micro-batch 2 of 6 (43 rows)`."""
    change: str
    restored_step: int | None = None
    restored_time: datetime | None = None
    restored: str | None = None
    """How the micro-batch size went back up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    step: int | None
    time: datetime | None
    sentence: str
    warning: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run at one moment. Times have a time zone, sizes are in bytes, shares from 0 to 1."""

    taken: datetime
    run: str
    name: str
    state: WatchState
    task: str | None = None
    begun: datetime | None = None
    """When the run was first started."""
    since: datetime | None = None
    """When it was started last."""
    ended: datetime | None = None
    trained_s: float | None = None
    """From its beginning to its end or its last event, without the pauses before it was resumed."""
    host: str | None = None
    pid: int | None = None
    device_name: str | None = None
    processes: int | None = None
    sentence: str | None = None
    """How it ended."""
    resume_command: str | None = None
    state_label: str = ""
    """The state as people read it, if it is another word."""
    fails_again: bool = False
    """Whether the run ended with an error that must be fixed before it is continued."""
    silent_s: float | None = None
    """Seconds since its last event, if that is longer than usual."""
    switched_from: str | None = None
    """The run that was watched before this newer one began."""
    also_running: tuple[str, ...] = ()
    problem: str | None = None
    """What could not be read."""
    step: int = 0
    steps: int | None = None
    epoch: float | None = None
    epochs: float | None = None
    step_s: float | None = None
    eta_s: float | None = None
    ends: datetime | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    micro_batches: int | None = None
    """Of the last step."""
    precision: str | None = None
    layout: str | None = None
    cards: tuple[Card, ...] = ()
    ram: HostMemory | None = None
    times: tuple[tuple[str, float], ...] = ()
    """Seconds of a step by what they were spent on, in the order of `TIME_PARTS`."""
    padding: float | None = None
    mfu: float | None = None
    tokens_per_s: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    loss: Series = Series()
    rows_per_s: Series = Series()
    memory: Series = Series()
    """Of the fullest card: reserved where it is known, else allocated."""
    utilization: Series = Series()
    """Of all cards, on average."""
    rate: Series = Series()
    """The learning rate."""
    logged: tuple[tuple[str, Series], ...] = ()
    """What the task itself logs of each step, by name."""
    evaluation: Evaluation | None = None
    evaluations: tuple[tuple[int, float], ...] = ()
    """Step and loss of each."""
    best: Evaluation | None = None
    checkpoint: Saved | None = None
    failed_save: Saved | None = None
    """A save after the last checkpoint that failed."""
    ooms_survived: int = 0
    ooms: tuple[Oom, ...] = ()
    """The latest, the oldest first."""
    notes: tuple[Note, ...] = ()
    """The latest, the oldest first."""

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values: unknown and not finite are null, times in ISO 8601."""
        return cast("dict[str, Any]", _plain(self))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {one.name: _plain_field(one.name, getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain_field(name: str, value: Any) -> Any:
    if name in ("times", "metrics", "logged"):
        return {key: _plain(one) for key, one in value}
    return (
        round(value) if name.endswith("_bytes") and isinstance(value, float) and math.isfinite(value) else _plain(value)
    )


MOST_RANKS = 1024
"""Of a plan, which may be damaged."""
SERIES_POINTS = 500
"""Points of a curve: more than twice the columns of a wide terminal."""
NOTES_KEPT = 40
OOMS_KEPT = 20
SLOWER = 1.03
"""A rank that is busy this many times as long as the fastest is marked as the slowest."""
SILENT_S = 60.0
"""A run that samples its machine every five seconds and has written nothing for this long may hang."""
NOTED = ("note", "thrash", "skip", "oversized", "deal", "resume")
WARNINGS = ("thrash", "skip", "oversized")
STOPS = "the run stops"
"""What an out-of-memory error changes that is not survived."""


def take(record: RunRecord, state: WatchState, holder: LockHolder | None, now: datetime) -> Snapshot:
    """The snapshot of a run that has begun, from its folder alone."""
    begins = record.of_kind("begin")
    begin, plan, last = (begins[-1] if begins else {}), record.plan, record.last
    request = record.request or part(begin, "request")
    end: Mapping[str, Any] = next(iter(record.of_kind("end")[-1:]), {}) if state not in (*ACTIVE, "killed") else {}
    recent = record.steps[-RATE_STEPS:]
    newest = _newest_time(record)
    steps = whole(last, "steps") or whole(begin, "steps")
    eta_s = number(last, "eta_s") if state == "running" else None
    last_time = parse_time(last.get("time"))
    ends = None
    if eta_s is not None and last_time is not None and math.isfinite(eta_s) and eta_s < 1e9:
        ends = datetime.fromtimestamp(last_time.timestamp() + eta_s, UTC)
        eta_s = max(0.0, ends.timestamp() - now.timestamp())
    since = parse_time(begin.get("time")) or (parse_time(holder.since) if holder else None)
    if state == "preparing" and holder is not None:
        since = parse_time(holder.since) or since
    ended = None if state in ACTIVE else parse_time(end.get("time")) or newest
    choices = {str(one.get("name")): one.get("effective") for one in objects(plan, "choices")}
    saved = [event for event in record.of_kind("checkpoint", "resume") if event.get("saved", True)]
    failed = [event for event in record.of_kind("checkpoint") if event.get("saved") is False]
    evaluations = [_evaluation(event) for event in record.of_kind("eval")]
    bests = [one for one in evaluations if one.best]
    ooms = _ooms(record)
    return Snapshot(
        taken=now, run=str(record.root), name=record.name, state=state, task=text(plan, "task") or text(request, "task"),
        begun=parse_time(begins[0].get("time")) if begins else None, since=since, ended=ended, trained_s=_trained_s(record),
        host=text(begin, "host") or (holder.host if holder else None), pid=whole(begin, "pid"), device_name=text(plan, "device_name"),
        processes=whole(begin, "processes"), sentence=NO_EVENTS if record.lost_its_events else text(end, "sentence"),
        resume_command=_resume_command(record, state, request), state_label=record.state_label if state == "killed" else "",
        fails_again=record.fails_again, silent_s=_silent_s(record, state, newest, now),
        step=int(last.get("step") or 0), steps=steps, epoch=number(last, "epoch"), epochs=_epochs(record, last, steps),
        step_s=_step_s(recent), eta_s=eta_s, ends=ends, global_batch=whole(plan, "global_batch"), micro_batch=whole(plan, "micro_batch"),
        micro_batches=whole(last, "micro_batches") or whole(plan, "accumulation"), precision=text(choices, "precision"), layout=text(plan, "layout"),
        cards=_cards(record, begin, plan, recent), ram=_ram(record, begin, plan), times=_times(recent), padding=_mean(recent, "padding"),
        mfu=_median(recent, "mfu"), tokens_per_s=_median(recent, "tokens_per_s"), lr=number(last, "lr"), grad_norm=number(last, "grad_norm"),
        loss=_curve(record, "loss"), rows_per_s=_curve(record, "rows_per_s"), rate=_curve(record, "lr"), logged=_logged(record.steps),
        memory=_series(((step["step"], _peak(step)) for step in record.steps), max),
        utilization=_series((whole(one, "step") or 0, number(part(one, "gpu"), "utilization")) for one in record.samples),
        evaluation=evaluations[-1] if evaluations else None, best=bests[-1] if bests else None,
        evaluations=tuple((one.step, dict(one.metrics)["loss"]) for one in evaluations if "loss" in dict(one.metrics)),
        checkpoint=_saved(saved[-1]) if saved else None,
        failed_save=_saved(failed[-1]) if failed and (not saved or failed[-1]["step"] > saved[-1]["step"]) else None,
        ooms_survived=sum(oom.change != STOPS for oom in ooms), ooms=tuple(ooms[-OOMS_KEPT:]), notes=tuple(_notes(record))[-NOTES_KEPT:],
    )  # fmt: skip


def _cards(
    record: RunRecord, begin: Mapping[str, Any], plan: Mapping[str, Any], recent: Sequence[Mapping[str, Any]]
) -> tuple[Card, ...]:
    samples: dict[int, Mapping[str, Any]] = {}
    for sample in reversed(record.samples):
        if part(sample, "gpu"):
            samples.setdefault(whole(sample, "rank") or 0, part(sample, "gpu"))
    by_rank: dict[int, list[Mapping[str, Any]]] = {}
    for step in recent:
        for one in objects(step, "ranks") or [step]:
            by_rank.setdefault(whole(one, "rank") or 0, []).append(one)
    gpu_of = {rank: one for one in objects(begin, "gpus") for rank in lengths(one, "ranks") or ()}
    planned = range(min(whole(plan, "processes") or 1, MOST_RANKS)) if plan else ()
    ranks = sorted({*samples, *by_rank, *gpu_of, *planned})
    indices = [whole(samples.get(rank, {}), "index") for rank in ranks]
    kind = str(plan.get("device") or "").partition(":")[0]
    times = {rank: _times(by_rank.get(rank, ())) for rank in ranks}
    busy = {rank: seconds for rank in ranks if (seconds := dict(times[rank]).get("compute"))}
    slowest = max(busy, key=lambda rank: busy[rank], default=None)
    uneven = slowest is not None and len(ranks) > 1 and busy[slowest] > SLOWER * min(busy.values())
    cards = []
    for rank, index in zip(ranks, indices, strict=True):
        steps, sample = by_rank.get(rank, []), samples.get(rank, {})
        gpu = gpu_of.get(rank, {})
        own_plan = (_plan_file(record, rank) if rank else {}) or plan
        if index is None:
            index = whole(gpu, "index")
        several = len(ranks) > 1
        ambiguous = index is None or indices.count(index) > 1
        label = f"rank {rank}" if several and ambiguous else "CPU" if kind == "cpu" else f"GPU {rank if index is None else index}"  # fmt: skip
        reserved, allocated = _max(steps, "reserved_bytes"), _max(steps, "peak_bytes")
        held, others = number(sample, "used_bytes"), number(sample, "others_bytes")
        held = held - others if held is not None and others is not None else held
        limit = (
            next(iter(_known(reversed(steps), "limit_bytes")), None)
            or number(own_plan, "limit_bytes")
            or number(record.last, "limit_bytes")
            or number(plan, "limit_bytes")
        )
        ours = reserved if reserved is not None else allocated if allocated is not None else held
        used = ours / limit if ours is not None and limit else None
        cards.append(
            Card(
                label=label, rank=rank, kind=kind, uuid=text(sample, "uuid") or text(gpu, "uuid"),
                name=text(sample, "name") or text(gpu, "name") or text(plan, "device_name"), allocated_bytes=allocated, reserved_bytes=reserved,
                held_bytes=held, others_bytes=others, limit_bytes=limit, total_bytes=number(sample, "total_bytes") or number(gpu, "total_bytes"),
                predicted_bytes=number(own_plan, "predicted_peak_bytes"), utilization=number(sample, "utilization"),
                temperature_c=number(sample, "temperature_c"), power_w=number(sample, "power_w"), times=times[rank], padding=_mean(steps, "padding"),
                slowest=uneven and rank == slowest, used=used, zone=None if used is None else zone(used),
            )
        )  # fmt: skip
    return tuple(cards)


def _plan_file(record: RunRecord, rank: int) -> dict[str, Any]:
    """The plan of its own that a rank has; empty if it has none. Ranks on devices of one kind share rank 0's."""
    with suppress(OSError, ValueError):
        return read_json(record.folder.own_plan(rank).read_text(encoding="utf-8"))
    return {}


def _ram(record: RunRecord, begin: Mapping[str, Any], plan: Mapping[str, Any]) -> HostMemory | None:
    host = next(
        (part(one, "host") for one in reversed(record.samples) if part(one, "host") and not one.get("rank")), {}
    )
    tree_bytes, machine = number(host, "tree_bytes"), number(host, "machine_bytes")
    tree_bytes = number(record.last, "host_bytes") if tree_bytes is None else tree_bytes
    machine = number(record.last, "machine_bytes") if machine is None else machine
    limit = number(host, "limit_bytes") or number(begin, "ram_limit_bytes")
    if tree_bytes is None and machine is None and limit is None:
        return None
    used = machine / limit if machine is not None and limit else None
    return HostMemory(
        tree_bytes=tree_bytes, machine_bytes=machine, limit_bytes=limit, limited_by=text(host, "limited_by"),
        predicted_bytes=number(part(plan, "host"), "predicted_bytes"), workers=whole(host, "workers"), used=used,
        zone=None if used is None else zone(used),
        **{name: number(host, name) for name in ("swap_used_bytes", "swap_total_bytes", "cpu", "read_bytes_per_s")},
    )  # fmt: skip


def _times(steps: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, float], ...]:
    """Of steps, or of what one rank did in them."""
    times = [part(step, "times") for step in steps]
    means = [(part, _mean(times, f"{part}_s")) for part in TIME_PARTS]
    return tuple((part, seconds or 0.0) for part, seconds in means) if any(seconds for _, seconds in means) else ()


def _trained_s(record: RunRecord) -> float | None:
    """Without the pauses between sessions."""
    return sum(end - start for start, end in sessions_of(record)) if record.of_kind("begin") else None


def _step_s(recent: Sequence[Mapping[str, Any]]) -> float | None:
    """From the end of one step to the end of the next: the median, as the time left is, so that both say the same."""
    known = [seconds for step in recent if (seconds := step_seconds(step)) is not None]
    return median(known) if known else None


def _epochs(record: RunRecord, last: Mapping[str, Any], steps: int | None) -> float | None:
    """Of the whole run."""
    rows, per_step = number(record.plan, "data_rows"), number(record.plan, "global_batch")
    if steps and rows and per_step:
        return steps * per_step / rows
    epoch, step = number(last, "epoch"), last.get("step")
    return epoch / step * steps if epoch and step and steps else None


def _peak(step: Mapping[str, Any]) -> float | None:
    reserved = number(step, "reserved_bytes")
    return number(step, "peak_bytes") if reserved is None else reserved


def _curve(record: RunRecord, name: str) -> Series:
    """One figure of the steps."""
    return _series((step["step"], number(step, name)) for step in record.steps)


def _series(values: Iterable[tuple[int, float | None]], together: Callable[[Sequence[float]], float] = fmean) -> Series:
    """`together` makes one point of neighbours, where there are too many."""
    points = [(step, value) for step, value in values if value is not None]
    finite = [value for _, value in points if math.isfinite(value)]
    if not points:
        return Series()
    size = -(-len(points) // SERIES_POINTS)
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    reduced: list[tuple[int, float]] = []
    for group in groups:
        good = [value for _, value in group if math.isfinite(value)]
        step = group[-1 if reduced else 0][0]  # the curve begins with the first and ends with the last
        reduced.append((step, together(good) if len(good) == len(group) else math.nan))
    least, most = min(finite, default=None), max(finite, default=None)
    return Series(points=tuple(reduced), last=points[-1][1], minimum=least, maximum=most, not_finite=len(points) - len(finite))  # fmt: skip


def _logged(steps: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, Series], ...]:
    """What the task logs, by name."""
    names = [*part(steps[-1], "log")] if steps else []
    return tuple((name, _series((step["step"], number(part(step, "log"), name)) for step in steps)) for name in names)


def _evaluation(event: Mapping[str, Any]) -> Evaluation:
    names = [name for name in event if name not in NOT_METRICS and not name.endswith("_is")]
    metrics = ((name, number(event, name)) for name in names)
    return Evaluation(
        step=event["step"],
        time=parse_time(event.get("time")),
        metrics=tuple((name, value) for name, value in metrics if value is not None),
        best=event.get("best") is True,
    )


def _saved(event: Mapping[str, Any]) -> Saved:
    failure = (text(event, "sentence") or "it could not be written") if event.get("saved") is False else None
    step, time, seconds = whole(event, "step") or 0, parse_time(event.get("time")), number(event, "seconds")
    return Saved(step=step, time=time, size_bytes=number(event, "size_bytes"), seconds=seconds, failure=failure)


def _ooms(record: RunRecord) -> list[Oom]:
    """Each error with the growth that followed it on the same rank, if any."""
    ooms: list[Oom] = []
    waiting: dict[int, list[int]] = {}
    for event in record.of_kind("oom", "grow"):
        rank, step, time = whole(event, "process") or 0, whole(event, "step") or 0, parse_time(event.get("time"))
        sentence = text(event, "sentence") or ""
        if event["event"] == "oom":
            what, _, change = sentence.removeprefix("out of memory in ").partition(": ")
            if not change:
                what, _, change = what.partition("; ")
            ooms.append(Oom(step=step, time=time, rank=rank, what=what, change=text(event, "change") or change))
            waiting.setdefault(rank, []).append(len(ooms) - 1)
            continue
        for index in waiting.pop(rank, []):
            ooms[index] = replace(ooms[index], restored_step=step, restored_time=time, restored=sentence or None)
    return ooms


def _notes(record: RunRecord) -> Iterator[Note]:
    for event in record.events:
        failed = event["event"] == "checkpoint" and event.get("saved") is False
        sentence = text(event, "sentence")
        if (event["event"] in NOTED or failed) and sentence:
            yield Note(
                step=whole(event, "step"),
                time=parse_time(event.get("time")),
                sentence=sentence,
                warning=failed or event["event"] in WARNINGS or event.get("level") == "warning",
            )


def _resume_command(record: RunRecord, state: WatchState, request: Mapping[str, Any]) -> str | None:
    """None if the run goes on, is complete or has nothing to continue from, or was given its rows in memory."""
    if state in (*ACTIVE, "finished", "patience", "gone") or not record.folder.has_checkpoint:
        return None
    return record.folder.resume_command if request.get("data") is not None else None


def _silent_s(record: RunRecord, state: WatchState, newest: datetime | None, now: datetime) -> float | None:
    """Only a run that samples its machine has something to write all the time."""
    if state != "running" or newest is None or not record.samples:
        return None
    silent = (now - newest).total_seconds()
    return silent if silent > SILENT_S else None


def _newest_time(record: RunRecord) -> datetime | None:
    times = [parse_time(one[-1].get("time")) for one in (record.events, record.steps, record.samples) if one]
    return max((time for time in times if time is not None), default=None)


def _max(events: Iterable[Mapping[str, Any]], name: str) -> float | None:
    return max(_known(events, name), default=None)


def _mean(events: Iterable[Mapping[str, Any]], name: str) -> float | None:
    return fmean(values) if (values := _known(events, name)) else None


def _median(events: Iterable[Mapping[str, Any]], name: str) -> float | None:
    return median(values) if (values := _known(events, name)) else None


def _known(events: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    return [value for event in events if (value := number(event, name)) is not None and math.isfinite(value)]
