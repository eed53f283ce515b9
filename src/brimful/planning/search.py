"""One fit under way: the levers tried one after the other, and the plan made of the better trial."""

import os
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

import torch

from brimful.errors import BadOption, DoesNotFit, InexactSplit, TaskError
from brimful.memory.context import StepContext
from brimful.memory.model import Probe
from brimful.memory.oom import OutOfMemory
from brimful.memory.split import deal
from brimful.planning.exactness import Exactness, check_exactness
from brimful.planning.levers import checkpointing, cudnn_attention, frozen_choice
from brimful.planning.plan import Basis, Choice, HostPlan, Levers, Plan
from brimful.planning.probe import Mode, Prober, Progress, show_size
from brimful.planning.survey import PROVEN_REACH, Speed, Survey, Timing, find_fastest, micro_rows
from brimful.planning.target import PlanOptions, Target
from brimful.task import Shape, Task
from brimful.units import flag_bytes, show_bytes, show_rate, show_rows

# Every choice of a fit put into words: what was asked, what it became, why, and how sure that is.


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a fit decided, before it is told."""

    options: PlanOptions
    task: Task
    target: Target
    deal: tuple[int, ...]
    largest: int
    speed: Speed
    exactness: Exactness
    checkpointing: str
    checkpointing_why: str
    checkpointing_basis: Basis
    """Measured only where it was run with and without."""
    precision: str
    precision_why: str
    cudnn_attention: str
    cudnn_attention_why: str
    shape_note: str


def choices(d: Decision) -> tuple[Choice, ...]:
    """In the order a reader asks for them."""
    o, timing = d.options, d.speed.chosen
    return (
        as_choice("device", _unless_auto(o.device), str(d.target.device), d.target.name, "measured"),
        as_choice("memory_limit", o.memory_limit_bytes, d.target.limit_bytes, d.target.limit_reason, "measured"),
        as_choice("global_batch", o.global_batch, sum(d.deal), _deal_why(d), "asked"),
        _micro_batch(d),
        as_choice("accumulation", None, timing.accumulation, _accumulation_why(d), "measured"),
        as_choice(
            "checkpointing", _unless_auto(o.checkpointing), d.checkpointing, d.checkpointing_why, d.checkpointing_basis
        ),
        as_choice("precision", o.precision, d.precision, d.precision_why, "asked"),
        as_choice(
            "exactness", "inexact allowed" if o.allow_inexact else None, _exactness(d), d.exactness.sentence, "measured"
        ),
        *_card(d),
    )


def warnings(d: Decision) -> tuple[str, ...]:
    """What a user should read before training."""
    found = []
    if d.exactness.batch_norm:
        found.append(f"{d.exactness.sentence}; results depend on the micro-batch, here {d.speed.chosen.rows} rows")
    if d.exactness.looks_across_rows and (d.speed.chosen.accumulation > 1 or len(d.deal) > 1):
        found.append(f"{d.exactness.sentence}; --allow-inexact was given, so each micro-batch sees only its own rows")
    if d.shape_note:
        found.append(d.shape_note)
    return tuple(found)


def as_choice(name: str, requested: Any, effective: Any, reason: str, otherwise: Basis) -> Choice:
    """One decision; what was asked for and kept rests on that, and on nothing that was measured."""
    basis: Basis = "asked" if requested is not None and requested == effective else otherwise
    return Choice(name=name, requested=requested, effective=effective, reason=reason, basis=basis)


def _micro_batch(d: Decision) -> Choice:
    asked, rows = d.options.micro_batch, d.speed.chosen.rows
    if asked == "auto" and not d.exactness.exact and not d.options.allow_inexact:
        rate = show_rate(d.speed.chosen.rows_per_s)
        return as_choice(
            "micro_batch", None, rows, f"the fewest cuts, since a cut changes the result: {rate} rows/s", "measured"
        )
    if asked == "auto":
        return as_choice("micro_batch", None, rows, d.speed.reason, "measured")
    why = "as asked for" if asked == rows else f"the step has only {d.deal[0]} rows in a process"
    within = f"the largest within {d.target.fill:.0%} of the limit is {d.largest}"
    return as_choice("micro_batch", asked, rows, f"{why}; {within}", "measured")


def _card(d: Decision) -> list[Choice]:
    """What there is to say of a CUDA card alone."""
    if d.target.device.type != "cuda":
        return []
    asked = _unless_auto(d.options.cudnn_attention)
    return [as_choice("cudnn_attention", asked, d.cudnn_attention, d.cudnn_attention_why, "predicted"), _allocator()]


def _allocator() -> Choice:
    """How torch's allocator is set: what is reserved for the same tensors depends on it."""
    asked = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    if asked and "expandable_segments:True" in asked:
        return as_choice("allocator", None, asked, "segments that grow are not fragmented by varying shapes", "asked")
    would = "PYTORCH_ALLOC_CONF=expandable_segments:True would reserve less"
    return as_choice("allocator", None, asked or "torch's own", would, "asked")


