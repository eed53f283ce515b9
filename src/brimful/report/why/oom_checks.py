"""The out-of-memory errors of a run: what ran, what was there, what changed, and fixes with the run's own figures.

An `oom` event has what the micro-batch was predicted to need and what the device had. Together with the samples of the card and the
lengths of the rows that decides the cause:

    longer rows than planned for              the data
    prediction within `fill` of the room      the prediction was too low, or memory was fragmented; the task lacks `shape` if the plan warned
    less room, and others hold memory         other programs
    less room                                 the device has less than when the plan was made

What did not fit is in the error itself: its size, and the line of the model that asked for it. With the sizes of a language model, from
the config of its checkpoint, the tensor gets a name ("1.23 GiB = 32 × 252 × 40,960 × 4 bytes, the fp32 logits").

Fixes are predicted by the plan's memory model for the very rows that failed ("micro-batches of 32 rows: predicted 12.1 GiB"), and
their cost in speed is what the plan timed. Without a memory model nothing is predicted.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from brimful.report.run_figures import (
    RunFigures,
    finite,
    lengths,
    objects,
    part,
    show_lengths,
    step_seconds,
    text,
    whole,
)
from brimful.report.why.diagnosis import Certainty, Finding, Fix, finding, fix, say
from brimful.report.why.gpu_messages import SIZE, Block, bounds, likely_blocks, read_settings
from brimful.report.why.growth_checks import row_place, shorter_rows
from brimful.units import flag_bytes, show_bytes, show_rows

FILL = 0.85
"""Of a plan that does not say."""
OTHERS_SHARE = 0.02
"""Memory of other programs below this share of the card explains nothing."""
LOST_SHARE = 0.01
"""Repeated steps that took less than this share of the time are not worth mentioning."""
_WANTED = re.compile(rf"(?:[Tt]ried to allocate|asked for) (?P<size>{SIZE})")
"""In the message of torch, and of the limit that is simulated on a CPU."""
CONFIG_BYTES = 64 * 1024
"""Of a model's config that is read."""


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
    lost, wanted, block = _lost_share(run), _WANTED.search(str(error.get("message"))), _block(run, error)
    figures = {
        "ooms": len(errors), "steps": [one["step"] for one in errors][:20], "rows": whole(error, "rows"), "shape": error.get("shape"),
        "predicted_bytes": whole(error, "predicted_bytes"), "available_bytes": whole(error, "available_bytes"),
        "restored_at_step": restored, "lost_share": lost, "place": text(error, "place"),
        "wanted": wanted["size"] if wanted else None, "block": block.to_json() if block else None, **causes,
    }  # fmt: skip
    sentences = [
        _what(errors, error),
        *_wanted(error, wanted["size"] if wanted else None, block),
        *_explained(run, error, causes),
        *_consequences(run, error, died, restored, lost),
    ]
    if (error["step"] or 0) > 1 and any(event["step"] == error["step"] - 1 for event in run.record.of_kind("eval")):
        sentences.insert(1, say("It was the first step after an evaluation, which has a peak of its own."))
    yield finding(
        0.98 if died else 0.5, "gpu-out-of-memory" if run.on_gpu else "cpu-out-of-memory", sentences, resource=resource(run),
        certainty=certainty, figures=figures, evidence=f"events.jsonl, step {error['step']}: {error.get('sentence', '')}",
        fixes=_fixes(run, error, causes),
    )  # fmt: skip


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


def _wanted(error: Mapping[str, Any], size: str | None, block: Block | None) -> Iterator[str]:
    """What did not fit, and which line of the model asked for it."""
    place = text(error, "place")
    if size and place:
        yield say("{size} did not fit in {place}.", size=size, place=place)
    elif size:
        yield say("{size} did not fit.", size=size)
    elif place:
        yield say("It was in {place}.", place=place)
    if size and block:
        yield say("The block is likely {name}: {size} = {factors}.", name=block.name, size=size, factors=str(block))


def _block(run: RunFigures, error: Mapping[str, Any]) -> Block | None:
    """The tensor of a padded micro-batch that has the size that did not fit, if there is only one."""
    match, rows, shape = _WANTED.search(str(error.get("message"))), whole(error, "rows"), lengths(error, "shape")
    if match is None or not rows or not shape or run.plan.get("layout") == "packed":
        return None
    settings = read_settings([(0, _model_config(run))]).updated(
        {"micro_batch": rows, "batches": (rows,), "lengths": shape}
    )
    blocks = likely_blocks(bounds(match["size"], allocator=run.on_gpu), settings, text(error, "phase"))
    return blocks[0] if len({block.kind for block in blocks}) == 1 else None


