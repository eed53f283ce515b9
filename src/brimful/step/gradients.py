"""The exact gradients of one step: split, accumulate, agree, scale, reduce; repeated as long as memory runs out.

    split the rows ─► collate, to device, forward, backward for each micro-batch ─► all ranks agree that they are done
        ▲                          │ out of memory                                            │
        └──────── recovery ◄───────┴──────────────── `finish` ◄──────────── scale, then reduce over ranks, once
                                                         │
                                                     `meanwhile`, then read losses, counts and norm from the device

After a wait for the device it is idle until there is new work. So all numbers of a step are read by one transfer, when
everything up to clipping has been launched. Several ranks read theirs before the reduce as well, to exchange the counts.

Nothing here changes a weight. Only the rank that ran out of memory repeats its micro-batches; the others wait with their
gradients. What fails after the reduce is repeated by all ranks. Backward runs on `sum / estimated count` (`CountEstimate`),
and each rank multiplies its gradients once by `estimate / total count of all ranks`. So no count is needed in advance,
gradients have the scale of the mean from the beginning, and every split gives the same gradient.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import nn

from brimful.errors import ProcessLost, TaskError
from brimful.memory.context import CountEstimate, Phase, StepContext
from brimful.memory.split import without_single_rows
from brimful.step import checks
from brimful.step.checks import ShapeCounter, SplitCheck
from brimful.step.distributed import Share, SingleProcess, checksum
from brimful.step.recovery import MicroBatch, Number, Recovery, StepState
from brimful.task import Loss, Task, compare_counts, several_terms, term_counts

SumAndCount = tuple[float, float]
Terms = Mapping[str, tuple[Number, Number]]
"""Sums and counts by name, which may still be on the device."""
TotalCounts = dict[str, float]
"""The count of each term over the step, if the task can tell before the forward."""


class Status(IntEnum):
    """What a rank tells the others after an attempt."""

    DONE = 0
    RETRY = 1
    STOP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGradients:
    """Gradients that are ready for the optimizer, and what they were made from."""

    state: StepState
    terms: dict[str, SumAndCount]
    """Sum and count of each term of the loss, over all ranks."""
    log: dict[str, SumAndCount]
    """Weighted sum and weight of each value in `Loss.log`, over all ranks."""
    rows: int
    """Rows of the step over all ranks."""
    ooms_of_all: int
    """Out-of-memory errors of all ranks in this step."""
    norm: float | None
    """What `finish` returned, read from the device."""


class Gradients:
    """Makes the gradients of a step on one rank, together with the others."""

    def __init__(
        self,
        context: StepContext,
        recovery: Recovery,
        group: SingleProcess,
        split_check: SplitCheck,
        shapes: ShapeCounter,
    ) -> None:
        self._context, self._recovery, self._group = context, recovery, group
        self._split_check, self._shapes = split_check, shapes
        self._params: list[nn.Parameter] = []
        self._versions: dict[str, int] | None = checks.param_versions(context.model)
        """Of the parameters before the first backward; None once that was checked."""

    @property
    def params(self) -> list[nn.Parameter]:
        """Parameters that have a gradient now."""
        return [param for param in self._params if param.grad is not None]

    @property
    def gradient_bytes(self) -> int:
        return sum(param.grad.nbytes for param in self._params if param.grad is not None)

    def make(
        self,
        step: int,
        share: Share,
        finish: Callable[[], Number | None],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> StepGradients:
        """All gradients of the step, scaled. `finish` is what else may run out of memory before the optimizer's step.

        `meanwhile` is called once, while the device computes, before its numbers are waited for.
        """
        state = StepState(step, share, list(share.indices))
        self._context.drop_gradients()
        self._params = [param for param in self._context.params if param.requires_grad]  # a run may unfreeze some
        self._recovery.begin_step(step)
        if self._versions is not None:  # a checkpoint may have been loaded since
            self._versions = checks.param_versions(self._context.model)
        try:
            self._split_check.examine(step, share)
            counts, counted_rows = self._total_counts(state)
            while True:
                reports = self._accumulate_on_all_ranks(state, counts)
                rows = int(sum(report[2] for report in reports))
                if counts is not None and rows < counted_rows:  # some were set aside, and the terms divided by too much
                    self._start_over(state)
                    counts, counted_rows = self._total_counts(state)
                    continue
                terms = self._total_terms(reports, counts)
                if counts is None and not self._recovery.run(state, partial(self._scale, state, terms["loss"][1])):
                    continue  # a factor on the device takes memory; several ranks have theirs on the host
                self._group.reduce([param.grad for param in self.params if param.grad is not None])
                readout = self._finish(state, terms, finish)
                if all(status == Status.DONE for status, *_ in self._exchange(state, [])):
                    break
                self._start_over(state)  # gradients hold the sum over ranks, and some rank has to start again
            meanwhile()
            numbers, log, norm = readout.read()
            self._check_count(numbers, counts)
            if counts is not None:
                compare_counts(self._context.task, {name: count for name, (_, count) in numbers.items()}, counts)
        except BaseException:
            self._recovery.drop_gradients()
            raise
        return StepGradients(
            state=state,
            terms=numbers,
            log=self._total_log(log, reports),
            rows=rows,
            ooms_of_all=int(sum(report[3] for report in reports)),
            norm=norm,
        )

    def _scale(self, state: StepState, count: Number) -> None:
        """To the mean over what all ranks counted. In place, so that nothing is allocated, as in the reduce."""
        self._context.scale_gradients(state.divisor / count)

    def _start_over(self, state: StepState) -> None:
        self._recovery.drop_gradients()
        self._recovery.restore()
        state.done = False

    def _total_counts(self, state: StepState) -> tuple[TotalCounts | None, int]:
        """The counts over all ranks, and the rows they are of. No counts if the task has a single term."""
        if type(self._context.task).counts is Task.counts:
            return None, 0
        while not state.done and state.stop is None:
            self._recovery.run(state, partial(self._count, state))
        counted_rows = int(sum(report[1] for report in self._exchange(state, [float(len(state.rows))])))
        self._start_over(state)  # a random collate must draw the same numbers again
        totals: Counter[str] = Counter()
        for counts in self._group.gather_objects(state.counts):
            totals.update(counts)
        if not any(totals.values()):
            raise self._nothing_counted()
        return {name: total or 1.0 for name, total in sorted(totals.items())}, counted_rows

    def _count(self, state: StepState) -> None:
        """What the terms of this rank's rows count, from collated batches."""
        task, counts = self._context.task, Counter[str]()
        self._context.phase = Phase.COLLATE
        state.share.rows.lay_out(self._recovery.limit.layout)
        groups = self._split(state.share, state.rows)
        for index, group in enumerate(groups):
            state.micro_batch = MicroBatch(index, len(groups), group, state.share.shape(group))
            counts.update(term_counts(task, task.counts(state.share.rows.batch(group))))
        state.counts = dict(counts)

    def _accumulate_on_all_ranks(self, state: StepState, counts: TotalCounts | None) -> list[list[Any]]:
        """Run the micro-batches until every rank has all its gradients. Returns the reports of all ranks."""
        expected: list[bool] = []
        while True:
            if not state.done:
                self._recovery.run(state, partial(self._accumulate, state, counts, expected))
            has_gradient = [param.grad is not None for param in self._params]
            reports = self._exchange(state, self._report(state, counts, has_gradient))
            if any(report[0] == Status.RETRY for report in reports):
                continue
            if len({report[1] for report in reports}) == 1:
                return reports
            expected = self._group.any_of(has_gradient)  # rows here may not reach parameters that rows elsewhere do
            self._recovery.run(state, partial(self._add_zero_gradients, expected))

    def _accumulate(self, state: StepState, counts: TotalCounts | None, expected: Sequence[bool]) -> None:
        """Forward and backward of every micro-batch of this rank."""
        started, totals = time.perf_counter(), LossTotals()
        state.micro_batch, state.largest_cost = MicroBatch(0, 0, [], ()), 0.0
        state.share.rows.lay_out(self._recovery.limit.layout)
        state.groups = self._split(state.share, state.rows)
        self._split_check.before_split(state.step, max(len(state.groups), self._group.size))
        estimate = CountEstimate(len(state.rows), len(state.groups[0]) if state.groups else 1)
        for index, group in enumerate(state.groups):
            shape = state.share.shape(group)
            self._context.phase = Phase.COLLATE
            state.micro_batch = MicroBatch(index, len(state.groups), group, shape)
            totals.add(
                self._context.run_micro_batch(
                    self._shapes.record(state.step, state.share.rows.batch(group)), counts or estimate
                )
            )
            state.largest_cost = max(state.largest_cost, self._recovery.limit.cost(len(group), shape))
            if self._versions is not None:
                checks.check_after_backward(self._context.model, self._context.optimizer, self._versions)
                self._versions = None
        self._add_zero_gradients(expected)
        if self._group.size > 1:  # the others need the numbers before the reduce
            (state.terms, state.log), state.divisor = totals.read(), float(estimate.value)
        else:
            (state.terms, state.log), state.divisor = totals.add_up(), estimate.value
        state.busy_s = time.perf_counter() - started

    def _add_zero_gradients(self, expected: Sequence[bool]) -> None:
        """Where another rank has a gradient and this one has none."""
        for param, needed in zip(self._params, expected, strict=False):
            if needed and param.grad is None:
                param.grad = torch.zeros_like(param)

    def _split(self, share: Share, indices: list[int]) -> list[list[int]]:
        """The loader's micro-batches, split further if the limit has come down; or the rows split here."""
        if share.rows.groups is None:
            return self._split_rows(share, indices)
        left = set(indices)
        groups = [kept for group in share.rows.groups if (kept := [index for index in group if index in left])]
        whole = len(groups) == 1
        return [
            micro_batch
            for group in groups
            for micro_batch in (
                [group]
                if self._recovery.limit.allows(len(group), share.shape(group), whole=whole)
                else self._split_rows(share, group, part=not whole)
            )
        ]

    def _split_rows(self, share: Share, indices: list[int], *, part: bool = False) -> list[list[int]]:
        shapes = [share.rows.shapes[index] for index in indices]
        groups = self._recovery.limit.split(shapes, part=part) if indices else []
        groups = [[indices[position] for position in group] for group in groups]
        return without_single_rows(groups) if self._recovery.least_rows > 1 else groups

    def _report(self, state: StepState, counts: TotalCounts | None, has_gradient: Sequence[bool]) -> list[Number]:
        """After the status: which gradients, rows, errors, whether there is a log, then sum and count of each term."""
        if counts is not None:
            terms = [state.terms.get(name, (0.0, 0.0)) for name in counts]
        elif len(state.terms) > 1:
            raise several_terms(state.terms)
        else:
            terms = list(state.terms.values()) or [(0.0, 0.0)]
        numbers: list[Number] = [
            checksum(bytes(has_gradient)),
            float(len(state.rows)),
            float(state.ooms),
            float(bool(state.log)),
        ]
        return numbers + [number for term in terms for number in term]

    def _exchange(self, state: StepState, numbers: Sequence[Number]) -> list[list[Any]]:
        """The status and these numbers of every rank. Raises if any rank has to stop."""
        status = Status.STOP if state.stop else Status.DONE if state.done else Status.RETRY
        reports = self._group.gather([float(status), *numbers])
        if state.stop is not None:
            raise state.stop
        stopped = next((rank for rank, report in enumerate(reports) if report[0] == Status.STOP), None)
        if stopped is not None:
            raise ProcessLost(f"rank {stopped} of {self._group.size} stopped. Try: fix what its own message names.")
        return reports

    def _total_terms(self, reports: list[list[Any]], counts: TotalCounts | None) -> Terms:
        names = ["loss"] if counts is None else list(counts)
        columns = [_total([report[5 + place] for report in reports]) for place in range(2 * len(names))]
        terms = {name: (columns[2 * place], columns[2 * place + 1]) for place, name in enumerate(names)}
        self._check_count(terms, counts)
        return terms

    def _check_count(self, terms: Terms, counts: TotalCounts | None) -> None:
        """Raises if the step counted nothing, as soon as that is known on the host."""
        count = 1.0 if counts is not None else terms["loss"][1]
        if not isinstance(count, torch.Tensor) and not count > 0:
            raise self._nothing_counted(count)

    def _total_log(self, own: dict[str, SumAndCount], reports: list[list[Any]]) -> dict[str, SumAndCount]:
        if not any(report[4] for report in reports):
            return {}
        sums: Counter[str] = Counter()
        weights: Counter[str] = Counter()
        for log in self._group.gather_objects(own):
            for name, (total, weight) in log.items():
                sums[name] += total
                weights[name] += weight
        return {name: (sums[name], weights[name]) for name in sums}

    def _finish(self, state: StepState, terms: Terms, finish: Callable[[], Number | None]) -> "Readout":
        """What else comes before the optimizer's step."""
        largest = max(state.groups, key=len, default=[])
        shape = state.share.shape(largest) if largest else ()
        state.micro_batch = MicroBatch(0, len(state.groups), largest, shape)
        readout = Readout({}, {})

        def work() -> None:
            nonlocal readout
            readout = Readout(terms, state.log, finish())

        if not self._recovery.run(state, work):
            state.finish_failures += 1
        return readout

    def _nothing_counted(self, count: float = 0.0) -> TaskError:
        return TaskError(
            f"the loss of task {self._context.task.name} counted {count:g} over the whole step, so it has no mean; no weight was "
            "changed. Try: check whether all labels of these rows are masked."
        )


