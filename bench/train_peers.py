"""The trainers that `train.py` compares, each driven as its own documentation shows, and the clock they all run against.

**hf**         `Seq2SeqTrainer` (`Trainer` for a causal model) with the model's own loss. Its options are those of
               `TrainingArguments`, with `batch` for the batch size. `group_by_length` is spelt as the installed version wants
               it, and `cudnn_attention=False` switches torch's cuDNN attention off, which prepares for every new shape.
**lightning**  `Trainer.fit` with `accumulate_grad_batches`, the mean loss returned from `training_step`.
**brimful**    `brimful.train`, which plans, trains and writes its events as always. Its options are that function's.

All have the same model from the same seed, AdamW (fused on a GPU, no weight decay) at a constant rate of 1e-4, gradients
clipped to 1, bf16 autocast on a GPU, and the rows in the same order, so that step n is over the same rows. Grouping by length
is the exception: it draws its own order.
"""

import contextlib
import functools
import inspect
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, SequentialSampler

import brimful
from brimful.memory.layout import PackedLayout
from brimful.task import IGNORED
from peers import _import_lightning
from train_cases import Case, Stream

LEARNING_RATE, CLIP = 1e-4, 1.0
WARMUP_STEPS = 3
"""Steps that never count as warm, if there are more. Beyond that the second half of the steps counts."""


class Enough(BaseException):
    """Ends a training. No `Exception`, so that nothing on the way handles, retries or saves."""


class Overdue(BaseException):
    """Ends a training in the middle of a step that takes too long."""


