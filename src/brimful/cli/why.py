"""`brimful why LOG|RUN`: what went wrong, and what helps."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from brimful.cli.flags import Switch
from brimful.cli.output import show, with_flags
from brimful.errors import BadData, BadOption


def why(
    log: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    /,
    *more: Annotated[str, Parameter(show=False)],
    json: Switch = False,
) -> None:
    """Explain why a training failed, is slow or does not learn, with fixes ranked by what they are worth.

    Parameters
    ----------
    log
        A log of any trainer, a run of `brimful train`, or `-` for standard input. Default: the newest run in runs/.
    json
        Print one JSON object, `{"diagnoses": […]}`.
    """
    from brimful.report.run_record import RunRecord, newest_run_folder
    from brimful.report.why.diagnosis import diagnoses_view
    from brimful.report.why.log_reader import diagnose, diagnose_stream
    from brimful.report.why.run_checks import NOTHING_WRONG, diagnose_run

    if more:
        raise BadOption(f"brimful why reads one log or run, not {1 + len(more)}. Try: one command for each of them.")
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
        diagnoses = diagnose_run(RunRecord(path)) or [NOTHING_WRONG] if path.is_dir() else [diagnose(path)]
    show(
        diagnoses_view(diagnoses, wording=with_flags),
        {"diagnoses": [diagnosis.to_json() for diagnosis in diagnoses]},
        as_json=json,
    )
