"""A run in plain words: what was trained, how fast, with which memory, what happened, and what to do next.

The checklist is that of a guide which people filled in by hand while they watched `nvidia-smi`. Its targets were those of one
experiment on one card of 80 GB; where a plan predicts a time, the plan is the better measure, and both are shown.
"""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from brimful.languages import language, tr, translate
from brimful.report.page.report_figures import ReportFigures, is_number, number
from brimful.report.run_figures import RunFigures, seconds_at
from brimful.report.run_settings import train_command
from brimful.report.why.diagnosis import Diagnosis, Fix
from brimful.report.why.run_checks import diagnose_run
from brimful.units import DANGER, EDGE, show_bytes, show_rate, show_seconds

Verdict = Literal["pass", "warn", "fail", "unknown"]
UTILIZATION = 0.30
PEAK_SHARE = 25 / 80
"""The guide asks for 25 to 40 GB of 80. Brimful fills a card further, so the upper end is that of the safe zone."""
EPOCH_S, TOTAL_S = 30.0, 2 * 3600.0
SLOWER = 1.2
"""Up to this times the predicted time is as planned."""
MUCH_SLOWER = 3.0
"""Above this times the predicted time something is wrong, even where the guide's time is met."""
STOPPED = ("interrupted", "time-limit", "patience")
FIXES = 3
"""Findings whose best fix is among what to do next."""
UNKNOWN = "–"


# ---- The summary ---------------------------------------------------------------------------------------------------------


def summary(figures: ReportFigures) -> list[tuple[str, str]]:
    """A few sentences, each with its subject, what was trained first (without one). What is unknown is left out."""
    parts = [
        ("", _what(figures)), (tr("Speed"), _speed(figures)), (tr("Memory"), _memory(figures)), (tr("Events"), joined(_happened(figures))),
        (tr("Learning"), _learnt(figures)),
    ]  # fmt: skip
    return [part for part in parts if part[1]]


def _what(figures: ReportFigures) -> str:
    task, device = figures.task or tr("A task"), device_words(figures)
    if not figures.step:
        if figures.run.lost_its_events:
            return tr("{task} has checkpoints, but its events.jsonl is missing: nothing is known about its steps.", task=task)  # fmt: skip
        if figures.state == "preparing":
            return tr("{task} is being prepared on {device}; no step has been trained yet.", task=task, device=device)
        return tr("{task} ended on {device} before its first step was trained.", task=task, device=device)
    values = {
        "task": task,
        "device": device,
        "time": show_seconds(figures.clock.total_s),
        "progress": progress(figures),
    }
    match figures.state:
        case "running" | "preparing":
            return tr("{task} is being trained on {device}: {progress} after {time}.", **values)
        case "finished":
            return tr("{task} was trained on {device}: {progress} in {time}.", **values)
        case "interrupted":
            return tr("{task} was stopped on {device} at {progress}, after {time}.", **values)
        case "time-limit":
            return tr("{task} reached its time limit on {device} at {progress}, after {time}.", **values)
        case "patience":
            return tr("{task} stopped improving on {device} at {progress}, after {time}.", **values)
        case "killed":
            return tr("{task} was killed on {device} at {progress}, after {time}: its process ended without writing why.", **values)  # fmt: skip
    return tr("{task} failed on {device} at {progress}, after {time}.", **values)


def progress(figures: ReportFigures) -> str:
    """`step 120 of 300 (10 epochs, 30,720 rows)`."""
    step, total = figures.step, figures.planned_steps
    if figures.state == "finished" and step == total:
        steps = tr("{steps:,} step", steps=step) if step == 1 else tr("{steps:,} steps", steps=step)
    elif total is None:
        steps = tr("step {step:,}", step=step)
    else:
        steps = tr("step {step:,} of {steps:,}", step=step, steps=total)
    seen = [] if figures.epochs is None else [epoch_words(figures.epochs)]
    seen += [] if figures.rows is None else [tr("{rows:,} rows", rows=figures.rows)]
    return tr("{steps} ({seen})", steps=steps, seen=tr(", ").join(seen)) if seen else steps


def epoch_words(epochs: float) -> str:
    return tr("{epochs:.3g} epochs", epochs=epochs)


def device_words(figures: ReportFigures) -> str:
    if figures.device_name is None:
        return tr("an unknown device")
    name = translate(figures.device_name)
    return f"{figures.processes} × {name}" if figures.processes > 1 else name


