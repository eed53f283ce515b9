"""A pack at a glance: rows that add up, what each side became, what was cut, time and memory."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from brimful.data.pack.report import PERCENTILES, PackReport, Side
from brimful.units import show_bytes, show_rate, show_seconds

_WARN = "yellow"


def pack_table(report: PackReport) -> RenderableType:
    """The headline, a line a side, what was dropped and cut, the cost."""
    return Group(_headline(report), Text(), _sides(report), Text(), _facts(report))


def _headline(report: PackReport) -> Text:
    tokens = sum(side.tokens for side in report.sides.values())
    return Text.assemble(
        (report.store, "bold"), ": ", (f"{report.rows_out:,} rows", "bold"), f" of {report.rows_in:,}, {tokens:,} tokens, ",
        f"{show_bytes(report.size_bytes)} on disk",
    )  # fmt: skip


def _sides(report: PackReport) -> Table:
    """A column a side, so that three of them fit 80 characters."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("", style="dim", no_wrap=True)
    for name in report.sides:
        table.add_column(name, justify="right", overflow="fold")
    columns = [_side(side, report.rows_out) for side in report.sides.values()]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _side(side: Side, rows: int) -> dict[str, Text]:
    """Yellow where more than one row in a hundred was cut."""
    plain = side.tokens + side.lost_tokens - rows
    lost, cut = side.lost_tokens / max(1, plain), side.truncated / max(1, rows)
    style = _WARN if cut > 0.01 else ""
    return {
        "column": Text(side.column),
        "characters": Text(f"{side.characters:,}"),
        "characters a token": Text(f"{side.characters / plain:.2f}" if plain else "–"),
        "tokens": Text(f"{side.tokens:,}"),
        "tokens a row, mean": Text(f"{side.mean:.1f}"),
        **{f"{share} % of rows up to": Text(f"{side.percentiles[f'p{share}']:,}") for share in PERCENTILES},
        "longest": Text(f"{side.longest:,}"),
        "limit": Text(f"{side.max_tokens:,}"),
        "a cut takes": Text("the beginning" if side.keeps_end else "the end"),
        "rows cut": Text(f"{side.truncated:,} ({cut:.1%})" if side.truncated else "0", style=style),
        "tokens lost": Text(f"{side.lost_tokens:,} ({lost:.1%})" if side.lost_tokens else "0", style=style),
    }


def _facts(report: PackReport) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _lines(report):
        table.add_row(name, value)
    return table


def _lines(report: PackReport) -> list[tuple[str, Text]]:
    files = f"{report.sources:,} file{'s' * (report.sources != 1)}"
    lines = [
        ("read", Text(f"{report.rows_in:,} rows from {files}: {report.layout_reason}")),
        ("dropped", _dropped(report)),
        ("limit", Text(_limits(report))),
        ("tokenizer", Text(f"{report.tokenizer}, {report.vocab_size:,} tokens, stored as {report.dtype}")),
        ("time", Text(f"{show_seconds(report.seconds)}, {show_rate(report.rows_per_s)} rows/s")),
        ("memory", _memory(report)),
    ]
    if report.resumed_rows:
        lines.append(("went on", Text(f"after {report.resumed_rows:,} rows that an interrupted pack had written")))
    if report.started_over:
        lines.append(
            ("started over", Text(f"an interrupted pack could not be used: {report.started_over}", style=_WARN))
        )
    return lines


def _dropped(report: PackReport) -> Text:
    dropped = {reason: rows for reason, rows in report.dropped.items() if rows}
    if not dropped:
        return Text("no row")
    reasons = ", ".join(f"{rows:,} {reason}" for reason, rows in dropped.items())
    first = f"; the first broken one is {report.first_broken}" if report.first_broken else ""
    return Text(f"{sum(dropped.values()):,} of {report.rows_in:,} rows: {reasons}{first}", style=_WARN)


def _limits(report: PackReport) -> str:
    asked = ",".join(map(str, report.requested_max_tokens))
    became = ", ".join(f"{name} {side.max_tokens:,}" for name, side in report.sides.items())
    return f"--max-tokens {asked} is {became}, the eos counted"


def _memory(report: PackReport) -> Text:
    if not report.peak_bytes:
        return Text("unknown: this kernel does not tell")
    over = report.peak_bytes > report.host_limit_bytes
    return Text(
        f"{show_bytes(report.peak_bytes)} at the highest (measured) of {show_bytes(report.host_limit_bytes)} allowed; "
        f"{show_bytes(report.start_bytes)} before the first row",
        style=_WARN if over else "",
    )
