"""The reports of `brimful data tokenizer` and `brimful data tokenize` as tables."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from brimful.data.tokenize import PERCENTILES, FieldStats, TokenizeReport
from brimful.data.tokenizer.train import Choice, IdCheck, TextStats, TokenizerReport
from brimful.units import show_bytes, show_rate, show_seconds

_WARN, _GOOD = "yellow", "green"


def tokenizer_table(report: TokenizerReport) -> RenderableType:
    """What was trained, how well it encodes, which values were chosen and why, and whether the model can use it."""
    parts: list[RenderableType] = []
    for table in (_tokenizer_headline, _texts, _choices, _ids, _tokenizer_facts):
        parts += [table(report), Text()]
    return Group(*parts[:-1], *(Text(f"warning: {warning}", style=_WARN) for warning in _warnings(report)))


def tokenize_table(report: TokenizeReport) -> RenderableType:
    """How many rows and tokens, what each field became, what was dropped and truncated, time and memory."""
    return Group(_store_headline(report), Text(), _fields(report), Text(), _store_facts(report))


def _tokenizer_headline(report: TokenizerReport) -> Text:
    return Text.assemble(
        (report.tokenizer, "bold"), ": ", (f"{report.vocab_size:,} {report.kind} entries", "bold"), ", ",
        (f"{report.total.characters_per_token:.2f} characters per token", "bold"), ", ",
        (f"{report.round_trip:.0%} of {report.total.rows:,} {report.measured_on} decode exactly", _GOOD),
    )  # fmt: skip


def _texts(report: TokenizerReport) -> Table:
    table = _table("measured", right=("characters", "tokens", "characters per token", "as bytes", "unknown"))
    fields = {**report.fields, "total": report.total} if len(report.fields) > 1 else report.fields
    for name, stats in fields.items():
        table.add_row(name, *_figures(stats), style="bold" if name == "total" else "")
    return table


def _figures(stats: TextStats) -> list[str]:
    counts = [f"{stats.characters:,}", f"{stats.tokens:,}", f"{stats.characters_per_token:.3f}"]
    return [*counts, f"{stats.byte_share:.2%}", f"{stats.unknown_rate:.2%}"]


def _choices(report: TokenizerReport) -> Table:
    table = _table("choice", right=("requested", "effective"))
    table.add_column("reason", overflow="fold")
    for choice in report.choices:
        changed = choice.requested is not None and choice.requested != choice.effective
        table.add_row(
            choice.name.replace("_", " "),
            Text(_value(choice, choice.requested), style=_WARN if changed else "dim"),
            Text(_value(choice, choice.effective), style="bold"),
            choice.reason,
        )
    return table


def _value(choice: Choice, value: Any) -> str:
    if value is None:
        return "–"
    return show_bytes(value) if choice.name == "host_limit" else f"{value:,}"


def _ids(report: TokenizerReport) -> Table:
    table = _table("compared with the model", right=("tokenizer", "model"))
    table.add_column("")
    for check in report.ids:
        numbers = ("–" if value is None else str(value) for value in (check.tokenizer, check.model))
        table.add_row(check.name, *numbers, _verdict(check))
    return table


def _verdict(check: IdCheck) -> Text:
    if check.matches is None:
        return Text("nothing to compare with", style="dim")
    if not check.matches:
        return Text("does not match", style="red")
    if check.name == "vocab_size" and check.tokenizer != check.model:
        return Text("fits; the other rows of the embedding stay unused", style=_GOOD)
    return Text("matches", style=_GOOD)


def _tokenizer_facts(report: TokenizerReport) -> Table:
    lines = {
        "special": ", ".join(f"{token} {number}" for token, number in report.special_ids.items()),
        "columns": report.layout_reason,
        "time": f"{show_seconds(report.seconds)}, of which {show_seconds(report.training_s)} training",
        "memory": f"peak {show_bytes(report.peak_bytes)} (measured), {show_bytes(report.predicted_peak_bytes)} (predicted)",
    }
    return _facts({name: Text(text) for name, text in lines.items()})


def _warnings(report: TokenizerReport) -> list[str]:
    warnings = []
    if report.broken:
        warnings.append(f"{report.broken:,} broken rows were left out; the first is {report.first_broken}")
    if report.peak_bytes > report.host_limit_bytes:
        warnings.append("training took more memory than --host-limit. Try: a smaller one next time")
    return warnings


def _store_headline(report: TokenizeReport) -> Text:
    tokens = sum(field.tokens for field in report.fields.values())
    return Text.assemble(
        (report.store, "bold"), ": ", (f"{report.rows_out:,} rows", "bold"), f" of {report.rows_in:,}, {tokens:,} tokens, ",
        f"{show_bytes(report.size_bytes)} on disk",
    )  # fmt: skip


def _fields(report: TokenizeReport) -> Table:
    """A column per field, so that three of them fit 80 characters."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("", style="dim", no_wrap=True)
    for name in report.fields:
        table.add_column(name, justify="right", overflow="fold")
    columns = [_field(field, report.rows_out) for field in report.fields.values()]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _field(field: FieldStats, rows: int) -> dict[str, Text]:
    """Yellow where more than one row in a hundred was truncated."""
    plain = field.tokens + field.lost_tokens - rows
    lost, truncated = field.lost_tokens / max(1, plain), field.truncated / max(1, rows)
    style = _WARN if truncated > 0.01 else ""
    return {
        "column": Text(field.column),
        "characters": Text(f"{field.characters:,}"),
        "characters per token": Text(f"{field.characters / plain:.2f}" if plain else "–"),
        "tokens": Text(f"{field.tokens:,}"),
        "tokens per row, mean": Text(f"{field.mean:.1f}"),
        **{f"{share} % of rows up to": Text(f"{field.percentiles[f'p{share}']:,}") for share in PERCENTILES},
        "longest": Text(f"{field.longest:,}"),
        "limit": Text(f"{field.max_tokens:,}"),
        "truncation removes": Text("the beginning" if field.keeps_end else "the end"),
        "rows truncated": Text(f"{field.truncated:,} ({truncated:.1%})" if field.truncated else "0", style=style),
        "tokens lost": Text(f"{field.lost_tokens:,} ({lost:.1%})" if field.lost_tokens else "0", style=style),
    }


