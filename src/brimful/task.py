"""What to train: a model, a loss, and batches of rows. Nothing about memory, loops or devices.

A task is a subclass of `Task`. With data, a model and a loss are enough:

    class Chat(Task):
        worst_shape = (512,)                                   # the longest row, in tokens

        def model(self):
            return AutoModelForCausalLM.from_pretrained("gpt2")

        def collate(self, rows):
            return self.collator(rows)                         # input_ids, attention_mask, labels

        def loss(self, model, batch):
            return model(**batch)                              # its mean is over the labels, and so is the count

        def shape(self, row):
            return (len(row["input_ids"]),)

**What a loss may return.** `Loss(sum, count)` is the exact form. `(mean, count)`, a Hugging Face output whose batch has
`labels`, and a plain mean (weighted by rows) are converted to it by `loss_terms`.

**Why a sum and a count.** A step is split into micro-batches of different sizes, and a mean of means is wrong as soon as
the counts differ. The step runs backward on `sum / estimated count` and multiplies the gradients once by `estimate / total
count` after the last micro-batch, so any split of the same rows gives the same gradient.

**Several terms.** Terms with different counts (tokens and rows, say) cannot share one scaling at the end. Such a loss
returns a mapping, `{"tokens": Loss(...), "router": Loss(...)}`, and `counts(batch)` returns the count of each name from
the labels alone, so that the totals of the step are known before the first forward. The step minimises the sum of the
terms' means. To weight a term, multiply the weight into its sum.

**Shapes.** `shape(row)` gives the lengths that drive memory: `()` for rows that are all alike, `(tokens,)` for text,
`(source, target)` for an encoder-decoder, `(side,)` for square images. A batch is padded to the largest of each.
"""

import inspect
import math
import traceback
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from brimful.errors import TaskError, in_one_line, kind_of, user_line
from brimful.units import show_count

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

IGNORED = -100
"""The label of a token that no loss counts, as in torch and transformers."""

SAME_COUNT = 1e-4
"""By which share `counts()` and the counts of the loss may differ: they may be added up in fp32."""

Shape = tuple[int, ...]
"""The lengths of a row, or of a padded batch of rows."""

Precision = Literal["fp32", "bf16", "fp16", "auto"]
"""The precision of autocast; `auto` is bf16 on accelerators that support it and fp32 elsewhere."""


class Dataset(Protocol):
    """Rows by number, which torch calls a map-style dataset: a list, a token store, any `torch.utils.data.Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss that can be split: the sum over whatever is counted, and the count.

    >>> import torch
    >>> losses = torch.tensor([0.5, 1.5])
    >>> Loss(sum=losses.sum(), count=2)
    Loss(sum=tensor(2.), count=2, log={})

    The loss of a step is `sum / count` over all its micro-batches.
    """

    sum: "Tensor"
    """Differentiable scalar: the loss summed over everything counted."""
    count: "Tensor | float"
    """What the sum runs over: rows, tokens or pairs. Not part of the graph."""
    log: "Mapping[str, Tensor | float]" = field(default_factory=dict)
    """Further numbers to record, such as an accuracy: averaged over the step, weighted by `count`."""


