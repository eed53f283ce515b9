"""What `brimful why` finds: one `Diagnosis` per problem, with its figures and with fixes ranked by what they are worth.

`log_reader` makes them from the text of a training log, `run_checks` from a run folder. A diagnosis never claims more than it
knows: `certainty` says how sure the cause is, and a figure that follows from no measurement is a range and marked so.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from brimful.languages import tr, translate

Resource = Literal["gpu", "host", "shm", "disk", "files", "network", "none"]
Certainty = Literal["certain", "likely", "possible"]
Basis = Literal["measured", "predicted", "range"]
FRAMEWORKS = ("brimful", "transformers", "accelerate", "lightning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One remedy."""

    title: str
    """What to do, as a command: `Use micro-batches of 24 rows and accumulate 3 times`."""
    saves: str | None = None
    """The memory it saves: `2.3 GiB`, `30–60 % of the activations`; None if it saves none."""
    costs: str | None = None
    """What it costs in time or quality; None if nothing."""
    global_batch: str = "unchanged"
    """Its effect on the rows of an optimizer step."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """The exact setting, by framework (`FRAMEWORKS`), or under `shell` what to run or set before the start."""
    basis: Basis = "range"
    """Where the figures come from."""
    enough: bool | None = None
    """Whether it frees, alone and by these figures, what was missing; None if that cannot be said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One problem, why it happened and what helps, the best fix first.

    `str(diagnosis)` reads well; `to_json` has stable names.
    """

    resource: Resource
    """What ran out; `none` for what is slow, does not learn, or has nothing to do with memory."""
    kind: str
    """A stable name: `gpu-out-of-memory`, `host-killed`, `slow-data`, …"""
    cause: str
    """A few sentences."""
    certainty: Certainty = "certain"
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Numbers from the message or the run: `wanted_bytes`, `free_bytes`, `total_bytes`, …"""
    evidence: str | None = None
    """The line or event that shows it, with its place."""
    fixes: tuple[Fix, ...] = ()
    others: tuple["Diagnosis", ...] = ()
    """Further problems of the same log, which are not consequences of this one."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [in_language(self.cause), *([f"> {self.evidence}"] if self.evidence else [])]
        for number, fix in enumerate(self.fixes, 1):
            lines.append(f"{number}. {in_language(fix.title)}")
            if fix.saves:
                lines.append("   " + tr("saves {memory}", memory=in_language(fix.saves)))
            if fix.costs:
                lines.append("   " + tr("cost: {price}", price=in_language(fix.costs)))
        return "\n".join([*lines, *(tr("Also: {cause}", cause=in_language(other.cause)) for other in self.others)])


_SENTENCES = re.compile(r"(?<=[^.\s]\.) (?=[A-Z/])")


def in_language(text: str) -> str:
    """Sentences in the user's language. The catalogue has each of them without its full stop."""
    parts = [(part.removesuffix("."), part.endswith(".")) for part in _SENTENCES.split(text)]
    translated = [(_translated(part), part, stop) for part, stop in parts]
    chinese = any(new != old for new, old, _ in translated)
    full_stop, gap = ("。", "") if chinese else (".", " ")
    return gap.join(new + full_stop * stop for new, _, stop in translated)


def _translated(part: str) -> str:
    """Also of an error's message that was given a capital letter to stand by itself."""
    own = part[:1].lower() + part[1:]
    if (new := translate(part)) != part or own == part:
        return new
    return part if (new := translate(own)) == own else new
