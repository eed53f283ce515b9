"""Hugging Face `Trainer`, `Seq2SeqTrainer` and subclasses (TRL's too) with steps that survive out-of-memory. Two changed lines:

    from brimful.integrations.transformers import exact

    trainer = exact(Seq2SeqTrainer)(model=model, args=args, train_dataset=rows, data_collator=collator)

Everything else stays Trainer's: arguments, steps and epochs, schedule, callbacks, logs, evaluation, checkpoints, resuming.
Trainer calls `training_step` once per micro-batch. Here the loader returns uncollated rows, all but the last call of a step
only keep theirs, and the last one passes the whole step to `brimful.Stepper`, which splits it by length and memory. Without a
plan no micro-batch has more rows than `per_device_train_batch_size`, which is known to fit: all accumulated rows at once
took 2,673 MiB where 4 took 480. Trainer's counting, `gradient_accumulation_steps` included, does not change; only
`compute_loss` sees an accumulation of 1. Rows are collated in the training process instead of the loader's workers.

The result is that of the plain Trainer with the same global batch and an accumulation of 1: the mean of each micro-batch is
weighted by what it is a mean over (labels other than -100; rows if there are no labels). With accumulation the plain Trainer
gives the same only if the model uses `num_items_in_batch`. T5 accepts it without using it, so the plain Trainer's gradients
and logged loss are `gradient_accumulation_steps` times too large (19.8 instead of 4.94 at 4, transformers 5.22).

**Evaluation** collates late as well: a batch that does not fit is evaluated in halves, with its loss weighted by counts and its
outputs joined as Trainer joins those of batches (`preprocess_logits_for_metrics` sees the halves). If a single row does not fit
while training, this evaluation is left out with a warning; several processes stop instead.

**Numbers that the loss keeps** on the trainer, as TRL's do (`num_tokens`, `rewards/…`), count every row once: the exactness check
and failed attempts leave nothing, and a step adds one value, the mean of its micro-batches weighted as TRL weighs the rows or
tokens of one batch. TRL's SFT, DPO, KTO and reward trainers work in one process; `trl_losses.py` has what they need besides.

**Not covered** is what Trainer does once the gradients are there: an out-of-memory error in its clipping, in a callback or in
the optimizer ends the run as before. The bytes of the optimizer's step are reserved in advance.
"""

import contextlib
import functools
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
from transformers.trainer_pt_utils import nested_concat
from transformers.training_args import ParallelMode

from brimful.errors import BadOption, DoesNotFit, InexactSplit, UnsupportedModel
from brimful.integrations.loss_records import LossRecords
from brimful.integrations.trl_losses import (
    IGNORED,
    LENGTHS,
    Packs,
    WholeBatch,
    compares_rows,
    metric_weights,
)
from brimful.memory.forward import Halving
from brimful.memory.oom import OutOfMemory, attempt, empty_cache, is_oom
from brimful.memory.snapshot import RandomState
from brimful.planning.plan import Plan
from brimful.step.recovery import GROW_AFTER
from brimful.step.result import Event, StepResult
from brimful.step.stepper import Stepper, check_stepper_options
from brimful.task import Loss, Shape, Task

T = TypeVar("T", bound=Trainer)
logger = logging.getLogger("brimful")
_REPLACED = ("training_step", "get_batch_samples", "_get_num_items_in_batch")
"""Methods that Trainer calls with batches, and `exact` with rows or not at all."""


