"""Memory that grows while the steps stay the same: a leak; and a peak that stands out: the one long row.

A **leak** is a rise over steps of equal shape that has not stopped. The medians of eight parts of the run rise one after the other
(of unordered noise one run in 40,000 does), and the second half rises at least half as fast as the first, which a cache that fills
up does not: its rise in the second half is 0.38 of the first if it follows a logarithm.

A **long row** shows in one step of a thousand: its peak is a quarter above all others. That is worth a word only where it comes near
the limit.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from brimful.report.run_figures import RunFigures, finite, in_parts, lengths, part, whole
from brimful.report.why.diagnosis import Certainty, Diagnosis, Fix
from brimful.report.why.finding import Finding, say
from brimful.report.why.long_rows import longest_lengths
from brimful.report.why.oom_checks import row_place, shorter_rows
from brimful.units import MiB, show_bytes, zone

LEAST_STEPS = 64
"""Steps of equal shape that a leak is looked for in."""
PARTS = 8
LEAST_SHARE = 0.05
"""A rise below this share of what there was is none."""
LEAST_BYTES = {"peak_bytes": 32 * MiB, "host_bytes": 256 * MiB}
"""Nor is one below this: Python and torch keep a little more as they go."""
STILL_RISING = 0.5
"""The second half of a leak rises at least this much as fast as the first."""
EQUAL_TOKENS = 0.10
"""Steps whose tokens are within this share of the median have equal shape."""
EXPLAINED = 0.5
"""If the tokens rise by this share of what memory rises by, they are the cause."""
JUMP = 1.25
"""A peak this much above those of almost all other steps stands out."""
ALMOST_ALL = 0.99


def growth_findings(run: RunFigures) -> Iterator[Finding]:
    device, host = _rise(run, "peak_bytes"), _rise(run, "host_bytes")
    if device is not None:
        yield _device_leak(run, device)
    if host is not None:
        yield _host_leak(run, host)
    if device is None and not run.events("oom"):
        yield from _long_row(run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """A steady rise."""

    first_bytes: float
    last_bytes: float
    per_step: float
    steps: int
    """Steps of equal shape that show it."""
    passes: float
    """Passes over the data meanwhile."""


def _rise(run: RunFigures, name: str) -> Rise | None:
    points = _equal_steps(run, name)
    points = points[len(points) // 10 :]
    if len(points) < LEAST_STEPS:
        return None
    parts = in_parts(points, PARTS)
    levels = [median(value for _, value in one) for one in parts]
    middles = [median(step["step"] for step, _ in one) for one in parts]
    rise, half = levels[-1] - levels[0], PARTS // 2
    steady = all(before < after for before, after in itertools.pairwise(levels))
    if not steady or rise < max(LEAST_BYTES[name], LEAST_SHARE * levels[0]):
        return None
    tokens = [median(finite(step, "tokens") or 0.0 for step, _ in one) for one in (parts[0], parts[-1])]
    if tokens[0] and tokens[1] / tokens[0] - 1 > EXPLAINED * rise / levels[0]:  # rows become longer
        return None
    early, late = ((levels[b] - levels[a]) / (middles[b] - middles[a]) for a, b in ((0, half - 1), (half, PARTS - 1)))
    if late < STILL_RISING * early:
        return None
    epochs = [finite(points[at][0], "epoch") or 0.0 for at in (0, -1)]
    return Rise(
        first_bytes=levels[0], last_bytes=levels[-1], per_step=rise / (middles[-1] - middles[0]), steps=len(points),
        passes=max(0.0, epochs[1] - epochs[0]),
    )  # fmt: skip


def _equal_steps(run: RunFigures, name: str) -> list[tuple[Mapping[str, Any], float]]:
    """Steps with the usual number of micro-batches and about the usual tokens, and their figure."""
    known = [(step, value) for step in run.settled if (value := whole(step, name)) and not whole(step, "ooms")]
    if not known:
        return []
    usual = Counter(whole(step, "micro_batches") for step, _ in known).most_common(1)[0][0]
    tokens = [count for step, _ in known if (count := finite(step, "tokens"))]
    middle = median(tokens) if tokens else None
    return [
        (step, value)
        for step, value in known
        if whole(step, "micro_batches") == usual
        and (middle is None or abs((finite(step, "tokens") or 0.0) / middle - 1) <= EQUAL_TOKENS)
    ]


def _full_at(run: RunFigures, rise: Rise, used: float | None, limit: int | None) -> int | None:
    """The step in which the limit would be reached."""
    if used is None or limit is None:
        return None
    return run.last_step + max(0, int((limit - used) / rise.per_step))


def _leak_sentences(run: RunFigures, rise: Rise, what: str, full: int | None, limit: int | None) -> list[str]:
    sentences = [
        say(
            "{what} rises by {bytes} in 1,000 steps of equal shape, from {first} to {last} so far, and has not stopped rising.",
            what=what,
            bytes=show_bytes(1000 * rise.per_step),
            first=show_bytes(rise.first_bytes),
            last=show_bytes(rise.last_bytes),
        )
    ]
    if full is not None:
        beyond = run.steps_in_all is not None and full > run.steps_in_all
        template = (
            "At this rate the limit of {limit} is reached around step {step}, after the end of this run."
            if beyond
            else "At this rate the limit of {limit} is reached around step {step}."
        )
        sentences.append(say(template, limit=show_bytes(limit), step=f"{full:,}"))
    return sentences


def _leak_finding(
    run: RunFigures, rise: Rise, *, name: str, kind: str, what: str, used: float | None, limit: int | None, fixes: Sequence[Fix],
    caution: str | None = None,
) -> Finding:  # fmt: skip
    full = _full_at(run, rise, used, limit)
    in_time = full is not None and (run.steps_in_all is None or full <= run.steps_in_all)
    sentences = _leak_sentences(run, rise, what, full, limit)
    certainty: Certainty = "likely"
    if caution is not None:
        certainty = "possible"
        sentences.append(caution)
    return Finding(
        0.9 if in_time else 0.3,
        Diagnosis(
            resource="none", kind=kind, cause=" ".join(sentences), certainty=certainty,
            figures={
                "first_bytes": round(rise.first_bytes), "last_bytes": round(rise.last_bytes), "bytes_per_step": round(rise.per_step),
                "steps": rise.steps, "limit_bytes": limit, "full_at_step": full,
            },
            evidence=f"events.jsonl, {name}", fixes=tuple(fixes),
        ),
    )  # fmt: skip


def _restart(run: RunFigures) -> Fix:
    command = f"{run.record.folder.resume_command} --time-limit 4h"
    return Fix(
        title=say("Until then, pause and continue the run before memory is full, since a new process starts without the leak"),
        costs=say("a restart each time"), flags={"shell": command},
    )  # fmt: skip


def _device_leak(run: RunFigures, rise: Rise) -> Finding:
    used = max(rise.last_bytes, *(whole(step, "reserved_bytes") or 0 for step in run.steps[-20:]))
    what = say("The peak of a step") if run.on_gpu else say("The peak of a step on the CPU")
    keep = Fix(
        title=say("Keep numbers instead of tensors: what a task or a hook stores of a step must be detached, such as loss.item()"),
        saves=show_bytes(rise.last_bytes - rise.first_bytes), basis="measured",
    )  # fmt: skip
    return _leak_finding(
        run, rise, name="peak_bytes", kind="device-memory-leak", what=what, used=used, limit=run.limit_bytes, fixes=(keep, _restart(run)),
    )  # fmt: skip


def _host_leak(run: RunFigures, rise: Rise) -> Finding:
    newest = run.host_samples[-1][1] if run.host_samples else {}
    limit = (
        whole(newest, "limit_bytes")
        or whole(run.begin, "ram_limit_bytes")
        or whole(part(run.plan, "host"), "limit_bytes")
    )
    used = whole(newest, "machine_bytes") or whole(run.steps[-1], "machine_bytes") or rise.last_bytes
    workers = whole(part(run.plan, "host"), "workers")
    fixes = [
        Fix(
            title=say(
                "Look for what the task, the dataset or a hook appends to without end, such as a list of results or a cache"
            ),
            saves=show_bytes(rise.last_bytes - rise.first_bytes),
            basis="measured",
        )
    ]
    if workers:
        fixes.append(
            Fix(
                title=say(
                    "Read without workers for a while: if the rise stops, the memory is held by the dataset's code in the workers"
                ),
                costs=say("time to read rows, in each step"),
                flags={"brimful": "--workers 0"},
            )
        )
    caution = None
    if rise.passes < 1:
        caution = say("It may stop once every row has been read, because the run has not completed an epoch yet.")
    return _leak_finding(
        run, rise, name="host_bytes", kind="host-memory-leak", what=say("Host RAM of the run"), used=used, limit=limit,
        fixes=(*fixes, _restart(run)), caution=caution,
    )  # fmt: skip


def _long_row(run: RunFigures) -> Iterator[Finding]:
    """One or two steps whose peak came near the limit, far above the others."""
    peaks = sorted((value, step["step"]) for step in run.settled if (value := whole(step, "peak_bytes")))
    if len(peaks) < LEAST_STEPS or not run.limit_bytes:
        return
    usual = peaks[min(len(peaks) - 2, int(ALMOST_ALL * len(peaks)) - 1)][0]
    (peak, at), step = peaks[-1], None
    step = next(one for one in run.settled if one["step"] == at)
    used = max(peak, whole(step, "reserved_bytes") or 0) / run.limit_bytes
    if peak < JUMP * usual or zone(used) == "safe":
        return
    sentences = [
        say("Step {step} took {peak}, while almost all others take {usual} or less: it had an unusually long row.", step=f"{at:,}", peak=show_bytes(peak), usual=show_bytes(usual))
    ]  # fmt: skip
    shape = longest_lengths(run) or lengths(run.plan, "shape") or ()
    place = row_place(run, step, shape)
    if place is not None:
        sentences.append(place)
    tokens = [count for one in run.settled if (count := finite(one, "tokens"))]
    more_tokens = bool(tokens) and (finite(step, "tokens") or 0.0) > 1.1 * median(tokens)
    yield Finding(
        0.25,
        Diagnosis(
            resource="none", kind="long-row", cause=" ".join(sentences),
            certainty="likely" if place is not None or more_tokens else "possible",
            figures={"step": at, "peak_bytes": peak, "usual_bytes": usual, "limit_bytes": run.limit_bytes},
            evidence=f"events.jsonl, step {at}", fixes=tuple(shorter_rows(run, whole(run.plan, "micro_batch") or 1, shape)),
        ),
    )  # fmt: skip
