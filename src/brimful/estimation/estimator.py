"""`estimate`: what a training step takes on a card that is not here, and the micro-batch that fits it.

    task ─► traced on fake CUDA tensors at a few sizes ─► every allocation as a function of rows and lengths
                                                                 │ replayed through a model of torch's allocator
                                                                 ▼
                          card: memory, context, kernels ─► peaks ─► the largest micro-batch, the recommended one

Nothing runs on a GPU and nothing is measured: every figure is a prediction. Against an H200, T5 of 188 M parameters: allocated bytes
within 0.4 %, reserved bytes within 2.2 % in 13 of 13 cases, measured with torch 2.11 and transformers 5.17 (`tests/estimation`). An
estimate says whether a step like its own is among those (`accuracy`).
"""

import copy
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import torch

from brimful.errors import BadOption, TaskError, kind_of
from brimful.estimation.accuracy import COMPARED_CARD, ERRORS, STEPS, never_compared
from brimful.estimation.cards import Card, all_cards, find_card
from brimful.estimation.fake_cuda import load_shim, replaced
from brimful.estimation.step_memory import StepMemory
from brimful.estimation.trace import CUBLAS_LT, CUBLAS_LT_BYTES, TracedSetting, TraceNotes
from brimful.memory.history import CUBLAS, Block, Kind, Peaks
from brimful.memory.layout import LayoutName
from brimful.memory.model import FIRST_PHASES, MICRO_PHASES
from brimful.planning.levers import with_weights
from brimful.planning.plan_options import AutoCheckpointed, Checkpointed, PlanOptions, Weights
from brimful.planning.planner import planned_shape
from brimful.planning.probe import mean_row, read_rows, real_batches, with_dummy
from brimful.show import open_view
from brimful.task import Dataset, Precision, Shape, Task
from brimful.units import MiB, parse_bytes, show_bytes, show_rows

Sharding = Literal["none", "ddp", "fsdp"]
BUCKET_BYTES = 32 * MiB
"""Of Brimful's own processes: two such buckets for each dtype of the gradients."""
LENGTHS = (1.0, 0.75, 0.5, 0.25)
"""Shares of the longest row in the table of lengths."""
NAMED_BLOCKS = 5