def _speed(figures: ReportFigures) -> str:
    if figures.rows_per_s is None or figures.step_s is None:
        return ""
    rate, shares = show_rate(figures.rows_per_s), figures.time_shares
    sentence = tr("A step takes {time}, which is {rate} rows/s.", time=show_seconds(figures.step_s), rate=rate)
    if shares:
        rest = {"data_s": tr("waiting for data"), "communication_s": tr("communication"), "other_s": tr("other work")}
        most = max(rest, key=lambda name: shares[name])
        sentence += tr(" {compute} of that time it computes; {most} takes {share}.", compute=percent(shares["compute_s"]), most=rest[most], share=percent(shares[most]))  # fmt: skip
    return sentence


def _memory(figures: ReportFigures) -> str:
    if figures.used_bytes is None:
        return ""
    used, predicted = show_bytes(figures.used_bytes), figures.predicted_bytes
    if figures.used is None:
        sentence = tr("Memory peaked at {used}.", used=used)
    else:
        sentence = tr("Memory peaked at {used} of {limit}: {share}, {zone}.", used=used, limit=show_bytes(figures.limit_bytes), share=percent(figures.used), zone=zone_words(figures.zone))  # fmt: skip
    if predicted and figures.reserved_bytes is None:
        sentence += tr(" The plan predicted {predicted} for its largest micro-batch.", predicted=show_bytes(predicted))
    elif predicted:
        sentence += tr(" At most {peak} were allocated; the plan predicted {predicted} for its largest micro-batch.", peak=show_bytes(figures.peak_bytes), predicted=show_bytes(predicted))  # fmt: skip
    return sentence


def _happened(figures: ReportFigures) -> list[str]:
    count, sentences = figures.oom_count, []
    if count == 0 and figures.step:
        sentences.append(tr("It never ran out of memory."))
    elif count:
        times = tr("once") if count == 1 else tr("{count:,} times", count=count)
        sentences.append(tr("It ran out of memory {times}{where} and repeated the step with smaller micro-batches.", times=times, where=_places(figures)))  # fmt: skip
    if rows := figures.run.of_kind("oversized"):
        sentences.append(tr("Rows set aside because they do not fit even alone: {count:,}.", count=len(rows)))
    if figures.skipped_steps:
        sentences.append(tr("Steps skipped because their gradients were not finite: {count:,}.", count=figures.skipped_steps))  # fmt: skip
    resumes = len(figures.clock.sessions) - 1
    if resumes > 0:
        sentences.append(tr("It was resumed once.") if resumes == 1 else tr("It was resumed {count:,} times.", count=resumes))  # fmt: skip
    if figures.state == "failed" and figures.ending:
        sentences.append(tr("Its last message: {sentence}", sentence=translate(figures.ending)))
    return sentences


def _places(figures: ReportFigures) -> str:
    steps = sorted({event["step"] for event in figures.ooms if isinstance(event.get("step"), int)})
    if not steps:
        return ""
    if len(steps) > 4:
        return tr(", first at step {first:,} and last at step {last:,},", first=steps[0], last=steps[-1])
    *first, last = [f"{step:,}" for step in steps]
    if not first:
        return tr(" at step {step}", step=last)
    return tr(" at steps {steps} and {last}", steps=tr(", ").join(first), last=last)


def _learnt(figures: ReportFigures) -> str:
    if figures.losses is None:
        return ""
    first, last = figures.losses
    sentences = [tr("The loss went from {first:.4g} to {last:.4g}.", first=first, last=last)]
    if figures.bad_from is not None:
        sentences = [tr("The loss was {first:.4g} at first and is not a number from step {step:,} on.", first=first, step=figures.bad_from)]  # fmt: skip
    best = figures.best_eval
    if best is not None and is_number(best.get("loss")):
        sentences.append(tr("The best evaluation was {loss:.4g}, at step {step:,}.", loss=best["loss"], step=best["step"]))  # fmt: skip
    if figures.bad_losses:
        sentences.append(tr("Steps whose loss was not a number: {count:,}.", count=figures.bad_losses))
    return joined(sentences)


# ---- Key figures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFigure:
    """A number that everybody asks for first."""

    key: str
    title: str
    value: str
    below: str = ""


def key_figures(figures: ReportFigures) -> list[KeyFigure]:
    return [
        *_memory_figure(figures),
        _time_figure(figures),
        _step_figure(figures),
        *_speed_figure(figures),
        *_loss_figure(figures),
        _oom_figure(figures),
        *_gpu_figure(figures),
    ]


