"""The examination in a terminal: a line for each check, and below a warning or a failure what to try."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from brimful.languages import language, tr
from brimful.report.doctor.checks import GROUPS, Check, Status
from brimful.report.doctor.examine import Examination
from brimful.units import show_seconds

_SENTENCES = re.compile(r"[^`]+(?:\. |。)(?=[^`]*`)")
"""Those before a command."""
SIGNS: dict[Status, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "failed": ("✗", "bold red"),
    "not checked": ("–", "dim"),
}
MIN_NAME, MAX_NAME = 16, 30
"""Columns of a check's name: so that groups line up, and that a long variable leaves room for the text at 80 columns."""


def doctor_table(examination: Examination) -> RenderableType:
    """Grouped by what was looked at, with one line at the end that counts."""
    parts: list[RenderableType] = []
    for group in GROUPS:
        rows = [check for check in examination.checks if check.group == group]
        if rows:
            parts += [Text(tr(group), style="bold"), _Rows(rows), Text()]
    return Group(*parts, _summary(examination))


@dataclass(frozen=True)
class _Rows:
    """The checks of a group. What has a command and is too long for its column follows below as one line, however long: what a
    terminal wraps is copied whole, a line that a table breaks is not."""

    checks: list[Check]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(MIN_NAME, *(min(MAX_NAME, Text(check.title).cell_len) for check in self.checks), 0)
        room = options.max_width - width - 4  # a sign, and a blank after it, after the name and after the text
        table = _table(width)
        for check in self.checks:
            sign, style = SIGNS[check.status]
            name_style = style if check.status in ("warning", "failed") else ""
            inside, below = list[Text](), list[Text]()
            for line, has_command in _lines(check, style, room):
                (below if has_command and line.cell_len > room else inside).append(line)
            table.add_row(Text(sign, style=style), Text(check.title, style=name_style), Text("\n").join(inside))
            if below:
                yield table
                yield from (Text.assemble("  ", line, no_wrap=True, overflow="ignore") for line in below)
                table = _table(width)
        if table.row_count:
            yield table


def _table(width: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
    table.add_column(width=1, no_wrap=True)
    table.add_column(width=width, overflow="fold")
    table.add_column(overflow="fold")
    return table


def _lines(check: Check, style: str, room: int) -> Iterator[tuple[Text, bool]]:
    """What was found and what to try, each with whether it has a command. Sentences before one are apart if all is too long."""
    text = check.text.shown()
    if check.status == "not checked":
        yield Text(tr("not checked: {reason}", reason=text), style="dim"), False
        return
    before = _SENTENCES.match(text) if cell_len(text) > room else None
    if before:
        yield Text(before[0].rstrip()), False
        text = text[before.end() :]
    yield _with_commands(text), "`" in text
    if check.fix is not None:
        fix = check.fix.shown()
        yield Text.assemble((tr("Try: "), style), _with_commands(fix)), "`" in fix


def _with_commands(text: str) -> Text:
    """What is in backquotes is something to type."""
    return Text.assemble(*((part, "cyan" if place % 2 else "") for place, part in enumerate(text.split("`"))))


def _summary(examination: Examination) -> Text:
    failed, warnings = examination.count("failed"), examination.count("warning")
    if failed:
        verdict = tr("{failed} failed, {warnings} to look at", failed=failed, warnings=warnings)
    elif warnings:
        verdict = tr("Nothing failed, {warnings} to look at", warnings=warnings)
    else:
        verdict = tr("All is well")
    rest = tr(
        "{ok} ok, {unchecked} not checked, {time}",
        ok=examination.count("ok"), unchecked=examination.count("not checked"), time=show_seconds(examination.seconds),
    )  # fmt: skip
    style = "bold red" if failed else "bold yellow" if warnings else "bold green"
    return Text.assemble((verdict, style), "；" if language() == "zh" else "; ", rest)
