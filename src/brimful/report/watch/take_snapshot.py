"""From a run's folder to a `Snapshot`.

Work and size are bounded however long the run is: `RunRecord` keeps some thousand steps, and curves get at most `SERIES_POINTS` points.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

from brimful.files import read_json
from brimful.report.run_figures import sessions_of
from brimful.report.run_record import RunRecord
from brimful.report.watch.run_snapshot import (
    ACTIVE,
    NO_EVENTS,
    TIME_PARTS,
    Card,
    Evaluation,
    HostMemory,
    Note,
    Oom,
    Saved,
    Series,
    Snapshot,
    WatchState,
)
from brimful.training.events import number
from brimful.training.run import LockHolder
from brimful.training.run_log import NOT_METRICS, RATE_STEPS
from brimful.units import zone

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
    request = record.request or _dict(begin.get("request"))
    end: Mapping[str, Any] = next(iter(record.of_kind("end")[-1:]), {}) if state not in (*ACTIVE, "killed") else {}
    recent = record.steps[-RATE_STEPS:]
    newest = _newest_time(record)
    steps = _whole(last.get("steps")) or _whole(begin.get("steps"))
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
    choices = {str(one.get("name")): one.get("effective") for one in _dicts(plan.get("choices"))}
    saved = [event for event in record.of_kind("checkpoint", "resume") if event.get("saved", True)]
    failed = [event for event in record.of_kind("checkpoint") if event.get("saved") is False]
    evaluations = [_evaluation(event) for event in record.of_kind("eval")]
    bests = [one for one in evaluations if one.best]
    ooms = _ooms(record)
    return Snapshot(
        taken=now,
        run=str(record.root),
        name=record.name,
        state=state,
        task=_text(plan.get("task")) or _text(request.get("task")),
        begun=parse_time(begins[0].get("time")) if begins else None,
        since=since,
        ended=ended,
        trained_s=_trained_s(record, ended or now),
        host=_text(begin.get("host")) or (holder.host if holder else None),
        pid=_whole(begin.get("pid")),
        device_name=_text(plan.get("device_name")),
        processes=_whole(begin.get("processes")),
        sentence=NO_EVENTS if record.lost_its_events else _text(end.get("sentence")),
        resume_command=_resume_command(record, state, request),
        state_label=record.state_label if state == "killed" else "",
        fails_again=record.fails_again,
        silent_s=_silent_s(record, state, newest, now),
        step=int(last.get("step") or 0),
        steps=steps,
        epoch=number(last, "epoch"),
        epochs=_epochs(record, last, steps),
        step_s=_step_s(recent),
        eta_s=eta_s,
        ends=ends,
        global_batch=_whole(plan.get("global_batch")),
        micro_batch=_whole(plan.get("micro_batch")),
        micro_batches=_whole(last.get("micro_batches")) or _whole(plan.get("accumulation")),
        precision=_text(choices.get("precision")),
        layout=_text(plan.get("layout")),
        cards=_cards(record, begin, plan, recent),
        ram=_ram(record, begin, plan),
        times=_times(recent),
        padding=_mean(recent, "padding"),
        mfu=_median(recent, "mfu"),
        tokens_per_s=_median(recent, "tokens_per_s"),
        lr=number(last, "lr"),
        grad_norm=number(last, "grad_norm"),
        loss=_series((step["step"], number(step, "loss")) for step in record.steps),
        rows_per_s=_series((step["step"], number(step, "rows_per_s")) for step in record.steps),
        memory=_series(((step["step"], _peak(step)) for step in record.steps), max),
        utilization=_series(
            (_whole(one.get("step")) or 0, number(_dict(one.get("gpu")), "utilization")) for one in record.samples
        ),
        rate=_series((step["step"], number(step, "lr")) for step in record.steps),
        logged=_logged(record.steps),
        evaluation=evaluations[-1] if evaluations else None,
        evaluations=tuple((one.step, dict(one.metrics)["loss"]) for one in evaluations if "loss" in dict(one.metrics)),
        best=bests[-1] if bests else None,
        checkpoint=_saved(saved[-1]) if saved else None,
        failed_save=_saved(failed[-1]) if failed and (not saved or failed[-1]["step"] > saved[-1]["step"]) else None,
        ooms_survived=sum(oom.change != STOPS for oom in ooms),
        ooms=tuple(ooms[-OOMS_KEPT:]),
        notes=tuple(_notes(record))[-NOTES_KEPT:],
    )


def _cards(
    record: RunRecord, begin: Mapping[str, Any], plan: Mapping[str, Any], recent: Sequence[Mapping[str, Any]]
) -> tuple[Card, ...]:
    samples: dict[int, Mapping[str, Any]] = {}
    for sample in reversed(record.samples):
        if _dict(sample.get("gpu")):
            samples.setdefault(_whole(sample.get("rank")) or 0, _dict(sample["gpu"]))
    by_rank: dict[int, list[Mapping[str, Any]]] = {}
    for step in recent:
        for one in _dicts(step.get("ranks")) or [step]:
            by_rank.setdefault(_whole(one.get("rank")) or 0, []).append(one)
    gpus = _dicts(begin.get("gpus"))
    ranks = sorted({*samples, *by_rank, *range(len(gpus))}) or ([0] if plan else [])
    indices = [_whole(samples.get(rank, {}).get("index")) for rank in ranks]
    kind = str(plan.get("device") or "").partition(":")[0]
    busy = {rank: value for rank in ranks if (value := _mean(by_rank.get(rank, ()), "busy_s"))}
    slowest = max(busy, key=lambda rank: busy[rank], default=None)
    uneven = slowest is not None and len(ranks) > 1 and busy[slowest] > SLOWER * min(busy.values())
    cards = []
    for rank, index in zip(ranks, indices, strict=True):
        steps, sample = by_rank.get(rank, []), samples.get(rank, {})
        gpu = gpus[rank] if rank < len(gpus) else {}
        own_plan = (_plan_file(record, rank) if rank else {}) or plan
        if index is None:
            index = _whole(gpu.get("index"))
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
                label=label,
                rank=rank,
                kind=kind,
                uuid=_text(sample.get("uuid")) or _text(gpu.get("uuid")),
                name=_text(sample.get("name")) or _text(gpu.get("name")) or _text(plan.get("device_name")),
                allocated_bytes=allocated,
                reserved_bytes=reserved,
                held_bytes=held,
                others_bytes=others,
                limit_bytes=limit,
                total_bytes=number(sample, "total_bytes") or number(gpu, "total_bytes"),
                predicted_bytes=number(own_plan, "predicted_peak_bytes"),
                utilization=number(sample, "utilization"),
                temperature_c=number(sample, "temperature_c"),
                power_w=number(sample, "power_w"),
                busy_s=busy.get(rank),
                slowest=uneven and rank == slowest,
                used=used,
                zone=None if used is None else zone(used),
            )
        )
    return tuple(cards)


def _plan_file(record: RunRecord, rank: int) -> dict[str, Any]:
    """The plan of its own that a rank has; empty if it has none. Ranks on devices of one kind share rank 0's."""
    with suppress(OSError, ValueError):
        return read_json(record.folder.own_plan(rank).read_text(encoding="utf-8"))
    return {}


