"""Where the size of a micro-batch is decided: the fastest split of a step among the sizes that fit.

`find_fastest` (`speed.py`) times the splits, `Search` decides which may be timed: it tries the step without gradient checkpointing,
with it if nothing fits or if speed still rises with the rows, then with the fewest checkpointed blocks that make a larger
micro-batch possible, and makes the plan of the best trial. With `table=True` it then tries every other setting of the
levers. All that was timed is kept in the plan.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from brimful.errors import BadOption, DoesNotFit, InexactSplit, TaskError, UserError, in_one_line, user_line
from brimful.machine.host import tree_bytes
from brimful.memory.context import StepContext
from brimful.memory.forward import OTHER_OVERHEAD, OVERHEAD
from brimful.memory.layout import LAYOUTS, PACKED, PADDED, LayoutName
from brimful.memory.meter import trim_heap
from brimful.memory.model import Probe
from brimful.memory.oom import OutOfMemory, attempt
from brimful.memory.split import deal
from brimful.planning.choices import choices_of, levers_of, warnings_of
from brimful.planning.compile_trial import wants_compiled
from brimful.planning.exactness import (
    Exactness,
    NothingCounted,
    check_dummy,
    check_kernels,
    check_packing,
    check_rows,
    rows_to_compare,
    tokens_that_fit,
)
from brimful.planning.graph_trial import with_graph
from brimful.planning.host_memory import FILL_HOST
from brimful.planning.levers import EVERY, FROZEN_ROWS, checkpointing, compiling, frozen_choice
from brimful.planning.plan import Choice, HostPlan, Plan, Setting, Tried
from brimful.planning.plan_options import Checkpointed, PlanOptions
from brimful.planning.plan_time import FINISH, PlanTime, now
from brimful.planning.probe import Mode, Prober, Progress, mean_row, row_lengths, task_errors
from brimful.planning.speed import Speed, Timing, find_fastest, micro_rows
from brimful.planning.survey import PROVEN_REACH, Survey
from brimful.planning.target import Target, autocast_dtype
from brimful.task import Dataset, Shape, Task
from brimful.units import MiB, flag_bytes, show_bytes, show_rate, show_rows

WORTH_CHANGING = 1.03
"""Another setting of a lever, such as checkpointing where the step fits without it, must be this much faster."""
CHALLENGE_AT = 0.95
"""The share of the budget of the size at which checkpointing is first timed: no probe has measured
this size yet."""
ROOM_FOR_ROWS = 0.8
"""Another way to train is named if its weights, gradients and optimizer state take less than this share of the budget."""
WARM_UP_LENGTH = 64
"""Rows of the warm-up are no longer than this, because nothing is known yet of what length costs."""
LEAST_OVERHEAD = 0.25
"""At least this share of the smallest micro-batch's time is overhead."""
TRIAL_PASSES = 2 * FINISH
"""Passes of the largest size that there must be time for before another setting of the levers is tried."""
PRECISIONS: dict[Literal["fp32", "bf16", "fp16"], torch.dtype | None]
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
ROWS_TO_COMPARE = 8
"""Rows used by the exactness check."""
STEADY_CPU_BYTES = 512 * MiB
"""What the rows of a micro-batch may take in a deterministic plan on a CPU, which gains nothing from more of them."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting of the levers, probed and timed."""

    setting: Setting
    survey: Survey
    largest: int
    """The most rows that fit; 0 if none do, or if they were not looked for because a first size was slower."""
    speed: Speed | None
    """None if nothing that is allowed fits."""
    data_rows_per_s: float | None = None
    """Of the chosen split with the rows of the data as they come; None if that was not timed."""
    host_bytes: int = 0
    """What the chosen size moves to host RAM; of the smallest size if the host has no room even for that."""

    @property
    def rows_per_s(self) -> float:
        """What trials are compared by."""
        return self.data_rows_per_s or (self.speed.chosen.rows_per_s if self.speed else 0.0)


