"""The out-of-memory errors of a run: what ran, what was there, what changed, and fixes with the run's own figures.

An `oom` event has what the micro-batch was predicted to need and what the device had. Together with the samples of the card and the
lengths of the rows that decides the cause:

    longer rows than planned for              the data
    prediction within `fill` of the room      the prediction was too low, or memory was fragmented; the task lacks `shape` if the plan warned
    less room, and others hold memory         other programs
    less room                                 the device has less than when the plan was made

Fixes are predicted by the plan's memory model for the very rows that failed ("micro-batches of 32 rows: predicted 12.1 GiB"), and
their cost in speed is what the plan timed. Without a memory model nothing is predicted.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from brimful.report.run_figures import (
    RunFigures,
    finite,
    in_parts,
    lengths,
    objects,
    part,
    show_lengths,
    step_seconds,
    whole,
)
from brimful.report.why.diagnosis import Certainty, Diagnosis, Finding, Fix, say
from brimful.units import MiB, flag_bytes, show_bytes, show_rows, zone

if TYPE_CHECKING:
    from brimful.data.store import Store

FEW = 0.01
"""A length that more than this share of the rows reaches is not that of one long row."""
CHUNK_ROWS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRow:
    """A row that is longer than almost all others."""

    row: int
    """Its index in the token store, from 0."""
    lengths: tuple[int, ...]
    alike: int
    """Rows at least as long, this one included."""
    file: str
    """Where it is: a raw file if its line is known, else the token store."""
    line: int | None
    """Of the raw file, from 1; None if rows were dropped, a line gave several, or they come from several files."""


def find_long_row(run: RunFigures, shape: Sequence[int]) -> LongRow | None:
    """The row that made a padded micro-batch this long; None if that is unknown, or if it is not about a few rows."""
    store = _store(run)
    if store is None or len(store.length_fields) != len(shape) or not len(store):
        return None
    means = store.mean_lengths
    axis = max(range(len(shape)), key=lambda axis: shape[axis] / max(1.0, means[axis]))
    first, alike = -1, 0
    found: tuple[int, ...] = ()
    for start, sizes in _sizes(store):
        long_enough = (sizes[:, axis] >= shape[axis]).nonzero()[0]
        if len(long_enough) and first < 0:
            first, found = start + int(long_enough[0]), tuple(map(int, sizes[long_enough[0]]))
        alike += len(long_enough)
    if first < 0 or alike > max(1, FEW * len(store)):
        return None
    meta, sources = store.meta, store.meta.sources
    one_each = not any(meta.dropped.values()) and meta.rows == meta.rows_in  # else a line gave no row, or several
    in_lines = len(sources) == 1 and Path(sources[0]).suffix == ".jsonl" and one_each
    return LongRow(
        row=first, lengths=found, alike=alike, file=sources[0] if in_lines else str(store.path), line=first + 1 if in_lines else None
    )  # fmt: skip


def longest_lengths(run: RunFigures) -> tuple[int, ...] | None:
    """The longest of each field in the run's token store; None without one."""
    store = _store(run)
    return None if store is None or not len(store) else store.longest


def share_longer(run: RunFigures, limits: Sequence[int]) -> float | None:
    """The share of the rows that are longer than these limits in some field; None if lengths are unknown."""
    store = _store(run)
    if store is None or len(store.length_fields) != len(limits) or not len(store):
        return None
    return sum(int((sizes > list(limits)).any(axis=1).sum()) for _, sizes in _sizes(store)) / len(store)


def has_store(run: RunFigures) -> bool:
    """Whether the run was trained on a token store that is still there."""
    return _store_path(run) is not None


def _store_path(run: RunFigures) -> Path | None:
    path = part(run.request, "prepared").get("data")
    if not isinstance(path, str) or "\0" in path or not (run.record.root / path / "store.json").is_file():
        return None
    return run.record.root / path


def _store(run: RunFigures) -> "Store | None":
    path = _store_path(run)
    if path is None:
        return None
    try:
        from brimful.data.store import Store  # pyarrow takes 60 ms

        return Store.open(path, verify=False)
    except Exception:  # damaged, or of another version: then its rows are not named
        return None