class Task:
    """What to train. Override `model` and `loss`, and `dummy` to plan without data; the rest has defaults.

    >>> class Regression(Task):
    ...     def model(self):
    ...         return torch.nn.Linear(4, 1)
    ...     def loss(self, model, batch):
    ...         errors = (model(batch["x"]) - batch["y"]) ** 2
    ...         return Loss(sum=errors.sum(), count=errors.numel())
    >>> Regression().name
    'Regression'
    """

    name: str = ""
    """The task's name in plans and messages. Default: the name of the class."""
    Options: ClassVar[type | None] = None
    """None, or a frozen, keyword-only dataclass: each field becomes a flag and its docstring the help. Without a default the
    flag is required. Types: int, float, str, bool, Path, Literal. `from_` is `--from`; `field(metadata={"path": True})`
    marks a path."""
    options: Any = None
    """The instance of `Options` this task was made with."""
    host_limit_bytes: int | None = None
    """The host RAM that `prepare` may use: `host_limit` of the run, which sets it. None if that was not given."""
    worst_shape: Shape = ()
    """The largest lengths a row may have. Planning without data assumes that every row is this long."""
    global_batch: int = 256
    """Rows per optimizer step, over all micro-batches and processes, unless the user sets another number."""
    work_follows_shape: bool = True
    """Whether the FLOPs of a row follow from its lengths alone. If they do not, MFU is unknown."""
    why_not_packed: str | None = "the task has no pack()"
    """For the plan, where `packs` is false."""
    chunked_loss: Sequence[str] = ()
    """Layouts in which the loss never holds all logits in memory, `("padded", "packed")`, for the plan to say so."""
    precision: Precision = "fp32"
    """The precision of autocast. The weights stay as `model()` made them."""
    scores: "Sequence[str] | None" = None
    """Names of the scores that `evaluate` gives, for `best=` to be checked before anything is done; None if unknown."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    def __init__(self, options: Any = None) -> None:
        self.options = self.Options() if options is None and self.Options is not None else options

    def use_device(self, device: "torch.device", precision: "Precision | None") -> None:
        """Called before a model is made, with the device that it will be on and the precision that was asked for. Optional:
        for tasks whose weights depend on it."""

    def model(self) -> "nn.Module":
        """A new model, on the CPU. Also called under `torch.device("meta")`, which allocates nothing."""
        raise TaskError(f"task {self.name} has no model(). Try: define model() that returns a torch.nn.Module.")

    def initial_model(self) -> "nn.Module":
        """The model that training begins with. Default: `model()`; override it to load pretrained weights."""
        return self.model()

    def optimizer(self, model: "nn.Module") -> "Optimizer":
        """The optimizer of the model's trainable parameters, which are on the training device already."""
        import torch

        trainable = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trainable, lr=1e-4, fused=all(p.is_cuda for p in trainable) or None)

    def schedule(self, optimizer: "Optimizer", steps: int) -> "LRScheduler | None":
        """A learning-rate scheduler for a run of `steps` steps, used instead of `--schedule`; None uses `--schedule`."""
        return None

    def loss(self, model: "nn.Module", batch: Any) -> Any:
        """The forward pass and the loss of one micro-batch, on the device and under autocast: see `loss_terms`."""
        raise TaskError(f"task {self.name} has no loss(). Try: define loss(model, batch) that returns brimful.Loss.")

    def counts(self, batch: Any) -> "Mapping[str, Tensor | float] | None":
        """The count of each term of a loss of several terms, from a collated batch alone; None for a single term.

        The same counts as in the `Loss` of each term.
        """
        return None

    def collate(self, rows: Sequence[Any]) -> Any:
        """One batch of these rows, padded to the longest of them."""
        from torch.utils.data import default_collate

        return default_collate(list(rows))

    def shape(self, row: Any) -> Shape:
        """The lengths of one row, in the order of `worst_shape`."""
        return self.worst_shape

    @property
    def has_shape(self) -> bool:
        """Whether `shape` is defined. Without it every row has the worst shape, and no row is read to learn it."""
        return getattr(self.shape, "__func__", None) is not Task.shape

    def pack(self, rows: Sequence[Any], tokens: Shape) -> Any:
        """One batch of these rows end to end instead of padded, by length filled up to `tokens` tokens. Optional.

        With it a plan may use the packed layout. `loss` then gets such batches too, with whatever tells the model where
        each row begins; see `brimful.packing`. Planning compares packed rows with the same rows alone before it packs.
        """
        raise TaskError(f"task {self.name} has no pack(). Try: define pack(rows, tokens), or layout='padded'.")

    @property
    def packs(self) -> bool:
        """Whether `pack` is defined."""
        return getattr(self.pack, "__func__", None) is not Task.pack

    def dummy_row(self, shape: Shape) -> Any:
        """A row of this shape with any content. Needed only without data, unless `dummy` is defined."""
        raise TaskError(f"task {self.name} has no dummy_row(). Try: define dummy_row(shape) that returns a row.")

    def dummy(self, rows: int, shape: Shape) -> Any:
        """A batch of `rows` rows padded to `shape`, as `collate` would return it. Default: of `dummy_row`."""
        if not self.has_dummy_row:
            raise TaskError(
                f"task {self.name} has no dummy(), so it cannot be planned without data. "
                "Try: give data, or define dummy(rows, shape) that returns a batch, or dummy_row(shape) that returns a row."
            )
        return self.collate([self.dummy_row(shape)] * rows)

    @property
    def has_dummy(self) -> bool:
        """Whether `dummy` or `dummy_row` is defined. Without them the longest rows of the data are used to probe."""
        return self.has_dummy_row or getattr(self.dummy, "__func__", None) is not Task.dummy

    @property
    def has_dummy_row(self) -> bool:
        return getattr(self.dummy_row, "__func__", None) is not Task.dummy_row

    def rows(self, data: str) -> Dataset:
        """The dataset at a path or of a name."""
        raise TaskError(f"task {self.name} has no rows(), so it cannot read {data!r}. Try: define rows(data).")

    def prepare(
        self,
        data: str,
        folder: "Path",
        progress: Callable[[str], object],
        like: Dataset | None = None,
        name: str = "train",
    ) -> str:
        """Make data ready for `rows`, in `folder` if something must be written. Returns what `rows` is then given.

        Data to evaluate on are prepared second, with the training rows as `like`.
        """
        return data

    def alternatives(self) -> "Sequence[tuple[str, int]]":
        """Other ways to train that take less memory, named where this one does not fit: options, and the bytes of weights,
        gradients and optimizer state. Nothing is changed by itself."""
        return ()

    def memory_options(self) -> "Sequence[Mapping[str, Any]]":
        """Other values of the task's options that change what a step takes, such as a part that is frozen. `estimate` compares
        them. Optional."""
        return ()

    def remarks(self, rows: Dataset) -> "Sequence[tuple[str, Any, Any, str]]":
        """Choices about model and data to show in the plan: name, requested, effective, reason."""
        return ()

    def before_training(self, model: "nn.Module", rows: Dataset, context: Any) -> None:
        """Called once the model is on the device, before the first step, with the training rows and then with those to
        evaluate on. `context` is that of `evaluate`, with the run's `folder` for data and whether it was `resumed`. Optional.

        Random state and the model must be left as they are, so that a resumed run gives the same bits.
        """

    def preview(self, rows: Dataset) -> "Sequence[Sequence[tuple[str, bool | str]]]":
        """A few rows as text, in pieces that are trained on or not, or that have a name, to be shown when a run begins."""
        return ()

    def evaluate(self, model: "nn.Module", rows: Sequence[Any], context: Any) -> "Mapping[str, float]":
        """Scores besides the mean loss, higher is better. `context` runs gradient-free work in batches that fit."""
        return {}

    def watch(self, notes: dict[str, Any], step: "Mapping[str, Any]") -> "Mapping[str, str]":
        """What is wrong with the training after this step: a sentence for each kind of problem that holds now. Optional.

        `step` has step, loss, lr, rows, applied and the values of `Loss.log`, the same on all ranks. `notes` is yours: a dict
        of plain values, empty at first, that checkpoints keep. The run warns of each kind once, and with `patience=` no
        evaluation counts as better while a problem holds.
        """
        return {}

    def save(self, model: "nn.Module", folder: "Path", rows: Dataset) -> None:
        """Write the model for others to load. `rows` is what it was trained on.

        Weights belong in `model.safetensors`. If it does not hold all of them, a checkpoint keeps them once more. A
        `tokenizer` of the task that has a `save_pretrained` is saved beside the model.
        """
        from safetensors.torch import save_model

        if hasattr(model, "save_pretrained"):
            from transformers.utils import logging

            logging.disable_progress_bar()  # one file, a tenth of a second: its bar would break the run's own
            model.save_pretrained(folder, max_shard_size="1000GB")  # type: ignore[operator]
        else:
            save_model(model, str(folder / "model.safetensors"))

    def trained_weights(self, model: "nn.Module") -> "Collection[str] | None":
        """Names in `model.state_dict()` of the weights that training changes, such as an adapter's; None for all. Optional.

        Checkpoints then hold these alone. A resumed run has the others from `initial_model()`, and is refused if they are
        not the weights that it was trained with.
        """
        return None

    def compiling(self, model: "nn.Module", on: bool) -> bool:
        """Switch compiled blocks in a model with its own way of doing it; False if there is none."""
        return False

    def checkpointing(self, model: "nn.Module", on: bool) -> bool:
        """Switch gradient checkpointing in a model with its own way of doing it; False if there is none."""
        return False