def exact(
    trainer: type[T],
    *,
    plan: Plan | None = None,
    shape: Callable[[Any], Shape] | None = None,
    count: Callable[[Any], torch.Tensor | float] | None = None,
    micro_batch: int | None = None,
    skip_oversized: bool = False,
    allow_inexact: bool = False,
    grow_after: int = GROW_AFTER,
    on_event: Callable[[Event], object] | None = None,
) -> type[T]:
    """The same Trainer class, with steps that survive out-of-memory.

    The trainer has a `stepper` while it trains and afterwards: `trainer.stepper.ooms`, `trainer.stepper.events`.

    Args:
        trainer: `Trainer` or a subclass of it.
        plan: From `brimful.plan`: split by predicted bytes.
        micro_batch: The most rows in a micro-batch. Default: with a plan what fits by its prediction, else
            `per_device_train_batch_size`, which you know to fit.
        shape: Returns the lengths of a row. Default: the lengths of its columns.
        count: Returns what the loss of a batch is a mean over. Default: its labels, else its rows.
        skip_oversized, allow_inexact, grow_after, on_event: As in `brimful.Stepper`.
    """
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        raise BadOption(f"exact() takes a Trainer class, not {trainer!r}. Try: exact(Trainer)(model=…).")
    for name in _REPLACED:
        owner = next(base for base in trainer.__mro__ if name in vars(base) and not _opens_only_offloading(base, name))
        if owner is not Trainer:
            raise BadOption(
                f"{owner.__name__} overrides {name}, which exact() replaces. Try: move it into compute_loss or a callback."
            )
    check_stepper_options(micro_batch=micro_batch, grow_after=grow_after, on_event=on_event, shape=shape, count=count)
    step_options = {
        "micro_batch": micro_batch,
        "skip_oversized": skip_oversized,
        "allow_inexact": allow_inexact,
        "grow_after": grow_after,
        "on_event": on_event,
    }
    settings = _Settings(plan, shape, count, step_options)
    return type(f"Exact{trainer.__name__}", (_ExactTrainer, trainer), {"_brimful": settings})


def _opens_only_offloading(base: type, name: str) -> bool:
    """Whether this is `training_step` of TRL's SFT, DPO, KTO or reward trainer, which is Trainer's without offloading."""
    names = set(vars(base)[name].__code__.co_names)
    return base.__module__.startswith("trl.") and names <= {
        "super",
        "training_step",
        "maybe_activation_offload_context",
    }


@dataclass(frozen=True, slots=True)
class _Settings:
    """The arguments of `exact`."""

    plan: Plan | None
    shape: Callable[[Any], Shape] | None
    count: Callable[[Any], torch.Tensor | float] | None
    step_options: dict[str, Any]


