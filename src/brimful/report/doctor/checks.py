"""`Check`: one finding about the machine, with what to do about it.

Sentences keep their template and their values apart until they are shown, so that `--json` has them in English and the screen in
the user's language.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from brimful.languages import Sentence, language, tr
from brimful.report.wrapped_text import WrappedText
from brimful.units import show_seconds

Status = Literal["ok", "warning", "failed", "not checked"]
CheckGroup = Literal["Software", "Cards", "Several processes", "Host", "Folders", "Environment"]
GROUPS: tuple[CheckGroup, ...] = get_args(CheckGroup)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One finding."""

    group: CheckGroup
    name: str | Sentence
    """What was looked at: `torch`, `cuda:0`, `/dev/shm`."""
    status: Status
    text: Sentence
    """What was found, or why it was not looked at."""
    fix: Sentence | None = None
    """What to try; every warning and failure has one."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The numbers behind it, for `--json`."""

    @property
    def title(self) -> str:
        """The name in the user's language."""
        return tr(self.name) if isinstance(self.name, str) else self.name.shown()

    def to_json(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "name": str(self.name),
            "status": self.status,
            "text": str(self.text),
            "fix": None if self.fix is None else str(self.fix),
            "figures": dict(self.figures),
        }


class Findings(list[Check]):
    """The checks of one group, in the order in which they are added."""

    def __init__(self, group: CheckGroup) -> None:
        super().__init__()
        self.group: CheckGroup = group

    def ok(self, name: str | Sentence, text: Sentence, /, **figures: Any) -> None:
        self.append(Check(group=self.group, name=name, status="ok", text=text, figures=figures))

    def warn(self, name: str | Sentence, text: Sentence, fix: Sentence, /, **figures: Any) -> None:
        """It works, but slowly, or not for long."""
        self.append(Check(group=self.group, name=name, status="warning", text=text, fix=fix, figures=figures))

    def fail(self, name: str | Sentence, text: Sentence, fix: Sentence, /, **figures: Any) -> None:
        """A training would not start, or would end."""
        self.append(Check(group=self.group, name=name, status="failed", text=text, fix=fix, figures=figures))

    def grade(
        self, name: str | Sentence, text: Sentence, fix: Sentence, /, *, failed: bool, warning: bool, **figures: Any
    ) -> None:
        """A failure, a warning, or well."""
        if failed or warning:
            (self.fail if failed else self.warn)(name, text, fix, **figures)
        else:
            self.ok(name, text, **figures)

    def skip(self, name: str | Sentence, text: Sentence, /, **figures: Any) -> None:
        """Not checked, and why."""
        self.append(Check(group=self.group, name=name, status="not checked", text=text, figures=figures))


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """What the doctor found."""

    checks: tuple[Check, ...]
    """In the order of `GROUPS`."""
    seconds: float

    def count(self, status: str) -> int:
        return sum(check.status == status for check in self.checks)

    @property
    def failed(self) -> bool:
        return self.count("failed") > 0

    def to_json(self) -> dict[str, Any]:
        """Stable names, in English."""
        counts = {f"{name.replace(' ', '_')}": self.count(name) for name in ("ok", "warning", "failed", "not checked")}
        return {"counts": counts, "seconds": self.seconds, "checks": [check.to_json() for check in self.checks]}


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
        yield WrappedText(tr("not checked: {reason}", reason=text), style="dim"), False
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
    return WrappedText.assemble(*((part, "cyan" if place % 2 else "") for place, part in enumerate(text.split("`"))))


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