def _sizes(store: "Store") -> Iterator[tuple[int, Any]]:
    import numpy as np

    for start in range(0, len(store), CHUNK_ROWS):
        yield start, store.shapes(np.arange(start, min(start + CHUNK_ROWS, len(store))))


FILL = 0.85
"""Of a plan that does not say."""
OTHERS_SHARE = 0.02
"""Memory of other programs below this share of the card explains nothing."""
LOST_SHARE = 0.01
"""Repeated steps that took less than this share of the time are not worth mentioning."""


def oom_findings(run: RunFigures) -> Iterator[Finding]:
    yield from _errors_of_steps(run)
    yield from _rows_set_aside(run)


def resource(run: RunFigures) -> Literal["gpu", "host"]:
    """What the training memory of this run is part of."""
    return "gpu" if run.on_gpu else "host"


def _errors_of_steps(run: RunFigures) -> Iterator[Finding]:
    """One diagnosis for all of them, since they usually have one cause."""
    errors = run.events("oom")
    if not errors:
        return
    error = next((one for one in errors if whole(one, "rows") and lengths(one, "shape") is not None), errors[0])
    causes, certainty = _causes(run, error)
    last = errors[-1]["step"]
    died = run.record.state == "failed" and last >= run.last_step
    restored = next((event["step"] for event in run.record.of_kind("grow") if (event["step"] or 0) > last), None)
    lost = _lost_share(run)
    figures = {
        "ooms": len(errors), "steps": [one["step"] for one in errors][:20], "rows": whole(error, "rows"), "shape": error.get("shape"),
        "predicted_bytes": whole(error, "predicted_bytes"), "available_bytes": whole(error, "available_bytes"),
        "restored_at_step": restored, "lost_share": lost, **causes,
    }  # fmt: skip
    sentences = [
        _what(errors, error),
        *_explained(run, error, causes),
        *_consequences(run, error, died, restored, lost),
    ]
    if (error["step"] or 0) > 1 and any(event["step"] == error["step"] - 1 for event in run.record.of_kind("eval")):
        sentences.insert(1, say("It was the first step after an evaluation, which has a peak of its own."))
    yield Finding(
        0.98 if died else 0.5,
        Diagnosis(
            resource=resource(run),
            kind="gpu-out-of-memory" if run.on_gpu else "cpu-out-of-memory",
            cause=" ".join(sentences),
            certainty=certainty,
            figures=figures,
            evidence=f"events.jsonl, step {error['step']}: {error.get('sentence', '')}",
            fixes=tuple(_fixes(run, error, causes)),
        ),
    )


def _what(errors: Sequence[Mapping[str, Any]], error: Mapping[str, Any]) -> str:
    """How often memory ran out, when, and in what."""
    rows, shape, phase = whole(error, "rows"), lengths(error, "shape"), error.get("phase")
    size = show_size(rows, shape or ()) if rows else say("a micro-batch")
    known = isinstance(phase, str) and phase
    if len(errors) == 1:
        template = (
            "Memory ran out once, in step {step} ({phase}, {size})."
            if known
            else "Memory ran out once, in step {step} ({size})."
        )
        return say(template, step=f"{error['step']:,}", phase=phase, size=size)
    steps = {"count": len(errors), "first": f"{errors[0]['step']:,}", "last": f"{errors[-1]['step']:,}"}
    if steps["first"] == steps["last"]:
        template = "Memory ran out {count} times in step {first}, first with {size}."
    else:
        template = "Memory ran out {count} times, from step {first} to step {last}, for example with {size}."
    return say(template, size=size, **steps)


def show_size(rows: int, shape: Sequence[int]) -> str:
    """`43 rows of 228+256`."""
    return f"{show_rows(rows)} of {show_lengths(shape)}" if shape else show_rows(rows)


