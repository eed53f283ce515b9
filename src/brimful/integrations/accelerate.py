"""The exact step in an Accelerate loop: prepare as before, then step through Brimful.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    stepper = exact(accelerator, model, optimizer, loss, clip_norm=1.0)
    for batch in loader:
        result = stepper.step(batch)     # instead of forward, accelerator.backward, clip, optimizer.step, zero_grad
        scheduler.step()

The rest stays Accelerate's: the loader gives each process its own rows, the prepared forward opens autocast, its scaler
scales, `scheduler.step()` does not move after a skipped step, `save_state` and `load_state` include the stepper. Only the DDP
wrapper goes, which reduces inside backward, where a process that runs out of memory would leave the others waiting.

**What differs from a plain loop.** Accelerate averages the means of processes and of accumulated batches, which is wrong if
they count different numbers of tokens; here the mean runs over everything counted in the step. Without a scaler a plain loop
writes NaN gradients into the weights; here the step is skipped.

**Not covered.** The prepared loader moves a whole batch to the device before the step sees it. A loader of lists of rows
(`collate_fn=list`, with `collate=` here) or `accelerator.prepare(loader, device_placement=[False])` leaves that to the step.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, concatenate
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from brimful.errors import BadOption, TaskError, UnsupportedModel
from brimful.memory.oom import is_oom
from brimful.planning.plan import Plan
from brimful.step.distributed import RowsAre
from brimful.step.recovery import GROW_AFTER
from brimful.step.result import Event, StepResult
from brimful.step.rows import ListedRows, as_rows
from brimful.step.stepper import Stepper
from brimful.task import Task

_UNSUPPORTED = {
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.FSDP: "FSDP",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}
_WRAPPERS = (DistributedDataParallel, DataParallel)


def exact(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    loss: Task | Callable[[Any, Any], Any] | None = None,
    plan: Plan | None = None,
    *,
    micro_batch: int | None = None,
    clip_norm: float | None = None,
    collate: Callable[[Sequence[Any]], Any] | None = None,
    rows_are: RowsAre = "local",
    skip_oversized: bool = False,
    allow_inexact: bool = False,
    skip_nonfinite: int = 5,
    grow_after: int = GROW_AFTER,
    last_checkpoint: Callable[[], str | None] | None = None,
    on_event: Callable[[Event], object] | None = None,
) -> "AcceleratedStepper":
    """A stepper over what `accelerator.prepare` returned. Scaler and precision are the accelerator's.

    Args:
        accelerator: Yours.
        model: The prepared model.
        optimizer: The prepared optimizer.
        loss: `loss(model, batch)` or a task, as in `brimful.Stepper`. Default: the loss that a Hugging Face model
            computes from `labels`.
        plan: From `brimful.plan`.
        micro_batch: The most rows in a micro-batch. Default: with a plan what fits by its prediction, else a batch of
            the loader, also where `over` joins several of them into a step.
        rows_are: `local` if each process passes its own rows, as a prepared loader gives them.
        clip_norm, collate, skip_oversized, allow_inexact, skip_nonfinite, grow_after, last_checkpoint, on_event: As in
            `brimful.Stepper`.
    """
    _check_accelerator(accelerator)
    for name, prepared in (("model", model), ("optimizer", optimizer)):
        if not getattr(prepared, "_is_accelerate_prepared", False):
            raise BadOption(f"the {name} is not prepared. Try: pass what accelerator.prepare(...) returned.")
    inner = model
    while isinstance(inner, _WRAPPERS):
        inner = inner.module
    if any(isinstance(part, _WRAPPERS) for part in inner.modules()):
        raise UnsupportedModel(
            "a DistributedDataParallel wrapper inside the model cannot be removed, as dynamo_backend leaves it. "
            "Try: torch.compile before accelerator.prepare, and dynamo_backend='no'."
        )
    return AcceleratedStepper(
        accelerator,
        model,
        optimizer,
        _model_loss if loss is None else loss,
        plan,
        precision="fp32",  # the prepared forward opens autocast itself
        scaler=accelerator.scaler,
        micro_batch=micro_batch,
        clip_norm=clip_norm,
        collate=collate,
        rows_are=rows_are,
        skip_oversized=skip_oversized,
        allow_inexact=allow_inexact,
        skip_nonfinite=skip_nonfinite,
        grow_after=grow_after,
        last_checkpoint=last_checkpoint,
        on_event=on_event,
    )


class AcceleratedStepper(Stepper):
    """A stepper that keeps an accelerator's scheduler, scaler and checkpoints in step. Made by `exact`."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Any, *args: Any, **options: Any) -> None:
        super().__init__(model, optimizer, *args, **options)
        self._accelerator, self._prepared_optimizer = accelerator, optimizer
        self._limits_micro_batch = self.plan is not None or self.micro_batch is not None
        self._number = getattr(accelerator, "_brimful_steppers", 0)  # two models that train together have one each
        accelerator._brimful_steppers = self._number + 1
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)

    def step(self, rows: Any, meanwhile: Callable[[], object] | None = None) -> StepResult:
        """One optimizer step over this process's batch, together with the other processes."""
        self._refuse_accumulation()
        return self._step(rows, meanwhile)

    def backward(self, rows: Any) -> StepResult:
        """The exact gradients alone, for loops that clip and step themselves. Replaces `accelerator.backward`."""
        self._refuse_accumulation()
        return super().backward(rows)

    def over(self, loader: Iterable[Any]) -> Iterator[StepResult]:
        """Step through the loader, `gradient_accumulation_steps` batches per step; what is left at the end is one too.

        for result in stepper.over(loader):
            scheduler.step()
        """
        batches: list[Any] = []
        for batch in loader:
            batches.append(batch)
            if len(batches) == self._accelerator.gradient_accumulation_steps:
                joined, batches = self._join(batches), []
                yield self._step(joined)
        if batches:
            yield self._step(self._join(batches))

    def _step(self, rows: Any, meanwhile: Callable[[], object] | None = None) -> StepResult:
        result = super().step(rows, meanwhile)
        self._prepared_optimizer._is_overflow = not result.applied  # the prepared scheduler looks at it before it moves
        return result

    def _refuse_accumulation(self) -> None:
        parts = self._accelerator.gradient_accumulation_steps
        if parts > 1:
            raise BadOption(
                f"with gradient_accumulation_steps={parts} a batch of the loader is only part of a step. Try: iterate over "
                f"stepper.over(loader), or a loader with {parts} times the batch_size and gradient_accumulation_steps=1."
            )

    def _join(self, batches: list[Any]) -> Any:
        rows = [as_rows(batch, self._context.task, (), list_is_rows=self._list_is_rows) for batch in batches]
        if not self._limits_micro_batch:
            self.micro_batch = max(map(len, rows))  # a batch of the loader is known to fit, several at once are not
        if len(batches) == 1:
            return batches[0]
        if isinstance(rows[0], ListedRows):
            return [row for batch in batches for row in batch]
        try:
            return concatenate(batches)
        except (RuntimeError, TypeError) as error:
            if is_oom(error):
                raise
            raise TaskError(
                f"{len(batches)} batches cannot be joined into a step: they have different lengths, or more than tensors. "
                f"Try: a loader with {len(batches)} times the batch_size and gradient_accumulation_steps=1."
            ) from error

    def _save(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        """One file per process, since each has its own limit; Accelerate's custom objects are saved by the first only."""
        self._file(folder).write_text(json.dumps(self.state_dict()))

    def _load(self, models: list[nn.Module], folder: str) -> None:
        file = self._file(folder)
        if file.exists():
            self.load_state_dict(json.loads(file.read_text()))
        else:
            self._note(f"{folder} has no stepper of this process, so the micro-batch size is found again")

    def _file(self, folder: str) -> Path:
        return Path(folder) / f"brimful_stepper{self._number}_rank{self._accelerator.process_index}.json"


def _model_loss(model: nn.Module, batch: Any) -> Any:
    """The output of a Hugging Face model, whose mean loss is weighted by its labels."""
    if not isinstance(batch, Mapping) or not isinstance(batch.get("labels"), torch.Tensor):
        raise TaskError("the batch has no tensor `labels` for the model's own loss. Try: exact(…, loss=…).")
    output = model(**batch)
    if not isinstance(getattr(output, "loss", None), torch.Tensor):
        raise TaskError(f"{type(model).__name__} returned no loss for these labels. Try: exact(…, loss=…).")
    return output


def _check_accelerator(accelerator: Accelerator) -> None:
    kind = _UNSUPPORTED.get(accelerator.distributed_type)
    config = getattr(accelerator, "parallelism_config", None)
    if kind is None and config is not None and config.non_data_parallel_size != 1:
        kind = f"ParallelismConfig ({', '.join(config.non_dp_dim_names)})"
    if kind is not None:
        raise UnsupportedModel(
            f"{kind} communicates inside the forward, so one process cannot repeat a step alone. "
            "Try: plain data parallelism (accelerate launch --multi_gpu)."
        )
    if accelerator.mixed_precision == "fp8":
        raise UnsupportedModel(
            "mixed_precision='fp8' keeps scales that a repeated step would count twice. Try: 'bf16'."
        )
    parts = accelerator.gradient_state.num_steps
    if parts > 1 and not accelerator.gradient_state.sync_with_dataloader:
        raise BadOption(
            "sync_with_dataloader=False leaves a partial step at the end of a pass. Try: sync_with_dataloader=True, or a "
            f"loader with {parts} times the batch_size and gradient_accumulation_steps=1."
        )