class _ExactTrainer(Trainer):
    """Comes before a Trainer class in the method resolution order."""

    _brimful: _Settings
    stepper: Stepper | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check_arguments(self, allow_inexact=self._brimful.step_options["allow_inexact"])
        self._waiting: list[Any] = []
        """What the calls of `training_step` brought for the step so far."""
        self._ooms_of_all = 0
        self._records = LossRecords(self)
        self._whole_batch = WholeBatch(self)
        self._packs = Packs(self.data_collator)
        self._halving = Halving(self.args.device)
        self._collate_rows: Callable[[list[Any]], Any] = list
        self._preprocess: Callable[[Any, Any], Any] | None = None

    def get_train_dataloader(self) -> DataLoader:
        with _undispatched(self.accelerator):
            return super().get_train_dataloader()

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """Trainer's preparation; then the loader returns rows, and the stepper is made."""
        with _no_gradient_wrapper(self.accelerator):
            model, loader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        assert self.optimizer is not None
        self._waiting, self._ooms_of_all, self._packs = [], 0, Packs(self.data_collator)
        self._task = _TrainerTask(self, _collate_later(loader), self._brimful)
        self.stepper = Stepper(
            model,
            self.optimizer,
            self._task,
            self._brimful.plan,
            scaler=self.accelerator.scaler,
            precision="fp32",  # accelerate has wrapped the model's forward in autocast
            rows_are="local",
            **self._brimful.step_options,
        )
        if resume_from_checkpoint is not None and (file := self._stepper_file(resume_from_checkpoint)).is_file():
            self.stepper.load_state_dict(json.loads(file.read_text(encoding="utf-8")))
        self.stepper.steps = self.state.global_step  # a plain Trainer's checkpoint has no such file
        logger.info(
            "each step has %d rows (%d × %d accumulated × %d processes), split by memory",
            self.get_total_train_batch_size(self.args),
            self._train_batch_size,
            self.args.gradient_accumulation_steps,
            self.args.world_size,
        )
        return model, loader

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Keeps the rows, or trains on all that were kept. Returns the mean loss of the step over all processes."""
        assert self.stepper is not None
        self._waiting.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        sizes = [_rows_of(inputs) for inputs in self._waiting]
        if self._brimful.plan is None and self._brimful.step_options["micro_batch"] is None:
            self.stepper.micro_batch = max(sizes)  # as large as Trainer's own would be
        rows, self._waiting = _join(self._waiting), []
        model.train()
        if callable(to_train := getattr(self.optimizer, "train", None)):  # schedule-free optimizers have modes
            to_train()
        self._task.lengths.choose_columns(rows)
        try:
            with self._whole_batch.of(model, rows, self._task.collate, self.stepper.micro_batch):
                self._records = LossRecords(self)
                result = self._backward(rows)
        except InexactSplit as error:
            raise InexactSplit(
                f"{str(error).removesuffix('.')}, or exact(…, micro_batch={sum(sizes)}) to run it whole, "
                "or exact(…, count=…) if the loss is not a mean over the labels."
            ) from None
        self._records.merge()
        if self.args.torch_empty_cache_steps and self.state.global_step % self.args.torch_empty_cache_steps == 0:
            empty_cache(self.args.device)
        return torch.tensor(result.loss, device=self.args.device)

    def _backward(self, rows: Any) -> StepResult:
        """The stepper's. A packed row that does not fit alone is cut between its documents, as are all from then on."""
        assert self.stepper is not None
        while True:
            try:
                return self.stepper.backward(self._packs.cut(rows))
            except DoesNotFit:
                if self.args.world_size > 1 or not self._packs.cut_finer(rows):
                    raise
            self.stepper.steps -= 1  # the same step again
            logger.warning(
                "step %d goes on: packed rows are now cut into up to %d parts, between their documents",
                self.stepper.steps + 1,
                self._packs.parts,
            )

    def _micro_batch_loss(self, model: nn.Module, batch: Any) -> Loss:
        """`compute_loss` of one micro-batch, times what it is a mean over.

        Whether a loss divides by `num_items_in_batch` or by its own count, the result is that mean.
        """
        inputs = self._prepare_inputs(batch)
        count, num_items = self._count(inputs)
        with self._records.of_call() as call, _accumulation_of_one(self), _no_collectives(self.accelerator):
            with self.compute_loss_context_manager(), self._whole_batch.in_loss(inputs) as known:
                mean: Any = self.compute_loss(model, known, num_items_in_batch=num_items)
            call.weight, call.weights = count, metric_weights(self, inputs)
        mean = mean.to(torch.promote_types(mean.dtype, torch.float32))  # in fp16 a sum over 10,000 tokens is inf
        mean = torch.where(count > 0, mean, torch.zeros_like(mean))  # 0 / 0, in batches that the loader collated
        return Loss(sum=mean * count, count=count)

    def _count(self, inputs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The count that the loss of this batch is a mean over, and the argument `compute_loss` gets for it, as in Trainer."""
        labels = _counted_labels(inputs, shifted=self._loss_shifts_labels)
        if self._brimful.count is not None:
            count = self._brimful.count(inputs)
        else:
            count = _rows_of(inputs) if labels is None else labels.ne(IGNORED).sum()
        number = torch.as_tensor(count, device=self.args.device)
        passes_count = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return number, number.clamp(min=1) if passes_count and labels is not None else None

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Trainer's. Rows are collated late, so that those of a batch can be evaluated in halves.

        If there is no memory for the predictions of all batches, they are kept on the host, as with `eval_accumulation_steps=1`.
        """
        self._halving.begin_pass()
        run = functools.partial(super().evaluation_loop, dataloader, *args, **kwargs)
        inner = getattr(dataloader, "base_dataloader", dataloader)
        trainers_own = next(base for base in type(self).__mro__[2:] if "evaluation_loop" in vars(base)) is Trainer
        counted = isinstance(inner, DataLoader) and hasattr(inner.dataset, "__len__")  # else Trainer counts the rows
        if not trainers_own or not counted or self.args.batch_eval_metrics or "inputs" in self.args.include_for_metrics:
            return run()
        collate, on_device = inner.collate_fn, self.args.eval_accumulation_steps is None
        preprocess = self.preprocess_logits_for_metrics
        self._collate_rows = _collate_later(dataloader)
        if self.args.world_size == 1:  # for each part, before logits are joined; else Trainer pads them first
            self._preprocess, self.preprocess_logits_for_metrics = preprocess, None
        try:
            if self.compute_metrics is None or not on_device or self.args.world_size > 1:
                return run()
            output = self._attempt_evaluation(run)
            if isinstance(output, OutOfMemory):
                logger.warning("evaluation: out of memory, so the predictions of each batch are moved to the host")
                self.args.eval_accumulation_steps = 1
                output = run()
            return output
        finally:
            inner.collate_fn = collate
            self._preprocess, self.preprocess_logits_for_metrics = None, preprocess
            if on_device:
                self.args.eval_accumulation_steps = None

    def _attempt_evaluation(self, run: Callable[[], Any]) -> Any:
        """What `run` returns, or `OutOfMemory` with everything as before it."""
        records, state = LossRecords(self), self.accelerator.gradient_state
        loaders = state.dataloader_references
        try:
            outcome = attempt(run, self.args.device)
        except DoesNotFit as error:
            outcome = OutOfMemory(str(error))
        if isinstance(outcome, OutOfMemory):
            records.restart()
            state.dataloader_references = loaders  # accelerate's loader did not come to its end
        return outcome

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **kwargs: Any
    ) -> tuple[Any, Any, Any]:
        """Of the whole batch, or of its parts if it does not fit: their losses weighted by counts, their outputs joined."""
        predict = functools.partial(super().prediction_step, model)
        arguments = {"prediction_loss_only": prediction_loss_only, "ignore_keys": ignore_keys, **kwargs}
        if not isinstance(inputs, _Uncollated):
            return predict(inputs, **arguments)
        rows, records, collate = inputs.rows, LossRecords(self), _collate_copies(self._collate_rows)
        items, total = None, torch.ones(())
        if self.args.world_size > 1:  # what all processes counted is asked for once, before any of them may fail
            whole: Any = collate(rows)
            items, total = (
                super()._get_num_items_in_batch([whole], self.args.device),
                self._count(whole)[0].clamp(min=1),
            )

        def run(part: range) -> tuple[torch.Tensor, Any]:
            batch: Any = collate([rows[index] for index in part])
            count = self._count(batch)[0]
            counted = contextlib.nullcontext() if items is None else _items_in_batch(self, items * (count / total))
            with records.of_call() as call, counted, self._whole_batch.in_loss(batch) as known:
                call.weight, call.weights = count, metric_weights(self, batch)
                loss, logits, labels = predict(known, **arguments)
            if logits is not None and self._preprocess is not None:
                logits = self._preprocess(logits, labels)
            return count, (loss, logits, labels)

        results = []
        with self._whole_batch.of(model, rows, collate, None):
            for _, result in self._halving.run(len(rows), run):
                if isinstance(result, OutOfMemory):
                    raise DoesNotFit(
                        "evaluation: one row does not fit in the memory that is left. Try: shorter rows, or more memory.",
                        needed_bytes=0,
                    )
                results.append(result)
        records.merge()
        return _join_predictions(results)

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """While training. Without memory for a single row, this evaluation is left out."""
        if self.args.world_size > 1:  # the others would wait for this process
            return super()._evaluate(*args, **kwargs)
        metrics = self._attempt_evaluation(functools.partial(super()._evaluate, *args, **kwargs))
        if not isinstance(metrics, OutOfMemory):
            return metrics
        logger.warning(
            "step %d: this evaluation is left out, since memory ran out. Try: shorter rows in eval_dataset, or more memory. (%s)",
            self.state.global_step,
            metrics.message.splitlines()[0],
        )
        return {}

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        return bool(metrics) and super()._determine_best_metric(metrics, trial)

    def floating_point_ops(self, inputs: Any) -> int:
        """Of the batch that Trainer would have had, padded to its longest row."""
        if not isinstance(inputs, _Uncollated):
            return super().floating_point_ops(inputs)
        name = getattr(self.model, "main_input_name", "input_ids")
        sizes = [_size_of(row[name]) if isinstance(row, Mapping) and name in row else None for row in inputs.rows]
        lengths = [size for size in sizes if size is not None]
        padded = torch.empty(len(lengths), max(lengths, default=0), device="meta")
        return super().floating_point_ops({name: padded} if lengths else {})

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Of the batch that Trainer would have had, which is collated only if tokens are counted."""
        if isinstance(inputs, _Uncollated) and self.args.include_num_input_tokens_seen != "no":
            random_state = RandomState(self.args.device)
            inputs = self._task.collate(inputs.rows)
            random_state.restore()
        super()._track_num_input_tokens(inputs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        will_log = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        if will_log and self.stepper is not None:  # on all processes: Trainer gathers the loss here
            own = torch.tensor([self.stepper.ooms], device=self.args.device)
            self._ooms_of_all = int(self.accelerator.gather(own).sum())
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """With `brimful_ooms`, the out-of-memory errors of all processes, if there were any."""
        if self._ooms_of_all and "loss" in logs:
            logs["brimful_ooms"] = self._ooms_of_all
        super().log(logs, *args, **kwargs)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        with _explained_oom(self):
            return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        with _explained_oom(self):
            return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _save_rng_state(self, output_dir: str) -> None:
        """The state of the stepper is saved beside the random state."""
        super()._save_rng_state(output_dir)
        if self.stepper is not None:
            state = {**self.stepper.state_dict(), "scaler": None}  # Trainer saves the scaler itself
            self._stepper_file(output_dir).write_text(json.dumps(state), encoding="utf-8")

    def _stepper_file(self, folder: str) -> Path:
        rank = f"_{self.args.process_index}" if self.args.world_size > 1 else ""
        return Path(folder) / f"stepper_state{rank}.json"


class _TrainerTask(Task):
    """What a Trainer trains, as a task."""

    def __init__(self, trainer: _ExactTrainer, collate: Callable[[list[Any]], Any], settings: _Settings) -> None:
        super().__init__()
        self.name = type(trainer).__name__
        self._trainer, self._collate, self._settings = trainer, _collate_copies(collate), settings
        self.lengths = _Lengths(getattr(collate, "signature_columns", None), settings.shape, settings.plan)
        self._all_masked = False

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if torch.is_grad_enabled() and all(param.grad is None for param in model.parameters()):
            self._trainer._records.restart()  # every attempt begins without gradients
        if self._all_masked and torch.is_grad_enabled():
            param = next(param for param in model.parameters() if param.requires_grad)
            return Loss(sum=0.0 * param.sum(), count=0.0)
        loss = self._trainer._micro_batch_loss(model, batch)
        weights = next(param.dtype for param in model.parameters() if param.is_floating_point())
        if torch.is_grad_enabled() or not self._trainer.accelerator.native_amp or weights is torch.float64:
            return loss
        # The exactness check runs under accelerate's autocast, and takes from the dtype how closely halves can agree.
        return Loss(sum=loss.sum.bfloat16(), count=loss.count)

    def collate(self, rows: Sequence[Any]) -> Any:
        """Your collator's batch. Without any label the mean of a small one would be 0 / 0, so that is noticed here."""
        batch = self._collate(rows)
        labels = _counted_labels(batch, shifted=self._trainer._loss_shifts_labels)
        self._all_masked = False
        if labels is not None and self._settings.count is None and labels.device.type == "cpu":
            self._all_masked = not bool(labels.ne(IGNORED).any())
        return batch

    def shape(self, row: Any) -> Shape:
        return self.lengths.of(row)