@dataclass(frozen=True, kw_only=True)
class Size:
    """A micro-batch and what a step in such micro-batches takes. Everything is predicted."""

    rows: int
    shape: Shape
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What fits a limit at one setting."""

    setting: str
    """`packed bf16`, `padded bf16 checkpointed`."""
    change: str
    """How it differs from what was asked for, as options, or in words where no option does that; empty if it does not."""
    shape: Shape
    largest: int
    """The most rows of a micro-batch that fit at all, 0 if not one does."""
    recommended: int
    """The most that stay within `fill` of the limit, divided evenly over the step."""
    accumulation: int
    at_recommended: Size | None
    one_row: Size
    """What the smallest micro-batch takes: the least that this setting needs."""


@dataclass(frozen=True, kw_only=True)
class CardFit:
    """What fits one card."""

    card: Card
    limit_bytes: int
    fit: Fit


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a training step takes on a card. Every figure is a prediction."""

    task: str
    card: Card
    limit_bytes: int
    """What torch may reserve: the card's memory less the CUDA context."""
    fill: float
    global_batch: int
    processes: int
    sharding: Sharding
    fit: Fit
    size: Size
    """The micro-batch that the figures below are for: the requested one, the recommended one, or a single row if none fits."""
    fits: bool
    """Whether that micro-batch fits the limit."""
    phases: dict[str, int]
    """Peak allocated bytes by phase of the step."""
    kinds: dict[str, int]
    """What is allocated at the peak, and the context beside it."""
    blocks: tuple[Block, ...]
    """The largest blocks at the peak."""
    reserved_native_bytes: int
    """Reserved bytes without expandable segments."""
    lengths: tuple[Fit, ...]
    """The same setting for shorter rows."""
    levers: tuple[Fit, ...]
    """Other settings at the same length."""
    not_offered: tuple[str, ...]
    """Levers that this task does not have, and why. Empty where levers were not compared."""
    kernels: tuple[Fit, ...]
    """The same setting with other kernels than those of the card, or without a chunked loss. No option does that. Empty if not
    one row fits."""
    cards: tuple[CardFit, ...]
    """The same setting on other cards."""
    assumptions: tuple[str, ...]
    basis: Literal["cuda", "cpu"]
    """The device that was faked."""
    error: float | None
    """The largest relative error seen in steps like this one. None: none of them was compared with a GPU."""
    never_compared: tuple[str, ...]
    """What sets this step apart from those that were compared."""
    estimate_s: float

    @property
    def largest_micro_batch(self) -> int:
        return self.fit.largest

    @property
    def recommended_micro_batch(self) -> int:
        return self.fit.recommended

    @property
    def peak_allocated_bytes(self) -> int:
        return self.size.allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        return self.size.reserved_bytes

    @property
    def accuracy(self) -> str:
        """What is known of the error of these figures."""
        seen = f"{STEPS} padded T5 steps on an {COMPARED_CARD} were predicted within {ERRORS[self.basis]:.1%}"
        if self.error is None:
            return (
                f"unknown, because some of this was never compared with a GPU: {', '.join(self.never_compared)}; {seen}"
            )
        other = "" if COMPARED_CARD in self.card.name else "; on other cards nothing was compared"
        return f"{seen}, and this step is like them{other}"

    @property
    def headline(self) -> str:
        """One sentence: what fits."""
        lengths = f" of {'+'.join(map(str, self.fit.shape))}" if self.fit.shape else ""
        if not self.fit.largest:
            need = show_bytes(self.fit.one_row.reserved_bytes)
            return f"{self.task} does not fit {self.card.name}: one row{lengths} takes {need}, and {show_bytes(self.limit_bytes)} can be used"
        if not self.fits:
            return f"{self.task} on {self.card.name}: {show_rows(self.size.rows)}{lengths} do not fit, {self.fit.largest} are the most"
        if not self.fit.recommended:
            share = self.fit.one_row.reserved_bytes / self.limit_bytes
            return f"{self.task} hardly fits {self.card.name}: one row{lengths} takes {share:.0%} of it, and {self.fill:.0%} may be planned for"
        if self.fit.accumulation == 1:
            return f"{self.task} fits {self.card.name}: the whole step of {show_rows(self.fit.recommended)}{lengths}"
        return (
            f"{self.task} fits {self.card.name}: micro-batches of {show_rows(self.fit.recommended)}{lengths} recommended, "
            f"{self.fit.accumulation} per step; {show_rows(self.fit.largest)} at most"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "largest_micro_batch": self.largest_micro_batch,
            "recommended_micro_batch": self.recommended_micro_batch,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
        }

    def __str__(self) -> str:
        peak = f"{show_bytes(self.peak_allocated_bytes)} allocated, {show_bytes(self.peak_reserved_bytes)} reserved"
        return f"{self.headline}. Predicted peak of {show_rows(self.size.rows)}: {peak}. Error: {self.accuracy}."


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What was asked for, checked."""

    task: Task
    options: PlanOptions
    rows: Dataset | None
    sharding: Sharding
    device: torch.device
    progress: Callable[[str], object] = field(compare=False)

    @property
    def step_rows(self) -> int:
        return -(-(self.options.global_batch or self.task.global_batch) // self.options.processes)

    @property
    def micro_batch(self) -> int | None:
        """The rows asked for, at most those of a step; None if they are to be found."""
        return None if self.options.micro_batch == "auto" else min(self.options.micro_batch, self.step_rows)


def estimate(
    task: Task,
    *,
    gpu: str | None = None,
    memory: int | str | None = None,
    data: str | os.PathLike[str] | Dataset | None = None,
    global_batch: int | None = None,
    micro_batch: int | Literal["auto"] = "auto",
    lengths: Shape | None = None,
    fill: float = 0.85,
    layout: Literal["auto", "padded", "packed"] = "auto",
    checkpointing: AutoCheckpointed = "auto",
    precision: Precision | None = None,
    weights: Weights | None = None,
    processes: int = 1,
    sharding: Sharding = "none",
    levers: bool = True,
    alternatives: Mapping[str, Task] | None = None,
    quiet: bool = False,
    progress: Callable[[str], object] = lambda phrase: None,
) -> Estimate:
    """Predict what a training step takes on a GPU that need not be here, and the micro-batch that fits it.

    >>> import brimful, torch
    >>> class Regression(brimful.Task):
    ...     global_batch = 4096
    ...     def model(self):
    ...         return torch.nn.Sequential(torch.nn.Linear(512, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1))
    ...     def dummy(self, rows, shape):
    ...         return torch.zeros(rows, 512)
    ...     def loss(self, model, batch):
    ...         return model(batch).square().mean()
    >>> result = brimful.estimate(Regression(), gpu="RTX 3060", quiet=True)
    >>> result.fits, result.recommended_micro_batch
    (True, 4096)

    Args:
        task: What to train.
        gpu: The card, such as "RTX 4090" or "H200"; "all" compares every card that is known. Default: the GPU of this machine.
        memory: Memory that may be used, such as "24GiB", instead of a card or of all that the card has.
        data: A path that `task.rows` reads, or any dataset. Default: the task's worst shape.
        global_batch: Rows per optimizer step, over all micro-batches and processes. Default: the task's value.
        micro_batch: The rows to predict the peak for. Default: the recommended number.
        lengths: The lengths to predict for. Default: the longest in the data, else `task.worst_shape`.
        fill: The share of the memory that the recommended size may take.
        layout: "padded" or "packed". "auto" packs where the task and the card can, as `plan` does.
        checkpointing: "off", "every-2", "every-3" or "on". "auto" is the first of them with which a row fits.
        precision: The precision of autocast. Default: the task's value.
        weights: The dtype of the weights, "fp32" or "bf16". Default: as the task makes them.
        processes: GPUs that share the global batch.
        sharding: What several GPUs hold: "none" is Brimful's own exchange of gradients, "ddp" torch's, "fsdp" FSDP2.
        levers: Whether to compare other settings and kernels as well. Each takes two or three traces.
        alternatives: Other tasks to compare, by the option that leads to them, such as one with another optimizer. Those of
            `task.memory_options` are compared without being named here.
        quiet: Show no progress.
        progress: Called with a phrase before each trace.

    Raises:
        TaskError: The task cannot be traced, for example because its loss needs values of tensors.
        BadOption: Any other request that cannot work.
    """
    started = time.perf_counter()
    if isinstance(task, type) and issubclass(task, Task):
        task = task()
    if not isinstance(task, Task):
        raise TaskError(f"estimate() was called with {kind_of(task)}. Try: a brimful.Task.")
    if sharding not in ("none", "ddp", "fsdp"):
        raise BadOption(f"sharding={sharding!r} must be one of none, ddp, fsdp.")
    if sharding != "none" and processes == 1:
        raise BadOption(f"sharding={sharding!r} needs more than one GPU. Try: processes=2.")
    options = PlanOptions(
        global_batch=global_batch, micro_batch=micro_batch, fill=fill, processes=processes, layout=layout,
        checkpointing=checkpointing, precision=precision, weights=weights, lengths=lengths,
    )  # fmt: skip
    card = find_card(gpu, memory)
    rows = None if data is None else read_rows(task, data)
    with open_view(quiet=quiet) as view:

        def status(phrase: str) -> None:
            view.status(phrase)
            progress(phrase)

        device = torch.device("cpu") if isinstance(load_shim(), str) else torch.device("cuda", 0)
        request = _Request(
            task=with_dummy(_for_card(task, card, precision), rows), options=options, rows=rows, device=device, sharding=sharding,
            progress=status,
        )  # fmt: skip
        own = {_option(values): _with_options(task, values) for values in task.memory_options()} if levers else {}
        others = {change: _for_card(one, card, precision) for change, one in {**own, **(alternatives or {})}.items()}
        result = _Estimator(request, card, memory).run(levers, others, every_card=gpu == "all")
    return replace(result, estimate_s=time.perf_counter() - started)


class _Estimator:
    """One request on one card."""

    def __init__(self, request: _Request, card: Card, memory: int | str | None) -> None:
        self.request, self.card = request, card
        self.limit_bytes = card.limit_bytes if memory is None else parse_bytes(memory, flag="memory=")
        self.assumptions: dict[str, None] = {}
        if memory is not None and card.known and self.limit_bytes > card.limit_bytes:
            raise BadOption(
                f"memory={memory!r} is more than the {show_bytes(card.limit_bytes)} that {card.name} has for torch. Try: a lower memory=."
            )

    def run(self, levers: bool, alternatives: Mapping[str, Task], every_card: bool) -> Estimate:
        request = self.request
        setting = self._setting(self.card)
        shape = self._shape(request.task, setting)
        memory, fit = self._first_that_fits(setting, shape)
        self._assume_traced(memory)
        if every_card:
            self._assume(f"everything but the table of cards is for {self.card.name}; name another with gpu=")
        if request.options.micro_batch != "auto" and request.options.micro_batch > request.step_rows:
            self._assume(f"a micro-batch has at most the {show_rows(request.step_rows)} of a step")
        rows = request.micro_batch or fit.recommended or 1
        peaks = self._peaks(memory, rows, shape, largest=NAMED_BLOCKS)
        within = self._peaks(memory, rows, shape, limit_bytes=self.limit_bytes).fits
        native = self._peaks(memory, rows, shape, expandable=False)
        unlike = never_compared(
            memory.notes, memory.setting, interpolates=memory.interpolates,
            exchange=request.sharding if request.options.processes > 1 else None,
        )  # fmt: skip
        return Estimate(
            task=request.task.name,
            card=self.card,
            limit_bytes=self.limit_bytes,
            fill=request.options.fill,
            global_batch=request.options.global_batch or request.task.global_batch,
            processes=request.options.processes,
            sharding=request.sharding,
            fit=fit,
            size=_size(rows, shape, peaks),
            fits=within,
            phases=peaks.phases,
            kinds={**{kind: peaks.kinds.get(kind, 0) for kind in get_args(Kind)}, "context": self.card.context_bytes},
            blocks=peaks.largest,
            reserved_native_bytes=native.reserved_bytes,
            lengths=tuple(self._by_length(memory, shape)),
            levers=tuple(self._other_settings(memory, shape, alternatives)) if levers else (),
            not_offered=tuple(self._not_offered(memory, alternatives)) if levers else (),
            kernels=tuple(self._other_kernels(memory, shape)) if levers and fit.largest else (),
            cards=tuple(self._on_all_cards(memory, shape)) if every_card else (),
            assumptions=tuple(self.assumptions),
            basis="cuda" if request.device.type == "cuda" else "cpu",
            error=None if unlike else ERRORS[request.device.type],
            never_compared=unlike,
            estimate_s=0.0,
        )

    def _setting(self, card: Card) -> TracedSetting:
        task, options = self.request.task, self.request.options
        layout = options.layout
        if layout == "packed" and not task.packs:
            raise BadOption(f"layout='packed' is not possible: {task.why_not_packed}. Try: layout='padded'.")
        autocast = _autocast(options.precision_for(task), card.has_flash)
        if layout == "auto":
            layout = "packed" if task.packs and card.has_flash and autocast is not None else "padded"
        return TracedSetting(
            device=self.request.device,
            has_flash=card.has_flash,
            autocast=autocast,
            weights=options.weights,
            checkpointing="off" if options.checkpointing == "auto" else options.checkpointing,
            layout=layout,
        )

    def _shape(self, task: Task, setting: TracedSetting) -> Shape:
        request = self.request
        shape, sampled = planned_shape(task, request.rows, request.options, request.progress)
        if sampled:
            self._assume(f"lengths: {sampled}")
        if setting.layout == "packed" and request.rows is not None and request.options.lengths is None and shape:
            shape = mean_row(task, request.rows, request.step_rows, steady=False)
            self._assume(f"packed rows: the mean row of a long step, {'+'.join(map(str, shape))} tokens")
        return shape

    def _first_that_fits(self, setting: TracedSetting, shape: Shape) -> tuple[StepMemory, Fit]:
        """With checkpointing left open: the first setting with which a row stays within the budget, else the first with which it fits
        at all, else the last. Those that are passed over are traced at as few sizes as possible."""
        memory = self._traced(self.request.task, setting, shape, lengths=True)
        fit = self._fit(memory, shape)
        others = _settings_of(memory.notes)[1:] if self.request.options.checkpointing == "auto" else ()
        if fit.recommended or not others:
            return memory, fit
        fits = {setting.checkpointing: fit}
        for checkpointed in others:
            other = replace(setting, checkpointing=checkpointed)
            fits[checkpointed] = self._fit(self._traced(self.request.task, other, shape, like=memory), shape)
            if fits[checkpointed].recommended:
                break
        order = [name for name, one in fits.items() if one.recommended or one.largest] or [others[-1]]
        best = next((name for name in order if fits[name].recommended), order[0])
        if best != setting.checkpointing:
            memory = self._traced(self.request.task, replace(setting, checkpointing=best), shape, lengths=True)
        return memory, self._fit(memory, shape)

    def _traced(
        self, task: Task, setting: TracedSetting, shape: Shape, *, lengths: bool = False, like: StepMemory | None = None
    ) -> StepMemory:
        own_lengths = lengths and real_batches(task) is None  # the data may have no rows of other lengths
        return StepMemory(
            with_weights(task, setting.weights), setting, shape, lengths=own_lengths, step_rows=self.request.step_rows,
            like=like, progress=self.request.progress,
        )  # fmt: skip

    def _peaks(self, memory: StepMemory, rows: int, shape: Shape, **options: Any) -> Peaks:
        return memory.peaks(rows, shape, **self._beside(memory.notes, self.card), **options)

    def _beside(self, notes: TraceNotes, card: Card) -> dict[str, Any]:
        """What is allocated beside the step, and over how many processes the state is divided."""
        processes = self.request.options.processes
        own = {"cublas_bytes": card.cublas_bytes, "processors": card.processors}
        if processes == 1:
            return own
        if self.request.sharding == "none":
            return {**own, "exchange_bytes": 2 * min(BUCKET_BYTES, notes.trained_bytes)}
        if self.request.sharding == "ddp":
            return {**own, "exchange_bytes": notes.trained_bytes}
        return {**own, "phase_bytes": fsdp_phase_bytes(notes, processes), "shards": processes}

    def _fit(self, memory: StepMemory, shape: Shape, change: str = "", card: Card | None = None) -> Fit:
        limit = self.limit_bytes if card is None else card.limit_bytes
        beside = self._beside(memory.notes, card or self.card)
        budget, step_rows = self.request.options.fill * limit, self.request.step_rows
        largest = memory.largest(shape, limit, lambda peaks: peaks.fits, limit_bytes=limit, **beside)
        within = min(largest, memory.largest(shape, budget, lambda peaks: peaks.reserved_bytes <= budget, **beside))
        accumulation = math.ceil(step_rows / within) if within else 0
        recommended = math.ceil(step_rows / accumulation) if accumulation else 0
        return Fit(
            setting=memory.setting.describe(),
            change=change,
            shape=shape,
            largest=largest,
            recommended=recommended,
            accumulation=accumulation,
            at_recommended=_size(recommended, shape, memory.peaks(recommended, shape, **beside))
            if recommended
            else None,
            one_row=_size(1, shape, memory.peaks(1, shape, **beside)),
        )

    def _by_length(self, memory: StepMemory, shape: Shape) -> Iterable[Fit]:
        if not memory.knows_lengths:
            return
        shorter = (tuple(max(1, round(share * length)) for length in shape) for share in LENGTHS)
        for lengths in dict.fromkeys(shorter):
            yield self._fit(memory, lengths)

    def _other_settings(self, memory: StepMemory, shape: Shape, alternatives: Mapping[str, Task]) -> Iterable[Fit]:
        """One lever changed at a time. A setting that cannot be traced is left out, and an assumption says so."""
        task, base, notes = self.request.task, memory.setting, memory.notes
        changes: list[tuple[str, Task, TracedSetting, Shape]] = [
            (f"checkpointing={checkpointed}", task, replace(base, checkpointing=checkpointed), shape)
            for checkpointed in _settings_of(notes)
            if checkpointed not in (base.checkpointing, "every-3", "offload")
        ]
        if task.packs and self.card.has_flash and base.autocast is not None:
            layout: LayoutName = "padded" if base.layout == "packed" else "packed"
            other = replace(base, layout=layout)
            changes.append((f"layout={layout}", task, other, self._shape(task, other)))
        if self.card.has_flash:
            name: Precision = "fp32" if base.autocast is not None else "bf16"
            if base.weights != "bf16":
                other = replace(
                    base, autocast=_autocast(name, True), layout="padded" if name == "fp32" else base.layout
                )
                changes.append((f"precision={name}", task, other, self._shape(task, other)))
                changes.append(("weights=bf16", task, replace(base, weights="bf16", autocast=torch.bfloat16), shape))
        changes += [
            (change, with_dummy(other, self.request.rows), base, shape) for change, other in alternatives.items()
        ]
        yield from self._compared(changes, memory)

    def _other_kernels(self, memory: StepMemory, shape: Shape) -> Iterable[Fit]:
        """What the card, torch or Brimful chooses without being asked, chosen otherwise."""
        base, notes, changes = memory.setting, memory.notes, list[tuple[str, TracedSetting]]()
        if notes.attention["flash"]:
            changes.append(("memory-efficient attention", replace(base, attention="memory-efficient")))
        if notes.attention["flash"] or notes.attention["memory-efficient"]:
            changes.append(("plain attention", replace(base, attention="plain")))
        if notes.other_optimizer is not None:
            changes.append((f"{notes.other_optimizer} optimizer", replace(base, optimizer=notes.other_optimizer)))
        if base.layout in self.request.task.chunked_loss:
            changes.append(("all logits at once", replace(base, chunked_loss=False)))
        yield from self._compared([(change, self.request.task, setting, shape) for change, setting in changes], memory)

    def _compared(self, changes: Iterable[tuple[str, Task, TracedSetting, Shape]], memory: StepMemory) -> Iterable[Fit]:
        for change, task, setting, lengths in changes:
            try:
                yield self._fit(self._traced(task, setting, lengths, like=memory), lengths, change)
            except TaskError as error:
                self._assume(f"{change} could not be traced: {error}")

    def _not_offered(self, memory: StepMemory, alternatives: Mapping[str, Task]) -> Iterable[str]:
        task, notes = self.request.task, memory.notes
        if notes.checkpointing is not None and not notes.checkpointing.available:
            yield f"checkpointing: {notes.checkpointing.reason.removeprefix('not available: ')}"
        if memory.setting.layout not in task.chunked_loss:
            yield "chunked loss: the task has none" if not task.chunked_loss else "chunked loss: packed rows have it"
        if notes.trained_bytes < notes.weight_bytes:
            yield f"frozen parts: {1 - notes.trained_bytes / notes.weight_bytes:.0%} of the weights are frozen already"
        elif not any(change.startswith("freeze=") for change in alternatives):
            yield "frozen parts: the task has no option for them"

    def _on_all_cards(self, memory: StepMemory, shape: Shape) -> Iterable[CardFit]:
        """Cards of other generations have other kernels and precisions, so each generation is traced by itself."""
        traced = {memory.setting: (memory, shape)}
        for card in all_cards():
            setting = replace(self._setting(card), checkpointing=memory.setting.checkpointing)
            if setting not in traced:
                lengths = self._shape(self.request.task, setting)
                traced[setting] = self._traced(self.request.task, setting, lengths, like=memory), lengths
            fit = self._fit(*traced[setting], card=card)
            yield CardFit(card=card, limit_bytes=card.limit_bytes, fit=fit)

    def _assume_traced(self, memory: StepMemory) -> None:
        """What the trace chose and assumed, as sentences."""
        request, notes = self.request, memory.notes
        if request.device.type == "cpu":
            self._assume(f"traced on fake CPU tensors, with a larger error, because {load_shim()}")
        kernels = ", ".join(
            f"{name} ({count / notes.attention.total():.0%})" for name, count in notes.attention.most_common()
        )
        if kernels:
            self._assume(
                f"attention by torch's kernels: {kernels}"
                if "packed" not in notes.attention
                else "attention by Brimful's packed kernels"
            )
        self._assume(f"optimizer: {notes.optimizer}")
        if memory.setting.autocast is not None:
            self._assume(f"CUDA's rules of autocast, {str(memory.setting.autocast).removeprefix('torch.')}")
        if memory.setting.layout == "packed" or notes.is_compiled:
            self._assume("blocks are not compiled; compiled ones take less")
        workspaces = notes.workspaces[CUBLAS] * self.card.cublas_bytes + notes.workspaces[CUBLAS_LT] * CUBLAS_LT_BYTES
        self._assume(
            f"{show_bytes(workspaces)} of workspaces and {show_bytes(self.card.context_bytes)} of CUDA context beside torch's own memory"
        )
        if memory.has_convolutions:
            self._assume("the algorithms that cuDNN usually takes for convolutions; others need other workspaces")
        count = self.card.processors.number
        whose = f"{self.card.name} has" if self.card.known else "an H200 has, since the card is not known"
        self._assume(f"kernels that divide their work over {count} multiprocessors, as {whose}")
        self._assume("expandable segments, which the brimful command switches on")
        if request.options.processes > 1:
            self._assume(_SHARDING[request.sharding])
        if notes.is_recurrent:
            self._assume("recurrent layers by torch's own kernels, where a card has those of cuDNN")
        if memory.one_shape:
            self._assume("only rows of the requested lengths could be traced, so there is no table of lengths")
        elif memory.order_follows_lengths:
            self._assume("rows of other lengths take other operations, so there is no table of lengths")
        if memory.interpolates:
            self._assume(
                "sizes differ in the order of their allocations, so peaks are interpolated and the error is larger"
            )
        for sentence, count in notes.assumptions.items():
            self._assume(f"{sentence} ({count} times)" if count > 1 else sentence)

    def _assume(self, sentence: str) -> None:
        self.assumptions[sentence] = None


def fsdp_phase_bytes(notes: TraceNotes, processes: int) -> tuple[tuple[str, int], ...]:
    """What FSDP2 holds in each phase besides the shards: gathered weights, and gradients that are not yet reduced.

    Forward holds what is outside of blocks, the weights of a block, what they were gathered into, and the same of the block before.
    Backward holds what is outside of blocks and the gradient of the head, two blocks, and a block's gradients twice while they are
    reduced; at its end all gradients from outside of blocks, twice. Between micro-batches whole gradients are held. Counted on two
    and four processes: `tests/estimation/test_sharded.py`.
    """
    block, outside, trained = notes.largest_block_bytes, notes.outside_blocks_bytes, notes.trained_bytes
    forward, whole = outside + 3 * block, trained - trained // processes
    head = min(notes.largest_outside_bytes, trained)
    early = outside + head + 2 * block + 2 * min(block, trained)
    late = max(early, 2 * min(outside, trained) + block)
    first = zip(FIRST_PHASES, (forward, forward + head, early, late), strict=True)
    return (*first, *((phase, forward + whole) for phase in MICRO_PHASES))


_SHARDING = {
    "none": "two buckets of 32 MiB to sum gradients; NCCL's own buffers are not counted",
    "ddp": "DDP's buckets are a second copy of the gradients (gradient_as_bucket_view is off); tensors counted on CPUs were as "
    "predicted; NCCL's own buffers are not counted",
    "fsdp": "FSDP2 shards weights, gradients and optimizer state by block, and holds whole gradients between micro-batches; "
    "predictions were 0 to 28% above tensors counted on CPUs; NCCL's own buffers are not counted",
}


def _option(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items() if value is not None)


def _with_options(task: Task, values: Mapping[str, Any]) -> Task:
    """Such a task with other values of its options, and the optimizer that this one was given."""
    other = type(task)(replace(task.options, **values))
    if "optimizer" in vars(task):
        other.optimizer = task.optimizer  # type: ignore[method-assign]
    return other


def _for_card(task: Task, card: Card, precision: Precision | None) -> Task:
    """A copy of the task whose weights are those it would have on the card."""
    own = copy.copy(task)
    with replaced(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or card.has_flash
    ):
        own.use_device(torch.device("cuda"), precision)
    return own


def _autocast(precision: Precision, has_bf16: bool) -> torch.dtype | None:
    if precision == "auto":
        precision = "bf16" if has_bf16 else "fp32"
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def _settings_of(notes: TraceNotes) -> tuple[Checkpointed, ...]:
    return notes.checkpointing.settings if notes.checkpointing is not None else ("off",)


def _size(rows: int, shape: Shape, peaks: Peaks) -> Size:
    return Size(rows=rows, shape=shape, allocated_bytes=peaks.allocated_bytes, reserved_bytes=peaks.reserved_bytes)
