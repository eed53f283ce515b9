"""A `CheckReport` as people read it: which column is what, three rows, what cannot be used and where, how long texts are.

What comes from the files is shown as it is, never as markup, and in one line: a line break as ⏎, other control characters
as a dot.
"""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from brimful.data.check import UNUSABLE, Bin, CheckReport, Lengths, Place
from brimful.data.clean.clean import CleanReport
from brimful.units import show_bytes, show_rate, show_seconds

# A clean as people read it: rows in, why rows were dropped, rows out by file, and what it cost.


def clean_table(report: CleanReport) -> RenderableType:
    """The columns, the rows, the cost, the notes."""
    named = [side if side == column else f"{side} ← {column}" for side, column in report.columns.items()]
    parts: list[RenderableType] = [
        Text.assemble(("columns  ", "bold"), f"{', '.join(named)} ({report.reason})"), Text(),
        _rows(report), Text(), _cost(report),
    ]  # fmt: skip
    parts += [Text(f"note: {note}", style="yellow") for note in report.notes]
    return Group(*parts)


def _rows(report: CleanReport) -> Table:
    """A line for rows in, each reason and each file; what goes in is the sum of the others."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    for name in ("rows", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("first", overflow="fold")
    table.add_row(Text("in", style="bold"), Text(f"{report.rows_in:,}", style="bold"), "", "")
    for reason, count in report.dropped.items():
        first = next(iter(report.places[reason]), None)
        said = f"{first.file}, line {first.line:,}: {first.why}" if first else ""
        style = "yellow" if count else "dim"
        table.add_row(
            Text(f"  {reason.replace('_', '-')}", style=style), Text(f"−{count:,}" if count else "0", style=style),
            Text(_share_clean_table(count, report.rows_in) if count else "", style=style), Text(said, style="dim"),
        )  # fmt: skip
    table.add_row(
        Text("out", style="bold"), Text(f"{report.rows_out:,}", style="bold green"),
        _share_clean_table(report.rows_out, report.rows_in), "",
    )  # fmt: skip
    for split, rows in report.files.items():
        path = f"{report.output}/{split}.parquet"
        table.add_row(f"  {split}", f"{rows:,}", _share_clean_table(rows, report.rows_in), Text(path, style="dim"))
    return table


def _cost(report: CleanReport) -> Text:
    stages = ", ".join(f"{stage} {show_seconds(seconds)}" for stage, seconds in report.stage_s.items())
    rate = f", {show_rate(report.rows_per_s)} rows/s" if report.rows_per_s else ""
    return Text(
        f"{show_seconds(report.seconds)} ({stages}){rate}; peak memory {show_bytes(report.peak_bytes)}, measured"
    )


def _share_clean_table(count: int, total: int) -> str:
    """`2.9 %`; a share that would read as nothing, or as all, says so."""
    share = count / max(1, total)
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{min(share, 0.999) if count < total else share:.1%}".replace("%", " %")


_BAR = 16
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
_SHOWN = 300
"""Characters of a text that are handed to the terminal, which cuts them to its width."""


def check_table(report: CheckReport) -> RenderableType:
    """The headline, the columns with three rows, the counts, the lengths."""
    parts: list[RenderableType] = [_headline(report), Text(), *_columns(report), Text(), _counts(report)]
    for unit, lengths in (("characters", report.characters), ("tokens", report.tokens)):
        parts += [Text(), _lengths(unit, lengths)] if lengths else []
    return Group(*parts)


def _headline(report: CheckReport) -> Text:
    files = report.files[0] if len(report.files) == 1 else f"{len(report.files):,} files"
    talks = (
        f" from {report.conversations:,} conversation{'s' * (report.conversations != 1)}"
        if report.conversations is not None
        else ""
    )
    speed = f"{show_seconds(report.seconds)}, {show_rate(report.rows_in / max(report.seconds, 1e-9))} rows/s"
    return Text.assemble(
        f"{_line(files)}: ", (f"{report.rows_out:,} of {report.rows_in:,} rows", f"bold {_verdict(report)}"),
        f"{talks} can be used  ", (f"read in {speed}", "dim"),
    )  # fmt: skip


def _verdict(report: CheckReport) -> str:
    return "green" if report.complaint() is None else "red"


def _columns(report: CheckReport) -> list[RenderableType]:
    """Which column became which side and why, above three rows."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True, header_style="")
    for side in report.layout.sides:
        column = report.layout.columns[side]
        header = Text.assemble((side, "bold cyan"), (f" ← {_line(column)}" if column != side else "", "cyan"))
        table.add_column(header, ratio=1 if side == "prompt" else 2, no_wrap=True)
    for row in report.examples:
        table.add_row(*[Text(_line(row[side]), no_wrap=True, overflow="ellipsis") for side in report.layout.sides])
    return [Text(f"columns: {_line(report.layout.reason)}", style="dim"), table]