def _deal_why(d: Decision) -> str:
    whose = "the task's own" if d.options.global_batch is None else "exactly as asked for"
    return whose if len(d.deal) == 1 else f"{whose}, dealt {'+'.join(map(str, d.deal))}"


def _accumulation_why(d: Decision) -> str:
    rows, timing = d.deal[0], d.speed.chosen
    if timing.accumulation == 1:
        return f"{rows} rows are one micro-batch"
    return f"{rows} rows in micro-batches of at most {timing.rows}"


def _exactness(d: Decision) -> str:
    return "exact" if d.exactness.exact else "whole step" if d.speed.chosen.accumulation == 1 else "inexact"


def _unless_auto(value: str) -> str | None:
    return None if value == "auto" else value


WORTH_CHECKPOINTING = 1.03
"""Checkpointing must be this much faster to be chosen where the step fits without it."""
CHALLENGE_AT = 0.95
"""The share of the budget for the size at which checkpointing is first timed: two probes predict it, none has read it."""
PRECISION_OF: dict[torch.dtype | None, Literal["fp32", "bf16", "fp16"]]
PRECISION_OF = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
WARM_UP_LENGTH = 64
"""The warm-up's rows are no longer than this: nothing is known yet of what length costs."""
LEAST_OVERHEAD = 0.25
"""Of the time of a micro-batch with hardly a row in it, at least this share is not the row's."""
ROWS_TO_COMPARE = 8
"""Rows of the batch that is compared with its halves."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting of checkpointing, surveyed and timed."""

    survey: Survey
    largest: int
    speed: Speed | None
    """None where nothing that is allowed fits."""
    checkpointed: bool


