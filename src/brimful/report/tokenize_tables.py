"""The reports of `brimful data tokenizer` and `brimful data tokenize` as tables."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from brimful.data.tokenize import PERCENTILES, PackReport, Side
from brimful.data.tokenizer.algorithms import IdCheck
from brimful.data.tokenizer.train import Choice, Fit, TokenizerReport
from brimful.units import show_bytes, show_rate, show_seconds

# A trained tokenizer as people read it: how short texts become, what was chosen and why, whether the model can use it.


_WARN_TOKENIZER_TABLE, _GOOD = "yellow", "green"
_IN_BYTES = ("host_limit",)


def tokenizer_table(report: TokenizerReport) -> RenderableType:
    """The headline, the texts, the choices, the ids, what it took, the warnings."""
    parts: list[RenderableType] = [
        _headline_tokenizer_table(report), Text(), _texts(report), Text(), _choices(report), Text(), _ids(report), Text(), _footer(report),
        *(Text(f"warning: {warning}", style=_WARN_TOKENIZER_TABLE) for warning in _warnings(report)),
    ]  # fmt: skip
    return Group(*parts)


def _headline_tokenizer_table(report: TokenizerReport) -> Text:
    return Text.assemble(
        (report.tokenizer, "bold"), ": ", (f"{report.vocab_size:,} {report.kind} entries", "bold"), ", ",
        (f"{report.total.characters_per_token:.2f} characters a token", "bold"), ", ",
        (f"{report.round_trip:.0%} of {report.total.rows:,} {report.measured_on} come back exactly", _GOOD),
    )  # fmt: skip


def _texts(report: TokenizerReport) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("measured")
    for name in ("characters", "tokens", "characters a token", "as bytes", "unknown"):
        table.add_column(name, justify="right")
    fits = {**report.sides, "total": report.total} if len(report.sides) > 1 else report.sides
    for name, fit in fits.items():
        table.add_row(name, *_figures(fit), style="bold" if name == "total" else "")
    return table


def _figures(fit: Fit) -> list[str]:
    figures = (f"{fit.characters:,}", f"{fit.tokens:,}", f"{fit.characters_per_token:.3f}")
    return [*figures, f"{fit.byte_share:.2%}", f"{fit.unknown_rate:.2%}"]


def _choices(report: TokenizerReport) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("choice", no_wrap=True)
    for name in ("asked", "is"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("because", overflow="fold")
    for choice in report.choices:
        changed = choice.requested is not None and choice.requested != choice.effective
        table.add_row(
            choice.name.replace("_", " "),
            Text(_shown(choice, choice.requested), style=_WARN_TOKENIZER_TABLE if changed else "dim"),
            Text(_shown(choice, choice.effective), style="bold"),
            choice.reason,
        )
    return table


def _shown(choice: Choice, value: Any) -> str:
    if value is None:
        return "–"
    return show_bytes(value) if choice.name in _IN_BYTES else f"{value:,}"


def _ids(report: TokenizerReport) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("against the model")
    for name in ("tokenizer", "model"):
        table.add_column(name, justify="right")
    table.add_column("")
    for check in report.ids:
        table.add_row(check.name, _number(check.tokenizer), _number(check.model), _verdict_tokenizer_table(check))
    return table


def _number(value: int | list[int] | None) -> str:
    return "–" if value is None else str(value)


def _verdict_tokenizer_table(check: IdCheck) -> Text:
    if check.matches is None:
        return Text("nothing to compare with", style="dim")
    if not check.matches:
        return Text("does not match", style="red")
    if check.name == "vocab_size" and check.tokenizer != check.model:
        return Text("fits; the rest of the model's rows stay unused", style=_GOOD)
    return Text("matches", style=_GOOD)


def _footer(report: TokenizerReport) -> Table:
    special = ", ".join(f"{token} {number}" for token, number in report.special_ids.items())
    lines = {
        "special": special,
        "columns": report.layout_reason,
        "took": f"{show_seconds(report.seconds)}, of it {show_seconds(report.training_s)} training; "
        f"memory at most {show_bytes(report.peak_bytes)} (measured; predicted {show_bytes(report.predicted_peak_bytes)})",
    }
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, text in lines.items():
        table.add_row(Text(name, style="dim"), Text(text))
    return table


def _warnings(report: TokenizerReport) -> list[str]:
    warnings = []
    if report.broken:
        warnings.append(
            f"{report.broken:,} rows could not be read and were left out; the first is {report.first_broken}"
        )
    if report.peak_bytes > report.host_limit_bytes:
        warnings.append("training took more memory than --host-limit; give a smaller one next time")
    return warnings


# A pack at a glance: rows that add up, what each side became, what was cut, time and memory.


_WARN = "yellow"


def pack_table(report: PackReport) -> RenderableType:
    """The headline, a line a side, what was dropped and cut, the cost."""
    return Group(_headline_pack_table(report), Text(), _sides(report), Text(), _facts(report))


def _headline_pack_table(report: PackReport) -> Text:
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
    columns = [_side_pack_table(side, report.rows_out) for side in report.sides.values()]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _side_pack_table(side: Side, rows: int) -> dict[str, Text]:
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