def _ram(record: RunRecord, begin: Mapping[str, Any], plan: Mapping[str, Any]) -> HostMemory | None:
    host = next((_dict(one["host"]) for one in reversed(record.samples) if _dict(one.get("host"))), {})
    tree_bytes, machine = number(host, "tree_bytes"), number(host, "machine_bytes")
    tree_bytes = number(record.last, "host_bytes") if tree_bytes is None else tree_bytes
    machine = number(record.last, "machine_bytes") if machine is None else machine
    limit = number(host, "limit_bytes") or number(begin, "ram_limit_bytes")
    if tree_bytes is None and machine is None and limit is None:
        return None
    used = machine / limit if machine is not None and limit else None
    return HostMemory(
        tree_bytes=tree_bytes,
        machine_bytes=machine,
        limit_bytes=limit,
        limited_by=_text(host.get("limited_by")),
        predicted_bytes=number(_dict(plan.get("host")), "predicted_bytes"),
        swap_used_bytes=number(host, "swap_used_bytes"),
        swap_total_bytes=number(host, "swap_total_bytes"),
        workers=_whole(host.get("workers")),
        cpu=number(host, "cpu"),
        read_bytes_per_s=number(host, "read_bytes_per_s"),
        used=used,
        zone=None if used is None else zone(used),
    )