def _causes(run: RunFigures, error: Mapping[str, Any]) -> tuple[dict[str, Any], Certainty]:
    """What is known about the cause, as figures, and how sure it is."""
    causes: dict[str, Any] = {}
    shape, planned = lengths(error, "shape"), lengths(run.plan, "shape")
    padded = run.plan.get("layout") == "padded"
    if padded and shape and planned and any(a > b for a, b in zip(shape, planned, strict=False)):
        causes["longer_than_planned"] = True
    needed, room = whole(error, "predicted_bytes"), whole(error, "available_bytes")
    if needed is None or room is None:
        return causes, "likely" if causes else "possible"
    no_shape = {"no_shape": True} if _lacks_shape(run) else {}
    if needed <= (finite(run.plan, "fill") or FILL) * room:
        return {**causes, "prediction_too_low": True, **no_shape}, "likely"
    others = _others_bytes(run, error["step"] or 0)
    if others is not None:
        return {**causes, "others_bytes": others}, "likely"
    return {**causes, "too_little_room": True, **no_shape}, "likely" if no_shape else "certain"


def _lacks_shape(run: RunFigures) -> bool:
    """Whether the plan warned that the task has no `shape` although its rows differ in size."""
    warnings = run.plan.get("warnings")
    return isinstance(warnings, list) and any("has no shape()" in str(warning) for warning in warnings)


def _others_bytes(run: RunFigures, step: int) -> int | None:
    """What other programs held on the card when it was sampled nearest to this step, if that is worth mentioning."""
    near = [(abs((event.get("step") or 0) - step), gpu) for event, gpu in run.gpu_samples]
    if not near:
        return None
    closest = min(distance for distance, _ in near)
    held = [
        (whole(gpu, "others_bytes") or 0, whole(gpu, "total_bytes") or 0)
        for distance, gpu in near
        if distance == closest
    ]
    others, total = max(held)
    return others if others > OTHERS_SHARE * total else None


def _explained(run: RunFigures, error: Mapping[str, Any], causes: Mapping[str, Any]) -> Iterator[str]:
    if causes.get("longer_than_planned"):
        planned, shape = lengths(run.plan, "shape") or (), lengths(error, "shape") or ()
        yield say("These rows are longer than the {planned} that the plan was made for.", planned=show_lengths(planned))
        if place := row_place(run, error, shape):
            yield place
    figures = {
        name: show_bytes(whole(error, key))
        for name, key in (("needed", "predicted_bytes"), ("room", "available_bytes"))
    }
    if causes.get("no_shape"):
        yield say("It was predicted to need {needed} and the device had room for {room}.", **figures)
        yield say(
            "The task has no shape() although its rows differ in size, so the plan was made for shorter rows than these."
        )
    elif causes.get("prediction_too_low"):
        yield say("It was predicted to need {needed} and the device had room for {room}, so the prediction was too low or memory was fragmented.", **figures)  # fmt: skip
    elif "others_bytes" in causes:
        yield say("It was predicted to need {needed} and the device had room for {room}, while other programs held {others}.", **figures, others=show_bytes(causes["others_bytes"]))  # fmt: skip
    elif causes.get("too_little_room"):
        yield say("It was predicted to need {needed} and the device had room for only {room}.", **figures)


def row_place(run: RunFigures, event: Mapping[str, Any], shape: Sequence[int]) -> str | None:
    """Which row it was: as the event says, else by its length in the token store."""
    file, line = event.get("file"), event.get("line")
    if isinstance(file, str) and isinstance(line, int):
        return say("It is line {line} of {file}.", line=f"{line:,}", file=file)
    long_row = find_long_row(run, shape) if shape else None
    return None if long_row is None else show_long_row(long_row)


def show_long_row(found: LongRow) -> str:
    values = {"lengths": show_lengths(found.lengths), "file": found.file}
    if found.alike > 1:
        return say("{count} rows of {file} are as long, such as row {row} ({lengths} tokens).", count=found.alike, row=f"{found.row:,}", **values)  # fmt: skip
    if found.line is not None:
        return say(
            "The only row as long is line {line} of {file} ({lengths} tokens).", line=f"{found.line:,}", **values
        )
    return say("The only row as long is row {row} of {file} ({lengths} tokens).", row=f"{found.row:,}", **values)


