"""`brimful why LOG|RUN`: what went wrong, and what helps."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from brimful.cli.output import show
from brimful.errors import BadData, BadOption
from brimful.report.why.diagnosis import Diagnosis


def why(
    log: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    /,
    *more: Annotated[str, Parameter(show=False)],
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Explain why a training failed, is slow or does not learn, with fixes ranked by what they are worth.

    Parameters
    ----------
    log
        A log of any trainer, a run of `brimful train`, or `-` for standard input. Default: the newest run in runs/.
    json
        Print one JSON object, `{"diagnoses": […]}`.
    """
    from brimful.report.run_record import newest_run_folder
    from brimful.report.why.diagnosis import diagnoses_view
    from brimful.report.why.log_reader import diagnose, diagnose_stream

    if more:
        raise BadOption(f"brimful why reads one log or run, not {1 + len(more)}. Try: one command for each of them.")
    titles: Mapping[str, str] = {}
    if log == "-":
        diagnoses = [diagnose_stream(sys.stdin.buffer)]
    else:
        path = newest_run_folder() if log is None else Path(log)
        if path.name in ("events.jsonl", "run.json", "plan.json") and path.is_file():
            path = path.parent
        if str(path).startswith("--"):
            raise BadOption(f"brimful why has no option {path}. Try: brimful why --help.")
        if not path.exists():
            raise BadData(f"{path} does not exist. Try: a log, or a folder that `brimful train` wrote.")
        if path.is_dir():
            from brimful.report.why import run_checks

            diagnoses, titles = _of_run(path), getattr(run_checks, "TITLES", {})
        else:
            diagnoses = [diagnose(path)]
    show(diagnoses_view(diagnoses, titles=titles), {"diagnoses": [one.to_json() for one in diagnoses]}, as_json=json)


def _of_run(folder: Path) -> list[Diagnosis]:
    """What the run's figures show, and what its log says; if the run failed, the log first."""
    from brimful.report.run_record import RunRecord
    from brimful.report.why.log_reader import diagnose
    from brimful.report.why.run_checks import NOTHING_WRONG, check_run, events_missing, interruption

    record = RunRecord(folder)
    missing, stopped = events_missing(record), interruption(record)
    measured = [missing] if missing else [*([stopped] if stopped else []), *check_run(record)]
    log_file = folder / "log.txt"
    if not log_file.is_file():
        return measured or [NOTHING_WRONG]
    from_log = diagnose(log_file, settings=_settings(record.plan))
    if from_log.kind in ("unknown", "empty") or (stopped and from_log.kind in ("stopped", "killed", "time-limit")):
        return measured or [NOTHING_WRONG]
    if from_log.certainty != "certain" or from_log.kind == "killed":
        told = (
            {"killed", "host-killed", "stopped"}
            if any(one.kind in ("run-killed", "host-killed") for one in measured)
            else ()
        )
        if from_log.kind in told:  # a kill, which the run's samples or the kernel's counter tell more about
            return measured
    failed = record.state in ("failed", "killed") and not missing
    same = next((one for one in measured if one.kind == from_log.kind), None)
    if same is not None and (not failed or same.certainty == "certain" or same.kind == "nan-loss"):
        # The run's figures are measured, the log has the message. Of a failed run, an error that it survived is another one.
        figures = {**from_log.figures, **same.figures}
        merged = replace(same, evidence=from_log.evidence, figures=figures, others=from_log.others)
        return [merged if one is same else one for one in measured]
    return [from_log, *measured] if failed else [*measured, from_log]


def _settings(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What a run's plan says that its log need not repeat."""
    levers = plan.get("levers") or {}
    return {
        "micro_batch": plan.get("micro_batch"),
        "accumulation": plan.get("accumulation"),
        "processes": plan.get("processes"),
        "global_batch": plan.get("global_batch"),
        "lengths": tuple(plan.get("shape") or ()),
        "precision": levers.get("precision"),
        "checkpointing": levers.get("checkpointing") not in (None, "off"),
        "growing_segments": True,
    }
