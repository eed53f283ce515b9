"""Out-of-memory errors at a drawn operation of a step, for many kinds of models and optimizers, in float64.

An `Injector` sees every operation that torch dispatches and raises in the middle of a step where a plan of faults says so.
`train` runs a few steps under it; what comes back is everything that training leaves behind, to be compared.
"""

import functools
import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration
from transformers.optimization import Adafactor as HuggingFaceAdafactor

from brimful.data.reader import StepRows
from brimful.memory import context
from brimful.step import optimizer_memory, stepper
from brimful.step.checks import SplitCheck
from brimful.task import Loss, Task

VOCABULARY = 30
LONGEST = 9
STEPS, ROWS = 4, 8

# Models


class Texts(Task):
    """Next-word prediction on rows of very different lengths. `model_kind` makes the model from its class."""

    worst_shape = (LONGEST,)
    split_changes_result = False
    """With dropout, BatchNorm or a random collate another split gives other numbers; otherwise only other rounding."""

    def row(self, draw: random.Random) -> dict:
        words = [draw.randrange(1, VOCABULARY) for _ in range(draw.choice((2, 3, LONGEST)))]
        return {"words": torch.tensor(words), "target": float(draw.uniform(-1, 1))}

    def shape(self, row):
        return (len(row["words"]),)

    def collate(self, rows):
        words = nn.utils.rnn.pad_sequence([row["words"] for row in rows], batch_first=True)
        labels = torch.where(words.roll(-1, 1) == 0, -100, words.roll(-1, 1))
        labels[:, -1] = -100
        return {"words": words, "labels": labels, "target": torch.tensor([row["target"] for row in rows]).double()}

    def loss(self, model, batch):
        logits, counted = model(batch["words"]), batch["labels"] != -100
        total = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100)
        return Loss(total, counted.sum(), log={"word": batch["words"][counted].double().mean()})


class Dropout(Texts):
    """An MLP with dropout."""

    split_changes_result = True

    def model(self):
        layers = [nn.Embedding(VOCABULARY, 8), nn.Linear(8, 12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, VOCABULARY)]
        return nn.Sequential(*layers)


class Norms(Texts):
    """BatchNorm's statistics are averages of micro-batches, and a buffer of the model's own is replaced at every forward."""

    split_changes_result = True

    def model(self):
        return _NormNet()


class Noisy(Texts):
    """`collate` draws from the generators of Python, NumPy and torch."""

    split_changes_result = True

    def model(self):
        return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Tanh(), nn.Linear(8, VOCABULARY))

    def collate(self, rows):
        batch = super().collate(rows)
        keep = torch.rand(batch["words"].shape) > 0.1 * random.random() + 0.1 * np.random.rand()
        batch["words"] = torch.where(keep, batch["words"], 1)
        return batch


class Terms(Texts):
    """Words and rows are counted, so no factor at the end can serve both terms."""

    def model(self):
        return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, VOCABULARY))

    def loss(self, model, batch):
        first = model[0](batch["words"][:, 0]).mean(1)
        return {"words": super().loss(model, batch), "rows": Loss((first - batch["target"]).square().sum(), len(first))}

    def counts(self, batch):
        return {"words": (batch["labels"] != -100).sum(), "rows": len(batch["words"])}


class Recurrent(Texts):
    def model(self):
        return _RecurrentNet()


class TiedLM(Texts):
    """GPT-2, whose head is its embedding."""

    def model(self):
        sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": LONGEST, "vocab_size": VOCABULARY}
        config = GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=1, eos_token_id=1)
        return GPT2LMHeadModel(config)

    def loss(self, model, batch):
        return super().loss(lambda words: model(words, use_cache=False).logits, batch)


class DropoutT5(Texts):
    split_changes_result = True

    def model(self):
        sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": VOCABULARY}
        return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.2, decoder_start_token_id=0))

    def loss(self, model, batch):
        def logits(words):
            mask = (words != 0).long()
            return model(input_ids=words, attention_mask=mask, decoder_input_ids=words, use_cache=False).logits

        return super().loss(logits, batch)


