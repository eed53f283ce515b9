"""Loss curves that say something is wrong, and only those: NaN, a rate that never acts, flat, swinging, diverging, too short.

A training loss is noisy, so nothing is judged by single steps. The curve is cut into up to 40 parts of equal length; each has a
level, the median of its losses, and an error of that level. A verdict needs a difference of six errors and one that matters for what
the run has learned so far:

    diverging   the last levels are above the lowest one by six errors, a quarter of all progress and a tenth of the level
    swinging    the levels rose that much and fell again three times; or single steps swing in step with each other
    flat        the loss has fallen by less than 2 % even at the upper end of its error

A rise that follows a rise of the learning rate, as after a restart, is no divergence. Of 10,000 healthy synthetic curves (noise of 1
to 80 %, spikes, warmup, WSD, restarts, fine-tuning, epochs; `tests/report/loss_curves.py`) 3 were called sick, all of them as
`possible`. Of 1,000 each, all diverged, swinging and alternating curves were found, and 74 % of the flat ones; the others were too
noisy to be sure.
"""

import itertools
import math
from collections.abc import Iterator
from functools import cached_property
from statistics import fmean, median
from typing import Any

from brimful.report.run_figures import RunFigures, Typical, part
from brimful.report.why.diagnosis import Finding, Fix, finding, fix, say
from brimful.training.events import number
from brimful.training.levels import OF_LEVEL, Level, follows_rate, rise_matters, spread
from brimful.units import show_rows

NEW_WEIGHTS = ("chatlm-tiny", "chatlm-base", "causal-tiny", "causal-small")
"""What `--model` calls a model that was not trained before."""
FEW_UPDATES = 100
"""Below this, neither a learning rate nor a loss curve can be judged."""
LEVELS, LEAST_PER_LEVEL = 40, 8
"""Parts of a curve, and steps of each."""
SWINGS = 3
FAST_SWING, AUTOCORRELATION = 0.15, 0.6
"""Steps swing if they differ by this share of the level, and depend on the step before by this much. Noise does not."""
FLAT = 0.02
SKIPPED = 0.01
"""fp16 skips steps while its loss scale settles: up to this share of them is normal."""
GRADIENT_RISE = 10.0
PRETRAINED = frozenset(("from", "model", "base", "base_model", "pretrained", "checkpoint", "init"))
"""Options of tasks that name weights to begin with: such a run may be flat because it has little left to learn."""
_LOSS = "events.jsonl, loss"
MOVING_CURVES = ("cosine", "linear", "wsd")


def loss_findings(run: RunFigures) -> Iterator[Finding]:
    yield from _few_updates(run)
    yield from _not_finite(run)
    no_rate = list(_rate_never_applied(run))
    yield from no_rate
    curve = Curve(run)
    if no_rate or len(curve.points) < FEW_UPDATES:
        return
    for check in (_swinging, _diverging, _flat):  # a curve is described by the first that applies
        findings = list(check(run, curve))
        yield from findings
        if findings:
            return


