"""The training loop: there is one, and this is all of it.

    begin ──────────────────────────────────────────────────────────── Hook.before(loop)
      │   evaluate once, where there are rows for it: what training starts from
      ▼   while steps are left and nobody asks to stop
    ┌──────────────────────────────────────────────────────────────┐
    │ rows         from the loader, exactly `global_batch` of them │
    │ rate         of this step, into the optimizer                │
    │ step         forward, backward, optimizer: `step.Stepper`    │ ── Hook.after_step(loop, result)      "step"
    │ agree        who wants to stop or to save, on all processes  │
    │ evaluate     where it is due; is it the best so far?         │ ── Hook.after_evaluation(loop, found) "eval"
    │ save         where it is due, or where it is the best        │ ── Hook.after_save(loop, folder)      "checkpoint"
    └──────────────────────────────────────────────────────────────┘
      │
      ▼
    save, unless just done ──────────────────────────────────────────── Hook.after(loop, ending)             "end"

On the right, what a hook may do there, and the line in `events.jsonl`. Out-of-memory errors and the rest of the step's
own events come in between. Between two steps a run is wholly described by `state.Position`, weights and optimizer state:
that is why a resumed run gives the same bits. An error that leaves the weights whole (NaN in too many steps, a row that
does not fit) is saved before it is raised; nothing that logs, tracks or evaluates can change the training.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch.optim import Optimizer

from brimful.data.loader import Loader
from brimful.data.reader import StepRows
from brimful.errors import BadOption, BadRun, NonFiniteGradients, PartialUpdate, ProcessLost, SaveFailed, UserError
from brimful.memory.snapshot import RandomState
from brimful.step.interface import StepResult
from brimful.step.stepper import Stepper
from brimful.task import Dataset, Task
from brimful.training import state
from brimful.training.checkpoint import Best, Checkpoints
from brimful.training.evaluate import EvalResult, Evaluator
from brimful.training.events import Journal
from brimful.training.metrics import Speedometer
from brimful.training.options import Schedule
from brimful.training.state import Own, Position
from brimful.training.stop import Clock, Interrupts

Reason = Literal["finished", "interrupted", "time-limit", "window"]
REASONS: tuple[Reason, ...] = ("finished", "interrupted", "time-limit", "window")
"""Why a run ended in good order; processes agree on one by its place here."""


class Hook:
    """What a user may do at the loop's points. An error in a hook ends the run, as any error of the user's code does."""

    def before(self, loop: "Loop") -> None: ...
    def after_step(self, loop: "Loop", result: StepResult) -> None: ...
    def after_evaluation(self, loop: "Loop", found: EvalResult) -> None: ...
    def after_save(self, loop: "Loop", folder: Path) -> None: ...
    def after(self, loop: "Loop", ending: "Ending") -> None: ...


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
    """A run on its way. `session` puts the parts together."""

    task: Task
    rows: Dataset
    stepper: Stepper
    optimizer: Optimizer
    loader: Loader
    schedule: Schedule
    checkpoints: Checkpoints
    journal: Journal
    clock: Clock
    speedometer: Speedometer
    evaluator: Evaluator | None = None
    best_by: str = "loss"
    eval_every: int | None = None
    save_every: int | None = None
    """None: whenever `save_s` have passed."""
    save_s: float
    hooks: Sequence[Hook] = ()
    step: int = 0
    """Optimizer steps done."""
    best: Best | None = None
    loss: float | None = None
    _rates: list[float] | None = None
    _saved_at: int = -1
    _saved_time: float = 0.0
    _save_took_s: float = 0.0
    _position: Position | None = None

    def run(self) -> Ending:
        """Train until all steps are done or somebody asks to stop; saved in either case."""
        self._rates = self._rates or [group["lr"] for group in self.optimizer.param_groups]
        self._saved_time = time.monotonic()
        self._position = self._now()
        for hook in self.hooks:
            hook.before(self)
        if self.evaluator is not None and self.step == 0:
            self.evaluate()  # what training starts from
        reason: Reason = "finished"
        steps = iter(self.loader)
        try:
            with Interrupts() as asked:
                while self.step < self.schedule.steps and reason == "finished":
                    rows, waited_s = self._next(steps)
                    self._train_on(rows, waited_s)
                    reason, save = self._agree(asked)
                    self._evaluate_and_save(save)
                if self._saved_at != self.step:
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

    def _next(self, steps: Iterator[StepRows]) -> tuple[StepRows, float]:
        began = time.perf_counter()
        rows = next(steps)
        return rows, time.perf_counter() - began

    def _train_on(self, rows: StepRows, waited_s: float) -> None:
        assert self._rates is not None
        share = self.schedule.share(self.step + 1)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        dealt = self.stepper.speeds
        result = self.stepper.step(rows)
        self.step += 1
        self.loss = result.loss
        if self.stepper.speeds != dealt:
            self.loader.deal_by(self.stepper.speeds, self.stepper.barred)
        figures = self.speedometer.of(rows, result, waited_s, steps_left=self.schedule.steps - self.step)
        self.journal.write(
            "step",
            step=self.step,
            steps=self.schedule.steps,
            loss=result.loss,
            rows=result.rows,
            lr=self.optimizer.param_groups[0]["lr"],
            grad_norm=result.grad_norm,
            applied=result.applied,
            micro_batches=result.micro_batches,
            ooms=result.ooms_of_all,
            epoch=self.loader.passes,
            **({"terms": result.terms} if len(result.terms) > 1 else {}),
            **figures,
        )
        self._position = self._now()
        for hook in self.hooks:
            hook.after_step(self, result)

    def _agree(self, asked: Interrupts) -> tuple[Reason, bool]:
        """Why to stop, and whether to save: one process's wish is everybody's, after the same step."""
        wish: Reason = "interrupted" if asked.by else self.clock.why_stop(needs_s=self._save_took_s) or "finished"
        due = self.save_every is None and time.monotonic() - self._saved_time > self.save_s
        votes = self.stepper.group.gather([float(REASONS.index(wish)), float(due)])
        reasons = [REASONS[int(vote[0])] for vote in votes]
        reason: Reason = next((one for one in REASONS[1:] if one in reasons), "finished")
        return reason, bool(votes[0][1]) or (self.save_every is not None and self.step % self.save_every == 0)

    def _evaluate_and_save(self, save: bool) -> None:
        last = self.step == self.schedule.steps
        if self.evaluator is not None and (last or (self.eval_every and self.step % self.eval_every == 0)):
            save = self.evaluate() or save
        if save:
            self.save()

    def evaluate(self) -> bool:
        """Whether this is the best evaluation so far."""
        assert self.evaluator is not None
        try:
            found = self.evaluator.run()
        except UserError as error:  # on all processes alike; the training itself is as it was
            self.journal.write("note", step=self.step, sentence=f"the evaluation is left out: {error}")
            return False
        figures = {"loss": found.loss, "perplexity": found.perplexity, **found.metrics}
        if self.best_by not in figures or self.best_by == "perplexity":
            there = ", ".join(["loss", *found.metrics])
            raise BadOption(f"--best {self.best_by}: the evaluation has no such figure; it has {there}")
        is_best = self.step > 0 and self._is_best(
            -found.loss if self.best_by == "loss" else found.metrics[self.best_by]
        )
        self.journal.write(
            "eval", step=self.step, **figures, rows=found.rows, seconds=found.seconds, best=is_best, ooms=found.ooms
        )
        self._position = self._now()
        for hook in self.hooks:
            hook.after_evaluation(self, found)
        return is_best

    def _is_best(self, score: float) -> bool:
        """Whether nothing before was as good by the same figure; then it is the one to beat. No number beats nothing."""
        before = self.best if self.best is not None and self.best.metric == self.best_by else None
        if not math.isfinite(score) or (before is not None and score <= before.score):
            return False
        self.best = Best(step=self.step, metric=self.best_by, score=score)
        return True

    def save(self, *, last: bool = False) -> None:
        """A checkpoint of now, by the first process. One that fails leaves those before it, and only the last may not fail."""
        assert self._position is not None
        group, position, began = self.stepper.group, self._position, time.monotonic()
        position = replace(position, own=tuple(group.gather_objects(position.own[0])))
        failure = self._write(position) if group.rank == 0 else None
        failure = group.gather_objects(failure)[0]
        self._saved_time = time.monotonic()
        self._save_took_s = self._saved_time - began
        if failure is None:
            self._saved_at = self.step
            for hook in self.hooks:
                hook.after_save(self, self.checkpoints.path(self.step))
            if group.rank == 0 and self.best is not None and self.best.step == self.step:
                self.checkpoints.rotate()  # the former best may go, now that nothing leads to it any more
        elif last:
            raise SaveFailed(failure)

    def _write(self, position: Position) -> str | None:
        """The sentence of a failure."""
        began, model = time.perf_counter(), self.stepper.model
        try:
            made = self.checkpoints.save(
                position.step,
                lambda folder: state.write(
                    folder, position, task=self.task, model=model, optimizer=self.optimizer, rows=self.rows
                ),
                needs_bytes=state.needed_bytes(model, self.optimizer),
                facts={"task": self.task.name, "loss": self.loss, "samples": position.loader["samples"]},
            )
        except SaveFailed as error:
            self.journal.write("checkpoint", step=position.step, saved=False, sentence=str(error))
            return str(error)
        if self.best is not None and self.best.step == position.step:
            self.checkpoints.mark_best(self.best)
        self.journal.write(
            "checkpoint", step=position.step, saved=True, path=str(made.path), size_bytes=made.size_bytes, seconds=time.perf_counter() - began
        )  # fmt: skip
        return None

    def _rescue(self, error: Exception) -> None:
        """Save what is whole. Where processes may have failed alone, or the weights be half updated, there is nothing to do."""
        useless = isinstance(
            error, (PartialUpdate, ProcessLost, NonFiniteGradients, SaveFailed)
        )  # a run that diverged is not to push out a good one
        if useless or self.stepper.group.size > 1 or self.step in (0, self._saved_at):
            return
        try:
            self.save()
        except Exception:
            return

    def _now(self) -> Position:
        """Taken after every step: should the next one fail, this is where the run stands."""
        device = next(self.stepper.model.parameters()).device
        own = Own(random=RandomState(device).to_plain(), stepper=self.stepper.state_dict())
        return Position(
            step=self.step,
            loader=self.loader.state_dict(),
            own=(own,),
            best=self.best,
            data=str(getattr(self.rows, "fingerprint", "")),
            optimizer=type(self.optimizer).__name__,
        )

    def take_up(self, folder: Path, position: Position) -> None:
        """Go on where this checkpoint was written."""
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        if position.optimizer != type(self.optimizer).__name__:
            raise BadRun(
                f"--resume: the run was trained with {position.optimizer} so far, whose state {type(self.optimizer).__name__} cannot take "
                "up: keep its --optimizer, or begin a new run --from this one"
            )
        state.load_optimizer(folder, self.optimizer)
        self.step = self._saved_at = position.step
        self.best = position.best
        if self.best is not None and self.stepper.group.rank == 0:  # it may have been killed before it was marked
            self.checkpoints.mark_best(self.best)
        self.loader.load_state_dict(position.loader)
        group = self.stepper.group
        device = next(self.stepper.model.parameters()).device
        mine = state.take_up(position.own, group.rank, device)
        if mine is not None:
            self.stepper.load_state_dict(mine)

    @property
    def newest(self) -> Path | None:
        """The last checkpoint."""
        return self.checkpoints.path(self._saved_at) if self._saved_at >= 0 else None
