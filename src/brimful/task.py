"""What to train: a model, a loss, and batches of a given shape. Nothing about memory, loops or devices.

A task is a subclass of `Task` that says at least three things:

    class MyTask(Task):
        worst_shape = (512,)                                   # the longest row you will ever feed it

        def model(self):
            return MyModel()

        def loss(self, model, batch):
            logits = model(batch["ids"])
            losses = F.cross_entropy(logits.flatten(0, 1), batch["ids"].flatten(), reduction="sum")
            return Loss(sum=losses, count=batch["ids"].numel())

        def dummy(self, rows, shape):
            return {"ids": torch.randint(0, 1000, (rows, *shape))}

**Why a sum and a count.** A step is cut into micro-batches of different sizes, and a mean of means is wrong as soon as
the counts differ. The step runs backward on `sum / rows`, and multiplies the gradients once by `rows / total count`
when every micro-batch is in: any cut of the same rows gives the same gradient.

**Several terms.** Terms with different counts (tokens here, rows there) cannot share one scaling at the end. Such a loss
returns them by name, `{"tokens": Loss(...), "router": Loss(...)}`, and `counts(batch)` gives the same names' counts from
the labels alone, so that their totals over the step are known before the first forward. What is minimised is the sum of
the terms' means; a weight belongs into the term's sum.

**Shapes.** `shape(row)` names the lengths that drive memory: `()` for rows that are all alike, `(tokens,)` for text,
`(source, target)` for an encoder-decoder, `(side,)` for square images. A batch is padded to the largest of each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, Protocol

from brimful.errors import TaskError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn
    from torch.optim import Optimizer

Shape = tuple[int, ...]
"""The lengths of a row, or of a padded batch of rows."""

Precision = Literal["fp32", "bf16", "fp16", "auto"]
"""What autocast is opened with; `auto` is bf16 on accelerators that have it and fp32 elsewhere."""


class Dataset(Protocol):
    """Rows by number, as torch calls it map-style: a list is one, a token store, any `torch.utils.data.Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss that can be cut: the sum over whatever is counted, and how many that was.

    `Loss(sum=cross_entropy(..., reduction="sum"), count=number_of_tokens)`; the mean is `sum / count` over the *step*.
    """

    sum: "Tensor"
    """Differentiable scalar: the loss summed over everything counted."""
    count: "Tensor | float"
    """What the sum runs over: rows, tokens or pairs. Not part of the graph."""


class Task:
    """What to train. Override `model`, `loss` and `dummy`; the rest has defaults."""

    name: str = ""
    """How the task is called in plans and messages; the class's name unless set."""
    worst_shape: Shape = ()
    """The largest lengths a row may have. Fitting without data assumes every row is this long."""
    global_batch: int = 256
    """Rows per optimizer step, over all micro-batches and processes, unless the user asks for another number."""
    precision: Precision = "fp32"
    """Weights stay as `model()` made them; this is what the forward is autocast to."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    def model(self) -> "nn.Module":
        """A new model, on the CPU. Also called under `torch.device("meta")` to learn its shape without its bytes."""
        raise TaskError(f"task {self.name} has no model(): define one that returns a torch.nn.Module")

    def optimizer(self, model: "nn.Module") -> "Optimizer":
        """The optimizer over the model's trainable parameters, which lie on the training device already."""
        import torch

        trainable = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trainable, lr=1e-4, fused=all(p.is_cuda for p in trainable) or None)

    def loss(self, model: "nn.Module", batch: Any) -> "Loss | Mapping[str, Loss]":
        """Forward pass and loss of one micro-batch. Autocast is open already; the batch is on the device."""
        raise TaskError(f"task {self.name} has no loss(model, batch): define one that returns brimful.Loss(sum, count)")

    def counts(self, batch: Any) -> "Mapping[str, Tensor | float] | None":
        """The count of each named term of the loss, told from a collated batch alone; None where the loss has one term."""
        return None

    def collate(self, rows: Sequence[Any]) -> Any:
        """Rows of the dataset as one batch, padded to the longest of them."""
        from torch.utils.data import default_collate

        return default_collate(list(rows))

    def shape(self, row: Any) -> Shape:
        """The lengths of one row, in the order of `worst_shape`."""
        return self.worst_shape

    def dummy(self, rows: int, shape: Shape) -> Any:
        """A batch as `collate` would give it, of so many rows padded to this shape, for probing."""
        raise TaskError(f"task {self.name} has no dummy(rows, shape): define one that returns a batch of that shape")

    def rows(self, data: str) -> Dataset:
        """The dataset behind a path or name, as anything with `len` and indexing."""
        raise TaskError(
            f"task {self.name} does not read data itself: define rows(data); without it, `brimful plan` takes its worst shape and no DATA"
        )

    def prepare(
        self, data: str, folder: "Path", say: Callable[[str], object], like: Dataset | None = None, name: str = "train"
    ) -> str:
        """Make data ready for `rows`, below a folder of the run if it must be written: what `rows` is then given.

        Data to evaluate on come second, with the rows to train on as `like`.
        """
        return data

    def remarks(self, rows: Dataset) -> "Sequence[tuple[str, Any, Any, str]]":
        """Decisions about model and data that the user should see in the plan: name, what was asked, what it is, why."""
        return ()

    def start(self) -> "nn.Module":
        """The model that training begins with: `model()`, with random weights, unless there are better ones."""
        return self.model()

    def evaluate(self, model: "nn.Module", rows: Sequence[Any], context: Any) -> "Mapping[str, float]":
        """Figures besides the mean loss, higher is better. `context` runs gradient-free work in batches that fit."""
        return {}

    def save(self, model: "nn.Module", folder: "Path", rows: Dataset) -> None:
        """Write the model for others to load. The weights are in `model.safetensors`; `rows` is what it was trained on."""
        from safetensors.torch import save_model

        if hasattr(model, "save_pretrained"):
            from transformers.utils import logging

            logging.disable_progress_bar()  # one file, a tenth of a second: a bar would only tear the run's own
            model.save_pretrained(folder, max_shard_size="1000GB")  # type: ignore[operator]
        else:
            save_model(model, str(folder / "model.safetensors"))

    def checkpointing(self, model: "nn.Module", on: bool) -> bool:
        """Turn gradient checkpointing on or off for a model with its own way of doing it; False where there is none."""
        return False


def terms_of(task: Task, given: Any, *, to_train: bool = True) -> dict[str, Loss]:
    """What `task.loss` returned, as named terms; a single one is called `loss`."""
    terms = {"loss": given} if isinstance(given, Loss) else given
    if not isinstance(terms, Mapping) or not terms or not all(isinstance(term, Loss) for term in terms.values()):
        raise TaskError(
            f"task {task.name}: its loss returned a {type(given).__name__}; return brimful.Loss(sum=…, count=…), or several "
            "by name together with counts(batch)"
        )
    for name, term in terms.items():
        which = "Loss" if name == "loss" else f"{name!r}: Loss"
        if getattr(term.sum, "numel", lambda: 0)() != 1 or (to_train and not term.sum.requires_grad):
            raise TaskError(
                f"task {task.name}: {which}.sum must be one number that depends on the model's trainable weights"
            )
        if not _is_a_number(term.count):
            raise TaskError(
                f"task {task.name}: {which}.count must be one number, what the sum runs over; it is {term.count!r}"
            )
    return dict(terms)


def totals_of(task: Task, counts: Any) -> dict[str, float]:
    """What `task.counts` returned, as numbers by name."""
    if not isinstance(counts, Mapping) or not counts:
        raise TaskError(
            f"task {task.name}: its counts(batch) returned a {type(counts).__name__}; return a number for each term of the loss"
        )
    wrong = {name: count for name, count in counts.items() if not _is_a_number(count)}
    if wrong:
        raise TaskError(f"task {task.name}: its counts(batch) must be numbers, one for each term; {wrong} are not")
    return {str(name): float(count) for name, count in counts.items()}


def _is_a_number(value: Any) -> bool:
    """One that can be added up: a number of Python or NumPy, or a tensor with a single one."""
    if hasattr(value, "numel"):
        return bool(value.numel() == 1)
    return isinstance(value, Real) or getattr(value, "shape", None) == ()
