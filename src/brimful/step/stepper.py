"""One optimizer step over exactly the rows it is given, whatever memory does.

    rows ─► deal to processes ─► cut ─► micro-batch: to device, forward, backward ─┐ again for each
                                  ▲            │ out of memory                     │
                                  │            ▼                                   ▼
                                  └── drop gradients, put back              agree: is everybody through?
                                  │   random state and buffers,                    │ yes
                                  │   cut finer                                    ▼
                                  │                                    sum gradients over processes, once
                                  │            out of memory                       │
                                  └─────────────────────────────────  scale, clip, prove the optimizer's bytes
                                                                                   │
                                                                            agree once more
                                                                                   │ everybody
                                                                                   ▼
                                                                            optimizer.step(), once

Backward runs on `sum / rows`, and the gradients are multiplied once by `rows / total count` when all are in: any cut, on
any number of processes, gives the gradient of the plain large batch. A step that has begun to change weights is never
retried. When nothing happens all of this costs a few milliseconds a step: `bench/RESULTS.md`.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from brimful.errors import BadOption, NonFiniteGradients, PartialUpdate, TaskError, in_one_line
from brimful.memory.context import Phase, StepContext
from brimful.memory.ledger import active_peak_bytes, reset_active_peak
from brimful.memory.meter import has_peak_statistics
from brimful.planning.levers import checkpointing, cudnn_attention
from brimful.planning.plan import Plan
from brimful.planning.target import autocast_dtype
from brimful.step import checks, optimizer_memory
from brimful.step.checks import Cuttable, Shapes
from brimful.step.distributed import Dealer, Share, SingleProcess, join
from brimful.step.gradients import Gradients, Ready
from brimful.step.interface import Event, Events, StepOptions, StepResult
from brimful.step.optimizer_memory import rehearse
from brimful.step.recovery import Aftermath, Ceiling
from brimful.step.rows import as_rows
from brimful.task import Loss, Task

# What a user hands to a stepper, a task or just a loss, as a task.


class LossTask(Task):
    """A loss, and a collate if there is one, where a task is expected."""

    def __init__(self, loss: Callable[[Any, Any], Loss], options: StepOptions) -> None:
        self.name = getattr(loss, "__name__", type(loss).__name__)
        self._loss, self._collate = loss, options.collate

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return self._loss(model, batch)

    def collate(self, rows: Sequence[Any]) -> Any:
        return super().collate(rows) if self._collate is None else self._collate(rows)


def as_task(given: Any, options: StepOptions) -> tuple[Task, bool]:
    """A task, and whether a list handed to a step is always rows."""
    if isinstance(given, type) and issubclass(given, Task):
        given = given()
    if isinstance(given, Task):
        return given, True
    if isinstance(given, nn.Module):
        raise TaskError(
            f"a {type(given).__name__} is a criterion, not a loss of Brimful's: write loss(model, batch) that calls the model and "
            "returns brimful.Loss(sum=…, count=…)"
        )
    if not callable(given):
        raise TaskError(f"Stepper takes a brimful.Task or a loss(model, batch), not a {type(given).__name__}")
    owner = getattr(given, "__self__", None)
    if isinstance(owner, Task) and given.__func__ is type(owner).loss and options.collate is None:
        return owner, True  # task.loss: the task it belongs to knows how to collate, and how long rows are
    return LossTask(given, options), options.collate is not None


NEEDS_KEPT = 7
"""So many other sets of parameters stay known by what the optimizer needs for them."""
FP16_SKIPS = 20
"""Steps in a row that fp16 may skip while its scale comes down from 65536."""


class Stepper:
    """Steps a model exactly as asked, and carries on when memory runs out.

        stepper = Stepper(model, optimizer, task, plan)      # or a loss: Stepper(model, optimizer, loss)
        for rows in loader:                                  # a whole step's rows: a list, or a batch of tensors
            result = stepper.step(rows)

    A loss is `loss(model, batch) -> Loss(sum, count)`. With a task, rows are cut by their lengths, with a loss by their
    number; with a plan by predicted bytes, without one the whole batch is tried and the rest learnt. Under `torchrun` or
    `accelerate launch` the same lines train on all processes. Further keywords are those of `StepOptions`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        task_or_loss: Task | Callable[[Any, Any], Any],
        plan: Plan | None = None,
        **options: Any,
    ) -> None:
        self.options = _options(options)
        self.plan = checks.check_plan(plan)
        task, self._is_rows = as_task(task_or_loss, self.options)
        model, wrapper = checks.unwrap(model)
        checks.check_model(model)
        optimizer = checks.check_optimizer(model, optimizer)
        device = next(param for param in model.parameters() if param.requires_grad).device
        precision = self.options.precision or (plan.levers.precision if plan else task.precision)
        own = cudnn_attention("auto", device, task.worst_shape)
        cudnn, why = (plan.levers.cudnn_attention, "as planned") if plan else own
        self._rig = StepContext(
            task=task,
            model=model,
            optimizer=optimizer,
            device=device,
            autocast=autocast_dtype(precision, device),
            cudnn_attention=cudnn == "on",
            scaler=self.options.scaler,
        )
        self._events = Events(self.options.on_event)
        self._ceiling = _ceiling(plan, self.options)
        self._group = join(model, device)
        self._dealer = Dealer(self._group, device, plan, self._ceiling.budget, self.options.rows_are)
        known = plan is not None and plan.task == task.name
        cuttable = Cuttable(self._rig, self._events, known=known, allow_inexact=self.options.allow_inexact)
        asked = plan is not None and any(one.name == "cudnn_attention" and one.requested for one in plan.choices)
        self._shapes = Shapes(self._rig, self._events, asked=asked)
        self._gradients = Gradients(
            self._rig, self._ceiling, self._group, cuttable, self._shapes, self._events, self.options
        )
        self._needs: dict[tuple[int, ...], optimizer_memory.Need] = {}
        self._nonfinite = self._states = 0
        self._aftermath = Aftermath(self._rig, self._ceiling, self._gradients.room, self._events)
        self.steps = 0
        """Steps begun, skipped ones included."""
        self._ooms_before = 0
        self._tell(wrapper)
        if cudnn == "off":
            self._note(f"cuDNN's attention is off: {why}")
        self._pull_levers(task)

    @property
    def model(self) -> nn.Module:
        """The model without wrappers."""
        return self._rig.model

    @property
    def group(self) -> SingleProcess:
        """The processes of the job, which step together."""
        return self._group

    @property
    def ooms(self) -> int:
        """Out-of-memory errors that this process met, those before a checkpoint included."""
        return self._ooms_before + self._gradients.ooms

    @property
    def events(self) -> list[Event]:
        """The last thousand events."""
        return list(self._events.kept)

    def step(self, rows: Any) -> StepResult:
        """One optimizer step over these rows."""
        started = self._start()
        share, ready = self._make(rows, self._clip_and_reserve)
        assert ready.norm is not None
        applied = self._apply(ready.norm)
        self._rig.drop_gradients()
        return self._conclude(share, ready, started, applied)

    def backward(self, rows: Any) -> StepResult:
        """Everything but the optimizer: leaves the exact gradients of these rows, over all processes, on the parameters.

        For loops that clip and step themselves. The bytes the optimizer will need are proven to be there.
        """
        started = self._start()
        share, ready = self._make(rows, self._reserve)
        return self._conclude(share, ready, started, applied=False)

    def rehearse(self) -> bool:
        """Run the plan's largest micro-batch once and forget it, so that the allocator has its final size; see `rehearsal`.

        False where it ran out of memory: the first step is cut finer then. Without a plan there is nothing to rehearse.
        """
        if self.plan is None:
            return True
        return rehearse(self._rig, self.plan, self._ceiling, self._gradients.room, self._events)

    @property
    def speeds(self) -> tuple[float, ...]:
        """How rows are dealt to the processes, for a `Loader` to deal them so."""
        return tuple(self._dealer.speeds)

    def barred(self, lengths: Any) -> list[tuple[int, int]]:
        """Of rows with these lengths, (row, process) where the row alone does not fit the process's memory."""
        return self._dealer.barred([tuple(row) for row in lengths.tolist()])

    def state_dict(self) -> dict[str, Any]:
        """What the next steps depend on besides model and optimizer: belongs into a checkpoint."""
        return {
            "steps": self.steps,
            "ooms": self.ooms,
            "nonfinite": self._nonfinite,
            "ceiling": self._ceiling.to_json(),
            "speeds": list(self._dealer.speeds),
            "many_shapes": self._shapes.many,
            "scaler": None if self._rig.scaler is None else self._rig.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self._nonfinite = state["steps"], state["nonfinite"]
        self._ooms_before = state["ooms"] - self._gradients.ooms
        self._ceiling.load(state["ceiling"])
        if state.get("many_shapes"):
            self._shapes.switch_off()
        if len(state["speeds"]) == self._group.size:
            self._dealer.speeds = list(state["speeds"])
        if self._rig.scaler is not None and state["scaler"] is not None:
            self._rig.scaler.load_state_dict(state["scaler"])

    def _start(self) -> float:
        self.steps += 1
        self._rig.drop_gradients()
        states = len(self._rig.optimizer.state)
        if self.steps > 1:
            self._gradients.room.settle(anew=states != self._states)
        self._states = states
        self._aftermath.begin()
        if has_peak_statistics(self._rig.device):
            torch.accelerator.reset_peak_memory_stats(self._rig.device)
        else:
            reset_active_peak()
        return time.perf_counter()

    def _make(self, given: Any, finish: Callable[[], float | None]) -> tuple[Share, Ready]:
        rows = as_rows(given, self._rig.task, self.plan.shape if self.plan else (), is_rows=self._is_rows)
        share = self._dealer.share(rows, given)
        return share, self._gradients.make(self.steps, share, finish)

    def _clip_and_reserve(self) -> float:
        self._rig.phase = Phase.CLIP
        if self._rig.scaler:
            self._rig.scaler.unscale_(self._rig.optimizer)
        graded = self._gradients.graded
        norm = get_total_norm([param.grad for param in graded if param.grad is not None])
        if self.options.clip_norm is not None:
            clip_grads_with_norm_(graded, self.options.clip_norm, norm)
        self._reserve()
        return float(norm)

    def _reserve(self) -> None:
        """Prove that the bytes of the optimizer's step are there."""
        self._rig.phase = Phase.RESERVE
        graded, optimizer = self._gradients.graded, self._rig.optimizer
        which = tuple(map(id, graded))  # which parameters a step reaches may change from step to step
        if which not in self._needs:
            self._needs = {
                which: optimizer_memory.predict(optimizer, graded),
                **dict(list(self._needs.items())[:NEEDS_KEPT]),
            }
            if not self._needs[which].predicted:
                self._note(
                    f"the code of {type(optimizer).__name__} could not be traced, so the bytes of its step are a rule of thumb"
                )
        need = self._needs[which]
        optimizer_memory.reserve(
            need.first if optimizer_memory.is_first_step(optimizer, graded) else need.later, self._rig.device
        )

    def _apply(self, norm: float) -> bool:
        """The optimizer's step, once; or none, where the gradients are not numbers."""
        if not math.isfinite(norm):
            self._skip(norm)
            return False
        try:
            self._rig.apply()
        except Exception as error:
            raise self._half_update(error) from error
        self._nonfinite = 0
        return True

    def _skip(self, norm: float) -> None:
        self._nonfinite += 1
        scaler, most = self._rig.scaler, self.options.skip_nonfinite
        lowered = ""
        if scaler is not None:
            most, scale = max(most, FP16_SKIPS), scaler.get_scale()
            scaler.update()  # it has seen the gradients when they were unscaled
            lowered = f"; the loss scale goes from {scale:g} to {scaler.get_scale():g}"
        graded = ((name, param.grad) for name, param in self.model.named_parameters() if param.grad is not None)
        where = next((name for name, grad in graded if not grad.isfinite().all()), None)
        found = f"the gradients' norm is {norm}" + (f", first in {where!r}" if where else "")
        self._events.add(
            "skip",
            self.steps,
            f"{found}: the step is skipped, {self._nonfinite} in a row of at most {most}{lowered}",
            norm=str(norm),
            parameter=where,
            in_a_row=self._nonfinite,
            most=most,
        )
        if self._nonfinite > most:
            self._rig.drop_gradients()
            raise NonFiniteGradients(
                f"{found} in step {self.steps}, number {self._nonfinite} in a row that was skipped for it: lower the learning "
                f"rate (--lr), clip the gradients (--clip-norm) or look at these rows{self._last_checkpoint()}"
            )

    def _half_update(self, error: Exception) -> PartialUpdate:
        back = f"go back to your last checkpoint{self._last_checkpoint()}"
        return PartialUpdate(
            f"the optimizer's own step failed in step {self.steps}, so the weights may be half updated: {back} ({in_one_line(error)})"
        )

    def _last_checkpoint(self) -> str:
        """The end of a sentence; empty where nobody knows."""
        try:
            last = self.options.checkpoint() if self.options.checkpoint else None
        except Exception:
            last = None
        return f"; the last checkpoint is {last}" if last else ""

    def _conclude(self, share: Share, ready: Ready, started: float, applied: bool) -> StepResult:
        counts_peaks = has_peak_statistics(self._rig.device)
        peak = torch.accelerator.max_memory_allocated(self._rig.device) if counts_peaks else active_peak_bytes()
        self._share_statistics()
        if self._dealer.measuring and not ready.ooms_of_all:
            self._time(share, ready)
        if self.plan is not None and self.steps == 1 and ready.rows != self.plan.global_batch:
            self._note(f"the step has {ready.rows} rows, the plan was made for {self.plan.global_batch}")
        self._aftermath.of(self.steps, ready, peak if counts_peaks else None, self._gradients.held_bytes)
        means = {name: total / count if count else math.nan for name, (total, count) in ready.terms.items()}
        return StepResult(
            step=self.steps,
            loss=math.fsum(mean for mean in means.values() if mean == mean or len(means) == 1),
            terms=means,
            rows=ready.rows,
            count=next(iter(ready.terms.values()))[1],
            applied=applied,
            grad_norm=ready.norm,
            micro_batches=len(ready.cut),
            largest_micro_batch=max((rows for rows, _ in ready.cut), default=0),
            ooms=ready.ooms,
            ooms_of_all=ready.ooms_of_all,
            set_aside=ready.set_aside,
            seconds=time.perf_counter() - started,
            peak_bytes=peak,
        )

    def _time(self, share: Share, ready: Ready) -> None:
        if change := self._dealer.timed(share.work, ready.busy_s):
            self._events.add("deal", self.steps, change, speeds=self._dealer.speeds)

    def _share_statistics(self) -> None:
        """BatchNorm's running statistics follow the first process, as under DDP."""
        if self._group.size > 1:
            norms = [part for part in self.model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
            self._group.spread([buffer for part in norms for buffer in part.buffers()])

    def _tell(self, wrapper: str | None) -> None:
        """What was found at the start and is not quite as it was given."""
        if wrapper:
            self._note(
                f"the {wrapper} wrapper is taken off: gradients are summed once a step, after everybody is through"
            )
        if missing := checks.not_stepped(self.model, self._rig.optimizer):
            self._note(
                f"the optimizer does not step {missing}, which the loss may train: freeze what is not meant to learn"
            )
        if self._gradients.least_rows > (self.options.micro_batch or self._gradients.least_rows):
            self._note("micro_batch=1 becomes 2: BatchNorm cannot average over a single row")
        if not self.model.training:
            self._note(
                "the model is in evaluation mode: call model.train() if it is to train with dropout and BatchNorm"
            )

    def _pull_levers(self, task: Task) -> None:
        if self.plan is None or self.plan.levers.checkpointing == "off":
            return
        lever = checkpointing(task, self.model)
        if lever.switch is not None:
            lever.switch(True)
            self._note(f"gradient checkpointing is on, as planned ({lever.how})")

    def _note(self, sentence: str) -> None:
        self._events.add("note", getattr(self, "steps", 0), sentence)


def _options(given: dict[str, Any]) -> StepOptions:
    known = StepOptions.__dataclass_fields__
    if unknown := sorted(set(given) - set(known)):
        raise BadOption(f"Stepper has no option {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    return StepOptions(**given)


def _ceiling(plan: Plan | None, options: StepOptions) -> Ceiling:
    """Where the cut starts: at the plan's fastest size, or at the whole step."""
    if plan is None:
        return Ceiling(model=None, limit=math.inf, most=options.micro_batch, grow_after=options.grow_after)
    fixed = [size for size in (options.micro_batch, plan.choice("micro_batch").requested) if size is not None]
    ceiling = Ceiling(
        model=plan.memory_model,
        limit=math.inf,
        most=min(fixed, default=None),
        fill=plan.fill,
        grow_after=options.grow_after,
        overhead=plan.overhead,
    )
    ceiling.budget = float(plan.budget_bytes)
    ceiling.limit = plan.micro_limit
    return ceiling