class LossTotals:
    """Adds up the losses of micro-batches where they are, so that no micro-batch waits for the device."""

    def __init__(self) -> None:
        self._sums: dict[str, list[torch.Tensor]] = {}
        self._counts: dict[str, list[Number]] = {}
        self._log: dict[str, list[tuple[Number, Number]]] = {}

    def add(self, terms: Mapping[str, Loss]) -> None:
        for name, term in terms.items():
            total, count = term.sum.detach(), term.count
            if isinstance(count, torch.Tensor):
                count = count.detach()
                # A mean over nothing, times nothing, is NaN: a Hugging Face loss whose labels are all masked.
                total = torch.where((count.to(total.device) == 0) & total.isnan(), 0.0, total)
            elif count == 0:
                total = total.nan_to_num(nan=0.0)
            self._sums.setdefault(name, []).append(total)
            self._counts.setdefault(name, []).append(count)
            for key, value in term.log.items():
                self._log.setdefault(key, []).append((value, count))

    def add_up(self) -> tuple[Terms, Terms]:
        """Sum and count of each term, and weighted sum and weight of each logged value. Nothing is read."""
        terms = {name: (_sum(sums), _sum(self._counts[name])) for name, sums in self._sums.items()}
        log: dict[str, tuple[Number, Number]] = {}
        for name, entries in self._log.items():
            like = next(iter(self._sums.values()))[0]
            values, weights = (
                torch.stack([_as_tensor(one, like) for one in column]) for column in zip(*entries, strict=True)
            )
            log[name] = torch.where(weights > 0, values * weights, 0.0).sum(), weights.sum()
        return terms, log

    def read(self) -> tuple[dict[str, SumAndCount], dict[str, SumAndCount]]:
        """The same as plain numbers. Waits for the device once."""
        return Readout(*self.add_up()).read()[:2]