def _store_facts(report: TokenizeReport) -> Table:
    files = f"{report.sources:,} file{'s' * (report.sources != 1)}"
    requested = ",".join(map(str, report.requested_max_tokens))
    effective = ", ".join(f"{name} {field.max_tokens:,}" for name, field in report.fields.items())
    facts = {
        "read": Text(f"{report.rows_in:,} rows from {files}: {report.layout_reason}"),
        "dropped": _dropped(report),
        "limit": Text(f"--max-tokens {requested} is {effective}, eos included"),
        "tokenizer": Text(f"{report.tokenizer}, {report.vocab_size:,} tokens, stored as {report.dtype}"),
        "time": Text(f"{show_seconds(report.seconds)}, {show_rate(report.rows_per_s)} rows/s"),
        "memory": _memory(report),
    }
    if report.resumed_rows:
        facts["continued"] = Text(f"after {report.resumed_rows:,} rows that an interrupted run had written")
    if report.started_over:
        reason = f"an interrupted run could not be continued: {report.started_over}"
        facts["started over"] = Text(reason, style=_WARN)
    return _facts(facts)


def _dropped(report: TokenizeReport) -> Text:
    dropped = {reason: rows for reason, rows in report.dropped.items() if rows}
    if not dropped:
        return Text("no row")
    reasons = ", ".join(f"{rows:,} {reason}" for reason, rows in dropped.items())
    first = f"; the first broken one is {report.first_broken}" if report.first_broken else ""
    return Text(f"{sum(dropped.values()):,} of {report.rows_in:,} rows: {reasons}{first}", style=_WARN)


def _memory(report: TokenizeReport) -> Text:
    if not report.peak_bytes:
        return Text("unknown on this kernel")
    over = report.peak_bytes > report.host_limit_bytes
    return Text(
        f"peak {show_bytes(report.peak_bytes)} (measured) of {show_bytes(report.host_limit_bytes)}; "
        f"{show_bytes(report.start_bytes)} before the first row",
        style=_WARN if over else "",
    )


def _table(first: str, *, right: tuple[str, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(first, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right")
    return table


def _facts(lines: dict[str, Text]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in lines.items():
        table.add_row(name, text)
    return table
