"""The exact gradients of one step: split, accumulate, agree, reduce, scale; repeated as long as memory runs out.

    split the rows ─► collate, to device, forward, backward for each micro-batch ─► all ranks agree that they are done
        ▲                          │ out of memory                                            │
        └──────── recovery ◄───────┴───────────────── scale, then `finish` ◄──────── reduce over ranks, once

Nothing here changes a weight. Only the rank that ran out of memory repeats its micro-batches; the others wait with their
gradients. What fails after the reduce is repeated by all ranks. Backward runs on `sum / rows of the step`, and the gradients
are multiplied once by `rows / total count`, so no count is needed in advance and every split gives the same gradient.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import torch
from torch import nn

from brimful.errors import ProcessLost, TaskError
from brimful.memory.context import Phase, StepContext
from brimful.memory.split import without_single_rows
from brimful.step import checks
from brimful.step.checks import ShapeCounter, SplitCheck
from brimful.step.distributed import Share, SingleProcess, checksum
from brimful.step.recovery import MicroBatch, Recovery, StepState
from brimful.task import Loss, Task, term_counts

SumAndCount = tuple[float, float]
Divisors = float | dict[str, float]
"""What sums are divided by before backward: the rows of the step, or for each term its count over the step."""


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
    """What `finish` returned."""


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
        self._local_divisor: float | None = None
        self._rows_counted = 0.0
        """Rows of the step, over all ranks, that `counts` was asked about."""
        self._versions: dict[str, int] | None = checks.param_versions(context.model)
        """Of the parameters before the first backward; None once that was checked."""

    @property
    def params(self) -> list[nn.Parameter]:
        """Parameters that have a gradient now."""
        return [param for param in self._params if param.grad is not None]

    @property
    def gradient_bytes(self) -> int:
        return sum(param.grad.nbytes for param in self._params if param.grad is not None)

    def make(self, step: int, share: Share, finish: Callable[[], float | None]) -> StepGradients:
        """All gradients of the step, scaled. `finish` is what else may run out of memory before the optimizer's step."""
        state = StepState(step, share, list(share.indices))
        self._context.drop_gradients()
        self._params = [param for param in self._context.params if param.requires_grad]  # a run may unfreeze some
        self._recovery.begin_step(step)
        if self._versions is not None:  # a checkpoint may have been loaded since
            self._versions = checks.param_versions(self._context.model)
        try:
            self._split_check.examine(step, share)
            divisors = self._divisors(state, share)
            while True:
                reports = self._accumulate_on_all_ranks(state, divisors)
                if isinstance(divisors, dict) and sum(report[2] for report in reports) != self._rows_counted:
                    self._start_again(
                        state
                    )  # a row was set aside, and the sums were divided by what it counted as well
                    divisors = self._divisors(state, share)
                    continue
                terms = self._total_terms(reports, divisors)
                self._group.reduce([param.grad for param in self.params if param.grad is not None])
                norm = self._scale_and_finish(state, terms, divisors, finish)
                if all(status == Status.DONE for status, *_ in self._exchange(state, [])):
                    break
                self._start_again(state)  # gradients hold the sum over ranks
        except BaseException:
            self._context.drop_gradients()
            raise
        return StepGradients(
            state=state,
            terms=terms,
            log=self._total_log(state, reports),
            rows=int(sum(report[2] for report in reports)),
            ooms_of_all=int(sum(report[3] for report in reports)),
            norm=norm,
        )

    def _start_again(self, state: StepState) -> None:
        self._recovery.drop_gradients()
        self._recovery.restore()
        state.done = False

    def _divisors(self, state: StepState, share: Share) -> Divisors:
        task = self._context.task
        if type(task).counts is Task.counts:
            if share.step_rows is not None:
                return float(share.step_rows)
            if self._local_divisor is None:  # any number will do, as long as all ranks use the same
                self._local_divisor = sum(row[0] for row in self._group.gather([float(len(share.indices))]))
            return self._local_divisor
        own: Counter[str] = Counter()
        while not (self._recovery.run(state, partial(self._count, state, own)) or state.stop):
            pass
        state.done = False
        self._recovery.restore()  # a random collate must draw the same numbers again
        self._rows_counted = sum(report[1] for report in self._exchange(state, [float(len(state.rows))]))
        totals: Counter[str] = Counter()
        for counts in self._group.gather_objects(dict(own)):
            totals.update(counts)
        if not any(totals.values()):
            raise self._nothing_counted()
        return {name: total or 1.0 for name, total in sorted(totals.items())}

    def _count(self, state: StepState, own: Counter[str]) -> None:
        """What each term counts in the rows of this rank, into `own`. Collating may run out of memory here too."""
        own.clear()
        groups = self._split(state.share, state.rows)
        for index, group in enumerate(groups):
            self._context.phase = Phase.COLLATE
            state.micro_batch = MicroBatch(index, len(groups), group, state.share.padded_shape(group))
            own.update(term_counts(self._context.task, self._context.task.counts(state.share.rows.batch(group))))

    def _accumulate_on_all_ranks(self, state: StepState, divisors: Divisors) -> list[list[float]]:
        """Run the micro-batches until every rank has all its gradients. Returns the reports of all ranks."""
        expected: list[bool] = []
        while True:
            if not state.done:
                self._recovery.run(state, partial(self._accumulate, state, divisors, expected))
            has_gradient = [param.grad is not None for param in self._params]
            reports = self._exchange(state, self._report(state, divisors, has_gradient))
            if any(report[0] == Status.RETRY for report in reports):
                continue
            if len({report[1] for report in reports}) == 1:
                return reports
            expected = self._group.any_of(has_gradient)  # rows here may not reach parameters that rows elsewhere do
            self._recovery.run(state, partial(self._add_zero_gradients, expected))

    def _accumulate(self, state: StepState, divisors: Divisors, expected: Sequence[bool]) -> None:
        """Forward and backward of every micro-batch of this rank."""
        started, totals = time.perf_counter(), LossTotals()
        state.micro_batch, state.largest_cost = MicroBatch(0, 0, [], ()), 0.0
        state.groups = self._split(state.share, state.rows)
        self._split_check.before_split(state.step, max(len(state.groups), self._group.size))
        for index, group in enumerate(state.groups):
            shape = state.share.padded_shape(group)
            self._context.phase = Phase.COLLATE
            state.micro_batch = MicroBatch(index, len(state.groups), group, shape)
            totals.add(
                self._context.run_micro_batch(self._shapes.record(state.step, state.share.rows.batch(group)), divisors)
            )
            state.largest_cost = max(state.largest_cost, self._recovery.limit.cost(len(group), shape))
            if self._versions is not None:
                checks.check_after_backward(self._context.model, self._context.optimizer, self._versions)
                self._versions = None
        self._add_zero_gradients(expected)
        state.terms, state.log = totals.read()
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
                if self._recovery.limit.allows(len(group), share.padded_shape(group), whole=whole)
                else self._split_rows(share, group, part=not whole)
            )
        ]

    def _split_rows(self, share: Share, indices: list[int], *, part: bool = False) -> list[list[int]]:
        shapes = [share.rows.shapes[index] for index in indices]
        groups = self._recovery.limit.split(shapes, part=part) if indices else []
        groups = [[indices[position] for position in group] for group in groups]
        return without_single_rows(groups) if self._recovery.least_rows > 1 else groups

    def _report(self, state: StepState, divisors: Divisors, has_gradient: Sequence[bool]) -> list[float]:
        """After the status: which gradients, rows, errors, whether there is a log, then sum and count of each term."""
        if isinstance(divisors, dict):
            terms = [state.terms.get(name, (0.0, 0.0)) for name in divisors]
        elif len(state.terms) > 1:
            raise TaskError(
                f"the loss has several terms ({', '.join(state.terms)}), whose counts must be known before the forward. "
                "Try: define counts(batch)."
            )
        else:
            terms = list(state.terms.values()) or [(0.0, 0.0)]
        numbers = [checksum(bytes(has_gradient)), float(len(state.rows)), float(state.ooms), float(bool(state.log))]
        return numbers + [number for term in terms for number in term]

    def _exchange(self, state: StepState, numbers: list[float]) -> list[list[float]]:
        """The status and these numbers of every rank. Raises if any rank has to stop."""
        status = Status.STOP if state.stop else Status.DONE if state.done else Status.RETRY
        reports = self._group.gather([float(status), *numbers])
        if state.stop is not None:
            raise state.stop
        stopped = next((rank for rank, report in enumerate(reports) if report[0] == Status.STOP), None)
        if stopped is not None:
            raise ProcessLost(f"rank {stopped} of {self._group.size} stopped. Try: fix what its own message names.")
        return reports

    def _total_terms(self, reports: list[list[float]], divisors: Divisors) -> dict[str, SumAndCount]:
        names = list(divisors) if isinstance(divisors, dict) else ["loss"]
        columns = [math.fsum(report[5 + place] for report in reports) for place in range(2 * len(names))]
        terms = {name: (columns[2 * place], columns[2 * place + 1]) for place, name in enumerate(names)}
        if not isinstance(divisors, dict) and not terms["loss"][1] > 0:
            raise self._nothing_counted(terms["loss"][1])
        return terms

    def _total_log(self, state: StepState, reports: list[list[float]]) -> dict[str, SumAndCount]:
        if not any(report[4] for report in reports):
            return {}
        sums: Counter[str] = Counter()
        weights: Counter[str] = Counter()
        for log in self._group.gather_objects(state.log):
            for name, (total, weight) in log.items():
                sums[name] += total
                weights[name] += weight
        return {name: (sums[name], weights[name]) for name in sums}

    def _scale_and_finish(
        self,
        state: StepState,
        terms: dict[str, SumAndCount],
        divisors: Divisors,
        finish: Callable[[], float | None],
    ) -> float | None:
        """Turn the gradients into those of the mean, then do what else comes before the optimizer's step."""
        largest = max(state.groups, key=len, default=[])
        shape = state.share.padded_shape(largest) if largest else ()
        state.micro_batch = MicroBatch(0, len(state.groups), largest, shape)
        norm: float | None = None

        def work() -> None:
            nonlocal norm
            self._context.phase = Phase.SCALE
            self._context.scale_gradients(1.0 if isinstance(divisors, dict) else divisors / terms["loss"][1])
            norm = finish()

        if not self._recovery.run(state, work):
            state.finish_failures += 1
        return norm

    def _nothing_counted(self, count: float = 0.0) -> TaskError:
        return TaskError(
            f"the loss of task {self._context.task.name} counted {count:g} over the whole step, so it has no mean; no weight was "
            "changed. Try: check whether all labels of these rows are masked."
        )


