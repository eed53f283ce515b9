"""Several ranks, one step: what they agree on, the one reduce of the gradients, and who takes which rows.

    each rank alone   micro-batches, out-of-memory errors, retries            no collective
    agree             a few numbers through gloo on the host: is every rank done, what was summed and counted
    reduce            scaled gradients in flat buckets that were allocated before training
    each rank alone   clip, reserve the optimizer's bytes
    agree             once more, then every rank applies the same update

A rank that retries may be minutes late, so agreements have a group of their own with a timeout of a day. A peer that died
closes its gloo connection, so the others raise `ProcessLost` at their next agreement instead of waiting. Gradients go
through the job's own backend (NCCL or gloo).

`communication_s` of a group counts the seconds in all of this, waits for slower ranks included. Agreements and gloo are
timed on the host. An NCCL reduce is only launched there, so CUDA events are recorded around it and read later: nothing ever
waits for them. If the device has not reached them when they are read, only the launch counts.
"""

import functools
import os
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from brimful.errors import BadOption, ProcessLost, UserError
from brimful.memory.model import MemoryModel
from brimful.memory.oom import is_oom
from brimful.memory.split import deal_rows, padded_shape
from brimful.planning.plan import Plan
from brimful.step.rows import ListedRows, LoadedRows, Rows
from brimful.task import Shape
from brimful.units import MiB

T = TypeVar("T")
RowsAre = Literal["global", "local"]
"""Which rows a rank passes to a step: all rows of the step, or only its own."""

BUCKET_BYTES = 32 * MiB
"""Two buckets of this size are held for each dtype of the gradients. A larger gradient is reduced in place."""
AGREEMENT_TIMEOUT = timedelta(days=1)
TIMED_STEPS = 5
"""Steps for which different devices without a plan take equal shares, and are timed."""
EQUAL_SPEED = 1.1
"""Speeds within this factor of each other count as equal."""
FINGERPRINT_VALUES, FINGERPRINT_DEPTH = 4096, 4
"""How much of a row is compared between ranks: values of a tensor, levels of nested objects."""


class SingleProcess:
    """The group of a job with one process. `ProcessGroup` has the same methods."""

    rank, size = 0, 1

    @property
    def communication_s(self) -> float:
        """Seconds in collectives so far, as the module's docstring counts them."""
        return 0.0

    def gather(self, values: Sequence[Any]) -> list[list[Any]]:
        """The numbers of every rank, in order of rank. Those of a single process may still be on the device."""
        return [list(values)]

    def gather_objects(self, value: Any) -> list[Any]:
        """The object of every rank, in order of rank."""
        return [value]

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank."""
        return [any(column) for column in zip(*self.gather(flags), strict=True)]

    def reduce(self, gradients: Sequence[torch.Tensor]) -> None:
        """Sum these over all ranks, in place and without allocating."""

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the values of rank 0 to every rank."""


