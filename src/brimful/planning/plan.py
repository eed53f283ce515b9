"""The plan: how a step is split and what it costs, with every choice and its reason.

Each choice has a basis: `measured` if it ran, `predicted` if the memory model says so, `asked` if somebody set it; and a
source, which says who did. A plan is saved as JSON and loaded again bit for bit.
"""

import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from brimful.files import parse_object, read_json, write_atomic
from brimful.memory.layout import LAYOUTS, PACKED, FixedSize, Layout, LayoutName, PackedLayout
from brimful.memory.model import MemoryModel
from brimful.memory.split import without_single_rows
from brimful.planning.plan_options import Checkpointed, Weights
from brimful.task import Shape
from brimful.units import Zone, show_bytes, show_rate, show_rows, zone

Basis = Literal["measured", "predicted", "asked"]
Source = Literal["you", "config file", "recipe", "task", "default", "measured", "predicted"]
"""Where a value comes from."""
SET_BY_USER = ("you", "config file", "recipe")
_SET_IN = re.compile(r"set in [^;]*(; |$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One decision."""

    name: str
    requested: Any
    """None if the user left it open."""
    effective: Any
    reason: str
    basis: Basis
    source: Source

    @classmethod
    def of(
        cls, name: str, requested: Any, effective: Any, reason: str, basis: Basis, source: Source | None = None
    ) -> "Choice":
        """A choice with this basis and source, or `asked` and `you` where it is what the user requested.

        By default the source is the basis, and of what was asked for the user, or the default if there is no request.
        """
        if requested is not None and requested == effective:
            basis, source = "asked", "you"
        elif source is None:
            source = basis if basis != "asked" else "default" if requested is None else "you"
        return cls(name=name, requested=requested, effective=effective, reason=reason, basis=basis, source=source)

    def set_in(self, file: str | None) -> "Choice":
        """The same choice of a user who made it in a recipe (`recipe small`) or a config file; None: with a flag or an argument."""
        reason = _SET_IN.sub("", self.reason)
        if file is None:
            return replace(self, source="you", reason=reason)
        reason = f"set in {file}; {reason}" if reason else f"set in {file}"
        return replace(self, source="recipe" if file.startswith("recipe ") else "config file", reason=reason)

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """The choice as a row of a table: name, requested, effective, source, reason."""
        requested, effective = (
            "–" if value is None else show_bytes(value) if self.name in LIMITS else str(value)
            for value in (self.requested, self.effective)
        )
        return self.name.replace("_", " "), requested, effective, self.source.split()[0], self.reason


COLUMNS = ("choice", "requested", "effective", "source", "reason")
LIMITS = ("memory_limit", "host_limit")
"""Choices of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levers:
    """What trades time for memory, and how it is set."""

    checkpointing: Checkpointed
    compile: Literal["on", "off"] = "off"
    chunked_loss: Literal["on", "off"] = "off"
    precision: Literal["fp32", "bf16", "fp16"]
    weights: Weights | None = None
    """None: as the task makes them."""
    cudnn_attention: Literal["on", "off"]
    """`on` leaves the choice of kernels to torch."""
    cuda_graphs: Literal["on", "off"] = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the levers that a search compares are set."""

    layout: LayoutName
    precision: Literal["fp32", "bf16", "fp16"]
    compile: Literal["on", "off"]
    checkpointing: Checkpointed

    def __str__(self) -> str:
        """`packed bf16 compiled checkpointed every-2`."""
        words = {"compiled": self.compile, "checkpointed": self.checkpointing}
        switched_on = (word if value == "on" else f"{word} {value}" for word, value in words.items() if value != "off")
        return " ".join((self.layout, self.precision, *switched_on))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One split of the step at one setting, as the search timed it, or the size that did not fit."""

    setting: Setting
    shape: Shape
    """The lengths it was timed with: the longest row, or the mean row of a long step where rows are packed."""
    micro_batch: int
    """Rows."""
    tokens: Shape | None
    """Of a packed micro-batch, by length."""
    accumulation: int
    peak_bytes: int | None
    """None if nothing measured or predicts it."""
    reserved_bytes: int | None
    basis: Literal["measured", "predicted"]
    """Of the peak. Speeds are always measured."""
    fits: bool
    """Within the budget, or within the limit if the user set the micro-batch."""
    rows_per_s: float | None
    """Of one process with rows of `shape`; None if it did not run."""
    step_s: float | None
    data_rows_per_s: float | None = None
    """With the rows of the data as steps draw them; None if that was not timed."""
    allowed: bool = True
    """Whether the user's options leave this setting open."""
    chosen: bool = False

    @property
    def rate(self) -> float:
        """What the tried are compared by: rows/s of the data, else of rows of `shape`."""
        return self.data_rows_per_s or self.rows_per_s or 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            **_as_dict(self),
            "setting": _as_dict(self.setting),
            "shape": list(self.shape),
            "tokens": None if self.tokens is None else list(self.tokens),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """Loader and host memory. None is unknown: without data nothing could be measured."""

    workers: int | None = None
    """Loader workers of each process; 0 reads in the training process."""
    prefetch: int | None = None
    """Steps that each worker reads ahead."""
    pin_memory: bool | None = None
    predicted_bytes: int | None = None
    """Host RAM of all processes of the job with their workers, beyond the libraries they import."""
    limit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTime:
    """What a run is predicted to take, from the measured speed. Evaluations and checkpoints come on top of it."""

    steps: int
    """Of the whole run."""
    steps_per_epoch: int
    """Rounded up: a step may take rows of two passes."""
    step_s: float | None
    """None if nothing measured it, as all that follows."""
    epoch_s: float | None
    total_s: float | None
    ends: str | None
    """When the steps that are left have been trained: `2026-01-31T09:02:00Z`."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """The fastest configuration found that fits, with every choice and its reason.

    `print(plan)` shows the choices as a table. Sizes are bytes, for rows of the planned `shape`.

    >>> import brimful, torch
    >>> class Regression(brimful.Task):
    ...     def model(self):
    ...         return torch.nn.Linear(8, 1)
    ...     def loss(self, model, row):
    ...         return model(row).square().mean()
    >>> rows = list(torch.randn(100, 8))
    >>> plan = brimful.plan(Regression(), data=rows, micro_batch=16, global_batch=64, device="cpu", cache=False)
    >>> plan.save("plan.json")
    >>> brimful.Plan.load("plan.json").choice("micro_batch").requested
    16
    """

    task: str
    device: str
    device_name: str
    limit_bytes: int
    fill: float
    shape: Shape
    """The lengths planned for. Every number below is for rows of this shape."""
    layout: LayoutName = "padded"
    """`packed`: rows end to end in one sequence, and `shape` is the mean row of a long step."""
    fixed_tokens: Shape | None = None
    """By length, the tokens that every packed micro-batch is filled up to, for CUDA graphs; None: as many as its rows need."""
    fixed_rows: int = 0
    """The most rows of such a micro-batch."""
    fixed_trained: float = 1.0
    """The largest share of its tokens that has room in the loss, where a packed batch says which are trained."""
    global_batch: int
    micro_batch: int
    """Rows per forward and backward, at most."""
    largest_micro_batch: int
    """The most rows that ran within the budget. More may fit if the choice `plan_seconds` says that time ended the search."""
    accumulation: int
    """Micro-batches per optimizer step in the process with the most rows."""
    processes: int
    deal: tuple[int, ...]
    """Rows of the step for each process."""
    memory_model: MemoryModel
    predicted_peak_bytes: int
    """Allocated bytes at the chosen size, predicted by a model that had not seen it (unless it is the only probe)."""
    measured_peak_bytes: int
    """Allocated bytes at the chosen size, as measured."""
    reserved_peak_bytes: int | None
    """Bytes reserved on the device at the chosen size; None if the device does not count them."""
    largest_predicted_peak_bytes: int
    largest_measured_peak_bytes: int
    one_more_predicted_peak_bytes: int | None
    """What one row more than the largest would cost; None if the step has no more rows."""
    rows_per_s: float
    step_s: float | None = None
    """Seconds of a step of the data's own rows, predicted from the measured speeds of computing and reading; None without
    data."""
    simulation_slowdown: float = 1.0
    """How much longer a micro-batch takes in the simulated memory that holds a limit on the CPU, measured; 1 elsewhere."""
    overhead: float | None = None
    """Cost of a further micro-batch in rows × padded lengths, measured unless the plan is deterministic; None if unknown
    or if splits should be few."""
    deterministic: bool = False
    """Nothing that was timed decided on this plan, and nothing that is timed may change how its steps are split."""
    offloaded_bytes: int = 0
    """What `checkpointing="offload"` moves to host RAM in each process, at the chosen size; predicted."""
    ooms: int
    probes: int
    plan_s: float
    levers: Levers
    host: HostPlan
    choices: tuple[Choice, ...]
    warnings: tuple[str, ...]
    tried: tuple[Tried, ...] = ()
    """What the search timed, the fastest first."""
    table: bool = False
    """Whether every lever was tried, to be shown as a table."""
    not_tried: tuple[str, ...] = ()
    """Settings that `table=True` left out, each with the reason."""
    data_rows: int | None = None
    """Rows of the data; None without data."""
    run_time: RunTime | None = None
    """Only the plan of a run has it."""
    number: int | None = None
    """In the folder of a run, where plans/0001.json is the first; None elsewhere."""
    key: str
    created: str
    cached: bool = False

    @property
    def budget_bytes(self) -> int:
        """What the plan may use: `fill` of the limit."""
        return int(self.limit_bytes * self.fill)

    @property
    def used(self) -> float:
        """The share of the limit that the chosen size takes."""
        return max(self.measured_peak_bytes, self.reserved_peak_bytes or 0) / self.limit_bytes

    @property
    def tokens(self) -> Shape:
        """The tokens of a micro-batch, by length: its rows × `shape`."""
        return tuple(self.micro_batch * length for length in self.shape)

    @property
    def row_layout(self) -> Layout:
        """How the rows of a micro-batch are laid out."""
        return LAYOUTS[self.layout] if self._fixed is None else PackedLayout(self._fixed)

    @property
    def _fixed(self) -> FixedSize | None:
        if self.fixed_tokens is None:
            return None
        return FixedSize(tuple(self.fixed_tokens), self.fixed_rows, self.fixed_trained)

    @property
    def zone(self) -> Zone:
        return zone(self.used)

    @property
    def micro_limit(self) -> float:
        """The measure of the chosen micro-batch. Rows of other lengths are split to the same.

        A packed one may have as many tokens as its sequence is filled up to, as far as the budget goes. If a packed step fits
        whole, a step of longer rows stays whole too, as far as the budget goes.
        """
        whole, budget = self.accumulation == 1, float(self.budget_bytes)
        chosen = self.memory_model.rising_cost(self.micro_batch, self.shape, whole=whole)
        if self.layout == "padded":
            return chosen
        if self._fixed is not None:
            # Memory for this size was reserved in a trial. A step that is too long for it becomes two of that size.
            chosen = max(chosen, self.memory_model.rising_cost(self._fixed.rows, self._fixed.shape))
        if whole and self.choice("micro_batch").requested is None:
            return max(chosen, budget)
        filled = PACKED.shape([self.shape] * self.micro_batch)
        return max(chosen, min(budget, self.memory_model.rising_cost(self.micro_batch, filled, whole=whole)))

    def split(self, shapes: list[Shape]) -> list[list[int]]:
        """Rows of these lengths as micro-batches, by index. The loader proposes this split to the step."""
        most, together = self.choice("micro_batch").requested, self.choice("exactness").effective
        groups = self.row_layout.split(
            shapes, self.memory_model.rising_cost, self.micro_limit, max_rows=most, overhead=self.overhead
        )
        return without_single_rows(groups) if together in ("inexact", "whole step") else groups

    def choice(self, name: str) -> Choice:
        """The choice of this name: `plan.choice("micro_batch").reason`."""
        return next(choice for choice in self.choices if choice.name == name)

    def with_warning(self, *warnings: str) -> "Plan":
        return replace(self, warnings=(*self.warnings, *warnings))

    @property
    def headline(self) -> str:
        """Split and speed in one line."""
        size = show_rows(self.micro_batch)
        if self.layout == "packed":
            size += f" packed in {'+'.join(f'{tokens:,}' for tokens in self.tokens)} tokens"
        split = f"{size} × {self.accumulation}"
        if self.processes > 1:
            split += f" on each of {self.processes} processes ({'+'.join(map(str, self.deal))})"
        elif self.micro_batch * self.accumulation != self.global_batch:
            split = f"{self.accumulation} micro-batches of at most {size}"
        rows = f"rows of {'+'.join(map(str, self.shape))}" if self.shape else "rows of one size"
        speed = f"{show_rate(self.rows_per_s)} rows/s"
        return f"{self.task} on {self.device_name}: {split} = {self.global_batch} per step, {speed} at {rows}"

    def __repr__(self) -> str:
        split = f"{self.micro_batch} × {self.accumulation} of {self.global_batch} rows"
        return f"<Plan {self.task}: {split}, {self.used:.0%} of {show_bytes(self.limit_bytes)} on {self.device_name}>"

    def __str__(self) -> str:
        taken = max(self.measured_peak_bytes, self.reserved_peak_bytes or 0)
        table = [COLUMNS, *(choice.cells for choice in self.choices)]
        widths = [max(len(row[column]) for row in table) for column in range(4)] + [0]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        memory = f"{show_bytes(taken)} of {show_bytes(self.limit_bytes)}, {self.used:.0%} {self.zone}"
        return "\n".join([self.headline, memory, "", *lines, *(f"warning: {warning}" for warning in self.warnings)])

    def to_json(self) -> dict[str, Any]:
        return {
            **_as_dict(self),
            "zone": self.zone,
            "tokens": list(self.tokens),
            "shape": list(self.shape),
            "deal": list(self.deal),
            "fixed_tokens": None if self.fixed_tokens is None else list(self.fixed_tokens),
            "memory_model": self.memory_model.to_json(),
            "levers": _as_dict(self.levers),
            "host": _as_dict(self.host),
            "run_time": None if self.run_time is None else _as_dict(self.run_time),
            "choices": [_as_dict(choice) for choice in self.choices],
            "warnings": list(self.warnings),
            "tried": [one.to_json() for one in self.tried],
            "not_tried": list(self.not_tried),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Plan":
        """Raises `ValueError` for what `to_json` did not write."""
        known = {field.name for field in fields(cls)}
        return parse_object(cls, {key: item for key, item in value.items() if key in known})

    def save(self, path: Path | str) -> None:
        """Write the plan as JSON, whole or not at all."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(path), json.dumps(self.to_json(), indent=1))

    @classmethod
    def load(cls, path: Path | str) -> "Plan":
        """Read a plan that `save` wrote."""
        return cls.from_json(read_json(Path(path).read_text()))


def _as_dict(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}
