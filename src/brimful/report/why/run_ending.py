"""How a run ended that nothing is wrong with: finished, interrupted, or without the file that says so."""

from pathlib import Path

from brimful.report.run_figures import RunFigures
from brimful.report.run_record import RunRecord
from brimful.report.why.diagnosis import Diagnosis, Fix
from brimful.report.why.finding import say

NOTHING_WRONG = Diagnosis(
    resource="none", kind="nothing-wrong", cause=say("Nothing is wrong with this run that its figures show."), certainty="likely"
)  # fmt: skip


def events_missing(record: RunRecord) -> Diagnosis | None:
    """A run with checkpoints but without events.jsonl: its figures are lost, not its training."""
    saved = sorted(record.folder.checkpoints.glob("step-*"))
    if record.folder.events.is_file() or not saved:
        return None
    cause = [
        say("The file events.jsonl is missing, so the figures of this run are not known."),
        say("The newest checkpoint is {name}.", name=saved[-1].name),
    ]
    return Diagnosis(
        resource="none", kind="events-missing", cause=" ".join(cause), fixes=(_resume(record),), evidence=str(saved[-1])
    )


def interruption(record: RunRecord) -> Diagnosis | None:
    """A run that was asked to stop, or reached its time limit: it is to be continued."""
    if record.state not in ("interrupted", "time-limit", "patience"):
        return None
    run = RunFigures(record)
    if record.state == "patience":
        return _patience(record, run)
    step, steps = f"{run.last_step:,}", run.steps_in_all
    limit = record.state == "time-limit"
    if steps is None or not run.steps:
        cause = say("The run reached its time limit after step {step}.", step=step) if limit else say("The run was interrupted after step {step}.", step=step)  # fmt: skip
    elif limit:
        cause = say("The run reached its time limit after step {step} of {steps}.", step=step, steps=f"{steps:,}")
    else:
        cause = say("The run was interrupted after step {step} of {steps}.", step=step, steps=f"{steps:,}")
    figures = {"step": run.last_step, "steps": steps}
    return Diagnosis(
        resource="none", kind=record.state, cause=cause, figures=figures, fixes=(_resume(record),), evidence="events.jsonl, end"
    )  # fmt: skip


def _patience(record: RunRecord, run: RunFigures) -> Diagnosis:
    """A run that no longer improved: its best checkpoint is the result, and there is nothing to repair."""
    best = record.of_kind("end")[-1].get("best")
    cause = [say("The run stopped after step {step} because it no longer improved.", step=f"{run.last_step:,}")]
    if best:
        cause.append(say("Its last good checkpoint is {name}.", name=Path(str(best)).name))
    figures = {"step": run.last_step, "steps": run.steps_in_all, "best": best}
    return Diagnosis(
        resource="none", kind="patience", cause=" ".join(cause), figures=figures, evidence="events.jsonl, end"
    )


def _resume(record: RunRecord) -> Fix:
    return Fix(title=say("Continue from the last checkpoint"), flags={"shell": record.folder.resume_command})
