"""The mean loss over a fixed set of rows, and whatever else a task says of itself, without a trace left in the training.

The rows are chosen once by the seed and stay the same. Sums and counts are added up over *all* of them, over batches and
processes, in float64, and divided once: a mean of means would weigh a short batch as much as a long one. Batches fit
their own memory model (`memory.forward`); random state, modes and gradients are as before when it is over, so a run with
evaluations and one without end with the same bits.

    rows ─► the chosen ones ─► this process's share ─► windows of 4,096 ─► batches of alike rows ─► sum, count ─► agree
                            └► `generate_rows` of them ──► task.evaluate(model, rows, context) ─► figures by name

A process that fails tells the others before it raises, so that all of them stop with the same sentence.
"""

import logging
import math
import random
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from brimful.data.reader import seed_all
from brimful.errors import BadOption, ProcessLost, TaskError, UserError
from brimful.memory.context import forward_context, to_device
from brimful.memory.forward import Forward, Work, eval_mode
from brimful.planning.probe import blame
from brimful.step.distributed import SingleProcess
from brimful.step.gradients import Tally
from brimful.task import Dataset, Loss, Shape, Task, loss_terms

T = TypeVar("T")
Tell = Callable[[str], object]

WINDOW_ROWS = 4096
"""So many rows are read, sorted and cut together; more would hardly save padding and would cost host memory."""
LARGEST_EXPONENT = 709.0
"""Beyond it, exp() of a float is infinite."""

log = logging.getLogger("brimful")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """What one evaluation found."""

    loss: float
    """The sum of the terms' means over all rows: what training minimises."""
    perplexity: float | None
    """e to the loss; None where the loss has several terms."""
    terms: dict[str, float]
    """The mean of each term."""
    rows: int
    count: float
    """What the means run over, tokens say; of several terms, all their counts together."""
    metrics: dict[str, float]
    """What the task measured besides: higher is better."""
    generate_rows: int
    """Of the rows, so many served for those, which cost more than a loss: texts are generated for them, say."""
    seconds: float
    batches: int
    """Of the loss, over all processes."""
    ooms: int
    """Out-of-memory errors that were survived, over all processes."""
    peak_bytes: int | None
    """Measured on the device of the process that took most; None where it does not tell."""
    forward: dict[str, Any] = field(default_factory=dict)
    """By kind of work, how this process cut it and why."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Chosen(Sequence[Any]):
    """Some rows of a data set, in the data set's order; read when asked for."""

    def __init__(self, dataset: Dataset, places: Sequence[int]) -> None:
        self.dataset, self.places = dataset, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Chosen(self.dataset, self.places[index])
        return self.dataset[self.places[index]]

    def read(self) -> list[Any]:
        """All of them, at once where the data set can do that."""
        many = getattr(self.dataset, "__getitems__", None)
        return list(many(list(self.places)) if many else map(self.dataset.__getitem__, self.places))


class Context:
    """What `Task.evaluate` gets besides model and rows: the device, the others, and batches that fit.

    `forward` makes gradient-free work of a task's own safe; `shared` deals rows to the processes and brings the results
    together; `kept` lasts from one evaluation to the next.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, autocast: torch.dtype | None, limit_bytes: int | None, fill: float,
        seed: int, group: SingleProcess, tell: Tell, progress: Tell,
    ) -> None:  # fmt: skip
        self.device, self.autocast, self.seed, self.group = device, autocast, seed, group
        self.tell, self.progress = tell, progress
        self.kept: dict[Hashable, Any] = {}
        self.forwards: list[Forward] = []
        self._model, self._limit_bytes, self._fill = model, limit_bytes, fill

    def forward_context(self) -> AbstractContextManager[Any]:
        """What a forward runs in: training's precision."""
        return forward_context(self.device, self.autocast)

    def forward(self, work: Work, *, what: str, **options: Any) -> Forward:
        """Work of one kind, within this evaluation's memory; make it once and keep it."""
        made = Forward(
            work, self._model, self.device, what=what, limit_bytes=self._limit_bytes, fill=self._fill,
            processes=self.group.size, tell=self.tell, **options,
        )  # fmt: skip
        self.forwards.append(made)
        return made

    def shared(self, count: int, run: Callable[[Sequence[int]], Sequence[T]]) -> list[T]:
        """`run` gets this process's places below `count`, returns a result for each; everybody gets all, in order."""
        mine = range(self.group.rank, count, self.group.size)
        parts = agreed(self.group, lambda: list(run(mine)))
        found: dict[int, T] = {}
        for rank, part in enumerate(parts):
            found.update(zip(range(rank, count, self.group.size), part, strict=True))
        return [found[place] for place in range(count)]


def agreed(group: SingleProcess, run: Callable[[], T]) -> list[T]:
    """Everybody's result in order of rank. Where one process fails with a sentence, all raise it."""
    result, failure = None, None
    try:
        result = run()
    except UserError as error:
        if group.size == 1:
            raise
        failure = error
    everybody = group.gather_objects((None if failure is None else str(failure), result))
    if failure is not None:
        raise failure
    for rank, (sentence, _) in enumerate(everybody):
        if sentence is not None:
            raise ProcessLost(f"process {rank} of {group.size} could not evaluate its rows: {sentence}")
    return [part for _, part in everybody]


