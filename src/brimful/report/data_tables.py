"""The reports of `brimful data check` and `brimful data clean` as tables.

Text from the files is shown as it is, never as markup, on one line: a line break as ⏎, other control characters as a dot.
"""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from brimful.data.check import UNUSABLE, Bin, CheckReport, Lengths
from brimful.data.clean.clean import CleanReport
from brimful.data.read.files import RowProblem
from brimful.units import show_bytes, show_rate, show_seconds

_BAR_WIDTH = 16
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
_MAX_CHARACTERS = 300
"""Characters of a text given to the terminal, which truncates them to its width."""


def check_table(report: CheckReport) -> RenderableType:
    """The headline, the columns with three rows, the counts, the lengths."""
    parts: list[RenderableType] = [_check_headline(report), Text(), *_columns(report), Text(), _counts(report)]
    for unit, lengths in (("characters", report.characters), ("tokens", report.tokens)):
        parts += [Text(), _lengths(unit, lengths)] if lengths else []
    return Group(*parts)


def clean_table(report: CleanReport) -> RenderableType:
    """The columns, the rows, the cost, the notes."""
    columns = [field if field == column else f"{field} ← {column}" for field, column in report.columns.items()]
    stages = ", ".join(f"{stage} {show_seconds(seconds)}" for stage, seconds in report.stage_s.items())
    rate = f", {show_rate(report.rows_per_s)} rows/s" if report.rows_per_s else ""
    return Group(
        Text.assemble(("columns  ", "bold"), f"{', '.join(columns)} ({report.reason})"),
        Text(),
        _clean_rows(report),
        Text(),
        Text(f"{show_seconds(report.seconds)} ({stages}){rate}; peak memory {show_bytes(report.peak_bytes)}, measured"),
        *(Text(f"note: {note}", style="yellow") for note in report.notes),
        Text(f"Saved to {report.output}"),
    )


def _check_headline(report: CheckReport) -> Text:
    files = report.files[0] if len(report.files) == 1 else f"{len(report.files):,} files"
    conversations = ""
    if report.conversations is not None:
        conversations = f" from {report.conversations:,} conversation{'s' * (report.conversations != 1)}"
    speed = f"{show_seconds(report.seconds)}, {show_rate(report.rows_in / max(report.seconds, 1e-9))} rows/s"
    return Text.assemble(
        f"{_one_line(files)}: ", (f"{report.rows_out:,} of {report.rows_in:,} rows", f"bold {_color(report)}"),
        f"{conversations} can be used  ", (f"read in {speed}", "dim"),
    )  # fmt: skip


def _color(report: CheckReport) -> str:
    return "green" if report.failure() is None else "red"


