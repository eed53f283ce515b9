"""Four ways to train the same rows while memory is taken away and returned, each as its own documentation shows.

**trainer**     Hugging Face's `Trainer` with `auto_find_batch_size=True`; the loss through `compute_loss`, divided by
                `num_items_in_batch` as its documentation says for losses of one's own.
**accelerate**  `find_executable_batch_size` around the whole training, model and optimizer built inside and accumulation
                set to global batch // batch size, as in its example `automatic_gradient_accumulation.py`.
**lightning**   `Trainer.fit` with `accumulate_grad_batches`. Its `BatchSizeFinder` works before training only.
**brimful**     `Stepper.step` over each step's rows, padded, or packed as planned.

All start from the same weights, with the same micro-batch, optimizer and clipping, and get the rows in the same order.
What went into the weights is observed from outside: a row counts once its backward is done and `optimizer.step()` has been
called, unless `zero_grad()` came in between. Rows are counted by operations on the device, because a replay of a CUDA graph
repeats those and runs no Python.
"""

import copy
import functools
import logging
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils.data import DataLoader, SequentialSampler

import brimful
from brimful.errors import BadOption
from brimful.memory.oom import OutOfMemory, attempt
from brimful.planning.plan import Plan
from brimful.task import IGNORED, Loss, Shape
from brimful.tasks.language import Sft, SftOptions
from brimful.tasks.presets import PAD
from brimful.units import show_bytes
from peers import _import_lightning

CLIP = 1.0
LEARNING_RATE = 1e-3
SHORTEST = 0.1
"""Rows have lengths from this share of the longest to all of it."""
MOST_ROWS = 2**13
"""As many can be told apart in what went into the weights."""

Row = dict[str, Any]


class Memory:
    """The limit everyone trains under, and the part of it that is taken away and returned.

    On the CPU a simulated limit that drops; on a GPU torch's cap on the process, and a tensor that takes memory under it.
    """

    def __init__(self, device: torch.device, limit_bytes: int, take_bytes: int) -> None:
        self.device, self.limit_bytes, self.take_bytes = device, limit_bytes, take_bytes
        self.ledger = brimful.simulated_memory(limit_bytes) if device.type == "cpu" else None
        self._taken: torch.Tensor | None = None
        self._ooms_before = 0

    @contextmanager
    def limited(self) -> Iterator[None]:
        self._ooms_before = self._card_ooms()
        try:
            with self.ledger or nullcontext():
                yield
        finally:
            self.give_back()

    def take(self) -> None:
        if self.ledger is not None:
            self.ledger.limit_bytes = self.limit_bytes - self.take_bytes
            return
        make = functools.partial(torch.empty, self.take_bytes, dtype=torch.uint8, device=self.device)
        taken = attempt(make, self.device)
        if isinstance(taken, OutOfMemory):  # worded so that no contestant takes it for an out-of-memory error
            raise RuntimeError(
                f"--take {show_bytes(self.take_bytes)} is more than the training leaves at the start of a step"
            )
        self._taken = taken

    def give_back(self) -> None:
        self._taken = None
        if self.ledger is not None:
            self.ledger.limit_bytes = self.limit_bytes

    @property
    def ooms(self) -> int:
        return self.ledger.ooms if self.ledger is not None else self._card_ooms() - self._ooms_before

    def _card_ooms(self) -> int:
        return 0 if self.device.type == "cpu" else int(torch.cuda.memory_stats(self.device).get("num_ooms", 0))


