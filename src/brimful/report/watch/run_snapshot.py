"""What is known of a run at one moment: a frozen `Snapshot`. `take_snapshot` makes it, `watch_screen` draws it.

Every figure may be missing, in a run that has just begun, was killed while it wrote or is of an older version: what is unknown is
None.
"""

import math
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from typing import Any, Literal, cast

from brimful.report.run_record import State
from brimful.units import Zone

WatchState = Literal[State, "gone"]
"""`gone`: the folder was removed."""
ACTIVE: tuple[WatchState, ...] = ("preparing", "running")
NO_EVENTS = "It has checkpoints, but its events.jsonl is missing: nothing is known about its steps."
TIME_PARTS = ("compute", "data", "communication", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A device and the rank that trains on it."""

    label: str
    """`GPU 0`."""
    rank: int
    name: str | None = None
    """`NVIDIA H200`."""
    kind: str = ""
    """torch's device type: `cuda`, `cpu`."""
    uuid: str | None = None
    """torch's, without a prefix."""
    allocated_bytes: float | None = None
    reserved_bytes: float | None = None
    """Highest peaks of the recent steps."""
    held_bytes: float | None = None
    """What the run holds now, CUDA contexts included, as NVML counts it."""
    others_bytes: float | None = None
    """What other processes hold."""
    limit_bytes: float | None = None
    total_bytes: float | None = None
    predicted_bytes: float | None = None
    """The peak that the plan predicts."""
    utilization: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    busy_s: float | None = None
    """Seconds of a step that this rank computes, on average."""
    slowest: bool = False
    live: bool = False
    """Whether NVML has just answered; else the figures are those that the run sampled last."""
    used: float | None = None
    """Share of the limit: of the reserved peak if it is known, else of the allocated one."""
    zone: Zone | None = None

    @property
    def ours_bytes(self) -> float | None:
        return next((one for one in (self.reserved_bytes, self.allocated_bytes, self.held_bytes) if one), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """RAM under the limit that binds, a cgroup's or the machine's."""

    tree_bytes: float | None = None
    """Of the run's processes."""
    machine_bytes: float | None = None
    """All that counts against the limit."""
    limit_bytes: float | None = None
    limited_by: str | None = None
    predicted_bytes: float | None = None
    swap_used_bytes: float | None = None
    swap_total_bytes: float | None = None
    workers: int | None = None
    cpu: float | None = None
    read_bytes_per_s: float | None = None
    used: float | None = None
    zone: Zone | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A curve over the steps, thinned to a few hundred points."""

    points: tuple[tuple[int, float], ...] = ()
    last: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    not_finite: int = 0
    """Points that are NaN or infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    step: int
    time: datetime | None
    metrics: tuple[tuple[str, float], ...]
    best: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint, or a save that failed."""

    step: int
    time: datetime | None
    size_bytes: float | None = None
    seconds: float | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Oom:
    """An out-of-memory error and what became of it."""

    step: int
    time: datetime | None
    rank: int
    what: str
    """What ran: `backward, micro-batch 2 of 6 (43 rows)`."""
    change: str
    restored_step: int | None = None
    restored_time: datetime | None = None
    restored: str | None = None
    """How the micro-batch size went back up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    step: int | None
    time: datetime | None
    sentence: str
    warning: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run at one moment. Times have a time zone, sizes are in bytes, shares from 0 to 1."""

    taken: datetime
    run: str
    name: str
    state: WatchState
    task: str | None = None
    begun: datetime | None = None
    """When the run was first started."""
    since: datetime | None = None
    """When it was started last."""
    ended: datetime | None = None
    trained_s: float | None = None
    """From its beginning to its end, without the pauses before it was resumed."""
    host: str | None = None
    pid: int | None = None
    device_name: str | None = None
    processes: int | None = None
    sentence: str | None = None
    """How it ended."""
    resume_command: str | None = None
    state_label: str = ""
    """The state as people read it, if it is another word."""
    fails_again: bool = False
    """Whether the run ended with an error that must be fixed before it is continued."""
    silent_s: float | None = None
    """Seconds since its last event, if that is longer than usual."""
    switched_from: str | None = None
    """The run that was watched before this newer one began."""
    also_running: tuple[str, ...] = ()
    problem: str | None = None
    """What could not be read."""
    step: int = 0
    steps: int | None = None
    epoch: float | None = None
    epochs: float | None = None
    step_s: float | None = None
    eta_s: float | None = None
    ends: datetime | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    micro_batches: int | None = None
    """Of the last step."""
    precision: str | None = None
    layout: str | None = None
    cards: tuple[Card, ...] = ()
    ram: HostMemory | None = None
    times: tuple[tuple[str, float], ...] = ()
    """Seconds of a step by what they were spent on, in the order of `TIME_PARTS`."""
    padding: float | None = None
    mfu: float | None = None
    tokens_per_s: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    loss: Series = Series()
    rows_per_s: Series = Series()
    memory: Series = Series()
    """Of the fullest card: reserved where it is known, else allocated."""
    utilization: Series = Series()
    """Of all cards, on average."""
    rate: Series = Series()
    """The learning rate."""
    logged: tuple[tuple[str, Series], ...] = ()
    """What the task itself logs of each step, by name."""
    evaluation: Evaluation | None = None
    evaluations: tuple[tuple[int, float], ...] = ()
    """Step and loss of each."""
    best: Evaluation | None = None
    checkpoint: Saved | None = None
    failed_save: Saved | None = None
    """A save after the last checkpoint that failed."""
    ooms_survived: int = 0
    ooms: tuple[Oom, ...] = ()
    """The latest, the oldest first."""
    notes: tuple[Note, ...] = ()
    """The latest, the oldest first."""

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values: unknown and not finite are null, times in ISO 8601."""
        return cast("dict[str, Any]", _plain(self))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {one.name: _plain_field(one.name, getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain_field(name: str, value: Any) -> Any:
    if name in ("times", "metrics", "logged"):
        return {key: _plain(one) for key, one in value}
    return (
        round(value) if name.endswith("_bytes") and isinstance(value, float) and math.isfinite(value) else _plain(value)
    )
