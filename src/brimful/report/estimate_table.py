"""An estimate in the terminal: what fits, what is in memory at the peak, and what other lengths, settings and cards would change."""

from collections.abc import Callable, Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from brimful.estimation.estimator import CardFit, Estimate, Fit
from brimful.languages import tr, translate
from brimful.report.progress import ZONE_STYLE
from brimful.report.wrapped_text import WrappedText
from brimful.task import Shape
from brimful.units import show_bytes, show_rows, zone

BAR_WIDTH = 30
NONE = "–"
KINDS = ("parameters", "gradients", "optimizer", "activations", "loss", "batch", "exchange", "workspace", "context")
PHASES = {
    "forward": "forward",
    "head": "backward of the loss",
    "early": "backward, first half",
    "late": "backward, second half",
    "optimizer": "optimizer",
}
"""The phases of a later micro-batch; those of a first one begin with `first_`."""


def estimate_table(estimate: Estimate, *, wording: Callable[[str], str] = str) -> RenderableType:
    """The headline, the memory, then one table for each question.

    `wording` turns the arguments that assumptions name into what the user types.
    """
    parts: list[RenderableType] = [
        WrappedText(translate(estimate.headline), style="bold" if estimate.fits else "bold yellow"),
        _bar(estimate),
        *_remedies(estimate),
        Text(),
        _facts(estimate),
        Text(),
        _side_by_side(_phases(estimate), _kinds(estimate)),
    ]
    if estimate.blocks:
        parts += [Text(), _blocks(estimate)]
    if len(estimate.lengths) > 1:
        parts += [Text(), _fits(tr("lengths"), ((_lengths(one.shape), one) for one in estimate.lengths), estimate)]
    if estimate.levers:
        settings = [(tr("as requested"), estimate.fit), *((_flag(one.change), one) for one in estimate.levers)]
        parts += [Text(), _fits(tr("setting"), settings, estimate)]
        parts += [
            WrappedText(tr("not offered: {reason}", reason=translate(one)), style="dim") for one in estimate.not_offered
        ]
    if estimate.kernels:
        kernels = [(tr("as assumed"), estimate.fit), *((translate(one.change), one) for one in estimate.kernels)]
        parts += [Text(), _fits(tr("other kernels"), kernels, estimate)]
    if estimate.cards:
        parts += [Text(), _cards(estimate.cards)]
    parts += [Text(), Text(tr("assumed"), style="dim")]
    parts += [WrappedText(f"  {wording(translate(one))}", style="dim") for one in estimate.assumptions]
    return Group(*parts)


def _bar(estimate: Estimate) -> Text:
    used = estimate.peak_reserved_bytes / estimate.limit_bytes
    style, full = ZONE_STYLE[zone(used)], min(BAR_WIDTH, round(used * BAR_WIDTH))
    bar = "█" * full + "░" * (BAR_WIDTH - full)
    taken = tr(
        "{peak} of {limit} predicted, ",
        peak=show_bytes(estimate.peak_reserved_bytes),
        limit=show_bytes(estimate.limit_bytes),
    )
    return Text.assemble((bar, style), f" {taken}", (f"{used:.0%} {translate(zone(used))}", style))


def _remedies(estimate: Estimate) -> Iterable[RenderableType]:
    """Single levers with which rows would fit, where none fits."""
    options = [] if estimate.fit.largest else [_flag(one.change) for one in estimate.levers if one.largest]
    if options:
        yield WrappedText(tr("would fit with: {options}", options=", or ".join(options)))


