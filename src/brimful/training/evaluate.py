"""The mean loss over a fixed set of rows, and the task's own scores, without a trace left in the training.

The rows are chosen once by the seed and stay the same. Sums and counts are added up over *all* of them, over batches and
ranks, in float64, and divided once: a mean of means would weight a short batch as much as a long one. Batches fit their own
memory model (`memory.forward`). Random state, modes and gradients are restored, so a run with evaluations and one without
end with the same bits.

    rows ─► the chosen ones ─► this rank's share ─► windows of 4,096 ─► batches of similar rows ─► sum, count ─► gather
                            └► `generate_rows` of them ──► task.evaluate(model, rows, context) ─► scores by name

A rank that fails tells the others before it raises, so that all of them stop with the same message.
"""

import logging
import math
import random
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from brimful.data.reader import seed_all
from brimful.errors import BadOption, TaskError, UserError
from brimful.memory.context import forward_context, to_device
from brimful.memory.forward import Forward, Work, eval_mode
from brimful.memory.oom import OutOfMemory, attempt
from brimful.planning.probe import task_errors, with_dummy
from brimful.step.distributed import SingleProcess, gather_results
from brimful.step.gradients import LossTotals
from brimful.task import Dataset, Loss, Shape, Task, loss_terms

T = TypeVar("T")
Listener = Callable[[str], object]

WINDOW_ROWS = 4096
"""Rows that are read, sorted and split together. More would hardly save padding, and cost host memory."""
LARGEST_EXPONENT = 709.0
"""Beyond it, exp() of a float overflows."""

