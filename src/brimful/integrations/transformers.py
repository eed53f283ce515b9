"""Hugging Face `Trainer` and `Seq2SeqTrainer` with steps that survive out-of-memory. Two changed lines:

    from brimful.integrations.transformers import exact

    trainer = exact(Seq2SeqTrainer)(model=model, args=args, train_dataset=rows, data_collator=collator)

Everything else stays Trainer's: arguments, number of steps and epochs, schedule, callbacks, logs, evaluation, checkpoints
and resuming. `Trainer` asks for one micro-batch after the other; here the loader hands over uncollated rows, all but the
last request of a step only keep theirs, and the last one gives the whole step to `brimful.Stepper`, which cuts it by
length and by memory. So Trainer's own counting, `gradient_accumulation_steps` included, is untouched; only `compute_loss`
sees an accumulation of 1 and whole batches. Collating moves from the loader's workers to the training process.

The result is that of the plain Trainer with the same global batch and an accumulation of 1: each micro-batch's mean is
weighted by what it is a mean over (labels that are not -100, as Trainer counts them; rows where there are no labels). With
accumulation the plain Trainer gives the same where the model uses `num_items_in_batch`. T5 takes it and does not use it:
there the plain Trainer's gradients, and the loss it logs, come out `gradient_accumulation_steps` times too large (19.8 for
4.94 at an accumulation of 4, transformers 5.22). Tokens are averaged over all processes, whatever
`average_tokens_across_devices` says.

**Out of reach** is what Trainer does after the gradients are there: an out-of-memory error in its own clipping, in a
callback, in evaluation or in the optimizer's own step ends the run as it always did (the one in clipping with a sentence).
The bytes of the optimizer's step are proven before that.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.training_args import ParallelMode

from brimful.errors import BadOption, DoesNotFit, InexactSplit
from brimful.memory.oom import empty_cache, is_oom
from brimful.memory.snapshot import RandomState
from brimful.planning.plan import Plan
from brimful.step.interface import Event, StepResult
from brimful.step.stepper import Stepper
from brimful.task import Loss, Shape, Task

# Rows on their way through Hugging Face's Trainer: uncollated, with their lengths, until a whole step of them is together.


class Lengths:
    """The lengths of a row: those of its columns, a column left out that is as long as one before it in every row."""

    def __init__(self, taken: Sequence[str] | None, shape: Callable[[Any], Shape] | None, plan: Plan | None) -> None:
        self._taken, self._shape, self._plan = taken, shape, plan
        self._columns: list[Any] | None = None

    def of(self, row: Any) -> Shape:
        if self._shape is not None:
            return tuple(self._shape(row))
        sizes = self._sizes(row)
        return tuple(sizes.get(column, 0) for column in self._columns or sizes)

    def settle(self, rows: Any) -> None:
        """Once, on the rows of the first step; the cut's limits would mean something else if columns changed later."""
        if self._columns is not None or self._shape is not None or not isinstance(rows, list):
            return
        sizes = [self._sizes(row) for row in rows]
        seen: dict[tuple[int, ...], Any] = {}
        for column in dict.fromkeys(column for one in sizes for column in one):
            seen.setdefault(tuple(one.get(column, 0) for one in sizes), column)
        self._columns = list(seen.values())
        plan = self._plan
        if plan is not None and len(plan.shape) != len(self._columns):
            found = ", ".join(map(str, self._columns)) or "none"
            raise BadOption(
                f"the plan knows rows by {len(plan.shape)} lengths, these rows have {len(self._columns)} ({found}): pass "
                "exact(…, plan=plan, shape=task.shape) with the task that was fitted"
            )

    def _sizes(self, row: Any) -> dict[Any, int]:
        if isinstance(row, Mapping):
            values = {key: value for key, value in row.items() if self._taken is None or key in self._taken}
        else:
            values = dict(enumerate(row)) if isinstance(row, (list, tuple)) else {0: row}
        sizes = {key: size_of(value) for key, value in values.items()}
        return {key: size for key, size in sizes.items() if size is not None}


