"""The gradients of one step: cut, accumulated, agreed on, summed and scaled, and redone for as long as memory runs out.

Nothing here changes a weight. Whatever a failed try touched is put back before the next: gradients, random state,
buffers, the scaler. With several processes only the one that failed repeats its micro-batches; the others wait with
theirs. What fails after the sum over processes is repeated by all.
"""

import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from brimful.errors import ProcessLost, TaskError
from brimful.memory.context import Phase, StepContext
from brimful.memory.meter import Room
from brimful.memory.oom import OutOfMemory, attempt
from brimful.memory.snapshot import Buffers, RandomState
from brimful.memory.split import paired
from brimful.step import checks
from brimful.step.checks import Cuttable, Shapes
from brimful.step.distributed import Share, SingleProcess, fingerprint
from brimful.step.interface import Events, StepOptions
from brimful.step.recovery import Ceiling, Failures, Pass, Place
from brimful.task import Loss, Shape, Task, term_counts

# What the micro-batches of a step added up to, kept on the device until the step is through.
#
# Reading a number on the host makes it wait for the device; done after every micro-batch, that would leave a card idle.


class Tally:
    """Sums and counts of each term."""

    def __init__(self) -> None:
        self._sums: dict[str, list[torch.Tensor]] = {}
        self._counts: dict[str, list[torch.Tensor | float]] = {}

    def add(self, terms: Mapping[str, Loss]) -> None:
        for name, term in terms.items():
            total, count = term.sum.detach(), term.count
            if isinstance(count, torch.Tensor):
                count = count.detach()
                # A mean over nothing, times nothing, is NaN: the Hugging Face way to a sum, where all labels are masked.
                total = torch.where((count.to(total.device) == 0) & total.isnan(), 0.0, total)
            elif count == 0:
                total = total.nan_to_num(nan=0.0)
            self._sums.setdefault(name, []).append(total)
            self._counts.setdefault(name, []).append(count)

    def read(self) -> dict[str, tuple[float, float]]:
        """Sum and count of each term; waits for the device once."""
        on_device = [
            torch.stack([one.reshape(()) for one in sums]).sum(dtype=_widest(sums[0])) for sums in self._sums.values()
        ]
        host = [
            float(sum(one for one in counts if not isinstance(one, torch.Tensor))) for counts in self._counts.values()
        ]
        for counts in self._counts.values():
            tensors = [one.detach().reshape(()) for one in counts if isinstance(one, torch.Tensor)]
            on_device.append(torch.stack(tensors).to(on_device[0]).sum() if tensors else torch.zeros_like(on_device[0]))
        values = torch.stack(on_device).tolist() if on_device else []
        half = len(values) // 2
        return {
            name: (total, count + on_host)
            for name, total, count, on_host in zip(self._sums, values[:half], values[half:], host, strict=True)
        }