def failure(task: Task, error: BaseException, method: str, on: str = "") -> str:
    """`task Net: loss() failed at mine.py:12: KeyError: 'x'.`, with the line of the user's own code."""
    where = f" on {on}" if on else ""
    return f"task {task.name}: {method}() failed{where}{user_line(error)}: {in_one_line(error).rstrip('. ')}."


def check_weights(model: "nn.Module") -> None:
    """Refuse lazy modules that have not run."""
    from torch.nn.parameter import is_lazy

    for name, part in model.named_modules():
        if any(is_lazy(tensor) for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))):
            raise TaskError(
                f"the weights of {type(part).__name__} ({name!r}) have no shape before a first forward. "
                "Try: run a batch through the model before it is used, in model() if a task makes it."
            )


def not_finite(model: "nn.Module") -> str:
    """`'head.weight' and 2 more weights` that have a NaN, or inf where it is trained (a frozen -inf may be a mask); or nothing.

    Weights of 4 or 8 bits have no NaN of their own, but bitsandbytes' constants beside them do.
    """
    names = []
    for name, param in model.named_parameters():
        constants = (getattr(getattr(param, "quant_state", None), "offset", None), getattr(param, "SCB", None))
        for tensor in (param.detach(), *constants):
            if tensor is None or not tensor.is_floating_point() or not tensor.numel() or tensor.itemsize == 1:
                continue
            extremes = [float(one) for one in tensor.aminmax()]
            if any(math.isnan(one) or (math.isinf(one) and param.requires_grad) for one in extremes):
                names.append(name)
    more = f" and {show_count(len(names) - 1, 'more weight')}" if len(names) > 1 else ""
    return f"{names[0]!r}{more}" if names else ""