def _consequences(
    run: RunFigures, error: Mapping[str, Any], died: bool, restored: int | None, lost: float | None
) -> Iterator[str]:
    if died:
        yield say("The run ended with it.")
        return
    change = str(error.get("change") or str(error.get("sentence", "")).partition(": ")[2]).rstrip(". ")
    if change:
        yield say("The step was repeated with the same result, and from then on: {change}.", change=change)
    else:
        yield say("The step was repeated with the same result.")
    if restored is not None:
        yield say("The micro-batch size was restored in step {step}.", step=f"{restored:,}")
    elif (error["step"] or 0) < run.last_step:
        yield say("It was not restored up to step {step}.", step=f"{run.last_step:,}")
    if lost is not None and lost >= LOST_SHARE:
        yield say("Repeating steps took {share} of the time.", share=f"{lost:.0%}")


def _lost_share(run: RunFigures) -> float | None:
    """The share of the time that steps with errors took beyond what steps usually take."""
    if run.step_s is None:
        return None
    seconds = [(step_seconds(step) or 0.0, whole(step, "ooms") or 0) for step in run.steps]
    total = sum(took for took, _ in seconds)
    lost = sum(max(0.0, took - run.step_s.value) for took, ooms in seconds if ooms)
    return lost / total if total else None


# ---- Fixes -------------------------------------------------------------------------------------------------------------


def _fixes(run: RunFigures, error: Mapping[str, Any], causes: Mapping[str, Any]) -> Iterator[Fix]:
    """The best first: what takes the cause away, then what saves memory at the least cost."""
    room = whole(error, "available_bytes") or run.limit_bytes
    fill = finite(run.plan, "fill") or FILL
    shape = lengths(error, "shape")
    if "others_bytes" in causes:
        yield Fix(
            title=say("Stop the other programs on this card, or plan for what they leave"), saves=show_bytes(causes["others_bytes"]),
            flags={"brimful": f"--memory-limit {flag_bytes(room)}"} if room else {}, basis="measured",
        )  # fmt: skip
    if causes.get("no_shape"):
        yield Fix(
            title=say("Define shape(row) in the task, which returns the lengths of a row, and plan again: the plan is then made for the longest"),
        )  # fmt: skip
    if smaller := _smaller_micro_batch(run, error, room, corrected="prediction_too_low" in causes):
        yield smaller
    elif "too_little_room" in causes:
        yield from _more_memory(run, whole(error, "rows") or 1, shape or ())
    if causes.get("longer_than_planned") and shape:
        yield Fix(
            title=say("Plan for rows of {shape}, the length that failed", shape=show_lengths(shape)),
            costs=say("smaller micro-batches in all steps"), flags={"brimful": f"--lengths {','.join(map(str, shape))}"}, basis="measured",
        )  # fmt: skip
        yield from shorter_rows(run, whole(error, "rows") or 1, shape)
    if causes.get("prediction_too_low") and not causes.get("no_shape"):
        saves = None if run.limit_bytes is None else show_bytes((fill - 0.75) * run.limit_bytes)
        if fill > 0.75:
            yield Fix(
                title=say("Leave more room: plan for 75 % of the limit instead of {fill}", fill=f"{fill:.0%}"), saves=saves,
                costs=say("smaller micro-batches in all steps"), flags={"brimful": "--fill 0.75"}, basis="predicted",
            )  # fmt: skip
        if run.on_gpu and "expandable_segments:True" not in str(part(run.choices, "allocator").get("effective", "")):
            yield Fix(
                title=say("Let the allocator's segments grow, which avoids fragmentation"), saves=say("up to a quarter of what is reserved"),
                flags={"shell": "export PYTORCH_ALLOC_CONF=expandable_segments:True"},
            )  # fmt: skip
    yield from _checkpointing(run, room)