class Curve:
    """The finite losses of the updates of a run, and their levels."""

    def __init__(self, run: RunFigures) -> None:
        self.points = [
            (int(step["step"]), loss, number(step, "lr"))
            for step in run.steps
            if (loss := number(step, "loss")) is not None and math.isfinite(loss) and step.get("applied", True)
        ]
        self.complete = not run.record.step_lines_skipped

    @cached_property
    def levels(self) -> list[Level]:
        """Parts of equal length in steps, however densely steps were read."""
        count = max(5, min(LEVELS, len(self.points) // LEAST_PER_LEVEL))
        first, last = self.points[0][0], self.points[-1][0]
        width = (last - first + 1) / count
        parts: list[list[tuple[int, float, float | None]]] = [[] for _ in range(count)]
        for point in self.points:
            parts[min(count - 1, int((point[0] - first) / width))].append(point)
        return [Level.of(one) for one in parts if len(one) >= 3]

    @property
    def start(self) -> float:
        """The level of the first steps, before the first part has fallen."""
        return median(loss for _, loss, _ in self.points[: max(5, len(self.points) // 50)])

    @property
    def progress(self) -> float:
        """What the loss has fallen so far, at its lowest."""
        return max(0.0, self.start - min(level.loss for level in self.levels))

    @property
    def size(self) -> float:
        """The usual size of the loss."""
        return median(abs(level.loss) for level in self.levels)

    def matters(self, low: Level, high_loss: float, high_error: float) -> bool:
        """Whether a rise from this level is beyond noise and large for this curve."""
        return rise_matters(low, high_loss, high_error, progress=self.progress)


def lower_rate(run: RunFigures) -> Fix:
    rates = [lr for step in run.steps if (lr := number(step, "lr")) is not None and math.isfinite(lr)]
    if not rates or not max(rates):
        return fix(say("Lower the learning rate to a third"), costs=say("another experiment"))
    highest = max(rates)
    return fix(
        say("Lower the learning rate to a third, from {rate} to {lower}", rate=f"{highest:.3g}", lower=f"{highest / 3:.1g}"),
        costs=say("another experiment"), brimful=f"--lr {highest / 3:.1g}",
    )  # fmt: skip


def _stabilisers(run: RunFigures) -> Iterator[Fix]:
    yield lower_rate(run)
    if run.options.get("clip_norm") == 0:
        yield fix(say("Clip the gradients, which is off"), brimful="--clip-norm 1")
    yield fix(say("Let the learning rate rise for longer"), brimful="--warmup 5%")


# ---- Diverging, swinging, flat -----------------------------------------------------------------------------------------


def _diverging(run: RunFigures, curve: Curve) -> Iterator[Finding]:
    levels = curve.levels
    if len(levels) < 5:
        return
    tail = levels[-max(1, len(levels) // 10) :]
    end, error = fmean(level.loss for level in tail), fmean(level.error for level in tail) / math.sqrt(len(tail))
    at = min(range(len(levels)), key=lambda index: levels[index].loss)
    low = levels[at]
    if at >= len(levels) - max(2, len(levels) // 5) or not curve.matters(low, end, error):
        return
    above_start = end > curve.start + OF_LEVEL * abs(curve.start)
    if follows_rate(low, levels[at + 1 :]) and not above_start:
        return
    sentences = [
        say("The loss is rising: its lowest level was {low} around step {at}, and now it is {end}.", low=f"{low.loss:.4g}", at=f"{(low.first + low.last) // 2:,}", end=f"{end:.4g}")
    ]  # fmt: skip
    if above_start:
        sentences.append(say("That is more than at the start ({start}).", start=f"{curve.start:.4g}"))
    else:
        sentences.append(
            say(
                "The usual reason is a learning rate that is too high, but rows that become harder would look the same."
            )
        )
    yield finding(
        0.8 if above_start else 0.4, "loss-diverging", sentences, certainty="likely" if above_start else "possible",
        figures={"start": curve.start, "lowest": low.loss, "lowest_at_step": low.last, "last": end, "error": error}, evidence=_LOSS,
        fixes=_stabilisers(run),
    )  # fmt: skip


def _swinging(run: RunFigures, curve: Curve) -> Iterator[Finding]:
    swings = _count_swings(curve)
    figures: dict[str, Any] = {"swings": swings, "level": curve.size}
    if swings >= SWINGS:
        sentence = say("The loss has risen and fallen again {count} times, each time by more than its noise and by at least a tenth.", count=swings)  # fmt: skip
        yield finding(
            0.35, "loss-swinging", [sentence], certainty="likely", figures=figures, evidence=_LOSS, fixes=_stabilisers(run),
        )  # fmt: skip
        return
    fast = _fast_swing(curve)
    if fast is None:
        return
    figures["spread"], figures["autocorrelation"] = fast
    sentence = say("The loss swings by {share} from step to step, and not at random, because consecutive steps are correlated.", share=f"{fast[0] / curve.size:.0%}")  # fmt: skip
    yield finding(
        0.3, "loss-swinging", [sentence], certainty="possible", figures=figures, evidence=_LOSS, fixes=_stabilisers(run),
    )  # fmt: skip


def _count_swings(curve: Curve) -> int:
    """How often the level rose and fell again by what matters, where the learning rate did not rise."""
    levels, count, rising = curve.levels, 0, False
    if not levels:
        return 0
    low, high = 0, 0
    for index, level in enumerate(levels):
        if not rising:
            low = index if level.loss < levels[low].loss else low
            if curve.matters(levels[low], level.loss, level.error) and not follows_rate(
                levels[low], levels[low + 1 : index + 1]
            ):
                rising, high = True, index
            elif level.loss > levels[low].loss and follows_rate(levels[low], levels[low + 1 : index + 1]):
                low = index
        else:
            high = index if level.loss > levels[high].loss else high
            if curve.matters(level, levels[high].loss, levels[high].error):
                rising, low, count = False, index, count + 1
    return count


def _fast_swing(curve: Curve) -> tuple[float, float] | None:
    """Spread and autocorrelation of the losses around their level; None if they are noise."""
    if not curve.complete or curve.size == 0:
        return None
    tail = [loss for _, loss, _ in curve.points[len(curve.points) // 4 :]]
    pairs = [(a + b) / 2 for a, b in itertools.pairwise(tail)]  # which have no swing from one step to the next
    half = 8
    rest = [loss - median(pairs[max(0, i - half) : i + half]) for i, loss in enumerate(tail[:-1])]
    amplitude = spread(rest)
    if amplitude < FAST_SWING * curve.size:
        return None
    bounded = [max(-3 * amplitude, min(3 * amplitude, one)) for one in rest]  # one spike must not decide
    middle = fmean(bounded)
    variance = fmean((one - middle) ** 2 for one in bounded)
    lag = fmean((a - middle) * (b - middle) for a, b in itertools.pairwise(bounded)) / variance if variance else 0.0
    return (amplitude, lag) if abs(lag) >= AUTOCORRELATION else None


def _flat(run: RunFigures, curve: Curve) -> Iterator[Finding]:
    losses = [loss for _, loss, _ in curve.points]
    updates = len(losses)
    if max(losses) == min(losses):
        sentence = say("The loss is exactly {loss} in all {count} updates, so nothing is learned from the rows.", loss=f"{losses[0]:.6g}", count=f"{updates:,}")  # fmt: skip
        check = fix(say("Check that the loss depends on the model's output and that labels are not all masked"))
        yield finding(
            0.85, "loss-flat", [sentence], figures={"loss": losses[0], "updates": updates}, evidence=_LOSS, fixes=[check],
        )  # fmt: skip
        return
    begin, end = Typical.of(losses[: max(5, updates // 20)]), Typical.of(losses[-updates // 5 :])
    if begin is None or end is None or abs(begin.value) < 1e-4:
        return
    fallen, error = begin.value - end.value, math.hypot(begin.error, end.error)
    norms = [norm for step in run.steps if (norm := number(step, "grad_norm")) is not None]
    no_gradient = bool(norms) and max(norms) == 0
    if fallen + 3 * error >= FLAT * abs(begin.value) and not no_gradient:
        return
    if not no_gradient and (_evaluations_improve(run) or _was_trained_before(run)):
        return
    figures = {"first": begin.value, "last": end.value, "error": error, "updates": updates}
    sentences = [say("The loss has not fallen in {count} updates: {first} at the start, {last} at the end.", count=f"{updates:,}", first=f"{begin.value:.4g}", last=f"{end.value:.4g}")]  # fmt: skip
    if no_gradient:
        sentences.append(say("All gradients are zero, so no weights can change."))
        remedy = fix(say("Check which weights are trainable, and that the loss depends on them"))
        yield finding(0.85, "loss-flat", sentences, figures=figures, evidence=_LOSS, fixes=[remedy])
        return
    sentences.append(say("If the weights were already trained on such rows, this is expected."))
    rates = [rate for _, _, rate in curve.points if rate]
    fixes = [fix(say("Check the labels, and which weights are trainable"))]
    if rates:
        fixes.insert(0, fix(say("Try ten times the learning rate, {rate}", rate=f"{10 * max(rates):.1g}"), costs=say("another experiment"), brimful=f"--lr {10 * max(rates):.1g}"))  # fmt: skip
    yield finding(0.4, "loss-flat", sentences, certainty="possible", figures=figures, evidence=_LOSS, fixes=fixes)


def _was_trained_before(run: RunFigures) -> bool:
    """Whether an option names weights to begin with. A preset of `--model` names new ones."""
    options = {name.rstrip("_"): value for name, value in run.task_options.items()}
    return any(options[name] not in NEW_WEIGHTS for name in PRETRAINED & options.keys())


def _evaluations_improve(run: RunFigures) -> bool:
    losses = [loss for event in run.record.of_kind("eval") if (loss := number(event, "loss")) is not None]
    finite = [loss for loss in losses if math.isfinite(loss)]
    return len(finite) >= 2 and finite[0] - min(finite[1:]) >= FLAT * abs(finite[0])


# ---- NaN ---------------------------------------------------------------------------------------------------------------


def _not_finite(run: RunFigures) -> Iterator[Finding]:
    """Losses that are no number, and steps that were skipped because of their gradients."""
    bad = [
        step
        for step in run.steps
        if step.get("applied") is False or ((loss := number(step, "loss")) is not None and not math.isfinite(loss))
    ]
    fp16 = part(run.plan, "levers").get("precision") == "fp16"
    settling = sum(step["step"] <= FEW_UPDATES for step in bad)
    ended_so = bool(bad) and bad[-1]["step"] == run.last_step
    if not bad or (fp16 and not ended_so and len(bad) - settling <= SKIPPED * len(run.steps)):
        return
    first = bad[0]["step"]
    all_of_them = len(bad) == len(run.steps)
    figures = {"steps": len(bad), "of": len(run.steps), "first_step": first, "last_step": bad[-1]["step"]}
    if len(bad) == 1:
        sentences = [say("Loss or gradients were NaN or infinite in step {step}.", step=f"{first:,}")]
    else:
        sentences = [say("Loss or gradients were NaN or infinite in {count} of {steps} steps, first in step {first}.", count=f"{len(bad):,}", steps=f"{len(run.steps):,}", first=f"{first:,}")]  # fmt: skip
    if all(step.get("applied") is False for step in bad):
        sentences.append(say("Such steps are skipped, so they changed no weights."))
    usual, before = _gradients_before(run, first)
    fixes: list[Fix] = []
    if fp16:
        fixes.append(fix(say("Compute in bf16, which does not overflow where fp16 does"), brimful="--precision bf16"))
    if first <= 2 and all_of_them:
        sentences.append(
            say(
                "This happened from the first step on, so the rows, the labels or the loss itself are the cause, not the learning rate."
            )
        )
        fixes.append(
            fix(say("Look for empty rows, labels that are all masked, a division by zero or a logarithm of it"))
        )
    elif usual and before and before >= GRADIENT_RISE * usual:
        figures["gradient_norm"], figures["usual_gradient_norm"] = before, usual
        sentences.append(
            say(
                "The gradient norm had risen before, from {usual} to {before}.",
                usual=f"{usual:.3g}",
                before=f"{before:.3g}",
            )
        )
        fixes += _stabilisers(run)
    else:
        look = fix(say("Look at the rows of step {step}: an event `skip` names the first weight with such a gradient", step=f"{first:,}"))  # fmt: skip
        numbers = {step["step"] for step in bad}
        alone = sum(number + 1 not in numbers and number != run.last_step for number in numbers)
        if not fp16 and 2 * alone >= len(bad):
            sentences.append(say("The steps right after were finite, so single rows are a likelier cause than the learning rate."))  # fmt: skip
            fixes += [look, lower_rate(run)]
        else:
            fixes += [lower_rate(run), look]
    serious = ended_so or len(bad) > SKIPPED * len(run.steps)
    skip = next((event for event in run.record.of_kind("skip") if event["step"] == first), {})
    yield finding(
        0.95 if all_of_them or ended_so else 0.5 if serious else 0.2, "nan-loss", sentences, certainty="certain" if serious else "likely",
        figures=figures, evidence=f"events.jsonl, step {first}" + (f": {skip['sentence']}" if skip.get("sentence") else ""), fixes=fixes,
    )  # fmt: skip


def _gradients_before(run: RunFigures, first: int) -> tuple[float | None, float | None]:
    """The usual gradient norm, and the highest of the ten steps before this one."""
    norms = [
        norm
        for step in run.steps
        if step["step"] < first and (norm := number(step, "grad_norm")) is not None and math.isfinite(norm)
    ]
    return (median(norms), max(norms[-10:])) if len(norms) >= 10 else (None, None)


# ---- The learning rate and the number of updates -----------------------------------------------------------------------


def _rate_never_applied(run: RunFigures) -> Iterator[Finding]:
    rates = [lr for step in run.steps if (lr := number(step, "lr")) is not None]
    if len(rates) < 5:
        return
    if not any(rates):
        sentence = say("The learning rate is 0 in all {count} steps, so no weights change.", count=f"{len(rates):,}")
        remedy = fix(say("Check the schedule of the task, or set the rate"), brimful="--lr 1e-4")
        yield finding(
            0.9, "learning-rate-not-applied", [sentence], figures={"lr": 0.0, "steps": len(rates)}, evidence="events.jsonl, lr",
            fixes=[remedy],
        )  # fmt: skip
        return
    schedule, steps = part(run.choices, "schedule").get("effective"), run.steps_in_all
    if schedule not in MOVING_CURVES or not steps or max(rates) - min(rates) > 1e-6 * max(rates):
        return
    decay = number(run.options, "decay") or 0.2
    must_have_moved = (1 - decay) * steps + 0.25 * decay * steps if schedule == "wsd" else 0.25 * steps
    if run.last_step - run.steps[0]["step"] < must_have_moved:
        return
    sentence = say(
        "The learning rate was {rate} in every step, although the schedule is {schedule}.",
        rate=f"{rates[0]:.3g}",
        schedule=schedule,
    )
    reason = say("Something sets it after the schedule, such as a hook or an optimizer that chooses its own rate.")
    remedy = fix(say("Look for code that sets the learning rate (Adafactor needs relative_step=False)"))
    yield finding(
        0.6, "learning-rate-not-applied", [sentence, reason], certainty="likely",
        figures={"lr": rates[0], "schedule": schedule, "steps": len(rates)}, evidence="events.jsonl, lr", fixes=[remedy],
    )  # fmt: skip


def _few_updates(run: RunFigures) -> Iterator[Finding]:
    """A run that is too short by its own plan, or whose every step sees all the rows there are."""
    steps, rows, data_rows = run.steps_in_all, run.rows_per_step, run.data_rows
    if not steps or not rows:
        return
    all_rows = data_rows is not None and rows >= data_rows
    if not all_rows and steps >= FEW_UPDATES:
        return
    figures = {"updates": steps, "rows_per_step": rows, "data_rows": data_rows}
    smaller = max(1, min(rows // 2, steps * rows // (2 * FEW_UPDATES)))
    if all_rows and data_rows is not None:
        smaller = max(1, min(smaller, data_rows // 20))
        sentences = [say("A step has {rows} rows and the data only {data_rows}, so every step sees all of them, and a larger batch would change nothing.", rows=f"{rows:,}", data_rows=f"{data_rows:,}")]  # fmt: skip
    else:
        sentences = [
            say("The run has only {count} updates, too few to judge its loss or its learning rate.", count=steps)
        ]
    fixes = []
    if smaller < rows:
        updates = math.ceil(steps * rows / smaller)
        as_many_rows = "" if run.options.get("max_steps") is None else f" --max-steps {updates}"
        fixes.append(
            fix(
                say("Use {rows} rows a step: {count} updates over the same rows", rows=smaller, count=f"{updates:,}"),
                costs=say("another experiment"), global_batch=show_rows(smaller), brimful=f"--global-batch {smaller}{as_many_rows}", basis="predicted",
            )
        )  # fmt: skip
    if steps < FEW_UPDATES and not all_rows:
        times = math.ceil(2 * FEW_UPDATES / steps)
        flag = f"--max-steps {times * steps}"
        if run.options.get("max_steps") is None:
            flag = f"--epochs {times * (number(run.options, 'epochs') or 1.0):g}"
        fixes.append(fix(say("Train {times} times as long", times=times), costs=say("{times} times the time", times=times), brimful=flag, basis="predicted"))  # fmt: skip
    yield finding(
        0.35 if all_rows else 0.15, "batch-exceeds-data" if all_rows else "few-updates", sentences, figures=figures, evidence="plan.json",
        fixes=fixes,
    )  # fmt: skip