def _memory_figure(figures: ReportFigures) -> list[KeyFigure]:
    if figures.used_bytes is None:
        return []
    below = []
    if figures.used is not None:
        limit, zone = show_bytes(figures.limit_bytes), zone_words(figures.zone)
        below.append(tr("{share} of the limit {limit}, {zone}", share=percent(figures.used), limit=limit, zone=zone))
    if figures.predicted_bytes:
        below.append(f"{tr('predicted')} {show_bytes(figures.predicted_bytes)}")
    return [KeyFigure(key="memory", title=tr("Peak memory"), value=show_bytes(figures.used_bytes), below=" · ".join(below))]  # fmt: skip


def _time_figure(figures: ReportFigures) -> KeyFigure:
    planned, below = number(figures.predicted_time, "total_s"), ""
    if figures.left_s is not None:
        below = tr("about {time} left", time=show_seconds(figures.left_s))
    elif planned:
        below = f"{tr('planned')} {show_seconds(planned)}"
    value = show_seconds(figures.clock.total_s) if figures.clock.total_s else UNKNOWN
    return KeyFigure(key="time", title=tr("Time"), value=value, below=below)


def _step_figure(figures: ReportFigures) -> KeyFigure:
    total = "" if figures.planned_steps is None else f" / {figures.planned_steps:,}"
    below = "" if figures.epochs is None else epoch_words(figures.epochs)
    return KeyFigure(key="steps", title=tr("Steps"), value=f"{figures.step:,}{total}", below=below)


def _speed_figure(figures: ReportFigures) -> list[KeyFigure]:
    if figures.rows_per_s is None:
        return []
    below = [] if figures.tokens_per_s is None else [f"{show_rate(figures.tokens_per_s)} {tr('tokens/s')}"]
    below += [] if figures.mfu is None else [f"MFU {percent(figures.mfu)}"]
    value = f"{show_rate(figures.rows_per_s)} {tr('rows/s')}"
    return [KeyFigure(key="speed", title=tr("Speed"), value=value, below=" · ".join(below))]


def _loss_figure(figures: ReportFigures) -> list[KeyFigure]:
    if figures.losses is None:
        return []
    first, last = figures.losses
    best = None if figures.best_eval is None else figures.best_eval.get("loss")
    below = tr("best evaluation {loss:.4g}", loss=best) if best is not None and is_number(best) else tr("at first {loss:.4g}", loss=first)  # fmt: skip
    value = f"{last:.4g}"
    if figures.bad_from is not None:
        value, below = "NaN", tr("from step {step:,} on; at first {loss:.4g}", step=figures.bad_from, loss=first)
    return [KeyFigure(key="loss", title=tr("Loss"), value=value, below=below)]


def _oom_figure(figures: ReportFigures) -> KeyFigure:
    count = len(figures.checkpoints)
    saved = tr("no checkpoint") if not count else tr("1 checkpoint") if count == 1 else tr("{count:,} checkpoints", count=count)  # fmt: skip
    kept = figures.kept_checkpoints
    if kept is not None and kept < count:
        saved = tr("checkpoints: {count:,} saved, {kept:,} kept", count=count, kept=kept)
    return KeyFigure(key="ooms", title=tr("Out-of-memory errors"), value=f"{figures.oom_count:,}", below=saved)


def _gpu_figure(figures: ReportFigures) -> list[KeyFigure]:
    if figures.utilization is None:
        return []
    energy, below = figures.energy_kwh, ""
    if energy is not None:
        size = f"{energy:.2g} kWh" if energy >= 0.1 else f"{energy * 1000:.2g} Wh"
        below = tr("about {energy} of electricity", energy=size)
    return [KeyFigure(key="gpu", title=tr("GPU utilisation"), value=percent(figures.utilization), below=below)]


# ---- What to do next -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NextStep:
    """What to do, and the command that does it."""

    sentence: str
    command: str | None = None


def next_steps(figures: ReportFigures, findings: Sequence[Diagnosis] = ()) -> list[NextStep]:
    """What helps now, the first thing first."""
    run = shlex.quote(str(figures.run.root))
    steps: list[NextStep] = []
    match figures.state:
        case "running" | "preparing":
            left = figures.left_s
            words = tr("Nothing: it trains.") if left is None else tr("Nothing: it trains, and ends in about {left}.", left=show_seconds(left))  # fmt: skip
            steps.append(NextStep(words, f"brimful watch {run}"))
        case "interrupted" | "time-limit":
            steps.append(NextStep(tr("Continue it:"), f"brimful train --run {run} --resume"))
        case "killed" | "failed":
            steps.append(NextStep(tr("Find out why it ended:"), f"brimful why {run}"))
            steps.append(NextStep(tr("Then continue it:"), f"brimful train --run {run} --resume"))
        case "finished" | "patience":
            steps += _use_the_model(figures, run)
    for finding in findings[:FIXES]:
        steps += [NextStep(_advice(figures, fix), _command(figures, fix)) for fix in finding.fixes[:1]]
    return steps