class _Lengths:
    """The lengths of a row: those of its columns, without columns that are as long as an earlier one in every row."""

    def __init__(self, columns: Sequence[str] | None, shape: Callable[[Any], Shape] | None, plan: Plan | None) -> None:
        self._used, self._shape, self._plan = columns, shape, plan
        self._columns: list[Any] | None = None

    def of(self, row: Any) -> Shape:
        if self._shape is not None:
            return tuple(self._shape(row))
        sizes = self._sizes(row)
        return tuple(sizes.get(column, 0) for column in self._columns or sizes)

    def choose_columns(self, rows: Any) -> None:
        """Once, from the rows of the first step, since the limit on micro-batches depends on the columns."""
        if self._columns is not None or self._shape is not None or not isinstance(rows, list):
            return
        sizes = [self._sizes(row) for row in rows]
        first: dict[tuple[int, ...], Any] = {}
        for column in dict.fromkeys(column for row in sizes for column in row):
            first.setdefault(tuple(row.get(column, 0) for row in sizes), column)
        self._columns = list(first.values())
        if self._plan is not None and len(self._plan.shape) != len(self._columns):
            names = ", ".join(map(str, self._columns)) or "none"
            raise BadOption(
                f"the plan has rows with {len(self._plan.shape)} lengths, but these rows have {len(self._columns)} ({names}). "
                "Try: exact(…, plan=plan, shape=task.shape) with the planned task."
            )

    def _sizes(self, row: Any) -> dict[Any, int]:
        if isinstance(row, Mapping):
            values = {key: row[key] for key in row if key != LENGTHS and (self._used is None or key in self._used)}
        else:
            values = dict(enumerate(row)) if isinstance(row, (list, tuple)) else {0: row}
        sizes = {key: _size_of(value) for key, value in values.items()}
        return {key: size for key, size in sizes.items() if size is not None}