def failed_method(task: Task, error: BaseException) -> str | None:
    """The method of the task in which this error was raised; None if it was raised elsewhere."""
    methods = {name: getattr(task, name) for name, value in vars(Task).items() if inspect.isfunction(value)}
    codes = {getattr(inspect.unwrap(one), "__code__", None): name for name, one in methods.items()}
    running = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((codes[code] for code in running if code in codes), None)


def loss_terms(task: Task, value: Any, *, model: "nn.Module", batch: Any, needs_grad: bool = True) -> dict[str, Loss]:
    """What `task.loss` returned, as named terms; a single one is called `loss`.

    A mean is turned into a sum by its count: the one returned with it, the labels of a Hugging Face batch that the
    model's own mean runs over, or else the rows. `needs_grad=False` accepts a loss without a graph, for evaluation.
    """
    if _is_output(value):
        count = _label_count(model, batch)
        terms: Any = _mean_to_loss(task, value.loss, rows_of(batch) if count is None else count)
    elif isinstance(value, Loss):
        terms = value
    elif isinstance(value, tuple) and len(value) == 2:
        terms = _mean_to_loss(task, *value)
    elif _is_scalar_tensor(value):
        terms = _mean_to_loss(task, value, rows_of(batch))
    else:
        terms = value
    if isinstance(terms, Loss):
        terms = {"loss": terms}
    if not isinstance(terms, Mapping) or not terms or not all(isinstance(term, Loss) for term in terms.values()):
        raise TaskError(
            f"task {task.name}: loss() returned {kind_of(value)}. Try: return brimful.Loss(sum, count), "
            "(mean, count), a mean, or a mapping of Loss with counts(batch)."
        )
    return {name: _checked(task, name, term, needs_grad) for name, term in terms.items()}