def _advice(figures: ReportFigures, fix: Fix) -> str:
    """With its price: what to do next may be another experiment."""
    title = figures.wording(translate(fix.title))
    return tr("{title} (costs {cost})", title=title, cost=translate(fix.costs)) if fix.costs else title


def _command(figures: ReportFigures, fix: Fix) -> str | None:
    """A run that has steps left goes on with the flags of a fix; after one that is complete, another begins with them."""
    flags = fix.flags.get("brimful", "")
    if not flags.startswith("--"):
        return flags if flags.startswith("brimful ") else fix.flags.get("shell")
    if figures.request.get("data") is None:  # given in Python
        return flags
    if figures.state in ("finished", "patience", "running", "preparing"):
        return train_command(RunFigures(figures.run), flags)
    return f"{figures.run.folder.resume_command} {flags}"


def _use_the_model(figures: ReportFigures, run: str) -> list[NextStep]:
    if figures.task in ("pretrain", "sft", "dpo", "chatlm-pretrain", "chatlm-sft"):
        return [
            NextStep(tr("Talk to the model:"), f"brimful chat {run}"),
            NextStep(tr("Score it on rows of your own:"), f"brimful eval {run} rows.jsonl"),
        ]
    folder = next((figures.run.root / name for name in ("best", "model") if (figures.run.root / name).exists()), None)
    return [] if folder is None else [NextStep(tr("The model is in {folder!s}.", folder=folder))]


def findings_of(figures: ReportFigures) -> list[Diagnosis]:
    """What `brimful why RUN` finds, but for how it was stopped, which the summary says."""
    return [one for one in diagnose_run(figures.run) if one.kind not in STOPPED]


# ---- The checklist -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the checklist."""

    key: str
    title: str
    target: str
    measured: float | None
    value: str
    verdict: Verdict
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"check": self.key, "measured": self.measured, "verdict": self.verdict}


def checklist(figures: ReportFigures) -> list[Check]:
    """The five lines of the guide, each with what was measured and a verdict."""
    return [_utilization(figures), _peak(figures), _ooms(figures), _epoch(figures), _total(figures)]


def _utilization(figures: ReportFigures) -> Check:
    value, note = figures.utilization, ""
    verdict: Verdict = "unknown" if value is None else "pass" if value > UTILIZATION else "fail"
    if verdict == "unknown":
        note = tr("The run has no samples of a GPU.")
    elif verdict == "fail":
        note = tr("The card waits most of the time; the time split below shows for what.")
    return Check(
        key="gpu-utilization", title=tr("GPU utilisation"), target=f"> {percent(UTILIZATION)}", measured=value,
        value=UNKNOWN if value is None else f"{percent(value)} ({tr('median')})", verdict=verdict, note=note,
    )  # fmt: skip


def _peak(figures: ReportFigures) -> Check:
    used, verdict, note = figures.used, "unknown", ""
    if used is None:
        note = tr("The run recorded no peak, or has no limit to compare it with.")
    elif used > DANGER:
        verdict, note = "fail", tr("Little is left for longer rows and other processes.")
    elif used > EDGE:
        verdict, note = "warn", tr("Close to the limit.")
    elif used >= PEAK_SHARE:
        verdict = "pass"
    elif figures.plan.get("accumulation") == 1:
        verdict, note = "pass", tr("The whole step fits at once, so more memory would not make it faster.")
    else:
        verdict, note = "warn", tr("Most of the memory is unused; the plan below says why the micro-batch is no larger.")  # fmt: skip
    value = UNKNOWN if used is None else f"{show_bytes(figures.used_bytes)} / {show_bytes(figures.limit_bytes)}, {percent(used)}"  # fmt: skip
    target = f"{100 * PEAK_SHARE:.0f}–{percent(EDGE)}"
    return Check(key="peak-memory", title=tr("Peak memory"), target=target, measured=used, value=value, verdict=verdict, note=note)  # type: ignore[arg-type]  # fmt: skip


def _ooms(figures: ReportFigures) -> Check:
    count, note = figures.oom_count, ""
    verdict: Verdict = "pass" if figures.step else "unknown"
    if count:
        verdict = "fail" if figures.state in ("failed", "killed") else "warn"
    if verdict == "warn":
        note = tr("Caught, and the steps repeated: nothing is lost but time.")
    elif verdict == "unknown":
        note = tr("No step was trained.")
    known = verdict != "unknown"
    return Check(
        key="out-of-memory", title=tr("Out-of-memory errors"), target="0", measured=count if known else None,
        value=f"{count:,}" if known else UNKNOWN, verdict=verdict, note=note,
    )  # fmt: skip