def _model_config(run: RunFigures) -> str:
    """The config.json of the newest checkpoint's model; empty if there is none."""
    for config in sorted(run.record.folder.checkpoints.glob("step-*/model/config.json"), reverse=True):
        with suppress(OSError), config.open(encoding="utf-8", errors="replace") as file:
            return file.read(CONFIG_BYTES)
    return ""


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
        yield fix(
            say("Define shape(row) in the task, which returns the lengths of a row, and plan again: the plan is then made for the longest"),
        )  # fmt: skip
    if smaller := _smaller_micro_batch(run, error, room, corrected="prediction_too_low" in causes):
        yield smaller
    elif "too_little_room" in causes:
        yield from _more_memory(run, whole(error, "rows") or 1, shape or ())
    if causes.get("longer_than_planned") and shape:
        yield fix(
            say("Plan for rows of {shape}, the length that failed", shape=show_lengths(shape)),
            costs=say("smaller micro-batches in all steps"), brimful=f"--lengths {','.join(map(str, shape))}", basis="measured",
        )  # fmt: skip
        yield from shorter_rows(run, whole(error, "rows") or 1, shape)
    if causes.get("prediction_too_low") and not causes.get("no_shape"):
        saves = None if run.limit_bytes is None else show_bytes((fill - 0.75) * run.limit_bytes)
        if fill > 0.75:
            yield fix(
                say("Leave more room: plan for 75 % of the limit instead of {fill}", fill=f"{fill:.0%}"), saves=saves,
                costs=say("smaller micro-batches in all steps"), brimful="--fill 0.75", basis="predicted",
            )  # fmt: skip
        if run.on_gpu and "expandable_segments:True" not in str(part(run.choices, "allocator").get("effective", "")):
            yield fix(
                say("Let the allocator's segments grow, which avoids fragmentation"), saves=say("up to a quarter of what is reserved"),
                shell="export PYTORCH_ALLOC_CONF=expandable_segments:True",
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
    return fix(
        say("Use micro-batches of at most {size}: predicted {needs}", size=size, needs=show_bytes(factor * after)),
        saves=show_bytes(factor * (before - after)),
        costs=_speed_cost(run, rows, fewer),
        global_batch=say("unchanged: {rows} in {count} micro-batches", rows=show_rows(step_rows), count=math.ceil(step_rows / fewer)),
        brimful=f"--micro-batch {fewer}",
        basis="predicted",
    )  # fmt: skip


def _more_memory(run: RunFigures, rows: int, shape: Sequence[int]) -> Iterator[Fix]:
    needed = run.predicted_bytes(rows, shape)
    if needed is None:
        return
    size = show_size(rows, shape)
    yield fix(
        say("Give the run more memory: {size} are predicted to need {needed}", size=size, needed=show_bytes(needed)),
        brimful=f"--memory-limit {flag_bytes(needed / (finite(run.plan, 'fill') or FILL))}", basis="predicted",
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
        yield fix(
            say(
                "Recompute activations in backward: {rows} took {peak}", rows=show_rows(whole(one, "micro_batch") or 0), peak=show_bytes(peak)
            ),
            saves=show_bytes(now - peak), costs=_slower(rate / now_rate) if rate and now_rate and rate < now_rate else None,
            brimful=f"--checkpointing {how}", basis="measured" if one.get("basis") == "measured" else "predicted",
        )  # fmt: skip
        return
    yield fix(
        say("Recompute activations in backward"), saves=say("about two thirds of the activations"),
        costs=say("20–50 % of the rows/s at equal size"), brimful="--checkpointing on",
    )  # fmt: skip


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
    yield finding(
        0.45, "oversized-rows", sentences, resource=resource(run), figures={"rows": count, "shape": list(shape), "predicted_bytes": needed},
        evidence=f"events.jsonl, step {first['step']}: {first.get('sentence', '')}", fixes=(*fixes, *_checkpointing(run, run.limit_bytes)),
    )  # fmt: skip