def _facts(estimate: Estimate) -> Table:
    card, size = estimate.card, estimate.size
    reserved = tr(
        "{allocated} allocated, {reserved} reserved ({native} without expandable segments)",
        allocated=show_bytes(size.allocated_bytes), reserved=show_bytes(size.reserved_bytes),
        native=show_bytes(estimate.reserved_native_bytes),
    )  # fmt: skip
    total = tr(
        "{total}, of which the CUDA context takes {context}",
        total=show_bytes(card.total_bytes),
        context=show_bytes(card.context_bytes),
    )
    rows = [(tr("card"), f"{translate(card.name)}: {total}")] if card.known else []
    rows += [
        (tr("peak"), tr("of {rows}: {peak}", rows=show_rows(size.rows), peak=reserved)),
        (tr("error"), translate(estimate.accuracy)),
        (
            tr("setting"),
            f"{estimate.fit.setting}{f', {estimate.sharding} × {estimate.processes}' if estimate.processes > 1 else ''}",
        ),
        (tr("estimated"), tr("in {seconds:.1f} s, without a GPU", seconds=estimate.estimate_s)),
    ]
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, text in rows:
        grid.add_row(Text(name, style="dim"), WrappedText(text))
    return grid


def _phases(estimate: Estimate) -> Table:
    whole = not any(name in estimate.phases for name in ("forward", "head"))
    table = _table(tr("phase"), tr("peak"))
    peak = max(estimate.phases.values())
    for name, title in PHASES.items():
        value = estimate.phases.get(f"first_{name}" if whole and name != "optimizer" else name)
        if value is not None:
            table.add_row(translate(title), show_bytes(value), style="bold" if value == peak else "")
    return table


def _kinds(estimate: Estimate) -> Table:
    table = _table(tr("at the peak"), "", tr("share"))
    total = sum(size for kind, size in estimate.kinds.items() if kind != "context")
    for kind in KINDS:
        size = estimate.kinds.get(kind)
        if size:
            share = NONE if kind == "context" else f"{size / total:.0%}"
            table.add_row(translate(kind), show_bytes(size), share)
    return table


def _blocks(estimate: Estimate) -> Table:
    table = _table(tr("largest blocks"), "", "")
    for block in estimate.blocks:
        table.add_row(block.origin, show_bytes(block.bytes), translate(block.kind))
    return table


def _fits(title: str, rows: Iterable[tuple[str, Fit]], estimate: Estimate) -> Table:
    table = _table(title, tr("largest"), tr("recommended"), tr("accum."), tr("allocated"), tr("reserved"))
    for name, fit in rows:
        table.add_row(name, *_cells(fit), style="" if fit.largest else "yellow")
    return table


def _cells(fit: Fit) -> Sequence[str]:
    size = fit.at_recommended
    if size is None:
        least = show_bytes(fit.one_row.reserved_bytes)
        return (str(fit.largest) if fit.largest else tr("does not fit"), NONE, NONE, NONE, f"≥ {least}")
    return (str(fit.largest), str(fit.recommended), str(fit.accumulation), show_bytes(size.allocated_bytes), show_bytes(size.reserved_bytes))  # fmt: skip


def _cards(cards: Sequence[CardFit]) -> Table:
    """The setting is a column of its own only where it differs: older cards have no bf16."""
    differ = len({one.fit.setting for one in cards}) > 1
    extra = [tr("setting")] if differ else []
    table = _table(tr("card"), tr("for torch"), tr("largest"), tr("recommended"), tr("accum."), tr("reserved"), *extra)
    for one in cards:
        largest, recommended, accumulation, _, reserved = _cells(one.fit)
        setting = [one.fit.setting] if differ else []
        table.add_row(
            one.card.name, show_bytes(one.limit_bytes), largest, recommended, accumulation, reserved, *setting,
            style="" if one.fit.largest else "dim",
        )  # fmt: skip
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(first, no_wrap=True)
    for title in others:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _side_by_side(*tables: Table) -> Table:
    grid = Table.grid(padding=(0, 4, 0, 0))
    grid.add_row(*tables)
    return grid


def _lengths(shape: Shape) -> str:
    return "+".join(map(str, shape))


def _flag(change: str) -> str:
    """`checkpointing=on` as `--checkpointing on`, and the same of several options."""
    options = (one.partition("=") for one in change.split())
    return " ".join(f"--{name.replace('_', '-')} {value}".strip() for name, _, value in options)