def _size_of(value: Any) -> int | None:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return int(np.prod(value.shape)) if value.ndim else None
    return len(value) if isinstance(value, (list, tuple, str)) else None


class _Uncollated:
    """Rows on their way through Trainer. accelerate sees no tensors to move to the device."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __contains__(self, name: object) -> bool:
        return False  # Trainer looks for labels to count


class _Later:
    """A loader's collate function that leaves collating to the stepper."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: list[Any]) -> _Uncollated:
        return _Uncollated(rows)


def _collate_later(loader: Any) -> Callable[[list[Any]], Any]:
    """Make the loader return rows, and return its collate function. A loader that cannot is left as it is."""
    inner = getattr(loader, "base_dataloader", loader)  # inside accelerate's
    if isinstance(loader, DataLoaderDispatcher) or not isinstance(inner, DataLoader) or not inner._auto_collation:
        return list
    if not isinstance(inner.collate_fn, _Later):  # the user's own loader may come a second time
        inner.collate_fn = _Later(inner.collate_fn)
    return inner.collate_fn.collate


def _collate_copies(collate: Callable[[list[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    """Collates copies of the rows: a row may be collated several times, and TRL's collators for images change it."""
    return lambda rows: collate([dict(row) if type(row) is dict else row for row in rows])


def _join(inputs: list[Any]) -> Any:
    """What the calls of one step brought, as one list of rows, or as one batch if the loader collates."""
    if all(isinstance(one, _Uncollated) for one in inputs):
        return [row for one in inputs for row in one.rows]
    return inputs[0] if len(inputs) == 1 else _concatenate(inputs)


def _concatenate(batches: list[Any]) -> Any:
    first = batches[0]
    if isinstance(first, Mapping):
        kind: Any = type(first)
        return kind({key: _concatenate([batch[key] for batch in batches]) for key in first})
    if isinstance(first, torch.Tensor) and first.ndim and len({batch.shape[1:] for batch in batches}) == 1:
        return torch.cat(batches)
    raise BadOption(
        "the train dataloader collates by itself, and the batches of one step cannot be joined. Try: "
        "gradient_accumulation_steps=1 with a larger per_device_train_batch_size, or a torch DataLoader over rows."
    )


def _rows_of(inputs: Any) -> int:
    if isinstance(inputs, _Uncollated):
        return len(inputs.rows)
    for value in inputs.values() if isinstance(inputs, Mapping) else inputs:
        if isinstance(value, torch.Tensor) and value.ndim:
            return len(value)
    raise BadOption("the rows of a batch without tensors cannot be counted. Try: exact(…, count=…).")


def _counted_labels(inputs: Any, *, shifted: bool) -> torch.Tensor | None:
    """The labels that Trainer counts; None if there are none, or if they are no tensor (lists of boxes)."""
    mapping = inputs if isinstance(inputs, Mapping) else {}
    labels = mapping.get("shift_labels", mapping.get("labels"))
    if not isinstance(labels, torch.Tensor):
        return None
    return labels[..., 1:] if shifted and "shift_labels" not in mapping else labels


@contextlib.contextmanager
def _accumulation_of_one(trainer: Trainer) -> Iterator[None]:
    """What a loss may read, as for one process with an accumulation of 1, since the stepper does all the scaling."""
    args = trainer.args
    before = args.gradient_accumulation_steps, args.average_tokens_across_devices
    args.gradient_accumulation_steps, args.average_tokens_across_devices = 1, False
    trainer.current_gradient_accumulation_steps = 1
    try:
        yield
    finally:
        args.gradient_accumulation_steps, args.average_tokens_across_devices = before


@contextlib.contextmanager
def _no_collectives(accelerator: Any) -> Iterator[None]:
    """A process that runs out of memory calls the loss more often than the others, which would wait for it."""
    if accelerator.num_processes == 1:
        yield
        return

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedModel(
            "compute_loss gathers values of all processes, as TRL's does, which a repeated micro-batch cannot. "
            "Try: one process."
        )

    accelerator.gather = accelerator.reduce = refuse
    try:
        yield
    finally:
        del accelerator.gather, accelerator.reduce


@contextlib.contextmanager
def _items_in_batch(trainer: Any, items: Any) -> Iterator[None]:
    """What Trainer would count, and over all processes ask the others for."""
    trainer._get_num_items_in_batch = lambda *_: items
    try:
        yield
    finally:
        del trainer._get_num_items_in_batch


def _join_predictions(results: list[tuple[torch.Tensor, tuple[Any, Any, Any]]]) -> tuple[Any, Any, Any]:
    """Loss, outputs and labels of a batch from those of its parts, padded as Trainer pads those of batches."""
    if len(results) == 1:
        return results[0][1]
    counts = torch.stack([count for count, _ in results])
    losses, outputs, labels = zip(*(prediction for _, prediction in results), strict=True)
    loss = None
    if losses[0] is not None:
        means = torch.stack([mean.detach() for mean in losses])
        loss = (torch.where(counts > 0, means, 0.0) * counts).sum() / counts.sum()
    return loss, _concatenated(outputs), _concatenated(labels)


def _concatenated(parts: Sequence[Any]) -> Any:
    return None if parts[0] is None else functools.reduce(nested_concat, parts)


@contextlib.contextmanager
def _undispatched(accelerator: Any) -> Iterator[None]:
    """A stream that only one process reads is not collated to be dispatched."""
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
    """Prepare the model without DDP, which would reduce inside backward and hold a copy of all gradients."""
    prepare = accelerator.prepare_model

    def without(model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = True) -> nn.Module:
        return prepare(model, device_placement=device_placement, evaluation_mode=True)

    accelerator.prepare_model = without
    try:
        yield
    finally:
        del accelerator.prepare_model


@contextlib.contextmanager
def _explained_oom(trainer: Trainer) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_oom(error):
            raise
        raise DoesNotFit(
            f"memory ran out in Trainer's clipping in step {trainer.state.global_step + 1}, which cannot be repeated; no weight was "
            f"changed. Try: resume from the last checkpoint in {trainer.args.output_dir}.",
            needed_bytes=0,
        ) from error


def _check_arguments(trainer: Trainer, *, allow_inexact: bool) -> None:
    args, mode = trainer.args, trainer.args.parallel_mode
    optim = str(getattr(args.optim, "value", args.optim))
    problems = [
        message
        for wrong, message in (
            (args.auto_find_batch_size, "auto_find_batch_size=True changes the global batch after an error; omit it"),
            (trainer.is_deepspeed_enabled, "DeepSpeed runs its own step; omit it"),
            (trainer.is_fsdp_enabled or args.fsdp, "FSDP gathers weights inside the forward; omit it"),
            (args.parallelism_config is not None, "parallelism_config splits one row over processes; omit it"),
            (trainer.is_model_parallel, "the model is on several devices (device_map); put it on one"),
            (getattr(args, "activation_offloading", False), "activation_offloading=True keeps state between micro-batches; omit it"),
            (args.n_gpu > 1, f"one process with {args.n_gpu} GPUs means DataParallel; use torchrun --nproc-per-node {args.n_gpu}"),
            (mode not in (ParallelMode.NOT_PARALLEL, ParallelMode.NOT_DISTRIBUTED, ParallelMode.DISTRIBUTED), f"{mode.value} runs its own step"),
            (any(part in optim for part in ("lomo", "layerwise")), f"optim={optim!r} steps inside backward; use one that steps after it"),
        )
        if wrong
    ]  # fmt: skip
    problems += [] if allow_inexact else compares_rows(trainer)
    if problems:
        name = type(trainer).__name__.removeprefix("Exact")
        raise BadOption(f"exact({name}) does not work with these arguments: {'; '.join(problems)}.")