def _smaller_micro_batch(run: RunFigures, error: Mapping[str, Any], room: int | None, *, corrected: bool) -> Fix | None:
    """The most rows that the model allows in the room there was. `corrected`: it was too low, so it is raised to that room."""
    rows, shape = whole(error, "rows"), lengths(error, "shape")
    shape = lengths(run.plan, "shape") if shape is None else shape
    before = run.predicted_bytes(rows, shape) if rows and shape is not None else None
    if not rows or rows < 2 or shape is None or room is None or not before:
        return None
    factor = max(1.0, room / before) if corrected else 1.0
    fewer = min(rows - 1, run.largest_micro_batch(shape, (finite(run.plan, "fill") or FILL) * room / factor) or 0)
    after = run.predicted_bytes(fewer, shape)
    if after is None:
        return None
    size = show_size(fewer, shape)
    step_rows = run.rows_per_step or rows
    return Fix(
        title=say("Use micro-batches of at most {size}: predicted {needs}", size=size, needs=show_bytes(factor * after)),
        saves=show_bytes(factor * (before - after)),
        costs=_speed_cost(run, rows, fewer),
        global_batch=say("unchanged: {rows} in {count} micro-batches", rows=show_rows(step_rows), count=math.ceil(step_rows / fewer)),
        flags={"brimful": f"--micro-batch {fewer}"},
        basis="predicted",
    )  # fmt: skip


def _more_memory(run: RunFigures, rows: int, shape: Sequence[int]) -> Iterator[Fix]:
    needed = run.predicted_bytes(rows, shape)
    if needed is None:
        return
    size = show_size(rows, shape)
    yield Fix(
        title=say("Give the run more memory: {size} are predicted to need {needed}", size=size, needed=show_bytes(needed)),
        flags={"brimful": f"--memory-limit {flag_bytes(needed / (finite(run.plan, 'fill') or FILL))}"}, basis="predicted",
    )  # fmt: skip


def rate_of(tried: Mapping[str, Any]) -> float | None:
    """Rows/s of something that the plan has timed."""
    return finite(tried, "data_rows_per_s") or finite(tried, "rows_per_s")


def chosen_of(run: RunFigures) -> Mapping[str, Any]:
    """What the plan has chosen among what it tried; empty if it does not say."""
    return next((one for one in objects(run.plan, "tried") if one.get("chosen")), {})


def _speed_cost(run: RunFigures, rows: int, fewer: int) -> str | None:
    """As the plan timed micro-batches of about these sizes, all else equal."""
    setting = chosen_of(run).get("setting")
    timed = {
        size: rate
        for one in objects(run.plan, "tried")
        if (size := whole(one, "micro_batch")) and (rate := rate_of(one)) and one.get("setting") == setting
    }
    if not timed:
        return None
    now, then = (min(timed, key=lambda size: abs(math.log(size / wanted))) for wanted in (rows, fewer))
    if now == then or not 0.75 <= then / fewer <= 1.33 or timed[then] > 0.98 * timed[now]:
        return None
    return _slower(timed[then] / timed[now])


def _slower(ratio: float) -> str:
    return say("{share} of the rows/s, as timed by the plan", share=f"{1 - ratio:.0%}")


def _checkpointing(run: RunFigures, room: int | None) -> Iterator[Fix]:
    """As measured by the plan if it tried it, else by rule of thumb."""
    if part(run.plan, "levers").get("checkpointing") != "off":
        return
    chosen = chosen_of(run)
    now, now_rate = whole(chosen, "peak_bytes"), rate_of(chosen)
    for one in objects(run.plan, "tried"):
        how, peak, rate = part(one, "setting").get("checkpointing"), whole(one, "peak_bytes"), rate_of(one)
        if how in (None, "off") or not one.get("fits") or not peak or not now or peak > 0.95 * now:
            continue
        yield Fix(
            title=say(
                "Recompute activations in backward: {rows} took {peak}", rows=show_rows(whole(one, "micro_batch") or 0), peak=show_bytes(peak)
            ),
            saves=show_bytes(now - peak), costs=_slower(rate / now_rate) if rate and now_rate and rate < now_rate else None,
            flags={"brimful": f"--checkpointing {how}"}, basis="measured" if one.get("basis") == "measured" else "predicted",
        )  # fmt: skip
        return
    yield Fix(
        title=say("Recompute activations in backward"), saves=say("about two thirds of the activations"),
        costs=say("20–50 % of the rows/s at equal size"), flags={"brimful": "--checkpointing on"},
    )  # fmt: skip


