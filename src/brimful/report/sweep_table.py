"""A sweep in the terminal: a table a dataset, with the trivial baselines below their own line.

A terminal of fewer than 96 columns is spared the intervals, whose side the colours tell, and most deviations.

It shows the texts of the summaries as they are, so that terminal, Markdown, LaTeX and page agree to the digit. Green and
red say on which side of the best trivial baseline a method lies; where its interval spans nought neither does.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

Summary = Mapping[str, Any]
WIDE = 96
"""Columns that a table with intervals takes."""
_FIGURES = (("auroc", "AUROC ↑"), ("aupr", "AUPR ↑"), ("fpr95", "FPR95 ↓"))


def sweep_table(
    summaries: Sequence[Summary], notes: Sequence[str] = (), remarks: Mapping[str, Sequence[str]] | None = None
) -> RenderableType:
    """`notes` are sentences below the tables: what the figures mean; `remarks` those on a dataset, below its own."""
    parts: list[RenderableType] = []
    for dataset in dict.fromkeys(one["dataset"] for one in summaries):
        own = [one for one in summaries if one["dataset"] == dataset]
        parts += [Text.assemble((dataset, "bold"), f": {own[0]['about']}"), _Fitted(partial(_table, own))]
        if remarks and remarks.get(dataset):
            parts.append(Padding(Text("; ".join(remarks[dataset]), style="dim"), (0, 0, 0, 2)))
        parts.append(Text())
    return Group(*parts, _Fitted(_spared), *(Text(note, style="dim") for note in notes))


class _Fitted:
    """What the terminal has the columns for."""

    def __init__(self, made: Callable[..., RenderableType]) -> None:
        self._made = made

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._made(narrow=options.max_width < WIDE)


def _spared(*, narrow: bool) -> RenderableType:
    told = f"Below {WIDE} columns the intervals and most deviations are left out here; the report has them."
    return Text(told, style="dim") if narrow else Group()


def _table(table: Sequence[Summary], *, narrow: bool) -> RenderableType:
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name, width in (("encoder", 7), ("method", 13)):
        shown.add_column(name, overflow="fold", min_width=width)
    for _, name in _FIGURES:
        shown.add_column(name, no_wrap=True)
    for name in ("beyond\ntrivial" if narrow else "beyond trivial", "seeds"):
        shown.add_column(name, justify="right", no_wrap=True)
    trivial = [one for one in table if one["kind"] == "trivial"]
    widest = {key: max(one["text"][key].index(" ") for one in table) for key, _ in _FIGURES}
    for one in table:
        if trivial and one is trivial[0]:
            shown.add_section()
            shown.add_row("", "trivial baselines", style="dim italic")
        shown.add_row(*_cells(one, widest, narrow))
    return Padding(shown, (0, 0, 0, 2))


def _cells(one: Summary, widest: Mapping[str, int], narrow: bool) -> list[Text]:
    base = "dim" if one["kind"] == "trivial" else ""
    settings = f" {one['text']['settings']}" if one["text"]["settings"] else ""
    return [
        Text(one["encoder"], style=base),
        Text.assemble((one["method"], base), (settings, "dim")),
        *[
            Text(
                _aligned(one["text"][key], widest[key], bare=narrow and key != "auroc"),
                style="bold" if key in one["best"] else base,
            )
            for key in widest
        ],
        Text(one["text"]["gain"].partition(" ")[0] if narrow else one["text"]["gain"], style=_side(one)),
        Text(one["text"]["seeds"], style=base),
    ]


def _aligned(text: str, width: int, *, bare: bool) -> str:
    """The points of `.789 ± .003` and `1.000 ± –` below each other; `bare` without the deviation."""
    mean, _, spread = text.partition(" ")
    return f"{mean:>{width}}" if bare else f"{mean:>{width}} {spread}"


def _side(one: Summary) -> str:
    if one["gain"] is None:
        return "dim"
    low, high = (one["gain"] if one[end] is None else one[end] for end in ("gain_low", "gain_high"))
    return "green" if low > 0 else "red" if high < 0 else ""