class ProcessGroup(SingleProcess):
    """The ranks of torch.distributed. With a model, rank 0's weights are copied to all and gradients can be reduced."""

    def __init__(self, device: torch.device, model: nn.Module | None = None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._buckets: dict[torch.dtype, list[torch.Tensor]] = {}
        self._clock = CommunicationClock(device)
        with self._collective():
            self._agreements = _agreement_group(dist.group.WORLD)
            if model is not None:
                self._buckets = _allocate_buckets(model, device)
                for buckets in self._buckets.values():  # NCCL allocates at its first use: now, not on a full GPU
                    _reduce([torch.zeros_like(bucket) for bucket in buckets], buckets)
        if model is not None:
            self.broadcast([*model.parameters(), *model.buffers()])

    @property
    def communication_s(self) -> float:
        return self._clock.read_s()

    def gather(self, values: Sequence[Any]) -> list[list[Any]]:
        table = torch.zeros(self.size, len(values), dtype=torch.float64)
        table[self.rank] = torch.tensor(values, dtype=torch.float64)
        with self._collective():
            dist.all_reduce(table, group=self._agreements)
        return [[float(value) for value in row] for row in table.tolist()]

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        with self._collective():
            dist.all_gather_object(values, value, group=self._agreements)
        return values

    def reduce(self, gradients: Sequence[torch.Tensor]) -> None:
        assert all(grad.dtype in self._buckets for grad in gradients), "a gradient of a dtype that no weight has"
        with self._collective(is_launched=True):
            for dtype, buckets in self._buckets.items():
                _reduce([grad for grad in gradients if grad.dtype == dtype], buckets)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        with self._collective(), torch.no_grad():
            for tensor in tensors:
                flat = tensor.detach().contiguous()  # the tensor itself, except for channels_last weights
                dist.broadcast(flat, src=0)
                tensor.copy_(flat)

    @contextmanager
    def _collective(self, *, is_launched: bool = False) -> Iterator[None]:
        """Timed. One that fails has lost a peer, which its own message does not say."""
        try:
            with self._clock.running(is_launched=is_launched):
                yield
        except (dist.DistError, RuntimeError) as error:
            if is_oom(error):
                raise
            first_line = (str(error).splitlines() or [""])[0][:200].rstrip(". ")
            raise ProcessLost(
                f"rank {self.rank} of {self.size} lost another process of the job: {first_line}. "
                "Try: look at what the other processes printed."
            ) from error


class CommunicationClock:
    """Adds up the seconds in collectives; the module's docstring says how they are measured."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda, self._seconds = device.type == "cuda", 0.0
        self._launched: list[tuple[Any, Any, float]] = []
        """Events on the device around what was only launched, and the seconds that this took on the host."""

    @contextmanager
    def running(self, *, is_launched: bool = False) -> Iterator[None]:
        """A collective runs in here; `is_launched` if a GPU completes it later."""
        begin, started = self._event() if is_launched else None, time.perf_counter()
        try:
            yield
        finally:
            on_host_s = time.perf_counter() - started
            self._seconds += on_host_s
        if begin is not None:
            self._launched.append((begin, self._event(), on_host_s))

    def read_s(self) -> float:
        """Seconds so far. Waits for nothing: what the device has not completed counts with its launch only."""
        for begin, end, on_host_s in self._launched:
            if end.query():
                self._seconds += max(0.0, begin.elapsed_time(end) / 1000 - on_host_s)
        self._launched.clear()
        return self._seconds

    def _event(self) -> Any:
        """Marks where the device's work stands now; None where the host sees a collective end."""
        if not self._on_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def join(device: torch.device, model: nn.Module | None = None, *, backend: str = "auto") -> SingleProcess:
    """The group this process belongs to. Starts torch.distributed if a launcher set WORLD_SIZE and it is not started."""
    if not dist.is_available():
        return SingleProcess()
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        default = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(default if backend == "auto" else backend)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return SingleProcess()
    return ProcessGroup(device, model)


def gather_results(group: SingleProcess, work: Callable[[], T] | None) -> list[T | None]:
    """What `work` returned on each rank, in order of rank; None for ranks without work. One rank's error is raised on all."""
    result: T | None = None
    error: UserError | None = None
    try:
        result = None if work is None else work()
    except UserError as raised:
        if group.size == 1:
            raise
        error = raised
    results = group.gather_objects((result, None if error is None else (str(error), error.code)))
    if error is not None:
        raise error
    first = next((failure for _, failure in results if failure is not None), None)
    if first is not None:
        message, code = first
        error = UserError(message)
        error.code = code
        raise error
    return [result for result, _ in results]


def on_rank_zero(group: SingleProcess, work: Callable[[], T]) -> T:
    """Do the work on rank 0 while the others wait, and return its result on all."""
    return gather_results(group, work if group.rank == 0 else None)[0]  # type: ignore[return-value]


@functools.cache
def _agreement_group(job: Any) -> Any:
    """One group for the agreements of a job, however many steppers a process makes."""
    return dist.new_group(backend="gloo", timeout=AGREEMENT_TIMEOUT)


def _allocate_buckets(model: nn.Module, device: torch.device) -> dict[torch.dtype, list[torch.Tensor]]:
    sizes: dict[torch.dtype, int] = {}
    for param in model.parameters():  # frozen ones too: training may unfreeze them later
        if param.is_floating_point():
            sizes[param.dtype] = sizes.get(param.dtype, 0) + param.numel() * param.element_size()
    return {
        dtype: [torch.zeros(min(total, BUCKET_BYTES) // dtype.itemsize, dtype=dtype, device=device) for _ in range(2)]
        for dtype, total in sizes.items()
    }


_Transfer = tuple[Any, list[torch.Tensor], list[torch.Tensor]]
"""A pending reduce, the views of the bucket it fills, and the gradients to copy them to."""


def _reduce(gradients: Sequence[torch.Tensor], buckets: list[torch.Tensor]) -> None:
    """While one bucket is being reduced the other is filled."""
    pending: list[_Transfer | None] = [None, None]
    for turn, group in enumerate(_bucket_groups(gradients, buckets[0].numel())):
        slot = turn % 2
        _finish_transfer(pending[slot])
        pending[slot] = _start_transfer(group, buckets[slot])
    for transfer in pending:
        _finish_transfer(transfer)


def _start_transfer(group: list[torch.Tensor], bucket: torch.Tensor) -> _Transfer:
    size = sum(grad.numel() for grad in group)
    if size > bucket.numel():
        return dist.all_reduce(group[0], async_op=True), [], []
    parts = list(bucket[:size].split([grad.numel() for grad in group]))
    views = [part.view(grad.shape) for part, grad in zip(parts, group, strict=True)]
    torch._foreach_copy_(views, group)
    return dist.all_reduce(bucket[:size], async_op=True), views, group


def _finish_transfer(transfer: _Transfer | None) -> None:
    if transfer is None:
        return
    work, views, gradients = transfer
    work.wait()
    if gradients:
        torch._foreach_copy_(gradients, views)


def _bucket_groups(gradients: Sequence[torch.Tensor], capacity: int) -> Iterator[list[torch.Tensor]]:
    """Consecutive gradients that fit a bucket together; a larger one comes alone."""
    group: list[torch.Tensor] = []
    for grad in (piece for gradient in gradients for piece in _pieces(gradient, capacity)):
        if group and sum(one.numel() for one in group) + grad.numel() > capacity:
            yield group
            group = []
        group.append(grad)
    if group:
        yield group


def _pieces(gradient: torch.Tensor, capacity: int) -> Iterator[torch.Tensor]:
    """The gradient itself, unless it is larger than a bucket and not contiguous, so that it cannot be reduced in place."""
    if gradient.numel() <= capacity or gradient.is_contiguous():
        yield gradient
    else:
        for part in gradient.unbind(0):
            yield from _pieces(part, capacity)


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of a step that one rank takes."""

    rows: Rows
    indices: list[int]
    """Which of the rows."""

    @property
    def work(self) -> float:
        return float(sum(1 + sum(self.rows.shapes[index]) for index in self.indices))

    def shape(self, indices: Sequence[int]) -> Shape:
        """The shape that describes these rows in one micro-batch: their longest, or their mean if they are packed."""
        return self.rows.layout.shape([self.rows.shapes[index] for index in indices])


@dataclass(frozen=True, slots=True)
class _Rank:
    """What the other ranks know of a rank."""

    device_name: str
    rows_per_s: float | None
    """As its plan measured it; None without a plan."""
    memory_model: MemoryModel | None
    budget_bytes: float
    """What its plan may use; infinite without a plan."""

    def fits(self, shape: Shape) -> bool:
        return self.memory_model is None or self.memory_model.cost_bytes(1, shape) <= self.budget_bytes


class Dealer:
    """Deals the rows of each step to the ranks, the same way on every rank.

    Global rows are dealt by work and by each rank's measured speed; a row too long for a small GPU goes to a larger one.
    Local rows stay where they are. The weights of the gradients come from what was counted, so the deal changes only the
    time a step takes, not its result.
    """

    def __init__(
        self, group: SingleProcess, device: torch.device, plan: Plan | None, budget_bytes: float, rows_are: RowsAre
    ) -> None:
        self._group, self._rows_are = group, rows_are
        name = "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
        this = _Rank(name, plan.rows_per_s if plan else None, plan.memory_model if plan else None, budget_bytes)
        self._ranks: list[_Rank] = group.gather_objects(this)
        planned = [rank.rows_per_s for rank in self._ranks if rank.rows_per_s]
        timed = plan is None or not plan.deterministic
        self.speeds = planned if timed and len(planned) == group.size else [1.0] * group.size
        differ = len({rank.device_name for rank in self._ranks}) > 1
        wanted = timed and differ and len(planned) < group.size and rows_are == "global"
        self._times: list[float] | None = [] if wanted else None
        """Seconds per unit of work of the steps timed so far; None if steps are not timed."""
        self._compared = False

    @property
    def measuring(self) -> bool:
        """Whether the next steps are to be timed."""
        return self._times is not None

    def share(self, rows: Rows, value: Any) -> Share:
        """This rank's part of the rows. `value` is what they were made from."""
        everything = list(range(len(rows)))
        dealt_already = isinstance(rows, LoadedRows)  # by the loader
        if dealt_already or self._group.size == 1 or self._rows_are == "local":
            return Share(rows, everything)
        if not self._compared:
            self._compare(rows, value)
        work = [1.0 + sum(shape) for shape in rows.shapes]
        dealt = deal_rows(work, self.speeds, self.excluded(rows.shapes))
        return Share(rows, dealt[self._group.rank])

    def record_time(self, work: float, seconds: float) -> str | None:
        """Time of a step without errors. After a few of them rows are dealt by speed; returns a sentence if that changes."""
        assert self._times is not None
        self._times.append(seconds / max(work, 1.0))
        if len(self._times) < TIMED_STEPS:
            return None
        speeds = [1 / row[0] for row in self._group.gather([statistics.median(self._times)])]
        self._times = None
        if max(speeds) <= EQUAL_SPEED * min(speeds):
            return None
        self.speeds = [speed / sum(speeds) for speed in speeds]
        shares = ", ".join(
            f"{rank.device_name} {speed:.0%}" for rank, speed in zip(self._ranks, self.speeds, strict=True)
        )
        return f"rows are now dealt by measured speed: {shares}"

    def excluded(self, shapes: list[Shape]) -> list[tuple[int, int]]:
        """(row, rank) where the row does not fit the rank's memory even alone."""
        worst = padded_shape(shapes)
        small = [number for number, rank in enumerate(self._ranks) if not rank.fits(worst)]
        return [
            (row, number) for number in small for row, shape in enumerate(shapes) if not self._ranks[number].fits(shape)
        ]

    def _compare(self, rows: Rows, value: Any) -> None:
        """Once: refuse global rows that differ between ranks."""
        self._compared = True
        answers = self._group.gather([float(len(rows)), _rows_checksum(rows, value)])
        other = next((rank for rank, answer in enumerate(answers) if answer != answers[0]), None)
        if other is not None:
            raise BadOption(
                f"rank {other} has other rows than rank 0 ({answers[other][0]:.0f} and {answers[0][0]:.0f} of them). "
                'Try: pass the rows of the whole step on every rank, or set rows_are="local" if each rank has its own.'
            )


def checksum(content: bytes) -> float:
    """A number that tells contents apart, and that `gather` can carry. Never 0."""
    return 1.0 + zlib.crc32(content)


def _rows_checksum(rows: Rows, value: Any) -> float:
    """Of the first, middle and last row."""
    some = sorted({0, len(rows) // 2, len(rows) - 1})
    listed = isinstance(rows, ListedRows)
    return checksum("".join(_text_of(value[row] if listed else rows.batch([row])) for row in some).encode())


def _text_of(value: Any, depth: int = 0) -> str:
    """The same text for equal rows in any process, which pickle and hashes do not give."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)}{value.detach().cpu().flatten()[:FINGERPRINT_VALUES].tolist()}"
    if isinstance(value, np.ndarray):
        return f"{value.shape}{value.ravel()[:FINGERPRINT_VALUES].tolist()}"
    if isinstance(value, Mapping):
        return str(sorted(f"{key!r}: {_text_of(part, depth + 1)}" for key, part in value.items()))
    if isinstance(value, (list, tuple)):
        return str([_text_of(part, depth + 1) for part in value[:FINGERPRINT_VALUES]])
    if isinstance(value, (str, bytes, int, float, bool, type(None))):
        return repr(value)
    attributes = getattr(value, "__dict__", None)
    nested = _text_of(attributes, depth + 1) if attributes and depth < FINGERPRINT_DEPTH else ""
    return type(value).__name__ + nested
