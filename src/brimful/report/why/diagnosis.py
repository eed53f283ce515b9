"""What `brimful why` finds: one `Diagnosis` per problem, with its figures and with fixes ranked by what they are worth.

`log_reader` makes them from the text of a training log, `run_checks` from a run folder. A diagnosis never claims more than it
knows: `certainty` says how sure the cause is, and a figure that follows from no measurement is a range and marked so.

In the terminal a fix is a title, a line with what it saves and costs, and the exact setting for each framework; frameworks with the
same setting share a line.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from brimful.languages import tr, translate
from brimful.report.wrapped_text import WrappedText
from brimful.units import show_bytes

Resource = Literal["gpu", "host", "shm", "disk", "files", "network", "none"]
Certainty = Literal["certain", "likely", "possible"]
Basis = Literal["measured", "predicted", "range"]
FRAMEWORKS = ("brimful", "transformers", "accelerate", "lightning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One remedy."""

    title: str
    """What to do, as a command: `Use micro-batches of 24 rows and accumulate 3 times`."""
    saves: str | None = None
    """The memory it saves: `2.3 GiB`, `30–60 % of the activations`; None if it saves none."""
    costs: str | None = None
    """What it costs in time or quality; None if nothing."""
    global_batch: str = "unchanged"
    """Its effect on the rows of an optimizer step."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """The exact setting, by framework (`FRAMEWORKS`), or under `shell` what to run or set before the start."""
    basis: Basis = "range"
    """Where the figures come from."""
    enough: bool | None = None
    """Whether it frees, alone and by these figures, what was missing; None if that cannot be said."""


def fix(
    title: str, *, saves: str | None = None, costs: str | None = None, global_batch: str = "unchanged", basis: Basis = "range",
    enough: bool | None = None, peers: str | None = None, **flags: str,
) -> Fix:  # fmt: skip
    """A `Fix` with its settings by framework. `peers`: one setting that Transformers, Accelerate and Lightning share."""
    shared = {} if peers is None else dict.fromkeys(FRAMEWORKS[1:], peers)
    return Fix(title=title, saves=saves, costs=costs, global_batch=global_batch, flags=flags | shared, basis=basis, enough=enough)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One problem, why it happened and what helps, the best fix first.

    `str(diagnosis)` reads well; `to_json` has stable names.
    """

    resource: Resource
    """What ran out; `none` for what is slow, does not learn, or has nothing to do with memory."""
    kind: str
    """A stable name: `gpu-out-of-memory`, `host-killed`, `slow-data`, …"""
    cause: str
    """A few sentences."""
    certainty: Certainty = "certain"
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Numbers from the message or the run: `wanted_bytes`, `free_bytes`, `total_bytes`, …"""
    evidence: str | None = None
    """The line or event that shows it, with its place."""
    fixes: tuple[Fix, ...] = ()
    others: tuple["Diagnosis", ...] = ()
    """Further problems of the same log, which are not consequences of this one."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [in_language(self.cause), *([f"> {_shown_evidence(self.evidence)}"] if self.evidence else [])]
        for number, fix in enumerate(self.fixes, 1):
            lines.append(f"{number}. {in_language(fix.title)}")
            if fix.saves:
                lines.append("   " + tr("saves {memory}", memory=_saved_memory(fix)))
            if fix.costs:
                lines.append("   " + tr("cost: {price}", price=in_language(fix.costs)))
        return "\n".join([*lines, *(tr("Also: {cause}", cause=in_language(other.cause)) for other in self.others)])


_SENTENCES = re.compile(r"(?<=[^.\s]\.) (?=[A-Z/])")


def in_language(text: str) -> str:
    """Sentences in the user's language. The catalogue has each of them without its full stop."""
    parts = [(part.removesuffix("."), part.endswith(".")) for part in _SENTENCES.split(text)]
    translated = [(_translated(part), part, stop) for part, stop in parts]
    chinese = any(new != old for new, old, _ in translated)
    full_stop, gap = ("。", "") if chinese else (".", " ")
    return gap.join(new + full_stop * stop for new, _, stop in translated)


def _translated(part: str) -> str:
    """Also of an error's message that was given a capital letter to stand by itself."""
    own = part[:1].lower() + part[1:]
    if (new := translate(part)) != part or own == part:
        return new
    return part if (new := translate(own)) == own else new


@dataclass(frozen=True, slots=True)
class Finding:
    """A diagnosis and its place among others."""

    importance: float
    """1: the run is lost; else about the share of its time, or of what it could learn, that is lost."""
    diagnosis: Diagnosis