class Search:
    """The search for one plan, on a model that is ready to step."""

    def __init__(
        self, context: StepContext, target: Target, options: PlanOptions, shape: Shape, time: PlanTime,
        progress: Progress, rows: Dataset | None = None, steps: int | None = None,
    ) -> None:  # fmt: skip
        """`steps`: of the run that the plan is for, if that is known."""
        self.context, self.target, self.options, self.shape, self.time = context, target, options, shape, time
        self.task, self.rows, self.steps = context.task, rows, steps
        self.longest = shape
        """The longest row, whatever the layout plans for."""
        self.started = now()
        self.prober = Prober(context, target, time, progress)
        self.lever = checkpointing(self.task, context.model)
        self.compiler = compiling(self.task, context.model)
        self.deal = _deal(self.task, options)
        self.most = self.deal[0]
        self.once_s = 0.0
        self.short = shape
        self.exactness = Exactness(reason="a step of one row is never split")
        self.layout_reason = self.compile_reason = ""
        self.setting = Setting(
            layout=context.layout.name, precision=next(name for name, dtype in PRECISIONS.items() if dtype == context.autocast),
            compile="off", checkpointing="on" if self.lever.already_on else "off",
        )  # fmt: skip
        """What every trial begins with; it is complete when layout and compilation are chosen."""
        self._compared_rows = 0
        """Rows that were compared packed and alone."""
        self._sizes: dict[LayoutName, tuple[Shape, Shape]] = {}
        """By layout, the shape to plan for and a shorter one."""
        self.trials: list[Trial] = []
        self._compile_timings: list[Tried] = []
        self.not_tried: list[str] = []

    def plan(self, key: str) -> Plan:
        """Try, choose, verify with a full step at the chosen size, and record it all."""
        self._warm_up()
        self._check_requested_split()
        self._choose_layout()
        compiled, self.compile_reason = wants_compiled(self)
        if compiled:
            self.setting = replace(self.setting, compile="on")
        self.time.start()
        trial, reason = self._choose()
        if self.options.table:
            trial, reason = self._try_the_others(trial, reason)
        with self._set(trial.setting):
            return self._finish(trial, reason, key)

    @contextmanager
    def _set(self, setting: Setting) -> Iterator[None]:
        """The levers set so in the block. Blocks are not nested."""
        context, sizes = self.context, (self.shape, self.short)
        before = context.layout, context.autocast, context.scaler
        context.layout, context.autocast = LAYOUTS[setting.layout], PRECISIONS[setting.precision]
        context.scaler = context.scaler if context.autocast is before[1] else None
        self.shape, self.short = self._sizes[setting.layout]
        try:
            with self.compiler.set(setting.compile == "on"), self.lever.set(EVERY[setting.checkpointing]):
                yield
        finally:
            context.layout, context.autocast, context.scaler = before
            self.shape, self.short = sizes

    def _finish(self, trial: Trial, reason: str, key: str) -> Plan:
        """The plan of this trial, whose setting is on."""
        assert trial.speed is not None
        chosen = trial.speed.chosen
        trial.survey.explore()  # what a second trial left out; after a first there is nothing left
        trial.survey.check_short_rows(self._budget_bytes)
        trial.survey.assume_growth(trial.largest, self._budget_bytes)
        verified = trial.survey.measure(chosen.rows, self.shape, "full", reserved=True)
        overhead = self._overhead(chosen)
        frozen = None
        if self.time.allows(2 * FROZEN_ROWS, self.shape, 4, "what frozen weights save"):
            frozen = frozen_choice(self.context, self.shape, chosen.rows)
        if verified is None:
            raise DoesNotFit(
                f"{self.context.layout.show(chosen.rows, self.shape)} fitted before and ran out of memory now on "
                f"{self.target.name}{self.target.other_users}. Try: again, when nothing else takes memory there.",
                needed_bytes=0,
            )
        choices = [*choices_of(self, trial, reason), *([frozen] if frozen else [])]
        slowdown = self.prober.simulation_slowdown(chosen.rows, self.shape)
        plan = replace(self._assemble(trial, verified, overhead, choices, key), simulation_slowdown=slowdown)
        return with_graph(self, plan, chosen.seconds)

    def _warm_up(self) -> None:
        """The first step, and whether a step may be split."""
        wanted = self.options.checkpointing
        if wanted != "auto" and wanted not in self.lever.settings:
            reason = self.lever.reason.removeprefix("not available: ")
            if self.lever.available:
                few = f"the model has only {self.lever.blocks} blocks"
                reason = few if self.lever.blocks else f"it is switched {reason}, for all blocks or none"
                if wanted == "offload" and self.lever.blocks:
                    reason = f"{self.target.name} is no CUDA GPU, whose memory is apart from host RAM"
            raise BadOption(f'checkpointing="{wanted}" is not possible: {reason}. Try: checkpointing="auto".')
        short = self.prober.available(tuple(max(1, min(length // 4, WARM_UP_LENGTH)) for length in self.shape))
        rows = min(2, self.most)  # BatchNorm refuses a single row
        try:
            failure = self.prober.warm_up(rows, short)
        except TaskError:
            if short == self.shape:
                raise
            short = self.shape  # a model of fixed input size, or an error that the worst shape shows as well
            failure = self.prober.warm_up(rows, short)
        self.short = short
        if failure is not None:
            raise self._first_step_too_large(rows, short)
        if self.prober.fixed_bytes > self.target.limit_bytes:
            raise self._fixed_part_too_large()
        self.once_s = self.prober.optimizer_seconds(rows, short)
        compared = min(ROWS_TO_COMPARE, sum(self.deal))
        if compared > 1:
            self.exactness = self._check_exactness(compared)

    def _check_exactness(self, count: int) -> Exactness:
        """With real rows of different lengths if there are data, else with a probe batch."""
        rows, on, device = self.rows, "rows of the data", self.context.device
        if rows is not None and len(rows) > 1:
            with suppress(NothingCounted), task_errors(self.task, "loss", on), task_errors(self.task, on=on):
                result = attempt(lambda: check_rows(self.context, rows, count, self._comparable_tokens), device)
                if isinstance(result, Exactness):
                    return result
        result = attempt(lambda: check_dummy(self.context, self.prober.batch(count, self.short)), device)
        if isinstance(result, Exactness):
            return result
        return Exactness(comparable=False, reason="memory ran out while a batch was compared with its two halves")

    def _choose_layout(self) -> None:
        """Packed if that is wanted, possible and proven. Sizes are then of the mean row instead of the longest."""
        requested = self.options.layout
        self._sizes["padded"] = (self.shape, self.short)
        obstacle = "" if requested == "padded" else self._why_not_packed()
        if obstacle and requested == "packed":
            raise BadOption(
                f'layout="packed" is not possible for task {self.task.name}: {obstacle}. Try: layout="auto".'
            )
        if requested == "padded" or obstacle:
            self.layout_reason = obstacle or "as requested"
            return
        mean = self._mean_row()
        padded, packed = sum(self.shape), sum(mean)
        self.layout_reason = f"loss and gradient of {show_rows(self._compared_rows)} are the same packed as alone"
        if packed < padded:
            sizes = ("+".join(map(str, one)) for one in (mean, self.shape))
            self.layout_reason += "; the mean row of a long step is {}, the longest {}".format(*sizes)
        self.context.layout = PACKED
        self.setting = replace(self.setting, layout="packed")
        self.shape, self.short = self._sizes["packed"] = self._packed_sizes(mean)
        if self.shape != mean:
            self.layout_reason += f"; probed with copies of a real row of {'+'.join(map(str, self.shape))}"

    def _mean_row(self) -> Shape:
        if self.rows is None:
            return self.shape
        return mean_row(self.task, self.rows, self.most, steady=self.options.deterministic)

    def _packed_sizes(self, mean: Shape) -> tuple[Shape, Shape]:
        """Of a context that packs."""
        shape = self.prober.available(mean)
        return shape, self.prober.available(tuple(max(1, length // 4) for length in shape))

    def _why_not_packed(self, *, slow: bool = False) -> str:
        """Empty if rows may be packed. `slow`: also where there are no kernels for it."""
        if not self.task.packs:
            return self.task.why_not_packed or "the task has no pack()"
        if not self.task.has_dummy_row:
            return "the task has no dummy_row()"
        if self.options.layout == "auto" and not slow and not self.target.has_kernels:
            return self.target.why_no_kernels
        if self.options.layout == "auto" and not slow and self.context.autocast is None:
            return "the kernels for packed rows need bf16 or fp16"
        if not self.exactness.exact:
            return "a split changes the result"
        rows = self._different_rows()
        self._compared_rows = len(rows)
        try:
            result = attempt(
                lambda: check_packing(self.context, rows) or check_kernels(self.context, rows), self.context.device
            )
        except UserError as error:  # it has a remedy of its own, which is not the one needed here
            return str(error).partition(" Try:")[0].rstrip(".")
        except Exception as error:
            return f"packed rows fail{user_line(error)}: {in_one_line(error)}"
        return (
            "memory ran out while packed rows were compared with the same rows alone"
            if isinstance(result, OutOfMemory)
            else result
        )

    @property
    def _comparable_tokens(self) -> int | None:
        """Tokens of rows that a check has room for; None if the device does not tell."""
        return tokens_that_fit(self.context, self.prober.token_bytes) if self.prober.token_bytes else None

    def _different_rows(self) -> list[Any]:
        """Rows of the data, else dummy rows of different lengths. Short ones, since they run in full precision."""
        count = min(ROWS_TO_COMPARE, self.most, self.most if self.rows is None else len(self.rows))
        if self.rows is not None:
            return rows_to_compare(self.task, self.rows, count, self._comparable_tokens)
        lengths = [
            tuple(max(1, length * (1 + place) // (4 * count)) for length in self.shape) for place in range(count)
        ]
        return [self.task.dummy_row(shape) for shape in lengths]

    def timed(self, rows: int, setting: Setting) -> float | None:
        """Seconds of a micro-batch with the levers as they are, which the plan keeps; None if it ran out of memory."""
        timed = self.prober.time(rows, self.shape, whole=True, reserved=False)
        if isinstance(timed, OutOfMemory):
            return None
        seconds, probe = timed
        accumulation = micro_rows(self.most, rows)
        timing = Timing(rows, accumulation, self.most / (accumulation * seconds + self.once_s), seconds)
        self._compile_timings.append(self._tried(setting, timing, probe, probe.peak_bytes if probe else None))
        return seconds

    def _choose(self) -> tuple[Trial, str]:
        """The trial to use, and the reason for its setting of checkpointing."""
        wanted = self.options.checkpointing
        if self.lever.already_on:
            return self._or_raise(self._try(self.setting)), self.lever.reason
        if wanted != "auto" and wanted != "off":
            requested = replace(self.setting, checkpointing=wanted)
            return self._or_raise(self._try(requested)), f"as requested, {self.lever.reason}"
        plain = self._try(self.setting)
        if wanted == "off":
            return self._or_raise(plain), "as requested"
        if not self.lever.available:
            return self._or_raise(plain), self.lever.reason
        if plain.speed is None:
            fits = f"at most {show_rows(plain.largest)} fit" if plain.largest else "not even one row fits"
            checkpointed = self._try(replace(self.setting, checkpointing="on"))
            if checkpointed.speed is None and self.lever.offloads:
                offloaded = self._or_raise(self._try(replace(self.setting, checkpointing="offload")))
                return offloaded, f"not even checkpointing every block fits one row; {self.lever.reason}"
            checkpointed = self._or_raise(checkpointed)
            return self._lightest_that_fits(plain, checkpointed), f"without it {fits}; {self.lever.reason}"
        if not self.holds_longest(plain):
            for heavier in ("on", "offload"):
                trial = (
                    self._try(replace(self.setting, checkpointing=heavier)) if heavier in self.lever.settings else plain
                )
                if trial.speed is not None and self.holds_longest(trial):
                    longest = "+".join(map(str, self.longest))
                    reason = f"without it the longest row ({longest}) does not fit; {self.lever.reason}"
                    return self._lightest_that_fits(plain, trial) if heavier == "on" else trial, reason
        if plain.largest == self.most:
            return plain, "the whole step fits without it"
        if self.options.deterministic:
            return plain, "deterministic: it is used only if nothing fits without it"
        if self.options.micro_batch != "auto":
            return plain, "with a fixed micro-batch it would only cost time"
        if not plain.speed.rising:
            return plain, "more rows at once would gain little, so it would only cost time"
        if not self.time.allows(PROVEN_REACH * plain.largest, self.shape, 2 + FINISH, "checkpointing"):
            return plain, "there was no time left to try it"
        return self._challenge(plain)

    def holds_longest(self, trial: Trial) -> bool:
        """Whether the longest row is predicted to fit alone. Packed sizes are planned for the mean row, which is shorter."""
        if trial.setting.layout != "packed" or not trial.survey.probes:
            return True
        return trial.survey.model.cost_bytes(1, self.longest) <= self.target.limit_bytes

    def _lightest_that_fits(self, plain: Trial, checkpointed: Trial) -> Trial:
        """The rows that fit with checkpointing, with as few checkpointed blocks as they need. A plan that may not look at
        times keeps them all."""
        assert checkpointed.speed is not None
        rows = checkpointed.speed.chosen.rows
        setting = None if self.options.deterministic else self._lightest_for(rows, plain, checkpointed)
        if setting is None or not self.time.allows(rows, self.shape, TRIAL_PASSES, str(setting)):
            return checkpointed
        trial = self._try(setting)
        return trial if trial.rows_per_s > WORTH_CHANGING * checkpointed.rows_per_s else checkpointed

    def _lightest_for(self, rows: int, plain: Trial, checkpointed: Trial) -> Setting | None:
        """The setting with the fewest checkpointed blocks that is predicted to fit this many rows, where there is one between
        none and all. Each block is taken to save as much as any other."""
        if not (plain.survey.probes and checkpointed.survey.probes):
            return None
        wanted = [(rows, self.shape, CHALLENGE_AT * self.target.budget_bytes)]
        if self.holds_longest(checkpointed):
            wanted.append((1, self.longest, CHALLENGE_AT * self.target.limit_bytes))

        def fit(share: float) -> bool:
            for count, shape, most in wanted:
                off, on = (trial.survey.predicted(count, shape) for trial in (plain, checkpointed))
                if off + share * (on - off) > most:
                    return False
            return True

        for between in self.lever.between:
            if fit(self.lever.share(between)):
                return replace(plain.setting, checkpointing=between)
        return None

    def _challenge(self, plain: Trial) -> tuple[Trial, str]:
        """Checkpointing against a trial that fits without it: of all blocks, and of the fewest that save a micro-batch."""
        assert plain.speed is not None
        off = plain.speed.chosen.rows_per_s
        trials = [checkpointed := self._challenger(plain, "on")]
        splits = micro_rows(self.most, plain.largest)
        lighter = self._lightest_for(micro_rows(self.most, splits - 1), plain, checkpointed)
        if lighter and self.time.allows(PROVEN_REACH * plain.largest, self.shape, 2 + FINISH, str(lighter)):
            trials.append(self._challenger(plain, lighter.checkpointing))
        timed = [(trial, trial.speed.chosen) for trial in trials if trial.speed]
        if not timed:
            return plain, "even sizes that fit without it are over the budget with it"
        rates = [f"{show_rate(timing.rows_per_s)} rows/s with {_name(trial)} at {show_rows(timing.rows)}" for trial, timing in timed]  # fmt: skip
        reason = f"{', '.join(rates)}, {show_rate(off)} without"
        searched = [trial for trial, timing in timed if trial.largest and timing.rows_per_s > WORTH_CHANGING * off]
        if not searched:
            return plain, reason
        return max(searched, key=lambda trial: trial.rows_per_s), f"{reason}; {self.lever.reason}"

    def _challenger(self, plain: Trial, between: Checkpointed) -> Trial:
        """Timed at the largest size that it seems to make possible. Only if it is faster there, the largest is looked for."""
        assert plain.speed is not None
        setting, off = replace(plain.setting, checkpointing=between), plain.speed.chosen.rows_per_s
        with self._set(setting):
            survey = Survey(self.prober, self.shape, self.most, least=self._least)
            survey.explore_near(plain.largest)
            largest, speed = 0, None
            if survey.probed_worst:
                most = survey.model.largest(self.shape, CHALLENGE_AT * self.target.budget_bytes, self.most)
                rows = self._even(max(1, min(most, PROVEN_REACH * plain.largest)))
                speed = find_fastest(self.most, rows, survey.time, self.once_s, only=True)
            if speed and speed.chosen.rows_per_s > WORTH_CHANGING * off:
                largest = survey.largest(self.target.budget_bytes)
                speed = None
                if largest:
                    speed = find_fastest(
                        self.most, largest, survey.time, self.once_s, least=self._least, in_time=self._in_time
                    )
        self.trials.append(Trial(setting, survey, largest, speed))
        return self.trials[-1]

    def _try(self, setting: Setting) -> Trial:
        with self._set(setting):
            survey, speed = Survey(self.prober, self.shape, self.most, least=self._least), None
            survey.explore()
            largest = self._largest(survey) if survey.probed_worst else 0
            offloaded = largest and setting.checkpointing == "offload"
            largest, measured = self._largest_on_host(largest) if offloaded else largest, largest
            if rows := self._allowed_rows(survey, largest):
                only = self.options.micro_batch != "auto" or self._largest_wins
                speed = find_fastest(
                    self.most, rows, survey.time, self.once_s, least=self._least, only=only, in_time=self._in_time
                )
            chosen = speed.chosen.rows if speed else self._least
            host_bytes = self.lever.copies.bytes_at(chosen / measured) if offloaded else 0
            self.trials.append(Trial(setting, survey, largest, speed, host_bytes=host_bytes))
            return self.trials[-1]

    def _try_the_others(self, chosen: Trial, reason: str) -> tuple[Trial, str]:
        """The trials of `table=True`: every other setting of the levers, those most like the chosen one first.

        Returns the fastest trial that the user allows, and the reason for its setting of checkpointing. In a
        deterministic plan that is the one chosen before.
        """
        number = self.trials.index(chosen)
        with self._set(chosen.setting):
            chosen.survey.check_short_rows(self._budget_bytes)  # the plan needs it more than the table needs the time
        for setting in self._other_settings(chosen.setting):
            shape = self._sizes[setting.layout][0]
            if not self.time.allows(chosen.largest, shape, TRIAL_PASSES, str(setting)):
                self.not_tried.append(f"{setting}: no time left")
                continue
            try:
                with self.time.trying(setting):
                    self._try(setting)
            except Exception as error:  # the user did not ask for this setting
                self.context.drop_gradients()
                why = str(error).partition(" Try:")[0] if isinstance(error, UserError) else in_one_line(error)
                self.not_tried.append(f"{setting}: {why}")
        timed = [self._with_data_speed(trial) for trial in self.trials]
        if all(one.data_rows_per_s for one in timed if one.speed):  # else they could not be compared
            self.trials = timed
        chosen = self.trials[number]
        best = chosen if self.options.deterministic else self._fastest(chosen)
        if best.rows_per_s <= WORTH_CHANGING * chosen.rows_per_s:
            return chosen, reason
        tried = len({trial.setting for trial in self.trials})
        verdict = (
            f"fastest of {tried} settings: {show_rate(best.rows_per_s)} rows/s {best.setting}, "
            f"{show_rate(chosen.rows_per_s)} {chosen.setting}"
        )
        if best.setting.layout != chosen.setting.layout:
            self.layout_reason = verdict
        if best.setting.compile != chosen.setting.compile:
            self.compile_reason = verdict
        return best, verdict if best.setting.checkpointing != chosen.setting.checkpointing else reason

    def _fastest(self, chosen: Trial) -> Trial:
        """Of the trials that the user allows, with no more splits than the chosen one has where splits matter most.

        Layouts are compared by their speed on the data, so without that the layout stays.
        """

        def compares(trial: Trial) -> bool:
            searched = trial.largest > 0 or self.options.micro_batch != "auto"
            if trial.speed is None or not searched or not self._allows(trial.setting):
                return False
            if self.holds_longest(chosen) and not self.holds_longest(trial):
                return False
            alike = self.rows is None or trial.data_rows_per_s or trial.setting.layout == chosen.setting.layout
            return bool(alike) and (trial.speed.chosen.accumulation <= most or not self.few_splits)

        assert chosen.speed is not None
        most = chosen.speed.chosen.accumulation
        return max(filter(compares, self.trials), key=lambda trial: trial.rows_per_s)

    def _other_settings(self, chosen: Setting) -> list[Setting]:
        """Those that are possible and were not tried, the fewest changes first. Only what was compiled is compiled."""
        base, device = self.setting, self.target.device
        fast_bf16 = autocast_dtype("auto", device) is torch.bfloat16 and self.options.weights != "bf16"
        precisions = [base.precision, *(("fp32", "bf16") if fast_bf16 else ())]
        settings = [
            Setting(layout=layout, precision=precision, compile=compiled, checkpointing=checkpointed)
            for layout, precision, compiled, checkpointed in itertools.product(
                self._layouts(), dict.fromkeys(precisions), dict.fromkeys((base.compile, "off")),
                self.lever.settings,
            )
            if compiled == "off" or (layout, precision) == (base.layout, base.precision)
        ]  # fmt: skip
        tried = {trial.setting for trial in self.trials}

        def changes(setting: Setting) -> int:
            return sum(asdict(setting)[name] != value for name, value in asdict(chosen).items())

        return sorted((one for one in settings if one not in tried), key=changes)

    def _layouts(self) -> list[LayoutName]:
        """The layouts that are possible, also where packed rows have no fast kernels."""
        if "packed" not in self._sizes and not self._why_not_packed(slow=True):
            mean, self.context.layout = self._mean_row(), PACKED
            self._sizes["packed"] = self._packed_sizes(mean)
            self.context.layout = PADDED
        return list(self._sizes)

    def _allows(self, setting: Setting) -> bool:
        """Whether the user leaves this setting open. The precision stays as it is, because it changes the result."""
        requested = {name: getattr(self.options, name) for name in ("layout", "compile", "checkpointing")}
        open_or_same = all(wanted in ("auto", getattr(setting, name)) for name, wanted in requested.items())
        return open_or_same and setting.precision == self.setting.precision

    def _with_data_speed(self, trial: Trial) -> Trial:
        """With its speed on the rows of the data. Packed rows are timed at their mean; padded ones at the longest row,
        so the mean micro-batch of a real step is timed too."""
        if trial.speed is None or self.rows is None:
            return trial
        timing = trial.speed.chosen
        if self._timed_as_drawn(trial.setting):
            return replace(trial, data_rows_per_s=timing.rows_per_s)
        with self._set(trial.setting):
            if not self.time.allows(timing.rows, self.shape, FINISH, f"rows of the data ({trial.setting})"):
                return trial
            trial.survey.explore()  # a challenge left out other lengths
            model, whole = trial.survey.model, timing.accumulation == 1
            limit = model.rising_cost(timing.rows, self.shape, whole=whole)
            groups = PADDED.split(self._step_shapes, model.rising_cost, limit, overhead=self._overhead(timing))
            padded = [PADDED.shape([self._step_shapes[row] for row in group]) for group in groups]
            work = np.array([len(group) for group in groups]) @ np.array(padded)
            rows = micro_rows(self.most, len(groups))
            mean = self.prober.available(tuple(math.ceil(length / self.most) for length in work))
            timed = self.prober.time(rows, mean, whole=len(groups) == 1, reserved=False)
        if isinstance(timed, OutOfMemory):
            return trial
        return replace(trial, data_rows_per_s=self.most / (len(groups) * timed[0] + self.once_s))

    def _timed_as_drawn(self, setting: Setting) -> bool:
        """Whether trials time rows as steps draw them from the data, and not the longest."""
        return self.rows is not None and (setting.layout == "packed" or not self.shape)

    @cached_property
    def _step_shapes(self) -> list[Shape]:
        """The lengths of a step of real rows, drawn at random."""
        assert self.rows is not None
        lengths = row_lengths(self.task, self.rows, steady=self.options.deterministic)
        drawn = np.random.default_rng(0).choice(len(lengths), self.most)
        return [tuple(map(int, lengths[row])) for row in drawn]

    def _tried_rows(self, chosen: Trial) -> tuple[Tried, ...]:
        """All that was timed and what did not fit, the fastest first."""
        rows = {(one.setting, one.micro_batch): one for one in self._compile_timings}
        for trial in self.trials:
            for tried in self._tried_in(trial):
                rows[tried.setting, tried.micro_batch] = tried
        assert chosen.speed is not None
        size = chosen.setting, chosen.speed.chosen.rows
        rows[size] = replace(rows[size], fits=True, chosen=True)
        return tuple(sorted(rows.values(), key=lambda one: -one.rate))

    def _tried_in(self, trial: Trial) -> Iterator[Tried]:
        survey = trial.survey
        if trial.speed is None:
            wanted = self.options.micro_batch
            rows = self._least if not trial.largest else self.most if wanted == "auto" else min(wanted, self.most)
            least = self.prober.fixed_bytes + self.prober.gradient_bytes
            peak = survey.predicted(rows) if survey.probes else least
            yield self._tried(trial.setting, Timing(rows, micro_rows(self.most, rows), 0.0, math.inf), None, peak)
            return
        for timing in trial.speed.timed:
            probe, rows = survey.probe(timing.rows), timing.rows
            peak = probe.peak_bytes if probe else survey.model.peak_bytes(rows, survey.worst, whole=rows == self.most)
            tried = self._tried(trial.setting, timing, probe, peak)
            on_data = timing is trial.speed.chosen and trial.data_rows_per_s is not None
            yield replace(tried, data_rows_per_s=trial.data_rows_per_s) if on_data else tried

    def _tried(self, setting: Setting, timing: Timing, probe: Probe | None, peak_bytes: int | None) -> Tried:
        """A row of the table. It fits if it ran, and did not take more than a plan may."""
        shape, ran = self._sizes[setting.layout][0], math.isfinite(timing.seconds)
        most = self.target.limit_bytes if self.options.micro_batch != "auto" else self.target.budget_bytes
        return Tried(
            setting=setting, shape=shape, micro_batch=timing.rows, accumulation=timing.accumulation,
            tokens=tuple(timing.rows * length for length in shape) if setting.layout == "packed" else None,
            peak_bytes=peak_bytes, reserved_bytes=probe.reserved_bytes if probe else None, basis="measured" if probe else "predicted",
            fits=ran and (probe is None or probe.cost_bytes <= most), rows_per_s=timing.rows_per_s if ran else None,
            step_s=self.most / timing.rows_per_s if ran else None, allowed=self._allows(setting),
            data_rows_per_s=timing.rows_per_s if ran and self._timed_as_drawn(setting) else None,
        )  # fmt: skip

    def _largest(self, survey: Survey) -> int:
        """The most rows that fit. A step that must stay whole is tried whole, however long that takes."""
        in_time = not self._must_stay_whole
        return survey.largest(self._budget_bytes, in_time=in_time) or survey.largest(self.target.budget_bytes)

    def _largest_on_host(self, most: int) -> int:
        """The most rows, of those that fit the device, whose blocks' inputs fit into host RAM; 0 if none do."""
        self.lever.copies.sizes = ()  # of larger probes
        self.prober.run(most, self.shape, "later")
        trim_heap()
        room = FILL_HOST * self.target.host_limit_bytes / len(self.deal) - tree_bytes()
        fitting = (rows for rows in range(most, self._least - 1, -1) if self.lever.copies.bytes_at(rows / most) <= room)
        return next(fitting, 0)

    @property
    def _budget_bytes(self) -> int:
        """What to plan for. A deterministic plan cannot time how few rows keep a CPU busy, so their bytes are bounded."""
        budget = self.target.budget_bytes
        if not self.options.deterministic or self.target.device.type != "cpu" or self.few_splits:
            return budget
        return min(budget, self.prober.fixed_bytes + self.prober.gradient_bytes + STEADY_CPU_BYTES)

    def _in_time(self, rows: int) -> bool:
        return self.time.allows(rows, self.shape, FINISH, "the speed of other sizes")

    @property
    def _least(self) -> int:
        return min(2, self.most) if self.exactness.batch_norm else 1

    @property
    def _must_stay_whole(self) -> bool:
        return self.exactness.looks_across_rows and not self.options.allow_inexact

    @property
    def few_splits(self) -> bool:
        """Where splitting changes the result, few micro-batches matter more than speed."""
        changes = not self.exactness.exact or self.exactness.unequal_rows
        return changes and not self.options.allow_inexact

    @property
    def _largest_wins(self) -> bool:
        """The largest that fits is used, whether or not a smaller one is faster."""
        return self.few_splits or self.options.deterministic

    def _even(self, rows: int) -> int:
        """Rows of the largest micro-batch when the step is split evenly into micro-batches of at most this many."""
        return micro_rows(self.most, micro_rows(self.most, rows))

    def _allowed_rows(self, survey: Survey, largest: int) -> int:
        """The size to time first: a fixed one if it fits the limit, the whole step if it must not be split; else 0."""
        if self.options.micro_batch == "auto":
            if largest == 0 or (self._must_stay_whole and largest < self.most):
                return 0
            return self._even(largest) if self._largest_wins else largest
        rows = min(self.options.micro_batch, self.most)
        fits = rows <= largest or (survey.probes and survey.predicted(rows) <= self.target.limit_bytes)
        return rows if fits and survey.measure(rows, self.shape, reserved=True) is not None else 0

    def _check_requested_split(self) -> None:
        """Refuse a split that was asked for and changes the result, before anything is probed for it."""
        fixed, task, exactness = self.options.micro_batch, self.task.name, self.exactness
        if not self._must_stay_whole:
            return
        if len(self.deal) > 1:
            raise InexactSplit(
                f"task {task}: {exactness.reason}, and {len(self.deal)} processes would split it. "
                f"Try: {exactness.remedy}processes=1, or allow_inexact=True."
            )
        if fixed != "auto" and fixed < self.most:
            raise InexactSplit(
                f"task {task}: {exactness.reason}, and micro_batch={fixed} would split the {self.most} rows of a step. "
                f"Try: {exactness.remedy}micro_batch={self.most}, or allow_inexact=True."
            )

    def _or_raise(self, trial: Trial) -> Trial:
        """The trial, or the error that says why nothing that is allowed fits."""
        if trial.speed is not None:
            return trial
        if trial.largest == 0:
            raise self._host_too_small(trial) if trial.host_bytes else self._one_row_too_large(trial)
        if self._must_stay_whole:
            raise InexactSplit(
                f"task {self.task.name}: {self.exactness.reason}, and {self.most} rows do not fit without splitting them into "
                f"{micro_rows(self.most, trial.largest)}. Try: {self.exactness.remedy}global_batch={trial.largest}, "
                "a higher memory_limit=, or allow_inexact=True."
            )
        fixed = self.options.micro_batch
        assert fixed != "auto"
        raise BadOption(
            f"micro_batch={fixed} is predicted to need {show_bytes(trial.survey.predicted(fixed))} for "
            f"{self.context.layout.show(fixed, self.shape)}, and the limit is {show_bytes(self.target.limit_bytes)}. "
            f"Try: micro_batch={trial.largest}, the most that fits."
        )

    def _host_too_small(self, trial: Trial) -> DoesNotFit:
        needed = len(self.deal) * (tree_bytes() + trial.host_bytes) / FILL_HOST
        return DoesNotFit(
            f'checkpointing="offload" moves {show_bytes(trial.host_bytes)} to host RAM for '
            f"{self.context.layout.show(self._least, self.shape)} (predicted), and the limit there is "
            f'{show_bytes(self.target.host_limit_bytes)}. Try: host_limit="{flag_bytes(needed)}".',
            needed_bytes=round(needed),
        )

    def _one_row_too_large(self, trial: Trial) -> DoesNotFit:
        """What one row takes: counted on the CPU, predicted on a GPU, a lower bound if nothing could be probed."""
        with self._set(trial.setting):
            mode: Mode = "whole" if self._least == self.most else "full"
            probe, basis = self.prober.run_without_limit(self._least, self.shape, mode), ""
        if probe is not None:
            peak = probe.peak_bytes
        elif trial.survey.probes:
            peak, basis = trial.survey.predicted(self._least), " (predicted)"
        else:
            peak, basis = self.prober.fixed_bytes + self.prober.gradient_bytes, " at least"
        target, needed = self.target, flag_bytes(peak / self.target.fill)
        tips = [f'memory_limit="{needed}"' if target.requested else f"free {needed} on {target.name}"]
        if 1.01 * peak <= target.limit_bytes:
            tips.append(f"fill={peak / target.limit_bytes + 0.01:.2f}")
        if self.lever.available and trial.setting.checkpointing not in ("on", "offload"):
            tips.append('checkpointing="auto"')
        if self.shape:
            options = getattr(self.task, "options", None)
            tips.append("a lower max_tokens=" if hasattr(options, "max_tokens") else "shorter lengths=")
        return DoesNotFit(
            f"{self.context.layout.show(self._least, self.shape)} {'needs' if self._least == 1 else 'need'} {show_bytes(peak)}{basis}, "
            f"of which weights and optimizer state take {show_bytes(self.prober.fixed_bytes)}; {target.fill:.0%} of the "
            f"limit is {show_bytes(target.budget_bytes)}{target.other_users}. Try: {', or '.join(tips)}{alternatives(self.task, target, self.prober.fixed_bytes)}.",
            needed_bytes=round(peak / target.fill) + 1,
        )

    def _fixed_part_too_large(self) -> DoesNotFit:
        """If a row can be counted without the limit, the limit that is suggested has room for one."""
        held = self.prober.fixed_bytes + self.prober.gradient_bytes
        peak = self._smallest_step_bytes()
        needed = max(held, peak or 0) / self.target.fill
        return DoesNotFit(
            f"weights, optimizer state and gradients take {show_bytes(held)} before any row, and the limit is "
            f"{show_bytes(self.target.limit_bytes)}{self.target.other_users}. Try: {'at least ' if peak is None else ''}"
            f'memory_limit="{flag_bytes(needed)}", an optimizer with less state, or fewer trainable weights'
            f"{alternatives(self.task, self.target, held)}.",
            needed_bytes=round(needed) + 1,
        )

    def _smallest_step_bytes(self) -> int | None:
        """What a step in micro-batches of one row takes, of two if one is refused; None if it cannot be counted."""
        wanted = self.options.checkpointing
        for rows in (1, 2):
            try:
                with self.lever.set(EVERY["on" if wanted == "auto" else wanted]):
                    probe = self.prober.run_without_limit(rows, self.shape, "whole" if rows == self.most else "full")
                return None if probe is None else probe.peak_bytes
            except TaskError:  # BatchNorm refuses a single row
                continue
        return None

    def _first_step_too_large(self, rows: int, shape: Shape) -> DoesNotFit:
        """What the optimizer's state takes is unknown until a step has run."""
        least = self.prober.gradient_bytes + sum(p.numel() * p.element_size() for p in self.context.model.parameters())
        needed = max(self.target.limit_bytes, least) / self.target.fill
        return DoesNotFit(
            f"the first step, of {self.context.layout.show(rows, shape)}, ran out of memory: weights and gradients take "
            f"{show_bytes(least)} of {show_bytes(self.target.limit_bytes)}{self.target.other_users}. "
            f'Try: memory_limit="{flag_bytes(needed)}", an optimizer with less state, or fewer trainable weights'
            f"{alternatives(self.task, self.target, least)}.",
            needed_bytes=round(needed),
        )

    def _overhead(self, chosen: Timing) -> float | None:
        """What a micro-batch costs besides its rows, in rows × lengths: a line through the smallest and the chosen one.

        None if rows have no lengths to pad, if splits should be few, or if time does not grow with the rows. A
        deterministic plan takes what is usual on such a device.
        """
        if self.few_splits or not self.shape or self.context.layout is PACKED:
            return None
        if self.options.deterministic:
            return OVERHEAD.get(self.target.device.type, OTHER_OVERHEAD)
        timed = self.prober.time(self._least, self.short, whole=False, reserved=False)
        if isinstance(timed, OutOfMemory):
            return None
        little, small_s = self._least * sum(self.short), timed[0]
        work = chosen.rows * sum(self.shape)
        per_work_s = (chosen.seconds - small_s) / (work - little) if work > little else 0.0
        if per_work_s <= 0:
            return None
        return max(small_s - per_work_s * little, LEAST_OVERHEAD * small_s) / per_work_s

    def _assemble(self, trial: Trial, verified: Probe, overhead: float | None, choices: list[Choice], key: str) -> Plan:
        assert trial.speed is not None
        survey, timing, largest = trial.survey, trial.speed.chosen, trial.largest
        at_largest = survey.measure(largest, self.shape) or verified
        return Plan(
            task=self.task.name, device=str(self.target.device), device_name=self.target.name, shape=self.shape,
            layout=self.context.layout.name,
            limit_bytes=self.target.limit_bytes, fill=self.target.fill, global_batch=sum(self.deal), deal=self.deal,
            processes=len(self.deal), micro_batch=timing.rows, accumulation=timing.accumulation,
            largest_micro_batch=largest, memory_model=survey.model,
            predicted_peak_bytes=survey.predicted_unseen(timing.rows), measured_peak_bytes=verified.peak_bytes,
            reserved_peak_bytes=verified.reserved_bytes, largest_predicted_peak_bytes=survey.predicted_unseen(largest),
            largest_measured_peak_bytes=at_largest.peak_bytes,
            one_more_predicted_peak_bytes=survey.predicted(largest + 1) if largest < self.most else None,
            rows_per_s=timing.rows_per_s, overhead=overhead, ooms=self.prober.ooms, probes=self.prober.probes,
            plan_s=now() - self.started, deterministic=self.options.deterministic, levers=levers_of(self, trial)[0],
            host=HostPlan(limit_bytes=self.target.host_limit_bytes), choices=tuple(choices),
            warnings=tuple(warnings_of(self, trial, timing)), tried=self._tried_rows(trial), table=self.options.table, not_tried=tuple(self.not_tried),
            data_rows=None if self.rows is None else len(self.rows), key=key, offloaded_bytes=trial.host_bytes,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )  # fmt: skip


def alternatives(task: Task, target: Target, now_bytes: int) -> str:
    """`, or lora='r=16' (2.4 GiB before any row)`: what the task names that takes less than now and leaves room in the budget;
    empty if nothing does."""
    most = min(ROOM_FOR_ROWS * target.budget_bytes, now_bytes)
    fitting = [(how, held) for how, held in task.alternatives() if held < most]
    return "".join(f", or {how} ({show_bytes(held)} before any row, predicted)" for how, held in fitting)


def _deal(task: Task, options: PlanOptions) -> tuple[int, ...]:
    rows = options.global_batch or task.global_batch
    if rows < options.processes:
        raise TaskError(
            f"task {task.name}: global_batch={rows} gives {options.processes} processes less than a row each. "
            f"Try: global_batch={options.processes}, or fewer processes=."
        )
    return deal(rows, options.processes)


def _name(trial: Trial) -> str:
    """How a reason names the setting of checkpointing, which it is about."""
    checkpointed = trial.setting.checkpointing
    return "it" if checkpointed == "on" else checkpointed
