"""The exact step in an Accelerate loop: prepare as before, then step through Brimful.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    stepper = exact_stepper(accelerator, model, optimizer, loss, clip_norm=1.0)
    for batch in loader:
        result = stepper.step(batch)     # was: forward, accelerator.backward, clip, optimizer.step, zero_grad
        scheduler.step()

What Accelerate prepared stays in charge of the rest: the loader gives each process its own rows, the patched forward
opens autocast, its scaler scales, `scheduler.step()` moves as often as in a plain loop and not after a skipped step,
`save_state` and `load_state` carry the stepper along. The one thing that goes is the DDP wrapper, which reduces inside
backward, where a process that runs out of memory would leave the others waiting for ever.

**What differs from a plain loop.** Accelerate averages the processes' means and the accumulated batches' means, which is
wrong as soon as they count differently many tokens; here the mean runs over everything counted in the step. In a plain
loop without a scaler NaN gradients go into the weights; here the step is skipped.

**Out of reach.** The prepared loader puts a whole batch on the device before the step sees it. A loader that gives lists
of rows (`collate_fn=list`, with `collate=` here) or `accelerator.prepare(loader, device_placement=[False])` leaves that
to the step, one micro-batch at a time.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from brimful.step.interface import StepResult
from brimful.step.rows import Listed, as_rows
from brimful.step.stepper import Stepper
from brimful.task import Loss, Task

IGNORED = -100
"""The label that Hugging Face's losses do not count."""
_REFUSED = {
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.FSDP: "FSDP",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}
_WRAPPERS = (DistributedDataParallel, DataParallel)


def exact_stepper(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    loss: Task | Callable[[Any, Any], Any] | None = None,
    plan: Plan | None = None,
    **options: Any,
) -> "AcceleratedStepper":
    """A stepper over what `accelerator.prepare` returned.

    `loss(model, batch)` returns `Loss(sum, count)`; a task serves as well. Without one the model's own loss is taken, for
    Hugging Face models whose output has a mean `loss` over `labels`. Options are those of `Stepper`.
    """
    _check(accelerator, model, optimizer, options)
    return AcceleratedStepper(accelerator, model, optimizer, model_loss if loss is None else loss, plan, **options)


