"""A clean as people read it: rows in, why rows were dropped, rows out by file, and what it cost."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from brimful.data.clean.report import CleanReport
from brimful.units import show_bytes, show_rate, show_seconds


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
            Text(_share(count, report.rows_in) if count else "", style=style), Text(said, style="dim"),
        )  # fmt: skip
    table.add_row(
        Text("out", style="bold"), Text(f"{report.rows_out:,}", style="bold green"),
        _share(report.rows_out, report.rows_in), "",
    )  # fmt: skip
    for split, rows in report.files.items():
        path = f"{report.output}/{split}.parquet"
        table.add_row(f"  {split}", f"{rows:,}", _share(rows, report.rows_in), Text(path, style="dim"))
    return table


def _cost(report: CleanReport) -> Text:
    stages = ", ".join(f"{stage} {show_seconds(seconds)}" for stage, seconds in report.stage_s.items())
    rate = f", {show_rate(report.rows_per_s)} rows/s" if report.rows_per_s else ""
    return Text(
        f"{show_seconds(report.seconds)} ({stages}){rate}; peak memory {show_bytes(report.peak_bytes)}, measured"
    )


def _share(count: int, total: int) -> str:
    """`2.9 %`; a share that would read as nothing, or as all, says so."""
    share = count / max(1, total)
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{min(share, 0.999) if count < total else share:.1%}".replace("%", " %")
