"""One optimizer step over exactly the rows it is given, whatever memory does.

    rows ─► deal to ranks ─► split ─► micro-batch: to device, forward, backward ─┐ for each
                               ▲            │ out of memory                      │
                               │            ▼                                    ▼
                               └── drop gradients, restore                all ranks agree: done?
                               │   random state and buffers,                     │ yes
                               │   lower the limit                               ▼
                               │                                 scale, then reduce over ranks, once
                               │            out of memory                        │
                               └───────────────────────────────────── clip, reserve the optimizer's bytes
                                                                                 │
                                                                          all ranks agree again
                                                                                 │ yes
                                                                                 ▼
                                                                         optimizer.step(), once

Any split, on any number of ranks, gives the gradient of the plain large batch (`gradients.py`). Out-of-memory errors are
handled in `recovery.py`. A step that has begun to change weights is never retried. Without an error all of this costs a few
milliseconds per step (`bench/RESULTS.md`).
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from brimful.errors import BadOption, NonFiniteGradients, PartialUpdate, TaskError, UserError, in_one_line, kind_of
from brimful.memory.context import Phase, StepContext
from brimful.memory.graphs import Graphs, signature
from brimful.memory.ledger import active_peak_bytes, reset_active_peak
from brimful.memory.meter import has_peak_statistics, memory_peaks
from brimful.memory.snapshot import RandomState
from brimful.planning.levers import DTYPES, EVERY, checkpointing, compiling, cudnn_attention
from brimful.planning.plan import Plan
from brimful.planning.plan_options import Checkpointed, Weights
from brimful.planning.target import autocast_dtype
from brimful.step import checks
from brimful.step.checks import ShapeCounter, SplitCheck
from brimful.step.distributed import Dealer, RowsAre, Share, SingleProcess, join
from brimful.step.gradients import Gradients, StepGradients
from brimful.step.optimizer_memory import OptimizerMemory
from brimful.step.recovery import GROW_AFTER, MicroBatchLimit, Number, Recovery
from brimful.step.result import Event, Events, StepResult
from brimful.step.rows import as_rows
from brimful.task import Precision, Task
from brimful.units import is_whole

FP16_SKIPS = 20
"""Consecutive steps that fp16 may skip while its loss scale comes down from 65536."""


SKIPPED_ON_DEVICE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers that heed `found_inf` if they are fused. Not their subclasses, which may compute something of their own."""