class Evaluator:
    """Evaluates one model on the same rows as often as asked.

        found = Evaluator(task, model, rows, device=device, max_rows=1000).run()

    `limit_bytes` bounds all that the process holds on the device, `fill` is the share of it to use. `tell` hears of
    out-of-memory errors and the like, `progress` of every piece of work.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        rows: Dataset,
        *,
        device: torch.device,
        autocast: torch.dtype | None = None,
        limit_bytes: int | None = None,
        fill: float = 0.85,
        max_rows: int | None = None,
        generate_rows: int | None = None,
        seed: int = 0,
        group: SingleProcess | None = None,
        tell: Tell = log.warning,
        progress: Tell = log.debug,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("generate_rows", generate_rows)):
            if value is not None and value < (name == "max_rows"):
                raise BadOption(f"{name} {value}: give a whole number of at least {int(name == 'max_rows')}")
        if not len(rows):
            raise TaskError("there are no rows to evaluate on")
        self.task, self.model, self.device = task, model, device
        self.rows = Chosen(rows, choose(len(rows), max_rows, seed))
        self.context = Context(
            model, device, autocast, limit_bytes, fill, seed, group or SingleProcess(), tell, progress
        )
        some = choose(len(self.rows), generate_rows, seed)
        self._generate_rows = Chosen(rows, [self.rows.places[place] for place in some])
        self._forward = self.context.forward(self._dummy_loss, what="evaluation")

    def run(self, *, loss: bool = True) -> EvalResult:
        """Once over all chosen rows. Without `loss`, only the task's own figures."""
        started, before = time.perf_counter(), self._counters()
        with eval_mode(self.model, self.device):
            seed_all(self.context.seed, 0)
            terms = self._loss() if loss else {}
            metrics = self._metrics()
        batches, ooms = (sum(parts) for parts in zip(*self._since(before), strict=True))
        means = {name: total / count for name, (total, count) in terms.items()}
        mean = sum(means.values()) if loss else math.nan
        return EvalResult(
            loss=mean,
            perplexity=math.exp(mean) if len(means) == 1 and mean < LARGEST_EXPONENT else None,
            terms=means,
            rows=len(self.rows),
            count=sum(count for _, count in terms.values()),
            metrics=metrics,
            generate_rows=len(self._generate_rows),
            seconds=time.perf_counter() - started,
            batches=int(batches),
            ooms=int(ooms),
            peak_bytes=self._peak(),
            forward={one.what: one.facts() for one in self.context.forwards if one.batches},
        )

    def _loss(self) -> dict[str, tuple[float, float]]:
        """Sum and count of each term, over all processes."""
        group, totals = self.context.group, dict[str, tuple[float, float]]()
        for part in agreed(group, lambda: self._share(self.rows[group.rank :: group.size])):
            for name, (total, count) in part.items():
                before = totals.get(name, (0.0, 0.0))
                totals[name] = before[0] + total, before[1] + count
        if not totals or not all(count for _, count in totals.values()):
            raise TaskError(
                f"task {self.task.name}: its loss counted nothing on {len(self.rows):,} rows; Loss.count must be above 0"
            )
        return totals

    def _share(self, mine: Chosen) -> dict[str, tuple[float, float]]:
        tally = Tally()
        for start in range(0, len(mine), WINDOW_ROWS):
            for terms in self._window(mine[start : start + WINDOW_ROWS]):
                tally.add(terms)
        return tally.read()

    def _window(self, some: Chosen) -> Iterator[dict[str, Loss]]:
        rows, done = some.read(), 0
        with blame(self.task, "shape"):
            shapes = [tuple(self.task.shape(row)) for row in rows]
        called = lambda place: f"row {some.places[place]:,}"  # noqa: E731
        for group, terms in self._forward.over(shapes, lambda group: self._batch(rows, group), name=called):
            done += len(group)
            self.context.progress(f"loss of {done:,} of {len(rows):,} rows")
            yield terms

    def _batch(self, rows: list[Any], group: list[int]) -> dict[str, Loss]:
        with blame(self.task, "collate"):
            batch = self.task.collate([rows[row] for row in group])
        return self._terms(batch)

    def _dummy_loss(self, rows: int, shape: Shape) -> None:
        self.context.progress(f"probe {rows} × {'+'.join(map(str, shape))}")
        with blame(self.task, "dummy"):
            batch = self.task.dummy(rows, shape)
        self._terms(batch)

    def _terms(self, batch: Any) -> dict[str, Loss]:
        with blame(self.task, "loss"), self.context.forward_context():
            batch = to_device(batch, self.device)
            value = self.task.loss(self.model, batch)
            return loss_terms(self.task, value, model=self.model, batch=batch, needs_grad=False)

    def _metrics(self) -> dict[str, float]:
        if not len(self._generate_rows) or type(self.task).evaluate is Task.evaluate:
            return {}
        with blame(self.task, "evaluate"):
            found = self.task.evaluate(self.model, self._generate_rows, self.context)
        return {str(name): float(value) for name, value in found.items()}

    def _counters(self) -> tuple[int, int]:
        return self._forward.batches, sum(one.ooms for one in self.context.forwards)

    def _since(self, before: tuple[int, int]) -> list[list[float]]:
        now = self._counters()
        return self.context.group.gather([float(new - old) for new, old in zip(now, before, strict=True)])

    def _peak(self) -> int | None:
        mine = max((one.peak_bytes for one in self.context.forwards if one.peak_bytes is not None), default=-1)
        most = max(part[0] for part in self.context.group.gather([float(mine)]))
        return int(most) if most >= 0 else None


def choose(rows: int, most: int | None, seed: int) -> Sequence[int]:
    """All rows, or `most` of them at random; ascending, and the same for the same seed."""
    return range(rows) if most is None or most >= rows else sorted(random.Random(seed).sample(range(rows), most))