def _times(recent: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, float], ...]:
    times = [_dict(step.get("times")) for step in recent]
    means = [(part, _mean(times, f"{part}_s")) for part in TIME_PARTS]
    return tuple((part, seconds or 0.0) for part, seconds in means) if any(seconds for _, seconds in means) else ()


def _trained_s(record: RunRecord, end: datetime) -> float | None:
    """Without the pauses between sessions."""
    sessions = sessions_of(record, until=end.timestamp()) if record.of_kind("begin") else []
    return sum(last - first for first, last in sessions) if sessions else None


def _step_s(recent: Sequence[Mapping[str, Any]]) -> float | None:
    """From the end of one step to the end of the next."""
    if times := _times(recent):
        return sum(seconds for _, seconds in times)
    seconds = _mean(recent, "seconds")
    return None if seconds is None else seconds + (_mean(recent, "data_wait_s") or 0.0)


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
    return Series(
        points=tuple(reduced),
        last=points[-1][1],
        minimum=min(finite, default=None),
        maximum=max(finite, default=None),
        not_finite=len(points) - len(finite),
    )


def _logged(steps: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, Series], ...]:
    names = dict.fromkeys(name for step in steps[-1:] for name in _dict(step.get("log")))
    return tuple(
        (name, _series((step["step"], number(_dict(step.get("log")), name)) for step in steps)) for name in names
    )


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
    failure = (_text(event.get("sentence")) or "it could not be written") if event.get("saved") is False else None
    return Saved(
        step=_whole(event.get("step")) or 0,
        time=parse_time(event.get("time")),
        size_bytes=number(event, "size_bytes"),
        seconds=number(event, "seconds"),
        failure=failure,
    )


def _ooms(record: RunRecord) -> list[Oom]:
    """Each error with the growth that followed it on the same rank, if any."""
    ooms: list[Oom] = []
    waiting: dict[int, list[int]] = {}
    for event in record.of_kind("oom", "grow"):
        rank, step, time = (
            _whole(event.get("process")) or 0,
            _whole(event.get("step")) or 0,
            parse_time(event.get("time")),
        )
        sentence = _text(event.get("sentence")) or ""
        if event["event"] == "oom":
            what, _, change = sentence.removeprefix("out of memory in ").partition(": ")
            if not change:
                what, _, change = what.partition("; ")
            ooms.append(Oom(step=step, time=time, rank=rank, what=what, change=_text(event.get("change")) or change))
            waiting.setdefault(rank, []).append(len(ooms) - 1)
            continue
        for index in waiting.pop(rank, []):
            ooms[index] = replace(ooms[index], restored_step=step, restored_time=time, restored=sentence or None)
    return ooms


def _notes(record: RunRecord) -> Iterator[Note]:
    for event in record.events:
        failed = event["event"] == "checkpoint" and event.get("saved") is False
        sentence = _text(event.get("sentence"))
        if (event["event"] in NOTED or failed) and sentence:
            yield Note(
                step=_whole(event.get("step")),
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


def parse_time(value: object) -> datetime | None:
    """An event's or a lock's time; None if it is none. Without a time zone it is taken for UTC."""
    try:
        time = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _dict(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _dicts(value: object) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
