"""What a task has warned of in its own training: notes with a `signal` in events.jsonl, such as those of preference training."""

from collections.abc import Iterator, Mapping
from typing import Any

from brimful.report.run_figures import RunFigures
from brimful.report.why.diagnosis import Diagnosis, Fix
from brimful.report.why.finding import Finding, say
from brimful.report.why.loss_checks import lower_rate
from brimful.training.events import number

IMPORTANCE = {"chosen-collapsed": 0.75, "loss-spiked": 0.7, "accuracy-at-chance": 0.6}
"""Of the kinds that `dpo` has (`tasks/preference_signals.py`); of others half as much as a lost run."""


def signal_findings(run: RunFigures) -> Iterator[Finding]:
    """One for each kind, with the step it began at. A checkpoint from before is named as a fix."""
    for note in _first_of_each_kind(run):
        kind, step = str(note["signal"]), int(number(note, "step") or 0)
        problem = str(note.get("sentence") or "").partition(" Try: ")[0].rstrip(".")
        sentences = [
            f"{problem[:1].upper()}{problem[1:]}.",
            say("The run warned of it after step {step}.", step=f"{step:,}"),
        ]
        yield Finding(
            IMPORTANCE.get(kind, 0.5),
            Diagnosis(
                resource="none", kind=kind, cause=" ".join(sentences), certainty="likely", figures={"step": step},
                evidence=f"events.jsonl, step {step}: note", fixes=tuple(_fixes(run, kind, step)),
            ),
        )  # fmt: skip


def _first_of_each_kind(run: RunFigures) -> list[Mapping[str, Any]]:
    kinds: dict[str, Mapping[str, Any]] = {}
    for event in run.record.of_kind("note"):
        if event.get("signal"):
            kinds.setdefault(str(event["signal"]), event)
    return list(kinds.values())


def _fixes(run: RunFigures, kind: str, step: int) -> Iterator[Fix]:
    if kind in ("chosen-collapsed", "loss-spiked"):
        yield lower_rate(run)
    if kind == "chosen-collapsed":
        beta = run.task_options.get("beta")
        higher = 2 * beta if isinstance(beta, int | float) and beta > 0 else 0.2
        yield Fix(
            title=say("Keep the model closer to its reference"), costs=say("smaller margins"), flags={"brimful": f"--beta {higher:g}"}
        )  # fmt: skip
    if kind == "accuracy-at-chance":
        yield Fix(title=say("Look at some pairs: chosen and rejected may be mixed up, or too similar to tell apart"))
        rates = [rate for one in run.steps if (rate := number(one, "lr"))]
        if rates:
            yield Fix(title=say("Try ten times the learning rate, {rate}", rate=f"{10 * max(rates):.1g}"), costs=say("another experiment"), flags={"brimful": f"--lr {10 * max(rates):.1g}"})  # fmt: skip
    saved = [event["step"] for event in run.record.of_kind("checkpoint") if event.get("saved") and event.get("step")]
    if before := [one for one in saved if one < step and run.record.folder.checkpoints.joinpath(f"step-{one:08}").is_dir()]:  # fmt: skip
        yield Fix(title=say("Use the checkpoint of step {step}, from before the warning", step=f"{before[-1]:,}"))
    if run.options.get("patience") is None:
        yield Fix(title=say("Let the run stop by itself"), flags={"brimful": "--patience 3"})