@dataclass
class Recorder:
    """What went into the weights, and the disturbance: memory is taken at one step and returned some steps later."""

    memory: Memory
    take_at: int | None = None
    """The optimizer step, from 1, at whose first forward memory is taken. None: never."""
    give_back_after: int | None = None
    """Optimizer steps until it is returned. None: never."""
    updates: list[list[int]] = field(default_factory=list)
    """The rows of each optimizer step in the current weights."""
    discarded: int = 0
    """Optimizer steps of models that were discarded."""
    _model: "weakref.ref[nn.Module] | None" = None
    """Weak: what observes must not keep alive what a contestant wants to free."""
    _counts: torch.Tensor | None = None
    """By row, how often its gradient went into those that are held."""
    _taken: bool = False

    @property
    def model(self) -> nn.Module | None:
        return None if self._model is None else self._model()

    @property
    def calls(self) -> int:
        """Calls of `optimizer.step()`, on any model."""
        return self.discarded + len(self.updates)

    def watch(self, model: nn.Module, optimizer: Optimizer) -> None:
        """From now on this model counts."""
        self.discarded += len(self.updates)
        self.updates, self._model = [], weakref.ref(model)
        self._forget()
        optimizer.register_step_post_hook(lambda *_: self._stepped())
        _before_zero_grad(model, self._forget)
        _before_zero_grad(optimizer, self._forget)

    def forward(self) -> None:
        """A micro-batch begins."""
        if self.take_at is None:
            return
        if not self._taken and self.calls >= self.take_at - 1:
            self._taken = True
            self.memory.take()
        elif self.give_back_after is not None and self.calls >= self.take_at - 1 + self.give_back_after:
            self.memory.give_back()

    def before_step(self, stepper: brimful.Stepper) -> None:
        """A step of Brimful's begins, which may be a replay. The memory is taken after a graph has given back its own, as it does
        for an evaluation. Else nothing would be left to take, and the run would not be disturbed."""
        if self.take_at is not None and not self._taken and self.calls >= self.take_at - 1:
            stepper.free_memory()
        self.forward()

    def follow(self, rows: torch.Tensor, loss: torch.Tensor) -> None:
        """The gradients of these rows exist once the backward of this loss is done. Negative numbers are no rows."""
        if not loss.requires_grad:
            return
        if self._counts is None:
            self._counts = torch.zeros(MOST_ROWS + 1, dtype=torch.int32, device=loss.device)
        counts = self._counts

        def through() -> None:
            one = torch.ones((), dtype=counts.dtype, device=counts.device)
            counts.index_add_(0, rows.where(rows >= 0, MOST_ROWS), one.expand(len(rows)))

        loss.register_hook(lambda _: Variable._execution_engine.queue_callback(through))

    def _stepped(self) -> None:
        counts = [] if self._counts is None else self._counts[:-1].tolist()
        self.updates.append([row for row, count in enumerate(counts) for _ in range(count)])
        self._forget()

    def _forget(self) -> None:
        if self._counts is not None:
            self._counts.zero_()  # in place: a graph writes there


def _before_zero_grad(owner: Any, clear: Callable[[], None]) -> None:
    plain, of = type(owner).zero_grad, weakref.ref(owner)

    @functools.wraps(plain)
    def zero_grad(*args: Any, **kwargs: Any) -> Any:
        clear()
        return plain(of(), *args, **kwargs)

    owner.zero_grad = zero_grad