def weighted_by_rows(value: Any, *, model: "nn.Module", batch: Any) -> bool:
    """Whether `loss_terms` weights this loss by rows because it is a mean that says nothing of its count."""
    return _is_scalar_tensor(value) or (_is_output(value) and _label_count(model, batch) is None)


def term_counts(task: Task, counts: Any) -> dict[str, float]:
    """What `task.counts` returned, as numbers by name."""
    if not isinstance(counts, Mapping) or not counts:
        raise TaskError(
            f"task {task.name}: counts() returned {kind_of(counts)}. "
            "Try: return a mapping with a number for each term of the loss."
        )
    wrong = {name: count for name, count in counts.items() if not _is_number(count)}
    if wrong:
        raise TaskError(
            f"task {task.name}: counts() must return one number for each term, not {wrong}. Try: the number of rows or tokens."
        )
    return {str(name): float(count) for name, count in counts.items()}


def check_counts(task: Task, terms: Mapping[str, Loss], batch: Any) -> None:
    """Raise `TaskError` unless `counts(batch)` says of each term of the loss what the loss itself has counted.

    Gradients are divided by the one and the loss that is shown by the other.
    """
    counts = task.counts(batch)
    if counts is None:
        if len(terms) > 1:
            raise several_terms(terms)
        return
    counts = term_counts(task, counts)
    if set(counts) != set(terms):
        raise other_terms(task, terms, counts)
    compare_counts(task, {name: float(term.count) for name, term in terms.items()}, counts)


def several_terms(terms: Iterable[str]) -> TaskError:
    return TaskError(
        f"the loss has several terms ({', '.join(terms)}), whose counts must be known before the forward. "
        "Try: define counts(batch)."
    )


def other_terms(task: Task, terms: Iterable[str], counts: Iterable[str]) -> TaskError:
    return TaskError(
        f"task {task.name}: loss() has the terms {sorted(terms)} and counts() has {sorted(counts)}. "
        "Try: use the same names in both."
    )


def compare_counts(task: Task, counted: Mapping[str, float], counts: Mapping[str, float]) -> None:
    """Raise `TaskError` for a term of which the loss has counted something else than `counts()`. Nothing at all is no error:
    then there is no gradient either."""
    for name, count in counted.items():
        if count and not math.isclose(count, counts[name], rel_tol=SAME_COUNT):
            raise TaskError(
                f"task {task.name}: the term {name!r} of loss() counts {count:g}, and counts() says {counts[name]:g} for the same "
                "rows. Try: return the same number in both."
            )


def rows_of(batch: Any) -> int:
    """The rows of a batch: the first dimension that all its tensors share."""
    rows = shared_rows(batch)
    if rows is None:
        sizes = _first_dimensions(batch)
        seen = f"have first dimensions {sorted(sizes)}" if sizes else "are missing"
        raise TaskError(f"the tensors of a batch {seen}. Try: return tensors that share their first dimension.")
    return rows


def shared_rows(batch: Any) -> int | None:
    """The same, or None for a batch that is laid out in another way, such as graphs, nodes of which are end to end."""
    sizes = _first_dimensions(batch)
    return sizes.pop() if len(sizes) == 1 else None


def _first_dimensions(batch: Any) -> set[int]:
    sizes: set[int] = set()
    map_tensors(batch, lambda tensor: sizes.update(tensor.shape[:1]))
    return sizes