class Trials:
    """What is known so far, and the steps that add to it."""

    def __init__(
        self, rig: StepContext, target: Target, options: PlanOptions, shape: Shape, progress: Progress
    ) -> None:
        self.started = time.perf_counter()
        self.rig, self.target, self.options, self.shape = rig, target, options, shape
        self.prober = Prober(rig, target, progress)
        self.lever = checkpointing(rig.task, rig.model)
        self.deal = _dealt(rig.task, options)
        self.most = self.deal[0]
        self.once_s = 0.0
        self.short = shape
        self.compared_checkpointing = False
        self.exactness = Exactness(False, False, "a step of one row is never cut")

    def plan(self, key: str) -> Plan:
        """Try, choose, verify, and put it all down."""
        self._warm_up()
        trial, why = self._choose()
        assert trial.speed is not None
        with self.lever.set(trial.checkpointed):
            trial.survey.explore()  # what a second trial left out; all is read already after a first
            trial.survey.check_corner(self.target.budget_bytes)
            trial.survey.settle(trial.largest, self.target.budget_bytes)
            chosen = trial.survey.read(trial.speed.chosen.rows, self.shape, "full", reserved=True)
            overhead = self._overhead(trial.speed.chosen)
            frozen = frozen_choice(self.rig, self.shape, trial.speed.chosen.rows)
        if chosen is None:
            raise DoesNotFit(f"{show_size(trial.speed.chosen.rows, self.shape)} ran before and ran out of memory now: "
                             f"something else took memory on {self.target.name}{self.target.holders}", needed_bytes=0)  # fmt: skip
        plan = self._assemble(trial, chosen, overhead, why, key)
        return plan if frozen is None else replace(plan, choices=(*plan.choices, frozen))

    def _warm_up(self) -> None:
        fixed = self.options.checkpointing
        if (fixed == "on" and not (self.lever.offered or self.lever.already_on)) or (
            fixed == "off" and self.lever.already_on
        ):
            raise BadOption(f"--checkpointing {fixed}: {self.lever.how}")
        short = tuple(max(1, min(length // 4, WARM_UP_LENGTH)) for length in self.shape)
        rows = min(2, self.most)  # a single row is refused by BatchNorm
        try:
            failure = self.prober.warm_up(rows, short)
        except TaskError:
            if short == self.shape:
                raise
            short = self.shape  # a model of fixed input size, or a task at fault: its own worst shape tells
            failure = self.prober.warm_up(rows, short)
        self.short = short
        if failure is not None:
            raise self._first_step_too_large(rows, short)
        if self.prober.fixed_bytes > self.target.limit_bytes:
            raise self._fixed_part_too_large()
        self.once_s = self.prober.optimizer_seconds(rows, short)
        compared = min(ROWS_TO_COMPARE, sum(self.deal))
        if compared > 1:
            self.exactness = check_exactness(self.rig, self.prober.batch(compared, short))

    def _choose(self) -> tuple[Trial, str]:
        """The trial to go with, and why its checkpointing is as it is."""
        asked, offered = self.options.checkpointing, self.lever.offered
        if self.lever.already_on:
            return self._accepted(self._try(False)), self.lever.how
        if asked == "on":
            return self._accepted(self._try(True)), f"as asked for, {self.lever.how}"
        plain = self._try(False)
        if asked == "off":
            return self._accepted(plain), "as asked for"
        if not offered:
            return self._accepted(plain), self.lever.how
        if plain.speed is None:
            return self._accepted(self._try(True)), f"without it {self._shortfall(plain)}; {self.lever.how}"
        if plain.largest == self.most:
            return plain, "the whole step fits without it"
        if self.options.micro_batch != "auto":
            return plain, "at a fixed micro-batch recomputing would only cost time"
        if not plain.speed.rising:
            return plain, "more rows at once would gain little, so recomputing would only cost time"
        return self._challenge(plain)

    def _challenge(self, plain: Trial) -> tuple[Trial, str]:
        """Checkpointing against a trial that fits without it: timed at the largest size it leads to, and given up there."""
        assert plain.speed is not None
        self.compared_checkpointing = True
        off = plain.speed.chosen.rows_per_s
        with self.lever.set(True):
            survey = Survey(self.prober, self.shape, self.most, least=self._least)
            survey.explore_beside(plain.largest)
            if not survey.read_at_worst:
                return plain, "even sizes that fit without it ran out of memory with it"
            most = survey.model.largest(self.shape, CHALLENGE_AT * self.target.budget_bytes, self.most)
            rows = self._even(max(1, min(most, PROVEN_REACH * plain.largest)))
            first = find_fastest(self.most, rows, survey.time, self.once_s, only=True).chosen
            if first.rows_per_s <= WORTH_CHECKPOINTING * off:
                return plain, _slower(first, off)
            largest = survey.largest(self.target.budget_bytes)
            if largest == 0:
                return plain, "even sizes that fit without it are over the budget with it"
            speed = find_fastest(self.most, largest, survey.time, self.once_s, least=self._least)
        if speed.chosen.rows_per_s <= WORTH_CHECKPOINTING * off:  # fewer rows fit than were timed at first
            return plain, _slower(speed.chosen, off)
        said = f"{show_rate(speed.chosen.rows_per_s)} rows/s with it, {show_rate(off)} without; {self.lever.how}"
        return Trial(survey, largest, speed, True), said

    def _try(self, checkpointed: bool) -> Trial:
        with self.lever.set(checkpointed):
            survey = Survey(self.prober, self.shape, self.most, least=self._least)
            survey.explore()
            largest = survey.largest(self.target.budget_bytes) if survey.read_at_worst else 0
            rows = self._allowed_rows(survey, largest)
            if rows == 0:
                return Trial(survey, largest, None, checkpointed)
            only = self.options.micro_batch != "auto" or self._few_cuts
            speed = find_fastest(self.most, rows, survey.time, self.once_s, least=self._least, only=only)
            return Trial(survey, largest, speed, checkpointed)

    @property
    def _least(self) -> int:
        return min(2, self.most) if self.exactness.batch_norm else 1

    @property
    def _must_stay_whole(self) -> bool:
        return self.exactness.looks_across_rows and not self.options.allow_inexact

    @property
    def _few_cuts(self) -> bool:
        """Where a cut changes the result, the fewest cuts come before the fastest."""
        return not self.exactness.exact and not self.options.allow_inexact

    def _even(self, rows: int) -> int:
        """Rows of the largest when the step is cut evenly into micro-batches of at most so many."""
        return micro_rows(self.most, micro_rows(self.most, rows))

    def _allowed_rows(self, survey: Survey, largest: int) -> int:
        """The size to time first: the fixed one if it fits the limit, the whole step where it must not be cut."""
        if self.options.micro_batch == "auto":
            if largest == 0 or (self._must_stay_whole and largest < self.most):
                return 0
            return self._even(largest) if self._few_cuts else largest
        rows = min(self.options.micro_batch, self.most)
        if self._must_stay_whole and rows < self.most:
            return 0
        fits = rows <= largest or survey.predicted(rows) <= self.target.limit_bytes
        return rows if fits and survey.read(rows, self.shape, reserved=True) is not None else 0

    def _accepted(self, trial: Trial) -> Trial:
        """The trial, or the one sentence that says why nothing that is allowed fits."""
        if trial.speed is not None:
            if self._must_stay_whole and len(self.deal) > 1:
                raise InexactSplit(f"{self.exactness.sentence}, and {len(self.deal)} processes would cut it; "
                              f"use one process, or --allow-inexact")  # fmt: skip
            return trial
        if trial.largest == 0:
            raise self._one_row_too_large(trial)
        fixed = self.options.micro_batch
        if self._must_stay_whole:
            cut = micro_rows(self.most, trial.largest if fixed == "auto" else min(fixed, trial.largest))
            raise InexactSplit(
                f"task {self.rig.task.name}: {self.exactness.sentence}; {self.most} rows would have to be cut into {cut}: ask for "
                f"--global-batch {trial.largest} or fewer, a higher --memory-limit, or go on with --allow-inexact"
            )
        assert fixed != "auto"
        raise BadOption(
            f"--micro-batch {fixed}: {show_size(fixed, self.shape)} need {show_bytes(trial.survey.predicted(fixed))} as predicted, "
            f"the limit is {show_bytes(self.target.limit_bytes)}; at most {trial.largest} fit"
        )

    def _shortfall(self, trial: Trial) -> str:
        if trial.largest == 0:
            return "not even one row fits"
        return f"at most {trial.largest} rows fit"

    def _one_row_too_large(self, trial: Trial) -> DoesNotFit:
        """What one row takes: counted on the CPU, predicted on a card, a lower bound where nothing could be read."""
        with self.lever.set(trial.checkpointed):
            mode: Mode = "whole" if self._least == self.most else "full"
            probe, basis = self.prober.run_without_limit(self._least, self.shape, mode), ""
            peak = None if probe is None else probe.peak_bytes
        if peak is None and trial.survey.readings:
            peak, basis = trial.survey.predicted(self._least), " as predicted"
        elif peak is None:
            peak, basis = self.prober.fixed_bytes + self.prober.gradient_bytes, " at the very least"
        limit = self.target.limit_bytes
        needed = flag_bytes(peak / self.target.fill)
        asked = self.options.memory_limit is not None
        tips = [f"give --memory-limit {needed} or more" if asked else f"have {needed} free"]
        if 1.01 * peak <= limit:
            tips.append(f"--fill {peak / limit + 0.01:.2f}")
        if self.lever.offered and not trial.checkpointed:
            tips.append("--checkpointing auto")
        if self.shape:
            tips.append("shorter --lengths")
        return DoesNotFit(
            f"{show_size(self._least, self.shape)} {'needs' if self._least == 1 else 'need'} {show_bytes(peak)}{basis}, {show_bytes(self.prober.fixed_bytes)} of it "
            f"weights and optimizer state, and {self.target.fill:.0%} of the limit are {show_bytes(self.target.budget_bytes)}"
            f"{self.target.holders}: {', or '.join(tips)}",
            needed_bytes=round(peak / self.target.fill) + 1,
        )

    def _fixed_part_too_large(self) -> DoesNotFit:
        """Where a row can be counted without the limit, what is advised has room for one."""
        held = self.prober.fixed_bytes + self.prober.gradient_bytes
        peak = self._smallest_step_bytes()
        needed = max(held, peak or 0) / self.target.fill
        return DoesNotFit(
            f"weights, optimizer state and gradients take {show_bytes(held)} before any row, and the limit is "
            f"{show_bytes(self.target.limit_bytes)}{self.target.holders}: give --memory-limit "
            f"{flag_bytes(needed)} {'at the very least' if peak is None else 'or more'}, an optimizer with less state, "
            f"or fewer trainable weights",
            needed_bytes=round(needed) + 1,
        )

    def _smallest_step_bytes(self) -> int | None:
        """What a step in micro-batches of one row takes, of two where one is refused; None where it cannot be told."""
        for rows in (1, 2):
            try:
                with self.lever.set(self.options.checkpointing != "off" and self.lever.offered):
                    probe = self.prober.run_without_limit(rows, self.shape, "whole" if rows == self.most else "full")
                return None if probe is None else probe.peak_bytes
            except TaskError:  # BatchNorm refuses a single row
                continue
        return None

    def _first_step_too_large(self, rows: int, shape: Shape) -> DoesNotFit:
        """Nothing was read yet: what the optimizer's state takes is known only once a step has run."""
        weights = sum(p.numel() * p.element_size() for p in self.rig.model.parameters())
        least = weights + self.prober.gradient_bytes
        needed = max(self.target.limit_bytes, least) / self.target.fill
        return DoesNotFit(
            f"the first step, of {show_size(rows, shape)}, ran out of memory: weights and gradients take {show_bytes(least)}, and the "
            f"optimizer's state and the rows do not fit into the rest of {show_bytes(self.target.limit_bytes)}{self.target.holders}: "
            f"give --memory-limit {flag_bytes(needed)} or more, an optimizer with less state, or fewer trainable weights",
            needed_bytes=round(needed),
        )

    def _overhead(self, chosen: Timing) -> float | None:
        """What a micro-batch costs besides its rows, in rows × lengths: a line from one with hardly a row to the chosen.

        None where rows have no lengths to pad, where cuts are to be few, or where the time does not grow with the rows.
        """
        if self._few_cuts or not self.shape:
            return None
        timed = self.prober.time(self._least, self.short, whole=False, reserved=False)
        if isinstance(timed, OutOfMemory):
            return None
        little, small_s = self._least * sum(self.short), timed[0]
        work = chosen.rows * sum(self.shape)
        per_work_s = (chosen.seconds - small_s) / (work - little) if work > little else 0.0
        if per_work_s <= 0:
            return None
        return max(small_s - per_work_s * little, LEAST_OVERHEAD * small_s) / per_work_s

    def _assemble(self, trial: Trial, chosen: Probe, overhead: float | None, why: str, key: str) -> Plan:
        assert trial.speed is not None
        survey, timing = trial.survey, trial.speed.chosen
        on = trial.checkpointed or self.lever.already_on
        autocast, precision_why = self.target.autocast(self.options.precision, self.rig.task.precision)
        precision = PRECISION_OF[autocast]
        cudnn, cudnn_why = cudnn_attention(self.options.cudnn_attention, self.target.device, self.shape)
        decision = Decision(
            options=self.options, task=self.rig.task, target=self.target, deal=self.deal, largest=trial.largest,
            speed=trial.speed, exactness=self.exactness, checkpointing="on" if on else "off", checkpointing_why=why,
            checkpointing_basis="measured" if self.compared_checkpointing or trial.checkpointed else "predicted",
            precision=precision, precision_why=precision_why, cudnn_attention=cudnn, cudnn_attention_why=cudnn_why,
            shape_note=survey.shape_note,
        )  # fmt: skip
        at_largest = survey.read(trial.largest, self.shape) or chosen
        return Plan(
            task=self.rig.task.name,
            device=str(self.target.device),
            device_name=self.target.name,
            limit_bytes=self.target.limit_bytes,
            fill=self.target.fill,
            shape=self.shape,
            global_batch=sum(self.deal),
            micro_batch=timing.rows,
            largest_micro_batch=trial.largest,
            accumulation=timing.accumulation,
            processes=len(self.deal),
            deal=self.deal,
            memory_model=survey.model,
            predicted_peak_bytes=survey.said(timing.rows),
            measured_peak_bytes=chosen.peak_bytes,
            reserved_peak_bytes=chosen.reserved_bytes,
            largest_predicted_peak_bytes=survey.said(trial.largest),
            largest_measured_peak_bytes=at_largest.peak_bytes,
            one_more_predicted_peak_bytes=survey.predicted(trial.largest + 1) if trial.largest < self.most else None,
            rows_per_s=timing.rows_per_s,
            overhead=overhead,
            ooms=self.prober.ooms,
            probes=self.prober.probes,
            plan_s=time.perf_counter() - self.started,
            levers=Levers(
                checkpointing="on" if on else "off",
                compile="off",
                chunked_loss="off",
                precision=precision,
                cudnn_attention=cudnn,
            ),
            host=HostPlan(
                workers=None,
                prefetch=None,
                pin_memory=None,
                predicted_bytes=None,
                limit_bytes=self.target.host_limit_bytes,
            ),
            choices=choices(decision),
            warnings=warnings(decision),
            key=key,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def _slower(on: Timing, off: float) -> str:
    return f"{show_rate(on.rows_per_s)} rows/s with it at {show_rows(on.rows)}, {show_rate(off)} without"


def _dealt(task: Task, options: PlanOptions) -> tuple[int, ...]:
    rows = options.global_batch or task.global_batch
    if rows < options.processes:
        raise TaskError(
            f"task {task.name}: its global_batch of {rows} rows gives {options.processes} processes less than a row each"
        )
    return deal(rows, options.processes)