log = logging.getLogger("brimful")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """The result of one evaluation."""

    loss: float
    """The sum of the terms' means over all rows: what training minimizes."""
    perplexity: float | None
    """e to the loss; None for a loss of several terms, or one that does not count tokens: the parts of rows with a length."""
    terms: dict[str, float]
    """The mean of each term."""
    rows: int
    count: float
    """What the means run over, such as tokens; for several terms, the sum of their counts."""
    metrics: dict[str, float]
    """The task's own scores: higher is better."""
    generate_rows: int
    """How many of the rows those used, which cost more than a loss because texts are generated for them, say."""
    seconds: float
    batches: int
    """Of the loss, on all ranks."""
    ooms: int
    """Out-of-memory errors that were survived, on all ranks."""
    peak_bytes: int | None
    """Measured on the device of the rank with the highest peak; None if the device does not count."""
    forward: dict[str, Any] = field(default_factory=dict)
    """For each kind of work, how this rank split it and why."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Evaluator:
    """Evaluates one model on the same rows, as often as needed.

        result = Evaluator(task, model, rows, device=device, max_rows=1000).run()

    `limit_bytes` bounds everything the process holds on the device; `fill` is the share of it to use. `note` is called with
    remarks such as out-of-memory errors, `progress` with a phrase for every piece of work.
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
        note: Listener = log.warning,
        progress: Listener = log.debug,
    ) -> None:
        for name, value, least in (("max_rows", max_rows, 1), ("generate_rows", generate_rows, 0)):
            if value is not None and value < least:
                raise BadOption(f"{name}={value} must be a whole number of at least {least}.")
        if not len(rows):
            raise TaskError("there are no rows to evaluate on. Try: other data.")
        self.task, self.model, self.device = with_dummy(task, rows), model, device
        self.rows = SelectedRows(rows, choose(len(rows), max_rows, seed))
        self.context = EvalContext(
            model, device, autocast, limit_bytes, fill, seed, group or SingleProcess(), note, progress
        )
        some = choose(len(self.rows), generate_rows, seed)
        self._generate_rows = SelectedRows(rows, [self.rows.indices[index] for index in some])
        self._forward = self.context.forward(self._probe, what="evaluation")

    def run(self, *, loss: bool = True) -> EvalResult:
        """Once over all chosen rows. Without `loss`, only the task's own scores."""
        start, before = time.perf_counter(), self._counters()
        with eval_mode(self.model, self.device):
            seed_all(self.context.seed, 0)
            terms = self._loss() if loss else {}
            metrics = self._metrics()
        batches, ooms = (sum(parts) for parts in zip(*self._since(before), strict=True))
        means = {name: total / count for name, (total, count) in terms.items()}
        mean = sum(means.values()) if loss else math.nan
        return EvalResult(
            loss=mean,
            perplexity=math.exp(mean) if self._counts_tokens(terms) and mean < LARGEST_EXPONENT else None,
            terms=means,
            rows=len(self.rows),
            count=sum(count for _, count in terms.values()),
            metrics=metrics,
            generate_rows=len(self._generate_rows),
            seconds=time.perf_counter() - start,
            batches=int(batches),
            ooms=int(ooms),
            peak_bytes=self._peak(),
            forward={forward.what: forward.to_json() for forward in self.context.forwards if forward.batches},
        )

    def _counts_tokens(self, terms: dict[str, tuple[float, float]]) -> bool:
        counted = [count for _, count in terms.values()]
        return len(counted) == 1 and counted[0] > len(self.rows) and bool(self.task.worst_shape)

    def _loss(self) -> dict[str, tuple[float, float]]:
        """Sum and count of each term, over all ranks."""
        group, totals, logged = self.context.group, dict[str, tuple[float, float]](), dict[str, tuple[float, float]]()
        for part in gather_results(group, lambda: self._own_loss(self.rows[group.rank :: group.size])):
            for sums, own in zip((totals, logged), part or (), strict=False):
                for name, (total, count) in own.items():
                    before = sums.get(name, (0.0, 0.0))
                    sums[name] = before[0] + total, before[1] + count
        self.context.logged = {name: total / count for name, (total, count) in logged.items() if count}
        if not totals or not all(count for _, count in totals.values()):
            raise TaskError(
                f"task {self.task.name}: its loss counted nothing on {len(self.rows):,} rows. Try: a Loss.count above 0."
            )
        return totals

    def _own_loss(self, rows: "SelectedRows") -> tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]]]:
        """Sum and count of each term, and of each logged value."""
        totals = LossTotals()
        for start in range(0, len(rows), WINDOW_ROWS):
            for terms in self._window(rows[start : start + WINDOW_ROWS]):
                totals.add(terms)
        return totals.read()

    def _window(self, selected: "SelectedRows") -> Iterator[dict[str, Loss]]:
        rows, done = selected.read(), 0
        with task_errors(self.task, "shape"):
            shapes = [tuple(self.task.shape(row)) for row in rows]

        def name(index: int) -> str:
            return f"row {selected.indices[index]:,}"

        for group, terms in self._forward.run_batches(shapes, lambda group: self._batch(rows, group), name=name):
            done += len(group)
            self.context.progress(f"loss of {done:,} of {len(rows):,} rows")
            yield terms

    def _batch(self, rows: list[Any], group: list[int]) -> dict[str, Loss]:
        with task_errors(self.task, "collate"):
            batch = self.task.collate([rows[row] for row in group])
        return self._terms(batch)

    def _probe(self, rows: int, shape: Shape) -> None:
        self.context.progress(f"probe {rows} × {'+'.join(map(str, shape))}")
        with task_errors(self.task, "dummy"):
            batch = self.task.dummy(rows, shape)
        self._terms(batch)

    def _terms(self, batch: Any) -> dict[str, Loss]:
        with task_errors(self.task, "loss"), self.context.forward_context():
            batch = to_device(batch, self.device)
            value = self.task.loss(self.model, batch)
            return loss_terms(self.task, value, model=self.model, batch=batch, needs_grad=False)

    def _metrics(self) -> dict[str, float]:
        if not len(self._generate_rows) or type(self.task).evaluate is Task.evaluate:
            return {}
        return self.context.together(self._scores)

    def _scores(self) -> dict[str, float]:
        """Nothing of the training has failed if this does, so an out-of-memory error is a mistake like any other."""
        with task_errors(self.task, "evaluate"):
            scores = attempt(
                lambda: self.task.evaluate(self.model, self._generate_rows, self.context), self.context.device
            )
        if isinstance(scores, OutOfMemory):
            raise TaskError(
                f"task {self.task.name}: evaluate() ran out of memory ({scores.message.splitlines()[0][:200].rstrip('. ')}). "
                "Try: fewer generate_rows=, or context.forward(), which runs in batches that fit."
            )
        return {str(name): float(value) for name, value in scores.items()}

    def _counters(self) -> tuple[int, int]:
        return self._forward.batches, sum(forward.ooms for forward in self.context.forwards)

    def _since(self, before: tuple[int, int]) -> list[list[float]]:
        now = self._counters()
        return self.context.group.gather([float(new - old) for new, old in zip(now, before, strict=True)])

    def _peak(self) -> int | None:
        peaks = [forward.peak_bytes for forward in self.context.forwards if forward.peak_bytes is not None]
        own = max(peaks, default=-1)
        most = max(part[0] for part in self.context.group.gather([float(own)]))
        return int(most) if most >= 0 else None