class HeldRows:
    """Rows of the dataset on their way through Trainer: accelerate moves no part of them to the device."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __contains__(self, name: object) -> bool:
        return False  # Trainer looks for labels, to count them


class Later:
    """A loader's collate function that leaves collating to the stepper."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: list[Any]) -> HeldRows:
        return HeldRows(rows)


def collate_later(loader: Any) -> Callable[[list[Any]], Any]:
    """Make the loader hand over rows, and return what it collated them with; a loader that cannot is left as it is."""
    inner = getattr(loader, "base_dataloader", loader)  # inside accelerate's
    if isinstance(loader, DataLoaderDispatcher) or not isinstance(inner, DataLoader) or not inner._auto_collation:
        return list
    if not isinstance(inner.collate_fn, Later):  # your own loader may come a second time
        inner.collate_fn = Later(inner.collate_fn)
    return inner.collate_fn.collate


def joined(held: list[Any]) -> Any:
    """What the requests of one step brought, as one list of rows; or as one batch, where the loader collates."""
    if all(isinstance(one, HeldRows) for one in held):
        return [row for one in held for row in one.rows]
    return held[0] if len(held) == 1 else _concatenated(held)


def _concatenated(batches: list[Any]) -> Any:
    first = batches[0]
    if isinstance(first, Mapping):
        kind: Any = type(first)
        return kind({key: _concatenated([batch[key] for batch in batches]) for key in first})
    if isinstance(first, torch.Tensor) and first.ndim and len({batch.shape[1:] for batch in batches}) == 1:
        return torch.cat(batches)
    raise BadOption(
        "the train dataloader collates by itself, and the batches of one step cannot be joined: set "
        "gradient_accumulation_steps=1 with the whole step as per_device_train_batch_size, pad to one length, or use a "
        "torch DataLoader over rows"
    )


def size_of(value: Any) -> int | None:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return int(np.prod(value.shape)) if value.ndim else None
    return len(value) if isinstance(value, (list, tuple, str)) else None


T = TypeVar("T", bound=Trainer)
log = logging.getLogger("brimful")
IGNORED = -100
"""A label that no loss of transformers counts."""
_OURS = ("training_step", "get_batch_samples", "_get_num_items_in_batch")
"""What Trainer calls with batches, and this adapter with rows or not at all."""


def exact(
    trainer: type[T],
    *,
    plan: Plan | None = None,
    shape: Callable[[Any], Shape] | None = None,
    count: Callable[[Any], torch.Tensor | float] | None = None,
    on_event: Callable[[Event], object] | None = None,
    **options: Any,
) -> type[T]:
    """The same Trainer class, with steps that survive out-of-memory. Works on your own subclasses as well.

    `plan` (from `brimful.plan`) cuts by predicted bytes; without one the whole step is tried and the rest learnt. `shape`
    tells a row's lengths where its columns do not, `count` what the loss of a batch is a mean over where that is not its
    labels. `on_event` hears of every out-of-memory error. `options` are Stepper's: `micro_batch`, `skip_oversized`,
    `allow_inexact`, `grow_after`. The trainer has a `stepper` while it trains and after.
    """
    _check_class(trainer, options)
    settings = _Settings(plan, shape, count, {"on_event": on_event, **options})
    return type(f"Exact{trainer.__name__}", (_ExactTrainer, trainer), {"_brimful": settings})


@dataclass(frozen=True, slots=True)
class _Settings:
    """What `exact` was told."""

    plan: Plan | None
    shape: Callable[[Any], Shape] | None
    count: Callable[[Any], torch.Tensor | float] | None
    options: dict[str, Any]