def _epoch(figures: ReportFigures) -> Check:
    value, predicted = figures.seconds_per_epoch, number(figures.predicted_time, "epoch_s")
    verdict, note = _timed(value, predicted, EPOCH_S)
    if value is None:
        note = tr("Fewer than two steps with an epoch were recorded.")
    elif (figures.epochs or 0) < 1:
        note = tr("From the part of the first epoch that was trained.")
    return Check(
        key="epoch-time", title=tr("Time of an epoch"), target=_time_target(EPOCH_S, predicted), measured=value,
        value=UNKNOWN if value is None else show_seconds(value), verdict=verdict, note=note,
    )  # fmt: skip


def _total(figures: ReportFigures) -> Check:
    value, predicted = (figures.clock.total_s or None), number(figures.predicted_time, "total_s")
    if value is not None and figures.left_s is not None:
        value += figures.left_s
    verdict, note = _timed(value, predicted, TOTAL_S)
    if figures.state == "running" and value is not None:
        note = tr("Predicted; {time} so far.", time=show_seconds(figures.clock.total_s))
    elif figures.state not in ("finished", "running"):
        note = tr("It did not finish.")
        verdict = "unknown" if verdict == "pass" else verdict
    return Check(
        key="total-time", title=tr("Time in all"), target=_time_target(TOTAL_S, predicted), measured=value,
        value=UNKNOWN if value is None else show_seconds(value), verdict=verdict, note=note,
    )  # fmt: skip


def _time_target(guide_s: float, predicted_s: float | None) -> str:
    guide = f"< {guide_s / 3600:.0f} h" if guide_s >= 3600 else f"< {guide_s:.0f} s"
    if predicted_s is None:
        return guide
    return tr("{guide}, planned: {predicted}", guide=guide, predicted=show_seconds(predicted_s))


def _timed(value: float | None, predicted_s: float | None, guide_s: float) -> tuple[Verdict, str]:
    """The guide's figure is that of one experiment, so a longer time alone is no failure."""
    if value is None:
        return "unknown", ""
    if predicted_s is not None and math.isfinite(predicted_s) and predicted_s > 0:
        ratio = value / predicted_s
        note = "" if 1 / SLOWER < ratio <= SLOWER else tr("{ratio:.2g} × the planned time.", ratio=ratio)
        return ("pass" if ratio <= SLOWER or (value < guide_s and ratio <= MUCH_SLOWER) else "warn"), note
    if value < guide_s:
        return "pass", ""
    return "unknown", tr("The plan predicted no time to compare it with.")


# ---- Words ---------------------------------------------------------------------------------------------------------------


def joined(sentences: Iterable[str]) -> str:
    """One after the other, as the language does it."""
    return ("" if language() == "zh" else " ").join(sentences)


def part_names() -> dict[str, str]:
    """What the parts of a step's time are called."""
    return {
        "compute_s": tr("computing"), "data_s": tr("waiting for data"), "communication_s": tr("communication"), "other_s": tr("other"),
    }  # fmt: skip


def percent(share: float | None) -> str:
    """`81 %`, never broken between lines; a decimal below 10 %."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    return f"{share * 100:.0f}\u00a0%" if abs(share) >= 0.0995 or share == 0 else f"{share * 100:.1f}\u00a0%"


def zone_words(zone: str | None) -> str:
    return {"safe": tr("safe"), "edge": tr("close to the limit"), "danger": tr("in danger")}.get(zone or "", UNKNOWN)


def state_words(state: str) -> str:
    words = {
        "preparing": tr("preparing"), "running": tr("running"), "finished": tr("finished"), "interrupted": tr("interrupted"),
        "time-limit": tr("time-limit"), "patience": tr("patience"), "failed": tr("failed"), "killed": tr("killed"),
        "no record": tr("no record"),
    }  # fmt: skip
    return words.get(state, state)


def verdict_words(verdict: Verdict) -> str:
    return {"pass": tr("good"), "warn": tr("look at it"), "fail": tr("not met"), "unknown": tr("unknown")}[verdict]


def clock_time(at: float | None) -> str:
    """In the reader's time zone."""
    return UNKNOWN if at is None else datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def event_time(event: Mapping[str, Any]) -> str:
    return clock_time(seconds_at(event))