class Chat(Sft):
    """Fine-tuning of the chat model without dropout, so that two runs over the same rows end at the same weights."""

    name = "sft"
    precision = "fp32"
    recorder: Recorder | None = None

    def __init__(
        self, size: str, lengths: Shape | None, autocast: torch.dtype | None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(SftOptions(model=size, freeze="encoder+embeddings"))
        self.worst_shape = lengths or self.worst_shape
        self.autocast, self.dtype = autocast, dtype

    @functools.cached_property
    def drawn(self) -> nn.Module:
        """The weights that `model` draws, to copy: drawing those of T5 base takes 7 s on two cores, a copy 1."""
        return self.model()

    def model(self) -> nn.Module:
        model = super().model().to(self.dtype)
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            if isinstance(getattr(part, "dropout", None), float):
                part.dropout = 0.0  # type: ignore[assignment]
        return model

    def optimizer(self, model: nn.Module) -> Optimizer:
        trainable = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trainable, lr=LEARNING_RATE, fused=all(p.is_cuda for p in trainable) or None)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Opens autocast itself, so that all compute the same, however their trainer handles precision."""
        if self.recorder is not None:
            self.recorder.forward()
        device = batch["labels"].device.type
        with torch.autocast(device, dtype=self.autocast) if self.autocast else nullcontext():
            loss = super().loss(model, batch)
        if self.recorder is not None:
            self.recorder.follow(batch["row"], loss.sum)
        return loss

    def shape(self, row: Row) -> Shape:
        return len(row["input_ids"]), len(row["labels"])

    def collate(self, rows: Any) -> Row:
        pad = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True)
        ids = pad([row["input_ids"] for row in rows], padding_value=PAD)
        return {
            "row": torch.tensor([row["row"] for row in rows]),
            "input_ids": ids,
            "attention_mask": (ids != PAD).long(),
            "labels": pad([row["labels"] for row in rows], padding_value=IGNORED),
        }

    def pack(self, rows: Any, tokens: Shape) -> Row:
        """With the number of each row in as many places as the sequence has tokens, since a graph needs tensors of one size."""
        chat = [{"prompt": row["input_ids"].numpy(), "response": row["labels"].numpy()} for row in rows]
        numbers = torch.full((tokens[0],), -1)
        numbers[: len(rows)] = torch.tensor([row["row"] for row in rows])
        return {"row": numbers, **super().pack(chat, tokens)}

    def dummy_row(self, shape: Shape) -> Row:
        row = super().dummy_row(shape)
        return {"row": 0, "input_ids": torch.from_numpy(row["prompt"]), "labels": torch.from_numpy(row["response"])}


def read_rows(file: str, task: Chat, count: int) -> list[Row]:
    """Prompts and responses of a parquet file as bytes, truncated to the longest lengths: real lengths without a tokenizer."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(file, columns=["prompt", "response"]).slice(0, count).to_pylist()
    if len(table) < count:
        raise BadOption(f"--data {file} has {len(table)} rows, and steps × global batch is {count}")
    longest = dict(zip(("prompt", "response"), task.worst_shape, strict=True))
    texts = [{key: list((row[key] or " ").encode()[:most]) for key, most in longest.items()} for row in table]
    return [
        {"row": index, "input_ids": 2 + torch.tensor(text["prompt"]), "labels": 2 + torch.tensor(text["response"])}
        for index, text in enumerate(texts)
    ]


def generate_rows(task: Chat, count: int, vocabulary: int) -> list[Row]:
    """Rows of random tokens, with lengths from a tenth of the longest to all of it."""
    random = torch.Generator().manual_seed(0)
    lengths = [torch.randint(max(1, int(SHORTEST * most)), most + 1, (count,), generator=random).tolist()
               for most in task.worst_shape]  # fmt: skip
    tokens = functools.partial(torch.randint, 2, vocabulary, generator=random)
    return [
        {"row": index, "input_ids": tokens((source,)), "labels": tokens((target,))}
        for index, (source, target) in enumerate(zip(*lengths, strict=True))
    ]