def _widest(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


OK, REDO, STOP = 0.0, 1.0, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Gradients that wait for the optimizer, and what they were made from."""

    terms: dict[str, tuple[float, float]]
    """Sum and count of each term, over all processes."""
    rows: int
    """Rows of the step over all processes."""
    cut: list[tuple[int, Shape]]
    """Rows and padded lengths of this process's micro-batches."""
    ooms: int
    """Out-of-memory errors of this process in this step."""
    ooms_of_all: int
    """Those of all processes."""
    busy_s: float
    """What this process's micro-batches took, without waiting for the others."""
    norm: float | None
    set_aside: tuple[int, ...]


class Gradients:
    """Makes the gradients of a step on one process, together with the others."""

    def __init__(
        self, rig: StepContext, ceiling: Ceiling, group: SingleProcess, cuttable: Cuttable, shapes: Shapes, events: Events, options: StepOptions
    ) -> None:  # fmt: skip
        self.rig, self.ceiling, self.group, self._cuttable, self._shapes = rig, ceiling, group, cuttable, shapes
        self.room = Room(rig.device)
        self._params: list[nn.Parameter] = []
        self._failures = Failures(rig, ceiling, self.room, events, options, group.rank)
        self._buffers = Buffers(rig.model)
        self._random: RandomState | None = None
        self._rows_over: float | None = None
        self._versions: dict[str, int] | None = checks.versions_of(rig.model)

    @property
    def graded(self) -> list[nn.Parameter]:
        return [param for param in self._params if param.grad is not None]

    @property
    def least_rows(self) -> int:
        """Rows of the smallest micro-batch that this model can take."""
        return self._failures.least

    @property
    def ooms(self) -> int:
        return self._failures.ooms

    @property
    def held_bytes(self) -> int:
        """What the gradients take that are there now."""
        return sum(param.grad.nbytes for param in self._params if param.grad is not None)

    def make(self, step: int, share: Share, finish: Callable[[], float | None]) -> Ready:
        """All gradients of the step, scaled; `finish` is what else may run out of memory before the optimizer's step."""
        current = Pass(step, share, list(share.indices))
        self._begin()
        try:
            self._cuttable.look(step, share)
            over = self._divisors(share)
            while True:
                votes = self._until_everybody_is_through(current, over)
                terms, rows = self._added_up(votes, over)
                self.group.reduce([param.grad for param in self.graded if param.grad is not None])
                norm = self._finish(current, terms, over, finish)
                if self._everybody_well(current):
                    break
                self._start_over(current)
        except BaseException:
            self.rig.drop_gradients()
            raise
        return Ready(
            terms=terms,
            rows=rows,
            cut=[(len(group), _padded(share, group)) for group in current.groups],
            ooms=current.ooms,
            ooms_of_all=int(sum(vote[3] for vote in votes)),
            busy_s=current.busy_s,
            norm=norm,
            set_aside=tuple(current.set_aside),
        )

    def _begin(self) -> None:
        self.rig.drop_gradients()
        self._params = [param for param in self.rig.params if param.requires_grad]  # a run may thaw some
        self._random = RandomState(self.rig.device)
        self._buffers.refresh()
        if self._versions is not None:  # a checkpoint may have been loaded since
            self._versions = checks.versions_of(self.rig.model)

    def _divisors(self, share: Share) -> float | dict[str, float]:
        """What sums are divided by before backward: the step's rows, or each term's own total where it can be known."""
        task = self.rig.task
        if type(task).counts is Task.counts:
            if share.step_rows is not None:
                return float(share.step_rows)
            if self._rows_over is None:  # any number will do, as long as all processes use the same
                self._rows_over = sum(row[0] for row in self.group.gather([float(len(share.indices))]))
            return self._rows_over
        mine: Counter[str] = Counter()
        for group in self._cut(share, share.indices):
            mine.update(term_counts(task, task.counts(share.rows.batch(group))))
        self._put_back()  # a collate that draws random numbers draws the same ones again
        totals: Counter[str] = Counter()
        for one in self.group.gather_objects(dict(mine)):
            totals.update(one)
        if not any(totals.values()):
            raise self._counted_nothing()
        return {name: total or 1.0 for name, total in sorted(totals.items())}

    def _until_everybody_is_through(self, current: Pass, over: float | dict[str, float]) -> list[list[float]]:
        """Micro-batches here and agreement with the others, until all have all their gradients. Returns what they said."""
        expected: list[bool] = []
        while True:
            if not current.through:
                self._try(current, functools.partial(self._accumulate, current, over, expected))
            flags = [param.grad is not None for param in self._params]
            votes = self._vote(current, over, flags)
            if any(vote[0] == REDO for vote in votes):
                continue
            if len({vote[1] for vote in votes}) == 1:
                return votes
            expected = self.group.union(flags)  # rows here may miss parameters that rows there need
            self._try(current, functools.partial(self._complete, expected))

    def _accumulate(self, current: Pass, over: float | dict[str, float], expected: Sequence[bool]) -> None:
        started, current.place, current.went_through = time.perf_counter(), Place(0, 0, [], ()), 0.0
        current.groups, tally = self._cut(current.share, current.left), Tally()
        self._cuttable.check(current.step, max(len(current.groups), self.group.size))
        for index, group in enumerate(current.groups):
            shape = _padded(current.share, group)
            self.rig.phase = Phase.COLLATE
            current.place = Place(index, len(current.groups), group, shape)
            tally.add(self.rig.micro(self._shapes.noted(current.step, current.share.rows.batch(group)), over))
            current.went_through = max(current.went_through, self.ceiling.measure(len(group), shape))
            if self._versions is not None:
                checks.check_after_backward(self.rig.model, self.rig.optimizer, self._versions)
                self._versions = None
        self._complete(expected)
        current.sums = tally.read()
        current.busy_s = time.perf_counter() - started

    def _complete(self, expected: Sequence[bool]) -> None:
        """A zero gradient where another process has one and this one has none."""
        for param, needed in zip(self._params, expected, strict=False):
            if needed and param.grad is None:
                param.grad = torch.zeros_like(param)

    def _cut(self, share: Share, indices: list[int]) -> list[list[int]]:
        proposed = share.rows.groups
        if proposed is None:
            return self._cut_anew(share, indices)
        left = set(indices)
        parts = [kept for group in proposed if (kept := [index for index in group if index in left])]
        whole = len(parts) == 1
        return [
            group
            for part in parts
            for group in (
                [part]
                if self.ceiling.allows(len(part), _padded(share, part), whole=whole)
                else self._cut_anew(share, part, part=not whole)
            )
        ]

    def _cut_anew(self, share: Share, indices: list[int], *, part: bool = False) -> list[list[int]]:
        groups = self.ceiling.cut([share.rows.shapes[index] for index in indices], part=part) if indices else []
        groups = [[indices[position] for position in group] for group in groups]
        return paired(groups) if self._failures.least > 1 else groups

    def _vote(self, current: Pass, over: float | dict[str, float], flags: Sequence[bool]) -> list[list[float]]:
        """Everybody's word: through or not, which gradients, rows, failures, then sum and count of each term."""
        code = STOP if current.stop else OK if current.through else REDO
        sums = [current.sums.get(name, (0.0, 0.0)) for name in over] if isinstance(over, dict) else _only(current.sums)
        mine = [
            code,
            fingerprint(flags),
            float(len(current.left)),
            float(current.ooms),
            *(x for pair in sums for x in pair),
        ]
        votes = self.group.gather(mine)
        self._stop_if_anybody_does(current, votes)
        return votes

    def _stop_if_anybody_does(self, current: Pass, votes: list[list[float]]) -> None:
        stopped = next((rank for rank, vote in enumerate(votes) if vote[0] == STOP), None)
        if current.stop is not None:
            raise current.stop
        if stopped is not None:
            raise ProcessLost(f"process {stopped} of {self.group.size} stopped; its own sentence says why")

    def _added_up(
        self, votes: list[list[float]], over: float | dict[str, float]
    ) -> tuple[dict[str, tuple[float, float]], int]:
        names = list(over) if isinstance(over, dict) else ["loss"]
        columns = [math.fsum(vote[4 + place] for vote in votes) for place in range(2 * len(names))]
        terms = {name: (columns[2 * place], columns[2 * place + 1]) for place, name in enumerate(names)}
        if not isinstance(over, dict) and not terms["loss"][1] > 0:
            raise self._counted_nothing(terms["loss"][1])
        return terms, int(sum(vote[2] for vote in votes))

    def _finish(
        self,
        current: Pass,
        terms: dict[str, tuple[float, float]],
        over: float | dict[str, float],
        finish: Callable[[], float | None],
    ) -> float | None:
        """Gradients to the mean over what was counted, then whatever else comes before the optimizer's step."""
        largest = max(current.groups, key=len, default=[])
        current.place = Place(0, len(current.groups), largest, _padded(current.share, largest) if largest else ())
        norm: list[float | None] = []

        def work() -> None:
            self.rig.phase = Phase.SCALE
            self.rig.scale_gradients(1.0 if isinstance(over, dict) else over / terms["loss"][1])
            norm.append(finish())

        if not self._try(current, work):
            current.finish_failures += 1
        return norm[0] if norm else None

    def _everybody_well(self, current: Pass) -> bool:
        """Asked by all, whether or not they got through themselves."""
        return not any(vote[0] == REDO for vote in self._agree(current))

    def _agree(self, current: Pass) -> list[list[float]]:
        votes = self.group.gather([STOP if current.stop else OK if current.through else REDO])
        self._stop_if_anybody_does(current, votes)
        return votes

    def _start_over(self, current: Pass) -> None:
        """Somebody failed after the gradients were summed, so nobody's own are left."""
        self._drop()
        self._put_back()
        current.through = False

    def _try(self, current: Pass, work: Callable[[], None]) -> bool:
        """Run it; where memory runs out put everything back, learn from it, and say that it has to be done again."""
        outcome = attempt(work, self.rig.device, clean=self._drop, thorough=current.ooms > 0)
        current.through = not isinstance(outcome, OutOfMemory)
        if isinstance(outcome, OutOfMemory):
            self._put_back()
            self._failures.learn(current, outcome.message)
        return current.through

    def _drop(self) -> None:
        self.rig.drop_gradients()
        if self.rig.scaler is not None:  # what unscale_() noted of gradients that are gone
            self.rig.scaler._per_optimizer_states.clear()

    def _put_back(self) -> None:
        assert self._random is not None
        self._random.restore()
        self._buffers.restore()

    def _counted_nothing(self, count: float = 0.0) -> TaskError:
        return TaskError(
            f"task {self.rig.task.name}: its loss counted {count:g} over the whole step, so there is no mean to train on; nothing was "
            "changed (are all labels of these rows masked?)"
        )


def _padded(share: Share, group: Sequence[int]) -> Shape:
    return tuple(max(lengths) for lengths in zip(*(share.rows.shapes[index] for index in group), strict=True))


def _only(sums: dict[str, tuple[float, float]]) -> list[tuple[float, float]]:
    if len(sums) > 1:
        raise TaskError(
            f"the loss has several terms ({', '.join(sums)}); their counts must be known before the first forward: define counts(batch)"
        )
    return list(sums.values()) or [(0.0, 0.0)]