@dataclass
class StepRecord:
    """One optimizer step, as a trainer reported it. Tensors may still be on the device: nothing waits for them."""

    end: Any = None
    """A CUDA event, or seconds."""
    lengths: list[Any] = field(default_factory=list)
    """By micro-batch, the real lengths of its rows, one line per row."""
    computed: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Rows as the model computes them, padding included: how many of which lengths."""
    micro_batches: int = 0
    loss_sums: list[Any] = field(default_factory=list)
    counts: list[Any] = field(default_factory=list)


@dataclass
class Clock:
    """Times the optimizer steps of one training without making it wait, and says when it has gone on long enough.

    On a GPU the end of a step is an event in the stream, so host and device overlap as they would without a clock.
    """

    device: torch.device
    steps: int
    """Steps of the whole training."""
    seconds: float
    """From here on, counted from `created`, no further step is begun."""
    warm_seconds: float | None = None
    """The same, counted from the end of the first step, so that slow compilers and quick ones are measured for as long."""
    created: float = field(default_factory=time.perf_counter)
    peak_bytes: int = 0
    reserved_bytes: int = 0
    done: list[StepRecord] = field(default_factory=list)
    attempts: int = 0
    _current: StepRecord = field(default_factory=StepRecord)
    _begin: Any = None
    _begin_s: float = 0.0
    _warm_s: float = 0.0

    def begin(self) -> None:
        """The first step comes next. A trainer that starts over calls it again, and its steps so far do not count."""
        self.done, self._current = [], StepRecord()
        self.attempts += 1
        self.peak_bytes = self.reserved_bytes = 0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self._begin, self._begin_s = self._now(), time.perf_counter()

    def micro_batch(self, batch: Any, loss_sum: torch.Tensor, count: torch.Tensor, *, causal: bool) -> None:
        """A padded micro-batch of a peer."""
        source = batch["attention_mask"].sum(1)
        target = None if causal else (batch["labels"] != IGNORED).sum(1)
        shape = (batch["input_ids"].shape[1], *(() if causal else (batch["labels"].shape[1],)))
        self.rows(source[:, None] if target is None else torch.stack((source, target), 1))
        self.computed([(len(source), shape)])
        self._current.loss_sums.append(loss_sum.detach())
        self._current.counts.append(count)

    def rows(self, lengths: Any) -> None:
        """Rows that are part of this step, by their real lengths."""
        self._current.lengths.append(lengths)

    def computed(self, rows: list[tuple[int, tuple[int, ...]]]) -> None:
        """A micro-batch as the model computes it, padding included: how many rows of which lengths."""
        self._current.computed += rows
        self._current.micro_batches += 1

    def step(self, loss: float | None = None) -> bool:
        """A step has ended. True if the training should end as well."""
        record, self._current = self._current, StepRecord()
        record.end = self._now()
        if loss is not None:
            record.loss_sums, record.counts = [loss], [1.0]
        self.done.append(record)
        if self.device.type == "cuda":
            found = torch.cuda.memory_stats(self.device)
            self.peak_bytes = max(self.peak_bytes, found["allocated_bytes.all.peak"])
            self.reserved_bytes = max(self.reserved_bytes, found["reserved_bytes.all.peak"])
        if len(self.done) == 1:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # the host may be ahead; the first step is never a warm one
            self._warm_s = time.perf_counter()
        now = time.perf_counter()
        warm = self.warm_seconds is not None and now - self._warm_s > self.warm_seconds
        return len(self.done) >= self.steps or now - self.created > self.seconds or warm

    def figures(self, case: Case, ceiling: float | None) -> dict[str, Any]:
        """Everything about the steps that were done; there must be one."""
        ends = np.array([self._elapsed(record.end) for record in self.done])
        step_s = np.diff(ends, prepend=0.0)
        lengths = [_stacked(record.lengths) for record in self.done]
        rows, tokens = np.array([len(one) for one in lengths]), np.array([int(one.sum()) for one in lengths])
        useful = np.array([case.flops(one) for one in lengths])
        counts, shapes = zip(*(_counts_and_shapes(record) for record in self.done), strict=True)
        computed = [case.flops(np.repeat(shape, count, axis=0)) for count, shape in zip(counts, shapes, strict=True)]
        computed_tokens = sum(int(count @ shape.sum(axis=1)) for count, shape in zip(counts, shapes, strict=True))
        warm = slice(min(len(ends) - 1, max(WARMUP_STEPS, len(ends) // 2)), None)
        rate = lambda amount: float(np.median((np.asarray(amount) / step_s)[warm]))  # noqa: E731
        share = lambda flops: rate(flops) / ceiling if ceiling and all(flops) else None  # noqa: E731
        start_s = self._begin_s - self.created
        missing = max(0, self.steps - len(ends))
        return {
            "steps": len(ends),
            "warm_steps": len(step_s[warm]),
            "rows_per_step": int(np.median(rows)),
            "rows_per_s": rate(rows),
            "rows_per_s_mean": float(rows[warm].sum() / step_s[warm].sum()),
            "tokens_per_s": rate(tokens),
            "start_s": start_s,
            "first_step_s": float(step_s[0]),
            "run_steps": self.steps,
            "run_s": start_s + float(ends[-1]) + missing * float(np.median(step_s[warm])),
            "run_s_extrapolated": bool(missing),
            "peak_bytes": self.peak_bytes or None,
            "reserved_bytes": self.reserved_bytes or None,
            "micro_batches": statistics.median(record.micro_batches for record in self.done),
            "real_tokens": int(tokens.sum()),
            "computed_tokens": computed_tokens,
            "padding": 1 - int(tokens.sum()) / computed_tokens if computed_tokens else None,
            "useful_flops_per_s": rate(useful),
            "useful_share": share(useful),
            "computed_share": share(computed),
            "attempts": self.attempts,
            "step_s": [round(float(one), 5) for one in step_s],
            "loss": [_mean_loss(record) for record in self.done],
        }

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _elapsed(self, end: Any) -> float:
        if self.device.type != "cuda":
            return end - self._begin
        end.synchronize()
        return self._begin.elapsed_time(end) / 1000


def _stacked(parts: list[Any]) -> np.ndarray:
    return np.concatenate(
        [part.cpu().numpy() if isinstance(part, torch.Tensor) else np.asarray(part) for part in parts]
    )


def _counts_and_shapes(record: StepRecord) -> tuple[np.ndarray, np.ndarray]:
    counts, shapes = zip(*record.computed, strict=True)
    return np.array(counts), np.array(shapes)


def _mean_loss(record: StepRecord) -> float:
    return round(float(sum(record.loss_sums)) / float(sum(record.counts)), 6)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What every trainer gets."""

    case: Case
    options: dict[str, Any]
    """The trainer's own, from the table of entries."""
    clock: Clock
    seed: int
    cap_bytes: int | None
    workers: int
    """Loader workers of the peers. Brimful chooses its own."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Further facts for the result."""

    @property
    def device(self) -> torch.device:
        return self.clock.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def build(self) -> tuple[Any, torch.optim.Optimizer]:
        """Model and optimizer as `brimful.train` makes them."""
        torch.manual_seed(self.seed)
        model = self.case.task().initial_model().to(self.device).train()
        trainable = [param for param in model.parameters() if param.requires_grad]
        return model, torch.optim.AdamW(trainable, lr=LEARNING_RATE, weight_decay=0.0, fused=self.on_gpu or None)

    def stream(self) -> Stream:
        return Stream(self.case, self.clock.steps, self.seed)

    def batch_size(self, wanted: int) -> int:
        """As in the table; in a dry run, with its smaller steps, in proportion."""
        return max(1, wanted * self.case.global_batch // 256) if self.case.tiny else wanted


def train_with_hf(training: Training) -> None:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    case, clock = training.case, training.clock
    Base, Arguments = (Trainer, TrainingArguments) if case.causal else (Seq2SeqTrainer, Seq2SeqTrainingArguments)
    options = dict(training.options)
    grouped = options.pop("group_by_length", False)
    torch.backends.cuda.enable_cudnn_sdp(options.pop("cudnn_attention", True))
    batch = training.batch_size(options.pop("batch"))
    if grouped:
        known = inspect.signature(Arguments.__init__).parameters
        options |= {"group_by_length": True} if "group_by_length" in known else {"train_sampling_strategy": "group_by_length"}  # fmt: skip

    class Timed(Base):  # type: ignore[misc,valid-type]
        def _get_train_sampler(self, *args: Any) -> Any:
            return super()._get_train_sampler(*args) if grouped else SequentialSampler(self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **more: Any) -> Any:  # fmt: skip
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch, **more)
            count = (inputs["labels"][:, int(case.causal) :] != IGNORED).sum()
            is_sum = case.causal and num_items_in_batch is not None  # T5 ignores it and always returns a mean
            clock.micro_batch(inputs, loss.detach() * (num_items_in_batch if is_sum else count), count, causal=case.causal)  # fmt: skip
            return loss

    class Ticks(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if clock.step():
                raise Enough

    model, optimizer = training.build()
    with tempfile.TemporaryDirectory(prefix="bench-train-") as folder:
        arguments = Arguments(
            output_dir=folder, max_steps=clock.steps, per_device_train_batch_size=batch,
            gradient_accumulation_steps=case.global_batch // batch, learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant", max_grad_norm=CLIP, bf16=training.on_gpu, use_cpu=not training.on_gpu,
            seed=training.seed, remove_unused_columns=False, save_strategy="no", logging_strategy="no", report_to=[],
            disable_tqdm=True, dataloader_num_workers=training.workers, **options,
        )  # fmt: skip
        trainer = Timed(
            model=model, args=arguments, train_dataset=training.stream(), data_collator=case.task().collate,
            optimizers=(optimizer, None), callbacks=[Ticks()],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        except Enough:
            pass
        finally:
            training.notes["batch"] = trainer._train_batch_size


def train_with_lightning(training: Training) -> None:
    lightning = _import_lightning()
    case, clock = training.case, training.clock
    batch = training.batch_size(training.options["batch"])
    model, optimizer = training.build()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def on_train_start(self) -> None:
            clock.begin()

        def training_step(self, inputs: Any, _: int) -> torch.Tensor:
            loss = self.model(**inputs).loss
            count = (inputs["labels"][:, int(case.causal) :] != IGNORED).sum()
            clock.micro_batch(inputs, loss.detach() * count, count, causal=case.causal)
            return loss

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            if clock.step():
                raise Enough

        def configure_gradient_clipping(
            self, *_: Any, **__: Any
        ) -> None:  # `gradient_clip_val` refuses a fused optimizer
            torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP)

        def configure_optimizers(self) -> Any:
            return optimizer

    loader: Any = DataLoader(
        training.stream(), batch_size=batch, collate_fn=case.task().collate, num_workers=training.workers,
        pin_memory=training.on_gpu,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bench-train-") as folder:
        trainer = lightning.Trainer(
            max_steps=clock.steps, accumulate_grad_batches=case.global_batch // batch,
            precision="bf16-mixed" if training.on_gpu else "32-true", accelerator="gpu" if training.on_gpu else "cpu",
            devices=[training.device.index or 0] if training.on_gpu else 1, default_root_dir=folder, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        with contextlib.suppress(Enough):
            trainer.fit(Module(), loader)


def train_with_brimful(training: Training) -> None:
    case, clock, events = training.case, training.clock, []
    ticks = _Ticks(clock, case)
    request: dict[str, Any] = {
        "max_steps": clock.steps, "lr": LEARNING_RATE, "weight_decay": 0.0, "schedule": "constant", "warmup": 0,
        "clip_norm": CLIP, "global_batch": case.global_batch, "memory_limit": training.cap_bytes,
        "precision": "bf16" if training.on_gpu else "fp32", "device": str(training.device), "seed": training.seed,
        "cache": False, "quiet": True, "hooks": [ticks], "listeners": [events.append],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bench-train-") as folder:
        try:
            brimful.train(case.task(), case.store, run=Path(folder) / "run", **{**request, **training.options})
        except Enough:
            pass
        finally:
            training.notes.update(_planned(events), **ticks.peaks)


class _Ticks(brimful.Hook):
    def __init__(self, clock: Clock, case: Case) -> None:
        self.clock, self.case, self.rows = clock, case, None
        self._predicted_bytes = self._measured_bytes = 0

    def before(self, loop: Any) -> None:
        step = loop.stepper.step

        @functools.wraps(step)
        def noted(rows: Any, *more: Any) -> Any:
            self.rows = rows
            return step(rows, *more)

        loop.stepper.step = noted
        self.clock.begin()

    def after_step(self, loop: Any, result: Any) -> None:
        """Counts what the loader proposed; a step that was split further after an OOM was padded a little less."""
        rows, plan = self.rows, loop.stepper.plan
        assert rows is not None
        lengths, whole, layout = self.case.store.shapes(rows.indices), len(rows.groups) == 1, plan.row_layout
        self.clock.rows(lengths)
        for group, shape in zip(rows.groups, rows.shapes, strict=True):
            packed = plan.layout == "packed"
            self.clock.computed(_packed_rows(lengths[group], layout) if packed else [(len(group), tuple(shape))])
            if result.peak_bytes and not result.ooms:
                predicted = plan.memory_model.peak_bytes(len(group), tuple(shape), whole=whole)
                self._predicted_bytes = max(self._predicted_bytes, predicted)
        if not result.ooms:
            self._measured_bytes = max(self._measured_bytes, result.peak_bytes or 0)
        if self.clock.step(result.loss):
            raise Enough

    @property
    def peaks(self) -> dict[str, Any]:
        """The highest peak of the steps without an error: predicted by the plan's model for their rows, and measured."""
        measured, predicted = self._measured_bytes or None, self._predicted_bytes or None
        error = predicted / measured - 1 if measured and predicted else None
        return {"predicted_peak_bytes": predicted, "step_peak_bytes": measured, "prediction_error": error}


def _packed_rows(lengths: np.ndarray, layout: PackedLayout) -> list[tuple[int, tuple[int, ...]]]:
    """The rows of a packed micro-batch and its fill, which attends to nothing: it counts as rows of one token."""
    fill = np.array(layout.sizes([tuple(row) for row in lengths.tolist()])) - lengths.sum(axis=0)
    single_tokens = np.eye(len(fill), dtype=int).tolist()
    rows = [(1, tuple(row)) for row in lengths.tolist()]
    return rows + [(int(count), tuple(one)) for count, one in zip(fill, single_tokens, strict=True)]


def _planned(events: list[dict[str, Any]]) -> dict[str, Any]:
    plan = next((event for event in events if event["event"] == "plan"), None)
    names = ("layout", "tokens", "micro_batch", "accumulation", "predicted_peak_bytes", "measured_peak_bytes", "probes", "ooms", "levers")  # fmt: skip
    ooms = sum(event["event"] == "oom" for event in events)
    if plan is None:
        return {"ooms": ooms}
    return {"ooms": ooms, "plan_s": plan["plan_s"], "plan": {name: plan.get(name) for name in names}}


TRAINERS: dict[str, Callable[[Training], None]] = {
    "hf": train_with_hf,
    "lightning": train_with_lightning,
    "brimful": train_with_brimful,
}