class LossTotals:
    """Adds up the losses of micro-batches on the device.

    A number read after every micro-batch would leave the device idle, so all are read at once at the end.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[torch.Tensor]] = {}
        self._counts: dict[str, list[torch.Tensor | float]] = {}
        self._log: dict[str, list[tuple[torch.Tensor | float, torch.Tensor | float]]] = {}

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

    def read(self) -> tuple[dict[str, SumAndCount], dict[str, SumAndCount]]:
        """Sum and count of each term, and weighted sum and weight of each logged value. Waits for the device once."""
        if not self._sums:
            return {}, {}
        first = next(iter(self._sums.values()))[0]
        widest = torch.float32 if first.device.type == "mps" else torch.float64
        numbers = [torch.stack([one.reshape(()) for one in sums]).sum(dtype=widest) for sums in self._sums.values()]
        on_host = [
            float(sum(one for one in counts if not isinstance(one, torch.Tensor))) for counts in self._counts.values()
        ]
        for counts in self._counts.values():
            tensors = [one.detach().reshape(()) for one in counts if isinstance(one, torch.Tensor)]
            numbers.append(torch.stack(tensors).to(numbers[0]).sum() if tensors else torch.zeros_like(numbers[0]))
        for entries in self._log.values():
            values, weights = (
                torch.stack([torch.as_tensor(one).detach().to(numbers[0]).reshape(()) for one in column])
                for column in zip(*entries, strict=True)
            )
            numbers += [torch.where(weights > 0, values * weights, 0.0).sum(), weights.sum()]
        read = torch.stack(numbers).tolist()
        size = len(self._sums)
        terms = {
            name: (total, count + host)
            for name, total, count, host in zip(self._sums, read[:size], read[size : 2 * size], on_host, strict=True)
        }
        logged = iter(read[2 * size :])
        return terms, {name: (next(logged), next(logged)) for name in self._log}
