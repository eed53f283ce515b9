"""Every choice of a fit put into words: what was asked, what it became, why, and how sure that is."""

import os
from dataclasses import dataclass
from typing import Any

from brimful.plan.exact import Exactness
from brimful.plan.options import FitOptions
from brimful.plan.plan import Basis, Choice
from brimful.plan.speed import Speed
from brimful.plan.target import Target
from brimful.task import Task
from brimful.units import show_rate


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a fit decided, before it is told."""

    options: FitOptions
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