class _ExactTrainer(Trainer):
    """Goes in front of a Trainer class."""

    _brimful: _Settings
    stepper: Stepper | None = None
    """The step behind `training_step`; `stepper.ooms` counts, `stepper.events` tells."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check_arguments(self)
        self._held: list[Any] = []
        self._ooms = 0

    def get_train_dataloader(self) -> DataLoader:
        with _undispatched(self.accelerator):
            return super().get_train_dataloader()

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """Trainer's own preparation, then ours: rows instead of batches, and the stepper."""
        with _no_gradient_wrapper(self.accelerator):
            model, loader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        assert self.optimizer is not None
        self._held, self._ooms = [], 0
        self._task = _TrainerTask(self, collate_later(loader), self._brimful)
        self.stepper = Stepper(
            model,
            self.optimizer,
            self._task,
            self._brimful.plan,
            scaler=self.accelerator.scaler,
            precision="fp32",  # autocast is open already: accelerate wrapped the model's forward in it
            rows_are="local",
            **self._brimful.options,
        )
        self._resume_stepper(resume_from_checkpoint)
        log.info(
            "each step has %d rows (%d × %d accumulated × %d processes), cut by memory and not by %d",
            self.get_total_train_batch_size(self.args),
            self._train_batch_size,
            self.args.gradient_accumulation_steps,
            self.args.world_size,
            self._train_batch_size,
        )
        return model, loader

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Keeps the rows, or trains on all that were kept. Returns the mean loss of the step, over all processes."""
        self._held.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        held, self._held = self._held, []
        model.train()
        if callable(to_train := getattr(self.optimizer, "train", None)):  # schedule-free optimizers have modes
            to_train()
        result = self._backward(joined(held))
        if self.args.torch_empty_cache_steps and self.state.global_step % self.args.torch_empty_cache_steps == 0:
            empty_cache(self.args.device)
        return torch.tensor(result.loss, device=self.args.device)

    def _backward(self, rows: Any) -> StepResult:
        assert self.stepper is not None
        self._task.lengths.settle(rows)
        try:
            return self.stepper.backward(rows)
        except InexactSplit as error:
            hint = "where the loss is a mean over something else than the labels, exact(…, count=…) tells over what"
            raise InexactSplit(f"{error}; {hint}") from None

    def _loss_of(self, model: nn.Module, batch: Any) -> Loss:
        """`compute_loss` of one micro-batch, as sum and count: its own mean times what that is a mean over.

        Whether a loss divides by `num_items_in_batch` or by what it finds itself, the result is that mean.
        """
        inputs = self._prepare_inputs(batch)
        count, items = self._count(inputs)
        with _whole_batch(self), self.compute_loss_context_manager():
            mean: Any = self.compute_loss(model, inputs, num_items_in_batch=items)
        mean = mean.to(torch.promote_types(mean.dtype, torch.float32))  # in fp16 a sum over 10,000 tokens is inf
        mean = torch.where(count > 0, mean, torch.zeros_like(mean))  # 0 / 0, in a loader's own batches
        return Loss(sum=mean * count, count=count)

    def _count(self, inputs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the loss of this batch is a mean over, and what `compute_loss` is told of it: as Trainer would, or None."""
        labels = _labels(inputs, shifted=self._loss_shifts_labels)
        if self._brimful.count is not None:
            count = self._brimful.count(inputs)
        else:
            count = _rows_of(inputs) if labels is None else labels.ne(IGNORED).sum()
        counted = torch.as_tensor(count, device=self.args.device)
        asked = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return counted, counted.clamp(min=1) if asked and labels is not None else None

    def floating_point_ops(self, inputs: Any) -> int:
        """As of the batch that Trainer would have had, padded to its longest row."""
        if not isinstance(inputs, HeldRows):
            return super().floating_point_ops(inputs)
        name = getattr(self.model, "main_input_name", "input_ids")
        sizes = [size_of(row[name]) if isinstance(row, Mapping) and name in row else None for row in inputs.rows]
        lengths = [size for size in sizes if size is not None]
        padded = torch.empty(len(lengths), max(lengths, default=0), device="meta")
        return super().floating_point_ops({name: padded} if lengths else {})

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Counts the batch that Trainer would have had; collated for that, where counting is asked for."""
        if isinstance(inputs, HeldRows) and self.args.include_num_input_tokens_seen != "no":
            before = RandomState(self.args.device)
            inputs = self._task.collate(inputs.rows)
            before.restore()
        super()._track_num_input_tokens(inputs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        to_log = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        if to_log and self.stepper is not None:  # as all processes do: Trainer gathers the loss here
            mine = torch.tensor([self.stepper.ooms], device=self.args.device)
            self._ooms = int(self.accelerator.gather(mine).sum())
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """With `brimful_ooms`, the out-of-memory errors survived on all processes, where there were any."""
        if self._ooms and "loss" in logs:
            logs["brimful_ooms"] = self._ooms
        super().log(logs, *args, **kwargs)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        with _out_of_reach(self):
            return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        with _out_of_reach(self):
            return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _save_rng_state(self, output_dir: str) -> None:
        """What the next cuts depend on belongs beside what the next random numbers depend on."""
        super()._save_rng_state(output_dir)
        if self.stepper is not None:
            state = {**self.stepper.state_dict(), "scaler": None}  # Trainer saves the scaler itself
            self._stepper_file(output_dir).write_text(json.dumps(state), encoding="utf-8")

    def _resume_stepper(self, checkpoint: str | None) -> None:
        assert self.stepper is not None
        if checkpoint is not None and self._stepper_file(checkpoint).is_file():
            self.stepper.load_state_dict(json.loads(self._stepper_file(checkpoint).read_text(encoding="utf-8")))
        self.stepper.steps = self.state.global_step  # a plain Trainer's checkpoint has no such file

    def _stepper_file(self, folder: str) -> Path:
        one_of_many = f"_{self.args.process_index}" if self.args.world_size > 1 else ""
        return Path(folder) / f"stepper_state{one_of_many}.json"


class _TrainerTask(Task):
    """What a Trainer trains, where a task is expected."""

    def __init__(self, trainer: _ExactTrainer, collate: Callable[[list[Any]], Any], settings: _Settings) -> None:
        self.name = type(trainer).__name__
        self._trainer, self._collate, self._settings = trainer, collate, settings
        self.lengths = Lengths(getattr(collate, "signature_columns", None), settings.shape, settings.plan)
        self._nothing_to_learn = False

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if self._nothing_to_learn and torch.is_grad_enabled():
            some = next(param for param in model.parameters() if param.requires_grad)
            return Loss(sum=0.0 * some.sum(), count=0.0)
        loss = self._trainer._loss_of(model, batch)
        if torch.is_grad_enabled() or not self._trainer.accelerator.native_amp or _is_double(model):
            return loss
        # A batch is compared with its halves, and accelerate's autocast is open: the dtype says how closely they can agree.
        return Loss(sum=loss.sum.bfloat16(), count=loss.count)

    def collate(self, rows: Sequence[Any]) -> Any:
        """Rows as your collator makes them a batch; without any label the mean of a small one would be 0 / 0."""
        batch = self._collate(list(rows))
        labels = _labels(batch, shifted=self._trainer._loss_shifts_labels)
        self._nothing_to_learn = False
        if labels is not None and self._settings.count is None and labels.device.type == "cpu":
            self._nothing_to_learn = not bool(labels.ne(IGNORED).any())
        return batch

    def shape(self, row: Any) -> Shape:
        return self.lengths.of(row)


def _is_double(model: nn.Module) -> bool:
    return next(param.dtype for param in model.parameters() if param.is_floating_point()) is torch.float64


def _rows_of(inputs: Any) -> int:
    for value in inputs.values() if isinstance(inputs, Mapping) else inputs:
        if isinstance(value, torch.Tensor) and value.ndim:
            return len(value)
    raise BadOption("a batch without tensors cannot be counted: tell what its loss is a mean over, exact(…, count=…)")


def _labels(inputs: Any, *, shifted: bool) -> torch.Tensor | None:
    """What Trainer counts; None where there is nothing to count (lists of boxes, no labels)."""
    given = inputs if isinstance(inputs, Mapping) else {}
    labels = given.get("shift_labels", given.get("labels"))
    if not isinstance(labels, torch.Tensor):
        return None
    return labels[..., 1:] if shifted and "shift_labels" not in given else labels


@contextlib.contextmanager
def _whole_batch(trainer: Trainer) -> Iterator[None]:
    """What a loss may ask for, as for one process with an accumulation of 1: the stepper scales, and nobody else."""
    args = trainer.args
    before = args.gradient_accumulation_steps, args.average_tokens_across_devices
    args.gradient_accumulation_steps, args.average_tokens_across_devices = 1, False
    trainer.current_gradient_accumulation_steps = 1
    try:
        yield
    finally:
        args.gradient_accumulation_steps, args.average_tokens_across_devices = before


@contextlib.contextmanager
def _undispatched(accelerator: Any) -> Iterator[None]:
    """A stream that only one process reads need not be collated to be dispatched."""
    config = accelerator.dataloader_config
    before = config.dispatch_batches
    if before is None and accelerator.num_processes == 1:
        config.dispatch_batches = False
    try:
        yield
    finally:
        config.dispatch_batches = before


@contextlib.contextmanager
def _no_gradient_wrapper(accelerator: Any) -> Iterator[None]:
    """Accelerate prepares the model without DDP: it would reduce inside backward, and hold a copy of all gradients."""
    prepare = accelerator.prepare_model

    def without(model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = True) -> nn.Module:
        return prepare(model, device_placement=device_placement, evaluation_mode=True)

    accelerator.prepare_model = without
    try:
        yield
    finally:
        del accelerator.prepare_model


@contextlib.contextmanager
def _out_of_reach(trainer: Trainer) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_oom(error):
            raise
        raise DoesNotFit(
            f"memory ran out in Trainer's own clipping, in step {trainer.state.global_step + 1}, which only Trainer could redo; no "
            f"weight was changed: resume from the last checkpoint in {trainer.args.output_dir}",
            needed_bytes=0,
        ) from error


def _check_class(trainer: Any, options: Mapping[str, Any]) -> None:
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        raise BadOption(f"exact takes a Trainer class, as in exact(Trainer)(model=…), not {trainer!r}")
    known = ("micro_batch", "skip_oversized", "allow_inexact", "grow_after")
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise BadOption(
            f"exact has no option {', '.join(unknown)}; it has plan, shape, count, on_event, {', '.join(known)}"
        )
    for name in _OURS:
        owner = next(base for base in trainer.__mro__ if name in vars(base))
        if owner is not Trainer:
            raise BadOption(
                f"{owner.__name__} overrides {name}, which exact replaces: move what it does into compute_loss or a callback"
            )


def _check_arguments(trainer: Trainer) -> None:
    args, mode = trainer.args, trainer.args.parallel_mode
    optim = str(getattr(args.optim, "value", args.optim))
    wrong = [
        message
        for bad, message in (
            (args.auto_find_batch_size, "auto_find_batch_size=True changes the global batch after an out-of-memory error; leave it out, the cut is found here"),
            (trainer.is_deepspeed_enabled, "DeepSpeed runs its own step; leave it out"),
            (trainer.is_fsdp_enabled or args.fsdp, "FSDP gathers weights inside the forward; leave it out"),
            (args.parallelism_config is not None, "parallelism_config splits one row over processes; leave it out"),
            (trainer.is_model_parallel, "the model lies on several devices (device_map); put it on one"),
            (args.n_gpu > 1, f"one process with {args.n_gpu} GPUs means DataParallel; start with torchrun --nproc-per-node {args.n_gpu}, or show it one GPU"),
            (mode not in (ParallelMode.NOT_PARALLEL, ParallelMode.NOT_DISTRIBUTED, ParallelMode.DISTRIBUTED), f"{mode.value} runs its own step"),
            (any(part in optim for part in ("lomo", "layerwise")), f"optim={optim!r} steps inside backward; use one that steps after it"),
        )
        if bad
    ]  # fmt: skip
    if wrong:
        raise BadOption(f"exact({type(trainer).__name__.removeprefix('Exact')}) does not work so: {'; '.join(wrong)}")
