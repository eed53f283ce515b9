"""Every choice of a plan with its reason, from a search that has ended."""

import os
from typing import TYPE_CHECKING

from brimful.planning.levers import cudnn_attention, weights_choice
from brimful.planning.plan import Basis, Choice, Levers, Source
from brimful.planning.speed import Timing
from brimful.units import show_bytes, show_rate, show_rows, show_seconds

if TYPE_CHECKING:
    from brimful.planning.micro_batch import Search, Trial


def choices_of(search: "Search", trial: "Trial", checkpointing_reason: str) -> list[Choice]:
    """Every choice with its reason, in the order a reader wants to know them."""
    options, target, timing = search.options, search.target, trial.speed.chosen  # type: ignore[union-attr]
    source = "the task's value" if options.global_batch is None else "as requested"
    dealt = f"{source}, dealt {'+'.join(map(str, search.deal))}" if len(search.deal) > 1 else source
    split = "one micro-batch" if timing.accumulation == 1 else f"in micro-batches of at most {timing.rows}"
    checkpointed = [one.setting.checkpointing != "off" for one in search.trials]
    moved = f"; it moves {show_bytes(trial.host_bytes)} to host RAM (predicted)" if trial.host_bytes else ""
    basis: Basis = "measured" if any(checkpointed) and not search.lever.already_on else "predicted"
    levers, reasons = levers_of(search, trial)
    choices = [
        Choice.of("device", _unless_auto(options.device), str(target.device), target.name, "measured"),
        Choice.of("memory_limit", options.memory_limit_bytes, target.limit_bytes, target.limit_reason, "measured"),
        Choice.of("global_batch", options.global_batch, sum(search.deal), dealt, "asked", "task"),
        Choice.of("layout", _unless_auto(options.layout), search.context.layout.name, search.layout_reason, "measured"),
        _micro_batch(search, trial),
        Choice.of("accumulation", None, timing.accumulation, f"{show_rows(search.most)}, {split}", "measured"),
        Choice.of("checkpointing", _unless_auto(options.checkpointing), levers.checkpointing, checkpointing_reason + moved, basis),
        Choice.of("compile", _unless_auto(options.compile), levers.compile, search.compile_reason, "measured"),
        Choice.of("precision", options.precision, levers.precision, reasons["precision"], "asked", _precision_from(search)),
        *([weights_choice(search.context, options.weights)] if options.weights else []),
        _exactness(search, timing),
        *_how_it_was_planned(search),
    ]  # fmt: skip
    if target.device.type == "cuda":
        wanted = _unless_auto(options.cudnn_attention)
        reason = reasons["cudnn_attention"]
        choices += [Choice.of("cudnn_attention", wanted, levers.cudnn_attention, reason, "predicted"), _allocator()]
    return choices


def _how_it_was_planned(search: "Search") -> list[Choice]:
    """What is not usual about it: nothing timed decided, or time ended the search."""
    if search.options.deterministic:
        reason = "plan and split follow from the inputs, not from times; torch uses deterministic algorithms where it has them"
        return [Choice.of("deterministic", True, True, reason, "asked")]
    wanted, skipped = search.options.plan_seconds, search.time.skipped
    if wanted is None and not skipped:
        return []
    took, limit = show_seconds(search.time.elapsed_s), search.time.limit_s
    reason = (
        f"time ended the search after {took}; not tried: {', '.join(skipped)}" if skipped else f"{took} were enough"
    )
    return [Choice.of("plan_seconds", wanted, limit, reason, "measured")]


def _micro_batch(search: "Search", trial: "Trial") -> Choice:
    assert trial.speed is not None
    wanted, timing = search.options.micro_batch, trial.speed.chosen
    if wanted == "auto" and search.few_splits:
        reason = f"the fewest splits, since a split changes the result: {show_rate(timing.rows_per_s)} rows/s"
        return Choice.of("micro_batch", None, timing.rows, reason, "measured")
    if wanted == "auto" and search.options.deterministic:
        reason = (
            f"deterministic: the largest that fits, in equal parts of the step: {show_rate(timing.rows_per_s)} rows/s"
        )
        return Choice.of("micro_batch", None, timing.rows, reason, "measured")
    if wanted == "auto":
        return Choice.of("micro_batch", None, timing.rows, trial.speed.reason, "measured")
    reason = "as requested" if wanted == timing.rows else f"the step has only {show_rows(search.most)} in a process"
    reason += f"; the largest within {search.target.fill:.0%} of the limit is {trial.largest}"
    return Choice.of("micro_batch", wanted, timing.rows, reason, "measured")