class EvalContext:
    """What `Task.evaluate` gets besides model and rows: the device, the other ranks, and batches that fit.

    `forward` runs gradient-free work of a task's own in batches that fit; `share` deals rows to the ranks and gathers the
    results; `cache` lasts from one evaluation to the next.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, autocast: torch.dtype | None, limit_bytes: int | None, fill: float,
        seed: int, group: SingleProcess, note: Listener, progress: Listener,
    ) -> None:  # fmt: skip
        self.device, self.autocast, self.seed, self.group = device, autocast, seed, group
        self.note, self.progress = note, progress
        self.cache: dict[Hashable, Any] = {}
        self.logged: dict[str, float] = {}
        """The mean of each value in `Loss.log` over all rows of this evaluation; empty if no loss was computed."""
        self.forwards: list[Forward] = []
        self._failed_together = False
        self._model, self._limit_bytes, self._fill = model, limit_bytes, fill

    def forward_context(self) -> AbstractContextManager[Any]:
        """What a forward runs in: training's precision."""
        return forward_context(self.device, self.autocast)

    def forward(self, work: Work, *, what: str, **options: Any) -> Forward:
        """Work of one kind, within this evaluation's memory. Make it once and keep it in `cache`."""
        forward = Forward(
            work, self._model, self.device, what=what, limit_bytes=self._limit_bytes, fill=self._fill,
            processes=self.group.size, note=self.note, **options,
        )  # fmt: skip
        self.forwards.append(forward)
        return forward

    def share(self, count: int, run: Callable[[Sequence[int]], Sequence[T]]) -> list[T]:
        """`run` gets this rank's indices below `count` and returns a result for each; every rank gets all, in order."""
        own = range(self.group.rank, count, self.group.size)
        results: dict[int, T] = {}
        try:
            parts = gather_results(self.group, lambda: list(run(own)))
        except UserError:
            self._failed_together = True
            raise
        for rank, part in enumerate(parts):
            results.update(zip(range(rank, count, self.group.size), part or (), strict=True))
        return [results[index] for index in range(count)]

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns on this rank. If it fails on one rank, it fails on all: those that wait for it in `share` too."""
        self._failed_together = False
        result: T | None = None
        failure: UserError | None = None
        try:
            result = work()
        except UserError as error:
            if self._failed_together:  # all ranks know
                raise
            failure = error
        gather_results(self.group, lambda: _raise(failure))
        return cast(T, result)


class TrainingContext(EvalContext):
    """What `Task.before_training` gets."""

    def __init__(self, *args: Any, folder: Path, resumed: bool) -> None:
        super().__init__(*args)
        self._settings = args[1:]
        self.folder, self.resumed = folder, resumed

    def of_model(self, model: nn.Module) -> "TrainingContext":
        """The same for another model."""
        return TrainingContext(model, *self._settings, folder=self.folder, resumed=self.resumed)


class SelectedRows(Sequence[Any]):
    """Some rows of a dataset, in its order; read when they are needed."""

    def __init__(self, dataset: Dataset, indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return SelectedRows(self.dataset, self.indices[index])
        return self.dataset[self.indices[index]]

    def read(self) -> list[Any]:
        """All of them, at once if the dataset can do that."""
        many = getattr(self.dataset, "__getitems__", None)
        return list(many(list(self.indices)) if many else map(self.dataset.__getitem__, self.indices))


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def choose(rows: int, most: int | None, seed: int) -> Sequence[int]:
    """All rows, or `most` of them at random; ascending, and the same for the same seed."""
    return range(rows) if most is None or most >= rows else sorted(random.Random(seed).sample(range(rows), most))