def map_tensors(batch: Any, function: "Callable[[Tensor], Any]") -> Any:
    """The batch with every tensor replaced. Hugging Face's `BatchEncoding` is a mapping that torch's pytree does not know."""
    import torch
    from torch.utils._pytree import tree_map_only

    if isinstance(batch, UserDict):
        return type(batch)({key: map_tensors(value, function) for key, value in batch.items()})
    return tree_map_only(torch.Tensor, function, batch)


def _checked(task: Task, name: str, term: Loss, needs_grad: bool) -> Loss:
    which = "Loss" if name == "loss" else f"{name!r}: Loss"
    if getattr(term.sum, "numel", lambda: 0)() != 1 or (needs_grad and not term.sum.requires_grad):
        raise TaskError(
            f"task {task.name}: {which}.sum must be one number that depends on trainable weights. Try: add up the losses of the rows."
        )
    if not _is_number(term.count):
        raise TaskError(
            f"task {task.name}: {which}.count must be one number, not {term.count!r}. Try: the number of rows or tokens."
        )
    if not term.log:
        return term
    wrong = {key: value for key, value in term.log.items() if not _is_number(value)}
    if wrong:
        raise TaskError(
            f"task {task.name}: {which}.log must hold one number for each name, not {wrong}. Try: their means."
        )
    return replace(term, log={key: getattr(value, "detach", lambda v=value: v)() for key, value in term.log.items()})


def _mean_to_loss(task: Task, mean: Any, count: Any) -> Loss:
    import torch

    if not _is_scalar_tensor(mean) or not _is_number(count):
        raise TaskError(
            f"task {task.name}: loss() returned a mean and a count of types {type(mean).__name__} and "
            f"{type(count).__name__}. Try: return two numbers, the mean a tensor."
        )
    exact = mean.to(torch.promote_types(mean.dtype, torch.float32))  # bf16 cannot even hold a count of 300
    number = torch.as_tensor(count, device=mean.device)
    # The mean over nothing is NaN although its gradient is zero, as with a micro-batch whose labels are all ignored.
    return Loss(sum=torch.where(number > 0, exact * number, torch.zeros_like(exact)), count=count)


def _label_count(model: "nn.Module", batch: Any) -> "Tensor | None":
    """How many labels the mean of a Hugging Face model runs over; None if it is not known, or if it runs over rows.

    A wrong answer for an unusual model shows when planning compares a batch with its two halves.
    """
    labels: Any = batch.get("labels") if isinstance(batch, (Mapping, UserDict)) else None
    if not hasattr(labels, "is_floating_point") or labels.is_floating_point():
        return None
    while (inner := getattr(model, "get_base_model", None)) is not None:  # PEFT wraps a model more than once
        model = inner()
    model = getattr(model, "_orig_mod", model)  # compiled
    kind = getattr(model, "loss_type", None) or type(model).__name__
    encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if "MaskedLM" in kind or "Classification" in kind or encoder_decoder:
        shifts = False
    elif "ConditionalGeneration" in kind:  # images or sound in, text out: a causal language model
        shifts = True
    elif "CausalLM" in kind or "LMHead" in kind:
        # transformers' shared loss function shifts the labels; decoders such as BartForCausalLM use their own, which does not
        shifts = "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names
    else:
        return None
    counted: Tensor = (labels[..., 1:] if shifts else labels) != -100
    return counted.sum()


def _is_output(value: Any) -> bool:
    """A Hugging Face `ModelOutput`: a mapping with its loss as an attribute."""
    return _is_scalar_tensor(getattr(value, "loss", None))


def _is_scalar_tensor(value: Any) -> bool:
    return hasattr(value, "requires_grad") and value.numel() == 1


def _is_number(value: Any) -> bool:
    """A number of Python or NumPy, or a tensor with one element."""
    if hasattr(value, "numel"):
        return bool(value.numel() == 1)
    return isinstance(value, Real) or getattr(value, "shape", None) == ()