class _NormNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(VOCABULARY, 8), nn.BatchNorm1d(8), nn.Linear(8, VOCABULARY)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, words):
        x = self.norm(self.embed(words).transpose(1, 2)).transpose(1, 2)
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean((0, 1))
        return self.head(torch.tanh(x))


class _RecurrentNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell = nn.Embedding(VOCABULARY, 8), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, words):
        return self.head(self.cell(self.embed(words))[0])


MODELS = {one.__name__: one for one in (Dropout, Norms, Noisy, Terms, Recurrent, TiedLM, DropoutT5)}

# Optimizers


class ScheduleFree(torch.optim.Optimizer):
    """Keeps its averaging weight and counter in `param_groups`, as schedule-free optimizers do."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] * group["k"]
            share = group["lr"] * group["k"] / group["weight_sum"]
            for param in group["params"]:
                if param.grad is not None:
                    z = self.state[param].setdefault("z", param.clone())
                    z.sub_(param.grad, alpha=group["lr"])
                    param.lerp_(z, share)


class NoisySGD(torch.optim.SGD):
    """Adds noise to every update."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(torch.randn_like(param), alpha=1e-3)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-2),
    # The gradient of a bias of GPT-2's keys is nothing but rounding. With Adafactor's own 1e-30 it would be scaled up to 1e-6.
    "Adafactor": functools.partial(
        HuggingFaceAdafactor, lr=1e-2, eps=(1e-16, 1e-3), relative_step=False, scale_parameter=False
    ),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3),
    "schedule-free": ScheduleFree,
    "noise": functools.partial(NoisySGD, lr=0.05),
}

# Faults

