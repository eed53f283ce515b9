"""`brimful machine`: what this machine has."""

from pathlib import Path

from brimful.cli.flags import Json
from brimful.cli.output import show


def machine(*, run: Path = Path(), json: Json = False) -> None:
    """Show the GPUs and who uses them, host RAM and cores as the container allows, and the disk.

    Parameters
    ----------
    run
        Folder whose disk is shown.
    """
    from brimful.machine.machine import Machine
    from brimful.report.tables import machine_table

    detected = Machine.detect(run)
    show(machine_table(detected), detected.to_json(), as_json=json)
