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
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from brimful.errors import LostProcess
from brimful.memory.oom import is_oom
from brimful.train.supervise import watch
from brimful.units import MiB

BUCKET_BYTES = 32 * MiB
"""Two of these are held for each dtype of the gradients; a larger gradient is reduced where it lies."""
PATIENCE = timedelta(days=1)


class Solo:
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


class Talk(Solo):
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


def join(model: nn.Module, device: torch.device) -> Solo:
    """This process's place in its job. Under a launcher that set WORLD_SIZE, torch.distributed is started if it was not."""
    return Processes(model, device) if connected(device) else Solo()


def meet(device: torch.device, backend: str = "auto") -> Solo:
    """The same before there is a model."""
    return Talk() if connected(device, backend) else Solo()


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
def _lost_processes_named(group: Solo) -> Iterator[None]:
    """A collective that breaks has lost a peer; its own message helps nobody."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        if is_oom(error):
            raise
        raise LostProcess(
            f"process {group.rank} of {group.size} lost another process of the job while they were to agree: "
            f"{(str(error).splitlines() or [''])[0][:200]}"
        ) from error
