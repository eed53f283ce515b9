"""`brimful doctor`: what on this machine would stop a training or slow it down, each with its fix."""

from pathlib import Path

from brimful.cli.flags import Json
from brimful.cli.output import progress, show
from brimful.errors import BadOption


def doctor(
    *,
    run: Path | None = None,
    data: str | None = None,
    timeout: float = 60.0,
    json: Json = False,
) -> None:
    """Check everything that a training needs before it starts: software, cards, connection, host, folders, environment.

    Every warning and failure comes with what to try. Cards are tried with small allocations in child processes, and a card that
    others have nearly filled is not tested. The exit code is 1 if something failed.

    Parameters
    ----------
    run
        The run's folder, which need not exist yet: its disk is checked, and its data if --data is not given. Default: runs.
    data
        The rows to train on, a file or a folder: checks that they exist and how fast they are read.
    timeout
        Seconds that cards, and an all_reduce over them, may take.
    """
    if not timeout > 0:
        raise BadOption(f"timeout={timeout:g} must be above 0. Try: timeout=60.")
    from brimful.report.doctor.checks import doctor_table
    from brimful.report.doctor.examine import examine

    with progress("doctor") as update:
        examination = examine(run=run, data=data, timeout_s=timeout, progress=update)
    show(doctor_table(examination), examination.to_json(), as_json=json)
    if examination.failed:
        raise SystemExit(1)
