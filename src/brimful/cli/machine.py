"""`brimful machine`: what this box has."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from brimful.cli.flags import show


def machine(
    *,
    run: Path = Path(),
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Show what was detected: GPUs and who uses them, host RAM and cores as the container allows, disk.

    Parameters
    ----------
    run
        The folder whose disk is meant.
    json
        Print one JSON object.
    """
    from brimful.machine.machine import Machine
    from brimful.report.tables import machine_table

    found = Machine.detect(run)
    show(machine_table(found), found.to_json(), as_json=json)