def _counts(report: CheckReport) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("rows", no_wrap=True)
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("first met", overflow="fold")
    table.add_row("in", f"{report.rows_in:,}")
    for reason, count in report.dropped.items():
        style = "dim" if not count else "red" if reason in UNUSABLE else "yellow"
        cells = (reason.replace("_", "-"), f"{count:,}", _share(count, report.rows_in))
        table.add_row(*[Text(cell, style=style) for cell in cells], Text(_first(report.places[reason])))
    usable = ("usable", f"{report.rows_out:,}", _share(report.rows_out, report.rows_in))
    table.add_row(*[Text(cell, style=f"bold {_verdict(report)}") for cell in usable])
    return table


def _first(places: tuple[Place, ...]) -> str:
    """The first place in full, of the others the line."""
    if not places:
        return ""
    more = [
        f"line {one.line}" if one.file == places[0].file else f"{_line(one.file)}, line {one.line}"
        for one in places[1:]
    ]
    return f"{_line(places[0].file)}, line {places[0].line}: {_line(places[0].why)}" + "".join(
        f"; {one}" for one in more
    )


def _lengths(unit: str, lengths: dict[str, Lengths]) -> Table:
    """The sides next to each other; three of them have less room for bars."""
    grid = Table.grid(padding=(0, 3, 0, 0))
    bar = _BAR if len(lengths) < 3 else _BAR // 2
    grid.add_row(*[_side(side, unit, one, bar) for side, one in lengths.items()])
    return grid


def _side(side: str, unit: str, lengths: Lengths, width: int) -> RenderableType:
    figures = {"p50": lengths.p50, "p90": lengths.p90, "p99": lengths.p99, "max": lengths.max}
    bars = Table.grid(padding=(0, 1, 0, 0))
    bars.add_column(justify="right", style="dim", no_wrap=True)
    bars.add_column(style="cyan", no_wrap=True, width=width)
    bars.add_column(justify="right", no_wrap=True)
    most = max(one.rows for one in lengths.bins)
    for one in lengths.bins:
        bars.add_row(_range(one), _bar(one.rows / most, width), f"{one.rows:,}")
    title = Text.assemble((side, "bold cyan"), f" in {unit}, mean {lengths.mean:,.1f}")
    return Group(title, Text(" · ".join(f"{name} {value:,}" for name, value in figures.items()), style="dim"), bars)


def _range(one: Bin) -> str:
    return (
        f"{one.start:,} –"
        if one.end is None
        else f"{one.start:,} – {one.end - 1:,}"
        if one.end > one.start + 1
        else f"{one.start:,}"
    )


def _bar(share: float, width: int) -> str:
    """To an eighth of a character; what is more than nothing is seen."""
    eighths = max(round(share * width * 8), 1 if share else 0)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8]


def _share(part: int, whole: int) -> str:
    """`0 %`, `0.03 %`, `99.97 %`: neither nothing nor all by rounding."""
    if part in (0, whole):
        return "100 %" if part else "0 %"
    percent = 100 * part / whole
    return "< 0.01 %" if percent < 0.01 else f"{min(percent, 99.99):.2f} %"


def _line(text: str) -> str:
    """Text of a file in one line that a terminal shows as it stands."""
    flat = text[:_SHOWN].replace("\r\n", "⏎").replace("\n", "⏎").replace("\t", " ")
    return "".join(one if one.isprintable() else "·" for one in flat)
