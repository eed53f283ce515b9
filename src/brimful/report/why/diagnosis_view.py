"""Diagnoses in the terminal, readable at 80 columns: what ran out, why, who holds the memory, and the fixes as blocks.

A fix is a title, a line with what it saves and costs, and the exact setting for each framework; frameworks with the same setting
share a line. A figure that nothing was measured for is marked as a range.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from brimful.languages import tr, translate
from brimful.report.why.diagnosis import Diagnosis, Fix, in_language
from brimful.units import show_bytes

TITLES = {
    "gpu": "GPU memory ran out",
    "host": "Host RAM ran out",
    "shm": "/dev/shm is full",
    "disk": "The disk is full",
    "files": "Too many open files",
    "network": "The processes lost each other",
}
KIND_TITLES = {
    "gpu-library-out-of-memory": "GPU memory likely ran out",
    "kernel-shared-memory": "A kernel does not fit this GPU",
    "gpu-fault": "A fault on the GPU, not a lack of memory",
    "gpu-hardware": "A fault of the card, not a lack of memory",
    "driver": "Driver and torch do not match",
    "crashed": "A crash, not a lack of memory",
    "stopped": "The run was stopped",
    "killed": "The run was killed",
    "time-limit": "The time limit was reached",
    "patience": "The run no longer improved",
    "missing-package": "A package is missing",
    "nccl-duplicate-gpu": "Two ranks use one GPU",
    "nccl-shm": "NCCL could not use shared memory",
    "nan-loss": "The loss is not a number",
    "worker-lost": "A loader worker was lost",
    "no-batch-fits": "Not even one row fits",
    "interrupted": "The run was interrupted",
    "events-missing": "events.jsonl is missing",
    "nothing-wrong": "Nothing wrong",
    "unknown": "Nothing was recognised",
    "empty": "An empty log",
}
"""Where the kind says more than the resource."""
CERTAINTY_STYLE = {"certain": "green", "likely": "yellow", "possible": "dim"}
BAR_WIDTH = 40
PARTS = (
    ("allocated_bytes", "█", "red", "tensors"),
    ("unallocated_bytes", "▓", "yellow", "reserved, unused"),
    ("context_bytes", "▒", "blue", "outside torch"),
    ("others_bytes", "▚", "magenta", "other processes"),
    ("free_bytes", "░", "green", "free"),
)


def diagnoses_view(diagnoses: Sequence[Diagnosis], *, titles: Mapping[str, str] | None = None) -> RenderableType:
    """Every diagnosis in order, and behind them the other problems of their logs. `titles` has those of further kinds."""
    blocks: list[RenderableType] = []
    others = [other for diagnosis in diagnoses for other in diagnosis.others]
    for number, diagnosis in enumerate([*diagnoses, *others]):
        if number:
            blocks.append(Text())
        if number == len(diagnoses):
            blocks += [Text(tr("Also in this log"), style="dim"), Text()]
        blocks += _diagnosis(diagnosis, {**KIND_TITLES, **(titles or {})})
    return Group(*blocks)


def _diagnosis(diagnosis: Diagnosis, titles: Mapping[str, str]) -> Iterator[RenderableType]:
    title = titles.get(diagnosis.kind) or TITLES.get(diagnosis.resource) or diagnosis.kind.replace("-", " ")
    head = Text(translate(title), style="bold")
    if diagnosis.kind not in ("unknown", "empty", "nothing-wrong"):
        head.append(f"  {tr(diagnosis.certainty)}", style=CERTAINTY_STYLE[diagnosis.certainty])
    yield head
    yield Text(in_language(diagnosis.cause))
    yield from _memory(diagnosis.figures)
    if diagnosis.evidence:
        place, colon, line = diagnosis.evidence.partition(": ")
        yield Text(translate(place) + colon + line if place.startswith("line ") else diagnosis.evidence, style="dim")
    if looked_for := diagnosis.figures.get("looked_for"):
        yield Text(tr("Looked for:"), style="dim")
        yield from (Padding(Text(in_language(what), style="dim"), (0, 0, 0, 2)) for what in looked_for)
    if diagnosis.fixes:
        yield Text()
        many = len(diagnosis.fixes) > 1
        yield Text(tr("What helps, the best first:") if many else tr("What helps:"), style="bold")
        for number, fix in enumerate(diagnosis.fixes, 1):
            yield from _fix(number, fix)
        if any(fix.basis == "range" and fix.saves for fix in diagnosis.fixes):
            yield Text(tr("~  a range: nothing was measured. A run of brimful measures it."), style="dim")


def _fix(number: int, fix: Fix) -> Iterator[RenderableType]:
    """The title with its number in the margin, and below it what it saves, costs and changes, and the settings."""
    title = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    title.add_column(no_wrap=True, style="bold cyan")
    title.add_column(overflow="fold")
    title.add_row(f"{number}.", Text(in_language(fix.title)))
    yield title
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in _facts(fix):
        table.add_row(name, Text(value))
    for setting, names in _by_setting(fix).items():
        table.add_row(", ".join(names), Text(translate(setting) if setting.startswith("(") else setting, style="green"))
    if table.row_count:
        yield Padding(table, (0, 0, 0, 3))


def _facts(fix: Fix) -> Iterator[tuple[str, str]]:
    if fix.saves:
        enough = {None: "", True: tr(", enough alone"), False: tr(", not enough alone")}[fix.enough]
        yield tr("saves"), f"{'~ ' * (fix.basis == 'range')}{in_language(fix.saves)}{enough}"
    if fix.costs:
        yield tr("cost"), in_language(fix.costs)
    if fix.saves or fix.global_batch != "unchanged":
        yield tr("global batch"), in_language(fix.global_batch)


def _by_setting(fix: Fix) -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    for framework, setting in fix.flags.items():
        settings.setdefault(setting, []).append(framework)
    return settings


def _memory(figures: Any) -> Iterator[RenderableType]:
    """A bar of the card: who holds what."""
    total = figures.get("total_bytes")
    known = dict(figures)
    if "process_bytes" in known and "allocated_bytes" in known:
        known["context_bytes"] = known["process_bytes"] - known["allocated_bytes"] - known.get("unallocated_bytes", 0)
    parts = [(known.get(name) or 0, sign, style, word) for name, sign, style, word in PARTS]
    if not total or not known.get("allocated_bytes") or sum(size for size, *_ in parts) > 1.05 * total:
        return
    bar, legend = Text(), list[Text]()
    for size, sign, style, word in parts:
        if size / total < 0.005:
            continue
        bar.append(sign * max(1, round(size / total * BAR_WIDTH)), style=style)
        legend.append(Text(sign, style=style).append(f" {tr(word)} {show_bytes(size)}", style="default"))
    yield bar.append(f" {show_bytes(total)}")
    yield Columns(legend, padding=(0, 2))
