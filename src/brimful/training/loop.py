"""The training loop: there is one, and this is all of it.

    start ──────────────────────────────────────────────────────────── Hook.before(loop)
      │   evaluate once if there are rows for it: where training starts from
      ▼   while steps are left and no rank has to stop
    ┌──────────────────────────────────────────────────────────────┐
    │ rows         from the loader, exactly `global_batch` of them │
    │ agree        whether to stop or to save, on all ranks        │
    │ rate         the learning rate of this step                  │
    │ step         forward, backward, optimizer: `step.Stepper`;   │ ── Hook.after_step(loop, result)       "step"
    │              the next rows are read while the GPU computes   │
    │ evaluate     if it is due; is it the best so far?            │ ── Hook.after_evaluation(loop, result) "eval"
    │ save         if it is due, or if it is the best              │ ── Hook.after_save(loop, folder)       "checkpoint"
    └──────────────────────────────────────────────────────────────┘
      │
      ▼
    save, unless just done ─────────────────────────────────────────── Hook.after(loop, ending)               "end"

On the right, what a hook may do there, and the line in `events.jsonl`. Out-of-memory errors and the other events of a step
come in between. Between two steps a run is completely described by `state.Position`, weights and optimizer state: that is
why a resumed run gives the same bits, and why a wait for rows can be given up at any moment. An error that leaves the weights
intact (a row that does not fit, say) is followed by a save before it is raised. Nothing that logs, tracks or evaluates can
change the training.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from brimful.data.loader import Loader
from brimful.data.reader import StepRows
from brimful.errors import (
    BadOption,
    BadRun,
    NonFiniteGradients,
    PartialUpdate,
    ProcessLost,
    SaveFailed,
    StoppedWaiting,
    UserError,
)
from brimful.memory.snapshot import RandomState
from brimful.step.result import StepResult
from brimful.step.stepper import Stepper
from brimful.task import Dataset, Task
from brimful.training import state
from brimful.training.average import WeightAverage
from brimful.training.checkpoint import Best, Checkpoints
from brimful.training.evaluate import EvalResult, Evaluator
from brimful.training.events import Journal
from brimful.training.metrics import Speedometer
from brimful.training.optimizer import Schedule
from brimful.training.patience import TRAINING_LOSS, Patience
from brimful.training.state import Position, RankState
from brimful.training.stop import Interrupts, TimeLimit

Reason = Literal["finished", "interrupted", "time-limit", "patience"]
REASONS: tuple[Reason, ...] = ("finished", "interrupted", "time-limit", "patience")
"""Why a run ended in good order. Ranks exchange the index."""


class Hook:
    """Your code at points of the training loop. Override what you need; an error in a hook ends the run.

    >>> class PrintLoss(Hook):
    ...     def after_step(self, loop, result):
    ...         print(loop.step, result.loss)
    """

    def before(self, loop: "Loop") -> None:
        """Before the first step."""

    def after_step(self, loop: "Loop", result: StepResult) -> None:
        """After every optimizer step."""

    def after_evaluation(self, loop: "Loop", result: EvalResult) -> None:
        """After every evaluation."""

    def after_save(self, loop: "Loop", folder: Path) -> None:
        """After every checkpoint."""

    def after(self, loop: "Loop", ending: "Ending") -> None:
        """When training has ended in good order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended."""

    reason: Reason
    step: int
    loss: float | None
    """Of the last step."""
    checkpoint: Path | None
    best: Best | None


@dataclass(kw_only=True)
class Loop:
    """The parts of a run, which `session` puts together, and the loop over its steps."""

    task: Task
    rows: Dataset
    stepper: Stepper
    optimizer: Optimizer
    loader: Loader
    schedule: Schedule
    scheduler: LRScheduler | None = None
    """The task's own, used instead of `schedule`."""
    base: str | None = None
    """The fingerprint of the weights that checkpoints do not hold: see `Task.trained_weights`."""
    average: WeightAverage | None = None
    """Of the weights (`ema=`). `with loop.average.applied():` lets the model have it."""
    checkpoints: Checkpoints
    journal: Journal
    time_limit: TimeLimit
    speedometer: Speedometer
    evaluator: Evaluator | None = None
    best_by: str = "loss"
    eval_every: int | None = None
    patience: Patience = field(default_factory=Patience)
    save_every: int | None = None
    """None: whenever `save_s` have passed."""
    save_s: float
    hooks: Sequence[Hook] = ()
    step: int = 0
    """Optimizer steps done."""
    best: Best | None = None
    loss: float | None = None
    _rates: list[float] | None = None
    _saved_step: int = -1
    _saved_time: float = 0.0
    _save_took_s: float = 0.0
    _position: Position | None = None

    def __post_init__(self) -> None:
        self._settings = state.group_settings(self.optimizer)
        self._data = rows_fingerprint(self.rows)  # once, since a store hashes its list of files for it

    def run(self) -> Ending:
        """Train until all steps are done or a stop is requested; saved in either case."""
        self._rates = self._rates or [group["lr"] for group in self.optimizer.param_groups]
        self._saved_time = time.monotonic()
        self._position = self._current_position()
        for hook in self.hooks:
            hook.before(self)
        if self.evaluator is not None and self.step == 0:
            self.evaluate()
        reason: Reason = "finished"
        steps = iter(self.loader)
        self.speedometer.begin()
        try:
            with Interrupts(self.time_limit) as interrupts:
                while self.step < self.schedule.steps:
                    rows, waited_s = self._next(steps, interrupts)
                    started = time.perf_counter()
                    reason, due = self._agree(interrupts, stopped=rows is None)
                    agreed_s = time.perf_counter() - started
                    if rows is None or reason != "finished":
                        break
                    if due:
                        self.save()
                    self._train_on(rows, waited_s, agreed_s, interrupts)
                    self._evaluate_and_save()
                if self._saved_step != self.step:
                    self.save(last=True)
        except Exception as error:
            self._rescue(error)
            raise
        finally:
            self.loader.close()
        ending = Ending(reason=reason, step=self.step, loss=self.loss, checkpoint=self.newest, best=self.best)
        for hook in self.hooks:
            hook.after(self, ending)
        return ending

    def _next(self, steps: Iterator[StepRows], interrupts: Interrupts) -> tuple[StepRows | None, float]:
        """The rows of the next step, and the seconds waited for them; None if a stop was requested meanwhile."""
        start, rows = time.perf_counter(), None
        interrupts.save_s = self._save_took_s
        with suppress(StoppedWaiting), interrupts.waiting():
            rows = next(steps)
        return rows, time.perf_counter() - start

    def _read_ahead(self, interrupts: Interrupts) -> None:
        """Within a step. If it is interrupted or fails, the step is completed first."""
        with suppress(StoppedWaiting), interrupts.waiting():
            self.loader.read_ahead()

    def _train_on(self, rows: StepRows, waited_s: float, agreed_s: float, interrupts: Interrupts) -> None:
        self._set_rate()
        rate, speeds = self.optimizer.param_groups[0]["lr"], self.stepper.speeds
        is_last = self.step + 1 == self.schedule.steps
        result = self.stepper.step(rows, None if is_last else partial(self._read_ahead, interrupts))
        self.step += 1
        self.loss = result.loss
        if self.average is not None and result.applied:
            self.average.update()
        if self.scheduler is not None:
            self.scheduler.step()
        if self.stepper.speeds != speeds:
            self.loader.deal_by(self.stepper.speeds, self.stepper.excluded)
        steps_left = self.schedule.steps - self.step
        figures = self.speedometer.figures(rows, result, waited_s, steps_left=steps_left, agreed_s=agreed_s)
        self.journal.write(
            "step",
            step=self.step,
            steps=self.schedule.steps,
            loss=result.loss,
            rows=result.rows,
            lr=rate,
            grad_norm=result.grad_norm,
            applied=result.applied,
            micro_batches=result.micro_batches,
            ooms=result.ooms_of_all,
            epoch=self.loader.passes,
            **({"terms": result.terms} if len(result.terms) > 1 else {}),
            **({"log": result.log} if result.log else {}),
            **figures,
        )
        self._watch(result, rate)
        self._position = self._current_position()
        for hook in self.hooks:
            hook.after_step(self, result)

    def _watch(self, result: StepResult, rate: float) -> None:
        """Let the task judge the step. It warns of each kind of problem once."""
        figures = {"step": self.step, "loss": result.loss, "lr": rate, "rows": result.rows, "applied": result.applied}
        for kind, sentence in self.patience.after_step(self.task, {**figures, **result.log}).items():
            self.journal.write("note", step=self.step, level="warning", signal=kind, sentence=sentence)

    def _set_rate(self) -> None:
        if self.scheduler is not None:
            return
        assert self._rates is not None
        share = self.schedule.share(self.step + 1)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * share

    def _agree(self, interrupts: Interrupts, *, stopped: bool) -> tuple[Reason, bool]:
        """Why to stop, and whether a save is due: what one rank wants, all do before the same step."""
        wish: Reason = "finished"
        if interrupts.signal:
            wish = "interrupted"
        elif stopped or interrupts.stop_requested:
            wish = "time-limit"
        elif self.patience.is_over:
            wish = "patience"
        due = self.save_every is None and time.monotonic() - self._saved_time > self.save_s
        votes = self.stepper.group.gather([float(REASONS.index(wish)), float(due)])
        reasons = [REASONS[int(vote[0])] for vote in votes]
        reason: Reason = next((candidate for candidate in REASONS[1:] if candidate in reasons), "finished")
        return reason, bool(votes[0][1])

    def _evaluate_and_save(self) -> None:
        last = self.step == self.schedule.steps
        save = self.save_every is not None and self.step % self.save_every == 0
        if self.evaluator is not None and (last or (self.eval_every and self.step % self.eval_every == 0)):
            save = self.evaluate() or save
        elif self._window_ends:
            save = self._judge_window() or save
        if save:
            self.save()

    @property
    def _window_ends(self) -> bool:
        """Whether the training loss is judged now, in place of an evaluation."""
        windows = self.evaluator is None and self.patience.most is not None
        return windows and bool(self.eval_every) and self.step % (self.eval_every or 1) == 0

    def _judge_window(self) -> bool:
        is_best = self._is_best(-self.patience.window_loss(), TRAINING_LOSS)
        self.patience.judged(is_best)
        self._position = self._current_position()
        return is_best

    def evaluate(self) -> bool:
        """Whether this is the best evaluation so far."""
        with self.speedometer.paused():
            return self._evaluate()

    def _evaluate(self) -> bool:
        assert self.evaluator is not None
        self.stepper.free_memory()
        try:
            with nullcontext() if self.average is None else self.average.applied():
                result = self.evaluator.run()
        except UserError as error:  # the same on all ranks; weights and optimizer are unchanged
            self.journal.write("note", step=self.step, sentence=f"this evaluation was skipped: {error}")
            return False
        perplexity = {} if result.perplexity is None else {"perplexity": result.perplexity}
        figures = {"loss": result.loss, **perplexity, **result.metrics}
        if self.best_by not in figures or self.best_by == "perplexity":
            names = ", ".join(["loss", *result.metrics])
            raise BadOption(f"best={self.best_by!r} is not a score of this evaluation. Try: {names}.")
        score = -result.loss if self.best_by == "loss" else result.metrics[self.best_by]
        is_best = self.step > 0 and self._is_best(score, self.best_by)
        if self.step > 0:
            self.patience.judged(is_best)
        self.journal.write(
            "eval", step=self.step, **figures, rows=result.rows, seconds=result.seconds, best=is_best, ooms=result.ooms
        )
        self._position = self._current_position()
        for hook in self.hooks:
            hook.after_evaluation(self, result)
        return is_best

    def _is_best(self, score: float, metric: str) -> bool:
        """Whether nothing before was as good by the same figure; then it becomes the best. NaN and inf never do."""
        before = self.best if self.best is not None and self.best.metric == metric else None
        if self.patience.blocked or not math.isfinite(score) or (before is not None and score <= before.score):
            return False
        self.best = Best(step=self.step, metric=metric, score=score)
        return True

    def save(self, *, last: bool = False) -> None:
        """Write a checkpoint on rank 0. A failed save leaves earlier ones intact, and only the last one of a run raises."""
        with self.speedometer.paused():
            self._save(last=last)

    def _save(self, *, last: bool) -> None:
        assert self._position is not None
        group, position, start = self.stepper.group, self._position, time.monotonic()
        position = replace(position, ranks=tuple(group.gather_objects(position.ranks[0])))
        failure = self._write(position) if group.rank == 0 else None
        failure = group.gather_objects(failure)[0]
        self._saved_time = time.monotonic()
        self._save_took_s = self._saved_time - start
        if failure is None:
            self._saved_step = self.step
            for hook in self.hooks:
                hook.after_save(self, self.checkpoints.path(self.step))
            if group.rank == 0 and self.best is not None and self.best.step == self.step:
                self.checkpoints.rotate()  # the former best may go, now that no link points at it
        elif last:
            raise SaveFailed(failure)

    def _write(self, position: Position) -> str | None:
        """The message of a failure, if any."""
        start, model = time.perf_counter(), self.stepper.model
        try:
            checkpoint = self.checkpoints.save(
                position.step,
                lambda folder: state.write(
                    folder,
                    position,
                    task=self.task,
                    model=model,
                    optimizer=self.optimizer,
                    rows=self.rows,
                    average=self.average,
                ),
                needs_bytes=state.needed_bytes(model, self.optimizer, self.task.trained_weights(model)),
                facts={
                    "task": self.task.name,
                    "loss": self.loss,
                    "samples": position.loader["samples"],
                    **({} if self.base is None else {"base": self.base}),
                },
            )
        except SaveFailed as error:
            self.journal.write("checkpoint", step=position.step, saved=False, sentence=str(error))
            return str(error)
        if self.best is not None and self.best.step == position.step:
            self.checkpoints.mark_best(self.best)
        self.journal.write(
            "checkpoint", step=position.step, saved=True, path=str(checkpoint.path), size_bytes=checkpoint.size_bytes,
            seconds=time.perf_counter() - start,
        )  # fmt: skip
        return None

    def _rescue(self, error: Exception) -> None:
        """Save what is intact. With several ranks one may have failed alone, and weights may be half updated: then not.

        Nor after NaN gradients: a diverged run must not push out a good checkpoint.
        """
        useless = isinstance(error, (PartialUpdate, ProcessLost, NonFiniteGradients, SaveFailed))
        if useless or self.stepper.group.size > 1 or self.step in (0, self._saved_step):
            return
        try:
            self.save()
        except Exception:
            return

    def _current_position(self) -> Position:
        """Taken after every step: if the next one fails, this is where the run stands."""
        device = next(self.stepper.model.parameters()).device
        own = RankState(random=RandomState(device).to_plain(), stepper=self.stepper.state_dict())
        return Position(
            step=self.step,
            loader=self.loader.state_dict(),
            ranks=(own,),
            best=self.best,
            data=self._data,
            optimizer=type(self.optimizer).__name__,
            settings=self._settings,
            scheduler=None if self.scheduler is None else self.scheduler.state_dict(),
            patience=self.patience.state_dict(),
        )

    def resume(self, folder: Path, position: Position) -> None:
        """Continue where this checkpoint was written."""
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        if position.optimizer != type(self.optimizer).__name__:
            raise BadRun(
                f"the run was trained with {position.optimizer}, whose state {type(self.optimizer).__name__} cannot use. "
                "Try: the same optimizer= as before, or a new run."
            )
        state.load_optimizer(folder, self.optimizer, position.settings)
        if self.scheduler is not None and position.scheduler is not None:
            self.scheduler.load_state_dict(position.scheduler)
            for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
        self.step = self._saved_step = position.step
        self.best = position.best
        self.patience.load_state_dict(position.patience)
        if self.patience.is_over and self.step < self.schedule.steps:
            raise BadRun(
                f"the run has stopped by patience={self.patience.most}: {self.patience.describe(self._judged_by)} up to step "
                f"{self.step}. Try: a larger patience= to train on, or the model in RUN/best."
            )
        if self.best is not None and self.stepper.group.rank == 0:  # it may have been killed before it was marked
            self.checkpoints.mark_best(self.best)
        self.loader.load_state_dict(position.loader)
        device = next(self.stepper.model.parameters()).device
        self.stepper.load_state_dict(state.restore_rank(position.ranks, self.stepper.group.rank, device))

    @property
    def _judged_by(self) -> str:
        return TRAINING_LOSS if self.evaluator is None else self.best_by

    def patience_sentence(self) -> str:
        """Why the run has stopped, with its last good checkpoint."""
        why = self.patience.describe(self._judged_by)
        if self.patience.problems:
            why += f", and a warning that still holds ({', '.join(self.patience.problems)})"
        if self.best is None:
            return f"stopped after step {self.step}: {why}; no checkpoint was good"
        return f"stopped after step {self.step}: {why}; the last good checkpoint is {self.checkpoints.path(self.best.step)}"

    @property
    def newest(self) -> Path | None:
        """The last checkpoint."""
        return self.checkpoints.path(self._saved_step) if self._saved_step >= 0 else None


def rows_fingerprint(rows: Dataset) -> str:
    """A token store's and a `datasets.Dataset`'s own; empty for a list, whose length the loader checks."""
    return str(getattr(rows, "fingerprint", "") or getattr(rows, "_fingerprint", ""))
