"""Out of memory: from the error to the retry, and back to the old micro-batch size afterwards.

1. `Recovery.run` runs a part of the step. If memory runs out, `memory.oom.attempt` catches the error, leaves the
   except block, clears the frames that hold tensors, drops the gradients and empties the allocator's cache.
2. Random state, buffers and the scaler are restored to the beginning of the step.
3. `Recovery._respond` decides what changes and reports it as an `oom` event:

       a micro-batch that can be split       `MicroBatchLimit` comes down, so the next split is finer; not yet if a CUDA
                                             graph's memory was given back, and that is enough
       a single row                          tried again twice, since memory may have been short for a moment only;
                                             then set aside (`skip_oversized`), or the run ends with `DoesNotFit`
       clipping, or the optimizer's bytes    tried again as it is, then with smaller micro-batches, then `DoesNotFit`

4. `run` returns False, and `Gradients` runs the step again under the new limit.
5. `Recovery.after_step` looks at every step that succeeded: after `grow_after` of them the limit goes back up. If the
   allocator thrashes the limit comes down before an error, and a peak above the prediction corrects the memory model.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from brimful.errors import DoesNotFit, UserError
from brimful.memory.context import Phase, StepContext
from brimful.memory.layout import PACKED, PADDED, Layout, PackedLayout
from brimful.memory.ledger import count_existing
from brimful.memory.meter import AvailableMemory, allocated_bytes, allocator_retries
from brimful.memory.model import MemoryModel, work
from brimful.memory.oom import OutOfMemory, attempt
from brimful.memory.snapshot import Buffers, RandomState
from brimful.memory.split import padded_shape
from brimful.planning.levers import checkpointing
from brimful.planning.plan import Plan
from brimful.step.distributed import Share
from brimful.step.result import Events
from brimful.task import Shape
from brimful.units import show_bytes, show_rows

SINGLE_ROW_TRIES = 3
"""A single row is tried this often before it counts as too large."""
FINISH_TRIES = 4
"""Clipping and the optimizer's memory do not depend on the split: give up after this many errors."""
SAME_SPLIT_TRIES = 2
"""How many of them keep the split. A finer one helps only against fragmentation, and if the step was not split
before it costs memory: gradients are then held during a forward."""
THRASHING_STEPS = 2
"""Consecutive steps with allocator retries that count as thrashing."""
MODEL_ERROR = 1.02
"""How much more than predicted a step may take before the memory model is corrected."""
MOST_RAISED = 1.5
"""One error or one measured peak does not raise the memory model by more than this."""
GROW_AFTER = 10
"""Clean steps before the limit is raised again."""
LONGEST_WAIT = 64
"""The most that failed growths can multiply `grow_after` by."""
THRASHING_SHARE = 0.75
"""The share of the rows that is left when the allocator thrashes."""
MORE_ROOM = 1.05
"""Without a memory model, this much more room than at the error counts as memory that is free again."""
BLIND_WAIT = 8
"""Without a memory model and without more room, the limit is raised this many times less often."""
ENOUGH_ROOM = 0.98
"""Room for this share of a limit is enough: what libraries allocate for themselves varies a little."""
Number = torch.Tensor | float
"""A number that may still be on the device."""
_STATE = ("correction", "measured", "may_run_whole", "clean_steps", "wait", "just_grown")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The micro-batch running when memory ran out; after the last one, the largest."""

    index: int
    of: int
    """Micro-batches of the step on this rank."""
    rows: list[int]
    shape: Shape

    @property
    def whole(self) -> bool:
        """The step is not split, so no gradients are held beside it."""
        return self.of == 1


@dataclass
class StepState:
    """One step while it runs, over all its attempts."""

    step: int
    share: Share
    rows: list[int]
    """All rows but those set aside."""
    groups: list[list[int]] = field(default_factory=list)
    """The rows of each micro-batch in this attempt."""
    micro_batch: MicroBatch = MicroBatch(0, 0, [], ())
    done: bool = False
    """Whether the last attempt succeeded."""
    terms: Mapping[str, tuple[Number, Number]] = field(default_factory=dict)
    """Sum and count of each term of the loss."""
    log: Mapping[str, tuple[Number, Number]] = field(default_factory=dict)
    """Weighted sum and weight of each value in `Loss.log`."""
    counts: dict[str, float] = field(default_factory=dict)
    """What the terms of these rows count, if the task can tell before the forward."""
    divisor: Number = 1.0
    """What sums were divided by before backward, unless each term has its own total."""
    busy_s: float = 0.0
    largest_cost: float = 0.0
    """The cost of the largest micro-batch that succeeded in this attempt."""
    ooms: int = 0
    finish_failures: int = 0
    """Errors in clipping or in the reservation."""
    single_row_failures: Counter[tuple[int, ...]] = field(default_factory=Counter)
    set_aside: list[int] = field(default_factory=list)
    stop: UserError | None = None
    """Raised once all ranks know of it."""

    @property
    def split(self) -> list[tuple[int, Shape]]:
        """Rows and padded lengths of each micro-batch."""
        return [(len(group), self.share.shape(group)) for group in self.groups]


class Recovery:
    """Survives out-of-memory errors of a step on one rank, and learns from them."""

    def __init__(
        self, context: StepContext, limit: "MicroBatchLimit", events: Events, *, skip_oversized: bool, rank: int
    ) -> None:
        self._context, self.limit, self._events = context, limit, events
        self._skip_oversized, self._rank = skip_oversized, rank
        self._memory = AvailableMemory(context.device)
        self._random_state = RandomState(context.device)
        self._optimizer_states = 0
        self._foreign_bytes = 0
        """Bytes of this process that are not training's, at the beginning of the step."""
        self._retries = allocator_retries(context.device)
        self._thrashing_steps = 0
        self._gave_graph_up = False
        """Whether a CUDA graph had to go for the last error."""
        self.ooms = 0
        """Errors of this rank, in all steps."""
        self.follow_model()

    def follow_model(self) -> None:
        """Modules were added or replaced."""
        self._buffers = Buffers(self._context.model)
        norms = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in self._context.model.modules())
        self.least_rows = 2 if norms else 1
        """Rows of the smallest micro-batch. BatchNorm cannot average over one."""

    def begin_step(self, step: int) -> None:
        """Remember what a retry restores."""
        count_existing(self._context.state_tensors)  # a limit may have been opened around this step only
        states = len(self._context.optimizer.state)
        if step > 1:
            self._memory.record_idle(reset=states != self._optimizer_states)
        self._optimizer_states = states
        self._foreign_bytes = self._memory.other_bytes()
        self._random_state = RandomState(self._context.device)
        self._buffers.refresh()

    def run(self, state: StepState, work: Callable[[], None]) -> bool:
        """Run a part of the step. False: memory ran out, everything is as before the step, and it has to be run again."""
        self._gave_graph_up = False
        outcome = attempt(work, self._context.device, clean=self._free, thorough=state.ooms > 0)
        state.done = not isinstance(outcome, OutOfMemory)
        if isinstance(outcome, OutOfMemory):
            self.restore()
            self._respond(state, outcome)
        return state.done

    def _free(self) -> None:
        """After an out-of-memory error."""
        self.drop_gradients()
        if self._context.graphs is not None and self._context.graphs.drop(out_of_memory=True):
            self._gave_graph_up = True

    def drop_gradients(self) -> None:
        self._context.drop_gradients()
        if self._context.scaler is not None:  # what unscale_() recorded of gradients that are gone
            self._context.scaler._per_optimizer_states.clear()

    def restore(self) -> None:
        """Random state and buffers as at the beginning of the step."""
        self._random_state.restore()
        self._buffers.restore()

    def _respond(self, state: StepState, error: OutOfMemory) -> None:
        """Lower the limit, set a row aside, or stop; and report it."""
        state.ooms += 1
        self.ooms += 1
        batch, phase, room = state.micro_batch, self._context.phase, self._memory.training_bytes()
        rows, shape = len(batch.rows), batch.shape
        predicted = self.limit.predicted_bytes(rows, shape, whole=batch.whole) if rows else None
        in_micro_batch = phase.in_micro_batch
        if in_micro_batch and rows <= self.least_rows:
            change = self._single_row_failed(state, batch, room, error)
        elif state.finish_failures >= FINISH_TRIES:
            change = self._give_up(state, phase, room, error)
        elif in_micro_batch and self._gave_graph_up and self.limit.has_room(predicted, room) and state.ooms == 1:
            change = "the memory of its CUDA graph is given back; trying the step again"
        elif rows > 1 and (in_micro_batch or (state.finish_failures >= SAME_SPLIT_TRIES and not batch.whole)):
            change = self.limit.lower(rows, shape, whole=batch.whole, available_bytes=room, again=state.ooms > 1)
        else:
            change = "trying the step again"
        self._events.add(
            "oom",
            state.step,
            f"out of memory in {self._describe(batch, phase)}: {change}",
            process=self._rank,
            phase=phase.value,
            micro_batch=batch.index,
            micro_batches=batch.of,
            rows=rows,
            shape=list(shape),
            predicted_bytes=predicted,
            available_bytes=room,
            allocated_bytes=allocated_bytes(self._context.device),
            attempt=state.ooms,
            change=change,
            message=error.message.splitlines()[0] if error.message else "",
            place=error.place,
        )

    def _describe(self, batch: MicroBatch, phase: Phase) -> str:
        if phase.in_micro_batch:
            size = self.limit.layout.show(len(batch.rows), batch.shape)
            return f"{phase.value}, micro-batch {batch.index + 1} of {batch.of} ({size})"
        return f"{phase.value}, after {batch.of} micro-batch{'es' if batch.of != 1 else ''}"

    def _single_row_failed(self, state: StepState, batch: MicroBatch, room: int | None, error: OutOfMemory) -> str:
        """The smallest micro-batch there is: try again, then set it aside or stop."""
        rows = tuple(batch.rows)
        name = f"row {rows[0]}" if len(rows) == 1 else f"rows {' and '.join(map(str, rows))}"
        predicted = self.limit.predicted_bytes(len(rows), batch.shape, whole=batch.whole)
        state.single_row_failures[rows] += 1
        if state.single_row_failures[rows] < SINGLE_ROW_TRIES and not self.limit.is_over(predicted):
            return f"{name} cannot be split, trying the step again"
        skipped = self._skip_oversized and predicted is not None and room is not None and predicted > room
        if self.limit.cost(len(rows), batch.shape) <= state.largest_cost and not skipped:
            state.stop = DoesNotFit(
                f"{name} of step {state.step} ran out of memory because the gradients of earlier rows take up part of it"
                f"{self._room_text(room, error)}. Try: {self._remedies(rows=False)}.",
                needed_bytes=(room or 0) + 1,
            )
            return "the run stops"
        shape = padded_shape([state.share.rows.shapes[row] for row in rows])  # without what fills a packed sequence
        lengths = f" (lengths {'+'.join(map(str, shape))})" if shape else ""
        if len(rows) == 1:
            needs = f"needs about {show_bytes(predicted)} (predicted)" if predicted else "does not fit"
        else:
            needs = f"need about {show_bytes(predicted)} (predicted)" if predicted else "do not fit"
        problem = f"{name} of step {state.step}{lengths} cannot be split and {needs}{self._room_text(room, error)}"
        if self._skip_oversized:
            state.rows = [row for row in state.rows if row not in rows]
            state.set_aside += rows
            self._events.add("oversized", state.step, f"{problem}; set aside", rows=list(rows), shape=list(shape))
            return f"{name} set aside"
        state.stop = DoesNotFit(
            f"{problem}. Try: {self._remedies()}.",
            needed_bytes=predicted or (room or 0) + 1,
        )
        return "the run stops"

    def _give_up(self, state: StepState, phase: Phase, room: int | None, error: OutOfMemory) -> str:
        state.stop = DoesNotFit(
            f"memory ran out {FINISH_TRIES + 1} times in {phase.value} of step {state.step}, which smaller micro-batches do not "
            f"change{self._room_text(room, error)}. Try: an optimizer with less state, a smaller model or more memory.",
            needed_bytes=(room or 0) + 1,
        )
        return "the run stops"

    def _room_text(self, room: int | None, error: OutOfMemory) -> str:
        """What training may use, what it holds without gradients and activations, and what it asked for last."""
        in_use = allocated_bytes(self._context.device)
        if room is None or in_use is None:
            return ""
        asked = f", and {error.asked} was asked for when it ran out" if error.asked else ""
        held = show_bytes(in_use - self._memory.other_bytes())
        return f"; the device has room for {show_bytes(room)}, {held} of it is in use without gradients and activations{asked}"

    def _remedies(self, *, rows: bool = True) -> str:
        """What would still save memory."""
        remedies = []
        lever = checkpointing(self._context.task, self._context.model)
        if lever.available and not lever.already_on:
            remedies.append(f"gradient checkpointing ({lever.reason})")
        if self._context.autocast is None and self._context.device.type != "cpu":
            remedies.append("precision='bf16'")
        remedies += ["shorter rows"] * rows + ["a smaller model or an optimizer with less state", "more memory"]
        remedies += ["skip_oversized=True to set such rows aside"] * rows
        return ", ".join(remedies[:-1]) + f" or {remedies[-1]}"

    def rehearse(self, plan: Plan) -> bool:
        """Run the plan's largest micro-batch once before the first step. False: it ran out of memory, the limit is lower.

        The caching allocator then has its final size at once: segments made for small tensors first leave holes (simulated
        over an epoch, 17.4 GB reserved instead of 15.9). It also proves the plan on the device as it is today.
        Weights, optimizer state, buffers, gradients and random state stay as they are.
        """
        context, rows, shape, whole = self._context, plan.micro_batch, plan.shape, plan.accumulation == 1
        random_state, buffers = RandomState(context.device), Buffers(context.model)

        def trial() -> None:
            for _ in range(
                1 if whole and context.graphs is None else 2
            ):  # the second with gradients held, or as a graph
                context.run_micro_batch(context.layout.example(context.task, rows, shape), rows)

        outcome = attempt(trial, context.device, clean=self._free)
        context.drop_gradients()
        buffers.restore()
        random_state.restore()
        size = context.layout.show(rows, shape)
        if isinstance(outcome, OutOfMemory):
            room = self._memory.training_bytes()
            change = self.limit.lower(rows, shape, whole=whole, available_bytes=room, again=False)
            self._events.add("oom", 0, f"out of memory in a trial of {size}: {change}", rows=rows, available_bytes=room)
            return False
        predicted = show_bytes(plan.predicted_peak_bytes)
        self._events.add("note", 0, f"a trial of the planned micro-batch ({size}) fits ({predicted} predicted)")
        return True

    def after_step(self, state: StepState, peak_bytes: int | None, gradient_bytes: int) -> None:
        """Learn from a step that succeeded. `gradient_bytes` of gradients may still be held."""
        retries = allocator_retries(self._context.device)
        self._thrashing_steps = self._thrashing_steps + 1 if retries > self._retries else 0
        self._retries = retries
        split = state.split
        if state.ooms or not split:
            return
        if self._thrashing_steps >= THRASHING_STEPS and max(rows for rows, _ in split) > 1:
            self._thrashing_steps = 0
            rows, shape = max(split, key=lambda part: self.limit.cost(*part))
            room = self._memory.training_bytes(excluding=gradient_bytes)
            lowered = self.limit.lower_for_thrashing(rows, shape, room, whole=len(split) == 1)
            sentence = f"the allocator had to empty its cache in {THRASHING_STEPS} consecutive steps: {lowered}"
            self._events.add("thrash", state.step, sentence, available_bytes=room)
        elif peak_bytes is not None and (change := self._correct_model(split, peak_bytes, gradient_bytes)):
            self._events.add("model", state.step, f"the step took more than predicted: {change}", peak_bytes=peak_bytes)
        elif self.limit.lowerings or self.limit.just_grown:
            room = self._memory.training_bytes(excluding=gradient_bytes)
            if change := self.limit.count_clean_step(room):
                self._events.add("grow", state.step, change, available_bytes=room)

    def _correct_model(self, split: list[tuple[int, Shape]], peak_bytes: int, gradient_bytes: int) -> str | None:
        predicted = self.limit.peak_bytes(split)
        if predicted is None or peak_bytes <= MODEL_ERROR * predicted:
            return None
        own = peak_bytes - max(self._foreign_bytes, self._memory.other_bytes(excluding=gradient_bytes))
        if own <= MODEL_ERROR * predicted:
            return None
        return self.limit.correct_model(min(own, round(MOST_RAISED * predicted)), predicted)


