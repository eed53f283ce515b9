"""Memory that grows while the steps stay the same: a leak; and a peak that stands out: the one long row, by file and line.

A **leak** is a rise over steps of equal shape that has not stopped. The medians of eight parts of the run rise one after the other
(of unordered noise one run in 40,000 does), and the second half rises at least half as fast as the first, which a cache that fills
up does not: its rise in the second half is 0.38 of the first if it follows a logarithm.

A **long row** shows in one step of a thousand: its peak is a quarter above all others. That is worth a word only where it comes near
the limit. The token store of a run knows the length of every row (ten million in 0.3 s, a million at a time) and the raw files they
came from. Only a run with such a store can name its rows; of others nothing is claimed.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from brimful.report.run_figures import RunFigures, finite, in_parts, lengths, part, show_lengths, whole
from brimful.report.why.diagnosis import Finding, Fix, finding, fix, say
from brimful.units import MiB, show_bytes, zone

if TYPE_CHECKING:
    from brimful.data.store import Store

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
FEW = 0.01
"""A length that more than this share of the rows reaches is not that of one long row."""
CHUNK_ROWS = 1_000_000


def growth_findings(run: RunFigures) -> Iterator[Finding]:
    device, host = _rise(run, "peak_bytes"), _rise(run, "host_bytes")
    if device is not None:
        yield _device_leak(run, device)
    if host is not None:
        yield _host_leak(run, host)
    if device is None and not run.events("oom"):
        yield from _long_row(run)


# ---- Leaks -------------------------------------------------------------------------------------------------------------


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


def _leak(
    run: RunFigures, rise: Rise, kind: str, name: str, what: str, used: float | None, limit: int | None, fixes: Sequence[Fix], caution: str = ""
) -> Finding:  # fmt: skip
    """`used` of `limit` now. `caution`: why it may be no leak after all."""
    full = None if used is None or limit is None else run.last_step + max(0, int((limit - used) / rise.per_step))
    in_time = full is not None and (run.steps_in_all is None or full <= run.steps_in_all)
    sentences = [
        say(
            "{what} rises by {bytes} in 1,000 steps of equal shape, from {first} to {last} so far, and has not stopped rising.",
            what=what, bytes=show_bytes(1000 * rise.per_step), first=show_bytes(rise.first_bytes), last=show_bytes(rise.last_bytes),
        )
    ]  # fmt: skip
    if full is not None:
        template = (
            "At this rate the limit of {limit} is reached around step {step}."
            if in_time
            else "At this rate the limit of {limit} is reached around step {step}, after the end of this run."
        )
        sentences.append(say(template, limit=show_bytes(limit), step=f"{full:,}"))
    restart = fix(
        say("Until then, pause and continue the run before memory is full, since a new process starts without the leak"),
        costs=say("a restart each time"), shell=f"{run.record.folder.resume_command} --time-limit 4h",
    )  # fmt: skip
    figures = {
        "first_bytes": round(rise.first_bytes), "last_bytes": round(rise.last_bytes), "bytes_per_step": round(rise.per_step),
        "steps": rise.steps, "limit_bytes": limit, "full_at_step": full,
    }  # fmt: skip
    return finding(
        0.9 if in_time else 0.3, kind, [*sentences, caution], certainty="possible" if caution else "likely", figures=figures,
        evidence=f"events.jsonl, {name}", fixes=(*fixes, restart),
    )  # fmt: skip


def _device_leak(run: RunFigures, rise: Rise) -> Finding:
    used = max(rise.last_bytes, *(whole(step, "reserved_bytes") or 0 for step in run.steps[-20:]))
    what = say("The peak of a step") if run.on_gpu else say("The peak of a step on the CPU")
    keep = fix(
        say("Keep numbers instead of tensors: what a task or a hook stores of a step must be detached, such as loss.item()"),
        saves=show_bytes(rise.last_bytes - rise.first_bytes), basis="measured",
    )  # fmt: skip
    return _leak(run, rise, "device-memory-leak", "peak_bytes", what, used, run.limit_bytes, [keep])


def _host_leak(run: RunFigures, rise: Rise) -> Finding:
    newest, planned = run.host_samples[-1][1] if run.host_samples else {}, part(run.plan, "host")
    limit = whole(newest, "limit_bytes") or whole(run.begin, "ram_limit_bytes") or whole(planned, "limit_bytes")
    used = whole(newest, "machine_bytes") or whole(run.steps[-1], "machine_bytes") or rise.last_bytes
    fixes = [
        fix(
            say("Look for what the task, the dataset or a hook appends to without end, such as a list of results or a cache"),
            saves=show_bytes(rise.last_bytes - rise.first_bytes), basis="measured",
        )
    ]  # fmt: skip
    if whole(planned, "workers"):
        fixes.append(
            fix(
                say("Read without workers for a while: if the rise stops, the memory is held by the dataset's code in the workers"),
                costs=say("time to read rows, in each step"), brimful="--workers 0",
            )
        )  # fmt: skip
    caution = ""
    if rise.passes < 1:
        caution = say("It may stop once every row has been read, because the run has not completed an epoch yet.")
    return _leak(run, rise, "host-memory-leak", "host_bytes", say("Host RAM of the run"), used, limit, fixes, caution)


# ---- Long rows ---------------------------------------------------------------------------------------------------------


def _long_row(run: RunFigures) -> Iterator[Finding]:
    """One or two steps whose peak came near the limit, far above the others."""
    peaks = sorted((value, step["step"]) for step in run.settled if (value := whole(step, "peak_bytes")))
    if len(peaks) < LEAST_STEPS or not run.limit_bytes:
        return
    usual = peaks[min(len(peaks) - 2, int(ALMOST_ALL * len(peaks)) - 1)][0]
    peak, at = peaks[-1]
    step = next(one for one in run.settled if one["step"] == at)
    used = max(peak, whole(step, "reserved_bytes") or 0) / run.limit_bytes
    if peak < JUMP * usual or zone(used) == "safe":
        return
    took = say("Step {step} took {peak}, while almost all others take {usual} or less: it had an unusually long row.", step=f"{at:,}", peak=show_bytes(peak), usual=show_bytes(usual))  # fmt: skip
    shape = longest_lengths(run) or lengths(run.plan, "shape") or ()
    place = row_place(run, step, shape)
    tokens = [count for one in run.settled if (count := finite(one, "tokens"))]
    more_tokens = bool(tokens) and (finite(step, "tokens") or 0.0) > 1.1 * median(tokens)
    yield finding(
        0.25, "long-row", [took, place], certainty="likely" if place or more_tokens else "possible", evidence=f"events.jsonl, step {at}",
        figures={"step": at, "peak_bytes": peak, "usual_bytes": usual, "limit_bytes": run.limit_bytes},
        fixes=shorter_rows(run, whole(run.plan, "micro_batch") or 1, shape),
    )  # fmt: skip


def row_place(run: RunFigures, event: Mapping[str, Any], shape: Sequence[int]) -> str:
    """Which row it was: as the event says, else by its length in the token store; empty if that is unknown."""
    file, line = event.get("file"), event.get("line")
    if isinstance(file, str) and isinstance(line, int):
        return say("It is line {line} of {file}.", line=f"{line:,}", file=file)
    return _row_of_length(run, shape) if shape else ""


def _row_of_length(run: RunFigures, shape: Sequence[int]) -> str:
    """The row that made a padded micro-batch this long, unless it is not about a few rows."""
    store = _store(run, len(shape))
    if store is None:
        return ""
    means = store.mean_lengths
    axis = max(range(len(shape)), key=lambda axis: shape[axis] / max(1.0, means[axis]))
    first, alike, found = -1, 0, tuple[int, ...]()
    for start, sizes in _sizes(store):
        long_enough = (sizes[:, axis] >= shape[axis]).nonzero()[0]
        if len(long_enough) and first < 0:
            first, found = start + int(long_enough[0]), tuple(map(int, sizes[long_enough[0]]))
        alike += len(long_enough)
    if first < 0 or alike > max(1, FEW * len(store)):
        return ""
    meta, sources = store.meta, store.meta.sources
    one_each = not any(meta.dropped.values()) and meta.rows == meta.rows_in  # else a line gave no row, or several
    in_lines = len(sources) == 1 and Path(sources[0]).suffix == ".jsonl" and one_each
    values = {"lengths": show_lengths(found), "file": sources[0] if in_lines else str(store.path)}
    if alike > 1:
        return say("{count} rows of {file} are as long, such as row {row} ({lengths} tokens).", count=alike, row=f"{first:,}", **values)  # fmt: skip
    if in_lines:
        return say("The only row as long is line {line} of {file} ({lengths} tokens).", line=f"{first + 1:,}", **values)
    return say("The only row as long is row {row} of {file} ({lengths} tokens).", row=f"{first:,}", **values)


def longest_lengths(run: RunFigures) -> tuple[int, ...] | None:
    """The longest of each field in the run's token store; None without one."""
    store = _store(run)
    return None if store is None else store.longest