def finding(
    importance: float, kind: str, sentences: Iterable[str], *, resource: Resource = "none", certainty: Certainty = "certain",
    figures: Mapping[str, Any] | None = None, evidence: str | None = None, fixes: Iterable[Fix] = (),
) -> Finding:  # fmt: skip
    """A `Finding` whose cause is these sentences."""
    return Finding(
        importance,
        Diagnosis(
            resource=resource, kind=kind, cause=" ".join(filter(None, sentences)), certainty=certainty, figures=figures or {}, evidence=evidence,
            fixes=tuple(fixes),
        ),
    )  # fmt: skip


def say(template: str, **values: Any) -> str:
    """A sentence of a diagnosis, in English, which is what `--json` prints.

    `languages.translate` recognises it by its template, so every template passed to this function is in the catalogue.
    """
    return template.format(**values)


RESOURCE_TITLES = {
    "gpu": "GPU memory ran out",
    "host": "Host RAM ran out",
    "shm": "/dev/shm is full",
    "disk": "The disk is full",
    "files": "Too many open files",
    "network": "The processes lost each other",
}
TITLES = {
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
    "missing-gpu": "A GPU is missing",
    "download-failed": "A download failed",
    "download-refused": "A download was refused",
    "nccl-duplicate-gpu": "Two ranks use one GPU",
    "nccl-shm": "NCCL could not use shared memory",
    "nan-loss": "NaN in the loss",
    "worker-lost": "A loader worker was lost",
    "map-process-lost": "Host RAM likely ran out",
    "vllm-no-room": "vLLM does not fit on the GPU",
    "sglang-no-room": "SGLang does not fit on the GPU",
    "program-memory-limit": "A program reached its own memory limit",
    "no-batch-fits": "Not even one row fits",
    "interrupted": "The run was interrupted",
    "events-missing": "events.jsonl is missing",
    "nothing-wrong": "Nothing wrong",
    "unknown": "Nothing was recognised",
    "run-failed": "The run failed",
    "run-crashed": "The run crashed",
    "run-killed": "The run was killed",
    "save-failed": "A checkpoint was not saved",
    "cpu-out-of-memory": "The memory limit was reached",
    "oversized-rows": "Rows too long to train on",
    "device-memory-leak": "Memory leak",
    "host-memory-leak": "Host RAM leak",
    "long-row": "One long row",
    "loss-diverging": "The loss diverges",
    "loss-swinging": "The loss swings",
    "loss-flat": "The loss does not fall",
    "learning-rate-not-applied": "The learning rate has no effect",
    "chosen-collapsed": "Chosen replies become unlikely",
    "loss-spiked": "The loss has risen",
    "accuracy-at-chance": "The accuracy is at chance",
    "few-updates": "Too few updates",
    "batch-exceeds-data": "A batch larger than the data",
    "slow-clamped-micro-batch": "Slow: the micro-batch is limited",
    "slow-plan-cut-short": "Slow: the plan was cut short",
    "slow-small-micro-batch": "Slow: the micro-batch is small",
    "slow-data": "Slow: waiting for rows",
    "slow-communication": "Slow: communication",
    "slow-rank": "Slow: one rank",
    "slow-padding": "Slow: padding",
    "slow-saves": "Slow: saving checkpoints",
    "slow-evaluations": "Slow: evaluating",
    "launch-bound": "Slow: the card waits for launches",
    "card-not-full": "One run does not fill the card",
    "others-on-card": "Others use the card",
    "hot-card": "The card is hot",
    "host-swapping": "Host RAM is short",
    "empty": "An empty log",
}
"""How each kind is headed; where it says no more than the resource, `RESOURCE_TITLES` serves."""
CERTAINTY_STYLE = {"certain": "green", "likely": "yellow", "possible": "dim"}
BAR_WIDTH = 40
PARTS = (
    ("allocated_bytes", "█", "red", "tensors"),
    ("unallocated_bytes", "▓", "yellow", "reserved, unused"),
    ("context_bytes", "▒", "blue", "outside torch"),
    ("others_bytes", "▚", "magenta", "other processes"),
    ("rest_bytes", "▒", "blue", "outside torch, or other processes"),
    ("free_bytes", "░", "green", "free"),
)


def title_of(diagnosis: Diagnosis) -> str:
    return TITLES.get(diagnosis.kind) or RESOURCE_TITLES.get(diagnosis.resource) or diagnosis.kind.replace("-", " ")


