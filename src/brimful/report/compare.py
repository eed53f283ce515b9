"""Two or more runs side by side: `compare_runs` for `brimful compare`. The first is what the others are compared with.

A verdict is only as sure as its figures. **Speed** is rows/s over the steps that all have, after the first few, and so is the speed
in the table; two runs are `as fast` unless they differ by more than three standard errors and by 2 %, which is what a plan calls
equal too. **Loss** at equal steps is
the mean of step-by-step differences, because two runs of one seed see the same rows: the noise that they share does not count. **Equal
to the bit** means every recorded loss of the steps that both have.

One run is compared with itself if it was resumed: each part that was trained between two starts is a side.
"""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from brimful.errors import BadOption
from brimful.languages import Sentence, say
from brimful.report.run_figures import LEAST_STEPS, RunFigures, Typical, part, whole
from brimful.report.run_record import RunRecord
from brimful.report.run_settings import (
    RATE,
    Difference,
    LossPoint,
    differences,
    loss_points,
    rows_only,
    same_setting,
    show_setting,
    train_command,
)
from brimful.training.events import number
from brimful.units import show_bytes

LABELS = "ABCDEF"
MOST_RUNS = len(LABELS)
SURE = 3.0
"""Standard errors by which speeds must differ."""
AS_FAST = 0.02
"""Speeds that differ by less than this are equal, however exactly they are known."""
NOISY, TOO_NOISY = 0.05, 0.30
"""Three standard errors above this are worth mentioning beside `as fast`; above the second, nothing is said."""
SAME_MEMORY, OF_LIMIT = 0.05, 0.02
"""Peaks that differ by less than this share, or by less than this share of the limit, are not worth a word."""
CLOSE = 1e-3
"""Losses that agree to this share everywhere are the same up to rounding."""