def _columns(report: CheckReport) -> list[RenderableType]:
    """Which column became which field and why, above three rows."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True, header_style="")
    fields = report.layout.fields
    for field in fields:
        column = report.layout.columns[field]
        header = Text.assemble((field, "bold cyan"), (f" ← {_one_line(column)}" if column != field else "", "cyan"))
        table.add_column(header, ratio=1 if field == "prompt" else 2, no_wrap=True)
    for row in report.examples:
        table.add_row(*[Text(_one_line(row[field]), no_wrap=True, overflow="ellipsis") for field in fields])
    return [Text(f"columns: {_one_line(report.layout.reason)}", style="dim"), table]


def _rows_table(first_column: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(first_column, no_wrap=True)
    for name in ("count", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("first", overflow="fold")
    return table


def _counts(report: CheckReport) -> Table:
    table = _rows_table("rows")
    table.add_row("in", f"{report.rows_in:,}")
    for reason, count in report.dropped.items():
        style = "dim" if not count else "red" if reason in UNUSABLE else "yellow"
        cells = (reason.replace("_", "-"), f"{count:,}", _share(count, report.rows_in))
        table.add_row(*[Text(cell, style=style) for cell in cells], Text(_first_problems(report.problems[reason])))
    usable = ("usable", f"{report.rows_out:,}", _share(report.rows_out, report.rows_in))
    table.add_row(*[Text(cell, style=f"bold {_color(report)}") for cell in usable])
    return table


def _first_problems(problems: tuple[RowProblem, ...]) -> str:
    """The first problem in full, and the lines of the others."""
    if not problems:
        return ""
    first, *others = problems
    lines = [
        f"line {one.line}" if one.file == first.file else f"{_one_line(one.file)}, line {one.line}" for one in others
    ]
    return "; ".join([_one_line(str(first)), *lines])


def _clean_rows(report: CleanReport) -> Table:
    """A line for rows in, each reason and each file; rows in is the sum of the others."""
    table = _rows_table("rows")
    table.add_row(Text("in", style="bold"), Text(f"{report.rows_in:,}", style="bold"), "", "")
    for reason, count in report.dropped.items():
        first, style = next(iter(report.problems[reason]), ""), "yellow" if count else "dim"
        table.add_row(
            Text(f"  {reason.replace('_', '-')}", style=style), Text(f"−{count:,}" if count else "0", style=style),
            Text(_share(count, report.rows_in) if count else "", style=style), Text(_one_line(str(first)), style="dim"),
        )  # fmt: skip
    out = Text(f"{report.rows_out:,}", style="bold green")
    table.add_row(Text("out", style="bold"), out, _share(report.rows_out, report.rows_in), "")
    for split, rows in report.files.items():
        table.add_row(f"  {split}", f"{rows:,}", _share(rows, report.rows_in), Text(f"{split}.parquet", style="dim"))
    return table


def _lengths(unit: str, lengths: dict[str, Lengths]) -> Table:
    """The fields next to each other; with three of them the bars are shorter."""
    grid = Table.grid(padding=(0, 3, 0, 0))
    width = _BAR_WIDTH if len(lengths) < 3 else _BAR_WIDTH // 2
    grid.add_row(*[_field_lengths(field, unit, one, width) for field, one in lengths.items()])
    return grid


def _field_lengths(field: str, unit: str, lengths: Lengths, width: int) -> RenderableType:
    figures = {"p50": lengths.p50, "p90": lengths.p90, "p99": lengths.p99, "max": lengths.max}
    bars = Table.grid(padding=(0, 1, 0, 0))
    bars.add_column(justify="right", style="dim", no_wrap=True)
    bars.add_column(style="cyan", no_wrap=True, width=width)
    bars.add_column(justify="right", no_wrap=True)
    most = max(one.rows for one in lengths.bins)
    for one in lengths.bins:
        bars.add_row(_range(one), _bar(one.rows / most, width), f"{one.rows:,}")
    title = Text.assemble((field, "bold cyan"), f" in {unit}, mean {lengths.mean:,.1f}")
    return Group(title, Text(" · ".join(f"{name} {value:,}" for name, value in figures.items()), style="dim"), bars)


def _range(one: Bin) -> str:
    if one.end is None:
        return f"{one.start:,} –"
    return f"{one.start:,} – {one.end - 1:,}" if one.end > one.start + 1 else f"{one.start:,}"


def _bar(share: float, width: int) -> str:
    """To an eighth of a character; anything above zero is visible."""
    eighths = max(round(share * width * 8), 1 if share else 0)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8]


def _share(part: int, whole: int) -> str:
    """`0 %`, `0.03 %`, `99.97 %`: never rounded to nothing or to all."""
    if part in (0, whole):
        return "100 %" if part else "0 %"
    percent = 100 * part / whole
    return "< 0.01 %" if percent < 0.01 else f"{min(percent, 99.99):.2f} %"


def _one_line(text: str) -> str:
    flat = text[:_MAX_CHARACTERS].replace("\r\n", "⏎").replace("\n", "⏎").replace("\t", " ")
    return "".join(character if character.isprintable() else "·" for character in flat)
