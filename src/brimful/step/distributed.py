"""Several processes, one step: who takes part, what they agree on, and the one reduce of the gradients.

    each alone     micro-batches, out-of-memory errors, retries             no collective
    agree          a few numbers through gloo on the host: did everybody get through, what was summed and counted
    reduce         gradients in flat buckets that were allocated before training
    each alone     scale, clip, prove that the optimizer's bytes are there
    agree          once more, then every process applies the same update

A process that retries may be minutes late, so the numbers go through a group of their own with a time-out of a day; it
is supervision, not a time-out, that ends a job whose process died. Gradients go through the job's own backend (NCCL
or gloo), warmed up at the start, when everybody is known to be ready for them.
"""

import functools
import os
import statistics
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from brimful.errors import BadOption, ProcessLost
from brimful.memory.model import MemoryModel
from brimful.memory.oom import is_oom
from brimful.memory.split import deal_rows
from brimful.planning.plan import Plan
from brimful.step.rows import Ahead, Listed, Rows
from brimful.task import Shape
from brimful.training.supervise import watch
from brimful.units import MiB

BUCKET_BYTES = 32 * MiB
"""Two of these are held for each dtype of the gradients; a larger gradient is reduced where it lies."""
PATIENCE = timedelta(days=1)


class SingleProcess:
    """One process: nothing to agree on."""

    rank, size = 0, 1

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Everybody's numbers, in order of rank."""
        return [list(values)]

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def union(self, flags: Sequence[bool]) -> list[bool]:
        return list(flags)

    def reduce(self, gradients: Sequence[torch.Tensor]) -> None:
        """Sum these over all processes, in place and without allocating."""

    def spread(self, tensors: Sequence[torch.Tensor]) -> None:
        """The first process's values for everybody."""


class Talk(SingleProcess):
    """The processes of torch.distributed, before there is a model: they can agree, through gloo on the host."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.watch = watch(self.rank, self.size)
        with _lost_processes_named(self):
            self._talk = _talk(dist.group.WORLD)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        table = torch.zeros(self.size, len(values), dtype=torch.float64)
        table[self.rank] = torch.tensor(values, dtype=torch.float64)
        with _lost_processes_named(self):
            dist.all_reduce(table, group=self._talk)
        return [[float(value) for value in row] for row in table.tolist()]

    def gather_objects(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        with _lost_processes_named(self):
            dist.all_gather_object(found, value, group=self._talk)
        return found

    def union(self, flags: Sequence[bool]) -> list[bool]:
        votes = torch.tensor(flags, dtype=torch.uint8)
        with _lost_processes_named(self):
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._talk)
        return [bool(vote) for vote in votes.tolist()]


class Processes(Talk):
    """The same with a model, whose gradients they sum."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        with _lost_processes_named(self):
            self._buckets = _buckets(model, device)
            for buckets in self._buckets.values():  # NCCL takes its buffers at its first use: now, not in a full card
                _reduce([torch.zeros_like(bucket) for bucket in buckets], buckets)
            self.spread([*model.parameters(), *model.buffers()])

    def reduce(self, gradients: Sequence[torch.Tensor]) -> None:
        assert all(grad.dtype in self._buckets for grad in gradients), "a gradient of a dtype that no weight has"
        with _lost_processes_named(self):
            for dtype, buckets in self._buckets.items():
                _reduce([grad for grad in gradients if grad.dtype == dtype], buckets)

    def spread(self, tensors: Sequence[torch.Tensor]) -> None:
        with _lost_processes_named(self), torch.no_grad():
            for tensor in tensors:
                flat = tensor.detach().contiguous()  # itself, but for channels_last weights
                dist.broadcast(flat, src=0)
                tensor.copy_(flat)


@functools.cache
def _talk(job: Any) -> Any:
    """One group for agreements in a job, however many steppers a process makes."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def join(model: nn.Module, device: torch.device) -> SingleProcess:
    """This process's place in its job. Under a launcher that set WORLD_SIZE, torch.distributed is started if it was not."""
    return Processes(model, device) if connected(device) else SingleProcess()


def meet(device: torch.device, backend: str = "auto") -> SingleProcess:
    """The same before there is a model."""
    return Talk() if connected(device, backend) else SingleProcess()


def connected(device: torch.device, backend: str = "auto") -> bool:
    """Whether there are several processes; started here where a launcher says so and nobody did."""
    if not dist.is_available():
        return False
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        own = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(own if backend == "auto" else backend)
    return dist.is_initialized() and dist.get_world_size() > 1


