"""What a check of a run returns: a diagnosis and how important it is, in sentences that a view can translate."""

from dataclasses import dataclass
from typing import Any

from brimful.report.why.diagnosis import Diagnosis


@dataclass(frozen=True, slots=True)
class Finding:
    """A diagnosis and its place among others."""

    importance: float
    """1: the run is lost; else about the share of its time, or of what it could learn, that is lost."""
    diagnosis: Diagnosis


def say(template: str, **values: Any) -> str:
    """A sentence of a diagnosis, in English, which is what `--json` prints.

    `languages.translate` recognises it by its template, so every template passed to this function is in the catalogue.
    """
    return template.format(**values)
