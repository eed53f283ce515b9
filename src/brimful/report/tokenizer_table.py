"""A trained tokenizer as people read it: how short texts become, what was chosen and why, whether the model can use it."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from brimful.data.tokenizer.options import IdCheck
from brimful.data.tokenizer.report import Choice, Fit, TokenizerReport
from brimful.units import show_bytes, show_seconds

_WARN, _GOOD = "yellow", "green"
_IN_BYTES = ("host_limit",)


def tokenizer_table(report: TokenizerReport) -> RenderableType:
    """The headline, the texts, the choices, the ids, what it took, the warnings."""
    parts: list[RenderableType] = [
        _headline(report), Text(), _texts(report), Text(), _choices(report), Text(), _ids(report), Text(), _footer(report),
        *(Text(f"warning: {warning}", style=_WARN) for warning in _warnings(report)),
    ]  # fmt: skip
    return Group(*parts)


def _headline(report: TokenizerReport) -> Text:
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
            Text(_shown(choice, choice.requested), style=_WARN if changed else "dim"),
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
        table.add_row(check.name, _number(check.tokenizer), _number(check.model), _verdict(check))
    return table


def _number(value: int | list[int] | None) -> str:
    return "–" if value is None else str(value)


def _verdict(check: IdCheck) -> Text:
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