def shorter_rows(run: RunFigures, rows: int, shape: Sequence[int]) -> Iterator[Fix]:
    """Truncate to what the plan was made for; only a task that tokenizes can."""
    planned = lengths(run.plan, "shape")
    if "max_tokens" not in run.choices or not planned or len(planned) != len(shape):
        return
    shorter = tuple(map(min, shape, planned))
    before, after, share = (
        run.predicted_bytes(rows, shape),
        run.predicted_bytes(rows, shorter),
        share_longer(run, shorter),
    )
    known = before is not None and after is not None
    yield Fix(
        title=say("Truncate rows to {shape} tokens", shape=show_lengths(shorter)),
        saves=show_bytes(before - after) if before is not None and after is not None else None,
        costs=say("the end of longer rows")
        if share is None
        else say("the end of {share} of the rows", share=f"{share:.2%}"),
        flags={"brimful": f"--max-tokens {','.join(map(str, shorter))}"},
        basis="predicted" if known else "range",
    )


# ---- Rows that do not fit even alone -----------------------------------------------------------------------------------


def _rows_set_aside(run: RunFigures) -> Iterator[Finding]:
    events = run.events("oversized")
    if not events:
        return
    count = sum(len(one["rows"]) if isinstance(one.get("rows"), list) else 1 for one in events)
    first, shape = events[0], lengths(events[0], "shape") or ()
    sentences = [
        say("{rows} did not fit even alone and were left out of training, the first in step {step}.", rows=show_rows(count), step=f"{first['step']:,}")
    ]  # fmt: skip
    if place := row_place(run, first, shape):
        sentences.append(place)
    needed = run.predicted_bytes(1, shape) if shape else None
    fixes = [*shorter_rows(run, 1, shape)]
    if needed is not None and needed > (run.limit_bytes or 0):
        fixes += _more_memory(run, 1, shape)
    yield Finding(
        0.45,
        Diagnosis(
            resource=resource(run), kind="oversized-rows", cause=" ".join(sentences),
            figures={"rows": count, "shape": list(shape), "predicted_bytes": needed},
            evidence=f"events.jsonl, step {first['step']}: {first.get('sentence', '')}",
            fixes=(*fixes, *_checkpointing(run, run.limit_bytes)),
        ),
    )  # fmt: skip


LEAST_STEPS = 64
"""Steps of equal shape that a leak is looked for in."""
PARTS = 8
LEAST_SHARE = 0.05
"""A rise below this share of what there was is none."""
LEAST_BYTES = {"peak_bytes": 32 * MiB, "host_bytes": 256 * MiB}
"""Nor is one below this: Python and torch keep a little more as they go."""
STILL_RISING = 0.5
"""The second half of a leak rises at least this much as fast as the first."""
EQUAL_TOKENS = 0.10
"""Steps whose tokens are within this share of the median have equal shape."""
EXPLAINED = 0.5
"""If the tokens rise by this share of what memory rises by, they are the cause."""
JUMP = 1.25
"""A peak this much above those of almost all other steps stands out."""
ALMOST_ALL = 0.99