Speed = Literal["faster", "slower", "as fast", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One run of a comparison, or one part of it."""

    label: str
    """A, B, …"""
    run: RunFigures
    part: Sentence | None = None
    """Which part of the run, if not all of it."""
    recorded: tuple[str, ...] = ()
    """Of a part of a run: why it is another experiment than the first part, as the run itself has recorded."""

    @property
    def title(self) -> str:
        """Its folder, and which part of it."""
        return f"{self.run.record.root}, {self.part}" if self.part else str(self.run.record.root)


class Pair:
    """A run against the first one."""

    def __init__(
        self,
        first: Side,
        side: Side,
        found: Sequence[Difference],
        points: Sequence[LossPoint],
        index: int,
        rates: tuple[Typical | None, Typical | None],
    ) -> None:
        self.first, self.side, self._points, self._index, self.rates = first, side, points, index, rates
        self.differences = [one for one in found if _differs(one, index)]

    @property
    def is_other(self) -> bool:
        return bool(self.reasons)

    @property
    def reasons(self) -> list[Sentence]:
        """What makes it another experiment."""
        others = [one for one in self.differences if one.experiment]
        found = [_reason(one, self._index) for one in others if one.name not in RATE]
        if self._rows_changed:  # tells more than what the last plans have
            told = [one.name for one in others if one.name not in RATE]
            found = [reason for reason, name in zip(found, told, strict=True) if name != "global_batch"]
            sides = [one for one in (self.first, self.side) if len(one.run.row_changes) > 1]
            found = [*(say("{label} has {rows} rows a step", label=one.label, rows=rows_sentence(one.run.row_changes)) for one in sides), *found]  # fmt: skip
        rate = [_reason(one, self._index) for one in others if one.name in RATE]
        if rate:
            found.append(say("another learning rate ({what})", what=rate))
        return found or [Sentence(sentence) for sentence in self.side.recorded]

    @property
    def _rows_changed(self) -> bool:
        """Whether one of them changed its rows a step in the middle, and the other did not do the same."""
        one, two = self.first.run.row_changes, self.side.run.row_changes
        return one != two and max(len(one), len(two)) > 1

    @cached_property
    def common_steps(self) -> list[int]:
        return sorted(self.first.run.losses.keys() & self.side.run.losses.keys())

    @cached_property
    def equal_up_to(self) -> int | None:
        """The last step up to which all recorded losses are equal to the bit; None if the first one differs already."""
        equal = None
        for step in self.common_steps:
            if self.first.run.losses[step] != self.side.run.losses[step]:
                break
            equal = step
        return equal

    @cached_property
    def largest_difference(self) -> float | None:
        """Of the losses at equal steps, relative; None if there are none."""
        pairs = [(self.first.run.losses[step], self.side.run.losses[step]) for step in self.common_steps]
        known = [
            abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if math.isfinite(a) and math.isfinite(b) and (a or b)
        ]
        return max(known, default=None)

    @property
    def speed_ratio(self) -> float | None:
        one, two = self.rates
        return two.value / one.value if one is not None and two is not None and one.value > 0 else None

    @property
    def speed_error(self) -> float | None:
        """One standard error of the ratio."""
        (one, two), ratio = self.rates, self.speed_ratio
        if ratio is None or one is None or two is None or not two.value:
            return None
        return ratio * math.hypot(one.error / one.value, two.error / two.value)

    @property
    def speed(self) -> Speed:
        ratio, error = self.speed_ratio, self.speed_error
        if ratio is None or error is None:
            return "unknown"
        if abs(ratio - 1) <= max(AS_FAST, SURE * error):
            return "as fast"
        return "faster" if ratio > 1 else "slower"

    @property
    def _too_noisy(self) -> bool:
        return self.speed == "as fast" and SURE * (self.speed_error or 0.0) > TOO_NOISY

    @cached_property
    def verdict(self) -> list[Sentence]:
        """The experiment and the speed first, then whatever else a reader must know."""
        return [*self._experiment(), *self._memory(), *self._loss(), *self._ending()]

    def _speed_sentence(self) -> Sentence:
        ratio, error = self.speed_ratio, self.speed_error
        if ratio is None or error is None:
            return say("speed not known yet")
        if self._too_noisy:
            return say("speed too noisy to compare")
        if self.speed == "as fast":
            if SURE * error > NOISY:
                return say("as fast within the noise of {noise}", noise=f"{SURE * error:.0%}")
            return say("as fast")
        if ratio > 1:
            return say("{ratio} × faster", ratio=show_ratio(ratio))
        return say("{ratio} × slower", ratio=show_ratio(1 / ratio) if ratio else "∞")

    def _experiment(self) -> Iterator[Sentence]:
        speed = self._speed_sentence()
        if self.is_other:
            reasons = self.reasons
            yield say("different experiment: {reason}", reason=reasons[0])
            yield from reasons[1:3]
            if len(reasons) > 3:
                yield say("and {count} more", count=len(reasons) - 3)
            yield speed if self.speed == "unknown" or self._too_noisy else say("{speed} in rows/s", speed=speed)
            return
        names = {one.name for one in self.differences}
        without_plan = next((side for side in (self.first, self.side) if not side.run.plan), None)
        if without_plan is not None:
            yield say("it is unknown whether it is the same experiment, because {label} has no plan", label=without_plan.label)  # fmt: skip
            yield speed
            return
        if not names - {"steps"} and self.equal_up_to is not None and len(self.common_steps) > 1:
            yield say("the same settings, {results}", results=self._equal_sentence())
            yield speed
        elif "seed" in names:
            yield say("same experiment with another seed, {speed}", speed=speed)
        else:
            yield say("same experiment, {speed}", speed=speed)

    def _equal_sentence(self) -> Sentence:
        up_to = f"{self.equal_up_to or 0:,}"
        if any(one.run.record.step_lines_skipped for one in (self.first, self.side)):
            count = sum(step <= (self.equal_up_to or 0) for step in self.common_steps)
            return say("losses equal to the bit in {count} steps up to step {step}", count=f"{count:,}", step=up_to)
        return say("losses equal to the bit up to step {step}", step=up_to)

    def _memory(self) -> Iterator[Sentence]:
        runs = (self.first.run, self.side.run)
        peaks = [peak_bytes(run) if len(run.steps) >= LEAST_STEPS else None for run in runs]
        worth_it = OF_LIMIT * min(run.limit_bytes or 0 for run in runs)
        if peaks[0] and peaks[1] and abs(peaks[1] - peaks[0]) > max(SAME_MEMORY * peaks[0], worth_it):
            size = show_bytes(abs(peaks[1] - peaks[0]))
            yield (
                say("{size} less memory", size=size) if peaks[1] < peaks[0] else say("{size} more memory", size=size)
            )

    def _loss(self) -> Iterator[Sentence]:
        not_finite = next((step for step, loss in self.side.run.losses.items() if not math.isfinite(loss)), None)
        if not_finite is not None:
            yield say("its loss is not a number in step {step}", step=f"{not_finite:,}")
            return
        other_rows = rows_only(self.first.run) != rows_only(self.side.run)
        by_rows = [point for point in self._points if point.by == "rows" and other_rows]
        point = (by_rows or [point for point in self._points if point.by == "step"])[-1:]
        if self.equal_up_to is not None and self.equal_up_to == self.common_steps[-1] and not by_rows:
            if self.differences and len(self.common_steps) > 1:
                yield self._equal_sentence()
            return
        if not point:
            return
        differs, at = point[0].differs(self._index), f"{point[0].at:,}"
        if differs is None:
            return
        first, loss = (f"{point[0].losses[index]:.4g}" for index in (0, self._index))
        place = say("after {rows} rows", rows=at) if point[0].by == "rows" else say("at step {step}", step=at)
        if not differs:
            if self.largest_difference is not None and self.largest_difference <= CLOSE and self.common_steps:
                yield say("losses agree to {share}", share=f"{self.largest_difference:.0e}")
            else:
                yield say(
                    "the same loss within noise {place} ({first} and {loss})", place=place, first=first, loss=loss
                )
        elif (point[0].losses[self._index] or 0.0) < (point[0].losses[0] or 0.0):
            yield say("its loss is lower {place}, {loss} instead of {first}", place=place, loss=loss, first=first)
        else:
            yield say("its loss is higher {place}, {loss} instead of {first}", place=place, loss=loss, first=first)

    def _ending(self) -> Iterator[Sentence]:
        state = self.side.run.record.state_label
        if self.side.run.record is self.first.run.record:
            return
        if state == "failed":
            yield say("it failed after step {step}", step=f"{self.side.run.last_step:,}")
        elif state == "killed":
            yield say("it was killed after step {step}", step=f"{self.side.run.last_step:,}")

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.side.title, "verdict": "; ".join(map(str, self.verdict)), "experiment": "other" if self.is_other else "same",
            "reasons": [str(one) for one in self.reasons], "speed": self.speed, "speed_ratio": self.speed_ratio, "speed_error": self.speed_error,
            "common_steps": len(self.common_steps), "equal_to_the_bit_up_to_step": self.equal_up_to, "largest_relative_loss_difference": self.largest_difference,
        }  # fmt: skip


class Comparison:
    """Runs side by side, the first of which is the one to compare with."""

    def __init__(self, sides: Sequence[Side]) -> None:
        self.sides = list(sides)
        runs = [side.run for side in self.sides]
        self.differences = differences(runs)
        self.points = loss_points(runs)
        self.timed = _timed(runs)
        """Of each side, the steps that its speed is taken from."""
        rates = [run.rows_per_s for run in self.timed]
        self.pairs = [
            Pair(self.sides[0], side, self.differences, self.points, index, (rates[0], rates[index]))
            for index, side in enumerate(self.sides[1:], 1)
        ]

    @property
    def timed_up_to(self) -> int | None:
        """The step up to which speeds are compared; None if it is those of all steps."""
        last = {run.last_step for run in self.timed}
        all_steps = all(run.last_step == side.run.last_step for run, side in zip(self.timed, self.sides, strict=True))
        return None if all_steps else max(last)

    @property
    def peaks_flops(self) -> list[float]:
        """What each run measured its device to do, which its MFU is a share of, if these are not the same; else empty."""
        peaks = [peak for side in self.sides if (peak := side.run.peak_flops)]
        return peaks if len(peaks) == len(self.sides) and max(peaks) > (1 + AS_FAST) * min(peaks) else []

    @cached_property
    def figures(self) -> list[dict[str, Any]]:
        """What each side did, for `--json` and for the table: its speed over the steps that are compared."""
        return [figures_of(side.run, timed) for side, timed in zip(self.sides, self.timed, strict=True)]

    @property
    def one_run(self) -> bool:
        return len({side.run.record.root.resolve() for side in self.sides}) == 1

    @property
    def verdict(self) -> str:
        """One line for each run but the first."""
        verdicts = ["; ".join(map(str, pair.verdict)) for pair in self.pairs]
        if len(verdicts) == 1:
            return verdicts[0]
        return "\n".join(f"{pair.side.label}: {verdict}" for pair, verdict in zip(self.pairs, verdicts, strict=True))

    @property
    def go_back(self) -> list[tuple[Sentence, str]]:
        """What to type to train as before: the earlier plan of a run, or the first run's settings."""
        first, last = self.sides[0], self.sides[-1]
        root = shlex.quote(str(last.run.record.root))
        if self.one_run:
            numbers = [whole(side.run.plan, "number") for side in self.sides]
            earlier = {
                number: side
                for side, number in zip(self.sides, numbers, strict=True)
                if number not in (None, numbers[-1])
            }
            return [
                (say("go back to {label}", label=side.label), f"brimful train --run {root} --rollback {number}")
                for number, side in earlier.items()
            ]
        commands = []
        if len(last.run.record.plans) > 1:
            commands.append((say("go back to the plan of {label} before this one", label=last.label), f"brimful train --run {root} --rollback"))  # fmt: skip
        if first.run.record.state in ("finished", "running", "preparing"):
            commands.append((say("train as {label} did", label=first.label), train_command(first.run)))
        else:
            continue_it = (
                "fix the error of {label}, then continue it" if first.run.record.fails_again else "continue {label}"
            )
            commands.append((say(continue_it, label=first.label), first.run.record.folder.resume_command))
        return commands

    def to_json(self) -> dict[str, Any]:
        content = {
            "verdict": self.verdict,
            "runs": [{"label": side.label, "run": side.title, **figures} for side, figures in zip(self.sides, self.figures, strict=True)],
            "speed_up_to_step": self.timed_up_to,
            "against_first": [pair.to_json() for pair in self.pairs],
            "differences": [one.to_json() for one in self.differences],
            "loss": [{"by": one.by, "at": one.at, "losses": one.losses, "mean_of_steps": one.steps} for one in self.points],
            "go_back": [command for _, command in self.go_back],
        }  # fmt: skip
        plain: dict[str, Any] = _json(content)
        return plain


def compare_runs(paths: Sequence[Path | str]) -> Comparison:
    """These runs, or the parts of the one that is named. Raises `BadRun` and `BadOption` for what cannot be compared."""
    if not paths:
        raise BadOption("no run was named. Try: brimful compare runs/a runs/b.")
    if len(paths) > MOST_RUNS:
        raise BadOption(f"{len(paths)} runs are too many to show side by side. Try: at most {MOST_RUNS}.")
    roots = [Path(path).resolve() for path in paths]
    twice = next((path for number, path in enumerate(paths) if roots[number] in roots[:number]), None)
    if twice is not None:
        raise BadOption(f"{twice} was named twice. Try: two different runs, or one alone to compare its own plans.")
    records = [RunRecord(path) for path in paths]
    if len(records) == 1:
        return Comparison(_parts(records[0]))
    return Comparison(
        [Side(label=label, run=RunFigures(record)) for label, record in zip(LABELS, records, strict=False)]
    )


def _timed(runs: Sequence[RunFigures]) -> list[RunFigures]:
    """The steps that all have, or all steps if those are too few."""
    last = min(run.last_step for run in runs)
    common = [RunFigures(run.record, plan=run.plan, request=run.request, up_to_step=last) for run in runs]
    rates = [run.rows_per_s for run in common]
    same_steps = set.intersection(*({*run.losses} for run in runs))
    return common if same_steps and all(rate is not None and rate.count >= 20 for rate in rates) else [*runs]


def _parts(record: RunRecord) -> list[Side]:
    """What one run trained between two starts."""
    starts: list[dict[str, Any]] = []
    request: Mapping[str, Any] = {}
    for event in record.events:
        if event["event"] == "begin":  # task and data are the run's, however they were written then
            asked = part(event, "request")
            request = {
                **asked,
                **record.request,
                **{name: asked[name] for name in ("options", "task_options") if name in asked},
            }
        elif event["event"] == "plan":
            reasons = [*starts[-1]["reasons"]] if starts else []
            if event.get("experiment") == "other" and isinstance(event.get("experiment_reasons"), list):
                reasons += map(str, event["experiment_reasons"])
            starts.append({"plan": event, "request": request, "after": 0, "reasons": list(dict.fromkeys(reasons))})
        elif event["event"] == "resume" and starts and event.get("step") is not None:
            starts[-1]["after"] = event["step"]
    ends = [*(start["after"] for start in starts[1:]), None]
    runs = [
        (
            RunFigures(record, plan=start["plan"], request=start["request"], after_step=start["after"], up_to_step=end),
            start,
        )
        for start, end in zip(starts, ends, strict=False)  # without a plan there is an end too many
    ]
    runs = [(run, start) for run, start in runs if run.steps][-MOST_RUNS:]
    if len(runs) < 2:
        raise BadOption(f"{record.root} was trained in one go, so there is nothing to compare. Try: a second run.")
    before = len(runs[0][1]["reasons"])
    sides = []
    for place, (run, start) in enumerate(runs):
        which = say(
            "plan {number}, steps {first}–{last}",
            number=whole(run.plan, "number") or place + 1, first=f"{run.steps[0]['step']:,}", last=f"{run.last_step:,}",
        )  # fmt: skip
        sides.append(Side(label=LABELS[place], part=which, run=run, recorded=tuple(start["reasons"][before:])))
    return sides


def _differs(difference: Difference, index: int) -> bool:
    return not same_setting(difference.settings[0], difference.settings[index])


def _reason(difference: Difference, index: int) -> Sentence:
    values = [setting and setting.effective for setting in (difference.settings[0], difference.settings[index])]
    old, new = (show_setting(difference.name, value) for value in values)
    if old == new:  # two files of one name
        old, new = map(str, values)
    if difference.name == "global_batch":
        return say("{old} → {new} rows a step", old=old, new=new)
    name = difference.name.replace("_", " ")
    return say("{name} {old} → {new}", name=Sentence(name), old=Sentence(old), new=Sentence(new))


def rows_sentence(changes: Sequence[Sequence[int]]) -> list[Sentence]:
    """`16, from step 93 on 24`."""
    first = Sentence(f"{changes[0][1]:,}")
    later = [say("from step {step} on {rows}", step=f"{step:,}", rows=f"{rows:,}") for step, rows in changes[1:]]
    return [first, *later]


def show_ratio(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:.1f}" if ratio >= 1.095 else f"{ratio:.2f}"


# ---- Figures -----------------------------------------------------------------------------------------------------------


def peak_bytes(run: RunFigures) -> int | None:
    """Reserved bytes where they are known, else allocated ones."""
    return run.highest("reserved_bytes") or run.highest("peak_bytes")


def figures_of(run: RunFigures, timed: RunFigures | None = None) -> dict[str, Any]:
    """What a run did. `timed`: the steps that its speed is taken from, if not all of them."""
    timed = timed or run
    evaluations = [event for event in run.events("eval") if event["step"]]
    losses = [loss for event in evaluations if (loss := number(event, "loss")) is not None and math.isfinite(loss)]
    step_s, rows_per_s, shares = timed.step_s, timed.rows_per_s, timed.time_shares
    return {
        "state": run.record.state, "steps": run.updates, "steps_in_all": run.steps_in_all, "rows_per_step": run.usual_rows,
        "row_changes": [list(one) for one in run.row_changes] or None,
        "step_s": None if step_s is None else step_s.value, "step_s_error": None if step_s is None else step_s.error,
        "rows_per_s": None if rows_per_s is None else rows_per_s.value, "rows_per_s_error": None if rows_per_s is None else rows_per_s.error,
        "epoch_s": timed.epoch_s, "data_share": shares.get("data_s"), "padding": timed.mean("padding"), "mfu": timed.mean("mfu"),
        "peak_flops": run.peak_flops, "peak_bytes": run.highest("peak_bytes"), "reserved_bytes": run.highest("reserved_bytes"), "limit_bytes": run.limit_bytes,
        "host_bytes": run.host_bytes, "ooms": run.ooms, "evaluations": len(evaluations), "best_eval_loss": min(losses, default=None),
        "last_eval_loss": losses[-1] if losses else None, "scores": _scores(evaluations),
    }  # fmt: skip


_NO_SCORE = frozenset(("event", "time", "step", "loss", "perplexity", "rows", "seconds", "best", "ooms"))


def _scores(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The task's own scores in the last evaluation."""
    last = evaluations[-1] if evaluations else {}
    return {
        name: value
        for name in last
        if name not in _NO_SCORE and (value := number(last, name)) is not None and not isinstance(last[name], bool)
    }


def _json(value: Any) -> Any:
    """The same with None for what is no number, for which JSON has no word."""
    if isinstance(value, dict):
        return {name: _json(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