class Readout:
    """Numbers of a step that are read from the device by one transfer."""

    def __init__(self, terms: Terms, log: Terms, norm: Number | None = None) -> None:
        """Launches the transfer's preparation, which takes a little memory on the device."""
        self._names, self._log_names, self._has_norm = list(terms), list(log), norm is not None
        pairs = (*terms.values(), *log.values())
        self._numbers = [number for pair in pairs for number in pair] + ([] if norm is None else [norm])
        tensors = [one for one in self._numbers if isinstance(one, torch.Tensor)]
        self._tensors = torch.stack([_as_tensor(one, tensors[0]) for one in tensors]) if tensors else None

    def read(self) -> tuple[dict[str, SumAndCount], dict[str, SumAndCount], float | None]:
        """Terms, log and norm. Waits for the device, if any number is there."""
        read = iter([] if self._tensors is None else self._tensors.tolist())
        numbers = iter([next(read) if isinstance(one, torch.Tensor) else one for one in self._numbers])
        terms, log = (
            {name: (next(numbers), next(numbers)) for name in names} for names in (self._names, self._log_names)
        )
        return terms, log, next(numbers) if self._has_norm else None


def _as_tensor(number: Number, like: torch.Tensor) -> torch.Tensor:
    """On the device of `like`. A number of the host is filled in, since copying it would wait for the device."""
    if isinstance(number, torch.Tensor):
        return number.detach().to(like.device, _widest(like)).reshape(())
    return torch.full((), float(number), dtype=_widest(like), device=like.device)


def _sum(numbers: Sequence[Number]) -> Number:
    """On the device if any of them is there."""
    tensors = [one.detach().reshape(()) for one in numbers if isinstance(one, torch.Tensor)]
    on_host = float(sum(one for one in numbers if not isinstance(one, torch.Tensor)))
    if not tensors:
        return on_host
    total = torch.stack(tensors).sum(dtype=_widest(tensors[0]))
    return total + on_host if on_host else total


def _widest(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _total(numbers: Sequence[Any]) -> Any:
    """Over all ranks. A single one's is taken as it is, since it may be on the device."""
    return numbers[0] if len(numbers) == 1 else math.fsum(numbers)