def growth_findings(run: RunFigures) -> Iterator[Finding]:
    device, host = _rise(run, "peak_bytes"), _rise(run, "host_bytes")
    if device is not None:
        yield _device_leak(run, device)
    if host is not None:
        yield _host_leak(run, host)
    if device is None and not run.events("oom"):
        yield from _long_row(run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """A steady rise."""

    first_bytes: float
    last_bytes: float
    per_step: float
    steps: int
    """Steps of equal shape that show it."""
    passes: float
    """Passes over the data meanwhile."""


def _rise(run: RunFigures, name: str) -> Rise | None:
    points = _equal_steps(run, name)
    points = points[len(points) // 10 :]
    if len(points) < LEAST_STEPS:
        return None
    parts = in_parts(points, PARTS)
    levels = [median(value for _, value in one) for one in parts]
    middles = [median(step["step"] for step, _ in one) for one in parts]
    rise, half = levels[-1] - levels[0], PARTS // 2
    steady = all(before < after for before, after in itertools.pairwise(levels))
    if not steady or rise < max(LEAST_BYTES[name], LEAST_SHARE * levels[0]):
        return None
    tokens = [median(finite(step, "tokens") or 0.0 for step, _ in one) for one in (parts[0], parts[-1])]
    if tokens[0] and tokens[1] / tokens[0] - 1 > EXPLAINED * rise / levels[0]:  # rows become longer
        return None
    early, late = ((levels[b] - levels[a]) / (middles[b] - middles[a]) for a, b in ((0, half - 1), (half, PARTS - 1)))
    if late < STILL_RISING * early:
        return None
    epochs = [finite(points[at][0], "epoch") or 0.0 for at in (0, -1)]
    return Rise(
        first_bytes=levels[0], last_bytes=levels[-1], per_step=rise / (middles[-1] - middles[0]), steps=len(points),
        passes=max(0.0, epochs[1] - epochs[0]),
    )  # fmt: skip


def _equal_steps(run: RunFigures, name: str) -> list[tuple[Mapping[str, Any], float]]:
    """Steps with the usual number of micro-batches and about the usual tokens, and their figure."""
    known = [(step, value) for step in run.settled if (value := whole(step, name)) and not whole(step, "ooms")]
    if not known:
        return []
    usual = Counter(whole(step, "micro_batches") for step, _ in known).most_common(1)[0][0]
    tokens = [count for step, _ in known if (count := finite(step, "tokens"))]
    middle = median(tokens) if tokens else None
    return [
        (step, value)
        for step, value in known
        if whole(step, "micro_batches") == usual
        and (middle is None or abs((finite(step, "tokens") or 0.0) / middle - 1) <= EQUAL_TOKENS)
    ]


def _full_at(run: RunFigures, rise: Rise, used: float | None, limit: int | None) -> int | None:
    """The step in which the limit would be reached."""
    if used is None or limit is None:
        return None
    return run.last_step + max(0, int((limit - used) / rise.per_step))


def _leak_sentences(run: RunFigures, rise: Rise, what: str, full: int | None, limit: int | None) -> list[str]:
    sentences = [
        say(
            "{what} rises by {bytes} in 1,000 steps of equal shape, from {first} to {last} so far, and has not stopped rising.",
            what=what,
            bytes=show_bytes(1000 * rise.per_step),
            first=show_bytes(rise.first_bytes),
            last=show_bytes(rise.last_bytes),
        )
    ]
    if full is not None:
        beyond = run.steps_in_all is not None and full > run.steps_in_all
        template = (
            "At this rate the limit of {limit} is reached around step {step}, after the end of this run."
            if beyond
            else "At this rate the limit of {limit} is reached around step {step}."
        )
        sentences.append(say(template, limit=show_bytes(limit), step=f"{full:,}"))
    return sentences


def _leak_finding(
    run: RunFigures, rise: Rise, *, name: str, kind: str, what: str, used: float | None, limit: int | None, fixes: Sequence[Fix],
    caution: str | None = None,
) -> Finding:  # fmt: skip
    full = _full_at(run, rise, used, limit)
    in_time = full is not None and (run.steps_in_all is None or full <= run.steps_in_all)
    sentences = _leak_sentences(run, rise, what, full, limit)
    certainty: Certainty = "likely"
    if caution is not None:
        certainty = "possible"
        sentences.append(caution)
    return Finding(
        0.9 if in_time else 0.3,
        Diagnosis(
            resource="none", kind=kind, cause=" ".join(sentences), certainty=certainty,
            figures={
                "first_bytes": round(rise.first_bytes), "last_bytes": round(rise.last_bytes), "bytes_per_step": round(rise.per_step),
                "steps": rise.steps, "limit_bytes": limit, "full_at_step": full,
            },
            evidence=f"events.jsonl, {name}", fixes=tuple(fixes),
        ),
    )  # fmt: skip


def _restart(run: RunFigures) -> Fix:
    command = f"{run.record.folder.resume_command} --time-limit 4h"
    return Fix(
        title=say("Until then, pause and continue the run before memory is full, since a new process starts without the leak"),
        costs=say("a restart each time"), flags={"shell": command},
    )  # fmt: skip


def _device_leak(run: RunFigures, rise: Rise) -> Finding:
    used = max(rise.last_bytes, *(whole(step, "reserved_bytes") or 0 for step in run.steps[-20:]))
    what = say("The peak of a step") if run.on_gpu else say("The peak of a step on the CPU")
    keep = Fix(
        title=say("Keep numbers instead of tensors: what a task or a hook stores of a step must be detached, such as loss.item()"),
        saves=show_bytes(rise.last_bytes - rise.first_bytes), basis="measured",
    )  # fmt: skip
    return _leak_finding(
        run, rise, name="peak_bytes", kind="device-memory-leak", what=what, used=used, limit=run.limit_bytes, fixes=(keep, _restart(run)),
    )  # fmt: skip


def _host_leak(run: RunFigures, rise: Rise) -> Finding:
    newest = run.host_samples[-1][1] if run.host_samples else {}
    limit = (
        whole(newest, "limit_bytes")
        or whole(run.begin, "ram_limit_bytes")
        or whole(part(run.plan, "host"), "limit_bytes")
    )
    used = whole(newest, "machine_bytes") or whole(run.steps[-1], "machine_bytes") or rise.last_bytes
    workers = whole(part(run.plan, "host"), "workers")
    fixes = [
        Fix(
            title=say(
                "Look for what the task, the dataset or a hook appends to without end, such as a list of results or a cache"
            ),
            saves=show_bytes(rise.last_bytes - rise.first_bytes),
            basis="measured",
        )
    ]
    if workers:
        fixes.append(
            Fix(
                title=say(
                    "Read without workers for a while: if the rise stops, the memory is held by the dataset's code in the workers"
                ),
                costs=say("time to read rows, in each step"),
                flags={"brimful": "--workers 0"},
            )
        )
    caution = None
    if rise.passes < 1:
        caution = say("It may stop once every row has been read, because the run has not completed an epoch yet.")
    return _leak_finding(
        run, rise, name="host_bytes", kind="host-memory-leak", what=say("Host RAM of the run"), used=used, limit=limit,
        fixes=(*fixes, _restart(run)), caution=caution,
    )  # fmt: skip


def _long_row(run: RunFigures) -> Iterator[Finding]:
    """One or two steps whose peak came near the limit, far above the others."""
    peaks = sorted((value, step["step"]) for step in run.settled if (value := whole(step, "peak_bytes")))
    if len(peaks) < LEAST_STEPS or not run.limit_bytes:
        return
    usual = peaks[min(len(peaks) - 2, int(ALMOST_ALL * len(peaks)) - 1)][0]
    (peak, at), step = peaks[-1], None
    step = next(one for one in run.settled if one["step"] == at)
    used = max(peak, whole(step, "reserved_bytes") or 0) / run.limit_bytes
    if peak < JUMP * usual or zone(used) == "safe":
        return
    sentences = [
        say("Step {step} took {peak}, while almost all others take {usual} or less: it had an unusually long row.", step=f"{at:,}", peak=show_bytes(peak), usual=show_bytes(usual))
    ]  # fmt: skip
    shape = longest_lengths(run) or lengths(run.plan, "shape") or ()
    place = row_place(run, step, shape)
    if place is not None:
        sentences.append(place)
    tokens = [count for one in run.settled if (count := finite(one, "tokens"))]
    more_tokens = bool(tokens) and (finite(step, "tokens") or 0.0) > 1.1 * median(tokens)
    yield Finding(
        0.25,
        Diagnosis(
            resource="none", kind="long-row", cause=" ".join(sentences),
            certainty="likely" if place is not None or more_tokens else "possible",
            figures={"step": at, "peak_bytes": peak, "usual_bytes": usual, "limit_bytes": run.limit_bytes},
            evidence=f"events.jsonl, step {at}", fixes=tuple(shorter_rows(run, whole(run.plan, "micro_batch") or 1, shape)),
        ),
    )  # fmt: skip