def diagnoses_view(diagnoses: Sequence[Diagnosis], *, wording: Callable[[str], str] = str) -> RenderableType:
    """Every diagnosis in order, and behind them the other problems of their logs. `wording` turns arguments of fixes into flags."""
    blocks: list[RenderableType] = []
    others = [other for diagnosis in diagnoses for other in diagnosis.others]
    for number, diagnosis in enumerate([*diagnoses, *others]):
        if number:
            blocks.append(Text())
        if number == len(diagnoses):
            blocks += [Text(tr("Also in this log"), style="dim"), Text()]
        blocks += _diagnosis(diagnosis, wording)
    return Group(*blocks)


def _diagnosis(diagnosis: Diagnosis, wording: Callable[[str], str]) -> Iterator[RenderableType]:
    head = Text(translate(title_of(diagnosis)), style="bold")
    if diagnosis.kind not in ("unknown", "empty", "nothing-wrong"):
        head.append(f"  {tr(diagnosis.certainty)}", style=CERTAINTY_STYLE[diagnosis.certainty])
    yield head
    yield WrappedText(in_language(diagnosis.cause))
    yield from _memory(diagnosis.figures)
    if diagnosis.evidence:
        yield Text(_shown_evidence(diagnosis.evidence), style="dim")
    if looked_for := diagnosis.figures.get("looked_for"):
        yield Text(tr("Looked for:"), style="dim")
        yield from (Padding(WrappedText(in_language(what), style="dim"), (0, 0, 0, 2)) for what in looked_for)
    if diagnosis.fixes:
        yield Text()
        many = len(diagnosis.fixes) > 1
        yield Text(tr("What helps, the best first:") if many else tr("What helps:"), style="bold")
        for number, fix in enumerate(diagnosis.fixes, 1):
            yield from _fix(number, fix, wording)
        if any(fix.basis == "range" and fix.saves for fix in diagnosis.fixes):
            yield Text(tr("~  a range: nothing was measured. A run of brimful measures it."), style="dim")


def _shown_evidence(evidence: str) -> str:
    """With its place in the user's language, and with the sentence of an event; a line of a log stays as it is."""
    place, colon, rest = evidence.partition(": ")
    if place.startswith("line "):
        return f"{translate(place)}{tr(': ')}{rest}" if colon else translate(place)
    if place.startswith("events.jsonl, step "):
        return translate(place) + (f"{tr(': ')}{in_language(rest)}" if colon else "")
    return evidence


def _fix(number: int, fix: Fix, wording: Callable[[str], str]) -> Iterator[RenderableType]:
    """The title with its number in the margin, and below it what it saves, costs and changes, and the settings."""
    title = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    title.add_column(no_wrap=True, style="bold cyan")
    title.add_column(overflow="fold")
    title.add_row(f"{number}.", WrappedText(wording(in_language(fix.title))))
    yield title
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in _facts(fix):
        table.add_row(name, WrappedText(value))
    for setting, names in _by_setting(fix).items():
        table.add_row(", ".join(names), Text(tr(setting), style="green"))
    if table.row_count:
        yield Padding(table, (0, 0, 0, 3))


def _facts(fix: Fix) -> Iterator[tuple[str, str]]:
    if fix.saves:
        yield tr("saves"), _saved_memory(fix)
    if fix.costs:
        yield tr("cost"), in_language(fix.costs)
    if fix.saves or fix.global_batch != "unchanged":
        yield tr("global batch"), in_language(fix.global_batch)


def _saved_memory(fix: Fix) -> str:
    """With `~` before a range, and whether it is enough."""
    enough = {None: "", True: tr(", enough alone"), False: tr(", not enough alone")}[fix.enough]
    return f"{'~ ' * (fix.basis == 'range')}{in_language(fix.saves or '')}{enough}"


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
    sizes = {name: max(0, known.get(name) or 0) for name, *_ in PARTS}
    if not total or not sizes["allocated_bytes"] or sum(sizes.values()) > 1.05 * total:
        return
    if "free_bytes" in known:  # messages of torch 1 do not say whose the rest is
        sizes["rest_bytes"] = max(0, total - sum(sizes.values()))
    parts = [(sizes[name], sign, style, word) for name, sign, style, word in PARTS if sizes[name] / total >= 0.005]
    bar, legend = Text(), list[Text]()
    for size, sign, style, word in parts:
        bar.append(sign * max(1, round(size / total * BAR_WIDTH)), style=style)
        legend.append(Text(sign, style=style).append(f" {tr(word)} {show_bytes(size)}", style="default"))
    yield bar.append(f" {show_bytes(total)}")
    yield Columns(legend, padding=(0, 2))
