"""A plan as people read it: what to run, how full the memory gets, and every choice with its reason."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from brimful.machine.gpu import Gpu, describe_holders
from brimful.machine.host import Host, Space
from brimful.machine.machine import Machine
from brimful.planning.plan import Choice, Plan
from brimful.units import GiB, show_bytes, show_rate, show_rows, show_seconds

# An evaluation as people read it: the figures and what they were counted over, a few answers, the memory and the time.


SAMPLES = 3
LONGEST_TEXT = 200
"""Characters shown of a text."""


def eval_table(report: dict[str, Any]) -> RenderableType:
    """From what `brimful eval --json` prints."""
    parts: list[RenderableType] = [_headline_eval_table(report), Text(), _figures(report)]
    if report["samples"]:
        parts += [Text(), _samples(report["samples"][:SAMPLES])]
    parts += [Text(), _facts(report)]
    return Group(*parts)


def _headline_eval_table(report: dict[str, Any]) -> Text:
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
            table.add_row(name, Text(_shown_eval_table(one[name]), style=style))
    return table


def _shown_eval_table(text: str) -> str:
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
    table.add_row("memory", Text(_memory_eval_table(report), style="yellow" if report["ooms"] else ""))
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


def _memory_eval_table(report: dict[str, Any]) -> str:
    peak = (
        f"measured {show_bytes(report['peak_bytes'])} at the highest" if report["peak_bytes"] else "not measured here"
    )
    limit = f", of {show_bytes(report['limit_bytes'])} ({report['limit_reason']})"
    ooms = report["ooms"]
    return f"{peak}{limit}; {ooms or 'no'} out-of-memory error{'s' * (ooms != 1)}"


# A `Machine` at a glance: what may be used, of how much, and why not all of it.
#
# One row a fact, the usable figure first; whatever will end a training (a tiny /dev/shm, a full card, a torch without
# CUDA) is yellow and says what to do.


_WARN = "yellow"
_SMALL_SHM_BYTES = GiB
"""Docker gives 64 MiB; four workers with two batches each of 256 float images of 224² pixels need 1.1 GiB."""


def machine_table(machine: Machine) -> RenderableType:
    """Everything `brimful machine` shows: a label and a line a fact, which also reads well at 80 columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in _rows(machine):
        table.add_row(label, value)
    return table


def _rows(machine: Machine) -> list[tuple[str, Text]]:
    host, in_container = machine.host, machine.software.in_container
    return [
        *[(f"{gpu.kind}:{gpu.index}", _gpu(gpu, in_container)) for gpu in machine.gpus],
        *([] if machine.gpus else [("GPU", Text("none; training runs on the CPU"))]),
        ("RAM", Text(_ram(host))),
        ("swap", Text(_swap(host))),
        ("cores", Text(_cores(host))),
        *([("/dev/shm", _shm(machine.shm, in_container))] if machine.shm else []),
        ("disk", Text(_disk(machine.disk))),
        ("limits", Text(_limits(host))),
        ("software", Text(_software(machine))),
        *[("note", Text(note, style=_WARN)) for note in machine.notes],
    ]


def _gpu(gpu: Gpu, in_container: bool) -> Text:
    """Yellow where others hold more than a tenth of the card: a plan for the empty card will not fit."""
    name = gpu.name + (f" (capability {gpu.capability})" if gpu.capability else "")
    free = "free unknown" if gpu.free_bytes is None else f"{show_bytes(gpu.free_bytes)} free"
    text = Text(f"{name}: {free} of {show_bytes(gpu.total_bytes)}; ")
    crowded = (gpu.used_by_others_bytes or 0) > (gpu.total_bytes or 0) / 10
    return text.append(describe_holders(gpu, in_container=in_container), style=_WARN if crowded else "")


def _ram(host: Host) -> str:
    now = f"{show_bytes(host.ram_available_bytes)} available now"
    if host.ram_limit_bytes == host.ram_total_bytes:
        return f"{show_bytes(host.ram_total_bytes)}, all of it usable; {now}"
    usable = f"{show_bytes(host.ram_limit_bytes)} usable of {show_bytes(host.ram_total_bytes)}"
    return f"{usable} ({host.ram_limited_by}); {now}"


def _swap(host: Host) -> str:
    if not host.swap_total_bytes:
        return "none"
    return f"{show_bytes(host.swap_total_bytes)}, {show_bytes(host.swap_free_bytes)} free"


def _cores(host: Host) -> str:
    if host.cores == host.cores_total:
        return f"{host.cores}, all of them usable"
    return f"{host.cores} usable of {host.cores_total} ({host.cores_limited_by})"


def _shm(shm: Space, in_container: bool) -> Text:
    """Too small, it ends in `Bus error` in a DataLoader worker, which nobody connects with /dev/shm."""
    size = Text(f"{show_bytes(shm.total_bytes)}, {show_bytes(shm.free_bytes)} free")
    if shm.total_bytes >= _SMALL_SHM_BYTES and shm.free_bytes >= _SMALL_SHM_BYTES:
        return size
    fix = "start the container with --shm-size=8g or --ipc=host" if in_container else "remount it larger or empty it"
    return size.append(
        f"; less than 1 GiB: DataLoader workers pass batches through it and die of a bus error when it is full; {fix}",
        style=_WARN,
    )


def _disk(disk: Space | None) -> str:
    if disk is None:
        return "unknown"
    return f"{show_bytes(disk.free_bytes)} free of {show_bytes(disk.total_bytes)} at {disk.path}"


def _limits(host: Host) -> str:
    files = "no limit" if host.open_files_limit is None else f"{host.open_files_limit:,}"
    locked = "no limit" if host.locked_memory_limit_bytes is None else show_bytes(host.locked_memory_limit_bytes)
    return f"open files {files}, locked memory {locked}"


def _software(machine: Machine) -> str:
    software = machine.software
    driver = software.driver or next((gpu.driver for gpu in machine.gpus if gpu.driver), None)
    parts = [
        f"Python {software.python}",
        f"torch {software.torch}",
        f"CUDA {software.cuda}" if software.cuda else "",
        f"driver {driver}" if driver else "",
        software.platform,
        f"in a container ({software.container_sign})" if software.in_container else "",
    ]
    return ", ".join(part for part in parts if part)


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
    found = f"{show_seconds(plan.plan_s)} with {plan.probes} probes and {plan.ooms} out-of-memory error{'s' * (plan.ooms != 1)}"
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
