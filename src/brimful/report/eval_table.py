"""An evaluation as people read it: the figures and what they were counted over, a few answers, the memory and the time."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from brimful.units import show_bytes, show_rows, show_seconds

SAMPLES = 3
LONGEST_TEXT = 200
"""Characters shown of a text."""


def eval_table(report: dict[str, Any]) -> RenderableType:
    """From what `brimful eval --json` prints."""
    parts: list[RenderableType] = [_headline(report), Text(), _figures(report)]
    if report["samples"]:
        parts += [Text(), _samples(report["samples"][:SAMPLES])]
    parts += [Text(), _facts(report)]
    return Group(*parts)


def _headline(report: dict[str, Any]) -> Text:
    which = "all" if report["rows"] == report["rows_available"] else f"chosen with seed {report['seed']} from"
    return Text.assemble(
        (report["model"], "bold"), " on ", (report["data"], "bold"),
        f": {report['rows']:,} rows, {which} {report['rows_available']:,}",
    )  # fmt: skip


def _figures(report: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    if report["loss"] is not None:
        tokens = f"mean over {report['tokens']:,} tokens of the answers"
        table.add_row("loss", f"{report['loss']:.4f}", tokens)
        table.add_row("perplexity", _perplexity(report["perplexity"]), "e to the loss")
    for name, title in (("bleu", "BLEU-4"), ("chrf", "chrF")):
        if report.get(name) is not None:
            table.add_row(
                title, f"{report[name]:.2f}", f"over all {report['rows']:,} answers: {report['signatures'][name]}"
            )
    return table


def _perplexity(value: float | None) -> str:
    if value is None:
        return "beyond e³⁰⁸"
    return f"{value:,.2f}" if value < 1e6 else f"{value:.2e}"


def _samples(samples: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for number, one in enumerate(samples):
        if number:
            table.add_row("", "")
        for name, style in (("prompt", ""), ("response", "bold"), ("reference", "dim")):
            table.add_row(name, Text(_shown(one[name]), style=style))
    return table


def _shown(text: str) -> str:
    """On one line, and no longer than can be read at a glance."""
    flat = " ".join(text.split()) or "(nothing)"
    return flat if len(flat) <= LONGEST_TEXT else f"{flat[: LONGEST_TEXT - 1]}…"


def _facts(report: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("lengths", Text(_cut(report)))
    for kind, plan in report["forward"].items():
        table.add_row(kind, Text(_plan(plan)))
    table.add_row("memory", Text(_memory(report), style="yellow" if report["ooms"] else ""))
    table.add_row("time", Text(f"{show_seconds(report['seconds'])} on {report['device_name']}"))
    if report["output"]:
        table.add_row("answers", Text(report["output"]))
    return table


def _cut(report: dict[str, Any]) -> str:
    """Where rows were cut, and how many."""
    at, why = "+".join(map(str, report["max_tokens"].values())), report["max_tokens_because"]
    longer = [f"{count:,} {side}{'s' * (count != 1)}" for side, count in report["truncated"].items() if count]
    what = f"{' and '.join(longer)} of {report['rows_available']:,} rows" if longer else "no row has one"
    return f"sides longer than {at} tokens are cut, {why}: {what}"


def _plan(plan: dict[str, Any]) -> str:
    rows, shape = plan["largest_batch"]["rows"], "+".join(map(str, plan["largest_batch"]["shape"]))
    count = plan["batches"]
    return (
        f"{count:,} batch{'es' * (count != 1)}, the largest {show_rows(rows)} of {shape} "
        f"(predicted {show_bytes(plan['predicted_added_bytes'])}); allowed are {show_bytes(plan['added_budget_bytes'])}, {plan['because']}"
    )


def _memory(report: dict[str, Any]) -> str:
    peak = (
        f"measured {show_bytes(report['peak_bytes'])} at the highest" if report["peak_bytes"] else "not measured here"
    )
    limit = f", of {show_bytes(report['limit_bytes'])} ({report['limit_reason']})"
    ooms = report["ooms"]
    return f"{peak}{limit}; {ooms or 'no'} out-of-memory error{'s' * (ooms != 1)}"