def share_longer(run: RunFigures, limits: Sequence[int]) -> float | None:
    """The share of the rows that are longer than these limits in some field; None if lengths are unknown."""
    store = _store(run, len(limits))
    if store is None:
        return None
    return sum(int((sizes > list(limits)).any(axis=1).sum()) for _, sizes in _sizes(store)) / len(store)


def _store(run: RunFigures, fields: int | None = None) -> "Store | None":
    """The run's token store, if it has rows, and this many lengths of each."""
    if run.store_path is None:
        return None
    try:
        from brimful.data.store import Store  # pyarrow takes 60 ms

        store = Store.open(run.store_path, verify=False)
    except Exception:  # damaged, or of another version: then its rows are not named
        return None
    return store if len(store) and fields in (None, len(store.length_fields)) else None


def _sizes(store: "Store") -> Iterator[tuple[int, Any]]:
    import numpy as np

    for start in range(0, len(store), CHUNK_ROWS):
        yield start, store.shapes(np.arange(start, min(start + CHUNK_ROWS, len(store))))


def shorter_rows(run: RunFigures, rows: int, shape: Sequence[int]) -> Iterator[Fix]:
    """Truncate to what the plan was made for; only a task that tokenizes can."""
    planned = lengths(run.plan, "shape")
    if "max_tokens" not in run.choices or not planned or len(planned) != len(shape):
        return
    shorter = tuple(map(min, shape, planned))
    before, after = run.predicted_bytes(rows, shape), run.predicted_bytes(rows, shorter)
    saved, share = None if before is None or after is None else show_bytes(before - after), share_longer(run, shorter)
    yield fix(
        say("Truncate rows to {shape} tokens", shape=show_lengths(shorter)), saves=saved, basis="range" if saved is None else "predicted",
        costs=say("the end of longer rows") if share is None else say("the end of {share} of the rows", share=f"{share:.2%}"),
        brimful=f"--max-tokens {','.join(map(str, shorter))}",
    )  # fmt: skip