class Stepper:
    """Makes optimizer steps over exactly the rows it is given, and carries on when memory runs out.

    >>> import torch, brimful
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def loss(model, batch):
    ...     return brimful.Loss(sum=model(batch).square().sum(), count=len(batch))
    >>> stepper = brimful.Stepper(model, optimizer, loss, micro_batch=4)
    >>> result = stepper.step(torch.randn(10, 4))     # all rows of the step: a batch of tensors, or a list of rows
    >>> result.rows, result.micro_batches
    (10, 3)

    The result is that of the plain loop over the whole batch. With a plan, rows are split by predicted bytes; without one
    the whole batch is tried and the rest is learnt from errors. With a task, rows are split by their lengths; with a loss,
    by their number. Under `torchrun` or `accelerate launch` the same lines train on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        task_or_loss: Task | type[Task] | Callable[[Any, Any], Any],
        plan: Plan | None = None,
        *,
        micro_batch: int | None = None,
        clip_norm: float | None = None,
        precision: Precision | None = None,
        scaler: torch.amp.GradScaler | None = None,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        rows_are: RowsAre = "global",
        skip_oversized: bool = False,
        allow_inexact: bool = False,
        skip_nonfinite: int = 5,
        grow_after: int = GROW_AFTER,
        last_checkpoint: Callable[[], str | None] | None = None,
        on_event: Callable[[Event], object] | None = None,
    ) -> None:
        """
        Args:
            model: The model, on its device. DDP and DataParallel wrappers are removed.
            optimizer: Any torch optimizer that steps after backward.
            task_or_loss: A `Task`, or `loss(model, batch)` that returns one of the forms `Task.loss` may return.
            plan: From `brimful.plan`.
            micro_batch: The most rows in a micro-batch. Default: the plan's value, else no limit.
            clip_norm: Clip the gradients to this total norm. Default: no clipping.
            precision: `fp32`, `bf16`, `fp16` or `auto`, for autocast. Default: the plan's value, else the task's.
            scaler: Your `GradScaler`. Default: one is made for fp16.
            collate: Turns rows into a batch, if you pass a loss. Default: the task's, else torch's.
            rows_are: On several ranks: `global` if each rank passes all rows of the step, `local` if only its own.
            skip_oversized: Leave out a row that does not fit even alone, and report it. Default: stop.
            allow_inexact: Split a step even if its loss compares rows with each other.
            skip_nonfinite: Consecutive steps with NaN or inf gradients to skip before stopping. fp16 may skip 20.
            grow_after: Steps without an error before the micro-batch size goes back up.
            last_checkpoint: Returns the path of the last checkpoint, for the one error that needs it.
            on_event: Called with every `Event`. If it fails, training continues.
        """
        check_stepper_options(
            micro_batch=micro_batch, clip_norm=clip_norm, precision=precision, scaler=scaler, collate=collate,
            rows_are=rows_are, skip_nonfinite=skip_nonfinite, grow_after=grow_after, last_checkpoint=last_checkpoint,
            on_event=on_event,
        )  # fmt: skip
        self.plan = checks.check_plan(plan)
        task, self._list_is_rows = _as_task(task_or_loss, collate)
        model, wrapper = checks.unwrap(model)
        checks.check_model(model)
        optimizer = checks.check_optimizer(model, optimizer)
        device = next(param for param in model.parameters() if param.requires_grad).device
        precision = precision or (plan.levers.precision if plan else task.precision)
        cudnn, cudnn_reason = cudnn_attention("auto", device, task.worst_shape)
        if plan:
            cudnn, cudnn_reason = plan.levers.cudnn_attention, "as planned"
        self._limit = MicroBatchLimit.from_plan(plan, micro_batch, grow_after)
        self._context = StepContext(
            task=task,
            model=model,
            optimizer=optimizer,
            device=device,
            autocast=autocast_dtype(precision, device),
            layout=self._limit.planned_layout,
            cudnn_attention=cudnn == "on",
            scaler=scaler,
        )
        self._clip_norm, self._skip_nonfinite, self._last_checkpoint = clip_norm, skip_nonfinite, last_checkpoint
        self._events = Events(on_event)
        self._group = join(device, model)
        self._dealer = Dealer(self._group, device, plan, self._limit.budget, rows_are)
        checked = plan is not None and plan.task == task.name
        split_check = SplitCheck(self._context, self._events, checked=checked, allow_inexact=allow_inexact)
        keep_cudnn = plan is not None and any(one.name == "cudnn_attention" and one.requested for one in plan.choices)
        self._shapes = ShapeCounter(self._context, self._events, keep_cudnn=keep_cudnn)
        self._recovery = Recovery(
            self._context, self._limit, self._events, skip_oversized=skip_oversized, rank=self._group.rank
        )
        self._gradients = Gradients(self._context, self._recovery, self._group, split_check, self._shapes)
        self._optimizer_memory = OptimizerMemory(optimizer, device, self._note)
        self._unapplied = _UnappliedGradients(optimizer)
        self._mode_checked = False
        self._graph_problem_noted = False
        self._graph_bytes = 0
        """What a CUDA graph has reserved at the beginning of the step."""
        self._communication_s = 0.0
        """What the group had counted at the beginning of the step."""
        self.steps = 0
        """Steps begun, skipped ones included."""
        self.nonfinite_steps = 0
        """Consecutive steps skipped because of NaN or inf."""
        self._earlier_ooms = 0
        """Errors before the checkpoint that was loaded."""
        if wrapper:
            self._note(f"the {wrapper} wrapper is removed: gradients are summed over ranks once per step")
        self._note_not_stepped()
        if micro_batch is not None and micro_batch < self._recovery.least_rows:
            self._note("micro_batch=1 becomes 2: BatchNorm cannot average over a single row")
        if cudnn == "off":
            self._note(f"cuDNN's attention is off: {cudnn_reason}")
        if plan is not None and plan.levers.weights is not None:
            self._note_other_weights(plan.levers.weights)
        if plan is not None and plan.levers.compile == "on":
            self._switch_compiled_blocks_on(task)
        if plan is not None and plan.levers.cuda_graphs == "on" and device.type == "cuda" and task.has_dummy:
            self._switch_graphs_on(plan)
        if plan is not None and plan.levers.checkpointing != "off":
            self._switch_checkpointing_on(task, plan.levers.checkpointing)

    @property
    def model(self) -> nn.Module:
        """The model without wrappers."""
        return self._context.model

    @property
    def group(self) -> SingleProcess:
        """The ranks of the job."""
        return self._group

    @property
    def ooms(self) -> int:
        """Out-of-memory errors of this rank, those before a checkpoint included."""
        return self._earlier_ooms + self._recovery.ooms

    @property
    def events(self) -> list[Event]:
        """The last thousand events."""
        return list(self._events.recent)

    @property
    def micro_batch(self) -> int | None:
        """The most rows in a micro-batch; None if nothing but memory limits it. It may change between steps."""
        return self._limit.max_rows

    @micro_batch.setter
    def micro_batch(self, rows: int | None) -> None:
        self._limit.max_rows = rows

    @property
    def speeds(self) -> tuple[float, ...]:
        """How rows are dealt to the ranks, for a `Loader` to deal them the same way."""
        return tuple(self._dealer.speeds)

    def excluded(self, lengths: Any) -> list[tuple[int, int]]:
        """Of rows with these lengths, (row, rank) where the row does not fit the rank's memory even alone."""
        return self._dealer.excluded([tuple(row) for row in lengths.tolist()])

    def step(self, rows: Any, meanwhile: Callable[[], object] | None = None) -> StepResult:
        """One optimizer step over these rows.

        `meanwhile` is called once in it, while the device computes and nothing is left to do here but to wait: for work
        on the host, such as reading the next rows. What it raises ends the step before any weight has changed.
        """
        started, meanwhile_s, launched = self._begin(), 0.0, False
        norm: Number = 0.0

        def clip_and_reserve() -> Number:
            nonlocal norm
            norm = self._clip_and_reserve()
            return norm

        def while_computing() -> None:
            nonlocal meanwhile_s, launched
            if meanwhile is not None:
                begun = time.perf_counter()
                meanwhile()
                meanwhile_s = 0.0 if self._device_computes() else time.perf_counter() - begun
            launched = self._launch_update(norm)

        share, gradients = self._make_gradients(rows, clip_and_reserve, while_computing)
        assert gradients.norm is not None
        applied = self._apply(gradients.norm, launched=launched)
        self._context.drop_gradients()
        return self._finish(share, gradients, started, applied, meanwhile_s)

    def backward(self, rows: Any) -> StepResult:
        """Everything but clipping and the optimizer: leaves the exact gradients of these rows on the parameters.

        For loops that clip and step themselves. The bytes of the optimizer's step are reserved. Pass all rows of a step at
        once: a second call before the optimizer's step is refused, since a retry could not keep the gradients of the first.
        """
        started = self._begin()
        share, gradients = self._make_gradients(rows, self._reserve)
        self._unapplied.expected = True
        return self._finish(share, gradients, started, applied=False)

    def rehearse(self) -> bool:
        """Run the plan's largest micro-batch once and undo it, so that the allocator has its final size.

        False if it ran out of memory; the first step is then split finer. Nothing happens without a plan or without
        `Task.dummy`.
        """
        if self.plan is None or not self._context.task.has_dummy:
            return True
        return self._recovery.rehearse(self.plan)

    def free_memory(self) -> None:
        """Give back what is kept between steps to be faster, before something else needs the device: a CUDA graph's memory."""
        if self._context.graphs is not None:
            self._context.graphs.drop()

    def state_dict(self) -> dict[str, Any]:
        """What the next steps depend on besides model and optimizer. Put it into your checkpoint."""
        return {
            "steps": self.steps,
            "ooms": self.ooms,
            "nonfinite_steps": self.nonfinite_steps,
            "micro_batch_limit": self._limit.state_dict(),
            "speeds": list(self._dealer.speeds),
            "many_shapes": self._shapes.many,
            "scaler": None if self._context.scaler is None else self._context.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.nonfinite_steps = state["steps"], state["nonfinite_steps"]
        self._earlier_ooms = state["ooms"] - self._recovery.ooms
        self._limit.load_state_dict(state["micro_batch_limit"])
        if state["many_shapes"]:
            self._shapes.switch_off()
        if len(state["speeds"]) == self._group.size:
            self._dealer.speeds = list(state["speeds"])
        if self._context.scaler is not None and state["scaler"] is not None:
            self._context.scaler.load_state_dict(state["scaler"])

    def _device_computes(self) -> bool:
        device = self._context.device
        return device.type == "cuda" and not torch.cuda.current_stream(device).query()

    def _begin(self) -> float:
        self._unapplied.check(self._gradients.params)
        if self._context.follow_optimizer():
            self._follow_model()
        self.steps += 1
        if not self._mode_checked and not self.model.training:  # at a step: trainers choose the mode after construction
            self._note("the model is in evaluation mode; call model.train() to train with dropout and BatchNorm")
        self._mode_checked = True
        self._context.drop_gradients()
        self._graph_bytes = 0 if self._context.graphs is None else self._context.graphs.pool_bytes
        if has_peak_statistics(self._context.device):
            torch.accelerator.reset_peak_memory_stats(self._context.device)
        else:
            reset_active_peak()
        self._communication_s = self._group.communication_s
        return time.perf_counter()

    def _follow_model(self) -> None:
        """Parameters were added or replaced since the last step."""
        self._recovery.follow_model()
        self._group.broadcast([*self._context.params, *self.model.buffers()])
        self._optimizer_memory = OptimizerMemory(self._context.optimizer, self._context.device, self._note)
        self._note_not_stepped()

    def _note_not_stepped(self) -> None:
        if missing := checks.not_stepped(self.model, self._context.optimizer):
            self._note(f"the optimizer does not step {missing}; freeze what is not meant to learn")

    def _make_gradients(
        self, value: Any, finish: Callable[[], Number | None], meanwhile: Callable[[], object] = lambda: None
    ) -> tuple[Share, StepGradients]:
        shape = self.plan.shape if self.plan else ()
        rows = as_rows(value, self._context.task, shape, list_is_rows=self._list_is_rows, layout=self._context.layout)
        share = self._dealer.share(rows, value)
        return share, self._gradients.make(self.steps, share, finish, meanwhile)

    def _clip_and_reserve(self) -> Number:
        """The norm before clipping, on the device."""
        self._context.phase = Phase.CLIP
        if self._context.scaler:
            self._context.scaler.unscale_(self._context.optimizer)
        params = self._gradients.params
        norm = get_total_norm([param.grad for param in params if param.grad is not None])
        if self._clip_norm is not None:
            clip_grads_with_norm_(params, self._clip_norm, norm)
        self._reserve()
        return norm

    def _reserve(self) -> None:
        self._context.phase = Phase.RESERVE
        self._optimizer_memory.reserve(self._gradients.params)

    def _launch_update(self, norm: Number) -> bool:
        """Launch the optimizer's step before the norm is read, if the device itself can leave it out. Returns whether it did.

        torch's fused optimizers do nothing where `found_inf` is 1, which is how a `GradScaler` skips steps. So the device goes on
        while the host waits for the numbers of the step.
        """
        optimizer = self._context.optimizer
        fused = type(optimizer) in SKIPPED_ON_DEVICE and getattr(optimizer, "_step_supports_amp_scaling", False)
        if not fused or self._context.scaler is not None or not isinstance(norm, torch.Tensor):
            return False
        optimizer.grad_scale, optimizer.found_inf = None, (~norm.isfinite()).to(torch.float32)  # type: ignore[attr-defined]
        try:
            self._update()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        return True

    def _apply(self, norm: float, *, launched: bool) -> bool:
        """The optimizer's step, once; or none if the gradients are not finite."""
        if not math.isfinite(norm):
            self._skip(norm)
            return False
        if not launched:
            self._update()
        self.nonfinite_steps = 0
        return True

    def _update(self) -> None:
        try:
            self._context.apply()
        except Exception as error:
            raise PartialUpdate(
                f"the optimizer failed within step {self.steps}, so the weights may be partly updated ({in_one_line(error)}). "
                f"Try: resume from {self._checkpoint_path() or 'your last checkpoint'}."
            ) from error

    def _skip(self, norm: float) -> None:
        self.nonfinite_steps += 1
        scaler, most = self._context.scaler, self._skip_nonfinite
        scale_change = ""
        if scaler is not None:
            most, scale = max(most, FP16_SKIPS), scaler.get_scale()
            scaler.update()  # it has seen the gradients when they were unscaled
            scale_change = f"; the loss scale goes from {scale:g} to {scaler.get_scale():g}"
        gradients = ((name, param.grad) for name, param in self.model.named_parameters() if param.grad is not None)
        parameter = next((name for name, grad in gradients if not grad.isfinite().all()), None)
        problem = f"the gradient norm is {norm}" + (f" (first in {parameter!r})" if parameter else "")
        count = f"{self.nonfinite_steps} consecutive step{'s' * (self.nonfinite_steps != 1)} skipped"
        self._events.add(
            "skip",
            self.steps,
            f"{problem}: {count}, at most {most}{scale_change}",
            norm=str(norm),
            parameter=parameter,
            consecutive=self.nonfinite_steps,
            most=most,
        )
        if self.nonfinite_steps > most:
            self._context.drop_gradients()
            path = self._checkpoint_path()
            raise NonFiniteGradients(
                f"{problem} in step {self.steps}, {count}. Try: a lower learning rate, clip_norm=, or check these rows"
                + (f"; the last checkpoint is {path}." if path else ".")
            )

    def _checkpoint_path(self) -> str | None:
        try:
            return self._last_checkpoint() if self._last_checkpoint else None
        except Exception:
            return None

    def _finish(
        self, share: Share, gradients: StepGradients, started: float, applied: bool, meanwhile_s: float = 0.0
    ) -> StepResult:
        state = gradients.state
        counts_peaks = has_peak_statistics(self._context.device)
        peak, reserved = memory_peaks(self._context.device) if counts_peaks else (active_peak_bytes(), None)
        self._broadcast_batch_norm()
        if self._dealer.measuring and not gradients.ooms_of_all:
            self._record_time(share.work, state.busy_s)
        if self.plan is not None and self.steps == 1 and gradients.rows != self.plan.global_batch:
            self._note(f"the step has {gradients.rows} rows, but the plan was made for {self.plan.global_batch}")
        if self._context.graphs is not None:
            if self._context.graphs.pool_bytes == self._graph_bytes:  # else one was recorded, after a plain run
                peak = (peak or 0) + self._graph_bytes
            if self._context.graphs.problem and not self._graph_problem_noted:
                self._graph_problem_noted = True
                self._note(f"micro-batches are launched again, without a CUDA graph: {self._context.graphs.problem}")
            # The graph's memory and the optimizer's are added up in this peak, though they are not used at the same time.
            counts_peaks = False
        self._recovery.after_step(state, peak if counts_peaks else None, self._gradients.gradient_bytes)
        means = {name: _mean(*term) for name, term in gradients.terms.items()}
        seconds = time.perf_counter() - started - meanwhile_s
        return StepResult(
            step=self.steps,
            loss=math.fsum(mean for mean in means.values() if mean == mean or len(means) == 1),
            terms=means,
            log={name: _mean(*entry) for name, entry in gradients.log.items()},
            rows=gradients.rows,
            count=next(iter(gradients.terms.values()))[1],
            applied=applied,
            grad_norm=gradients.norm,
            micro_batches=len(state.groups),
            largest_micro_batch=max(map(len, state.groups), default=0),
            ooms=state.ooms,
            ooms_of_all=gradients.ooms_of_all,
            set_aside=tuple(state.set_aside),
            seconds=seconds,
            peak_bytes=peak,
            reserved_bytes=reserved,
            meanwhile_s=meanwhile_s,
            communication_s=min(seconds, self._group.communication_s - self._communication_s),
        )

    def _record_time(self, work: float, seconds: float) -> None:
        if change := self._dealer.record_time(work, seconds):
            self._events.add("deal", self.steps, change, speeds=self._dealer.speeds)

    def _broadcast_batch_norm(self) -> None:
        """BatchNorm's running statistics are those of rank 0, as with DDP."""
        if self._group.size > 1:
            norms = [part for part in self.model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
            self._group.broadcast([buffer for part in norms for buffer in part.buffers()])

    def _switch_compiled_blocks_on(self, task: Task) -> None:
        lever = compiling(task, self.model)
        if lever.switch is not None:
            lever.switch(True)
            self._note(f"blocks are compiled, as planned ({lever.reason})")

    def _switch_graphs_on(self, plan: Plan) -> None:
        random_state = RandomState(self._context.device)
        batch = self._context.layout.example(self._context.task, plan.micro_batch, plan.shape)
        random_state.restore()
        self._context.graphs = Graphs(signature(batch), whole_step=plan.accumulation == 1)
        self._note("micro-batches are replayed as a CUDA graph, as planned")

    def _switch_checkpointing_on(self, task: Task, setting: Checkpointed) -> None:
        lever = checkpointing(task, self.model)
        if lever.switch is not None:
            lever.switch(EVERY[setting])
            self._note(f"gradient checkpointing is {setting}, as planned ({lever.reason})")

    def _note_other_weights(self, planned: Weights) -> None:
        """The model is the caller's, so it is not converted here."""
        if not any(param.dtype is DTYPES[planned] for param in self.model.parameters()):
            self._note(
                f"the model has no {planned} weights, for which the plan was made: a step may take more than planned"
            )

    def _note(self, sentence: str) -> None:
        self._events.add("note", self.steps, sentence)


class _UnappliedGradients:
    """Refuses to drop gradients that `backward` made and no optimizer has applied."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.expected = False
        """Whether the optimizer has yet to step after the last `backward`."""
        self._hooked = hasattr(optimizer, "_optimizer_step_post_hooks")  # not in wrappers that skip Optimizer.__init__
        if self._hooked:
            optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.expected = False

    def check(self, params: list[nn.Parameter]) -> None:
        expected, self.expected = self.expected and self._hooked, False
        if not expected:
            return
        norm = float(get_total_norm([param.grad for param in params if param.grad is not None]))
        if 0 < norm < math.inf:  # else they were zeroed, or a scaler has skipped the step
            self.expected = True
            raise UserError(
                "the gradients of an earlier backward() were not applied, and another call would drop them. "
                "Try: optimizer.step() or optimizer.zero_grad() first, or all rows of the step in one call."
            )


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan


class _LossTask(Task):
    """A loss where a task is expected."""

    def __init__(self, loss: Callable[[Any, Any], Any], collate: Callable[[Sequence[Any]], Any] | None) -> None:
        super().__init__()
        self.name = getattr(loss, "__name__", type(loss).__name__)
        self._loss, self._collate = loss, collate

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return self._loss(model, batch)

    def collate(self, rows: Sequence[Any]) -> Any:
        return super().collate(rows) if self._collate is None else self._collate(rows)


def _as_task(value: Any, collate: Callable[[Sequence[Any]], Any] | None) -> tuple[Task, bool]:
    """A task, and whether a list passed to a step always means rows."""
    if isinstance(value, type) and issubclass(value, Task):
        value = value()
    if isinstance(value, Task):
        return value, True
    if isinstance(value, nn.Module):
        raise TaskError(
            f"task_or_loss is {kind_of(value)}, which is a criterion. "
            "Try: a function loss(model, batch) that calls the model and returns brimful.Loss(sum, count)."
        )
    if not callable(value):
        raise TaskError(f"task_or_loss is {kind_of(value)}. Try: a brimful.Task or a function loss(model, batch).")
    owner = getattr(value, "__self__", None)
    if isinstance(owner, Task) and value.__func__ is type(owner).loss and collate is None:
        return owner, True  # task.loss: its task knows how to collate, and the lengths of rows
    return _LossTask(value, collate), collate is not None


def check_stepper_options(
    *,
    micro_batch: Any = None,
    clip_norm: Any = None,
    precision: Any = None,
    scaler: Any = None,
    rows_are: Any = "global",
    skip_nonfinite: Any = 5,
    grow_after: Any = GROW_AFTER,
    **functions: Any,
) -> None:
    """Raise `BadOption` with every value that a `Stepper` cannot take."""

    def problems() -> Iterator[str]:
        if micro_batch is not None and not is_whole(micro_batch, 1):
            yield f"micro_batch={micro_batch!r} must be 1 or more."
        if clip_norm is not None and not (isinstance(clip_norm, (int, float)) and 0 < clip_norm < math.inf):
            yield f"clip_norm={clip_norm!r} must be positive, or None for no clipping."
        if precision is not None and precision not in get_args(Precision):
            yield f"precision={precision!r} must be one of {', '.join(get_args(Precision))}."
        for name, value in functions.items():
            if value is not None and not callable(value):
                yield f"{name}={value!r} must be a function."
        if scaler is not None and not hasattr(scaler, "unscale_"):
            yield f"scaler={scaler!r} must be a torch.amp.GradScaler."
        if rows_are not in get_args(RowsAre):
            yield f"rows_are={rows_are!r} must be 'global' or 'local'."
        if not is_whole(skip_nonfinite, 0):
            yield f"skip_nonfinite={skip_nonfinite!r} must be 0 or more."
        if not is_whole(grow_after, 1):
            yield f"grow_after={grow_after!r} must be 1 or more."

    if wrong := list(problems()):
        raise BadOption(" ".join(wrong))
