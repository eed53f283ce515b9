"""One fit under way: the levers tried one after the other, and the plan made of the better trial."""

import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

import torch

from brimful.errors import BadOption, DoesNotFit, Inexact, TaskError
from brimful.memory.bare import Rig
from brimful.memory.cut import deal
from brimful.memory.model import Probe
from brimful.memory.oom import OutOfMemory
from brimful.plan.exact import Exactness, check_exactness
from brimful.plan.frozen import frozen_choice
from brimful.plan.levers import checkpointing, cudnn_attention
from brimful.plan.options import FitOptions
from brimful.plan.plan import HostPlan, Levers, Plan
from brimful.plan.prober import Mode, Prober, Progress, show_size
from brimful.plan.reasons import Decision, choices, warnings
from brimful.plan.speed import Speed, Timing, find_fastest, micro_rows
from brimful.plan.survey import PROVEN_REACH, Survey
from brimful.plan.target import Target
from brimful.task import Shape, Task
from brimful.units import flag_bytes, show_bytes, show_rate, show_rows

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

    def __init__(self, rig: Rig, target: Target, options: FitOptions, shape: Shape, progress: Progress) -> None:
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
                raise Inexact(f"{self.exactness.sentence}, and {len(self.deal)} processes would cut it; "
                              f"use one process, or --allow-inexact")  # fmt: skip
            return trial
        if trial.largest == 0:
            raise self._one_row_too_large(trial)
        fixed = self.options.micro_batch
        if self._must_stay_whole:
            cut = micro_rows(self.most, trial.largest if fixed == "auto" else min(fixed, trial.largest))
            raise Inexact(
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
            fit_s=time.perf_counter() - self.started,
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


def _dealt(task: Task, options: FitOptions) -> tuple[int, ...]:
    rows = options.global_batch or task.global_batch
    if rows < options.processes:
        raise TaskError(
            f"task {task.name}: its global_batch of {rows} rows gives {options.processes} processes less than a row each"
        )
    return deal(rows, options.processes)