@dataclass(frozen=True, kw_only=True)
class Training:
    """What every contestant trains."""

    task: Chat
    rows: list[Row]
    steps: int
    global_batch: int
    micro_batch: int
    device: torch.device
    plan: Plan | None = None
    """Used by Brimful alone."""
    most_rows: int | None = None
    """In Brimful's micro-batches. Default: `micro_batch`, or as planned."""

    @property
    def accumulation(self) -> int:
        return self.global_batch // self.micro_batch

    def build(self, recorder: Recorder | None = None) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        # On the CPU the simulated limit would count the original, too.
        model = self.task.model() if self.device.type == "cpu" else copy.deepcopy(self.task.drawn)
        model = model.to(self.device).train()
        optimizer = self.task.optimizer(model)
        if recorder is not None:
            recorder.watch(model, optimizer)
        return model, optimizer

    def stepper(self, model: nn.Module, optimizer: Optimizer) -> brimful.Stepper:
        """Split as planned; without a plan, with everybody's micro-batch."""
        most = self.most_rows or (self.micro_batch if self.plan is None else None)
        return brimful.Stepper(model, optimizer, self.task, self.plan, micro_batch=most, clip_norm=CLIP)

    def loader(self, batch_size: int) -> Any:
        return DataLoader(self.rows, batch_size=batch_size, collate_fn=self.task.collate)  # type: ignore[arg-type]

    def split_finer(self) -> "Training":
        """The same for Brimful in micro-batches of half the size."""
        rows = self.micro_batch if self.plan is None else self.plan.micro_batch
        return replace(self, most_rows=max(1, rows // 2))

    def rows_of(self, step: int) -> list[Row]:
        """The rows of a step, counted from 0. After the last row the first follows."""
        start = step * self.global_batch
        return [self.rows[index % len(self.rows)] for index in range(start, start + self.global_batch)]


def train_with_brimful(training: Training, recorder: Recorder) -> nn.Module:
    model, optimizer = training.build(recorder)
    stepper = training.stepper(model, optimizer)
    for step in range(training.steps):
        recorder.before_step(stepper)
        stepper.step(training.rows_of(step))
    return model


def train_with_trainer(training: Training, recorder: Recorder) -> nn.Module:
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(training.rows)

        def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None, **__: Any) -> Any:
            return training.task.loss(model, inputs).sum / num_items_in_batch

    model, optimizer = training.build(recorder)
    with tempfile.TemporaryDirectory(prefix="midrun-") as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=training.steps, auto_find_batch_size=True,
            per_device_train_batch_size=training.micro_batch, gradient_accumulation_steps=training.accumulation,
            learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_grad_norm=CLIP,
            use_cpu=training.device.type == "cpu", remove_unused_columns=False, save_strategy="no", report_to=[],
            disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        trainer = InOrder(
            model=model, args=arguments, train_dataset=training.rows, data_collator=training.task.collate,
            optimizers=(optimizer, None),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.model_accepts_loss_kwargs = True  # so that items are counted and the loss is not divided once more
        trainer.train()
    return model


def train_with_accelerate(training: Training, recorder: Recorder) -> nn.Module:
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    accelerator = Accelerator(cpu=training.device.type == "cpu")

    @find_executable_batch_size(starting_batch_size=training.micro_batch)
    def train(batch_size: int) -> nn.Module:
        accelerator.gradient_accumulation_steps = training.global_batch // batch_size
        accelerator.free_memory()
        model, optimizer, loader = accelerator.prepare(*training.build(recorder), training.loader(batch_size))
        for batch in loader:
            with accelerator.accumulate(model):
                loss = training.task.loss(model, batch)
                accelerator.backward(loss.sum / loss.count)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            if len(recorder.updates) == training.steps:
                break
        return model

    model = train()
    accelerator.free_memory()
    return model


def train_with_lightning(training: Training, recorder: Recorder) -> nn.Module:
    lightning = _import_lightning()
    model, optimizer = training.build(recorder)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = training.task.loss(self.model, batch)
            return loss.sum / loss.count

        def configure_optimizers(self) -> Optimizer:
            return optimizer

    with tempfile.TemporaryDirectory(prefix="midrun-") as folder:
        trainer = lightning.Trainer(
            max_steps=training.steps, accumulate_grad_batches=training.accumulation, gradient_clip_val=CLIP,
            accelerator="gpu" if training.device.type == "cuda" else "cpu",
            devices=[training.device.index or 0] if training.device.type == "cuda" else 1,
            default_root_dir=folder, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Module(), training.loader(training.micro_batch))
    return model


CONTESTANTS: dict[str, Callable[[Training, Recorder], nn.Module]] = {
    "trainer": train_with_trainer,
    "accelerate": train_with_accelerate,
    "lightning": train_with_lightning,
    "brimful": train_with_brimful,
}


@contextmanager
def quiet() -> Iterator[None]:
    """Silences advice about workers, loggers and samplers."""
    names = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "transformers", "accelerate", "brimful")
    levels = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    for logger, _ in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)
