"""The plan: every value with what was asked, what it became, why, and whether it was measured.

`basis` is `measured` for what ran, `predicted` for what the memory model says, `asked` for what the user fixed.
"""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from brimful.memory.model import MemoryModel
from brimful.memory.split import cut, paired
from brimful.task import Shape

Basis = Literal["measured", "predicted", "asked"]
Zone = Literal["safe", "edge", "danger"]

EDGE, DANGER = 0.85, 0.90
"""Peaks up to 85 % of the limit are safe, up to 90 % on the edge, in danger above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One decision."""

    name: str
    requested: Any
    effective: Any
    reason: str
    basis: Basis


@dataclass(frozen=True, slots=True, kw_only=True)
class Levers:
    """What is switched how."""

    checkpointing: Literal["on", "off"]
    compile: Literal["on", "off"]
    chunked_loss: Literal["on", "off"]
    precision: Literal["fp32", "bf16", "fp16"]
    cudnn_attention: Literal["on", "off"] = "on"
    """On leaves it to torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """The host's side. None is unknown: nothing was measured about it."""

    workers: int | None
    """Loader workers of each process; 0 reads in the process itself."""
    prefetch: int | None = None
    """Steps that each worker reads ahead."""
    pin_memory: bool | None
    predicted_bytes: int | None
    """Host RAM of all processes of the job with their workers, beyond the libraries they import."""
    limit_bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The fastest configuration found that fits, and everything that was learnt on the way."""

    task: str
    device: str
    device_name: str
    limit_bytes: int
    fill: float
    shape: Shape
    """The lengths planned for: every figure below is for rows of this shape."""
    global_batch: int
    micro_batch: int
    """Rows per forward and backward, at most."""
    largest_micro_batch: int
    """The most rows that ran within `fill` of the limit."""
    accumulation: int
    """Micro-batches per optimizer step in the process with the most rows."""
    processes: int
    deal: tuple[int, ...]
    """Rows of the step for each process."""
    memory_model: MemoryModel
    predicted_peak_bytes: int
    """Allocated bytes at the chosen size, as predicted by a model that had not seen it (unless it is the only reading)."""
    measured_peak_bytes: int
    """Allocated bytes at the chosen size, as it ran."""
    reserved_peak_bytes: int | None
    """Bytes taken from the device at the chosen size; None where the device keeps no such count."""
    largest_predicted_peak_bytes: int
    largest_measured_peak_bytes: int
    one_more_predicted_peak_bytes: int | None
    """What one row more than the largest would cost against the limit; None where the global batch ends first."""
    rows_per_s: float
    overhead: float | None = None
    """What a further micro-batch costs, in rows × padded lengths, as timed; None where cuts are to be few, or unknown."""
    ooms: int
    probes: int
    plan_s: float
    levers: Levers
    host: HostPlan
    choices: tuple[Choice, ...]
    warnings: tuple[str, ...]
    key: str
    created: str
    cached: bool = False

    @property
    def budget_bytes(self) -> int:
        return int(self.limit_bytes * self.fill)

    @property
    def used(self) -> float:
        """The share of the limit that the chosen size takes."""
        return max(self.measured_peak_bytes, self.reserved_peak_bytes or 0) / self.limit_bytes

    @property
    def zone(self) -> Zone:
        return "safe" if self.used <= EDGE else "edge" if self.used <= DANGER else "danger"

    @property
    def micro_limit(self) -> float:
        """What the chosen micro-batch measures: rows of other lengths are cut to the same."""
        return self.memory_model.measure(self.micro_batch, self.shape, whole=self.accumulation == 1)

    def cut(self, shapes: list[Shape]) -> list[list[int]]:
        """Rows of these lengths in micro-batches as this plan would have them: what a loader proposes to the step."""
        most, exact = self.choice("micro_batch").requested, self.choice("exactness").effective == "exact"
        groups = cut(shapes, self.memory_model.measure, self.micro_limit, most=most, overhead=self.overhead)
        return groups if exact else paired(groups)

    def choice(self, name: str) -> Choice:
        return next(choice for choice in self.choices if choice.name == name)

    def to_json(self) -> dict[str, Any]:
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            **plain,
            "zone": self.zone,
            "shape": list(self.shape),
            "deal": list(self.deal),
            "memory_model": self.memory_model.to_json(),
            "levers": _as_dict(self.levers),
            "host": _as_dict(self.host),
            "choices": [_as_dict(choice) for choice in self.choices],
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Plan":
        known = {field.name for field in fields(cls)}
        return cls(
            **{
                **{key: item for key, item in value.items() if key in known},
                "shape": tuple(value["shape"]),
                "deal": tuple(value["deal"]),
                "memory_model": MemoryModel.from_json(value["memory_model"]),
                "levers": Levers(**value["levers"]),
                "host": HostPlan(**value["host"]),
                "choices": tuple(Choice(**choice) for choice in value["choices"]),
                "warnings": tuple(value["warnings"]),
            }
        )

    def save(self, path: Path | str) -> None:
        """Write the plan as JSON, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.part")
        try:
            temporary.write_text(json.dumps(self.to_json(), indent=1))
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: Path | str) -> "Plan":
        return cls.from_json(json.loads(Path(path).read_text()))

    def warned(self, warning: str) -> "Plan":
        return replace(self, warnings=(*self.warnings, warning))

    def as_cached(self) -> "Plan":
        return replace(self, cached=True)


def _as_dict(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}
