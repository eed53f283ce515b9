"""What `brimful why` finds: one `Diagnosis` per problem, with its figures and with fixes ranked by what they are worth.

`log_reader` makes them from the text of a training log, `run_checks` from a run folder. A diagnosis never claims more than it
knows: `certainty` says how sure the cause is, and a figure that follows from no measurement is a range and marked so.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Resource = Literal["gpu", "host", "shm", "disk", "network", "none"]
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
    """The exact setting, by framework (`FRAMEWORKS`)."""
    basis: Basis = "range"
    """Where the figures come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One problem, why it happened and what helps, the best fix first.

    `str(diagnosis)` reads well; `to_json` has stable names.
    """

    resource: Resource
    """What ran out; `none` for what is slow or does not learn."""
    kind: str
    """A stable name: `gpu-out-of-memory`, `host-killed`, `slow-data`, …"""
    cause: str
    """One or two sentences."""
    certainty: Certainty = "certain"
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Numbers from the message or the run: `wanted_bytes`, `free_bytes`, `total_bytes`, …"""
    evidence: str | None = None
    """The line or event that shows it, with its place."""
    fixes: tuple[Fix, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [self.cause]
        for number, fix in enumerate(self.fixes, 1):
            facts = [fact for fact in (fix.saves and f"saves {fix.saves}", fix.costs and f"costs {fix.costs}") if fact]
            note = f" ({', '.join(facts)})" if facts else ""
            lines.append(f"{number}. {fix.title}{note}")
        return "\n".join(lines)
