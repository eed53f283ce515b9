"""A plan as people read it: what to run, how full the memory gets, and every choice with its reason."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from brimful.plan.plan import Choice, Plan
from brimful.units import show_bytes, show_rate, show_rows, show_seconds

ZONE_STYLE = {"safe": "green", "edge": "yellow", "danger": "red"}
BAR_WIDTH = 40
IN_BYTES = ("memory_limit",)


def plan_table(plan: Plan) -> RenderableType:
    """The headline, the memory, the choices, how it was found, the warnings."""
    parts: list[RenderableType] = [_headline(plan), _memory(plan), Text(), _choices(plan), Text(), _footer(plan)]
    parts += [Text(f"warning: {warning}", style="yellow") for warning in plan.warnings]
    return Group(*parts)


def _headline(plan: Plan) -> Text:
    cut = f"{show_rows(plan.micro_batch)} × {plan.accumulation}"
    if plan.processes > 1:
        cut += f" on each of {plan.processes} processes ({'+'.join(map(str, plan.deal))})"
    elif plan.micro_batch * plan.accumulation != plan.global_batch:
        cut = f"{plan.accumulation} micro-batches of at most {show_rows(plan.micro_batch)}"
    shape = f" of {'+'.join(map(str, plan.shape))}" if plan.shape else ""
    return Text.assemble(
        (plan.task, "bold"), f" on {plan.device_name}: ", (cut, "bold"), f" = {plan.global_batch} a step, ",
        (f"{show_rate(plan.rows_per_s)} rows/s", "bold"), f" at rows{shape or ' of one size'}",
    )  # fmt: skip


def _memory(plan: Plan) -> Text:
    """A bar of the limit: what the chosen size takes, with the mark where `fill` ends."""
    style, full = ZONE_STYLE[plan.zone], min(BAR_WIDTH, round(plan.used * BAR_WIDTH))
    bar = list("█" * full + "░" * (BAR_WIDTH - full))
    mark = min(BAR_WIDTH - 1, round(plan.fill * BAR_WIDTH))
    bar[mark] = "▏" if mark >= full else bar[mark]
    taken = max(plan.measured_peak_bytes, plan.reserved_peak_bytes or 0)
    return Text.assemble(
        ("".join(bar), style), f" {show_bytes(taken)} of {show_bytes(plan.limit_bytes)}, ",
        (f"{plan.used:.0%} {plan.zone}", style),
    )  # fmt: skip


def _choices(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("choice", "asked", "is", "basis"):
        table.add_column(name, no_wrap=True)
    table.add_column("because", overflow="fold")
    for choice in plan.choices:
        changed = choice.requested is not None and choice.requested != choice.effective
        table.add_row(
            choice.name.replace("_", " "),
            Text(_shown(choice, choice.requested), style="yellow" if changed else "dim"),
            Text(_shown(choice, choice.effective), style="bold"),
            Text(choice.basis, style="dim"),
            choice.reason,
        )
    return table


def _shown(choice: Choice, value: Any) -> str:
    if value is None:
        return "–"
    return show_bytes(value) if choice.name in IN_BYTES else str(value)


def _footer(plan: Plan) -> Table:
    miss = plan.predicted_peak_bytes / plan.measured_peak_bytes - 1
    reserved = f", reserved {show_bytes(plan.reserved_peak_bytes)}" if plan.reserved_peak_bytes else ""
    found = f"{show_seconds(plan.fit_s)} with {plan.probes} probes and {plan.ooms} out-of-memory error{'s' * (plan.ooms != 1)}"
    if plan.cached:
        found = f"the plan of {plan.created}, no probe run (--no-cache fits anew)"
    lines = {
        "peak": f"measured {show_bytes(plan.measured_peak_bytes)}, predicted {show_bytes(plan.predicted_peak_bytes)} ({miss:+.1%}){reserved}",
        "largest": f"{show_rows(plan.largest_micro_batch)} ran, at {show_bytes(plan.largest_measured_peak_bytes)}{_one_more(plan)}",
        "found in": found,
    }
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, text in lines.items():
        table.add_row(name, text)
    return table


def _one_more(plan: Plan) -> str:
    if plan.one_more_predicted_peak_bytes is None:
        return "; the global batch has no more"
    budget = f"the budget of {show_bytes(plan.budget_bytes)}"
    return f"; one more would need {show_bytes(plan.one_more_predicted_peak_bytes)} (predicted), over {budget}"