ERRORS = (
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.23 GiB (injected)"),
    lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4096 bytes. Error code 12 (Cannot allocate memory) (injected)"
    ),
    lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)` (injected)"),
    lambda: MemoryError(),
)
PLACES = ("before", "check", "collate", "to device", "forward", "backward", "clip", "reservation", "other")
"""Where an operation of a step may be. Before: what comes before the first batch, such as copies of buffers. Check: the
exactness check of the first step. Other: scaling and adding up losses and gradients."""
REPEATED = PLACES[2:]
"""What a step that is repeated does again."""
MOST_IN_A_STEP = 2
"""A third error at the same single row means that the row does not fit, which is another promise."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Raise an error at this operation of the place, counted from 0 since the step's last fault."""

    place: str
    operation: int
    error: int


class Injector(TorchDispatchMode):
    """Counts the operations of each step by place, and raises where a fault is due."""

    def __init__(self, due: dict[int, list[Fault]]) -> None:
        super().__init__()
        self.due = {step: list(faults) for step, faults in due.items()}
        """By step, in the order in which they happen."""
        self.fired: Counter[str] = Counter()
        """Faults by place."""
        self.operations: dict[int, Counter[str]] = {}
        """By step, the operations of each place since the step's last fault."""
        self.step, self.place = 0, ""

    def begin(self, step: int) -> None:
        self.step, self.place, self.operations[step] = step, "before", Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = tree_flatten((args, kwargs))[0]
        meta = torch.device("meta")
        on_meta = any(
            one == meta if isinstance(one, torch.device) else getattr(one, "is_meta", False) for one in leaves
        )
        if func.namespace == "aten" and not (on_meta or func._schema.is_mutable):  # what allocates nothing cannot fail
            self._count()
        return func(*args, **kwargs)

    def _count(self) -> None:
        in_backward = self.place != "check" and torch._C._current_graph_task_id() != -1
        place = "backward" if in_backward else self.place
        if place not in PLACES:  # the optimizer's step and its trace on the meta device; the cleaning up after a fault
            return
        counts, due = self.operations[self.step], self.due.get(self.step)
        if due and (due[0].place, due[0].operation) == (place, counts[place]):
            self.fired[place] += 1
            counts.clear()
            self.place = "after check" if place == "check" else "cleaning"
            raise ERRORS[due.pop(0).error]()
        counts[place] += 1

    def _watch(self, function: Callable, place: str) -> Callable:
        def watched(*args, **kwargs):
            if self.place in ("check", "after check"):
                return function(*args, **kwargs)
            self.place = place
            if place == "to device":  # the CPU copies nothing, so torch dispatches nothing
                self._count()
            result = function(*args, **kwargs)
            self.place = "before" if place == "check" else "other"
            return result

        return watched

    @contextmanager
    def installed(self, task: Task, optimizer: torch.optim.Optimizer):
        hook = optimizer.register_step_pre_hook(lambda *_: setattr(self, "place", "update"))
        watched = [
            (SplitCheck, "examine", "check"),
            (task, "collate", "collate"),
            (context, "to_device", "to device"),
            (task, "loss", "forward"),
            (stepper, "get_total_norm", "clip"),
            (stepper, "clip_grads_with_norm_", "clip"),
            (optimizer_memory, "predict", "tracing"),
            (optimizer_memory, "reserve", "reservation"),
        ]
        with ExitStack() as stack:
            for owner, name, place in watched:
                stack.enter_context(mock.patch.object(owner, name, self._watch(getattr(owner, name), place)))
            stack.enter_context(self)
            yield
        hook.remove()


def draw_faults(draw: random.Random, operations: dict[int, Counter[str]], faults: int) -> dict[int, list[Fault]]:
    """`count` faults, half of them at any operation of the undisturbed run and half in any place of a step."""
    due: dict[int, list[Fault]] = {step: [] for step in operations}
    for _ in range(faults):
        step = draw.choice([step for step, planned in due.items() if len(planned) < MOST_IN_A_STEP])
        counts = {place: operations[step][place] for place in PLACES if operations[step][place]}
        if due[step]:  # half as many are sure to come again: counts() collates once, and not in a repeated step
            counts = {place: (count + 1) // 2 for place, count in counts.items() if place in REPEATED}
        weights = list(counts.values()) if draw.random() < 0.5 else None
        (place,) = draw.choices(list(counts), weights)
        due[step].append(Fault(place, draw.randrange(counts[place]), draw.randrange(len(ERRORS))))
    return due


# A run


@dataclass(kw_only=True)
class Trained:
    """What a few steps leave behind."""

    tensors: dict[str, torch.Tensor]
    """Weights, buffers and optimizer state, by name."""
    numbers: list[float]
    """Every loss, term, logged value and gradient norm, and what the optimizer has in its groups."""
    random_state: list
    groups: list[list[list[int]]]
    """By step, the rows of each micro-batch that the gradients came from."""
    injector: Injector
    events: list
    ooms: int

    def same_bits(self, other: "Trained") -> bool:
        return (
            self.tensors.keys() == other.tensors.keys()
            and all(torch.equal(one, other.tensors[name]) for name, one in self.tensors.items())
            and self.numbers == other.numbers
            and str(self.random_state) == str(other.random_state)
        )

    def deviation(self, other: "Trained") -> float:
        """The largest relative L2 distance of weights, optimizer state and numbers."""
        ours, theirs = (
            {**one.tensors, "numbers": torch.tensor(one.numbers, dtype=torch.float64)} for one in (self, other)
        )
        assert ours.keys() == theirs.keys()
        distances = ((theirs[name] - value, value) for name, value in ours.items())
        return max(float(off.double().norm() / value.double().norm().clamp_min(1e-300)) for off, value in distances)


def train(
    task: Task,
    optimizer_name: str,
    seed: int,
    *,
    due: dict[int, list[Fault]] | None = None,
    groups: list[list[list[int]]] | None = None,
) -> Trained:
    """A few steps with these faults, or with exactly these micro-batches."""
    draw = random.Random(seed)
    steps = [[{**task.row(draw), "id": place} for place in range(ROWS)] for _ in range(STEPS)]
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    model = task.model().double().train()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    trainer = stepper.Stepper(model, optimizer, task, clip_norm=0.5)
    injector, collated, results, used = Injector(due or {}), [], [], []
    collate = task.collate

    def remember(rows):
        collated.append([row["id"] for row in rows])
        return collate(rows)

    with mock.patch.object(task, "collate", remember), injector.installed(task, optimizer):
        for number, rows in enumerate(steps, 1):
            injector.begin(number)
            results.append(trainer.step(rows if groups is None else _loaded(rows, groups[number - 1], task)))
            used.append(collated[-results[-1].micro_batches :])
    state = optimizer.state_dict()
    settings = [value for group in state["param_groups"] for value in group.values() if isinstance(value, int | float)]
    figures = [(r.loss, r.grad_norm, r.count, r.rows, *r.terms.values(), *r.log.values()) for r in results]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for param, entries in state["state"].items():
        tensors |= {f"{param}.{key}": torch.as_tensor(value) for key, value in entries.items()}
    numpy_state = np.random.get_state()
    return Trained(
        tensors={name: tensor.detach().clone() for name, tensor in tensors.items()},
        numbers=[float(one) for figure in figures for one in figure] + settings,
        random_state=[random.getstate(), numpy_state[1].tolist(), numpy_state[2:], torch.get_rng_state().tolist()],
        groups=used,
        injector=injector,
        events=trainer.events,
        ooms=trainer.ooms,
    )


def _loaded(rows: list, groups: list[list[int]], task: Task) -> StepRows:
    """These rows as a loader passes them on when it has split them so."""
    return StepRows(
        start=0, step_rows=len(rows), indices=np.arange(len(rows)), groups=groups,
        shapes=[(max(len(rows[index]["words"]) for index in group),) for group in groups],
        parts=[[rows[index] for index in group] for group in groups], collated=False,
    )  # fmt: skip


@dataclass(kw_only=True)
class Figures:
    """Of many cases, for a line in bench/RESULTS.md."""

    cases: int = 0
    places: Counter[str] = field(default_factory=Counter)
    steps_repeated: int = 0
    same_bits: int = 0
    rounding: int = 0
    deviation: float = 0.0

    def __str__(self) -> str:
        places = ", ".join(f"{self.places[place]} in {place}" for place in PLACES if self.places[place])
        return (
            f"{self.cases} cases, {self.places.total()} faults injected and survived ({places}), {self.steps_repeated} "
            f"attempts repeated; same bits as the undisturbed run with the same split: {self.same_bits} of {self.cases}; "
            f"largest relative deviation from the run that was never split: {self.deviation:.1e} in {self.rounding} cases"
        )


def check_case(model: str, optimizer: str, seed: int, faults: int, figures: Figures) -> None:
    """Train with faults drawn from the seed and compare with undisturbed runs."""
    task = MODELS[model]()
    undisturbed = train(task, optimizer, seed)
    due = draw_faults(random.Random(f"{model} {optimizer} {seed}"), undisturbed.injector.operations, faults)
    disturbed = train(task, optimizer, seed, due=due)
    case = f"{model} with {optimizer}, seed {seed}: {due}"
    assert disturbed.injector.fired.total() == faults, f"only {disturbed.injector.fired} were raised; {case}"
    # The check goes on in another precision, and buffers are copied to the host: neither repeats a step.
    unrepeated = disturbed.injector.fired["check"] + disturbed.injector.fired["before"]
    assert disturbed.ooms + unrepeated == faults, f"{disturbed.ooms} errors were counted; {case}"
    replayed = train(task, optimizer, seed, groups=disturbed.groups)
    assert replayed.ooms == 0 and replayed.groups == disturbed.groups
    assert disturbed.same_bits(replayed), f"off by {disturbed.deviation(replayed):.1e}; {case}"
    figures.cases += 1
    figures.same_bits += 1
    figures.places += disturbed.injector.fired
    figures.steps_repeated += disturbed.ooms
    if not task.split_changes_result:
        deviation = disturbed.deviation(undisturbed)
        assert deviation < 1e-10, f"off by {deviation:.1e}; {case}"
        figures.rounding += 1
        figures.deviation = max(figures.deviation, deviation)