def _exactness(search: "Search", timing: Timing) -> Choice:
    exactness, whole = search.exactness, timing.accumulation == 1 and len(search.deal) == 1
    effective = "exact" if exactness.exact else "whole step" if timing.accumulation == 1 else "inexact"
    if exactness.random:
        effective = "same in distribution"
    if not exactness.comparable and not exactness.batch_norm and not whole:
        effective = "not known"
    if exactness.unequal_rows:
        effective = "whole step" if whole else "weighted by rows"
    requested = "inexact allowed" if search.options.allow_inexact else None
    return Choice.of("exactness", requested, effective, exactness.reason, "measured")


def warnings_of(search: "Search", trial: "Trial", timing: Timing) -> list[str]:
    exactness, split = search.exactness, timing.accumulation > 1 or len(search.deal) > 1
    warnings = []
    if search.options.weights == "bf16":
        warnings.append(
            "weights are bf16: an update below 0.2% of a weight is rounded away, and gradients of micro-batches are summed in bf16"
        )
    if exactness.batch_norm or (exactness.depends_on_split and split):
        warnings.append(f"{exactness.reason}; results depend on the micro-batch, here {show_rows(timing.rows)}")
    if exactness.looks_across_rows and split:
        warnings.append(f"{exactness.reason}; inexact splits are allowed, so a micro-batch sees only its own rows")
    if not exactness.comparable and split:
        warnings.append(
            exactness.reason
            if "NaN" in exactness.reason
            else f"{exactness.reason}; draw random numbers with torch and keep no state in loss() to have it checked"
        )
    if exactness.unequal_rows and split:
        warnings.append(f"{exactness.reason}; return (mean, count) from loss() to make the split exact")
    warnings += [too_long] if (too_long := _too_long(search, trial)) else []
    return warnings + ([trial.survey.shape_note] if trial.survey.shape_note else [])


def _too_long(search: "Search", trial: "Trial") -> str:
    """A packed plan is made for the mean row, and the longest may not fit even alone."""
    if search.holds_longest(trial):
        return ""
    longest, limit = search.longest, search.target.limit_bytes
    needed = trial.survey.model.cost_bytes(1, longest)
    return (
        f"the longest row ({'+'.join(map(str, longest))}) needs about {show_bytes(needed)} alone, more than the limit of "
        f"{show_bytes(limit)}: a run stops there unless such rows are skipped (skip_oversized) or shortened (lengths)"
    )


def levers_of(search: "Search", trial: "Trial") -> tuple[Levers, dict[str, str]]:
    """How the levers are set, and the reasons for those that the search does not try."""
    options, name = search.options, search.target.name
    wanted, setting = options.precision_for(search.task), trial.setting
    reason = "as requested" if options.precision else "the task's value"
    if options.weights == "bf16" and options.precision != "bf16":
        reason = "that of the weights"
    if wanted == "auto":
        reason = f"{name} computes faster in bf16" if setting.precision == "bf16" else f"{name} gains nothing from bf16"
    cudnn, cudnn_reason = cudnn_attention(options.cudnn_attention, search.target.device, search.shape)
    levers = Levers(
        checkpointing=setting.checkpointing, compile=setting.compile,
        chunked_loss="on" if setting.layout in search.task.chunked_loss else "off",
        precision=setting.precision, weights=options.weights, cudnn_attention=cudnn,
    )  # fmt: skip
    return levers, {"precision": reason, "cudnn_attention": cudnn_reason}


def _precision_from(search: "Search") -> Source:
    """Of a precision that is not what was requested: `auto` leaves it to the device."""
    if search.options.weights == "bf16":
        return "you"
    return "default" if search.options.precision_for(search.task) == "auto" else "task"


def _unless_auto(value: str) -> str | None:
    return None if value == "auto" else value


def _allocator() -> Choice:
    """How torch's allocator is set, because it decides what is reserved for the same tensors."""
    setting = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    reason = "PYTORCH_ALLOC_CONF=expandable_segments:True would reserve less"
    if setting and "expandable_segments:True" in setting:
        reason = "segments that can grow are not fragmented by varying shapes"
    return Choice.of("allocator", None, setting or "torch's default", reason, "asked")