class AcceleratedStepper(Stepper):
    """A stepper that keeps an accelerator's scheduler, scaler and checkpoints in step. Made by `exact_stepper`."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        task_or_loss: Task | Callable[[Any, Any], Any],
        plan: Plan | None = None,
        **options: Any,
    ) -> None:
        # The prepared forward opens autocast by itself, so the stepper opens none.
        given = {"rows_are": "local", **options, "scaler": accelerator.scaler, "precision": "fp32"}
        super().__init__(model, optimizer, task_or_loss, plan, **given)
        self._accelerator, self._wrapped = accelerator, optimizer
        self._number = getattr(accelerator, "_brimful_steppers", 0)  # two models that train together have one each
        accelerator._brimful_steppers = self._number + 1
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)

    def step(self, rows: Any) -> StepResult:
        """One optimizer step over this process's batch, together with the other processes."""
        self._refuse_small_batches()
        return self._step(rows)

    def backward(self, rows: Any) -> StepResult:
        """The exact gradients alone, for loops that clip and step themselves. No `accelerator.backward` besides."""
        self._refuse_small_batches()
        return super().backward(rows)

    def over(self, loader: Iterable[Any]) -> Iterator[StepResult]:
        """A pass over the loader, `gradient_accumulation_steps` of its batches a step; those left at its end are one too.

        for result in stepper.over(loader):
            scheduler.step()
        """
        waiting: list[Any] = []
        for batch in loader:
            waiting.append(batch)
            if len(waiting) == self._accelerator.gradient_accumulation_steps:
                joined, waiting = self._joined(waiting), []
                yield self._step(joined)
        if waiting:
            yield self._step(self._joined(waiting))

    def _step(self, rows: Any) -> StepResult:
        result = super().step(rows)
        self._wrapped._is_overflow = not result.applied  # what the prepared scheduler looks at before it moves
        return result

    def _refuse_small_batches(self) -> None:
        parts = self._accelerator.gradient_accumulation_steps
        if parts > 1:
            raise BadOption(
                f"gradient_accumulation_steps={parts}: a batch of this loader is a part of a step; iterate over "
                f"stepper.over(loader), which joins {parts} of them, or raise the loader's batch_size {parts} times and "
                "leave gradient_accumulation_steps at 1"
            )

    def _joined(self, batches: list[Any]) -> Any:
        """Several batches of the loader as one."""
        if len(batches) == 1:
            return batches[0]
        if isinstance(as_rows(batches[0], self._rig.task, (), is_rows=self._is_rows), Listed):
            return [row for batch in batches for row in batch]
        try:
            return concatenate(batches)
        except (RuntimeError, TypeError) as error:
            if is_oom(error):
                raise
            raise TaskError(
                f"{len(batches)} batches of the loader cannot be joined into a step, since they are padded to different "
                f"lengths or hold more than tensors: raise the loader's batch_size {len(batches)} times and set "
                "gradient_accumulation_steps=1"
            ) from error

    def _save(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        """A file of each process, since each has a cut of its own; Accelerate's custom objects are the first one's only."""
        self._file(folder).write_text(json.dumps(self.state_dict()))

    def _load(self, models: list[nn.Module], folder: str) -> None:
        file = self._file(folder)
        if file.exists():
            self.load_state_dict(json.loads(file.read_text()))
        else:
            self._note(f"{folder} was saved without this process's stepper: the weights are its, the cut starts anew")

    def _file(self, folder: str) -> Path:
        return Path(folder) / f"brimful_stepper{self._number}_rank{self._accelerator.process_index}.json"


def model_loss(model: nn.Module, batch: Any) -> Loss:
    """The loss that a Hugging Face model computes from `labels`: a mean over those that are not -100, made a sum."""
    if not isinstance(batch, Mapping) or not isinstance(batch.get("labels"), torch.Tensor):
        raise TaskError("the batch has no tensor `labels` to take the model's own loss from: give exact_stepper a loss")
    mean = getattr(model(**batch), "loss", None)
    if not isinstance(mean, torch.Tensor):
        raise TaskError(f"{type(model).__name__} returned no loss for these labels: give exact_stepper a loss")
    count = _counted(model, batch).ne(IGNORED).sum()
    # Of a micro-batch whose labels are all masked the mean is NaN; its sum is 0, and so are its gradients.
    return Loss(sum=torch.where(count > 0, mean * count, torch.zeros_like(mean)), count=count)


def _counted(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """The labels that the model's mean runs over. Decoders without an encoder predict each from those before it."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if isinstance(batch.get("shift_labels"), torch.Tensor):
        return batch["shift_labels"]
    labels: torch.Tensor = batch["labels"]
    shifts = getattr(model, "loss_function", None) is ForCausalLMLoss  # its loss_type is None for GPT-2
    from_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return labels[..., 1:] if shifts and not from_encoder else labels


def _check(accelerator: Accelerator, model: nn.Module, optimizer: Any, options: dict[str, Any]) -> None:
    """Everything that cannot work, before anything is touched."""
    _check_accelerator(accelerator)
    for what, one in (("model", model), ("optimizer", optimizer)):
        if not getattr(one, "_is_accelerate_prepared", False):
            raise BadOption(f"the {what} was not prepared: give exact_stepper what accelerator.prepare(...) returned")
    if any(isinstance(part, _WRAPPERS) for part in _inside(model).modules()):
        raise UnsupportedModel(
            "the model holds a DistributedDataParallel wrapper that cannot be taken off, as dynamo_backend leaves it: compile "
            "the model yourself before accelerator.prepare, and leave dynamo_backend at 'no'"
        )
    taken = sorted({"scaler", "precision"} & set(options))
    if taken:
        raise BadOption(f"{' and '.join(taken)}: the accelerator's own is used; set Accelerator(mixed_precision=...)")


def _check_accelerator(accelerator: Accelerator) -> None:
    kind = _REFUSED.get(accelerator.distributed_type) or _parallel(accelerator)
    if kind is not None:
        raise UnsupportedModel(
            f"{kind}: processes talk to each other inside the forward, so none can redo a step alone; launch with plain "
            "data parallelism (accelerate launch --multi_gpu)"
        )
    if accelerator.mixed_precision == "fp8":
        raise UnsupportedModel("mixed_precision='fp8' keeps scales that a redone step would count twice; use 'bf16'")
    parts = accelerator.gradient_state.num_steps
    if parts > 1 and not accelerator.gradient_state.sync_with_dataloader:
        raise BadOption(
            "sync_with_dataloader=False leaves a step half done at the end of a pass; leave it at True, or raise the loader's "
            f"batch_size {parts} times and set gradient_accumulation_steps=1"
        )


def _parallel(accelerator: Accelerator) -> str | None:
    config = getattr(accelerator, "parallelism_config", None)
    if config is None or config.non_data_parallel_size == 1:
        return None
    return f"ParallelismConfig ({', '.join(config.non_dp_dim_names)})"


def _inside(model: nn.Module) -> nn.Module:
    """What is under the wrappers that do come off."""
    while isinstance(model, _WRAPPERS):
        model = model.module
    return model