def fingerprint(flags: Sequence[bool]) -> float:
    """A number that tells two sets of flags apart."""
    return float(zlib.crc32(bytes(flags)))


def _buckets(model: nn.Module, device: torch.device) -> dict[torch.dtype, list[torch.Tensor]]:
    sizes: dict[torch.dtype, int] = {}
    for param in model.parameters():  # frozen ones too: a run may thaw them
        if param.is_floating_point():
            sizes[param.dtype] = sizes.get(param.dtype, 0) + param.numel() * param.element_size()
    return {
        dtype: [torch.zeros(min(total, BUCKET_BYTES) // dtype.itemsize, dtype=dtype, device=device) for _ in range(2)]
        for dtype, total in sizes.items()
    }


def _reduce(gradients: Sequence[torch.Tensor], buckets: list[torch.Tensor]) -> None:
    """While one bucket is on its way the other is filled."""
    pending: list[tuple[Any, list[torch.Tensor], list[torch.Tensor]] | None] = [None, None]
    for turn, group in enumerate(_groups(gradients, buckets[0].numel())):
        slot = turn % 2
        _unpack(pending[slot])
        pending[slot] = _send(group, buckets[slot])
    for sent in pending:
        _unpack(sent)


def _send(group: list[torch.Tensor], bucket: torch.Tensor) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    size = sum(grad.numel() for grad in group)
    if size > bucket.numel():
        return dist.all_reduce(group[0], async_op=True), [], []
    parts = list(bucket[:size].split([grad.numel() for grad in group]))
    views = [part.view(grad.shape) for part, grad in zip(parts, group, strict=True)]
    torch._foreach_copy_(views, group)
    return dist.all_reduce(bucket[:size], async_op=True), views, group


def _unpack(sent: tuple[Any, list[torch.Tensor], list[torch.Tensor]] | None) -> None:
    if sent is None:
        return
    sent[0].wait()
    if sent[2]:
        torch._foreach_copy_(sent[2], sent[1])


def _groups(gradients: Sequence[torch.Tensor], capacity: int) -> Iterator[list[torch.Tensor]]:
    """Runs of gradients that fit a bucket; a larger one comes alone."""
    group: list[torch.Tensor] = []
    for grad in (piece for gradient in gradients for piece in _pieces(gradient, capacity)):
        if group and sum(one.numel() for one in group) + grad.numel() > capacity:
            yield group
            group = []
        group.append(grad)
    if group:
        yield group


def _pieces(gradient: torch.Tensor, capacity: int) -> Iterator[torch.Tensor]:
    """The gradient itself, unless it is too large for a bucket and lies in memory in another order than its indices."""
    if gradient.numel() <= capacity or gradient.is_contiguous():
        yield gradient
    else:
        for part in gradient.unbind(0):
            yield from _pieces(part, capacity)


@contextmanager
def _lost_processes_named(group: SingleProcess) -> Iterator[None]:
    """A collective that breaks has lost a peer; its own message helps nobody."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        if is_oom(error):
            raise
        raise ProcessLost(
            f"process {group.rank} of {group.size} lost another process of the job while they were to agree: "
            f"{(str(error).splitlines() or [''])[0][:200]}"
        ) from error


# Which rows of a step this process takes.
#
# Rows given as the whole step's, the same on every process, are dealt by work and by each one's measured speed, and a row
# too long for a small card goes to a larger one. Rows given as this process's own are all its. Either way the gradients'
# weights come from what was counted, so any deal gives the same result; only the time to finish differs.


RowsAre = Literal["global", "local"]
"""What is handed to a step on each process: the whole step's rows, or this process's own."""
MEASURED_STEPS = 5
"""Unlike devices without a plan take equal shares for so many steps, and are timed."""
CONTENT, DEEPEST = 4096, 4
"""How much of a row is compared between processes: so many numbers of a tensor, so many levels of objects."""
ALIKE = 1.1
"""Speeds within this factor of each other count as equal."""


@dataclass(frozen=True, slots=True)
class Member:
    """What the others know of a process."""

    device_name: str
    speed: float | None
    """Rows/s as its plan measured them; None without a plan."""
    model: MemoryModel | None
    limit_bytes: float
    """The memory that its plan may use; without end where there is no plan."""

    def holds(self, shape: Shape) -> bool:
        return self.model is None or self.model.cost_bytes(1, shape) <= self.limit_bytes


@dataclass(frozen=True, slots=True)
class Share:
    """This process's rows of a step."""

    rows: Rows
    indices: list[int]
    """Which of the rows given."""
    step_rows: int | None
    """Rows of the whole step; None where only all processes together know."""

    @property
    def work(self) -> float:
        return float(sum(1 + sum(self.rows.shapes[index]) for index in self.indices))


class Dealer:
    """Deals each step's rows, the same way on every process."""

    def __init__(
        self, group: SingleProcess, device: torch.device, plan: Plan | None, limit_bytes: float, rows_are: RowsAre
    ) -> None:
        self._group, self._rows_are = group, rows_are
        name = "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
        me = Member(name, plan.rows_per_s if plan else None, plan.memory_model if plan else None, limit_bytes)
        self._members: list[Member] = group.gather_objects(me)
        known = [member.speed for member in self._members if member.speed]
        self.speeds = known if len(known) == group.size else [1.0] * group.size
        unlike = len({member.device_name for member in self._members}) > 1
        self._samples: list[float] | None = [] if unlike and len(known) < group.size and rows_are == "global" else None
        self._compared = False

    @property
    def measuring(self) -> bool:
        """Whether the next steps are to be timed."""
        return self._samples is not None

    def share(self, rows: Rows, given: Any) -> Share:
        """This process's part of what it was given."""
        everything = list(range(len(rows)))
        if isinstance(rows, Ahead):  # a loader has dealt already
            return Share(rows, everything, rows.step_rows)
        if self._group.size == 1 or self._rows_are == "local":
            return Share(rows, everything, len(rows) if self._group.size == 1 else None)
        if not self._compared:
            self._compare(rows, given)
        work = [1.0 + sum(shape) for shape in rows.shapes]
        dealt = deal_rows(work, self.speeds, self.barred(rows.shapes))
        return Share(rows, dealt[self._group.rank], len(rows))

    def timed(self, work: float, seconds: float) -> str | None:
        """A clean step took so long. After a few of them rows are dealt by speed; says so when that changes anything."""
        assert self._samples is not None
        self._samples.append(seconds / max(work, 1.0))
        if len(self._samples) < MEASURED_STEPS:
            return None
        speeds = [1 / row[0] for row in self._group.gather([statistics.median(self._samples)])]
        self._samples = None
        if max(speeds) <= ALIKE * min(speeds):
            return None
        self.speeds = [speed / sum(speeds) for speed in speeds]
        shares = ", ".join(
            f"{member.device_name} {speed:.0%}" for member, speed in zip(self._members, self.speeds, strict=True)
        )
        return f"rows are dealt by measured speed from here on: {shares}"

    def barred(self, shapes: list[Shape]) -> list[tuple[int, int]]:
        """(row, process) where the row alone does not fit the process."""
        worst = tuple(max(lengths) for lengths in zip(*shapes, strict=True))
        small = [rank for rank, member in enumerate(self._members) if not member.holds(worst)]
        return [
            (row, rank) for rank in small for row, shape in enumerate(shapes) if not self._members[rank].holds(shape)
        ]

    def _compare(self, rows: Rows, given: Any) -> None:
        """Once: does everybody have the same rows in hand?"""
        self._compared = True
        found = self._group.gather([float(len(rows)), _fingerprint(rows, given)])
        other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
        if other is not None:
            raise BadOption(
                f"process {other} was given other rows than process 0 ({found[other][0]:.0f} and {found[0][0]:.0f} of them): give "
                'every process the whole step\'s rows, or say Stepper(..., rows_are="local") where each has its own'
            )


def _fingerprint(rows: Rows, given: Any) -> float:
    """A number from the content of the first, middle and last row."""
    some = sorted({0, len(rows) // 2, len(rows) - 1})
    listed = isinstance(rows, Listed)
    return float(zlib.crc32("".join(_told(given[row] if listed else rows.batch([row])) for row in some).encode()))


def _told(value: Any, depth: int = 0) -> str:
    """The same words for equal rows in any process, which pickle and hashes do not give."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)}{value.detach().cpu().flatten()[:CONTENT].tolist()}"
    if isinstance(value, np.ndarray):
        return f"{value.shape}{value.ravel()[:CONTENT].tolist()}"
    if isinstance(value, Mapping):
        return str(sorted(f"{key!r}: {_told(part, depth + 1)}" for key, part in value.items()))
    if isinstance(value, (list, tuple)):
        return str([_told(part, depth + 1) for part in value[:CONTENT]])
    if isinstance(value, (str, bytes, int, float, bool, type(None))):
        return repr(value)
    inside = getattr(value, "__dict__", None)
    return type(value).__name__ + (_told(inside, depth + 1) if inside and depth < DEEPEST else "")