@dataclass(frozen=True, slots=True)
class Lowering:
    """A limit before it was lowered."""

    value: float
    correction: float
    may_run_whole: bool
    rows: int
    """Rows of the micro-batch that was too large."""
    available_bytes: int | None
    """Room on the device at that moment."""


@dataclass(kw_only=True)
class MicroBatchLimit:
    """How large a micro-batch may be: what was planned, what errors taught, and the way back up.

    The limit is on the cost of a micro-batch: predicted bytes with a memory model; without one padded work, rows × (1 +
    lengths), beginning at infinity, so that the whole step is tried first. An error lowers it:

        less room on the device than predicted        to the share `fill` of the room
        enough room, first error of the step          the model was too low and is raised to the room
        otherwise                                     to the cost of half the rows

    Every lowering is kept and undone after `grow_after` clean steps; if the room on the device is known, only once there is
    room. A growth that fails doubles the wait, up to 64 times. Nothing depends on the clock: the same errors give the same
    splits.
    """

    model: MemoryModel | None
    value: float
    """The most that a micro-batch may cost."""
    planned_layout: Layout = PADDED
    budget: float = math.inf
    """The most that `value` may become: the share of the memory to use."""
    max_rows: int | None = None
    """The most rows, if the user set `micro_batch`."""
    overhead: float | None = None
    """What one more micro-batch costs, in rows × padded lengths. None: as few as possible."""
    fill: float = 0.85
    grow_after: int = GROW_AFTER
    correction: float = 1.0
    """A factor on the model's predictions, from errors."""
    measured: float = 1.0
    """A further factor, from measured peaks. It is never undone."""
    may_run_whole: bool = True
    """An unsplit step holds no gradients beside it. Once one has failed, steps are split."""
    max_rows_now: int | None = None
    """The most rows in this step, which failed where the model sees no difference."""
    lowerings: list[Lowering] = field(default_factory=list)
    clean_steps: int = 0
    wait: int = 1
    """How many times `grow_after` to wait before growing."""
    just_grown: bool = False

    @classmethod
    def from_plan(cls, plan: Plan | None, micro_batch: int | None, grow_after: int) -> "MicroBatchLimit":
        """The plan's fastest size; without a plan the whole step."""
        if plan is None:
            return cls(model=None, value=math.inf, max_rows=micro_batch, grow_after=grow_after)
        fixed = [size for size in (micro_batch, plan.choice("micro_batch").requested) if size is not None]
        return cls(
            model=plan.memory_model,
            planned_layout=plan.row_layout,
            value=plan.micro_limit,
            budget=float(plan.budget_bytes),
            max_rows=min(fixed, default=None),
            overhead=plan.overhead,
            fill=plan.fill,
            grow_after=grow_after,
        )

    @property
    def layout(self) -> Layout:
        """As planned, but micro-batches are not filled up to a size that is over the limit by now."""
        planned = self.planned_layout
        if not isinstance(planned, PackedLayout) or planned.fixed is None:
            return planned
        return planned if self.cost(planned.fixed.rows, planned.fixed.shape) <= self.value else PACKED

    def split(self, shapes: list[Shape], *, part: bool = False) -> list[list[int]]:
        """Rows of these shapes in micro-batches within the limit. `part`: the step has other rows as well."""
        cost = self._cost_of_part if part else self._cost_in_step
        return self.layout.split(shapes, cost, self.value, max_rows=self._max_rows, overhead=self.overhead)

    def allows(self, rows: int, shape: Shape, *, whole: bool) -> bool:
        """Whether a proposed micro-batch may run as it is."""
        return rows <= (self._max_rows or rows) and self._cost_in_step(rows, shape, whole=whole) <= self.value

    @property
    def _max_rows(self) -> int | None:
        return min((rows for rows in (self.max_rows, self.max_rows_now) if rows is not None), default=None)

    def _cost_of_part(self, rows: int, shape: Shape, /, *, whole: bool = False) -> float:
        """Gradients are held beside a part of a step, even if the part itself is not split."""
        return self.cost(rows, shape)

    def _cost_in_step(self, rows: int, shape: Shape, /, *, whole: bool = False) -> float:
        return math.inf if whole and not self.may_run_whole else self.cost(rows, shape, whole=whole)

    def cost(self, rows: int, shape: Shape, *, whole: bool = False) -> float:
        if self.model is None:
            return work(rows, shape)
        return self.model.rising_cost(rows, shape, whole=whole, factor=self._factor)

    @property
    def _factor(self) -> float:
        return self.correction * self.measured

    def has_room(self, predicted_bytes: int | None, available_bytes: int | None) -> bool:
        """Whether the device has room for so much, as far as that is known."""
        if predicted_bytes is None or available_bytes is None:
            return False
        return predicted_bytes <= self.fill * available_bytes

    def is_over(self, predicted_bytes: int | None) -> bool:
        """Whether so much is more than the plan had, so that a moment without other users of the device would not help."""
        return predicted_bytes is not None and predicted_bytes > self.budget / self.fill

    def predicted_bytes(self, rows: int, shape: Shape, *, whole: bool = False) -> int | None:
        return None if self.model is None else round(self._factor * self.model.cost_bytes(rows, shape, whole=whole))

    def peak_bytes(self, split: list[tuple[int, Shape]]) -> int | None:
        """Predicted peak of a step split this way; None without a model."""
        if self.model is None:
            return None
        whole = len(split) == 1
        return round(self._factor * max(self.model.peak_bytes(*part, whole=whole) for part in split))

    def lower(self, rows: int, shape: Shape, *, whole: bool, available_bytes: int | None, again: bool) -> str:
        """A micro-batch of this size ran out of memory. Returns what changed."""
        self._remember(rows, available_bytes)
        predicted = self.predicted_bytes(rows, shape, whole=whole)
        if predicted is not None and available_bytes is not None and not again:
            if not self.has_room(predicted, available_bytes):
                self.value = min(self.value, self.fill * available_bytes)
                return f"the device has room for {show_bytes(available_bytes)}, micro-batches now use {self.fill:.0%} of that"
            raised = min(available_bytes / predicted, MOST_RAISED)
            self.correction *= raised
            if self.cost(rows, shape, whole=whole) > self.value:
                return f"the memory model was too low and is raised by {raised - 1:.0%}"
        half = max(1, (rows + 1) // 2)
        self._allow_at_most(half, shape, whole)
        if rows > 1 and self.cost(rows, shape) <= self.value:  # the model does not rise with the rows here
            self.max_rows_now = half
        return self._at_most(half, shape)

    def lower_for_thrashing(self, rows: int, shape: Shape, available_bytes: int | None, *, whole: bool = False) -> str:
        """The largest micro-batch left the allocator short. Returns what changed."""
        self._remember(rows, available_bytes)
        fewer = max(1, int(THRASHING_SHARE * rows))
        self._allow_at_most(fewer, shape, whole)
        return self._at_most(fewer, shape)

    def correct_model(self, measured_bytes: int, predicted_bytes: int) -> str:
        """A step took more than predicted, and fitted: sizes stay as they are, up to the budget. Returns what changed."""
        ratio = measured_bytes / predicted_bytes
        self.measured *= ratio
        self.value = min(ratio * self.value, max(self.budget, self.value))
        self.lowerings = [
            replace(one, value=min(ratio * one.value, max(self.budget, one.value))) for one in self.lowerings
        ]
        return f"the memory model is raised by {ratio - 1:.1%}"

    def _at_most(self, rows: int, shape: Shape) -> str:
        if self.layout is PADDED:
            return f"micro-batches{' of this length' if shape else ''} now have at most {show_rows(rows)}"
        return f"micro-batches now have at most {self.layout.show(rows, shape)}"

    def _allow_at_most(self, rows: int, shape: Shape, whole: bool) -> None:
        self.value = min(self.value, self.cost(rows, shape))
        self.may_run_whole = self.may_run_whole and not whole

    def _remember(self, rows: int, available_bytes: int | None) -> None:
        if self.just_grown:
            self.wait = min(2 * self.wait, LONGEST_WAIT)
        self.lowerings.append(Lowering(self.value, self.correction, self.may_run_whole, rows, available_bytes))
        self.clean_steps, self.just_grown = 0, False

    def count_clean_step(self, available_bytes: int | None) -> str | None:
        """A step succeeded without an error. After enough of them lowerings are undone; returns what changed."""
        self.max_rows_now = None
        self.clean_steps += 1
        if self.just_grown and self.clean_steps >= self.grow_after:
            self.just_grown, self.wait = False, 1
        if not self.lowerings or self.clean_steps < self.grow_after:
            return None
        undone: Lowering | None = None
        while self.lowerings and self._may_undo(self.lowerings[-1], available_bytes, first=undone is None):
            undone = self.lowerings.pop()
            self.value, self.correction, self.may_run_whole = undone.value, undone.correction, undone.may_run_whole
        if undone is None:
            return self._grow_with_room(available_bytes)
        self.clean_steps, self.just_grown = 0, True
        return f"micro-batch size restored to {show_rows(undone.rows)} after {self.grow_after} clean steps"

    def _may_undo(self, lowering: Lowering, available_bytes: int | None, *, first: bool) -> bool:
        waited = self.clean_steps >= self.grow_after * self.wait
        if available_bytes is None or lowering.available_bytes is None:
            return waited and first
        if self.model is None:
            if available_bytes >= MORE_ROOM * lowering.available_bytes:
                return waited
            return first and self.clean_steps >= self.grow_after * max(self.wait, BLIND_WAIT)
        return waited and self.fill * available_bytes >= ENOUGH_ROOM * lowering.value

    def _grow_with_room(self, available_bytes: int | None) -> str | None:
        """Some memory is free again, but not all."""
        if self.model is None or available_bytes is None or self.clean_steps < self.grow_after * self.wait:
            return None
        target = min(self.fill * available_bytes, self.lowerings[-1].value)
        if target * ENOUGH_ROOM <= self.value:
            return None
        self.value, self.clean_steps, self.just_grown = target, 0, True
        return f"the device has room for {show_bytes(available_bytes)} again, micro-batches may use {self.fill:.0%} of that"

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: the same splits follow from the same state. JSON has no infinity, so None stands for it."""
        return {
            **{name: getattr(self, name) for name in _STATE},
            "value": _finite(self.value),
            "lowerings": [
                [_finite(one.value), one.correction, one.may_run_whole, one.rows, one.available_bytes]
                for one in self.lowerings
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _STATE:
            setattr(self, name, state[name])
        self.value = _or_infinite(state["value"])
        self.lowerings = [Lowering(_or_infinite(value), *others) for value, *others in state["lowerings"]]


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None else value
